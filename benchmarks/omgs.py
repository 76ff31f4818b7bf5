"""OMGS-SGD against TopK-SGD, LAGS-SGD and MGS-SGD: Tables V and VI and Fig. 4 of its paper.

    python benchmarks/omgs.py --json out/omgs.json --png out/omgs.png
    python benchmarks/omgs.py --models resnet50 --iterations 6 --rounds 2
    python benchmarks/omgs.py --rate 10gbit --stretch 2 --models vgg16_cifar_bn lstm_ptb
    python benchmarks/omgs.py --strategies topksgd mgs omgs mgwfbp psgd
    python benchmarks/omgs.py --workers 8 --models resnet50 densenet201 --rate 100mbit 400mbit \
        --scale 0.3 --stretch 1 --strategies topksgd omgs omgs:merge=exact omgs:merge=paper \
        --iterations 60 --rounds 5 --within 0.01

Each model is one ``wingbeat bench``: the rows take turns on one lab of 16 hosts, and train the
density of the paper's Table IV. Times are paced (an RTX 2080 Ti's); the selection of the largest
gradients, bytes and links are real. The rate keeps the ratio of the paper's 1 Gbit/s to its GPU's
time with its batch: 1 Gbit/s times (seconds of an iteration there / here), and with fewer than 16
workers less, in proportion to the gathered bytes. ``SETTINGS`` has the rates, and for each model a
scale, which shrinks gradients and rates together, and a stretch, which is slow motion for
computation and links: the CPU time of 16 workers on two cores must fit into the paced time of their
computation. The minimum cost of a message is that of the two cores and does not scale.

The paper's figures, which are of other hardware, are in the table as well: ratios to TopK-SGD and
MGS-SGD and the number of merged layers. VGG-16 is CIFAR-10's, of 54 tensors, as in the paper.

A row that plans its merging predicts the time of an iteration, which is compared with the median.
The picture has Fig. 4's parts, measured in a few additional iterations that are recorded: forward,
backward, sparsification (backward's wait for the selection of gradients) and the exposed
communication, decoding included. The bar under a row is its plan's prediction, where forward
includes the update and all else that merging does not change.

The limits apply to the first row of ``omgs``. Exit code 1 if one is missed: it takes at most 3%
longer (``--within``) than the fastest row of all that send the largest gradients only, whatever
their plan, and its prediction is at most 10% off (``--off``).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import end_as_by_ctrl_c, show, write

from wingbeat.errors import UsageError, WingbeatError
from wingbeat.files import replacing
from wingbeat.observe.timeline import COLOURS, blank
from wingbeat_lab.bench import estimate, machine, runner
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.table import Printed, milliseconds
from wingbeat_lab.cli.bench import check_writable, need_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODELS = ("vgg16_cifar_bn", "resnet50", "inception_v4", "lstm_ptb")
ROWS = ("topksgd", "lags", "mgs", "omgs", "omgs:merge=paper")
DENSITY, DENSITIES = 0.001, {"lstm_ptb": 0.005}
"""Table IV."""

PAPER_S: dict[str, dict[str, float]] = {
    "vgg16_cifar_bn": {"topksgd": 0.336, "mgs": 0.523, "omgs": 0.331},
    "resnet50": {"topksgd": 0.666, "mgs": 1.217, "omgs": 0.507},
    "inception_v4": {"topksgd": 1.602, "mgs": 3.389, "omgs": 1.247},
    "lstm_ptb": {"topksgd": 1.019, "mgs": 0.956, "omgs": 0.916},
}
"""Table VI: seconds of an iteration."""

PAPER_LAYERS: dict[str, dict[str, int]] = {
    "vgg16_cifar_bn": {"topksgd": 1, "lags": 54, "mgs": 13, "omgs": 2},
    "resnet50": {"topksgd": 1, "lags": 161, "mgs": 53, "omgs": 2},
    "inception_v4": {"topksgd": 1, "lags": 449, "mgs": 150, "omgs": 7},
    "lstm_ptb": {"topksgd": 1, "lags": 11, "mgs": 9, "omgs": 6},
}
"""Table V: layers after merging."""

SETTINGS: dict[str, tuple[float, float, float]] = {
    "vgg16_cifar_bn": (1170, 0.2, 20.0),
    "vgg16": (1170, 0.03, 2.5),
    "resnet50": (292, 0.1, 4.0),
    "inception_v4": (585, 0.06, 1.5),
    "lstm_ptb": (1170, 0.05, 4.0),
}
"""Rate in Mbit/s, scale and stretch. A P102-100 at the paper's 1.8 GHz has 11.5e12 FLOP/s, the
paced GPU 13.45e12: 1.17 of its time for the same batch; the paper's batch is a quarter of the
profile's for ResNet-50 and half for Inception-v4. ImageNet's VGG-16, which the paper does not have,
is treated as if its batch were the same.
"""

OTHERS = (1000, 0.05, 2.0)
"""The same for models that the paper does not have."""

SPARSE = ("topksgd", "lags", "mgs", "omgs")
"""Rows that send the largest gradients only, so that their plans can be compared."""

PLANNED = ("omgs", "mgwfbp")
"""Rows that measure before they plan, and can save the plan to a file."""

WITHIN, PREDICTION = 0.03, 0.10

PARTS = {
    "forward": "forward",
    "backward": "backward",
    "sparsification": "encode",
    "communication": "all_gather",
    "other": "update",
}
"""Fig. 4's parts, and the event that each takes its colour from."""

