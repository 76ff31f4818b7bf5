"""The quality of the plans of merged gradients, and the time to compute them.

    python benchmarks/merging.py --json out/merging.json --png out/merging.png
    python benchmarks/merging.py --show alpha-heavy:17

Small random instances, 2 to 14 tensors, are solved by exhaustive search, by the exact planner, by
Algorithm 1 of OMGS-SGD (its Theorem 1 calls it optimal) and by MG-WFBP, which ignores the cost of
encoding. A gap is a plan's time over the least one, both from the begin of backward. Families:

- paper: encoding 2.2e-10 s * d * log2 d as in the released code (within a factor of 3), alpha
  1.6 to 22 ms, 0.1 to 1 us per byte of payload at density 0.001;
- affine: encoding costs a fixed time and one for each element;
- alpha-heavy: n log n encoding; alpha is 1 to 10 mean distances between gradients;
- balanced: n log n encoding and exchange each take about as long as backward;
- piecewise: both curves through random rising points, with jumps.

Theorem 1 is about costs as in paper, alpha-heavy and balanced (its Eqs. 10 and 11).

Sizes are log-uniform, 16 to 4 million elements; gaps between gradients are exponential, and a third
of the tensors are ready with the previous one. Large instances, 500 tensors of each family, and
real profiles are planned to measure the time of the exact planner: wall time, the median of five
runs each.

Exit code 1 if the exact planner misses the optimum once, or its median time is 100 ms or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import show, write
from rich.console import Console
from rich.progress import track

from wingbeat.errors import UsageError, unknown
from wingbeat.files import replacing
from wingbeat.observe.timeline import blank
from wingbeat.planning import merge
from wingbeat.planning.costs import CostModel, Linear, Linearithmic, PiecewiseLinear, Workload
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.paced.profile import load_profile

MOST, LARGE = 14, 500
REPEATS = 5
PLAN_S = 0.1
SAME = 1e-9
"""Relative; smaller gaps count as none."""
GAMMA_S = 2.19e-10 / float(np.log(2))
PAYLOAD = 0.006
"""Bytes for each element: top-k at density 0.001, 6 bytes for each chosen."""
PROFILES = ("resnet50", "inception_v4")
ALPHAS_S, GAMMAS_S, BETA_S = (1.6e-3, 1.1e-2, 2.2e-2), (GAMMA_S / 10, GAMMA_S), 1e-7
THEOREM = ("paper", "alpha-heavy", "balanced")
"""Families whose costs meet Theorem 1's assumptions."""
PUBLISHED = {
    "Algorithm 1": merge.greedy,
    "as printed": merge.greedy_as_printed,
    "MG-WFBP": merge.mg_wfbp,
}
"""Algorithm 1 by its equations, and line by line."""
RULES = {"exact": merge.exact, **PUBLISHED}
console = Console(stderr=True)


# -- instances -----------------------------------------------------------------------------


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw log-uniformly."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def workload_of(rng: np.random.Generator, count: int) -> Workload:
    numels = np.exp(rng.uniform(np.log(16), np.log(4e6), count)).astype(np.int64)
    gaps = rng.exponential(between(rng, 3e-4, 1e-2), count) * (rng.random(count) > 1 / 3)
    gaps[0] += 1e-4
    return Workload(
        tensors=tuple(range(count)),
        ready_s=tuple(np.cumsum(gaps).tolist()),
        numels=tuple(numels.tolist()),
        nbytes=tuple((numels * PAYLOAD).tolist()),
        kinds=("float32 cpu",) * count,
    )


def sorting(rng: np.random.Generator, work: Workload, low: float, high: float) -> Linearithmic:
    """n log n costs; all in one bucket takes ``low`` to ``high`` times backward."""
    whole = Linearithmic(1.0, 1.0)(float(sum(work.numels)))
    return Linearithmic(work.ready_s[-1] * between(rng, low, high) / whole, 1.0)


