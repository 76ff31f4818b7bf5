"""Workers that average models in dynamic groups, killed one after the other.

    python benchmarks/ripples_kills.py --json out/ripples_kills.json

Real processes in a lab train a network on the digits with `Ripples`. Repeatedly one of them other
than rank 0 is killed (SIGKILL) at a moment that follows from the seed, and restarted after a while;
the others continue. In the end rank 0 is killed permanently, and with it the group generator: the
others follow the static schedule until one of them has started another one.

Limits: each time the others continue, and none of them stalls for longer than the deadline that
the generator gives the killed one, plus a second of detection. That is 8 times its usual step, and
2 s at least. A worker that rejoins is in groups with others again; the training loss falls from
each quarter of the kills to the next; all models are bitwise equal in the end, and their loss has
fallen to under a tenth.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import deque
from pathlib import Path
from typing import Any

from common import at_least_one
from killing import (
    PATIENCE_S,
    Killer,
    Telling,
    keep,
    loss_of,
    losses,
    missed_losses,
    run_once,
    standstills,
    trained,
)  # fmt: skip

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.group_all_reduce import GRACE_S
from wingbeat.methods.model_averaging.service import MIN_TIMEOUT_S
from wingbeat.parts import Groups
from wingbeat.transport.detector import RECONNECT_S, TIMEOUT_FACTOR
from wingbeat_lab import baselines, lab
from wingbeat_lab.bench.table import Printed

LOOKS_S = 1.0
"""Detection interval of the generator, which notifies the others; they check at it too."""
FALLING_S = RECONNECT_S + LOOKS_S + GRACE_S
"""Until workers detect that the generator is dead, and that group members are missing."""
RECENT = 20
"""Steps whose mean loss a worker reports."""
RETURNS = 5
"""Minimum number of killed workers that must rejoin; or all, if fewer were killed."""


def main() -> int:
    return run_once(arguments(), run, tables, judged)


def check_returns(row: str) -> None:
    """Refuse a row that no worker can rejoin."""
    exchange = baselines.parse(row).exchange
    if not isinstance(exchange, Groups) or not exchange.readmits:
        raise UsageError(
            f"--row {row}: nobody comes back to it; allowed are ripples, localsgd and diloco with "
            "groups that a generator makes"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="star:4@100mbit", help="(star:4@100mbit)")
    parser.add_argument("--row", default="ripples", help="(ripples)")
    parser.add_argument("--kills", type=at_least_one, default=20, help="(20)")
    parser.add_argument("--seed", type=int, default=0, help="of whom and when (0)")
    parser.add_argument("--json", type=Path, default=Path("out/ripples_kills.json"), metavar="FILE")
    return parser.parse_args()


def run(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Train in a lab, and kill workers."""
    check_returns(args.row)
    workers = lab.LabSpec.parse(args.lab).hosts
    killer = Killer(home, workers, args.kills, args.seed, spared=[0], last=0)
    lines = trained(args.lab, __file__, home, args.row, {}, killer)
    kills = [kill | figures(kill) for kill in killer.kills]
    return {"kills": kills, "losses": losses(home), "lines": lines}


def figures(kill: dict[str, Any]) -> dict[str, Any]:
    """Return the judged figures of a kill: the limit, the loss before it, and groups afterwards."""
    usual_s = kill["before"].get("usual_s", 0.0)
    rank, others = kill["rank"], kill["others"]
    known = [each["loss"] for each in others if "loss" in each]
    met = sum(each["met"][rank] for each in kill["after"] if each)
    return {
        "usual_s": usual_s,
        "deadline_s": max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * usual_s),
        "limit_s": max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * usual_s) + LOOKS_S if rank else FALLING_S,
        "loss": statistics.fmean(known) if known else None,
        "met": met - sum(each["met"][rank] for each in others if each),
    }


