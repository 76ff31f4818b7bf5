"""DeAR's share of its bound, S / S_max by the paper's Eq. 6, on its five models and two networks.

    python benchmarks/dear.py --json out/dear.json
    python benchmarks/dear.py --rates slow --models resnet50 bert_base --iterations 6
    python benchmarks/dear.py --rates fast --mb 10 bert_large=20
    python benchmarks/dear.py --rows ddp allreduce dear:plan=fixed,mb={mb} dear:plan=none
    python benchmarks/dear.py --models inception_v4_dear bert_large_dear

It reproduces Table II; Figs. 5 to 7, 9 and 11 are in ``dear_figures.py``, Fig. 10 in ``tuning.py``.

Each model is one ``wingbeat bench``: the rows take turns on one lab, and t_ff, t_bp, t_rs and t_ag
are measured in the same run. Times are paced (an RTX 2080 Ti's); bytes and links are real.

The networks are those of the paper, 64 GPUs with 10GbE ("slow") or 100GbIB ("fast"). In a ring of
P workers each moves (P-1)/P of the bytes, so that a host's rate times ((P-1)/P) / (63/64) keeps the
ratio of communication to computation: 7.62 and 76.2 Gbit/s for P = 4. The model's scale shrinks
bytes and rates together, and the stretch slows computation and links down together, until two
cores can carry the traffic (under 500 Mbit/s) and the optimizers of all hosts: these cost real
time, and DenseNet has 604 tensors. The row ``single`` shows the remaining cost. Each model is
measured at real pace as well, with the same rows on the same lab but without slow motion: two cores
carry all hosts there, and may limit the rows. A rate takes twelve to thirteen minutes.

S_max ``by the line rate`` is the paper's: links are perfect there, and TCP alone keeps
S / S_max under 0.956 where communication dominates.

``ceiling`` is the largest S / S_max that any schedule can reach on that model: Eq. 6 ignores
layers, but a gradient cannot be sent before it is computed, and BERT's largest is the last.

``even``, on request, is a network for each model: the rate at which t_ag = 2 t_ff, where DeAR hides
most. Equations 7 and 8 give 1.25x the speed of DDP there. Layer by layer it is 1.24x for the
convolutional networks and 1.15x to 1.20x for BERT, if DDP reaches its own bound.

``fitted``, on request, is the rate of 100GbIB at which the paper's S_max of BERT-Large is 51.8 with
backward twice forward; the two models that end in ``_dear`` have times fitted to Table II instead.
``paper`` is Table II's S_max / P and S / S_max. ``Eq. 9`` is which of its three cases holds (1: all
is hidden; 2: the all-gather outlasts forward; 3: by more than forward), by the measured t_ff and
t_ag, and the maximum speed of DeAR over whole all-reduces there. It assumes that backward is twice
forward, and is ``-`` where that is off by a tenth. ``8 / 7`` is the same by Eqs. 8 and 7 with all
four times. Below 1, as on ``bert_large_dear`` at the fast rate, whole all-reduces hide under
backward, and halves not under forward: there S_max is no bound of DDP.

``of the best DDP`` is relative to the fastest row of DDP, which may have other buckets, or a hook
that sends half the bytes. The limits apply to the first row of DeAR, in slow motion. Exit code 1 if
one is missed: at the slow rate an average of 0.95 and 0.90 for each model, at the fast one an
average of 0.93, never slower than the first row at either, and 1.25x its speed at ``even``.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import run_and_judge, show, write

from wingbeat.errors import UsageError, unknown
from wingbeat_lab import paced
from wingbeat_lab.bench import bound, estimate, runner
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.measure import Measured
from wingbeat_lab.bench.results import Report
from wingbeat_lab.bench.table import Printed

MODELS = ("resnet50", "densenet201", "inception_v4", "bert_base", "bert_large")
ROWS = ("ddp", "dear:plan=fixed,mb={mb}")


@dataclass(frozen=True)
class Network:
    """One of the paper's networks, its emulation, and its limits.

    Attributes:
        gbit: a host's rate in Gbit/s among 64; 0: for each model the rate at which t_ag = 2 t_ff.
        scale: of the models.
        stretch: slow motion.
        iterations: timed ones of each row, over all rounds.
        rounds: how often the rows take turns.
        average: least S / S_max, mean over the models.
        worst: least S / S_max of any model; 0 without a limit.
        gain: least speed-up over the first row, on every model.
    """

    gbit: float
    scale: float
    stretch: float
    iterations: int
    rounds: int
    average: float
    worst: float
    gain: float


NETWORKS = {
    "slow": Network(10.0, 0.05, 3.0, 8, 2, 0.95, 0.90, 1.0),
    "fast": Network(100.0, 0.05, 8.0, 6, 2, 0.93, 0.0, 1.0),
    "fitted": Network(46.49, 0.05, 6.0, 6, 2, 0.0, 0.0, 1.0),
    "even": Network(0.0, 0.05, 3.0, 8, 2, 0.0, 0.0, 1.25),
}
USUAL_MB = 25.0
USUAL_WITHIN = 0.1
"""Allowed deviation of backward from twice forward, as a share, for Eq. 9 to apply."""

PAPER = {
    "slow": {
        "resnet50": (61.6, 0.992),
        "densenet201": (64.0, 0.825),
        "inception_v4": (59.8, 0.945),
        "bert_base": (25.5, 0.939),
        "bert_large": (12.1, 0.980),
    },
    "fast": {
        "resnet50": (64.0, 0.962),
        "densenet201": (64.0, 0.844),
        "inception_v4": (64.0, 0.894),
        "bert_base": (64.0, 0.775),
        "bert_large": (51.8, 0.723),
    },
}
"""Table II, 64 GPUs: S_max, and DeAR's S / S_max."""
PAPER["fitted"] = PAPER["fast"]


