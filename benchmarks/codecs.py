"""Sketch and top-k kernels compared with memory speed and torch.topk, on one tensor.

    python benchmarks/codecs.py --json out/codecs.json

All cases take turns, round by round, in one process; figures are medians over the rounds. In
addition to the time the table has the GB/s of float32 (4 bytes per element, read or written); the
memory bandwidth as a share of a plain copy of the same tensor in the same run, counting the bytes
per element that the case must move; and the speed of a selection over ``torch.topk`` of the
magnitudes. On a GPU the copy is one within the device.

Exit code 1, with a line for each, if a figure misses its limit at the default size. On the CPU
with one thread: sketch encode 1.0 GB/s, sketch decode 2.0 GB/s, and top-k with a residual at
density 0.001 ten times faster than torch.topk. On CUDA, each: half of the copy's bandwidth, and
five times faster than ``reference``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import show, write

from wingbeat.kernels import layout
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed

NUMEL = 25_000_000
BITS = (8, 4)
DENSITIES = (0.001, 0.01)
KERNELS = {"cpu": ["native"], "cuda": ["gpu", "reference"]}
COPY_BYTES = 8  # per element: read and written
ENCODE_GBPS, DECODE_GBPS, TOPK_SPEEDUP = 1.0, 2.0, 10.0
CUDA_OF_COPY, CUDA_SPEEDUP = 0.5, 5.0


@dataclass(frozen=True)
class Case:
    """One case to time; ``moved`` are the bytes per element that it must move."""

    kernels: str
    what: str
    setting: str
    moved: float
    run: Callable[[], Any]


def largest(x: torch.Tensor, k: int) -> Any:
    return torch.topk(x.abs(), k)


def cases(args: argparse.Namespace) -> list[Case]:
    generator = torch.Generator().manual_seed(1)
    # Products of normals and their exponents have heavy tails, like gradients.
    x = torch.randn(args.numel, generator=generator)
    x = (x * torch.randn(args.numel, generator=generator).exp() * 1e-3).to(args.device)
    out = torch.empty_like(x)
    found = [Case("torch", "copy", "", COPY_BYTES, lambda: out.copy_(x))]
    for density in DENSITIES:
        k = layout.count_of(args.numel, density)
        found.append(Case("torch", "topk", f"{density:g}", 4, functools.partial(largest, x, k)))
    for name in args.kernels:
        kernels = importlib.import_module(f"wingbeat.kernels.{name}")
        found += sketch_cases(name, kernels, x, out) + topk_cases(name, kernels, x, out)
    return found


def sketch_cases(name: str, kernels: ModuleType, x: torch.Tensor, out: torch.Tensor) -> list[Case]:
    found = []
    residual = torch.zeros_like(x)
    for bits in BITS:
        nbytes = layout.sketch_bytes(x.numel(), bits)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=x.device)

        def encode(
            payload: torch.Tensor = payload, bits: int = bits, left: torch.Tensor | None = None
        ) -> None:
            kernels.sketch_encode(x, payload, bits=bits, residual=left)

        def encode_left(encode: Callable[..., None] = encode) -> None:
            encode(left=residual)

        def decode(payload: torch.Tensor = payload, bits: int = bits) -> None:
            kernels.sketch_decode(payload, out, bits=bits)

        setting, code = f"{bits} bits", bits / 8
        found += [
            Case(name, "encode", setting, 8 + code, encode),
            Case(name, "encode+residual", setting, 20 + code, encode_left),
            Case(name, "decode", setting, 4 + code, decode),
        ]
    return found


def topk_cases(name: str, kernels: ModuleType, x: torch.Tensor, out: torch.Tensor) -> list[Case]:
    found = []
    residual = torch.zeros_like(x)
    for density in DENSITIES:
        k = layout.count_of(x.numel(), density)
        nbytes = layout.topk_bytes(x.numel(), k)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=x.device)

        def select(
            payload: torch.Tensor = payload, k: int = k, left: torch.Tensor | None = None
        ) -> None:
            kernels.topk_encode(x, payload, k=k, residual=left)

        def select_left(select: Callable[..., None] = select) -> None:
            select(left=residual)

        def decode(payload: torch.Tensor = payload, k: int = k) -> None:
            kernels.topk_decode(payload, out, k=k)

        setting = f"{density:g}"
        found += [
            Case(name, "select", setting, 4, select),
            Case(name, "select+residual", setting, 12, select_left),
            Case(name, "expand", setting, 4, decode),
        ]
    return found


def timed(case: Case, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    case.run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = cases(args)
    samples: list[list[float]] = [[] for _ in found]
    # The first round fills pages and caches and compiles, and is not counted.
    for turn in range(args.rounds + 1):
        for case, values in zip(found, samples, strict=True):
            seconds = timed(case, args.device)
            if turn:
                values.append(seconds)
    medians = [statistics.median(values) for values in samples]
    by_name = {(c.kernels, c.what, c.setting): m for c, m in zip(found, medians, strict=True)}
    return [
        row(case, values, by_name, args.numel) for case, values in zip(found, samples, strict=True)
    ]


def row(case: Case, values: list[float], medians: Any, numel: int) -> dict[str, Any]:
    seconds = statistics.median(values)
    copied = COPY_BYTES / medians["torch", "copy", ""]
    selects = case.what.startswith("select")
    reference = medians.get(("reference", case.what, case.setting))
    return {
        "kernels": case.kernels,
        "what": case.what,
        "setting": case.setting,
        "ms": seconds * 1e3,
        "gbps": 4 * numel / seconds / 1e9,
        "of_copy": case.moved / seconds / copied,
        "times_topk": medians["torch", "topk", case.setting] / seconds if selects else None,
        "times_reference": reference / seconds if reference else None,
        "rounds_ms": [value * 1e3 for value in values],
    }


def missed(rows: list[dict[str, Any]], device: str) -> list[str]:
    """One line for each figure that is below its limit."""
    lines = []
    for found in rows:
        for key, limit in limits(found, device).items():
            if found[key] is not None and found[key] < limit:
                case = f"{found['kernels']} {found['what']} {found['setting']}"
                lines.append(f"{case}: {key} is {found[key]:.2f}, below {limit:g}")
    return lines


def limits(found: dict[str, Any], device: str) -> dict[str, float]:
    if found["kernels"] == "gpu" and device == "cuda":
        return {"of_copy": CUDA_OF_COPY, "times_reference": CUDA_SPEEDUP}
    if found["kernels"] != "native":
        return {}
    if found["what"] == "encode":
        return {"gbps": ENCODE_GBPS}
    if found["what"] == "decode":
        return {"gbps": DECODE_GBPS}
    if (found["what"], found["setting"]) == ("select+residual", "0.001"):
        return {"times_topk": TOPK_SPEEDUP}
    return {}


COLUMNS = (
    "kernels, what, setting",
    "ms",
    "GB/s of float32",
    "of a copy",
    "times torch.topk",
    "times the reference",
)


def table(rows: list[dict[str, Any]], numel: int, device: str, threads: int) -> Printed:
    cells = []
    for found in rows:
        factors = [found[key] for key in ("times_topk", "times_reference")]
        cells.append(
            (
                f"{found['kernels']}, {found['what']}, {found['setting']}",
                f"{found['ms']:.3f}",
                f"{found['gbps']:.2f}",
                f"{found['of_copy']:.2f}",
                *("" if factor is None else f"{factor:.1f}" for factor in factors),
            )
        )
    title = f"codecs on {numel:,} float32 values, {device}, {threads} thread(s)"
    notes = ["of a copy: bytes that the case cannot avoid to move, against a copy in the same run"]
    return Printed.of(title, COLUMNS, cells, notes)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    parser.add_argument("--numel", type=int, default=NUMEL, help=f"elements ({NUMEL})")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (1)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kernels", nargs="+", choices=("native", "reference", "gpu"))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    args.kernels = args.kernels or KERNELS[args.device]
    if args.numel < 1 or args.threads < 1 or args.rounds < 1:
        parser.error("--numel, --threads and --rounds must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here")
    impossible = {"cpu": "gpu", "cuda": "native"}[args.device]
    if impossible in args.kernels:
        parser.error(f"--kernels {impossible} does not run on --device {args.device}")
    return args


def main() -> int:
    args = parsed()
    torch.set_num_threads(args.threads)
    before = machine.describe()
    rows = measure(args)
    # With more threads torch is faster too, and small tensors have other limits.
    judged = args.numel == NUMEL and (args.device == "cuda" or args.threads == 1)
    lines = missed(rows, args.device) if judged else []
    report = {
        "numel": args.numel,
        "threads": args.threads,
        "device": args.device,
        "machine": before,
        "versions": machine.versions(),
        "missed": lines,
        "rows": rows,
    }
    show(report, table(rows, args.numel, args.device, args.threads))
    if args.json:
        write(Path(args.json), report)
    for line in lines:
        print(line, file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
