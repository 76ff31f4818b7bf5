"""Each preset's default compared with its other options: which default is the best choice.

    python benchmarks/defaults.py --json out/defaults.json
    python benchmarks/defaults.py --presets canary ripples

Each preset has a bench of its own on each cluster, in which its default and its other options take
turns. The clusters are four hosts of equal speed with links of 1 and of 10 Gbit/s; for strategies
whose workers do not all wait for each other, also with links of the first rate and a slow worker, a
different one in each iteration. Models are paced. Tuning is not timed, the time of codecs is.
Options that change what is learned, or who can read the traffic, are not judged: the table states
what they change.

Each turn has an even number of iterations: where each host has one worker, Ripples averages after
every second step only (inter- and intra-groups alternate, and a group inside of a host is one
worker), so that an odd number would compare different amounts of communication.

Rule: on no cluster is an option that changes nothing else faster than the default by more than
`WITHIN` (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import run_and_judge, show, write

from wingbeat_lab.bench import estimate, runner
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.table import Printed

WITHIN = 0.05
LABS = ("star:4@1gbit", "star:4@10gbit")
SLOW = "random:+2x"
PRESETS: dict[str, dict[str, str]] = {
    "allreduce": {
        "allreduce": "",
        "allreduce:mb=5": "",
        "allreduce:mb=100": "",
        "allreduce:first_mb=25": "",
        "allreduce:topology=doubling": "",
    },
    "dear": {
        "dear": "",
        "dear:plan=fixed": "",
        "dear:plan=merged": "",
        "dear:plan=fixed,edge_mb=1": "",
        "dear:plan=fixed,topology=doubling": "",
    },
    "omgs": {
        "omgs": "",
        "omgs:merge=exact": "",
        "omgs:merge=paper": "",
        "omgs:merge=printed": "",
        "omgs:density=0.001": "a tenth of the values at a time",
    },
    "geryon": {
        "geryon": "",
        "geryon:pull=start": "",
        "geryon:classes=1": "",
        "geryon:slice=262144": "",
        "geryon:encrypted=false": "in the clear",
    },
    "canary": {
        "canary": "",
        "canary:colayers=4": "",
        "canary:in_flight=1": "",
        "canary:s=0,compression=sketch": "no gradient is late",
        "canary:in_flight=none": "gradients are later",
        "canary:compression=fp32": "no codec",
        "canary:encrypted=false": "in the clear",
    },
    "ripples": {
        "ripples": "",
        "ripples:size=2": "smaller groups: models mix more slowly",
        "ripples:size=4": "larger groups: models mix faster",
        "ripples:policy=paper": "the paper's groups",
        "ripples:policy=static": "the same groups in turn, waits for the slow",
        "ripples:overlap=true": "averages are a step late",
        "ripples:encrypted=false": "in the clear",
    },
}
"""Bench rows of each preset, the default first, and what else they change."""
UNEVEN = ("canary", "ripples")
"""Presets whose workers do not all wait for each other: measured with slow workers, too."""


def benches(args: argparse.Namespace) -> Iterator[tuple[str, BenchConfig]]:
    """Yield each preset's benches, checked before any measurement."""
    for preset in args.presets:
        clusters: list[tuple[str, tuple[str, ...]]] = [(lab, ()) for lab in args.labs]
        if preset in UNEVEN:
            clusters = [(args.labs[0], ()), (args.labs[0], (SLOW,))]
        for lab, slow in clusters:
            config = BenchConfig(
                lab=lab,
                model=args.model,
                strategies=tuple(PRESETS[preset]),
                iterations=args.iterations,
                rounds=args.rounds,
                slow=slow,
                measure=False,
            )
            config.check()
            yield preset, config


COLUMNS = (
    "option",
    "ms",
    "10% .. 90% of iterations, ms",
    "of the default's time",
    "sent, MB",
    "also changes",
)


def table(bench: dict[str, Any]) -> Printed:
    """Return the rows of one bench, the default first."""
    usual = bench["rows"][0]["s"]
    changes = PRESETS[bench["preset"]]
    lines = [
        (
            row["option"] + " (default)" * (row is bench["rows"][0]),
            f"{1e3 * row['s']:.0f}",
            f"{1e3 * row['p10_s']:.0f} .. {1e3 * row['p90_s']:.0f}",
            f"{row['s'] / usual:.3f}" + ", cores" * row["cores"],
            f"{row['mb']:.2f}",
            changes[row["option"]],
        )
        for row in bench["rows"]
    ]
    slow = f", {bench['slow']} slow" if bench["slow"] else ""
    title = f"{bench['preset']} on {bench['lab']}, {bench['model']}{slow}"
    notes = [
        f"{'mean' if bench['preset'] in UNEVEN else 'median'} of {bench['iterations']} iterations "
        f"in {bench['rounds']} turns, at real pace; cores: limited by this machine's processors",
        *missed([bench]),
    ]
    return Printed.of(title, COLUMNS, lines, notes)


def missed(found: list[dict[str, Any]]) -> list[str]:
    """Return a line for each option that is faster than the default and changes nothing else."""
    return [
        f"{bench['lab']}{bench['slow'] and ', ' + bench['slow']}: {row['option']} takes "
        f"{row['s'] / bench['rows'][0]['s']:.3f} of the default's time"
        for bench in found
        for row in bench["rows"]
        if not PRESETS[bench["preset"]][row["option"]]
        and row["s"] < (1 - WITHIN) * bench["rows"][0]["s"]
    ]


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report bench by bench; return the defaults that are not the best choice."""
    todo = list(benches(args))
    about = estimate.about(estimate.of_all(config for _, config in todo))
    print(f"{len(todo)} benches, about {about}", file=sys.stderr, flush=True)
    found = report["benches"] = []
    for preset, config in todo:
        runs = runner.run(config, command=sys.argv).report.runs
        rows = [
            {
                "option": run.strategy,
                "s": run.typical_s,
                "p10_s": run.iteration_s.p10,
                "p90_s": run.iteration_s.p90,
                "mb": run.bytes_per_iteration / 1e6,
                "cores": run.limited_by_cores,
                "samples_s": run.samples_s,
            }
            for run in runs
        ]
        found.append(
            {
                "preset": preset,
                "lab": config.lab,
                "model": config.model,
                "slow": " ".join(config.slow),
                "iterations": config.iterations,
                "rounds": config.rounds,
                "rows": rows,
            }
        )
        show(report, table(found[-1]))
        write(args.json, report)
    return missed(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(PRESETS)
    parser.add_argument("--presets", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--labs", nargs="+", default=list(LABS), metavar="LAB")
    parser.add_argument("--model", default="paced:resnet50@0.05", help="(paced:resnet50@0.05)")
    parser.add_argument("--iterations", type=int, default=12, help="timed ones of each row (12)")
    parser.add_argument("--rounds", type=int, default=2, help="how often rows take turns (2)")
    parser.add_argument("--json", type=Path, default=Path("out/defaults.json"))
    args = parser.parse_args()
    if args.iterations % (2 * args.rounds):
        parser.error(
            f"--iterations {args.iterations} in {args.rounds} rounds: a turn needs an even number "
            f"of iterations; choose a multiple of {2 * args.rounds}"
        )
    return run_and_judge(args.json, functools.partial(measure, args))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
