"""Workers under bounded staleness that are killed, one after the other, and started again.

    python benchmarks/canary_kills.py --json out/canary_kills.json

Real processes in a lab train a network on the digits with `Canary`. Again and again any one of them
is killed (SIGKILL) at a moment that the seed says, most often amid an iteration, and started again
after a while; the others go on. The store of the rendezvous is not in a worker's process, as with
torchrun, so rank 0 may be killed too.

Judged: each time the others go on, and who comes back trains with them; the journals of all lives
stand the audit (each contribution counts once, or died with its sender); all replicas are the same
bits in the end; the loss has fallen to under a tenth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import refuse_unwritable, write

from wingbeat import lab
from wingbeat.bench import machine
from wingbeat.errors import LabError, UsageError
from wingbeat.stale.audit import Audit, audit
from wingbeat.stale.lateness import delays

PATIENCE_S = 300.0
"""For a worker to come back, and for the others to go on."""
TOGETHER = 20
"""Rounds that all train together between two kills, at least."""
LEARNT = 0.1
"""Of the loss that training began with."""
LOOK_S = 0.02


def main() -> int:
    """Run once, audit it and print what was found."""
    args = arguments()
    try:
        refuse_unwritable(args.json)
        with tempfile.TemporaryDirectory() as folder:
            report = run(args, Path(folder))
    except (UsageError, LabError) as error:
        print(f"canary_kills.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    report |= {"machine": machine.describe(), "command": sys.argv}
    write(args.json, report)
    show(report)
    for line in report["missed"]:
        print(f"MISSED: {line}")
    return int(bool(report["missed"]))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="star:4@100mbit", help="(star:4@100mbit)")
    parser.add_argument(
        "--row", default="canary:s=8,p=2,colayers=4,encrypted=False",
        help="(canary:s=8,p=2,colayers=4,encrypted=False)",
    )  # fmt: skip
    parser.add_argument("--kills", type=int, default=20, help="(20)")
    parser.add_argument("--seed", type=int, default=0, help="of whom and when (0)")
    parser.add_argument("--json", type=Path, default=Path("out/canary_kills.json"), metavar="FILE")
    return parser.parse_args()


def run(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Train in a lab, and kill.

    Raises:
        LabError: a lab cannot be made, or somebody failed.
    """
    lines: list[str] = []
    killer = Killer(home, lab.LabSpec.parse(args.lab).hosts, args.kills, args.seed)
    thread = threading.Thread(target=killer.run, name="killer")
    thread.start()
    try:
        ended = lab.run(
            args.lab,
            [sys.executable, __file__, "--keep", str(home), args.row],
            env={"WINGBEAT_JOURNAL": str(home), "WINGBEAT_TOP": "off"},
            on_line=lambda rank, line: lines.append(f"[{rank}] {line}"),
        )
    finally:
        killer.over.set()
        thread.join()
    if ended.exit_code or killer.failure:
        print("\n".join(lines[-40:]))
        raise LabError(f"{args.lab}: {killer.failure or ended.first_failure or ended.exit_code}")
    journals = [path.read_text().splitlines(keepends=True) for path in home.glob("training*")]
    found = audit(journals)
    losses = {path.name: json.loads(path.read_text()) for path in home.glob("loss-*")}
    back = [line for line in lines if line.endswith(" is back")]
    report = {
        "kills": killer.kills,
        "audit": {name: getattr(found, name) for name in Audit.__slots__},
        "delays": delays(journals),
        "losses": losses,
        "lines": lines,
        "lines_back": len(back),
    }
    return {**report, "missed": judged(args.kills, report)}


def judged(kills: int, report: dict[str, Any]) -> list[str]:
    """Return what does not hold."""
    missed = [f"audit: {line}" for line in report["audit"]["findings"]]
    if len(report["kills"]) != kills or report["audit"]["pulls"] < kills:
        missed.append(
            f"{len(report['kills'])} kills and {report['audit']['pulls']} pulls of {kills}"
        )
    for name, (first, last, digest) in report["losses"].items():
        if last > LEARNT * first:
            missed.append(f"{name}: {last:.3f}, it began with {first:.3f}; limit {LEARNT} of it")
        if digest != next(iter(report["losses"].values()))[2]:
            missed.append(f"{name}: other weights than the others'")
    return missed


def show(report: dict[str, Any]) -> None:
    """Print one line for each kill, and what all come to."""
    print(
        f"{'killed':>6} {'at round':>8} {'stood still, s':>14} {'rounds without':>14} "
        f"{'back, s':>8}"
    )
    for kill in report["kills"]:
        print(
            f"{kill['rank']:6} {kill['rounds']:8} {kill['still_s']:14.2f} "
            f"{kill['rounds_without']:14} {kill['back_s']:8.2f}"
        )
    still = [kill["still_s"] for kill in report["kills"]]
    found = report["audit"]
    print(
        f"the others stood still for {statistics.median(still):.2f} s (median), {max(still):.2f} s "
        f"at most\naudit: {found['lives']} lives, {found['rounds']} rounds, {found['counted']} "
        f"contributions, {found['dropped']} iterations dropped, {found['lost']} colayers lost, "
        f"{found['pulls']} pulls, {len(found['findings'])} findings"
    )
    for name, (first, last, _) in sorted(report["losses"].items()):
        print(f"{name}: {first:.3f}, in the end {last:.4f}")


# -- who kills -------------------------------------------------------------------------------


