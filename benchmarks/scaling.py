"""Iteration and efficiency of each strategy with 8 to 100,000 workers: closed forms, and events.

    python benchmarks/scaling.py --json out/scaling.json
    python benchmarks/scaling.py --models bert_base --gbit 100 --latency-us 5 --svg out/scaling.svg
    python benchmarks/scaling.py --rows ring DeAR --most 64     (fewer events: seconds)

Nothing is measured. `closed_forms.py` has the arithmetic of each strategy's schedule, for any
number of workers. Up to a number that seconds can afford, `wingbeat.simulator` runs the same in
events, with the state machines of a real run, and both are printed side by side. All workers are
equal, each on a host with one link; copies and updates are an accelerator's, and take no time.
Efficiency is the iteration of one worker alone by that of all; for averages of models it is that of
steps, which are worth less than steps with the gradients of all workers.

The group generator answers ``--requests-per-s`` beside its messages; by default what
docs/results/generator.json has of the smart rules with the most workers, if it is kept, else its
messages alone count.

Exit code 1 if a closed form differs from events by more than 5%.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import closed_forms
from closed_forms import Iteration, Setting
from common import at_least_two, run_and_judge, show, write

from wingbeat import (
    ADPSGD,
    OMGS,
    AllReduce,
    Canary,
    DeAR,
    DiLoCo,
    LowRank,
    ParameterServer,
    Ripples,
    Sketch,
    Strategy,
    simulator,
)
from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.methods.bounded_staleness.messages import largest_control_bytes
from wingbeat.observe.timeline import blank
from wingbeat.parts import Bounded, Groups, Local, Pairs
from wingbeat.prediction.costs import work_of
from wingbeat.simulator import coding_of
from wingbeat.transport.messages.frames import Limits
from wingbeat.types import Layout
from wingbeat_lab import paced
from wingbeat_lab.bench.simulated import GOODPUT
from wingbeat_lab.bench.table import Printed

WITHIN = 0.05
"""Largest difference of a closed form from events, as a share of the latter."""

SIZES = (8, 64, 512, 4096, 32_768, 100_000)
COMPARED = (8, 16, 32, 64, 512, 4096)
"""Numbers of workers of which events are simulated, up to a row's most."""

LARGEST = 100_000
PER_HOST = 8
STEPS = 8
"""Iterations of workers that are not in lockstep."""

GENERATOR = Path(__file__).parents[1] / "docs/results/generator.json"

Form = Callable[[Setting, Strategy, int], Iteration]