def line(rng: np.random.Generator, work: Workload, gaps: tuple[float, float]) -> Linear:
    """An exchange that takes 0.1 to 1.5 times backward, and alpha of so many mean gaps."""
    whole = work.ready_s[-1]
    beta = whole * between(rng, 0.1, 1.5) / sum(work.nbytes)
    return Linear(whole / len(work) * between(rng, *gaps), beta)


def pieces(rng: np.random.Generator, work: Workload, largest: float) -> PiecewiseLinear:
    amounts = np.unique(np.exp(rng.uniform(0.0, np.log(largest), 8)))
    seconds = np.cumsum(rng.exponential(1.0, len(amounts)) ** 3) * work.ready_s[-1] / 100
    return PiecewiseLinear(tuple(amounts.tolist()), tuple(seconds.tolist()))


def paper(rng: np.random.Generator, _: Workload) -> CostModel:
    encode = Linearithmic(GAMMA_S * between(rng, 1 / 3, 3), 1.0)
    return CostModel(encode, Linear(between(rng, 1.6e-3, 2.2e-2), between(rng, 1e-7, 1e-6)))


def affine(rng: np.random.Generator, work: Workload) -> CostModel:
    whole = work.ready_s[-1]
    alpha = whole / len(work) * between(rng, 0.02, 2)
    encode = Linear(alpha, whole * between(rng, 0.1, 1) / sum(work.numels))
    return CostModel(encode, line(rng, work, (0.2, 10)))


def alpha_heavy(rng: np.random.Generator, work: Workload) -> CostModel:
    return CostModel(sorting(rng, work, 0.03, 1.0), line(rng, work, (1.0, 10.0)))


def balanced(rng: np.random.Generator, work: Workload) -> CostModel:
    return CostModel(sorting(rng, work, 0.1, 3.0), line(rng, work, (0.2, 20.0)))


def piecewise(rng: np.random.Generator, work: Workload) -> CostModel:
    return CostModel(pieces(rng, work, 1e8), pieces(rng, work, 1e6))


FAMILIES: dict[str, Callable[[np.random.Generator, Workload], CostModel]] = {
    "paper": paper,
    "affine": affine,
    "alpha-heavy": alpha_heavy,
    "balanced": balanced,
    "piecewise": piecewise,
}


def instance(family: str, number: int, seed: int, count: int = 0) -> tuple[Workload, CostModel]:
    """Make the instance of that number; ``count`` tensors, or 2 to 14 of them."""
    rng = np.random.default_rng([seed, list(FAMILIES).index(family), number, count])
    work = workload_of(rng, count or int(rng.integers(2, MOST + 1)))
    return work, FAMILIES[family](rng, work)


def real(name: str) -> Workload:
    """A profile's backward pass as its device runs it."""
    ready, numels, seconds = [], [], 0.0
    for layer in reversed(load_profile(name).layers):
        seconds += layer.backward_ms / 1e3
        for parameter in reversed(layer.parameters):
            ready.append(seconds)
            numels.append(parameter.numel)
    return Workload(
        tensors=tuple(range(len(ready))),
        ready_s=tuple(ready),
        numels=tuple(numels),
        nbytes=tuple(n * PAYLOAD for n in numels),
        kinds=("float32",) * len(ready),
    )


# -- quality -------------------------------------------------------------------------------


