"""Profile a training script, or a function that returns a model and a batch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.errors import UsageError
from wingbeat.profiling import layers
from wingbeat.profiling.processor import processor_name
from wingbeat.profiling.profile import Profile
from wingbeat.profiling.recorder import Recorder, Stop, tensors

_DIGITS = 6
"""Decimals of milliseconds in a file: nanoseconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile, and the times from which it was made.

    Attributes:
        profile: its layers add up to ``plain_ms``.
        plain_ms: median of the iterations without hooks.
        hooked_ms: the sum of the layers as measured with hooks.
        parts: milliseconds with hooks of `(optimizer)`, `(data)`, `(loss)`, forward and backward.
    """

    profile: Profile
    plain_ms: float
    hooked_ms: float
    parts: Mapping[str, float]


def profile_script(
    script: str,
    arguments: Sequence[str],
    iterations: int,
    batch_size: int | None,
    progress: Callable[[str], None],
) -> Measured:
    """Run a training script, unchanged, until its profile is measured.

    It runs as ``python script arguments`` would, in the environment that torchrun gives to one
    process. Other exceptions of the script are not caught.

    Raises:
        UsageError: it cannot be profiled, or ends too soon.
    """
    if not Path(script).is_file():
        raise UsageError(f"cannot profile {script!r}: there is no such file")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}; a profile is that of one process: start it "
            "without torchrun"
        )

    def run() -> None:
        with _as_program(script, arguments):
            runpy.run_path(script, run_name="__main__")

    name = Path(script).stem
    return _measure(run, Recorder(iterations, progress), name, script, batch_size)


def profile_function(
    target: str, iterations: int, batch_size: int | None, progress: Callable[[str], None]
) -> Measured:
    """Train the model that ``module:function`` returns, without an optimizer.

    The function returns a model, and a batch or a step. A batch is what the model is called with: a
    tensor, a tuple of arguments or a dict of keyword arguments. The loss is the output, its
    ``loss``, or the sum of its elements. A step is a function that returns the loss.

    Raises:
        UsageError: there is no such function, it returns something else, or it cannot be profiled.
    """
    model, step = _model_and_step(target)
    recorder = Recorder(iterations, progress)

    def run() -> None:
        recorder.watch(model.parameters())
        while True:
            model.zero_grad()
            loss = step()
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise UsageError(
                    f"the step of {target!r} returned {_shown(loss)}; it has to return the loss, a "
                    "tensor of one element"
                )
            loss.backward()
            recorder.boundary()

    name = target.rpartition(":")[2].rpartition(".")[2]
    return _measure(run, recorder, name, target, batch_size)


def _measure(
    run: Callable[[], None], recorder: Recorder, name: str, target: str, batch_size: int | None
) -> Measured:
    code: object = None
    with recorder:
        try:
            run()
        except Stop as stop:
            if stop.error is not None:
                raise stop.error from None
        except SystemExit as end:
            code = end.code
    if recorder.done < recorder.total:
        ended = f" with exit code {code}" if code else ""
        raise UsageError(
            f"{target} ended{ended} after {recorder.done} iterations of backward() and step(); a "
            f"profile needs {recorder.total}: let it train longer, or give a smaller --iterations"
        )
    return _made(recorder, name, target, batch_size)


def _made(recorder: Recorder, name: str, target: str, batch_size: int | None) -> Measured:
    hooked, plain = recorder.finish()
    iteration = layers.typical(hooked)
    if not iteration.gradients and not iteration.early:
        raise UsageError(
            f"no hook of a parameter of {target} was called in backward (FSDP?); profile the model "
            "without it"
        )
    batch = batch_size or iteration.batch
    if not batch:
        raise UsageError(
            f"the number of samples of {target} is unknown: the model's inputs have no tensor; "
            "give it as --batch-size"
        )
    plain_ms = statistics.median(plain)
    found = layers.layers_of(iteration, recorder.description)
    factor = plain_ms / iteration.total_ms
    found = tuple(
        replace(
            layer,
            forward_ms=round(layer.forward_ms * factor, _DIGITS),
            backward_ms=round(layer.backward_ms * factor, _DIGITS),
        )
        for layer in found
    )
    whole = sum(layer.forward_ms + layer.backward_ms for layer in found)
    profile = Profile(
        name=name,
        device=device_name(recorder.device),
        batch_size=batch,
        samples_per_second=1e3 * batch / whole,
        source=(
            f"measured: wingbeat profile {target}, torch {torch.__version__}, median of "
            f"{len(plain)} iterations"
        ),
        shapes_from=target,
        split=(
            f"measured with hooks, median of {len(hooked)} iterations that take "
            f"{1 / factor:.3f} of those without"
        ),
        layers=found,
    )
    return Measured(profile, plain_ms, iteration.total_ms, _parts(iteration))


def _parts(iteration: layers.Timed) -> dict[str, float]:
    sums: dict[str, float] = {}
    for (part, second), ms in iteration.parts.items():
        if not ms:
            continue
        if part in (layers.OPTIMIZER, layers.DATA, layers.LOSS):
            key = str(part)
        else:
            key = "forward" if second == "forward" else "backward"
        sums[key] = sums.get(key, 0.0) + ms
    return sums


def device_name(device: torch.device) -> str:
    """Return the name of a device, with the number of threads of a CPU."""
    if device.type == "cpu":
        return f"{processor_name()}, {torch.get_num_threads()} threads, float32"
    module = torch.get_device_module(device)
    known = getattr(module, "get_device_name", None)
    return f"{known(device) if known else device.type}, float32"


# -- scripts -------------------------------------------------------------------------------------


@contextmanager
def _as_program(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """Set what ``python script arguments`` sets, and torchrun for one process."""
    argv, path, environ = sys.argv, sys.path[:], dict(os.environ)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for key, value in alone.items():
        os.environ.setdefault(key, value)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environ)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# -- functions -----------------------------------------------------------------------------------


def _model_and_step(target: str) -> tuple[nn.Module, Callable[[], Any]]:
    made = _function(target)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(
            f"{target!r} returned {_shown(made)}; it has to return (model, batch) or (model, step)"
        )
    model, given = made
    if isinstance(given, Tensor):
        return model, lambda: _loss(model(given))
    if isinstance(given, tuple):
        return model, lambda: _loss(model(*given))
    if isinstance(given, Mapping):
        return model, lambda: _loss(model(**given))
    if callable(given):
        return model, given
    raise UsageError(
        f"{target!r} returned a model and {_shown(given)}; the second has to be a tensor, a tuple, "
        "a dict or a function"
    )


def _function(target: str) -> Callable[[], Any]:
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        if err.name is None or not f"{module_name}.".startswith(f"{err.name}."):
            raise  # the module's own import
        raise UsageError(f"cannot profile {target!r}: no module {module_name!r}") from None
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UsageError(f"cannot profile {target!r}: {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _loss(output: Any) -> Tensor:
    """Return the loss of an output: itself, its ``loss``, or the sum of its elements."""
    if isinstance(output, Mapping):
        output = output.get("loss", output)
    output = getattr(output, "loss", output)
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    sums = [each.sum() for each in tensors(output) if each.requires_grad]
    if not sums:
        raise UsageError(
            f"the model returned {_shown(output)} without gradients; return (model, step), where "
            "step() returns the loss"
        )
    return sum(sums[1:], sums[0])


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if not isinstance(value, tuple) else f"{len(value)} values"
