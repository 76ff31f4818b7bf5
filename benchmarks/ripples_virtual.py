"""What `ripples.py` has measured in the lab, beside the same in virtual time, row by row.

    python benchmarks/ripples.py --figures 17 19 steps --json out/ripples.json
    python benchmarks/ripples_virtual.py out/ripples.json --json out/ripples_virtual.json

Each part of the report says with which model, links, workers and slow worker it was measured; these
are simulated (`wingbeat.simulator`), with the state machines of a real run and the simulator's
defaults for what communication costs processors: in slow motion as in the lab, so that what does
not slow down with it counts as little. Left out: that the lab's processes share this machine's
cores, and what the store and the log take. Rows that cannot be simulated (`ddp`; AD-PSGD's
pairs) are named.

Exit code 1 if a row of groups is more than 10% off (``--within``).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from common import run_and_judge

from wingbeat import simulator
from wingbeat.bench.config import BenchConfig, Checked
from wingbeat.bench.contenders import Contender
from wingbeat.bench.simulated import GOODPUT
from wingbeat.errors import UsageError
from wingbeat.groups.layout import Layout
from wingbeat.groups.rules import rules_of
from wingbeat.types import Choices

FIGURES = ("17", "19", "steps")


def main() -> int:
    """Print and judge what was measured beside what is predicted."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="what ripples.py has written")
    parser.add_argument("--within", type=float, default=0.1, help="of what the lab took (0.1)")
    parser.add_argument("--jitter", type=float, default=0.02, help="of computation (0.02)")
    parser.add_argument("--iterations", type=int, default=60, help="simulated ones (60)")
    parser.add_argument("--json", type=Path, default=Path("out/ripples_virtual.json"))
    return parser.parse_args()


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return which rows are too far off."""
    missed = []
    for figure, factor, part in parts_of(args.measured):
        title = f"{figure}, equal workers" if factor == "0" else f"{figure}, one +{factor}x"
        print(f"\n{title}\n{'row':44} {'lab':>8} {'virtual':>8}")
        rows = report.setdefault(figure, {}).setdefault(factor, {})
        for text, seconds in part["rows"].items():
            lab_s = float(seconds["iteration_s"])
            virtual_s = predicted_s(part["config"], text, args)
            if virtual_s is None:
                print(f"{text:44} {lab_s:8.3f}        -", flush=True)
                continue
            off = virtual_s / lab_s - 1
            rows[text] = {"lab_s": lab_s, "virtual_s": virtual_s, "off": off}
            print(f"{text:44} {lab_s:8.3f} {virtual_s:8.3f} {off:+7.1%}", flush=True)
            if text.startswith("ripples") and abs(off) > args.within:
                missed.append(f"{title}: {text}: {off:+.1%}; limit {args.within:.0%}")
    return missed


def parts_of(path: Path) -> list[tuple[str, str, Any]]:
    """Return each figure's parts that have rows, by how slow a worker is.

    Raises:
        UsageError: the file is none of ``ripples.py``'s, or has none of these figures.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        found = [
            (figure, factor, part)
            for figure in FIGURES
            for factor, part in report.get(figure, {}).items()
        ]
        wrong = not all({"rows", "config"} <= part.keys() for _, _, part in found)
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{str(path)!r} is no report of ripples.py: {error}") from None
    if wrong or not found:
        raise UsageError(
            f"{str(path)!r} has no rows of figures {', '.join(FIGURES)}: write one with "
            "benchmarks/ripples.py --json"
        )
    return found


def predicted_s(config: dict[str, Any], text: str, args: argparse.Namespace) -> float | None:
    """Return seconds of the row's mean iteration in virtual time; None if it has none."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
    fields["strategies"] = (text,)
    checked = BenchConfig(**fields).check()
    [row] = checked.rows
    if row.strategy is None or checked.model.profile is None:
        return None
    choices = row.strategy.choices()
    if choices.averaging is None:
        return _in_lockstep(checked, row, choices)
    return _in_groups(checked, choices, args)


def _in_lockstep(checked: Checked, row: Contender, choices: Choices) -> float | None:
    try:
        run = simulator.simulate(
            _model(checked), choices, checked.workers, _links(checked), layout=_layout(checked),
            slow=_slow(checked),
        )  # fmt: skip
    except UsageError as error:
        print(f"{row.text}: {error}", file=sys.stderr)
        return None
    return run.median_s


def _in_groups(checked: Checked, choices: Choices, args: argparse.Namespace) -> float | None:
    averaging = choices.averaging
    assert averaging is not None, "it was asked for"
    if averaging.partners == "pairs" or averaging.outer is not None:
        return None
    rules = None
    if averaging.partners != "static":
        rules = rules_of(averaging.partners, averaging.size, averaging.threshold)
    run = simulator.simulate_groups(
        _model(checked), rules, _layout(checked), _links(checked), slow=_slow(checked),
        jitter=args.jitter, overlap=averaging.delay > 0, every=averaging.every,
        iterations=args.iterations, seed=averaging.seed,
    )  # fmt: skip
    return run.iteration_s


def _model(checked: Checked) -> simulator.Model:
    profile = checked.model.profile
    assert profile is not None, "it has one"
    return simulator.of_profile(profile, checked.model.stretch)


def _links(checked: Checked) -> simulator.Links:
    return simulator.Links(
        bytes_per_s=checked.lab.rate / 8 * GOODPUT,
        count=checked.lab.rails,
        priorities=checked.lab.prio > 0,
    )


def _layout(checked: Checked) -> Layout:
    return Layout.even(checked.lab.hosts, checked.config.per_host)


def _slow(checked: Checked) -> dict[int, float]:
    """Return by what the times of workers are multiplied that sleep in each iteration."""
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
