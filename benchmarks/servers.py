"""One parameter server on loopback: the speed of its sums, and its memory.

    python benchmarks/servers.py --json out/servers.json

Three cases; exit code 1 if a limit is missed. Compared alternatives take turns in each round, in
one order and then in the other, and a ratio is the median of the rounds' ratios.

push    Workers, each a process, push slices of the default size to a server, and to a process that
        receives the same messages and drops them; both unencrypted and encrypted. Limit: the server
        sums 0.7 of the bytes per second that the message layer delivers to the other.
sum     A server's work on pushed slices, compared with torch's `copy_` and `add_` on the same sizes
        with one thread. Limit: 0.8 for each dtype.
memory  Of the servers of `push`, in addition to that after the rendezvous with all workers: when
        workers are even, and when rank 0 is late. Limit: twice the shards, and the window
        (`wingbeat.methods.parameter_server.server.limits_of`) of each flow to the server.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from common import receive, refuse_unwritable, show, write

from wingbeat.methods.parameter_server.protocol import Kind, pack_route
from wingbeat.methods.parameter_server.server import ServerConfig, limits_of
from wingbeat.parts import Servers
from wingbeat.transport.services import PipeStore, answer_request
from wingbeat_lab.bench.table import Printed

MIB = 1 << 20
PATIENCE = 60.0
CLASSES = 2
SMALL = 4096
"""Bytes of the last slice of each class: its sum implies that the class is complete."""

WAYS = ("server", "sink", "server, encrypted", "sink, encrypted")
LATE = 2.0
"""Seconds by which rank 0 is late."""


def slices_of(mib: int) -> list[tuple[int, int]]:
    """Return start and stop of each slice, in bytes; the last of each class is small."""
    size, found, start = 4 * Servers().slice, [], 0
    for each in [size] * max(CLASSES, mib * MIB // size) + [SMALL] * CLASSES:
        found.append((start, start + each))
        start += each
    return found


def config_of(way: str, workers: int, mib: int) -> ServerConfig:
    """Return the configuration of the process behind ``way``."""
    return ServerConfig(
        room=way.replace(", ", "-"),
        index=0,
        ranks=tuple(range(workers)),
        hosts=(0,),
        interfaces=("lo",),
        classes=CLASSES,
        encrypted="encrypted" in way,
        timeout=PATIENCE,
        max_sum_bytes=8 * mib * MIB + 64 * MIB,
        order="ready",
    )


# -- the processes ------------------------------------------------------------------------


def sink(text: str) -> None:
    """Receive and drop the workers' pushes; answer the pulls of a slice when all have arrived."""
    config = ServerConfig.from_json(text)
    store = PipeStore(sys.stdout, sys.stdin)
    box = config.open(store, config.workers + config.index, range(config.workers))
    store.ready()
    pulls: dict[int, list[Any]] = {}
    parent = os.getppid()
    while len(box.left) < config.workers and os.getppid() == parent:
        message = box.next(0.25)
        while message is not None:
            if message.kind == Kind.PULL:
                waiting = pulls.setdefault(message.ids[1], [])
                waiting.append(message)
                if len(waiting) == config.workers:
                    for each in pulls.pop(message.ids[1]):
                        urgency = each.urgency
                        box.post(each.peer, Kind.SUM, bytes(SMALL), ids=each.ids, urgency=urgency)
            message = box.poll()
    box.close()


