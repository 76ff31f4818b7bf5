"""The error of rounding real gradients to a few bits.

    python benchmarks/quantisation.py --json out/quantisation.json --png out/quantisation.png

Two models are trained: a convolutional network on scikit-learn's digits, and a small transformer on
the source files of Python's own library. At several iterations their gradients are rounded in each
of these ways, as one bucket and layer by layer:

- the sketch, codes split for least error or into equal counts, with means or ends as levels;
- exact equal counts by sorting: the reference for the loss of the sketch's histogram;
- uniform levels from the least to the greatest value;
- the arithmetic of torch's DDP hooks ``quantization_pertensor_hook`` and
  ``quantization_perchannel_hook``, the latter with a scale for each 512 values. 8 bits only.

The figure is the squared error over the squared norm; over several iterations or layers, the
geometric mean. Exit code 1 unless, for every bucket and layer at every iteration, our default with
8 bits has at most 1.05 times the error of the reference, and less than uniform levels and the
per-tensor hook.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import at_least_one, show, write
from torch import Tensor, nn
from torch.nn import functional

from wingbeat.files import replacing
from wingbeat.kernels import layout, reference
from wingbeat.observe.timeline import blank
from wingbeat_lab.bench import machine
from wingbeat_lab.bench import models as bench_models
from wingbeat_lab.bench.table import Printed

MOMENTS = (1, 10, 100, 300)
BITS = (8, 4, 2)
DRAWN_BITS = tuple(range(2, 9))
LEAST_LAYER = 1024
"""Values; smaller layers are always sent in a bucket with others."""
CHANNEL = 512
MARGIN = 1.05
OURS, YARDSTICK, UNIFORM = "sketch error/mean", "sorted, equal counts/mean", "uniform min-max"
PER_TENSOR, PER_CHANNEL = "DDP hook, per tensor", "DDP hook, per 512"

Round = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Gradient:
    """The gradients of one backward. ``layer`` is empty for all of them as one bucket."""

    model: str
    moment: int
    layer: str
    values: Tensor


@dataclass(frozen=True)
class Figure:
    """The error of one way of rounding one gradient."""

    model: str
    moment: int
    layer: str
    size: int
    method: str
    bits: int
    error: float


# Training


class Predictor(nn.Module):
    """The next byte of a text, by two layers of causal attention."""

    def __init__(self, width: int = 64, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, text: Tensor) -> Tensor:
        """Logits, float32[batch, length, 256], for bytes, int64[batch, length]."""
        hidden = self.embedding(text) + self.position
        logits: Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return logits


def text_batches(length: int = 64, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the standard library's source and the bytes that follow; infinite."""
    folder = Path(sysconfig.get_path("stdlib"))
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:100])
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
        pieces = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        yield pieces[:, :-1], pieces[:, 1:]


