"""A training run beside 100,000 hostile connections: all must be refused, the run unaffected.

    python benchmarks/hostile.py --json out/hostile.json

Two workers train with `AllReduce` and each has two mailboxes open, one unencrypted and one
encrypted, over which they exchange a message in each iteration. A third process connects to the
ports of rank 0 during every second half of the run, those of both mailboxes and of the collectives:
it holds connections without a byte, and sends random bytes, handshakes that are cut short, have a
wrong key or name no member, and those of another program. After each half, rank 1 sends messages of
all protocols in which words are changed; rank 0 parses them by each protocol's schema.
``make hostile`` sends frames that an authenticated process may send.

Limits: every connection is refused, those of mailboxes are counted, every legitimate message
arrives once, each changed message is refused by its schema or is another valid one, the weights are
those of a run without an attack, the median iteration is at most 2% longer than in the halves
without, and neither memory nor descriptors of rank 0 grow.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import arrive, receive

MIB = 1 << 20


def attack(args: argparse.Namespace) -> None:
    """Make hostile connections at an even rate; a file has the target's ports."""
    target = json.loads(Path(args.target).read_text())
    chance = random.Random(args.seed)
    identity = struct.pack("<IIII", 1, 0, 0, 0)
    held: deque[socket.socket] = deque(maxlen=HELD)
    kinds: dict[str, Callable[[], bytes | None]] = {
        "no bytes": lambda: None,
        "random": lambda: b"x" + chance.randbytes(chance.randrange(1, 400)),
        "cut short": lambda: b"wingbeat" + identity[: chance.randrange(16)],
        "wrong key": lambda: b"wingbeat" + identity + chance.randbytes(64),
        "no member": lambda: b"wingbeat" + chance.randbytes(80),
        "another program": lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(60),
    }
    sent: Counter[str] = Counter()
    begin = time.monotonic()
    for n in range(args.messages):
        name = list(kinds)[n % len(kinds)]
        place = list(target)[n // 6 % len(target)]
        stranger = socket.create_connection(("127.0.0.1", target[place]), timeout=30)
        data = kinds[name]()
        if data is None:
            held.append(stranger)  # and the oldest is closed
        elif place == "collectives":
            sent["collectives, refused"] += _is_refused(stranger, data)
        else:
            stranger.sendall(data)
            stranger.close()
        if place != "collectives":
            sent[name] += 1
        elif data is not None:
            sent["collectives"] += 1
        ahead = n / args.rate - (time.monotonic() - begin)
        if ahead > 0.001:
            time.sleep(ahead)
    held.clear()
    print(json.dumps(sent), flush=True)


def _is_refused(stranger: socket.socket, data: bytes) -> bool:
    """Whether the port closes the connection and has sent nothing but its challenge."""
    answer = b""
    try:
        with stranger:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while more := stranger.recv(4096):
                answer += more
    except TimeoutError:
        return False
    except OSError:  # it was closed before the end of the data
        pass
    return len(answer) in (0, CHALLENGE)


CHALLENGE = 40
"""Bytes that a port sends to a new connection."""

HELD = 200
"""Connections that are held without a byte."""


def _changed_messages(chance: random.Random, count: int) -> Iterator[tuple[int, Any, bytes]]:
    """Kinds, ids and payloads: messages that some protocol accepts, in which words are changed."""

    def word() -> int:
        return chance.choice(
            (chance.randrange(4), chance.getrandbits(32), 1 << chance.randrange(32), 2**32 - 1)
        )

    valid: list[tuple[int, list[int], list[int]]] = []
    while len(valid) < 300:
        made = chance.randrange(1, 14), [word() for _ in range(4)], [0] * chance.randrange(4)
        if _parses(Received(made[0], tuple(made[1]), struct.pack(f"<{len(made[2])}I", *made[2]))):
            valid.append(made)
    for _ in range(count):
        kind, ids, words = chance.choice(valid)
        ids, words = list(ids), list(words)
        for _ in range(chance.randrange(1, 4)):
            part = chance.choice((ids, words))
            if part:
                part[chance.randrange(len(part))] = word()
            else:
                part += [word() for _ in range(chance.randrange(1, 12))]
        if chance.randrange(9) == 0:
            kind = word()
        payload = struct.pack(f"<{len(words)}I", *words)
        yield kind, tuple(ids), payload[: chance.choice((None, None, None, -1))]


class Received(NamedTuple):
    """What a schema parses: a received message."""

    kind: int
    ids: tuple[int, ...]
    payload: Any


def _parses(message: Any) -> int:
    """By how many protocols a message is accepted; the others must refuse it as malformed."""
    from wingbeat.methods.model_averaging import generator, pair_machine
    from wingbeat.methods.parameter_server import protocol
    from wingbeat.schema import MalformedMessage

    accepted = 0
    for each in (protocol.MESSAGES, generator.MESSAGES, pair_machine.MESSAGES):
        with contextlib.suppress(MalformedMessage):
            each.parse(message, **SIZES)
            accepted += 1
    return accepted


SIZES = {"kinds": 2, "workers": 3, "colayers": 2, "chunks": 5, "tensors": 4}
"""Of the job to which the messages belong."""


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Training:
    """A model that two workers train, and their mailboxes."""

    def __init__(self, world: Any, compute: float) -> None:
        import torch

        import wingbeat
        from wingbeat.transport.messages import open_mailbox

        self.compute, self.peer, self.count = compute, 1 - world.rank, 0
        self.boxes = {
            name: open_mailbox(
                world.store,
                world.rank,
                [0, 1],
                namespace=name,
                interfaces=["lo"],
                encrypted=name == "encrypted",
                classes=1,
            )
            for name in ("clear", "encrypted")
        }
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.model, self.optimizer = wingbeat.distribute(model, optimizer, wingbeat.AllReduce(mb=1))
        chance = torch.Generator().manual_seed(5 + world.rank)
        self.batch: Callable[[], Any] = lambda: torch.randn(16, 256, generator=chance)

    def iterate(self) -> float:
        """Train on one batch and exchange one message in each mailbox; return the seconds."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.batch()).square().mean().backward()
        time.sleep(self.compute)
        self.optimizer.step()
        for box in self.boxes.values():
            box.post(self.peer, self.count)
        for name, box in self.boxes.items():
            got = receive(box)
            assert got.kind == self.count, f"{name}: {got.kind} in place of {self.count}"
        self.count += 1
        return time.perf_counter() - begin

    def exchange_changed(self, rank: int, count: int, seed: int) -> Counter[str]:
        """Rank 1 sends messages with changed words, rank 0 parses them; returns the results."""
        found: Counter[str] = Counter()
        for box in self.boxes.values():
            if rank == 1:
                changed = _changed_messages(random.Random(seed), count)
                arrive([box.post(0, kind, data, ids=ids) for kind, ids, data in changed])
                continue
            for _ in range(count):
                accepted = _parses(receive(box))
                found["another valid message" if accepted else "refused by all schemas"] += 1
        return found

    def weights(self) -> str:
        """A digest of all parameters."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def worker(args: argparse.Namespace) -> None:
    """Train, with and without the attack in turns; rank 0 writes the figures."""
    import wingbeat

    world = wingbeat.init(timeout=120)
    training = Training(world, args.compute)
    each = int(args.seconds * 20)
    halves: dict[str, list[float]] = {"alone": [], "attacked": []}
    memory: list[int] = []
    descriptors: list[int] = []
    sent: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for _ in range(20):
        training.iterate()
    for round_ in range(args.rounds):
        halves["alone"] += [training.iterate() for _ in range(each)]
        attacker = None
        if args.attacked and world.rank == 0:
            attacker = _start_attack(args, world, training.boxes, round_)
        halves["attacked"] += [training.iterate() for _ in range(each)]
        if attacker is not None:
            sent.update(json.loads(attacker.communicate(timeout=120)[0]))
        world.exchange("attacked", 0)
        changed += training.exchange_changed(world.rank, args.changed // args.rounds // 2, round_)
        memory.append(_rss())
        descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
    if world.rank == 0:
        time.sleep(2.0)  # an unfinished handshake times out
        clear, encrypted = training.boxes["clear"], training.boxes["encrypted"]
        found = {
            "median": {name: statistics.median(values) for name, values in halves.items()},
            "iterations": training.count,
            "weights": training.weights(),
            "memory": memory,
            "descriptors": descriptors,
            "changed": changed,
            "sent": sent,
            "refused": clear.refused + encrypted.refused,
            "turned_away": clear.refused_connections + encrypted.refused_connections,
        }
        Path(args.json).write_text(json.dumps(found))
    world.exchange("done", 0)
    for box in training.boxes.values():
        box.close()
    wingbeat.release(training.model, training.optimizer)
    wingbeat.shutdown()


def _start_attack(
    args: argparse.Namespace, world: Any, boxes: Any, round_: int
) -> subprocess.Popen[str]:
    target = {name: box.info.ports[0][0] for name, box in boxes.items()}
    target["collectives"] = world.links[0].port._listeners[0].getsockname()[1]
    path = Path(args.json).with_suffix(f".target{round_}")
    path.write_text(json.dumps(target))
    words = [sys.executable, __file__, "--attack", "--target", str(path), "--seed", str(round_)]
    words += ["--messages", str(args.messages // args.rounds), "--rate", str(args.rate)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def judge(found: dict[str, Any], quiet: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """Each figure, its limit, and whether it is met."""
    sent = Counter(found["sent"])
    refused, collectives = sent.pop("collectives, refused", 0), sent.pop("collectives", 0)
    sent_to_mailboxes = sum(sent.values())
    away = sum(found["turned_away"].values())
    slower = found["median"]["attacked"] / found["median"]["alone"]
    growth = (found["memory"][-1] - found["memory"][0]) / MIB
    opened = found["descriptors"][-1] - found["descriptors"][0]
    same = found["weights"] == quiet["weights"]
    return [
        ("hostile connections to mailboxes", sent_to_mailboxes, "", True),
        (
            "refused and counted, of those",
            away / max(1, sent_to_mailboxes),
            "1",
            away == sent_to_mailboxes,
        ),
        ("hostile connections to collectives", collectives, "", True),
        ("refused, of those", refused / max(1, collectives), "1", refused == collectives),
        ("messages with changed words", sum(found["changed"].values()), "", True),
        ("frames that passed", sum(found["refused"].values()), "0", not found["refused"]),
        ("weights as without an attack", float(same), "1", same),
        ("iteration, attacked / alone", slower, "<= 1.02", slower <= 1.02),
        (
            "the same without an attack",
            quiet["median"]["attacked"] / quiet["median"]["alone"],
            "",
            True,
        ),
        ("memory from first to last round, MiB", growth, "<= 4", growth <= 4),
        ("descriptors from first to last round", opened, "<= 0", opened <= 0),
    ]


def launch(args: argparse.Namespace) -> int:
    """Run once with and once without the attack, and judge."""
    from common import show, write

    from wingbeat_lab import lab
    from wingbeat_lab.bench import machine
    from wingbeat_lab.bench.table import Printed

    found = {}
    with tempfile.TemporaryDirectory(prefix="wingbeat-hostile-") as folder:
        for name in ("quiet", "attacked"):
            path = Path(folder) / f"{name}.json"
            words = [sys.executable, __file__, "--worker", "--json", str(path)]
            words += ["--rounds", str(args.rounds), "--seconds", str(args.seconds)]
            words += ["--messages", str(args.messages), "--rate", str(args.rate)]
            words += ["--changed", str(args.changed)]
            words += [
                "--compute",
                str(args.compute),
                *(["--attacked"] if name == "attacked" else []),
            ]
            ended = lab.run(
                "loopback:2", words, on_line=lambda rank, line: print(f"[{rank}] {line}")
            )
            if ended.exit_code:
                return ended.exit_code
            found[name] = json.loads(path.read_text())
    rows = judge(found["attacked"], found["quiet"])
    report = {"machine": machine.describe(), "versions": machine.versions(), **found, "rows": rows}
    cells = [
        (what, f"{value:.4f}", asked, "" if ok else "MISSED") for what, value, asked, ok in rows
    ]
    attacked = found["attacked"]
    notes = [f"refused: {attacked['turned_away']}", f"changed messages: {attacked['changed']}"]
    columns = ("figure", "value", "asked", "")
    show(report, Printed.of("a training run beside hostile connections", columns, cells, notes))
    write(args.json, report)
    return int(not all(ok for *_, ok in rows))


def main() -> int:
    """Parse the command line; inside the run, act as a worker or as the attacker."""
    from common import at_least_one

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=at_least_one, default=100_000)
    parser.add_argument("--changed", type=at_least_one, default=200_000, help="messages of rank 1")
    parser.add_argument("--rate", type=float, default=2000.0, help="hostile connections a second")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="about, of half a round")
    parser.add_argument("--compute", type=float, default=0.04, help="seconds slept in an iteration")
    parser.add_argument("--json", type=Path, default=Path("out/hostile.json"))
    for name in ("worker", "attack", "attacked"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        attack(args)
        return 0
    if args.worker:
        worker(args)
        return 0
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
