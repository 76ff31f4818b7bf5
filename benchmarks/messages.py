"""The message layer beside what it stands on: bare TCP sockets and bare pyzmq, in one run.

    python benchmarks/messages.py --json out/messages.json

Four cases, in rounds that take turns, medians over rounds; exit code 1 if a limit is missed:

stream   1 MiB messages between two processes on loopback: bytes a second until the sender knows
         that all has arrived. Limits: 0.9 of bare pyzmq, 0.7 of bare TCP, both without encryption.
trip     64 bytes there and back. Limit: 1.3 times bare pyzmq's.
line     1 MiB messages on star:2@1gbit, as a share of the line rate. Limit: 0.92.
urgent   an urgent message of 1 MiB that is posted behind 24 MiB of bulk on star:2@1gbit,prio=2:
         its time over the time that it takes alone. Limit: 1.15.
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

MIB = 1 << 20
PORT = 45_123
LABS = {
    "stream": "loopback:2",
    "trip": "loopback:2",
    "line": "star:2@1gbit",
    "urgent": "star:2@1gbit,prio=2",
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

    def _read(self, nbytes: int) -> None:
        view = memoryview(self.buffer)[:nbytes]
        while view:
            view = view[self.socket.recv_into(view) :]

    def close(self) -> None:
        self.socket.close()


class Zmq:
    """Bare pyzmq: one DEALER at each end, without copies of large messages."""

    def __init__(self, rank: int, host: str) -> None:
        import zmq

        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        if rank == 0:
            self.socket.bind(f"tcp://*:{PORT + 1}")
        else:
            self.socket.connect(f"tcp://{host}:{PORT + 1}")

    def send(self, count: int, payload: bytes) -> None:
        for _ in range(count):
            self.socket.send(payload, copy=False)
        self.socket.recv()

    def take(self, count: int, nbytes: int) -> None:
        for _ in range(count):
            assert len(self.socket.recv(copy=False).buffer) == nbytes
        self.socket.send(b"!")

    def trip(self, count: int, payload: bytes, first: bool) -> None:
        for _ in range(count):
            if first:
                self.socket.send(payload)
                self.socket.recv()
            else:
                self.socket.send(self.socket.recv())

    def close(self) -> None:
        self.context.destroy(linger=0)


class Mail:
    """wingbeat's mailbox."""

    def __init__(self, world: Any, room: str, encrypted: bool, classes: int = 1) -> None:
        from wingbeat.transport.messages import open_mailbox

        self.peer = 1 - world.rank
        self.box = open_mailbox(
            world.store, world.rank, [0, 1], room=room, encrypted=encrypted, classes=classes
        )

    def send(self, count: int, payload: bytes) -> None:
        self.box.wait([self.box.post(self.peer, 1, payload) for _ in range(count)])
        self.box.receive(60.0)

    def take(self, count: int, nbytes: int) -> None:
        for _ in range(count):
            assert len(self.box.receive(60.0).payload) == nbytes
        self.box.wait([self.box.post(self.peer, 2)])

    def trip(self, count: int, payload: bytes, first: bool) -> None:
        box, peer = self.box, self.peer
        for _ in range(count):
            if first:
                box.post(peer, 1, payload)
                box.receive(60.0)
            else:
                box.post(peer, 1, box.receive(60.0).payload)

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
    """Bytes a second of each way of sending."""
    ways: dict[str, Any] = {"tcp": Tcp(world.rank, host), "pyzmq": Zmq(world.rank, host)}
    ways["mailbox"] = Mail(world, "clear", encrypted=False)
    ways["mailbox, encrypted"] = Mail(world, "curve", encrypted=True)
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

    return _rounds(ways, once, args.rounds, lambda: [way.close() for way in ways.values()])


def trip(world: Any, args: argparse.Namespace, host: str) -> dict[str, Any]:
    """Seconds there and back of 64 bytes."""
    ways: dict[str, Any] = {"pyzmq": Zmq(world.rank, host)}
    ways["mailbox"] = Mail(world, "clear", encrypted=False)
    ways["mailbox, encrypted"] = Mail(world, "curve", encrypted=True)

    def once(way: Any) -> float:
        world.exchange("go", 0)
        begin = time.perf_counter()
        way.trip(args.trips, bytes(64), world.rank == 0)
        return (time.perf_counter() - begin) / args.trips

    return _rounds(ways, once, args.rounds, lambda: [way.close() for way in ways.values()])


