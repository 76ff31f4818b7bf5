"""A training run under 100,000 hostile messages: all must be refused, and the run unaffected.

    python benchmarks/hostile.py --json out/hostile.json

Two workers train with `AllReduce` and each has two mailboxes open, one unencrypted and one
encrypted, over which they exchange a message in each iteration. A third process attacks both
mailboxes of rank 0 during every second half of the run: random bytes, truncated headers, replayed
frames of the workers, other versions, invalid lengths, forged sessions, and, at the encrypted
one, connections with wrong keys, without keys, and bytes that are not ZeroMQ.

Limits: everything hostile is counted, every legitimate message arrives once, the weights are those
of a run without an attack, the median iteration is at most 2% longer than in the halves without,
and the memory of rank 0 does not grow.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


def attack(args: argparse.Namespace) -> None:
    """Send the hostile messages at an even rate; a file has the targets' paths."""
    import zmq

    from wingbeat.transport.messages.frames import Header, Type

    target = json.loads(Path(args.target).read_text())
    chance = random.Random(args.seed)
    context: zmq.Context[Any] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.set_hwm(0)
    stranger.connect(target["clear"])
    data = Header(Type.DATA, target["session"], 1, 0, 1, kind=9).pack()

    def wrong_key() -> None:
        one = context.socket(zmq.DEALER)
        one.linger = 0
        one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
        one.curve_serverkey = target["key"].encode()
        _knock(one)

    def no_key() -> None:
        one = context.socket(zmq.DEALER)
        one.linger = 0
        _knock(one)

    def _knock(one: Any) -> None:
        one.handshake_ivl = 500
        one.reconnect_ivl = -1
        one.connect(target["encrypted"])
        time.sleep(0.01)
        one.close(linger=0)

    def junk() -> None:
        host, _, port = target["encrypted"].removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(chance.randbytes(200))

    def frame(parts: list[bytes]) -> None:
        stranger.send_multipart(parts)

    def absurd() -> None:
        header = Header(Type.DATA, target["session"], 1, 0, 2**63, length=2**32 - 1)
        frame([header.pack()])

    kinds = {
        "random": lambda: frame([chance.randbytes(chance.randrange(1, 200))]),
        "cut short": lambda: frame([data[: chance.randrange(1, len(data))]]),
        "replayed": lambda: frame([data]),
        "version": lambda: frame([data[:4] + b"\x02" + data[5:]]),
        "forged": lambda: frame([Header(Type.HELLO, chance.getrandbits(64), 1, 0).pack()]),
        "absurd": absurd,
    }
    connections = {"wrong key": wrong_key, "no key": no_key, "no ZeroMQ": junk}
    sent: dict[str, int] = {}
    begin = time.monotonic()
    for n in range(args.messages):
        pool = connections if n % 100 == 0 else kinds
        name = list(pool)[n // 100 % 3 if pool is connections else n % 6]
        pool[name]()
        sent[name] = sent.get(name, 0) + 1
        ahead = n / args.rate - (time.monotonic() - begin)
        if ahead > 0.001:
            time.sleep(ahead)
    stranger.close(linger=5000)
    context.term()
    print(json.dumps(sent), flush=True)


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
            got = box.receive(60.0)
            assert got.kind == self.count, f"{name}: {got.kind} in place of {self.count}"
        self.count += 1
        return time.perf_counter() - begin

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
    sent: Counter[str] = Counter()
    for _ in range(20):
        training.iterate()
    for round_ in range(args.rounds):
        halves["alone"] += [training.iterate() for _ in range(each)]
        attacker = None
        if args.attacked and world.rank == 0:
            attacker = _start_attack(args, training.boxes, round_)
        halves["attacked"] += [training.iterate() for _ in range(each)]
        if attacker is not None:
            sent.update(json.loads(attacker.communicate(timeout=120)[0]))
        world.exchange("attacked", 0)
        memory.append(_rss())
    if world.rank == 0:
        time.sleep(2.0)  # an unfinished handshake times out
        clear, encrypted = training.boxes["clear"], training.boxes["encrypted"]
        found = {
            "median": {name: statistics.median(values) for name, values in halves.items()},
            "iterations": training.count,
            "weights": training.weights(),
            "memory": memory,
            "sent": sent,
            "refused": clear.refused,
            "refused_encrypted": encrypted.refused,
            "turned_away": encrypted.refused_connections,
        }
        Path(args.json).write_text(json.dumps(found))
    world.exchange("done", 0)
    for box in training.boxes.values():
        box.close()
    wingbeat.release(training.model, training.optimizer)
    wingbeat.shutdown()


def _start_attack(args: argparse.Namespace, boxes: Any, round_: int) -> subprocess.Popen[str]:
    clear, encrypted = boxes["clear"], boxes["encrypted"]
    target = {
        "clear": clear._carrier.address.endpoints[0][0],
        "encrypted": encrypted._carrier.address.endpoints[0][0],
        "key": encrypted._carrier.address.public.decode(),
        "session": clear._endpoint.membership.sessions[1],
    }
    path = Path(args.json).with_suffix(f".target{round_}")
    path.write_text(json.dumps(target))
    words = [sys.executable, __file__, "--attack", "--target", str(path), "--seed", str(round_)]
    words += ["--messages", str(args.messages // args.rounds), "--rate", str(args.rate)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def judge(found: dict[str, Any], quiet: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """Each figure, its limit, and whether it is met."""
    sent = found["sent"]
    frames = sum(n for name, n in sent.items() if name not in CONNECTIONS)
    refused = sum(found["refused"].values())
    connections = sum(n for name, n in sent.items() if name in CONNECTIONS)
    away = sum(found["turned_away"].values())
    slower = found["median"]["attacked"] / found["median"]["alone"]
    growth = (found["memory"][-1] - found["memory"][0]) / MIB
    same = found["weights"] == quiet["weights"]
    return [
        ("hostile messages", sum(sent.values()), "100000", True),
        ("frames refused, of those sent", refused / max(1, frames), "1", refused == frames),
        (
            "connections turned away, of those",
            away / max(1, connections),
            ">= 1",
            away >= connections,
        ),
        (
            "frames that passed the keys",
            sum(found["refused_encrypted"].values()),
            "0",
            not found["refused_encrypted"],
        ),
        ("weights as without an attack", float(same), "1", same),
        ("iteration, attacked / alone", slower, "<= 1.02", slower <= 1.02),
        (
            "the same without an attack",
            quiet["median"]["attacked"] / quiet["median"]["alone"],
            "",
            True,
        ),
        ("memory from first to last round, MiB", growth, "<= 4", growth <= 4),
    ]


CONNECTIONS = ("wrong key", "no key", "no ZeroMQ")


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
    notes = [f"refused: {attacked['refused']}; turned away: {attacked['turned_away']}"]
    columns = ("figure", "value", "asked", "")
    show(report, Printed.of("a training run beside hostile messages", columns, cells, notes))
    write(args.json, report)
    return int(not all(ok for *_, ok in rows))


def main() -> int:
    """Parse the command line; inside the run, act as a worker or as the attacker."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=2000.0, help="hostile messages a second")
    parser.add_argument("--rounds", type=int, default=5)
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
