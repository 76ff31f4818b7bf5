"""The simulator's predictions compared with the lab's measurements.

    python benchmarks/simulator.py --json out/simulator.json
    python benchmarks/simulator.py --models vgg16 --rates 1gbit 10gbit --strategies dear:plan=fixed
    python benchmarks/simulator.py --models vgg19_k40 --rates 10gbit --workers 8 --scale 0.05 \
        --stretch 4 --strategies geryon:encrypted=false partitionedps:encrypted=false

Each model and rate is one ``wingbeat bench``: real workers, sockets and shaped links, with paced
compute. The same strategies then run in virtual time, with the same plan, schedule and machine, on
links of the same rate less Ethernet, IP and TCP headers. The CPU cost of communication is the
simulator's default; it is not fitted to the runs that it is compared with. Where a strategy has
servers, the lab's switches have two classes, and so have the simulated ones.

Exit code 1 if a median is more than 10% off, or the strategies are not ranked as in the lab where
they differ by more than that.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from common import show, write

from wingbeat.errors import UsageError, WingbeatError
from wingbeat.parts import Servers
from wingbeat_lab.bench import contenders, machine, runner, simulated
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.cli.bench import check_writable

WITHIN = 0.10


def main() -> int:
    args = arguments()
    report: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
    report |= {"command": sys.argv, "runs": [], "missed": []}
    try:
        check_writable(args.json)
        for model, rate in itertools.product(args.models, args.rates):
            run = compared(args, model, rate)
            report["runs"].append(run)
            report["missed"] += run["missed"]
            show(report, table(run))
            write(args.json, report)
    except WingbeatError as err:
        print(f"simulator.py: {err}", file=sys.stderr)
        return 2 if isinstance(err, UsageError) else 1
    for line in report["missed"]:
        print(f"MISSED: {line}")
    return int(bool(report["missed"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["resnet50", "vgg16", "bert_base"])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "4gbit"], help="before scaling")
    parser.add_argument("--strategies", nargs="+", default=["allreduce", "dear:plan=fixed"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--scale", type=float, default=0.25, help="of models and rates (0.25)")
    parser.add_argument("--stretch", type=float, default=1.0, help="slow motion (1)")
    parser.add_argument("--iterations", type=int, default=6, help="timed ones of each row (6)")
    parser.add_argument("--rounds", type=int, default=2, help="how often rows take turns (2)")
    parser.add_argument("--json", type=Path, default=Path("out/simulator.json"))
    return parser.parse_args()


def compared(args: argparse.Namespace, model: str, rate: str) -> dict[str, Any]:
    """Measure and simulate one model at one rate."""
    served = any(
        contender.strategy is not None and isinstance(contender.strategy.exchange, Servers)
        for contender in map(contenders.parse, args.strategies)
    )
    config = BenchConfig(
        lab=f"star:{args.workers}@{rate}{',prio=2' if served else ''}",
        model=f"paced:{model}@{args.scale:g}",
        strategies=tuple(args.strategies),
        iterations=args.iterations,
        rounds=args.rounds,
        warmup=2,
        measure=False,
        stretch=args.stretch,
    )
    checked = config.check()
    # Refuse what cannot be simulated before any measurement.
    predicted = [simulated.median_s(checked, contender) for contender in checked.rows]
    raw = runner.run(config, command=sys.argv).report.to_json()
    rows = []
    for row, virtual_s in zip(raw["runs"], predicted, strict=True):
        lab = row["iteration_s"]["median"]
        rows.append(
            {
                "strategy": row["strategy"],
                "lab_s": lab,
                "lab_spread_s": row["iteration_s"],
                "simulated_s": virtual_s,
                "off_percent": 100 * (virtual_s / lab - 1),
            }
        )
    return {"model": model, "rate": rate, "rows": rows, "missed": list(missed(model, rate, rows))}


COLUMNS = ("strategy", "lab, ms", "p10 .. p90, ms", "simulated, ms", "off, %")


def table(run: dict[str, Any]) -> Printed:
    """Return one model's rows at one rate for printing."""
    cells = [
        (
            row["strategy"],
            f"{1e3 * row['lab_s']:.1f}",
            " .. ".join(f"{1e3 * row['lab_spread_s'][end]:.1f}" for end in ("p10", "p90")),
            f"{1e3 * row['simulated_s']:.1f}",
            f"{row['off_percent']:+.1f}",
        )
        for row in run["rows"]
    ]
    return Printed.of(f"{run['model']} at {run['rate']}: lab and simulator", COLUMNS, cells)


def missed(model: str, rate: str, rows: list[dict[str, Any]]) -> Any:
    for row in rows:
        if abs(row["off_percent"]) > 100 * WITHIN:
            yield f"{model} at {rate}, {row['strategy']}: {row['off_percent']:+.1f}%"
    for a, b in itertools.combinations(rows, 2):
        lab, simulated = a["lab_s"] / b["lab_s"], a["simulated_s"] / b["simulated_s"]
        if not 1 / (1 + WITHIN) < lab < 1 + WITHIN and (lab > 1) != (simulated > 1):
            yield f"{model} at {rate}: {a['strategy']} and {b['strategy']} are ranked wrongly"


if __name__ == "__main__":
    sys.exit(main())
