"""The message layer compared with bare TCP sockets, in one run.

    python benchmarks/messages.py --json out/messages.json

Five cases; exit code 1 if a limit is missed. The ways of sending take turns in each round, in one
order and then in the other, and a ratio is the median of the rounds' ratios: other load on the
machine varies between rounds by more than the ways differ, and less between two neighbours. The CPU
time of both processes, all threads, hardly depends on other load, and is shown as well.

stream   1 MiB messages between two processes on loopback: bytes per second until the
         receiver's answer. Limits: 0.7 of bare TCP without encryption; 0.55 s of processor for a
         GB with it.
trip     64 bytes, round trip. Limit: 1.2 times bare TCP's.
line     1 MiB messages on star:2@1gbit, as a share of the line rate. Limit: 0.92.
urgent   an urgent message of 1 MiB that is posted behind 24 MiB of bulk on star:2@1gbit,prio=2:
         its time over the time that it takes alone. Limit: 1.15.
meeting  24 MiB from one host and 48 MiB from another to the port of a third, on
         star:3@1gbit,prio=2 (Geryon's Fig. 5: two servers, one worker): the time of the former
         over the time that they take alone, in one class, where only senders have priorities, and
         in an urgent class. Limit of the latter: 1.15.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import arrive, receive

MIB = 1 << 20
PORT = 45_123
LABS = {
    "stream": "loopback:2",
    "trip": "loopback:2",
    "line": "star:2@1gbit",
    "urgent": "star:2@1gbit,prio=2",
    "meeting": "star:3@1gbit,prio=2",
}
LINE = 1e9 / 8
BULK = 24


class Tcp:
    """Bare sockets: what the kernel allows."""

    def __init__(self, rank: int, host: str) -> None:
        if rank == 0:
            with socket.create_server(("", PORT)) as server:
                self.socket = server.accept()[0]
        else:
            self.socket = _connected(host)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray(MIB)

    def send(self, count: int, payload: bytes) -> None:
        for _ in range(count):
            self.socket.sendall(payload)
        self._read(1)

    def take(self, count: int, nbytes: int) -> None:
        for _ in range(count):
            self._read(nbytes)
        self.socket.sendall(b"!")

    def trip(self, count: int, payload: bytes, first: bool) -> None:
        for _ in range(count):
            if first:
                self.socket.sendall(payload)
                self._read(len(payload))
            else:
                self._read(len(payload))
                self.socket.sendall(payload)

    def _read(self, nbytes: int) -> None:
        view = memoryview(self.buffer)[:nbytes]
        while view:
            view = view[self.socket.recv_into(view) :]

    def close(self) -> None:
        self.socket.close()


class Mail:
    """wingbeat's mailbox."""

    def __init__(self, world: Any, room: str, encrypted: bool, classes: int = 1) -> None:
        from wingbeat.transport.messages import open_mailbox

        self.peer = 1 - world.rank
        self.box = open_mailbox(
            world.store,
            world.rank,
            range(world.size),
            namespace=room,
            encrypted=encrypted,
            classes=classes,
        )

    def send(self, count: int, payload: bytes) -> None:
        for _ in range(count):
            self.box.post(self.peer, 1, payload)
        receive(self.box)

    def take(self, count: int, nbytes: int) -> None:
        for _ in range(count):
            assert len(receive(self.box).payload) == nbytes
        self.box.post(self.peer, 2)

    def trip(self, count: int, payload: bytes, first: bool) -> None:
        box, peer = self.box, self.peer
        for _ in range(count):
            if first:
                box.post(peer, 1, payload)
                receive(box)
            else:
                box.post(peer, 1, receive(box).payload)

    def close(self) -> None:
        self.box.close()


def _connected(host: str) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, PORT), timeout=30)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def stream(world: Any, args: argparse.Namespace, host: str) -> dict[str, Any]:
    """Bytes per second of each way of sending."""
    ways: dict[str, Any] = {"tcp": Tcp(world.rank, host)}
    ways["mailbox"] = Mail(world, "clear", encrypted=False)
    ways["mailbox, encrypted"] = Mail(world, "encrypted", encrypted=True)
    payload = bytes(MIB)
    count = max(8, int(args.mib))

    def once(way: Any) -> float:
        world.exchange("go", 0)
        begin = time.perf_counter()
        if world.rank:
            way.send(count, payload)
        else:
            way.take(count, MIB)
        return count * MIB / (time.perf_counter() - begin)

    return _rounds(world, ways, once, args.rounds, lambda: [way.close() for way in ways.values()])


