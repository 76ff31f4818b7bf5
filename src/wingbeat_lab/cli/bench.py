"""``wingbeat bench``: compare strategies and PyTorch's own data parallelism in one run."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from wingbeat.errors import UsageError
from wingbeat.files import replacing

if TYPE_CHECKING:
    from wingbeat_lab.bench.runner import Outcome

MANY = "--strategies"


class ManyValues(TyperCommand):
    """A command whose ``--strategies`` takes every word up to the next option.

    typer's parser supports one value per option, so ``--strategies a b`` is rewritten to
    ``--strategies a --strategies b``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite the arguments, then parse them as usual."""
        return super().parse_args(ctx, spread(args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Append the possible strategies to the help."""
        from wingbeat_lab.bench.contenders import about

        rows = [f"[bold]{name}[/]: {note}" for name, note in about().items()]
        self.epilog = "\n\n".join(["Rows, and what may be relied on:", *rows])
        super().format_help(ctx, formatter)


def spread(args: list[str]) -> list[str]:
    """Repeat the flag before each of its words.

    >>> spread(["--strategies", "ddp", "dear:mb=5", "--rounds", "2"])
    ['--strategies', 'ddp', '--strategies', 'dear:mb=5', '--rounds', '2']
    """
    out: list[str] = []
    collecting = False
    for word in args:
        if collecting and not word.startswith("-"):
            if out[-1] != MANY:
                out.append(MANY)
            out.append(word)
            continue
        collecting = word == MANY
        out.append(word)
    return out


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("bench", cls=ManyValues)(bench)


def bench(
    model: Annotated[
        str,
        typer.Option(
            help="digits, paced:NAME with @SCALE, as in paced:resnet50@0.25, or a file of"
            " wingbeat profile, as in train.json@0.25"
        ),
    ] = "paced:resnet50@0.25",
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows: names with options, as in: ddp dear:mb=10. The first is the reference.",
            show_default="ddp allreduce dear",
        ),
    ] = None,
    lab: Annotated[
        str,
        typer.Option(
            help="The cluster; see wingbeat lab --help. A host may have a slower link:"
            " star:4@1gbit,h3@200mbit"
        ),
    ] = "star:4@1gbit",
    iterations: Annotated[int, typer.Option(help="Timed iterations of each row.")] = 30,
    rounds: Annotated[int, typer.Option(help="How often the rows take turns.")] = 3,
    warmup: Annotated[int, typer.Option(help="Untimed iterations before each turn.")] = 3,
    per_host: Annotated[int, typer.Option(help="Workers on each host.")] = 1,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    stretch: Annotated[
        float,
        typer.Option(
            help="Slow a paced model and the links down by this factor; below 1: speed them up."
        ),
    ] = 1.0,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="A slow worker; may be repeated. 3=+2x: rank 3 sleeps twice the time of a normal"
            " iteration before each of its own. 3=+2x@20-60: before its timed iterations 20 to 60"
            " only, counted from 1 over all rounds of a row. random:+2x: another random worker in"
            " each iteration, the same ones for all rows."
        ),
    ] = None,
    cross_traffic: Annotated[
        str | None,
        typer.Option(
            help="Best-effort traffic between hosts that do not train, each way on every trunk of a"
            " fat-tree: a share of its rate (0.8), or a rate (800mbit)."
        ),
    ] = None,
    cross_flows: Annotated[
        int, typer.Option(help="TCP connections of --cross-traffic, each way on a trunk.")
    ] = 4,
    target_loss: Annotated[
        float | None,
        typer.Option(help="Time training until the loss is below this; for real models."),
    ] = None,
    measured: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Measure computation and links alone, for the speed-up's bound S_max.",
        ),
    ] = True,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw a timeline of all rows here.")] = None,
    breakdown: Annotated[
        Path | None, typer.Option(help="Draw where each row's time goes here, as stacked bars.")
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option(help="Draw what hosts send over time here, as a share of their links."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev here.")
    ] = None,
) -> None:
    """Compare strategies with each other and with PyTorch's own data parallelism in one run.

    Rows take turns (A B C A B C), so that all run under the same conditions. Link rates of the lab
    are multiplied by the model's scale. Rows with tuning or trials complete them before they are
    timed. The JSON file contains every figure and how it was made.

    With a slow worker, as in Ripples: wingbeat bench --strategies ddp allreduce --slow 3=+2x
    """
    from wingbeat_lab.bench.config import BenchConfig

    config = BenchConfig(
        lab=lab if cross_traffic is None else crossed(lab, cross_traffic, cross_flows),
        model=model,
        strategies=tuple(strategies or ("ddp", "allreduce", "dear")),
        iterations=iterations,
        rounds=min(rounds, iterations) if rounds > 0 else rounds,
        warmup=warmup,
        per_host=per_host,
        optimizer=optimizer,
        stretch=stretch,
        trace=png is not None or trace is not None,
        measure=measured,
        breakdown=breakdown is not None,
        slow=tuple(slow or ()),
        target_loss=target_loss,
        traffic=traffic is not None,
    )
    config.check()
    if png is not None or breakdown is not None or traffic is not None:
        need_matplotlib()
    for path in (json_out, png, breakdown, traffic, trace):
        if path is not None:
            check_writable(path)
    outcome = measure(config)
    show(outcome)
    write(outcome, json_out, png, trace)
    if breakdown is not None:
        from wingbeat_lab.bench import bars

        bars.draw_png(outcome.report, breakdown)
        print(f"breakdown: {breakdown}")
    if traffic is not None:
        from wingbeat_lab.bench import traffic as drawing

        report = outcome.report
        rows = [(run.strategy, run.traffic) for run in report.runs if run.traffic is not None]
        drawing.draw_png(rows, traffic, title=f"{report.model} on {report.lab}")
        print(f"traffic: {traffic}")