_LABELS = {"communication": "non-overlapped communication", "other": "update and other"}
Bar = tuple[str, dict[str, float], bool]  # label, seconds of the parts, whether it is a prediction
_INK, _FAINT, _GRID = "#2b2f36", "#7d848e", "#e4e7eb"


def main() -> int:
    """Measure each model, print its table, draw the picture and judge."""
    args = arguments()
    end_as_by_ctrl_c()
    report: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
    report |= {"command": sys.argv, "models": {}, "missed": []}
    try:
        for path in filter(None, (args.json, args.png)):
            check_writable(path)
        if args.png is not None:
            need_matplotlib()
        with tempfile.TemporaryDirectory(prefix="wingbeat-omgs-") as plans:
            benches = configs(args, Path(plans))
            long = estimate.about(estimate.of_all(benches.values()))
            print(f"takes about {long}", file=sys.stderr, flush=True)
            for number, (name, config) in enumerate(benches.items(), start=1):
                print(f"{number}/{len(benches)}: {name}", file=sys.stderr, flush=True)
                raw = runner.run(config, command=sys.argv).report.to_json()
                limits = args.within, args.off
                report["models"][name] = figures(name, args.strategies, raw, limits)
                report["missed"] += report["models"][name]["missed"]
                show(report, table(name, report["models"][name]))
                # saved after each model, so that no measurement is lost
                write(args.json, report)
        if args.png is not None:
            draw(report["models"], args.png)
    except WingbeatError as err:
        print(f"omgs.py: {err}", file=sys.stderr)
        return 2 if isinstance(err, UsageError) else 1
    for line in report["missed"]:
        print(f"MISSED: {line}")
    return int(bool(report["missed"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    note = "as for wingbeat bench; the paper's density is added where none is given"
    parser.add_argument("--strategies", nargs="+", default=list(ROWS), metavar="ROW", help=note)
    parser.add_argument("--workers", type=int, default=16, help="hosts of the lab (default: 16)")
    note = "of a host, before scaling; several: each by itself (default: the model's own)"
    parser.add_argument("--rate", nargs="+", default=[None], help=note)
    parser.add_argument("--scale", type=float, help="of models and rates (the model's own)")
    parser.add_argument("--stretch", type=float, help="slow motion (default: the model's own)")
    parser.add_argument("--iterations", type=int, default=12, help="timed ones of each row (12)")
    parser.add_argument("--rounds", type=int, default=3, help="how often rows take turns (3)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed ones of each turn (2)")
    note = "share of the fastest row's time by which the judged one may be behind"
    parser.add_argument("--within", type=float, default=WITHIN, help=f"{note} ({WITHIN:g})")
    note = "share of its time by which its prediction may be off"
    parser.add_argument("--off", type=float, default=PREDICTION, help=f"{note} ({PREDICTION:g})")
    parser.add_argument("--json", type=Path, default=Path("out/omgs.json"))
    parser.add_argument("--png", type=Path, help="draw Fig. 4 here")
    return parser.parse_args()


def configs(args: argparse.Namespace, plans: Path) -> dict[str, BenchConfig]:
    """One bench for each model, checked before any measurement."""
    if args.workers < 2:
        raise UsageError(f"--workers {args.workers}: allowed are 2 or more")
    out = {}
    for name, given in itertools.product(args.models, args.rate):
        mbit, scale, stretch = SETTINGS.get(name, OTHERS)
        # Gathered bytes grow with the number of other workers: the paper has 15.
        rate = given or f"{round(mbit * (args.workers - 1) / 15)}mbit"
        case, files = name, plans
        if len(args.rate) > 1:
            case, files = f"{name} {rate}", plans / rate
            files.mkdir(exist_ok=True)
        out[case] = BenchConfig(
            lab=f"star:{args.workers}@{rate}",
            model=f"paced:{name}@{args.scale or scale:g}",
            strategies=tuple(complete(row, name, files) for row in args.strategies),
            iterations=args.iterations,
            rounds=min(args.rounds, args.iterations),
            warmup=args.warmup,
            stretch=args.stretch or stretch,
            breakdown=True,
            measure=False,
        )
        out[case].check()
    return out


def complete(row: str, model: str, plans: Path) -> str:
    """The row with the paper's density, and with a file for its measurements.

    Rows that differ only in their merging thus share the measurements.
    """
    name, _, rest = row.partition(":")
    items = list(filter(None, rest.split(",")))
    given = {item.partition("=")[0] for item in items}
    if kind(row) in SPARSE and "density" not in given:
        items.append(f"density={DENSITIES.get(model, DENSITY):g}")
    if kind(row) in PLANNED and "plan_file" not in given:
        shared = sorted(item for item in items if not item.startswith("merge="))
        file = plans / "-".join([model, name, *shared]).replace("=", "")
        items.append(f"plan_file={file}.json")
    return ":".join([name, ",".join(items)]) if items else name


def kind(row: str) -> str:
    return row.partition(":")[0].lower()


# -- figures ------------------------------------------------------------------------------


def figures(
    case: str,
    rows: list[str],
    raw: dict[str, Any],
    limits: tuple[float, float] = (WITHIN, PREDICTION),
) -> dict[str, Any]:
    """One bench's results, with the paper's; ``raw`` is its report as plain values."""
    model = case.partition(" ")[0]
    made = {row: of_row(model, row, run) for row, run in zip(rows, raw["runs"], strict=True)}
    for base in ("topksgd", "mgs"):
        against = next((own["median_s"] for row, own in made.items() if kind(row) == base), None)
        for own in made.values():
            own[f"ratio_to_{base}"] = None if against is None else own["median_s"] / against
    sparse = {row: own["median_s"] for row, own in made.items() if kind(row) in SPARSE}
    best = min(sparse, key=lambda row: sparse[row], default=None)
    judged = next((row for row in rows if kind(row) == "omgs"), None)
    out = {
        "lab": raw["lab"],
        "workers": raw["workers"],
        "rows": made,
        "judged": judged,
        "best": best,
        "of_best": None if judged is None or best is None else sparse[judged] / sparse[best],
        "config": raw["config"],
        "load_before": raw["machine"]["load_before"],
    }
    out["limits"] = {"within": limits[0], "off": limits[1]}
    return out | {"missed": missed(case, out)}


def of_row(model: str, row: str, run: dict[str, Any]) -> dict[str, Any]:
    """One row's figures; those that the paper or the plan lacks are None."""
    merge = run["merge"] or {}
    median, predicted = run["iteration_s"]["median"], merge.get("predicted_s")
    paper, name = PAPER_S.get(model, {}), kind(row)
    own = paper.get(name)
    return {
        "median_s": median,
        "iteration_s": run["iteration_s"],
        "bytes_per_iteration": run["bytes_per_iteration"],
        "paper_ratio_to_topksgd": own / paper["topksgd"] if own else None,
        "paper_ratio_to_mgs": own / paper["mgs"] if own else None,
        "layers": merge.get("buckets"),
        "paper_layers": PAPER_LAYERS.get(model, {}).get(name),
        "predicted_s": predicted,
        "prediction_error": None if predicted is None else predicted / median - 1,
        "parts_s": measured_parts(run["breakdown"]["whole"]),
        "predicted_parts_s": None if predicted is None else predicted_parts(merge),
        "merge": run["merge"],
        "samples_s": run["samples_s"],
        "final_loss": run["final_loss"],
    }


def measured_parts(parts: dict[str, float]) -> dict[str, float]:
    """A breakdown in Fig. 4's parts; waiting is communication that does not overlap."""
    waits = ("reduce_scatter_s", "all_gather_s", "all_reduce_s")
    return {
        "forward": parts["forward_s"],
        "backward": parts["backward_s"],
        "sparsification": parts["encode_s"],
        "communication": sum(parts[wait] for wait in waits),
        "other": parts["update_s"] + parts["other_s"],
    }


def predicted_parts(merge: dict[str, Any]) -> dict[str, float]:
    """A plan's prediction in the same parts; all that merging cannot change counts as forward."""
    backward = merge["backward_s"] + merge.get("delay_s", 0.0)
    seconds = (merge["rest_s"], backward, merge["encode_s"], merge["exposed_s"])
    return dict(zip(PARTS, seconds, strict=False))


def missed(model: str, made: dict[str, Any]) -> list[str]:
    """The missed limits of the judged row; none without one."""
    judged, out, limits = made["judged"], [], made["limits"]
    if judged is None:
        return []
    if made["of_best"] > 1 + limits["within"]:
        ratio = f"takes {made['of_best']:.3f}x the time of {made['best']}"
        out.append(f"{model}: {judged} {ratio}; limit {1 + limits['within']:g}")
    error = made["rows"][judged]["prediction_error"]
    if error is None:
        out.append(f"{model}: {judged} has predicted nothing")
    elif abs(error) > limits["off"]:
        off = f"is predicted {100 * error:+.1f}% off"
        out.append(f"{model}: {judged} {off}; limit {100 * limits['off']:g}%")
    return out


# -- output -------------------------------------------------------------------------------


COLUMNS = (
    "strategy",
    "iteration, ms",
    "p10 .. p90, ms",
    "of topksgd (paper)",
    "of mgs (paper)",
    "merged layers (paper)",
    "predicted, ms",
    "forward, ms",
    "backward, ms",
    "choosing, ms",
    "exposed, ms",
)


def table(model: str, made: dict[str, Any]) -> Printed:
    """One row for each strategy; the paper's figures in brackets."""
    notes = ["in brackets: the paper's, on other hardware"]
    if made["judged"] is not None:
        tried = sum(kind(row) in SPARSE for row in made["rows"])
        notes.append(
            f"best of the {tried} plans tried: {made['best']}; {made['judged']} takes "
            f"{made['of_best']:.3f} of its time"
        )
    title = f"{model} on {made['lab']}, {made['workers']} workers"
    rows = [cells(row, own) for row, own in made["rows"].items()]
    return Printed.of(title, COLUMNS, rows, notes)


def cells(row: str, own: dict[str, Any]) -> list[str]:
    spread, parts = own["iteration_s"], own["parts_s"]
    predicted = "-"
    if own["predicted_s"] is not None:
        predicted = f"{milliseconds(own['predicted_s'])} ({100 * own['prediction_error']:+.1f}%)"
    return [
        row,
        milliseconds(own["median_s"]),
        f"{milliseconds(spread['p10'])} .. {milliseconds(spread['p90'])}",
        beside(own["ratio_to_topksgd"], own["paper_ratio_to_topksgd"], ".3f"),
        beside(own["ratio_to_mgs"], own["paper_ratio_to_mgs"], ".3f"),
        beside(own["layers"], own["paper_layers"], "d"),
        predicted,
        *(milliseconds(parts[name]) for name in list(PARTS)[:-1]),
    ]


def beside(value: float | None, paper: float | None, form: str) -> str:
    """A figure and in brackets the paper's, as in ``0.751 (0.761)``."""
    text = "-" if value is None else format(value, form)
    return text if paper is None else f"{text} ({paper:{form}})"


def draw(models: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw Fig. 4: a panel for each model, a bar for each row, a thin one for its prediction."""
    from matplotlib.patches import Patch

    counts = [bars(made["rows"]) for made in models.values()]
    heights = [0.6 + sum(0.34 if thin else 0.5 for _, _, thin in each) for each in counts]
    figure = blank("breakdown", (11, 1.3 + sum(heights)), 150)
    panels = figure.subplots(len(models), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, made), each in zip(panels, models.items(), counts, strict=True):
        draw_model(axes, f"{name} on {made['lab']}", each)
    panels[-1].set_xlabel("milliseconds", color=_INK)
    handles = [Patch(color=COLOURS[what], label=_LABELS.get(p, p)) for p, what in PARTS.items()]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.45 / figure.get_size_inches()[1]))
    with replacing(path) as file:
        figure.savefig(file, format="png")


def bars(rows: dict[str, dict[str, Any]]) -> list[Bar]:
    """One model's bars from top to bottom; each row is followed by its prediction."""
    pairs = (
        ((row, r["parts_s"]), ("predicted", r["predicted_parts_s"])) for row, r in rows.items()
    )
    return [(*bar, i > 0) for pair in pairs for i, bar in enumerate(pair) if bar[1] is not None]


def draw_model(axes: Axes, title: str, drawn: list[Bar]) -> None:
    longest = 1e3 * max(sum(parts.values()) for _, parts, _ in drawn)
    at, ticks = 0.0, []
    for number, (_, parts, thin) in enumerate(drawn):
        at += (0.7 if thin else 1.0) if number else 0.0
        left = 0.0
        for part, what in PARTS.items():
            width = 1e3 * parts.get(part, 0.0)
            axes.barh(at, width, 0.4 if thin else 0.7, left=left, color=COLOURS[what])
            if width >= 0.045 * longest:
                ink = _INK if part in ("forward", "sparsification") else "white"
                text = milliseconds(width / 1e3)
                axes.text(left + width / 2, at, text, ha="center", va="center", size=8, color=ink)
            left += width
        axes.text(left, at, f" {milliseconds(left / 1e3)} ms", va="center", size=8.5)
        ticks.append(at)
    axes.set_yticks(ticks, [label for label, _, _ in drawn])
    for label, (_, _, thin) in zip(axes.get_yticklabels(), drawn, strict=True):
        label.set_color(_FAINT if thin else _INK)
    axes.set_ylim(ticks[-1] + 0.6, -0.6)
    axes.set_xlim(0, longest * 1.1)
    axes.set_title(title, loc="left", size=10.5, weight="bold", color=_INK)
    axes.grid(axis="x", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
