"""Cross-traffic: bulk TCP flows between hosts of a fat-tree on which no worker runs.

On each leaf switch one such host sends to the host of the next leaf switch and receives from that
of the previous one, so every trunk carries the same load in both directions. Packets are unmarked
(best effort), like those of other jobs on a shared network. All hosts share this machine's
processors, so the kernel paces each connection (``SO_MAX_PACING_RATE``), pages are sent without a
copy (``sendfile``), and receivers discard data unread (``MSG_TRUNC``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wingbeat_lab.lab import counters
from wingbeat_lab.lab.plan import Host, NetworkPlan
from wingbeat_lab.lab.spec import LabSpec

PORT = 29600
"""Any port is free in a host's own network namespace."""
LOOK_S = 0.1
"""Seconds between two readings of the counters."""
MEET_S = 30.0
"""Seconds to wait until the peer listens."""
PIECE = 1 << 20
WAKE = 1 << 18
"""Bytes that must be available before a receiver wakes up."""
SO_MAX_PACING_RATE = 47
"""The Linux constant that Python's ``socket`` lacks."""

_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from wingbeat_lab.lab.cross import main; main()"
)


class Sample(NamedTuple):
    """The state of one receiving host at one time.

    Attributes:
        when: seconds of the machine's monotonic clock.
        bytes: received on all interfaces since the lab was created, by the kernel's counters.
        cpu_s: CPU seconds of the host's generator.
    """

    when: float
    bytes: int
    cpu_s: float

    @classmethod
    def read(cls, line: str) -> Sample:
        """Parse a generator's output line; ValueError if it has another form."""
        values = json.loads(line)
        if not isinstance(values, list) or len(values) != 3:
            raise ValueError(line)
        return cls(*values)


def commands(plan: NetworkPlan, spec: LabSpec) -> Iterator[tuple[Host, list[str]]]:
    """Yield each host of cross-traffic and the command of its generator."""
    others = plan.hosts[len(plan.hosts) - plan.others :]
    for number, host in enumerate(others):
        after = others[(number + 1) % len(others)]
        job = {
            "own": [i.address for i in host.interfaces],
            "to": [i.address for i in after.interfaces],
            "name": after.name,
            "flows": spec.cross_flows,
            "rate": spec.cross,
        }
        source = str(Path(__file__).parents[2])
        yield host, [sys.executable, "-I", "-S", "-c", _CODE, source, json.dumps(job)]


def main() -> None:
    """Send and receive until killed; print a `Sample` every tenth of a second."""
    job: dict[str, Any] = json.loads(sys.argv[2])
    page = os.memfd_create("wingbeat-cross")
    os.ftruncate(page, PIECE)
    for address in job["own"]:
        listener = socket.create_server((address, PORT), family=_family(address), backlog=128)
        _thread(_receive_all, listener)
    for address in job["to"]:
        for _ in range(job["flows"]):
            pace = max(1, job["rate"] // 8 // job["flows"])
            _thread(_send, address, job["name"], pace, page)
    while True:
        received = sum(i.rx_bytes for name, i in counters.read().items() if name != "lo")
        used = os.times()
        print(json.dumps([time.monotonic(), received, used.user + used.system]), flush=True)
        time.sleep(LOOK_S)


def _send(address: str, name: str, bytes_per_s: int, page: int) -> None:
    with _connect(address, name) as flow:
        flow.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_s))
        while True:
            os.sendfile(flow.fileno(), page, 0, PIECE)


def _connect(address: str, name: str) -> socket.socket:
    deadline = time.monotonic() + MEET_S
    while True:
        flow = socket.socket(_family(address))
        with contextlib.suppress(OSError):
            flow.settimeout(max(0.1, deadline - time.monotonic()))
            flow.connect((address, PORT))
            flow.settimeout(None)
            return flow
        flow.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} ({address}) did not listen within {MEET_S:g} s")
        time.sleep(0.05)  # the peer may not have started


def _receive_all(listener: socket.socket) -> None:
    while True:
        flow, _ = listener.accept()
        flow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE)
        _thread(_drop, flow)


def _drop(flow: socket.socket) -> None:
    room = bytearray(PIECE)
    while flow.recv_into(room, PIECE, socket.MSG_TRUNC):
        pass
    raise ConnectionError("the host before closed a flow")


def _thread(work: Callable[..., None], *args: Any) -> None:
    """Run a thread whose failure ends the process."""

    def run() -> None:
        try:
            work(*args)
        except OSError as err:
            print(err, flush=True)
            os._exit(1)

    threading.Thread(target=run, daemon=True).start()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