def trip(world: Any, args: argparse.Namespace, host: str) -> dict[str, Any]:
    """Round-trip seconds of 64 bytes."""
    ways: dict[str, Any] = {"tcp": Tcp(world.rank, host)}
    ways["mailbox"] = Mail(world, "clear", encrypted=False)
    ways["mailbox, encrypted"] = Mail(world, "encrypted", encrypted=True)

    def once(way: Any) -> float:
        world.exchange("go", 0)
        begin = time.perf_counter()
        way.trip(args.trips, bytes(64), world.rank == 0)
        return (time.perf_counter() - begin) / int(args.trips)

    return _rounds(world, ways, once, args.rounds, lambda: [way.close() for way in ways.values()])


def urgent(world: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the post of an urgent message to its arrival, alone and behind bulk."""
    mail = Mail(world, "urgent", encrypted=False, classes=2)
    ways = {"alone": 0, "behind bulk": BULK}

    def once(bulk: int) -> float:
        world.exchange("go", 0)
        if world.rank == 1:
            _send_urgent(mail.box, bulk)
            return 0.0
        return _take_both(mail.box, bulk, 1)

    return _rounds(world, ways, once, args.rounds, mail.close)


def _send_urgent(box: Any, bulk: int) -> None:
    """Fill the link with bulk, then post the urgent message with its time."""
    payload = bytes(MIB)
    posted = [box.post(0, 1, payload, urgency=1) for _ in range(bulk)]
    if bulk:
        time.sleep(0.02)  # the bulk fills the link
    stamp = time.monotonic_ns()
    ids = (stamp >> 32, stamp & 0xFFFFFFFF, 0, 0)
    posted.append(box.post(0, 2, payload, ids=ids, urgency=0))
    arrive(posted)


def meeting(world: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until all of one host's messages arrive, alone and with another host's."""
    mail = Mail(world, "meeting", encrypted=False, classes=2)
    ways = {"alone": (0, 0), "one class": (2 * BULK, 1), "two classes": (2 * BULK, 0)}

    def once(way: tuple[int, int]) -> float:
        bulk, urgency = way
        world.exchange("go", 0)
        if world.rank == 0:
            return _take_both(mail.box, bulk, BULK)
        if world.rank == 1:
            arrive([mail.box.post(0, 1, bytes(MIB), urgency=1) for _ in range(bulk)])
            return 0.0
        if bulk:
            time.sleep(0.02)  # the other's fill the port
        stamp = time.monotonic_ns()
        ids = (stamp >> 32, stamp & 0xFFFFFFFF, 0, 0)
        payload = bytes(MIB)
        arrive([mail.box.post(0, 2, payload, ids=ids, urgency=urgency) for _ in range(BULK)])
        return 0.0

    return _rounds(world, ways, once, max(3, args.rounds // 2), mail.close)


def _take_both(box: Any, bulk: int, count: int) -> float:
    """Return the time of those of kind 2 since the first's post; all read the same clock."""
    seconds = 0.0
    for _ in range(bulk + count):
        message = receive(box)
        if message.kind == 2:
            sent = message.ids[0] << 32 | message.ids[1]
            seconds = (time.monotonic_ns() - sent) / 1e9
    return seconds


def _rounds(
    world: Any,
    ways: dict[str, Any],
    once: Callable[[Any], float],
    rounds: int,
    close: Callable[[], object],
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in ways}
    used = dict.fromkeys(ways, 0.0)
    for way in ways.values():
        once(way)
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            before = time.process_time()
            samples[name].append(once(ways[name]))
            used[name] += (time.process_time() - before) / rounds
    close()
    both = world.exchange("processor", used)
    return {
        name: {
            "median": statistics.median(values),
            "rounds": values,
            "processor_s": sum(of[name] for of in both),
        }
        for name, values in samples.items()
    }


def worker(args: argparse.Namespace) -> None:
    """One of the processes; rank 0 writes its measurements."""
    import wingbeat

    world = wingbeat.init(timeout=60)
    host = "127.0.0.1" if args.case in ("stream", "trip") else "h0"
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "stream": lambda: stream(world, args, host),
        "line": lambda: stream(world, args, host),
        "trip": lambda: trip(world, args, host),
        "urgent": lambda: urgent(world, args),
        "meeting": lambda: meeting(world, args),
    }
    found = cases[args.case]()
    if world.rank == 0:
        Path(args.json).write_text(json.dumps(found))
    world.exchange("done", 0)
    wingbeat.shutdown()


def judge(args: argparse.Namespace, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each figure with its limit; None where there is none."""
    rows = []

    def row(what: str, value: float, limit: float | None, at_least: bool = True) -> None:
        ok = limit is None or (value >= limit if at_least else value <= limit)
        rows.append({"what": what, "value": round(value, 4), "limit": limit, "ok": ok})

    def each(case: str, key: str, what: str, factor: float, limit: float | None = None) -> None:
        for name, way in found[case].items():
            row(f"{case}, {name}: {what}", way[key] * factor, limit if "mail" in name else None)

    def ratio(case: str, a: str, b: str) -> float:
        pairs = zip(found[case][a]["rounds"], found[case][b]["rounds"], strict=True)
        return float(statistics.median(one / other for one, other in pairs))

    if "stream" in found:
        each("stream", "median", "GB/s", 1e-9)
        per_gb = 1e9 / (args.mib * MIB)
        each("stream", "processor_s", "s of processor a GB", per_gb)
        used = found["stream"]["mailbox, encrypted"]["processor_s"] * per_gb
        row("stream, encrypted: s of processor a GB", used, 0.55, at_least=False)
        row("stream, mailbox / tcp", ratio("stream", "mailbox", "tcp"), 0.7)
        encrypted = found["stream"]["mailbox, encrypted"]["median"]
        row("stream, encrypted: GB/s", encrypted / 1e9, 1.25)
    if "trip" in found:
        each("trip", "median", "us", 1e6)
        each("trip", "processor_s", "us of processor", 1e6 / args.trips)
        row("trip, mailbox / tcp", ratio("trip", "mailbox", "tcp"), 1.2, at_least=False)
        row("trip, encrypted / tcp", ratio("trip", "mailbox, encrypted", "tcp"), None)
    if "line" in found:
        each("line", "median", "of the rate", 1 / LINE, 0.92)
    if "urgent" in found:
        each("urgent", "median", "ms", 1e3)
        row("urgent / alone", ratio("urgent", "behind bulk", "alone"), 1.15, at_least=False)
    if "meeting" in found:
        each("meeting", "median", "ms", 1e3)
        row("meeting, one class / alone", ratio("meeting", "one class", "alone"), None)
        urgent_ = ratio("meeting", "two classes", "alone")
        row("meeting, two classes / alone", urgent_, 1.15, at_least=False)
    return rows


def launch(args: argparse.Namespace) -> int:
    """Run each case on its lab, print a table, and judge it."""
    from common import refuse_unwritable, show, write

    from wingbeat_lab import lab
    from wingbeat_lab.bench import machine
    from wingbeat_lab.bench.table import Printed

    refuse_unwritable(args.json)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="wingbeat-messages-") as folder:
        for case in args.cases:
            print(f"{case}: {LABS[case]}", file=sys.stderr)
            path = Path(folder) / f"{case}.json"
            words = [sys.executable, __file__, "--worker", "--case", case, "--json", str(path)]
            loopback = LABS[case].startswith("loopback")
            rounds = args.rounds if loopback else max(3, args.rounds // 3)
            words += ["--rounds", str(rounds), "--trips", str(args.trips)]
            words += ["--mib", str(args.mib if loopback else 32)]
            ended = lab.run(LABS[case], words, on_line=lambda rank, line: print(f"[{rank}] {line}"))
            if ended.exit_code:
                return ended.exit_code
            found[case] = json.loads(path.read_text())
    rows = judge(args, found)
    report = {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "found": found,
        "rows": rows,
    }
    cells = [
        (
            row["what"],
            f"{row['value']:.3f}",
            "" if row["limit"] is None else f"{row['limit']:g}{'' if row['ok'] else ' (missed)'}",
        )
        for row in rows
    ]
    show(report, Printed.of("messages", ("what", "value", "limit"), cells))
    write(args.json, report)
    return int(not all(row["ok"] for row in rows))


def main() -> int:
    """Parse the command line; inside the lab, act as a worker."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(LABS), choices=list(LABS))
    parser.add_argument("--rounds", type=int, default=21, help="on loopback; a third on links")
    parser.add_argument("--mib", type=int, default=256, help="of a stream's round on loopback")
    parser.add_argument("--trips", type=int, default=2000, help="of a round")
    parser.add_argument("--json", type=Path, default=Path("out/messages.json"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
