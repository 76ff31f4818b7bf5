"""``wingbeat demo``: a comparison on this machine in a few minutes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from wingbeat.files import replacing
from wingbeat_lab.cli.bench import check_writable, measure, need_matplotlib


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("demo")(demo)


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the picture, the trace, the figures.")
    ] = Path("out/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A few iterations only, to see that it works.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here. [default: OUT/demo.json]")
    ] = None,
) -> None:
    """Train on four emulated hosts with PyTorch DDP, AllReduce and DeAR, and compare them."""
    from rich.console import Console

    from wingbeat_lab import lab
    from wingbeat_lab.bench import demo as demo_bench
    from wingbeat_lab.bench import picture

    begin = time.monotonic()
    plan = demo_bench.plan(lab.available(), quick=quick)
    plan.digits.check()
    plan.paced.check()
    need_matplotlib()
    png, trace, figures = out / "timeline.png", out / "trace.json", json_file or out / "demo.json"
    for path in (png, trace, figures):
        check_writable(path)
    print("\n".join(demo_bench.about(plan)), flush=True)
    digits = measure(plan.digits).report
    outcome = measure(plan.paced)
    paced = outcome.report
    names = [run.strategy for run in paced.runs]
    picture.draw_png(names, outcome.events, png, title=f"{paced.model} on {paced.lab}")
    picture.write_trace(names, outcome.events, trace)
    text = json.dumps(demo_bench.to_json(plan, digits, paced), indent=2)
    with replacing(figures) as file:
        file.write(text.encode() + b"\n")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print()
    console.print(demo_bench.render(demo_bench.printed(digits, paced)))
    if plan.unshaped:
        print(f"Links were UNSHAPED: {plan.unshaped}")
    print(
        f"timeline: {png}   (open it with any image viewer)\n"
        f"trace:    {trace}   (drop it on https://ui.perfetto.dev, which reads it locally)\n"
        f"figures:  {figures}\n"
        f"took {time.monotonic() - begin:.0f} s; more: wingbeat bench --help"
    )