def train(
    name: str, model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], moments: Sequence[int]
) -> Iterator[Gradient]:
    """Train with AdamW; yield gradients at the chosen iterations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for moment in range(1, max(moments) + 1):
        inputs, answers = next(batches)
        optimizer.zero_grad()
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, -2), answers.flatten())
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        if moment in moments:
            print(f"{name}: iteration {moment}, loss {float(loss.detach()):.3f}", file=sys.stderr)
            yield from gradients(name, moment, model)
        optimizer.step()


def gradients(name: str, moment: int, model: nn.Module) -> Iterator[Gradient]:
    """All gradients as one bucket, last layer first as DDP has them; then each large layer."""
    found = [
        (n, p.grad.flatten().clone()) for n, p in model.named_parameters() if p.grad is not None
    ]
    yield Gradient(name, moment, "", torch.cat([grad for _, grad in reversed(found)]))
    for layer, grad in found:
        if grad.numel() >= LEAST_LAYER:
            yield Gradient(name, moment, layer, grad)


def recorded(moments: Sequence[int]) -> Iterator[Gradient]:
    """Every gradient to be rounded."""
    images, answers, _, _ = bench_models.data()
    batches = bench_models.batches(images, answers, rank=0, workers=1, seed=1)
    yield from train("CNN on digits", bench_models.network(0), batches, moments)
    torch.manual_seed(0)
    yield from train("transformer on text", Predictor(), text_batches(), moments)


# Rounding


def sketch(split: str, level: str) -> Round:
    def rounded(x: Tensor, bits: int) -> Tensor:
        payload = torch.empty(layout.sketch_bytes(x.numel(), bits), dtype=torch.uint8)
        reference.sketch_encode(x, payload, bits=bits, split=split, level=level)
        out = torch.empty_like(x)
        reference.sketch_decode(payload, out, bits=bits)
        return out

    return rounded


def uniform(x: Tensor, bits: int) -> Tensor:
    low, high = x.double().aminmax()
    step = (high - low) / ((1 << bits) - 1)
    return (((x - low) / step).round() * step + low).float()


def per_tensor(x: Tensor, _bits: int) -> Tensor:
    """As quantization_pertensor_hook computes it on one worker, scale and zero as float32."""
    observer = torch.ao.quantization.MinMaxObserver()
    observer(x)
    scale, zero = (value.float() for value in observer.calculate_qparams())
    code = ((x / scale).round() + zero).clamp(0, 255).to(torch.uint8)
    decoded: Tensor = scale * (code.float() - zero)
    return decoded


def per_channel(x: Tensor, _bits: int) -> Tensor:
    """As quantization_perchannel_hook computes it on one worker: it always pads."""
    channels = functional.pad(x, (0, CHANNEL - x.numel() % CHANNEL)).view(-1, CHANNEL)
    observer = torch.ao.quantization.PerChannelMinMaxObserver()
    observer(channels)
    scale, zero = (value.float().unsqueeze(1) for value in observer.calculate_qparams())
    code = ((channels / scale).round() + zero).clamp(0, 255).to(torch.uint8)
    decoded: Tensor = scale * (code.float() - zero)
    return decoded.flatten()[: x.numel()]


METHODS: dict[str, Round] = {
    OURS: sketch("error", "mean"),
    "sketch count/mean": sketch("count", "mean"),
    "sketch count/ends (paper)": sketch("count", "ends"),
    YARDSTICK: reference.sorted_sketch,
    UNIFORM: uniform,
    PER_TENSOR: per_tensor,
    PER_CHANNEL: per_channel,
}
EIGHT_BITS_ONLY = {PER_TENSOR, PER_CHANNEL}


def measure(gradient: Gradient) -> Iterator[Figure]:
    """Round one gradient in every way."""
    x = gradient.values
    norm = float((x.double() ** 2).sum())
    for method, rounded in METHODS.items():
        for bits in BITS if gradient.layer else DRAWN_BITS:
            if method in EIGHT_BITS_ONLY and bits != 8:
                continue
            error = float(((rounded(x, bits) - x).double() ** 2).sum()) / norm
            yield Figure(
                gradient.model, gradient.moment, gradient.layer, x.numel(), method, bits, error
            )


# Reporting


def mean_of(errors: list[float]) -> float:
    """Geometric mean, because errors differ by orders of magnitude."""
    return math.exp(sum(math.log(max(error, 1e-30)) for error in errors) / len(errors))


def summary(figures: list[Figure], model: str, method: str, bits: int, *, whole: bool) -> float:
    """Mean over iterations, and over layers unless ``whole``; NaN if a method has no such bits."""
    errors = [
        f.error
        for f in figures
        if (f.model, f.method, f.bits, not f.layer) == (model, method, bits, whole)
    ]
    return mean_of(errors) if errors else math.nan


def models(figures: list[Figure]) -> list[str]:
    return list(dict.fromkeys(f.model for f in figures))


def table(figures: list[Figure], model: str) -> Printed:
    """Return one model's errors for printing."""
    parts = [(whole, bits) for whole in (True, False) for bits in BITS]
    heads = [f"{'bucket' if whole else 'layers'}, {bits} bits" for whole, bits in parts]
    cells = []
    for method in METHODS:
        errors = [summary(figures, model, method, bits, whole=whole) for whole, bits in parts]
        cells.append((method, *("" if math.isnan(error) else f"{error:.2e}" for error in errors)))
    notes = ["squared error / squared norm, geometric mean over moments and layers"]
    return Printed.of(f"{model}: error of rounding", ("way of rounding", *heads), cells, notes)