def sender(rank: int, workers: int, mib: int) -> None:
    """Push on request, and report begin and end."""
    import numpy as np

    from wingbeat.transport.messages import open_mailbox

    store = PipeStore(sys.stdout, sys.stdin)
    limits = limits_of(workers, CLASSES, PATIENCE)
    boxes = {}
    for way in WAYS:
        config = config_of(way, workers, mib)
        boxes[way] = open_mailbox(
            store, rank, [workers], namespace=config.room, interfaces=["lo"], classes=CLASSES,
            encrypted=config.encrypted, limits=limits, seconds=PATIENCE,
        )  # fmt: skip
    store.ready()
    parts = slices_of(mib)
    values = np.random.default_rng(rank).standard_normal(parts[-1][1] // 4).astype("f4")
    memory = values.data.cast("B")
    for line in sys.stdin:
        way, number, late = json.loads(line)
        time.sleep(late)
        begin = time.monotonic()
        push(boxes[way], workers, [memory[a:b] for a, b in parts], number)
        print(json.dumps([begin, time.monotonic()]), flush=True)
    for box in boxes.values():
        box.close()


def push(box: Any, server: int, parts: list[memoryview], number: int) -> None:
    """Push all slices, alternating between classes; wait for the last."""
    last = range(len(parts) - CLASSES, len(parts))
    for n, part in enumerate(parts):
        urgency = n % CLASSES
        ids = (0, n, number, pack_route(urgency, n))
        fields = {"ids": ids, "urgency": urgency, "seconds": PATIENCE}
        box.post(server, Kind.PUSH, part, dtype="float32", **fields)
        if n in last:
            box.post(server, Kind.PULL, **fields)
    for _ in last:
        while (message := receive(box, PATIENCE)).kind == Kind.PING:
            pass
        assert message.kind == Kind.SUM, (message.kind, bytes(message.payload))
        assert len(message.payload) == SMALL


class Child:
    """A child process, which gets the addresses of the others from this one."""

    def __init__(self, words: list[str], store: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.helper = threading.Thread(target=self._help, args=(store,), daemon=True)
        self.helper.start()

    def _help(self, store: Any) -> None:
        last = False
        while not last:
            line = self.process.stdout.readline()  # type: ignore[union-attr]
            if not line:
                return
            text, last = answer_request(line, store)
            self.tell(text)

    def tell(self, text: str) -> None:
        self.process.stdin.write(text + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def hear(self) -> Any:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"a worker has ended with exit status {self.process.wait()}")
        return json.loads(line)

    def memory(self, what: str) -> int:
        """Return bytes of resident memory: now (``VmRSS``), or the maximum so far (``VmHWM``)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split(f"{what}:")[1].split()[0])

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.stdout.close()  # type: ignore[union-attr]


class Job:
    """Servers, sinks and workers."""

    def __init__(self, workers: int, mib: int) -> None:
        from wingbeat.transport.loopback import Switchboard

        store = Switchboard()
        self.receivers, self.mib = {}, mib
        for way in WAYS:
            text = config_of(way, workers, mib).to_json()
            module = ["-m", "wingbeat.methods.parameter_server"]
            own = module if "server" in way else [__file__, "--sink"]
            self.receivers[way] = Child([*own, text], store)
        self.senders = [
            Child([__file__, "--sender", json.dumps([rank, workers, mib])], store)
            for rank in range(workers)
        ]
        for child in (*self.receivers.values(), *self.senders):
            child.helper.join(PATIENCE)
        self.met = {way: child.memory("VmRSS") for way, child in self.receivers.items()}
        self.rounds = dict.fromkeys(WAYS, 0)

    def once(self, way: str, late: float = 0.0) -> float:
        """Have all push once; return bytes per second of all together."""
        for rank, child in enumerate(self.senders):
            child.tell(json.dumps([way, self.rounds[way], 0.0 if rank else late]))
        self.rounds[way] += 1
        begins, ends = zip(*(child.hear() for child in self.senders), strict=True)
        nbytes = slices_of(self.mib)[-1][1] * len(self.senders)
        return float(nbytes / (max(ends) - min(begins)))

    def grown(self, way: str) -> int:
        """Maximum memory of a server, in addition to that after its rendezvous, in bytes."""
        return self.receivers[way].memory("VmHWM") - self.met[way]

    def close(self) -> None:
        for child in (*self.senders, *self.receivers.values()):
            child.close()


# -- measurements -------------------------------------------------------------------------


def pushes(workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes per second of each way, and the servers' memory."""
    job = Job(workers, args.mib)
    try:
        for way in WAYS:
            job.once(way)
        used = {way: _used(job, way) for way in WAYS}
        samples = alternate({way: functools.partial(job.once, way) for way in WAYS}, args.rounds)
        used = {way: _used(job, way) - before for way, before in used.items()}
        servers = [way for way in WAYS if "server" in way]
        even = {way: job.grown(way) for way in servers}
        for way in servers:
            job.once(way, LATE)
        late = {way: job.grown(way) for way in servers}
    finally:
        job.close()
    window = workers * CLASSES * limits_of(workers, CLASSES, PATIENCE).window
    return {
        "bytes_a_second": samples,
        "processor_s": used,
        "shards": slices_of(args.mib)[-1][1],
        "window": window,
        "met": job.met,
        "even": even,
        "late": late,
    }


def _used(job: Job, way: str) -> float:
    times = psutil.Process(job.receivers[way].process.pid).cpu_times()
    return float(times.user + times.system)


def alternate(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each way once a round, in one order and then in the other."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            samples[name].append(ways[name]())
    return samples


def sums(args: argparse.Namespace, workers: int = 4) -> dict[str, dict[str, list[float]]]:
    """Pushed bytes per second of a server's arithmetic and of torch's, by dtype."""
    import torch

    torch.set_num_threads(1)
    return {
        name: alternate(
            {"server": _ours(dtype, args.mib, workers), "torch": _torchs(dtype, args.mib, workers)},
            args.rounds,
        )
        for name, dtype in (
            ("float32", torch.float32),
            ("bfloat16", torch.bfloat16),
            ("float16", torch.float16),
        )
    }


def _payloads(dtype: Any, workers: int) -> list[Any]:
    import torch

    chance = torch.Generator().manual_seed(0)
    return [torch.randn(Servers().slice, generator=chance).to(dtype) for _ in range(workers)]


def _timed(nbytes: int, work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - begin)


def _ours(dtype: Any, mib: int, workers: int) -> Callable[[], float]:
    import torch

    from wingbeat.methods.parameter_server.aggregator import Aggregator

    payloads = _payloads(dtype, workers)
    views = [memoryview(each.view(torch.uint8).numpy()).cast("B") for each in payloads]
    made = Aggregator(workers, 1 << 40)
    count = max(1, mib * MIB // len(views[0]))
    rounds: Iterator[int] = iter(range(1 << 30))
    name = str(dtype).removeprefix("torch.")

    def once() -> None:
        number = next(rounds)
        for rank, view in enumerate(views):
            for n in range(count):
                made.push(rank, (0, n), number, name, view)

    once()
    once()
    return lambda: _timed(count * sum(map(len, views)), once)


def _torchs(dtype: Any, mib: int, workers: int) -> Callable[[], float]:
    import torch

    payloads = _payloads(dtype, workers)
    count = max(1, mib * MIB // payloads[0].nbytes)
    totals = [torch.zeros(len(payloads[0])) for _ in range(2 * count)]
    results = [torch.zeros(len(payloads[0]), dtype=dtype) for _ in range(count)]

    def once() -> None:
        totals[:] = totals[count:] + totals[:count]  # as with a server: two buffers per slice
        for rank, payload in enumerate(payloads):
            for total in totals[:count]:
                if rank == 0:
                    total.copy_(payload)
                else:
                    total.add_(payload)
        if dtype is not torch.float32:
            for total, result in zip(totals, results, strict=False):
                result.copy_(total)

    once()
    return lambda: _timed(count * sum(each.nbytes for each in payloads), once)


# -- limits -------------------------------------------------------------------------------


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each figure with its limit; None where there is none."""
    rows: list[dict[str, Any]] = []

    def row(
        what: str,
        values: Sequence[float],
        limit: float | None = None,
        at_least: bool = True,
    ) -> None:
        value = statistics.median(values)
        ok = limit is None or (value >= limit if at_least else value <= limit)
        found = {"what": what, "value": round(value, 4), "limit": limit, "ok": ok}
        rows.append(found | {"least": min(values), "largest": max(values)})

    for workers, case in found["push"].items():
        speeds = case["bytes_a_second"]
        for way, values in speeds.items():
            row(f"push, {workers} workers, {way}: GB/s", [each / 1e9 for each in values])
            moved = len(values) * case["shards"] * int(workers)
            used = case["processor_s"][way] / moved * 1e9
            row(f"push, {workers} workers, {way}: CPU s a GB", [used])
        for kind in ("", ", encrypted"):
            values = ratios(speeds["server" + kind], speeds["sink" + kind])
            row(f"push, {workers} workers{kind}: server / sink", values, 0.7)
        most = (2 * case["shards"] + case["window"]) / MIB
        for when in ("even", "late"):
            for way, grown in case[when].items():
                row(f"memory, {workers} workers, {when}, {way}: MiB", [grown / MIB], most, False)
    for dtype, speeds in found.get("sum", {}).items():
        for name, values in speeds.items():
            row(f"sum, {dtype}, {name}: GB/s", [each / 1e9 for each in values])
        row(f"sum, {dtype}: server / torch", ratios(speeds["server"], speeds["torch"]), 0.8)
    return rows


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def table(rows: list[dict[str, Any]], rounds: int) -> Printed:
    cells = [
        (
            row["what"],
            f"{row['value']:.3f}",
            f"{row['least']:.3f} .. {row['largest']:.3f}" if row["least"] < row["largest"] else "",
            "" if row["limit"] is None else f"{row['limit']:g}",
            "" if row["ok"] else "MISSED",
        )
        for row in rows
    ]
    columns = ("figure", "median", "least .. largest", "limit", "")
    return Printed.of("one parameter server on loopback", columns, cells, [f"{rounds} rounds"])


def launch(args: argparse.Namespace) -> int:
    """Run the cases, print a table, and judge it."""
    from wingbeat_lab.bench import machine

    refuse_unwritable(args.json)
    found: dict[str, Any] = {"push": {}}
    if "sum" in args.cases:
        found["sum"] = sums(args)
    if "push" in args.cases:
        for workers in args.workers:
            print(f"push: {workers} workers", file=sys.stderr)
            found["push"][str(workers)] = pushes(workers, args)
    rows = judge(found)
    report = {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "found": found,
        "rows": rows,
    }
    show(report, table(rows, args.rounds))
    write(args.json, report)
    return int(not all(row["ok"] for row in rows))


def main() -> int:
    """Parse the command line; in a child process, run as that process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=["sum", "push"], choices=["sum", "push"],
        help="push measures memory as well",
    )  # fmt: skip
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=64, help="of the gradients (64)")
    parser.add_argument("--json", type=Path, default=Path("out/servers.json"))
    parser.add_argument("--sink", help=argparse.SUPPRESS)
    parser.add_argument("--sender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sink:
        sink(args.sink)
        return 0
    if args.sender:
        sender(*json.loads(args.sender))
        return 0
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