def gaps_of(work: Workload, costs: CostModel) -> dict[str, float]:
    """Each rule's time over the least, less 1."""
    best = merge.predict(merge.exhaustive(work, costs), work, costs).finish_s
    return {
        name: merge.predict(rule(work, costs), work, costs).finish_s / best - 1.0
        for name, rule in RULES.items()
    }


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Gaps of every rule over all small instances, family by family."""
    rows = []
    each = -(-args.instances // len(args.families))
    for family in args.families:
        numbers = track(range(each), description=f"{family:12}", console=console, transient=True)
        found = [gaps_of(*instance(family, number, args.seed)) for number in numbers]
        for name in RULES:
            gaps = np.array([gap[name] for gap in found])
            rows.append(
                {
                    "family": family,
                    "rule": name,
                    "instances": each,
                    "optimal": float((gaps <= SAME).mean()),
                    "mean_gap": float(gaps.mean()),
                    "worst_gap": float(gaps.max()),
                    "worst": f"{family}:{int(gaps.argmax())}",
                    "gaps": [round(float(gap), 9) for gap in gaps],
                }
            )
    return rows


# -- planning time -------------------------------------------------------------------------


def timed(what: str, work: Workload, costs: CostModel) -> dict[str, Any]:
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        plan = merge.exact(work, costs)
        taken.append(time.perf_counter() - begin)
    finish = merge.predict(plan, work, costs).finish_s
    gaps = {
        name: merge.predict(rule(work, costs), work, costs).finish_s / finish - 1.0
        for name, rule in PUBLISHED.items()
    }
    return {"what": what, "tensors": len(work), "buckets": len(plan.buckets),
            "plan_s": statistics.median(taken), "finish_s": finish, "gaps": gaps}  # fmt: skip


def plan_large(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan the large instances and the real profiles."""
    jobs = [
        (family, *instance(family, number, args.seed, LARGE))
        for family in args.families
        for number in range(args.large)
    ]
    for name in PROFILES:
        work = real(name)
        jobs += [
            (name, work, CostModel(Linearithmic(gamma, 1.0), Linear(alpha, BETA_S)))
            for alpha in ALPHAS_S
            for gamma in GAMMAS_S
        ]
    # The first call imports, and is not counted.
    merge.exact(*instance("paper", 0, args.seed))
    done = track(jobs, description="large       ", console=console, transient=True)
    return [timed(*job) for job in done]


# -- results -------------------------------------------------------------------------------


def gaps_table(rows: list[dict[str, Any]]) -> Printed:
    """Return the gaps of each rule."""
    cells = [
        (
            f"{row['family']}, {row['rule']}",
            str(row["instances"]),
            f"{row['optimal']:.1%}",
            f"{row['mean_gap']:.2%}",
            f"{row['worst_gap']:.1%}",
            row["worst"] if row["worst_gap"] > SAME else "",
        )
        for row in rows
    ]
    columns = ("family, rule", "instances", "optimal", "mean gap", "worst gap", "worst")
    return Printed.of("plans against the best of all", columns, cells)


def times_table(rows: list[dict[str, Any]]) -> Printed:
    """Return the exact planner's time, and what the paper's loses against it."""
    cells = []
    for what in [*dict.fromkeys(row["what"] for row in rows), "all"]:
        some = [row for row in rows if what in (row["what"], "all")]
        taken = [1e3 * row["plan_s"] for row in some]
        gaps = [row["gaps"]["Algorithm 1"] for row in some]
        cells.append(
            (
                what,
                "" if what == "all" else str(some[0]["tensors"]),
                str(len(some)),
                f"{statistics.median(taken):.0f}",
                f"{min(taken):.0f} .. {max(taken):.0f}",
                f"{statistics.mean(gaps):.2%}",
                f"{max(gaps):.1%}",
            )
        )
    columns = (
        "instances",
        "tensors",
        "plans",
        "median ms",
        "least .. largest, ms",
        "mean gap of Algorithm 1",
        "worst",
    )
    return Printed.of("planning time of the exact planner", columns, cells)