def main() -> int:
    """Measure the requested models, print a table and judge it."""
    args = arguments()
    return run_and_judge(args.json, functools.partial(fill, args))


def fill(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, part by part, and return the missed limits."""
    report["rates"] = {}
    missed = []
    sizes = bucket_sizes(args.mb)
    planned = {rate: configs(rate, args, sizes) for rate in args.rates}
    whole = [config for each in planned.values() for config in each.values()]
    long = estimate.of_all([*whole, *filter(None, map(at_real_pace, whole))])
    print(f"takes about {estimate.about(long)}", file=sys.stderr, flush=True)
    for rate, benches in planned.items():
        models: dict[str, Any] = {}
        for number, (name, config) in enumerate(benches.items(), start=1):
            print(f"{rate} {number}/{len(benches)}: {name}", file=sys.stderr, flush=True)
            models[name] = own = figures(config, runner.run(config, command=sys.argv).report)
            real = at_real_pace(config)
            own["real"] = real and figures(real, runner.run(real, command=sys.argv).report)
            report["rates"][rate] = summary(rate, models)
            write(args.json, report)
        show(report, table(rate, report["rates"][rate]))
        write(args.json, report)
        missed += report["rates"][rate]["missed"]
    return missed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--rates", nargs="+", default=["slow", "fast"], choices=list(NETWORKS))
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), help="as for wingbeat bench; {mb} is filled in"
    )
    parser.add_argument(
        "--mb",
        nargs="+",
        default=[],
        metavar="[MODEL=]MB",
        help="what {mb} stands for, for all models or for one (default: 25)",
    )
    parser.add_argument("--iterations", type=int, help="timed ones of each row (default: by rate)")
    parser.add_argument("--rounds", type=int, help="how often the rows take turns")
    parser.add_argument("--warmup", type=int, default=2, help="untimed iterations of each turn")
    parser.add_argument("--workers", type=int, default=4, help="hosts of the lab (default: 4)")
    parser.add_argument("--scale", type=float, help="of the models (default: by rate)")
    parser.add_argument("--stretch", type=float, help="slow motion (default: by rate)")
    parser.add_argument("--json", type=Path, default=Path("out/dear.json"))
    return parser.parse_args()


def bucket_sizes(words: list[str]) -> dict[str, float]:
    """``["10", "bert_large=20"]`` as sizes by model; the one for all models is under ``""``."""
    sizes = {}
    for word in words:
        name, _, size = word.rpartition("=")
        if name and name not in MODELS:
            raise unknown("model", name, MODELS, where=f"--mb {word}")
        try:
            sizes[name] = float(size)
        except ValueError:
            raise UsageError(f"--mb {word}: {size!r} is no number of MB") from None
    return sizes


def host_rate(gbit: float, workers: int) -> str:
    """The rate of a host in a small ring, equivalent to one of 64 with ``gbit`` Gbit/s each.

    >>> host_rate(10.0, 4)
    '7619mbit'
    """
    return f"{1e3 * gbit * ((workers - 1) / workers) / (63 / 64):.0f}mbit"


def even_gbit(name: str) -> float:
    """The rate in Gbit/s among 64 at which the model's all-gather takes twice its forward.

    There DeAR hides most: with t_bp = 2 t_ff, Eq. 7 is 4 t_ff and DDP's Eq. 8 is 5 t_ff.
    """
    profile = paced.load_profile(name)
    nbytes = 4 * sum(layer.numel for layer in profile.layers)
    return 63 / 64 * nbytes * 8 / (2 * profile.forward_ms * 1e-3) / 1e9


def configs(rate: str, args: argparse.Namespace, sizes: dict[str, float]) -> dict[str, BenchConfig]:
    """One bench for each model, checked before any measurement."""
    network = NETWORKS[rate]
    if args.workers < 2:
        raise UsageError(f"--workers {args.workers}: allowed are 2 or more")
    out = {}
    for name in args.models:
        usual = sizes.get("", USUAL_MB)
        mb = sizes.get(name, usual)
        iterations = args.iterations or network.iterations
        gbit = network.gbit or even_gbit(name)
        out[name] = BenchConfig(
            lab=f"star:{args.workers}@{host_rate(gbit, args.workers)}",
            model=f"paced:{name}@{args.scale or network.scale:g}",
            strategies=tuple(row.replace("{mb}", f"{mb:g}") for row in args.rows),
            iterations=iterations,
            rounds=min(args.rounds or network.rounds, iterations),
            warmup=args.warmup,
            stretch=args.stretch or network.stretch,
        )
        if not any(row.traits.halves for row in out[name].check().rows):
            raise UsageError(f"--rows {' '.join(args.rows)}: needs a row of dear, which is judged")
    return out


def at_real_pace(config: BenchConfig) -> BenchConfig | None:
    """The same without slow motion; None if it has none."""
    return None if config.stretch == 1.0 else replace(config, stretch=1.0)


def figures(config: BenchConfig, report: Report) -> dict[str, Any]:
    """One bench's results, in the paper's terms."""
    checked, measured = config.check(), report.measured
    assert measured is not None
    rows = {
        run.strategy: {
            "speedup": run.speedup,
            "fraction": run.fraction_of_s_max,
            "of_line": run.bound_eq6_s and run.bound_eq6_s / run.iteration_s.median,
            "ratio": run.ratio,
            "ratio_to_best_ddp": run.ratio_to_best_ddp,
            "limited_by_cores": run.limited_by_cores,
            "iteration_s": asdict(run.iteration_s),
            "exposed_s": run.exposed_s,
            "final_loss": run.final_loss,
        }
        for run in report.runs
    }
    judged = next(row.text for row in checked.rows if row.traits.halves)
    return {
        "lab": report.lab,
        "judged": judged,
        "s_max": measured.s_max,
        "s_max_of_line": line_s_max(report, judged),
        "s_max_64": 64 * measured.s_max / measured.workers,
        "ceiling": ceiling(checked, measured),
        "eq9": eq9(measured),
        "rows": rows,
        "measured": asdict(measured),
        "config": asdict(config),
        "load_before": report.machine["load_before"],
    }


def line_s_max(report: Report, judged: str) -> float | None:
    """S_max with the paced times of computation, and with links at their line rate."""
    run = next(run for run in report.runs if run.strategy == judged)
    if not run.bound_eq6_s or report.compute_s is None:
        return None
    return report.workers * sum(report.compute_s.values()) / run.bound_eq6_s


def ceiling(checked: Checked, measured: Measured) -> float | None:
    """Largest S / S_max of any schedule: Eq. 6 over the layer-by-layer bound, at one rate."""
    layers = checked.model.layers(next(row for row in checked.rows if row.traits.halves))
    if layers is None:
        return None
    per_byte = (measured.t_rs_s + measured.t_ag_s) / 2 / measured.nbytes
    simple, floor = (f("halves", layers, per_byte) for f in (bound.simple, bound.floor))
    return simple / floor if simple and floor else None


def eq9(measured: Measured) -> dict[str, float | None]:
    """The case of Eq. 9 by the measured times, and DeAR's maximum gain by it.

    ``general`` is Eq. 8 over Eq. 7. Where backward is not twice forward Eq. 9 has no case.
    """
    forward, backward = measured.t_ff_s, measured.t_bp_s
    whole = forward + max(backward, measured.t_rs_s + measured.t_ag_s)
    general = whole / measured.bound_s
    if abs(backward / forward - 2) > 2 * USUAL_WITHIN:
        return {"case": None, "saved_s": None, "gain": None, "general": general}
    case, saved = bound.three_cases(forward, measured.t_ag_s)
    gain = 1 + saved / measured.bound_s
    return {"case": case, "saved_s": saved, "gain": gain, "general": general}


def of_paper(rate: str, name: str) -> tuple[float, float] | None:
    """S_max / P and S / S_max of Table II; None if the paper has none."""
    found = PAPER.get(rate, {}).get(name.removesuffix("_dear"))
    return None if found is None else (found[0] / 64, found[1])


def summary(rate: str, models: dict[str, Any]) -> dict[str, Any]:
    """The models of one rate together, and the missed limits."""
    network = NETWORKS[rate]
    fractions = {name: own["rows"][own["judged"]]["fraction"] for name, own in models.items()}
    average = statistics.fmean(fractions.values())
    worst = min(fractions, key=lambda name: fractions[name])
    missed = []
    if average < network.average:
        missed.append(f"{rate}: S/S_max is {average:.3f} on average; limit {network.average}")
    for name, value in fractions.items():
        if value < network.worst:
            missed.append(f"{rate}: S/S_max of {name} is {value:.3f}; limit {network.worst}")
    gains = {name: 1 / own["rows"][own["judged"]]["ratio"] for name, own in models.items()}
    for name, value in gains.items():
        if value < network.gain:
            missed.append(f"{rate}: {name} is {value:.3f}x the first row; limit {network.gain}")
    return {
        "average": average,
        "worst": {"model": worst, "fraction": fractions[worst]},
        "limits": {"average": network.average, "worst": network.worst, "gain": network.gain},
        "missed": missed,
        "models": models,
    }


COLUMNS = (
    "model, strategy",
    "S_max / P by the line rate",
    "S_max / P",
    "the paper's S_max / P",
    "Eq. 9 (case)",
    "Eq. 8 / Eq. 7",
    "iteration, ms",
    "p10 .. p90, ms",
    "S / P",
    "real pace: S / S_max by the line rate",
    "real pace: S / S_max",
    "real pace: time, of the best DDP's",
    "S / S_max by the line rate",
    "S / S_max",
    "the paper's S / S_max",
    "ceiling",
    "time, of the best DDP's",
    "time, of the first row's",
)


def table(rate: str, results: dict[str, Any]) -> Printed:
    """Return one rate's table for printing, with notes where the judged row is slower."""
    gbit = NETWORKS[rate].gbit
    where = f"as on 64 GPUs with {gbit:g} Gbit/s each" if gbit else "where t_ag = 2 t_ff"
    cells, models = [], results["models"]
    for name, own in models.items():
        workers, paper, eq9_ = own["measured"]["workers"], of_paper(rate, name), own["eq9"]
        for row, made in own["rows"].items():
            judged, real = row == own["judged"], (own["real"] or own)["rows"][row]
            ms = [1e3 * made["iteration_s"][key] for key in ("median", "p10", "p90")]
            cells.append(
                (
                    f"{name}, {row}",
                    three(own["s_max_of_line"] and own["s_max_of_line"] / workers),
                    three(own["s_max"] / workers),
                    three(paper and paper[0]),
                    f"{eq9_['gain']:.3f} ({eq9_['case']})" if eq9_["case"] else "",
                    three(eq9_["general"]),
                    f"{ms[0]:.0f}",
                    f"{ms[1]:.0f} .. {ms[2]:.0f}",
                    three(made["speedup"] / workers),
                    three(real["of_line"]),
                    three(real["fraction"]),
                    three(real["ratio_to_best_ddp"]),
                    three(made["of_line"]),
                    three(made["fraction"]),
                    three(paper and judged and paper[1]),
                    three(judged and own["ceiling"]),
                    three(made["ratio_to_best_ddp"]),
                    three(made["ratio"]),
                )
            )
    one = next(iter(models.values()))
    motions = sorted({own["config"]["stretch"] for own in models.values()})
    title = (
        f"{rate}: {where}; {one['measured']['workers']} workers on {one['lab']}, slow motion of "
        f"{', '.join(f'{each:g}' for each in motions)} and real pace, "
        f"{one['config']['iterations']} iterations each"
    )
    return Printed.of(title, COLUMNS, cells, notes(results))


def notes(results: dict[str, Any]) -> list[str]:
    """Return where a model's judged row is slower, the averages, and saturated cores."""
    lines = []
    for name, own in results["models"].items():
        for pace, part in (("", own), (", real pace", own["real"])):
            rows = part["rows"] if part else {}
            judged = rows and rows[own["judged"]]["ratio"]
            lines += [
                f"behind: {name}{pace}: {own['judged']} takes {judged / made['ratio']:.3f} times "
                f"as long as {row}"
                for row, made in rows.items()
                if made["ratio"] < judged
            ]
            if full := [row for row, made in rows.items() if made["limited_by_cores"]]:
                lines.append(f"limited by this machine's cores: {name}{pace}: {', '.join(full)}")
    worst = results["worst"]
    return [
        *sorted(lines),  # slower rows come first alphabetically
        f"S / S_max of the judged rows: {results['average']:.3f} on average, "
        f"{worst['fraction']:.3f} at worst ({worst['model']})",
    ]


def three(value: float | None) -> str:
    """Three decimals, or empty."""
    return f"{value:.3f}" if value else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
