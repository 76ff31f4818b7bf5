"""Measurements of `canary.py` in the lab, compared with virtual time, row by row.

    python benchmarks/canary.py --figures 23 20 --json out/canary.json
    python benchmarks/canary_beside.py out/canary.json --json out/canary_beside.json
    python benchmarks/canary_beside.py docs/results/canary.json     (the data of the docs' figures)

Each part of the report names its model, links, workers and slow workers. These are simulated
(`wingbeat.simulator`) with the state machines of a real run, from a fresh start to as many applied
gradients, timed as in the lab: in slow motion, so that costs that it does not slow down count as
little. Processors are the simulator's defaults, and a sketch's are those of one core. With
``--cores`` all hosts' work shares so many processors, as in a lab on one machine; ``--message`` is
the cost of a message for a communication thread, in microseconds.

Left out: hosts that forward what rows other than Canary's send in a BCube, which for Ako is a
third of all bytes; the overhead of a paced model's layers; and any other load of the machine.

Exit code 1 if a row of Canary is more than 10% off (``--within``), in seconds or in bytes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from dataclasses import replace
from typing import Any

import beside
from common import run_and_judge, write

from wingbeat import simulator
from wingbeat.parts import Bounded, ExchangePart
from wingbeat.simulator.run import Sleeps
from wingbeat_lab.bench import slow
from wingbeat_lab.bench.config import Checked
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.simulated import AFTER, bound_of, timed

FIGURES = ("23", "20")
SPAN_S = 0.05


def main() -> int:
    """Print the measurements with their predictions, and judge them."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def arguments() -> argparse.Namespace:
    parser = beside.parser(__doc__, "canary.py", "out/canary_beside.json")
    parser.add_argument("--cores", type=int, help="that all hosts share (each has its own)")
    parser.add_argument("--message", type=float, help="us that one costs a courier (30)")
    return parser.parse_args()


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return the rows that are too far off."""
    parts = beside.parts_of(args.measured, FIGURES, "canary.py")
    predicted = functools.partial(predict, args)
    missed = beside.compare(parts, predicted, "canary", args.within, report)
    write(args.json, report)
    return missed


def predict(args: argparse.Namespace, checked: Checked, row: Contender) -> beside.Predicted | None:
    """Predict a row; None if it cannot be simulated."""
    strategy, sleeps = beside.strategy_of(row), sleeps_of(checked)
    work = work_of(args, strategy.exchange)
    if not isinstance(strategy.exchange, Bounded):
        count = checked.config.iterations
        return beside.in_lockstep(checked, row, work=work, sleeps=sleeps, iterations=count)
    lead, count = min(1, checked.config.warmup), checked.config.share(0)
    workers, links = checked.workers, beside.links_of(checked)
    traffic = simulator.Traffic(SPAN_S)
    run = simulator.simulate_bounded(
        beside.model_of(checked), bound_of(strategy), workers, links,
        gradients=(lead + count + AFTER) * workers,
        network="bcube" if checked.lab.kind == "bcube" else "star",
        coding=simulator.coding_of(strategy.wire), work=work, sleeps=sleeps, traffic=traffic,
        cores=args.cores, encrypted=strategy.exchange.encrypted,
    )  # fmt: skip
    begin, end = timed(run.begun, lead, count)
    used = traffic.utilisation(1.0, end)[int(begin / SPAN_S) :]
    # The lab counts bytes of whole iterations, of which this may be one more or less.
    made = statistics.fmean(sum(begin <= when < end for when, _ in each) for each in run.begun)
    return beside.Predicted((end - begin) / count, sum(used) * SPAN_S / made)


def work_of(args: argparse.Namespace, exchange: ExchangePart) -> simulator.Work:
    """Return the CPU costs of communication."""
    work = simulator.Work()
    if isinstance(exchange, Bounded) and args.message is not None:
        work = replace(work, message_s=args.message * 1e-6)
    return work


def sleeps_of(checked: Checked) -> Sleeps | None:
    """Return the workers' sleeps, drawn as in the lab; None if no worker is slow."""
    if not checked.slow:
        return None
    normal_s = sum(checked.model.compute_s() or ())
    lead = min(1, checked.config.warmup)

    def seconds(rank: int, iteration: int) -> float:
        factor = slow.factor(
            checked.slow, rank=rank, iteration=iteration - lead, workers=checked.workers,
            seed=checked.config.seed,
        )  # fmt: skip
        return factor * normal_s

    return seconds


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
