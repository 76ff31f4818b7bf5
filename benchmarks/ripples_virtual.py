"""Measurements of `ripples.py` in the lab, compared with virtual time, row by row.

    python benchmarks/ripples.py --figures 17 19 steps --json out/ripples.json
    python benchmarks/ripples_virtual.py out/ripples.json --json out/ripples_virtual.json

Each part of the report names its model, links, workers and slow worker. These are simulated
(`wingbeat.simulator`) with the state machines of a real run and the simulator's default CPU costs
of communication: in slow motion as in the lab, so that costs that it does not slow down count as
little. Left out: that the lab's processes share this machine's cores, and the time of the store
and the log. Rows that cannot be simulated (`ddp`; AD-PSGD's pairs) are named.

Exit code 1 if a row of groups is more than 10% off (``--within``).
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import beside
from common import run_and_judge

from wingbeat import Strategy, simulator
from wingbeat.errors import UsageError
from wingbeat.parts import Groups, Local, Outer, PartnersPart
from wingbeat.types import Layout
from wingbeat_lab.bench.config import Checked
from wingbeat_lab.bench.contenders import Contender

FIGURES = ("17", "19", "steps")


def main() -> int:
    """Print the measurements with their predictions, and judge them."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def arguments() -> argparse.Namespace:
    parser = beside.parser(__doc__, "ripples.py", "out/ripples_virtual.json")
    parser.add_argument("--jitter", type=float, default=0.02, help="of computation (0.02)")
    parser.add_argument("--iterations", type=int, default=60, help="simulated ones (60)")
    return parser.parse_args()


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return the rows that are too far off."""
    parts = beside.parts_of(args.measured, FIGURES, "ripples.py", called)
    return beside.compare(parts, functools.partial(predict, args), "ripples", args.within, report)


def called(factor: str) -> str:
    """Return a part's name, by the slowness of its slow worker."""
    return "equal workers" if factor == "0" else f"one +{factor}x"


def predict(args: argparse.Namespace, checked: Checked, row: Contender) -> beside.Predicted | None:
    """Predict a row in virtual time; None if it cannot be simulated."""
    strategy = beside.strategy_of(row)
    if not isinstance(strategy.exchange, PartnersPart):
        return beside.in_lockstep(checked, row, layout=_layout(checked), slow=_slow(checked))
    return _in_groups(checked, strategy, args)


def _in_groups(
    checked: Checked, strategy: Strategy, args: argparse.Namespace
) -> beside.Predicted | None:
    groups, local = strategy.exchange, strategy.schedule
    if not isinstance(groups, Groups) or isinstance(strategy.update_part, Outer):
        return None
    assert isinstance(local, Local), "the strategy has checked it"
    run = simulator.simulate_groups(
        beside.model_of(checked), groups.rules, _layout(checked), beside.links_of(checked),
        slow=_slow(checked), jitter=args.jitter, overlap=local.delay > 0,
        every=local.every, iterations=args.iterations, seed=groups.seed,
    )  # fmt: skip
    return beside.Predicted(run.iteration_s)


def _layout(checked: Checked) -> Layout:
    return Layout.even(checked.lab.hosts, checked.config.per_host)


def _slow(checked: Checked) -> dict[int, float]:
    """Return the factors on the times of workers that sleep in each iteration."""
    found = {}
    for text in checked.config.slow:
        rank, plus, factor = text.partition("=+")
        if not plus or not factor.endswith("x"):
            raise UsageError(f"slow={text!r}: allowed is one worker, always, such as 1=+2x")
        found[int(rank)] = 1.0 + float(factor[:-1])
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
