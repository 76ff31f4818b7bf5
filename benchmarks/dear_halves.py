"""DeAR's Fig. 5: an all-reduce and its halves, by message size (part of `dear_figures`)."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from wingbeat.errors import UsageError, WingbeatError
from wingbeat_lab import lab
from wingbeat_lab.bench.measure import Quantiles
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab.spec import LabSpec

SIZES_KB = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)
WAYS = ("gloo", "all_reduce", "reduce_scatter", "all_gather", "rsag")
LIMIT = 1.05
"""Maximum time of both halves in sequence, relative to an all-reduce."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of Fig. 5."""
    parser.add_argument("--halves-lab", default="star:4@500mbit", help="of Fig. 5")
    parser.add_argument("--sizes-kb", type=float, nargs="+", default=list(SIZES_KB), help="Fig. 5")
    parser.add_argument("--halves-seconds", type=float, default=0.4, help="of each case, Fig. 5")
    parser.add_argument("--halves-rounds", type=int, default=5, help="turns of Fig. 5's cases (5)")


def figure_5(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield milliseconds by message size and way."""
    if min(args.sizes_kb) <= 0 or args.halves_rounds < 1 or args.halves_seconds <= 0:
        raise UsageError("--sizes-kb, --halves-rounds and --halves-seconds: allowed are values > 0")
    spec = LabSpec.parse(args.halves_lab)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "halves.json"
        command = [sys.executable, __file__, str(path)]
        command += [str(args.halves_rounds), str(args.halves_seconds), str(spec.rate / 8)]
        command += map(str, args.sizes_kb)
        ended = lab.run(spec, command)
        if ended.exit_code:
            raise WingbeatError(f"Fig. 5: a worker ended with exit code {ended.exit_code}")
        found = json.loads(path.read_text(encoding="utf-8"))
    yield "lab", args.halves_lab
    yield "rows", found


COLUMNS = (
    "KB",
    "both / all-reduce",
    "reduce-scatter / all-reduce",
    "all-gather / all-reduce",
    "both, ms",
    "p10 .. p90, ms",
    "all-reduce, ms",
    "p10 .. p90 of it, ms",
    "Gloo's all-reduce, ms",
    "p10 .. p90 of Gloo's, ms",
)


def table(where: str, rows: Sequence[dict[str, Any]]) -> Printed:
    """Return Fig. 5 for printing, with the worst size of either comparison as a note."""
    cells = []
    for row in rows:
        whole = row["ms"]["all_reduce"]
        shares = (row["ms"][way] / whole for way in ("rsag", "reduce_scatter", "all_gather"))
        times = (_ms(row, way) for way in ("rsag", "all_reduce", "gloo"))
        cells.append((f"{row['kb']:g}", *(f"{s:.3f}" for s in shares), *itertools.chain(*times)))
    turns = len(rows[0]["samples_s"]["rsag"])
    title = f"Fig. 5: an all-reduce and its halves on {where}, real pace, median of {turns} turns"
    notes = [
        _worst("both halves", "an all-reduce", [(r["ms"]["rsag"], r["ms"]["all_reduce"], r["kb"])
                                                for r in rows]),
        _worst("an all-reduce", "Gloo's", [(r["ms"]["all_reduce"], r["ms"]["gloo"], r["kb"])
                                           for r in rows]),
        "paper: each half takes around half of an all-reduce, with small and large messages",
    ]  # fmt: skip
    return Printed.of(title, COLUMNS, cells, notes)


def _ms(row: dict[str, Any], way: str) -> tuple[str, str]:
    found = Quantiles.of(row["samples_s"][way])
    return f"{row['ms'][way]:.2f}", f"{1e3 * found.p10:.2f} .. {1e3 * found.p90:.2f}"


def _worst(what: str, of: str, times: Sequence[tuple[float, float, float]]) -> str:
    ratio, kb = max((own / other, kb) for own, other, kb in times)
    return f"{what}: at worst {ratio:.3f} times {of} ({kb:g} KB)"


def judged(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the missed limits: two halves cost no more than the whole, for small sizes too."""
    return [
        f"5: {row['kb']:g} KB: both halves take {row['ms']['rsag'] / row['ms']['all_reduce']:.3f} "
        f"of an all-reduce; limit {LIMIT}"
        for row in rows
        if row["ms"]["rsag"] > LIMIT * row["ms"]["all_reduce"]
    ]


def draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw milliseconds over size, both logarithmic."""
    names = ("DDP's all-reduce (gloo)", "all-reduce", "reduce-scatter", "all-gather", "RSAG")
    colours = ("#9aa3ae", "#2a78d6", "#e0762d", "#2f9e62", "#8a5bc7")
    for way, name, colour in zip(WAYS, names, colours, strict=True):
        dashes = {"linestyle": (0, (4, 3))} if way == "rsag" else {}
        x, y = [row["kb"] for row in rows], [row["ms"][way] for row in rows]
        axes.plot(x, y, marker="o", markersize=4, color=colour, label=name, **dashes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row["kb"] for row in rows], [f"{row['kb']:g} KB" for row in rows])
    axes.set_ylabel("ms")


def worker(path: Path, rounds: int, seconds: float, rate: float, sizes_kb: list[float]) -> None:
    """Time every way at every size on this rank, in turns; rank 0 writes the medians."""
    import torch
    import torch.distributed as dist

    import wingbeat
    from wingbeat.collectives import Collectives

    world = wingbeat.init(timeout=60)
    collectives = Collectives(world)

    def both(buffer: torch.Tensor) -> None:
        collectives.reduce_scatter(buffer).wait()
        collectives.all_gather(buffer).wait()

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "gloo": dist.all_reduce,
        "all_reduce": lambda buffer: collectives.all_reduce(buffer).wait(),
        "reduce_scatter": lambda buffer: collectives.reduce_scatter(buffer).wait(),
        "all_gather": lambda buffer: collectives.all_gather(buffer).wait(),
        "rsag": both,
    }
    rows = []
    for kb in sizes_kb:
        buffer = torch.zeros(max(1, int(kb * 256)))
        count = max(3, min(200, int(seconds * rate / (kb * 2048))))
        samples: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                ways[way](buffer)
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(count):
                    ways[way](buffer)
                dist.barrier()
                samples[way].append((time.perf_counter() - begin) / count)
        ms = {way: 1e3 * statistics.median(values) for way, values in samples.items()}
        rows.append({"kb": kb, "count": count, "ms": ms, "samples_s": samples})
    if world.rank == 0:
        path.write_text(json.dumps(rows), encoding="utf-8")
    wingbeat.shutdown()


if __name__ == "__main__":
    file, turns, long, bytes_per_s, *kilobytes = sys.argv[1:]
    worker(Path(file), int(turns), float(long), float(bytes_per_s), [float(kb) for kb in kilobytes])