def show_one(name: str, seed: int) -> None:
    """Print one instance, its costs, and the plan of each rule."""
    family, _, number = name.partition(":")
    if family not in FAMILIES:
        raise unknown("family", family, FAMILIES)
    if not number.isdigit():
        raise UsageError(f"instance {name!r}: allowed is FAMILY:NUMBER, as in paper:17")
    work, costs = instance(family, int(number), seed)
    print(f"{name} with seed {seed}: encode {costs.encode}, exchange {costs.exchange}")
    for ready, numel in zip(work.ready_s, work.numels, strict=True):
        print(f"  ready {1e3 * ready:9.4f} ms   {numel:8d} elements")
    for rule, planner in {"exhaustive": merge.exhaustive, **RULES}.items():
        plan = planner(work, costs)
        finish = merge.predict(plan, work, costs).finish_s
        buckets = " ".join(str(list(bucket.tensors)) for bucket in plan.buckets)
        print(f"{rule:12} {1e3 * finish:10.4f} ms  {buckets}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """For each family, the share of instances whose gap under Algorithm 1 is larger."""
    figure = blank("distribution of gaps", (7.2, 4.4), 150)
    axes = figure.subplots()
    colors = ("#2a78d6", "#e0762d", "#2f9e62", "#8a5bc7", "#c2405a")
    for row, color in zip(
        (row for row in rows if row["rule"] == "Algorithm 1"), colors, strict=False
    ):
        gaps = np.sort(row["gaps"]) * 100
        share = 100.0 * (1.0 - np.arange(len(gaps)) / len(gaps))
        label = f"{row['family']}: optimal in {row['optimal']:.0%}, worst {row['worst_gap']:.0%}"
        axes.step(gaps, share, where="pre", color=color, linewidth=2, label=label)
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=0.0)
    axes.set_ylim(0.0, 100.0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes.set_xlabel("time over the optimum, linear up to 1%, then logarithmic")
    axes.set_ylabel("instances with at least that gap, %")
    axes.grid(color="#e3e6ea")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    count = rows[0]["instances"]
    axes.set_title(
        f"Algorithm 1 of OMGS-SGD against the best plan\n"
        f"{count} random instances of each family, 2 to {MOST} tensors",
        fontsize=11,
    )
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format="png")


def missed(gaps: list[dict[str, Any]], times: list[dict[str, Any]]) -> list[str]:
    """One line for each limit that is missed."""
    lines = [
        f"{row['family']}: exact misses the optimum, by {row['worst_gap']:.2%} in {row['worst']}"
        for row in gaps
        if row["rule"] == "exact" and row["optimal"] < 1.0
    ]
    median = statistics.median(row["plan_s"] for row in times) if times else 0.0
    if median >= PLAN_S:
        lines.append(f"planning takes {1e3 * median:.0f} ms, not below {1e3 * PLAN_S:.0f} ms")
    return lines


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write all figures")
    parser.add_argument("--png", metavar="FILE", type=Path, help="where to draw the gaps")
    parser.add_argument("--instances", type=int, default=6000, help="small ones, in all (6000)")
    parser.add_argument("--large", type=int, default=12, help="large ones of each family (12)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", metavar="FAMILY:NUMBER", help="print one instance and stop")
    args = parser.parse_args()
    if args.instances < 1 or args.large < 0 or args.seed < 0:
        parser.error("--instances must be at least 1, --large and --seed at least 0")
    return args


def run(args: argparse.Namespace) -> int:
    if args.show:
        show_one(args.show, args.seed)
        return 0
    begin = time.perf_counter()
    gaps = compare(args)
    report: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
    show(report, gaps_table(gaps))
    times = plan_large(args)
    show(report, times_table(times))
    found = [row for row in gaps if row["rule"] == "Algorithm 1"]
    found = [row for row in found if row["family"] in THEOREM] or found
    worst = max(found, key=lambda row: row["worst_gap"])
    print(f"Algorithm 1 at its worst (again: --seed {args.seed} --show {worst['worst']}):")
    show_one(worst["worst"], args.seed)
    lines = missed(gaps, times)
    if args.json:
        report |= {"seed": args.seed, "seconds": time.perf_counter() - begin}
        write(args.json, report | {"missed": lines, "gaps": gaps, "large": times})
    if args.png:
        draw(gaps, args.png)
    for line_ in lines:
        print(line_, file=sys.stderr)
    return int(bool(lines))


def main() -> int:
    """Run; print a user error as one line."""
    try:
        return run(parsed())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
