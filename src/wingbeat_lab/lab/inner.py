"""The process inside the lab: builds the network, runs the workers, answers queries.

:mod:`wingbeat_lab.lab.launch` starts it. The first line of its input is the job as JSON. The input
then stays open: the line ``stop`` ends the workers, other lines are faults, and the end of the
input (the launcher has exited) ends the lab. Its output has one JSON event per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from wingbeat.errors import UsageError, WingbeatError
from wingbeat_lab.lab import counters, cross, kernel
from wingbeat_lab.lab.network import Network
from wingbeat_lab.lab.script import FailEvent, parse_script
from wingbeat_lab.lab.spec import LabSpec
from wingbeat_lab.lab.supervise import Supervisor

MASTER_PORT = 29500
"""Any port is free in a private network namespace; a loopback lab chooses one."""


def worker_environment(
    base: Mapping[str, str], spec: LabSpec, rank: int, per_host: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment of worker ``rank``; each host has ``per_host`` consecutive ranks.

    The lab always sets ranks and the master address; it sets threads and interfaces only where
    ``base`` does not.
    """
    host, local = divmod(rank, per_host)
    names = ",".join(f"eth{k}" for k in range(spec.rails)) if spec.shaped else "lo"
    defaults = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": names,
        "NCCL_SOCKET_IFNAME": names,
    }
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.hosts * per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(host),
        "NODE_RANK": str(host),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "WINGBEAT_LAB": spec.to_text(),
    }
    # An outer torchrun would make torch use its agent's store, which is outside the lab.
    kept = {k: v for k, v in base.items() if k != "TORCHELASTIC_USE_AGENT_STORE"}
    return {**defaults, **kept, **own}


INPUT, OUTPUT = 0, 1


class Lab:
    """One job in one lab, as ``launch`` described it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.spec = LabSpec.parse(job["spec"])
        self.job = job
        self.per_host: int = job["per_host"]
        self.own_proc, self._input = False, b""
        self.network: Network | None = None
        self.supervisor = Supervisor(emit, grace=job["grace"], namespaced=self.spec.shaped)

    def run(self) -> None:
        """Build the lab, run the job to its end, report the result."""
        try:
            self._prepare()
            self._serve()
            self._start()
            self.supervisor.run()
            emit({"event": "done", "stats": self.stats().to_json()})
        finally:
            self.supervisor.clean_up()

    def stats(self) -> counters.LabStats:
        """Return all counters; for loopback those of this machine's ``lo``, which is shared."""
        if self.network is not None:
            return self.network.stats()
        lo = {"lo": counters.PortStats(counters.read()["lo"])}
        return counters.LabStats(self.spec.to_text(), {"localhost": lo})

    def _prepare(self) -> None:
        if not self.spec.shaped:
            return
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each host is an open file
        with contextlib.suppress(OSError):  # containers that mask /proc refuse a new one
            kernel.mount("proc", "/proc", "proc")
            self.own_proc = True
        self.network = Network(self.spec)

    def _serve(self) -> None:
        os.set_blocking(INPUT, False)
        self.supervisor.watch(INPUT, self._read_input)
        listener = socket.socket(fileno=self.job["listener"])
        listener.setblocking(False)
        self.supervisor.watch(listener, lambda: self._answer(listener))
        if self.job["timeout"] is not None:
            self.supervisor.after(self.job["timeout"], self._time_out)

    def _start(self) -> None:
        base: dict[str, str] = self.job["env"]
        master = ("127.0.0.1", self.job["port"])
        if self.network is not None:
            master = (self.network.plan.hosts[0].address, MASTER_PORT)
        world = self.spec.hosts * self.per_host
        environments = [
            worker_environment(base, self.spec, rank, self.per_host, master)
            for rank in range(world)
        ]
        self._start_cross()
        self.supervisor.start(self.job["command"], environments, self._enter)
        emit({"event": "started"})
        for event in parse_script(self.job["fail"], self.spec, self.per_host):
            self.supervisor.after(event.at, self._fault(event))

    def _start_cross(self) -> None:
        """Start the cross-traffic; a generator that ends is an error of the lab."""
        if self.network is None or not self.spec.cross:
            return
        for host, command in cross.commands(self.network.plan, self.spec):
            last = ["no output"]

            def on_line(line: str, name: str = host.name, last: list[str] = last) -> None:
                try:
                    emit({"event": "cross", "host": name, "sample": cross.Sample.read(line)})
                except ValueError:
                    last[0] = line

            def ended(code: int, name: str = host.name, last: list[str] = last) -> None:
                text = f"cross-traffic on {name} ended with exit code {code}: {last[0]}"
                emit({"event": "error", "kind": "lab", "text": text})

            self.supervisor.start_beside(host.index, command, self.network.enter, on_line, ended)

    def _enter(self, rank: int) -> None:
        if self.network is not None:
            self.network.enter(rank // self.per_host)

    def _read_input(self) -> None:
        data = os.read(INPUT, 4096)
        if not data:
            self.abandon()
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            if line == b"stop":
                self.supervisor.stop()
            else:
                for event in parse_script(line.decode(), self.spec, self.per_host):
                    self._fault(event)()

    def abandon(self) -> NoReturn:
        """End everything at once, without a report: the launcher has exited."""
        self.supervisor.clean_up()
        os._exit(1)

    def _time_out(self) -> None:
        emit({"event": "timeout"})
        self.supervisor.stop()

    def _answer(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as client:
            client.settimeout(1.0)
            reply = {"command": self.job["command"], "stats": self.stats().to_json()}
            client.sendall(json.dumps(reply).encode())

    def _fault(self, event: FailEvent) -> Callable[[], None]:
        def happen() -> None:
            emit({"event": "fault", "text": event.to_text()})
            if event.action == "kill":
                self._kill(event.host, event.part)
            elif self.network is not None and event.action == "rate":
                self.network.set_rate(event.host, event.part, event.rate)
            elif self.network is not None:
                self.network.set_link(event.host, event.part, event.action == "up")

        return happen

    def _kill(self, host: int, local: int | None) -> None:
        first = host * self.per_host
        ranks = range(first, first + self.per_host) if local is None else [first + local]
        for worker in self.supervisor.running:
            if worker.rank in ranks:
                self.supervisor.signal_worker(worker, signal.SIGKILL)
        if self.network is not None and self.own_proc and local is None:
            for pid in self.network.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def emit(event: dict[str, Any]) -> None:
    """Send an event to the launcher; end the lab if the launcher has exited."""
    data = json.dumps(event).encode() + b"\n"
    try:
        while data:
            data = data[os.write(OUTPUT, data) :]
    except BrokenPipeError:
        os._exit(1)


def read_job() -> dict[str, Any]:
    """Read the job line, leaving the input after it unread."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(INPUT, 1)
        if not data:
            sys.exit(1)
        line += data
    job: dict[str, Any] = json.loads(line)
    return job


def main() -> None:
    """Entry point of the inner process."""
    try:
        lab = Lab(read_job())
        # The kernel sends it when a loopback's launcher dies; it kills a namespaced lab outright.
        signal.signal(signal.SIGTERM, lambda *_: lab.abandon())
        lab.run()
    except WingbeatError as err:
        kind = "usage" if isinstance(err, UsageError) else "lab"
        emit({"event": "error", "kind": kind, "text": str(err)})
        sys.exit(1)


if __name__ == "__main__":  # pragma: no cover - run in a child
    main()
