"""Trial whether an optimizer can step on some of its parameters at a time, as DeAR has it do.

Nearly all can: each parameter is updated from its own gradient and state. One that counts its steps
in an attribute, clips by a norm over all gradients, keeps state in its param groups, or wraps
another optimizer cannot, and nothing would tell. No list can know every optimizer, so the optimizer
at hand is run: on all test tensors at once, and on one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wingbeat.engine.updates.chance import kept_random_state
from wingbeat.engine.updates.twin import (
    Unfit,
    bare_step,
    close,
    copied_settings,
    make_twin,
    same_settings,
    try_step,
    why,
)
from wingbeat.observe.log import log

_STEPS = 3
_LONGEST = 6
"""Elements of a test tensor along each dimension, at most."""

_COUNTERS = frozenset({"_step_count", "_opt_called"})
"""What torch itself counts in attributes, for its schedulers' warnings."""

_Shape = tuple[int, ...]


def steps_apart(optimizer: torch.optim.Optimizer) -> bool:
    """Whether stepping on one parameter after the other does what one step on all of them does.

    The optimizer, its parameters and the random numbers stay as they are: a twin makes the steps.
    If it cannot be found out, the answer is no.
    """
    why_not = dependence(optimizer)
    if why_not:
        _say(optimizer, why_not)
    return not why_not


def dependence(optimizer: torch.optim.Optimizer) -> str:
    """Return why stepping on one parameter after the other does not do the same; empty if it does.

    The optimizer, its parameters and the random numbers stay as they are: a twin makes the steps.
    """
    step = bare_step(type(optimizer).step)
    tried: set[Any] = set()
    for group in optimizer.__dict__["param_groups"]:
        settings = {k: v for k, v in group.items() if k != "params"}
        for kind in kinds(group["params"]):
            key = (*kind, same_settings(settings))
            if key not in tried:
                tried.add(key)
                why_not = _differs(optimizer, step, settings, *kind)
                if why_not:
                    return why_not
    return ""


def kinds(
    params: list[torch.Tensor],
) -> list[tuple[torch.device, torch.dtype, tuple[_Shape, ...]]]:
    """For each dtype and device: small shapes with as many dimensions as its parameters have."""
    shapes: dict[tuple[torch.device, torch.dtype], dict[int, _Shape]] = {}
    for p in params:
        if p.requires_grad:
            small = tuple(min(n, _LONGEST) for n in p.shape)
            shapes.setdefault((p.device, p.dtype), {}).setdefault(p.ndim, small)
    # At least two of each: one alone has nobody to depend on.
    return [(*kind, tuple(found.values()) * 2) for kind, found in shapes.items()]


def _differs(
    optimizer: torch.optim.Optimizer,
    step: Callable[[Any], Any],
    settings: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[_Shape, ...],
) -> str:
    """Return what is different between the two ways; empty if nothing is."""
    cuda = [device] if device.type == "cuda" else []
    try:
        with kept_random_state(cuda):
            runs = []
            for together in (True, False):
                # Others each time: whoever draws some does so in the order of its parameters.
                torch.default_generator.manual_seed(int(together))
                params = [
                    torch.nn.Parameter(_drawn(seed, shape, 1.0, device, dtype))
                    for seed, shape in enumerate(shapes)
                ]
                batches = [params] if together else [[p] for p in params]
                state = _train(make_twin(optimizer), step, settings, batches)
                runs.append((params, [state[p] for p in params]))
    except Exception as err:
        return why(err)
    return _compare(*runs)


def _train(
    twin: Any,
    step: Callable[[Any], Any],
    settings: dict[str, Any],
    batches: list[list[torch.nn.Parameter]],
) -> Any:
    """Make some steps, on each batch by itself; return the optimizer's state.

    Raises:
        Unfit: something was kept, or left undone, that has nothing to do with the batch.
    """
    params = [p for batch in batches for p in batch]
    first = [p.detach().clone() for p in params]
    before: dict[str, str] = {}
    for number in range(1, _STEPS + 1):
        set_gradients(params, number)
        for batch in batches:
            group = {**copied_settings(settings), "params": batch}
            changed = try_step(twin, step, group)
            if changed:
                raise Unfit(f"it keeps state in its param groups: {', '.join(changed)}")
        # What is set in the first step alone does not count: if it mattered, results would differ.
        before = before or _attributes(twin)
    after = _attributes(twin)
    changed = [key for key in after if after[key] != before.get(key)]
    if changed:
        raise Unfit(f"it keeps state outside of its state dict: {', '.join(changed)}")
    if any(p.numel() and torch.equal(p, old) for p, old in zip(params, first, strict=True)):
        raise Unfit("it does not update what its param groups hold")
    if not all(isinstance(key, torch.Tensor) for key in twin.state):
        raise Unfit("it remembers what belongs to no parameter")
    return twin.state


def _compare(whole: Any, apart: Any) -> str:
    for a, b in zip(whole[0], apart[0], strict=True):
        if not close(a.detach(), b.detach()):
            return "what it does to one parameter depends on the others, or on random numbers"
    for a, b in zip(whole[1], apart[1], strict=True):
        if a.keys() != b.keys() or not all(_same(a[k], b[k]) for k in a):
            return "what it remembers of one parameter depends on the others"
    return ""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return close(a, b)
    return type(a) is type(b) and bool(repr(a) == repr(b))


def _attributes(twin: Any) -> dict[str, str]:
    """The optimizer's own attributes, as text, which tells when one has changed."""
    return {
        key: repr(value)
        for key, value in vars(twin).items()
        if key not in ("param_groups", "state") and key not in _COUNTERS
    }


def set_gradients(params: list[torch.nn.Parameter], number: int) -> None:
    """Gradients large at first and small later, so that no threshold is only on one side."""
    for seed, param in enumerate(params):
        scale = 10.0 ** (2 - number)
        param.grad = _drawn(100 * number + seed, param.shape, scale, param.device, param.dtype)


def _drawn(
    seed: int, shape: _Shape, scale: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    # Drawn on the host, so that the device's random numbers are left alone.
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(device, dtype)


def _say(optimizer: torch.optim.Optimizer, why: str) -> None:
    log.info(
        "optimizer %s cannot step on some of its parameters at a time (%s): gradients are gathered "
        "before each step, which is right and hides less",
        type(optimizer).__name__,
        why,
    )