class Killer:
    """Has one worker after the other killed, from outside of the lab.

    Args:
        home: a folder that all share. A worker that trains keeps ``at-RANK`` there: its life, and
            how many rounds it has applied.
        workers: how many.
        times: how often.
        seed: of whom and when.

    Attributes:
        kills: what has happened.
        failure: why it went no further; empty if it did.
        over: set when the lab has ended.
    """

    def __init__(self, home: Path, workers: int, times: int, seed: int) -> None:
        self._home, self._workers, self._times = home, workers, times
        self._drawn, self._lives = random.Random(seed), [0] * workers
        self.kills: list[dict[str, Any]] = []
        self.failure, self.over = "", threading.Event()

    def run(self) -> None:
        """Kill, and have all stop some rounds after the last one is back."""
        try:
            for _ in range(self._times):
                self._together()
                time.sleep(self._drawn.uniform(0.0, 0.5))
                self.kills.append(self._kill(self._drawn.randrange(self._workers)))
            rounds = self._together()
            _put(self._home / "stop", rounds + 10 * TOGETHER)
        except TimeoutError as error:
            self.failure = "" if self.over.is_set() else str(error)
            _put(self._home / "stop", 0)

    def _kill(self, rank: int) -> dict[str, Any]:
        others = [each for each in range(self._workers) if each != rank]
        before, began = self._rounds(others), time.monotonic()
        (self._home / f"kill-{rank}").touch()
        self._lives[rank] += 1
        moved, still, rounds = began, 0.0, before
        back: float | None = None
        while back is None or rounds < before + TOGETHER:
            now, at = time.monotonic(), self._rounds(others)
            still = max(still, now - moved)
            if at > rounds:
                moved, rounds = now, at
            if back is None and self._at(rank) is not None:
                back, without = now - began, rounds - before
            self._wait(now - began, f"rank {rank} was killed at round {before}")
        return {
            "rank": rank, "rounds": before, "still_s": still, "rounds_without": without,
            "back_s": back,
        }  # fmt: skip

    def _together(self) -> int:
        """Wait until all have applied some rounds more; return how many all have."""
        began, first = time.monotonic(), None
        ranks = range(self._workers)
        while True:
            if all(self._at(rank) is not None for rank in ranks):
                rounds = self._rounds(ranks)
                first = rounds if first is None else first
                if rounds >= first + TOGETHER:
                    return rounds
            self._wait(time.monotonic() - began, "not all train")

    def _wait(self, waited: float, what: str) -> None:
        if waited > PATIENCE_S or self.over.wait(LOOK_S):
            raise TimeoutError(f"{what}, and after {waited:.0f} s they do not go on")

    def _rounds(self, ranks: Any) -> int:
        return min((self._at(rank) or 0 for rank in ranks), default=0)

    def _at(self, rank: int) -> int | None:
        """Rounds of a worker in its present life; None if it does not train yet."""
        with contextlib.suppress(FileNotFoundError):
            life, rounds = json.loads((self._home / f"at-{rank}").read_text())
            return int(rounds) if life == self._lives[rank] else None
        return None


def _put(path: Path, value: Any) -> None:
    """Write a file that is there as a whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value))
    part.rename(path)


# -- on a host of the lab --------------------------------------------------------------------


def keep(home: Path, row: str) -> int:
    """Run the host's worker, kill it when that is asked for, and start it again.

    Returns:
        Its exit code, when it has ended by itself.
    """
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun's workers: none serves it
    store = dist.TCPStore("0.0.0.0", port, size, True, wait_for_workers=False) if not rank else None
    asked = home / f"kill-{rank}"
    while True:
        worker = subprocess.Popen([sys.executable, __file__, "--work", str(home), row])
        while (code := worker.poll()) is None and not asked.exists():
            time.sleep(LOOK_S / 2)
        if code is not None:
            break
        worker.kill()
        worker.wait()
        asked.unlink()
    (home / f"left-{rank}").touch()
    while store is not None and not all((home / f"left-{r}").exists() for r in range(size)):
        time.sleep(LOOK_S)
    return code


def work(home: Path, row: str) -> None:
    """Train until the killer has said up to which round."""
    import torch

    import wingbeat
    from wingbeat import strategies
    from wingbeat.bench import digits
    from wingbeat.sync import bounded_exchange

    torch.set_num_threads(1)
    world = wingbeat.init(timeout=PATIENCE_S)
    images, answers, *held_out = digits.data()
    network = digits.network(1 if world.returned else 0)  # who comes back pulls parameters
    loss = _loss_of(held_out)
    first = loss(digits.network(0))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model, optimizer = wingbeat.distribute(network, optimizer, strategies.parse(row))
    exchange, stop = bounded_exchange(model), home / "stop"
    assert exchange is not None
    machine = exchange.machine
    for x, y in digits.batches(
        images, answers, rank=world.rank, workers=world.size, seed=machine.life
    ):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        _put(home / f"at-{world.rank}", (machine.life, machine.applied))
        if stop.exists() and machine.applied >= json.loads(stop.read_text()):
            break
    wingbeat.flush(model)
    bits = [float(p.detach().double().abs().sum()) for p in model.parameters()]
    _put(home / f"loss-{world.rank}", (first, loss(model), bits))
    wingbeat.shutdown()


def _loss_of(held_out: Any) -> Callable[[Any], float]:
    import torch

    def loss(model: Any) -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(held_out[0]), held_out[1]))

    return loss


if __name__ == "__main__":
    if sys.argv[1:2] == ["--keep"]:
        sys.exit(keep(Path(sys.argv[2]), sys.argv[3]))
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), sys.argv[3])
        sys.exit()
    sys.exit(main())