def urgent(world: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the post of an urgent message to its arrival, alone and behind bulk."""
    mail = Mail(world, "urgent", encrypted=False, classes=2)
    ways = {"alone": 0, "behind bulk": BULK}

    def once(bulk: int) -> float:
        world.exchange("go", 0)
        if world.rank == 1:
            _send_urgent(mail.box, bulk)
            return 0.0
        return _take_urgent(mail.box, bulk)

    return _rounds(ways, once, args.rounds, mail.close)


def _send_urgent(box: Any, bulk: int) -> None:
    """Fill the link with bulk, then post the urgent message with its time."""
    payload = bytes(MIB)
    posted = [box.post(0, 1, payload, urgency=1) for _ in range(bulk)]
    if bulk:
        time.sleep(0.02)  # by now the bulk fills the link
    stamp = time.monotonic_ns()
    ids = (stamp >> 32, stamp & 0xFFFFFFFF, 0, 0)
    posted.append(box.post(0, 2, payload, ids=ids, urgency=0))
    box.wait(posted)


def _take_urgent(box: Any, bulk: int) -> float:
    """Return how long the urgent message took; both processes read the same clock."""
    seconds = 0.0
    for _ in range(bulk + 1):
        message = box.receive(60.0)
        if message.kind == 2:
            sent = message.ids[0] << 32 | message.ids[1]
            seconds = (time.monotonic_ns() - sent) / 1e9
    return seconds


def _rounds(
    ways: dict[str, Any], once: Callable[[Any], float], rounds: int, close: Callable[[], None]
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        once(way)
    for _ in range(rounds):
        for name, way in ways.items():
            samples[name].append(once(way))
    close()
    return {n: {"median": statistics.median(v), "rounds": v} for n, v in samples.items()}


def worker(args: argparse.Namespace) -> None:
    """One of the two processes; rank 0 writes what it has measured."""
    import wingbeat

    world = wingbeat.init(timeout=60)
    host = "127.0.0.1" if args.case in ("stream", "trip") else "h0"
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "stream": lambda: stream(world, args, host),
        "line": lambda: stream(world, args, host),
        "trip": lambda: trip(world, args, host),
        "urgent": lambda: urgent(world, args),
    }
    found = cases[args.case]()
    if world.rank == 0:
        Path(args.json).write_text(json.dumps(found))
    world.exchange("done", 0)
    wingbeat.shutdown()


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each figure with its limit; None where there is none."""
    rows = []

    def row(what: str, value: float, limit: float | None, at_least: bool = True) -> None:
        ok = limit is None or (value >= limit if at_least else value <= limit)
        rows.append({"what": what, "value": round(value, 4), "limit": limit, "ok": ok})

    median = {c: {n: v["median"] for n, v in ways.items()} for c, ways in found.items()}
    if own := median.get("stream"):
        for name, value in own.items():
            row(f"stream, {name}: GB/s", value / 1e9, None)
        row("stream, mailbox / pyzmq", own["mailbox"] / own["pyzmq"], 0.9)
        row("stream, mailbox / tcp", own["mailbox"] / own["tcp"], 0.7)
        row("stream, encrypted: GB/s", own["mailbox, encrypted"] / 1e9, 1.25)
    if own := median.get("trip"):
        for name, value in own.items():
            row(f"trip, {name}: microseconds", value * 1e6, None)
        row("trip, mailbox / pyzmq", own["mailbox"] / own["pyzmq"], 1.3, at_least=False)
        row("trip, encrypted / pyzmq", own["mailbox, encrypted"] / own["pyzmq"], None)
    if own := median.get("line"):
        for name, value in own.items():
            row(f"line, {name}: of the rate", value / LINE, 0.92 if "mail" in name else None)
    if own := median.get("urgent"):
        for name, value in own.items():
            row(f"urgent, {name}: ms", value * 1e3, None)
        row("urgent / alone", own["behind bulk"] / own["alone"], 1.15, at_least=False)
    return rows


def launch(args: argparse.Namespace) -> int:
    """Run each case on its lab, print a table, and judge it."""
    from wingbeat import lab
    from wingbeat.bench import machine

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="wingbeat-messages-") as folder:
        for case in args.cases:
            print(f"{case}: {LABS[case]}", file=sys.stderr)
            path = Path(folder) / f"{case}.json"
            words = [sys.executable, __file__, "--worker", "--case", case, "--json", str(path)]
            words += ["--rounds", str(args.rounds), "--trips", str(args.trips)]
            words += ["--mib", str(args.mib if case == "stream" else 32)]
            ended = lab.run(LABS[case], words, on_line=lambda rank, line: print(f"[{rank}] {line}"))
            if ended.exit_code:
                return ended.exit_code
            found[case] = json.loads(path.read_text())
    rows = judge(found)
    report = {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "found": found,
        "rows": rows,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))
    for row in rows:
        limit = "" if row["limit"] is None else f"  limit {row['limit']}"
        print(f"{row['what']:38} {row['value']:10.3f}{limit}{'' if row['ok'] else '  MISSED'}")
    return int(not all(row["ok"] for row in rows))


def main() -> int:
    """Parse the command line; inside the lab, act as a worker."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(LABS), choices=list(LABS))
    parser.add_argument("--rounds", type=int, default=7)
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