def judged(kills: int, report: dict[str, Any]) -> list[str]:
    """Return the missed limits."""
    found, missed = report["kills"], []
    if len(found) != kills + 1:
        missed.append(f"{len(found)} kills; expected {kills}, and rank 0")
    for number, kill in enumerate(found):
        if kill["still_s"] > kill["limit_s"]:
            missed.append(
                f"kill {number}, of rank {kill['rank']}: the others stood still for "
                f"{kill['still_s']:.2f} s; limit {kill['limit_s']:.2f} s"
            )
    back = [kill for kill in found if kill["back_s"] is not None and kill["met"] > 0]
    if len(back) < min(RETURNS, kills):
        missed.append(f"{len(back)} came back and were in groups; limit {min(RETURNS, kills)}")
    missed += fallen([kill["loss"] for kill in found if kill["loss"] is not None])
    return missed + missed_losses(report["losses"])


def fallen(values: list[float]) -> list[str]:
    """Return where losses do not fall from each quarter to the next."""
    parts = min(4, len(values))
    cuts = [len(values) * part // parts for part in range(parts + 1)] if parts else []
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(cuts)]
    return [
        f"the training loss was {late:.4f} in part {number} of {parts}, {early:.4f} before"
        for number, (early, late) in enumerate(itertools.pairwise(means), start=2)
        if not late < early
    ]


COLUMNS = (
    "kill",
    "rank",
    "at step",
    "stood still, s",
    "limit, s",
    "steps without",
    "back after, s",
    "groups then",
    "loss",
)


def tables(report: dict[str, Any]) -> list[Printed]:
    """Return a row for each kill."""
    cells = [
        (
            f"kill {number}",
            str(kill["rank"]),
            str(kill["steps"]),
            f"{kill['still_s']:.2f}",
            f"{kill['limit_s']:.2f}",
            str(kill["steps_without"]),
            "" if kill["back_s"] is None else f"{kill['back_s']:.2f}",
            str(kill["met"]),
            "" if kill["loss"] is None else f"{kill['loss']:.4f}",
        )
        for number, kill in enumerate(report["kills"], start=1)
    ]
    notes = standstills([kill for kill in report["kills"] if kill["rank"]])
    return [Printed.of("workers that average models, killed", COLUMNS, cells, notes)]


# -- on a host of the lab --------------------------------------------------------------------


def work(home: Path, row: str, life: int) -> None:
    """Train up to the step that the killer names."""
    import time

    import torch

    import wingbeat
    from wingbeat_lab.bench import models

    torch.set_num_threads(1)
    world = wingbeat.init(timeout=PATIENCE_S)
    images, answers, *held_out = models.data()
    network = models.network(1 if world.returned else 0)  # a worker that rejoins copies parameters
    loss = loss_of(held_out)
    first = loss(models.network(0))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    model, optimizer = wingbeat.distribute(network, optimizer, baselines.parse(row))
    met, telling = Met(model, world.size), Telling(home, world.rank, life)
    recent: deque[float] = deque(maxlen=RECENT)
    usual_s = 0.0
    seed = 1000 * life + world.rank
    for x, y in models.batches(images, answers, rank=world.rank, workers=world.size, seed=seed):
        begin = time.monotonic()
        optimizer.zero_grad()
        found = torch.nn.functional.cross_entropy(model(x), y)
        found.backward()
        usual_s = max(time.monotonic() - begin, 0.9 * usual_s)  # as the generator measures it
        recent.append(float(found.detach()))
        optimizer.step()
        mean = statistics.fmean(recent)
        if not telling.say(met.steps, met=met.by_rank, usual_s=usual_s, loss=mean):
            break
    wingbeat.synchronize(model)
    telling.end(first, model, loss)
    wingbeat.shutdown()


class Met:
    """How often a worker was in a group with each of the others.

    Args:
        model: a distributed one.
        workers: number of workers.
    """

    def __init__(self, model: Any, workers: int) -> None:
        from wingbeat.engine.upgrade import engine_of

        engine: Any = engine_of(model)
        self._update = engine.update
        self.by_rank = [0] * workers
        averages = self._update._averager.session.reducer
        average = averages.average

        def counted(run: Any, *args: Any) -> int | None:
            lost: int | None = average(run, *args)
            for rank in run.members if lost is None else ():
                self.by_rank[rank] += 1
            return lost

        averages.average = counted

    @property
    def steps(self) -> int:
        """The worker's number of steps, including those of a model that it has copied."""
        return int(self._update.steps)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--keep"]:
        sys.exit(keep(__file__, Path(sys.argv[2]), sys.argv[3]))
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        sys.exit()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