def ratios(figures: list[Figure], to: str) -> dict[tuple[str, int, str], float]:
    """Our error with 8 bits over another's, for every bucket and layer at every iteration."""
    eight = {(f.model, f.moment, f.layer, f.method): f.error for f in figures if f.bits == 8}
    return {
        (model, moment, layer): error / max(eight[model, moment, layer, to], 1e-30)
        for (model, moment, layer, method), error in eight.items()
        if method == OURS
    }


def check(figures: list[Figure]) -> tuple[list[dict[str, Any]], bool]:
    """The worst ratio to each other way, and whether all limits hold."""
    rows, good = [], True
    for to, limit in (
        (YARDSTICK, MARGIN), (UNIFORM, 1.0), (PER_TENSOR, 1.0), (PER_CHANNEL, None),
    ):  # fmt: skip
        found = ratios(figures, to)
        where = max(found, key=found.__getitem__)
        worst = found[where]
        holds = limit is None or (worst <= limit if to == YARDSTICK else worst < limit)
        good = good and holds
        row = {"to": to, "worst": worst, "mean": mean_of(list(found.values())), "limit": limit}
        row |= {"where": where, "holds": holds, "smaller": sum(r < 1 for r in found.values())}
        rows.append(row | {"of": len(found)})
    return rows, good


def checks_table(rows: list[dict[str, Any]]) -> Printed:
    cells = []
    for row in rows:
        model, moment, layer = row["where"]
        cells.append(
            (
                row["to"],
                f"{row['mean']:.3g}",
                f"{row['worst']:.3g}",
                f"{model}, iteration {moment}, {layer or 'bucket'}",
                "" if row["limit"] is None else f"{row['limit']:g}",
                "yes" if row["holds"] else "NOT MET",
                f"{row['smaller']} of {row['of']}",
            )
        )
    columns = ("relative to", "mean", "worst", "worst in", "limit", "kept", "smaller in")
    title = f"{OURS}, 8 bits: its error over another's, each bucket and layer at each moment"
    return Printed.of(title, columns, cells)


# Drawing

_INK, _GRID = "#2b2f36", "#e6e9ed"
_STYLES = {
    OURS: ("#c8281e", "o", "-"),
    "sketch count/mean": ("#34679a", "s", "-"),
    "sketch count/ends (paper)": ("#7a5195", "D", "-"),
    YARDSTICK: ("#2b2f36", "", ":"),
    UNIFORM: ("#e39b3b", "^", "-"),
    PER_TENSOR: ("#6a9a3b", "v", ""),
    PER_CHANNEL: ("#3b9a8f", "P", ""),
}


def draw_png(figures: list[Figure], path: Path) -> None:
    """Error against bits, one panel for each model; all gradients as one bucket."""
    names = models(figures)
    figure = blank("comparison of errors", (5.2 * len(names), 5.2), 150)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, model in zip(panels, names, strict=True):
        for method, (color, marker, line) in _STYLES.items():
            errors = [summary(figures, model, method, b, whole=True) for b in DRAWN_BITS]
            axes.plot(
                DRAWN_BITS, errors, color=color, marker=marker, linestyle=line, label=method,
                linewidth=2, markersize=6, zorder=3 if method != YARDSTICK else 4,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_title(model, fontsize=11, color=_INK)
        axes.set_xlabel("bits for each value", color=_INK)
        axes.grid(color=_GRID, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("squared error / squared norm", color=_INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=8.5)
    figure.suptitle("Gradients rounded to a few bits", fontsize=13, fontweight="bold", color=_INK)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    with replacing(path) as file:
        figure.savefig(file, format="png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    note = "iterations whose gradients are looked at"
    parser.add_argument("--moments", nargs="+", type=at_least_one, default=list(MOMENTS), help=note)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--png", type=Path, help="draw error against bits here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = [figure for gradient in recorded(options.moments) for figure in measure(gradient)]
    rows, good = check(figures)
    report = {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "figure": "squared error / squared norm; layer '' is all gradients as one bucket",
        "checks": rows,
        "results": [asdict(figure) for figure in figures],
    }
    for model in models(figures):
        show(report, table(figures, model))
    show(report, checks_table(rows))
    if options.json:
        write(options.json, report)
    if options.png:
        draw_png(figures, options.png)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