@dataclass(frozen=True)
class Row:
    """A strategy, its closed form, and the most workers of which events take seconds."""

    name: str
    strategy: Strategy
    form: Form
    most: int
    per_host: int = 1

    def layout(self, workers: int) -> Layout:
        """Return the hosts of so many workers."""
        return Layout.even(workers // self.per_host, self.per_host)


def _whole(setting: Setting, strategy: Strategy, workers: int) -> Iteration:
    return closed_forms.grouped(setting, strategy, workers, workers)


def _in_groups(setting: Setting, strategy: Strategy, workers: int) -> Iteration:
    assert isinstance(strategy.exchange, Groups), "groups of the generator"
    return closed_forms.grouped(setting, strategy, workers, strategy.exchange.size)


PAIRED = 32
"""Workers whose events stand for any number of them that average in pairs."""


def _in_pairs(setting: Setting, strategy: Strategy, _workers: int) -> Iteration:
    assert isinstance(strategy.exchange, Pairs), "averages of pairs"
    encrypted = strategy.exchange.encrypted
    return closed_forms.paired(setting, _pairs_s(setting, encrypted, PAIRED), encrypted)


@functools.cache
def _pairs_s(setting: Setting, encrypted: bool, workers: int) -> float:
    """Return the seconds of a step by events."""
    return simulator.simulate_pairs(
        setting.model, Layout.even(workers, 1), setting.links, work=setting.work, jitter=0.0,
        iterations=STEPS, warmup=2, encrypted=encrypted,
    ).iteration_s  # fmt: skip


_SUMS, _DEAR = closed_forms.under_backward, closed_forms.decoupled
_TWO_LEVEL: Form = functools.partial(_SUMS, inside=PER_HOST)

ROWS = (
    Row("ring", AllReduce(), _SUMS, 4096),
    Row("DeAR", DeAR(plan="fixed"), _DEAR, 4096),
    Row("doubling", AllReduce(topology="doubling"), _SUMS, 512),
    Row("mesh", AllReduce(topology="mesh"), _SUMS, 512),
    Row("two levels", AllReduce(), _TWO_LEVEL, 512, PER_HOST),
    Row("sketch", AllReduce(compression=Sketch(auto_disable=False)), _SUMS, 512),
    Row(
        "low rank",
        AllReduce(compression=LowRank(rank=4, auto_disable=False)),
        closed_forms.low_rank,
        512,
    ),
    Row("top-k", OMGS(merge="one"), closed_forms.gathered, 512),
    Row("servers", ParameterServer(), closed_forms.served, 16),
    Row("8 servers", ParameterServer(servers=8), closed_forms.served, 32),
    Row("Canary", Canary(), closed_forms.bounded, 512),
    Row("Ripples", Ripples(), _in_groups, 4096),
    Row("AD-PSGD", ADPSGD(), _in_pairs, 64),
    Row("DiLoCo", DiLoCo(), _whole, 4096),
)


# -- events ----------------------------------------------------------------------------------


def simulated(row: Row, setting: Setting, workers: int) -> float:
    """Return the seconds of an iteration by events."""
    exchange = row.strategy.exchange
    if isinstance(exchange, Groups):
        return _averaged(row.strategy, exchange, setting, row.layout(workers))
    if isinstance(exchange, Pairs):
        return _pairs_s(setting, exchange.encrypted, workers)
    if isinstance(exchange, Bounded):
        few, more = (
            simulator.simulate_bounded(
                setting.model, exchange.thresholds(row.strategy.plan.fusion().layers), workers,
                setting.links, gradients=float(steps * workers), work=setting.work,
                coding=coding_of(row.strategy.wire), pool=workers > STEPS,
            ).seconds
            for steps in (STEPS, 2 * STEPS)
        )  # fmt: skip
        return (more - few) / STEPS
    run = simulator.simulate(
        setting.model, row.strategy, workers, setting.links, work=setting.work,
        iterations=3, layout=row.layout(workers),
    )  # fmt: skip
    return run.iterations_s[-1]


def _averaged(strategy: Strategy, groups: Groups, setting: Setting, layout: Layout) -> float:
    local = strategy.schedule
    assert isinstance(local, Local), "averages need local steps"
    steps = -(-STEPS // local.every) * local.every
    return simulator.simulate_groups(
        setting.model, groups.rules, layout,
        setting.links, work=setting.work, jitter=0.0, every=local.every, iterations=steps,
        warmup=steps, represented=True,
    ).iteration_s  # fmt: skip


# -- the report ------------------------------------------------------------------------------

DEMANDS = {
    "latency_s": "latency",
    "bytes_s": "NIC",
    "thread_s": "thread",
    "generator_s": "generator",
    "server_s": "servers",
}
"""What an iteration demands, by the attribute of `Iteration`."""


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report; return the differences that are too large."""
    rows = [row for row in ROWS if row.name in args.rows]
    report |= {"sizes": SIZES, "requests_per_s": requests_per_s(args), "models": {}}
    missed = []
    for model in args.models:
        setting = setting_of(args, model)
        found: dict[str, Any] = {"alone_s": setting.alone_s, "rows": {}}
        report["models"][model] = found
        for row in rows:
            found["rows"][row.name] = one = calculated(row, setting, report["requests_per_s"])
            one["compared"] = compared(row, setting, args.most)
            write(args.json, report)
            print(f"{model}, {row.name}: {one['took_s']:.1f} s", file=sys.stderr, flush=True)
            missed += [
                f"{model}, {row.name}, {each['workers']:,} workers: the closed form is "
                f"{each['difference']:+.1%} from events; allowed are {WITHIN:.0%}"
                for each in one["compared"]
                if abs(each["difference"]) > WITHIN
            ]
        where = f"{model}, {args.gbit:g} Gbit/s, {args.latency_us:g} us"
        for table in (efficiencies, demands, differences):
            show(report, table(where, found["rows"]))
        if args.svg is not None and model == args.models[0]:
            draw(where, found["rows"], args.svg)
    show(report, growing())
    write(args.json, report)
    return missed


def setting_of(args: argparse.Namespace, model: str) -> Setting:
    """Return the model and the links of a command line."""
    if args.gbit <= 0 or args.latency_us < 0:
        raise UsageError("allowed are --gbit above 0 and --latency-us from 0")
    profile = paced.load_profile(model)
    links = simulator.Links(
        bytes_per_s=args.gbit * 1e9 / 8 * GOODPUT, latency_s=1e-6 * args.latency_us
    )
    return Setting(paced.simulator_model(profile), links, work_of(profile)[0])


def requests_per_s(args: argparse.Namespace) -> float | None:
    """Return the given rate of the generator's state machine, or the one that is kept."""
    if args.requests_per_s is not None or not GENERATOR.exists():
        return args.requests_per_s  # type: ignore[no-any-return]
    rows = json.loads(GENERATOR.read_text(encoding="utf-8"))["report"]["rows"]
    smart = [row for row in rows if row["rules"] == "+ filter"]
    return float(max(smart, key=lambda row: row["workers"])["requests_per_s"])


def calculated(row: Row, setting: Setting, rate: float | None) -> dict[str, Any]:
    """Return a row by its closed form."""
    own = replace(setting, requests_per_s=rate or math.inf)

    def form(workers: int) -> Iteration:
        return row.form(own, row.strategy, workers)

    def efficiency(workers: int) -> float:
        return setting.alone_s / form(workers).seconds

    begun = time.perf_counter()
    sizes = {}
    for workers in SIZES:
        each = form(workers)
        sizes[workers] = {
            "iteration_s": each.seconds,
            "efficiency": setting.alone_s / each.seconds,
            **{demand: getattr(each, demand) for demand in DEMANDS},
        }
    curve = {workers: efficiency(workers) for workers in points(row.per_host)}
    half = below_half(efficiency, row.per_host)
    stops = form(half or LARGEST)
    reason = max(DEMANDS, key=lambda demand: getattr(stops, demand))
    took_s = time.perf_counter() - begun
    return {
        "strategy": repr(row.strategy), "sizes": sizes, "curve": curve, "half": half,
        "reason": DEMANDS[reason], "took_s": took_s,
    }  # fmt: skip


def points(per_host: int) -> list[int]:
    """Return numbers of workers for a curve, evenly apart in logarithms."""
    grid = [SIZES[0] * (LARGEST / SIZES[0]) ** (place / 48) for place in range(49)]
    return sorted({max(2, round(each / per_host)) * per_host for each in grid})


def below_half(efficiency: Callable[[int], float], per_host: int) -> int | None:
    """Return the least number of workers whose efficiency is below one half; None: none is."""
    low, high = 1, LARGEST // per_host
    if efficiency(high * per_host) >= 0.5:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if efficiency(middle * per_host) < 0.5:
            high = middle
        else:
            low = middle
    return high * per_host


def compared(row: Row, setting: Setting, most: int) -> list[dict[str, Any]]:
    """Return closed forms beside events, where both run."""
    found = []
    for workers in COMPARED:
        if workers > min(row.most, most) or workers % row.per_host:
            continue
        begun = time.perf_counter()
        events = simulated(row, setting, workers)
        form = row.form(setting, row.strategy, workers).seconds
        found.append(
            {
                "workers": workers,
                "events_s": events,
                "form_s": form,
                "difference": form / events - 1,
                "took_s": time.perf_counter() - begun,
            }
        )
    return found


def efficiencies(where: str, rows: dict[str, Any]) -> Printed:
    """Return the efficiency of each row by workers, and what ends its scaling."""
    columns = ("strategy", *(f"{size:,}" for size in SIZES), "below 0.5 from", "most time")
    cells = [
        (
            name,
            *(f"{each['efficiency']:.2f}" for each in row["sizes"].values()),
            "" if row["half"] is None else f"{row['half']:,}",
            row["reason"],
        )
        for name, row in rows.items()
    ]
    notes = ["most time: the largest demand at that number of workers, or at 100,000"]
    return Printed.of(f"efficiency by workers: {where}", columns, cells, notes)


def demands(where: str, rows: dict[str, Any]) -> Printed:
    """Return what an iteration demands of each resource."""
    columns = ("strategy, workers", "iteration, ms", *(f"{d}, ms" for d in DEMANDS.values()))
    cells = [
        (
            f"{name}, {size:,}",
            *(f"{1e3 * row['sizes'][size][key]:,.1f}" for key in ("iteration_s", *DEMANDS)),
        )
        for name, row in rows.items()
        for size in (64, 4096)
    ]
    return Printed.of(f"what an iteration demands, overlapped or not: {where}", columns, cells)


def differences(where: str, rows: dict[str, Any]) -> Printed:
    """Return closed forms beside events."""
    columns = ("strategy, workers", "closed form, ms", "events, ms", "difference")
    cells = [
        (
            f"{name}, {each['workers']:,}",
            f"{1e3 * each['form_s']:.1f}",
            f"{1e3 * each['events_s']:.1f}",
            f"{each['difference']:+.1%}",
        )
        for name, row in rows.items()
        for each in row["compared"]
    ]
    return Printed.of(f"closed forms and events: {where}", columns, cells)


def growing() -> Printed:
    """Return what grows with the workers beside an iteration."""
    canary = next(row.strategy for row in ROWS if row.name == "Canary")
    assert isinstance(canary.exchange, Bounded), "bounded staleness"
    count = canary.plan.fusion().layers
    rounds = canary.exchange.thresholds(count).max_buffered
    limit = Limits().message
    cells = [
        ("reads of the store at start-up", *(f"{size * (size - 1):,}" for size in SIZES)),
        ("connections of a mesh, of each worker", *(f"{size - 1:,}" for size in SIZES)),
        *(
            (
                f"Canary, MiB of {limit >> 20}: {name}",
                *(f"{largest_control_bytes(size, count, kept) / 2**20:,.3g}" for size in SIZES),
            )
            for name, kept in (("a view proposal", 0), ("a reply to a restarted worker", rounds))
        ),
    ]
    return Printed.of("what grows beside an iteration", ("", *map("{:,}".format, SIZES)), cells)


# -- the picture -----------------------------------------------------------------------------

_DASHES = ("-", "--", ":")


def draw(where: str, rows: dict[str, Any], path: Path) -> None:
    """Draw the efficiency of each row against the number of workers."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "wingbeat", "svg.fonttype": "none"}):
        figure = blank("curve", (10.5, 5.2), 100)
        axes = figure.add_subplot()
        colours = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
        for place, (name, row) in enumerate(rows.items()):
            half = "" if row["half"] is None else f", below 0.5 from {row['half']:,}"
            axes.plot(
                list(row["curve"]), list(row["curve"].values()), label=f"{name}{half}",
                color=colours[place % len(colours)], linestyle=_DASHES[place // len(colours)],
                linewidth=1.6,
            )  # fmt: skip
        axes.axhline(0.5, color="#2b2f36", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(SIZES[0], LARGEST)
        axes.set_ylim(0, 1.02)
        axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
        axes.minorticks_off()
        axes.set_xlabel("workers")
        axes.set_ylabel("efficiency")
        axes.set_title(where, loc="left", fontsize=10, fontweight="bold")
        axes.grid(color="#e4e7eb", linewidth=0.7)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5,
        )  # fmt: skip
        figure.tight_layout()
        with replacing(path) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> int:
    """Calculate and simulate the requested rows, print tables and judge the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--models", nargs="+", default=["resnet50"], metavar="NAME")
    parser.add_argument("--rows", nargs="+", default=names, choices=names, metavar="NAME",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--gbit", type=float, default=10.0, help="of each link (10)")
    parser.add_argument("--latency-us", type=float, default=100.0, help="of each link (100)")
    parser.add_argument(
        "--most", type=at_least_two, default=COMPARED[-1], help="workers with events (4096)"
    )
    parser.add_argument("--requests-per-s", type=float, help="of the generator, without messages")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the first model")
    parser.add_argument("--json", type=Path, default=Path("out/scaling.json"), metavar="FILE")
    args = parser.parse_args()
    return run_and_judge(args.json, functools.partial(measure, args))


if __name__ == "__main__":
    sys.exit(main())
