"""``wingbeat profile``: measures the layers of the user's own model into a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from wingbeat.profiling.measure import Measured

HELP = """Measure the layers of your model, in one process, and write them to a file.

\b
TARGET is your training script, which runs unchanged until enough is measured, or a
function that returns a model and a batch.

\b
Examples:
  wingbeat profile train.py                        into train.json
  wingbeat profile train.py -- --epochs 1 --lr 0.1 with the script's arguments
  wingbeat profile models:resnet --out resnet.json def resnet(): return model, batch
  wingbeat bench --model train.json                train at its pace, on a lab

\b
docs/how-to/plan.md has the contract of the function, and what is measured.
"""

_MOST_ITERATIONS = 1000
_EVERY_S = 2.0
_SHOWN = 5

_NOISY = 0.15
"""Difference of iterations with and without hooks that is reported."""


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("profile", help=HELP)(profile)


def profile(
    target: Annotated[str, typer.Argument(help="script.py, or module:function.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="-- and the script's arguments.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="NAME.json")
    ] = None,
    iterations: Annotated[
        int, typer.Option(help="Iterations to measure with hooks, and as many without.")
    ] = 10,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples of an iteration.",
            show_default="the first dimension of the model's first tensor",
        ),
    ] = None,
) -> None:
    """Profile a script or a function."""
    if not 2 <= iterations <= _MOST_ITERATIONS:
        raise UsageError(f"--iterations {iterations}: allowed are 2 to {_MOST_ITERATIONS}")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size {batch_size}: allowed is 1 or more")
    is_script = target.endswith(".py")
    if not is_script and ":" not in target:
        raise UsageError(f"cannot profile {target!r}; allowed: script.py, or module:function")
    if arguments and not is_script:
        raise UsageError(f"a function has no arguments: {' '.join(arguments)!r}")
    stem = Path(target).stem if is_script else target.rpartition(":")[2].rpartition(".")[2]
    path = out if out is not None else Path(f"{stem}.json")
    if path.suffix != ".json":
        raise UsageError(f"--out {str(path)!r}: the name has to end in .json")
    path = path.absolute()  # the script may change the folder

    from wingbeat.files import replacing
    from wingbeat.profiling import encode, measure

    if is_script:
        made = measure.profile_script(target, arguments or [], iterations, batch_size, _Progress())
    else:
        made = measure.profile_function(target, iterations, batch_size, _Progress())
    with replacing(path, f"profile {str(path)!r}") as file:
        file.write(encode(made.profile).encode())
    print("\n".join(report(made)))
    print(f"written: {path}")


class _Progress:
    """Prints a line on standard error, at most every two seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic() - _EVERY_S

    def __call__(self, line: str) -> None:
        if time.monotonic() - self._last >= _EVERY_S:
            self._last = time.monotonic()
            print(f"wingbeat profile: {line}", file=sys.stderr, flush=True)


def report(made: Measured) -> list[str]:
    """Return what was measured, as lines."""
    found, parts = made.profile, made.parts
    rows = sorted(found.layers, key=lambda row: -(row.forward_ms + row.backward_ms))
    shown = ", ".join(
        f"{row.name} {row.forward_ms + row.backward_ms:.3g} ms" for row in rows[:_SHOWN]
    )
    names = {"(loss)": "loss", "(optimizer)": "optimizer", "(data)": "data and the rest"}
    pieces = [
        f"{names.get(key, key)} {parts[key]:.4g}"
        for key in ("forward", "backward", *names)
        if parts.get(key)
    ]
    ratio = made.hooked_ms / made.plain_ms
    lines = [
        f"{found.name} on {found.device}: {len(found.layers)} layers, {found.tensors} tensors, "
        f"{found.params / 1e6:.4g} M parameters",
        f"an iteration takes {made.plain_ms:.4g} ms without hooks: batch {found.batch_size}, "
        f"{found.samples_per_second:.4g} samples/s",
        f"with hooks it takes {ratio:.3f} of that: {' + '.join(pieces)} = {made.hooked_ms:.4g} ms; "
        "the times in the file add up to that without",
        f"slowest layers: {shown}",
    ]
    if abs(ratio - 1) > _NOISY:
        lines.append(
            "the two differ: another program disturbs this machine, or modules are too short for "
            "hooks; --iterations 50 separates the two"
        )
    return lines