def crossed(lab: str, amount: str, flows: int) -> str:
    """Add cross-traffic to the text of a lab.

    >>> crossed("fat-tree:4/2@1gbit+500mbit", "0.5", 2)
    'fat-tree:4/2@1gbit+500mbit,cross=250mbitx2'
    """
    from wingbeat_lab.lab.spec import LabSpec

    return str(LabSpec.parse(lab).with_cross(amount, flows))


def need_matplotlib() -> None:
    """Raise a `UsageError` before the measurement if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "a picture needs matplotlib; install it with: pip install 'wingbeat[bench]'"
        )


def check_writable(path: Path) -> None:
    """Raise a `UsageError` before the measurement if its result cannot be written to ``path``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as err:
        raise UsageError(f"cannot write {str(path)!r}: {err.strerror or err}") from None


def measure(config: Any) -> Outcome:
    """Run the bench; a worker's failure ends this process with the worker's exit code."""
    from wingbeat_lab.bench import runner

    signal.signal(signal.SIGTERM, _interrupt)  # clean up as on Ctrl-C
    try:
        return runner.run(config, command=["wingbeat", *sys.argv[1:]])
    except runner.WorkerError as err:
        print(f"wingbeat: {err}", file=sys.stderr)
        raise typer.Exit(err.exit_code) from None


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def show(outcome: Outcome) -> None:
    """Print the table."""
    from rich.console import Console

    from wingbeat_lab.bench import table

    width = None if sys.stdout.isatty() else 120
    Console(width=width).print(table.render(outcome.report))


def write(outcome: Outcome, json_out: Path | None, png: Path | None, trace: Path | None) -> None:
    """Write the requested files and print their paths."""
    if json_out is not None:
        from wingbeat_lab.bench import table

        tables = [table.printed(outcome.report).to_json()]
        text = json.dumps(outcome.report.to_json() | {"tables": tables}, indent=2)
        with replacing(json_out) as file:
            file.write(text.encode() + b"\n")
        print(f"figures: {json_out}")
    names = [run.strategy for run in outcome.report.runs]
    if png is not None:
        from wingbeat_lab.bench import picture

        title = f"{outcome.report.model} on {outcome.report.lab}"
        picture.draw_png(names, outcome.events, png, title=title)
        print(f"timeline: {png}")
    if trace is not None:
        from wingbeat_lab.bench import picture

        picture.write_trace(names, outcome.events, trace)
        print(f"trace: {trace} (open it at https://ui.perfetto.dev)")
