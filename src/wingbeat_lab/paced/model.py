"""The paced model: an ``nn.Module`` that sleeps where a GPU would compute."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.profiling import Profile, ProfiledLayer

SHORTEST_SLEEP = 0.2e-3
"""Seconds. A shorter wait is added to that of the next layer."""

SLACK = 0.5e-3
"""Seconds between layers that the clock absorbs; a longer time counts as a wait.

A GPU's launch queue hides about as much of the host's time.
"""

_PR_SET_TIMERSLACK = 29
_prepared = threading.local()


def sharpen_timers() -> None:
    """Set Linux's timer slack of this thread to 1 ns instead of 50 us; later calls are free.

    Best effort: without it sleeps end later, which the deadlines correct.
    """
    if getattr(_prepared, "done", False) or not sys.platform.startswith("linux"):
        return
    _prepared.done = True
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (AttributeError, OSError):
        pass


class Clock:
    """The emulated device's time (``due``), and when the model last ran (``left``).

    The model calls :meth:`enter` when it gets control and :meth:`spend` for the time of a piece of
    work, in seconds. Real work in between, such as writing a gradient, counts as part of the
    emulated time; an excess is deducted from later layers.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self.left = 0.0

    def restart(self) -> None:
        """Start a forward or backward pass now."""
        sharpen_timers()
        self.due = self.left = time.perf_counter()

    def enter(self) -> None:
        """Move the deadline back if other code ran for longer than :data:`SLACK`."""
        now = time.perf_counter()
        if now - self.left > SLACK:
            late = max(0.0, self.left - self.due)
            self.due = max(self.due, now - late)
        self.left = now

    def spend(self, seconds: float) -> None:
        """Advance the emulated time by ``seconds``."""
        self.due += seconds
        self._sleep(SHORTEST_SLEEP)

    def settle(self) -> None:
        """Sleep the remaining time at the end of a pass."""
        self._sleep(0.0)

    def _sleep(self, shortest: float) -> None:
        now = time.perf_counter()
        ahead = self.due - now
        if ahead > shortest:
            time.sleep(ahead)
            now = time.perf_counter()
        self.left = now


class PacedLayer(nn.Module):
    """A layer with the profile's parameters, forward time and backward time (seconds)."""

    def __init__(
        self, layer: ProfiledLayer, clock: Clock, *, factor: float, time_scale: float
    ) -> None:
        super().__init__()
        self.kind = layer.kind
        self.factor = factor
        self.clock = clock
        self.forward_s = layer.forward_ms * 1e-3 * time_scale
        # Hooks of the parameters spend the backward time; a layer without parameters has no hooks.
        self.own_backward_s = 0.0 if layer.parameters else layer.backward_ms * 1e-3 * time_scale
        for spec in layer.parameters:
            parameter = nn.Parameter(torch.ones(spec.shape))
            self.register_parameter(spec.name, parameter)
            share = spec.numel / layer.numel
            seconds = layer.backward_ms * 1e-3 * time_scale * share
            # Registered before all other hooks, so that the time has passed, and the gradient is
            # written, before they observe the gradient.
            parameter.register_hook(_entering(clock))
            parameter.register_post_accumulate_grad_hook(_spending(clock, seconds))

    def forward(self, activation: Tensor) -> Tensor:
        """Sleep the layer's forward time; add the layer's part of the loss to ``activation``."""
        out: Tensor = _PacedFunction.apply(self, activation, *self.parameters(recurse=False))
        return out


def _entering(clock: Clock) -> Callable[[Tensor], None]:
    def entering(_grad: Tensor) -> None:
        clock.enter()

    return entering


def _spending(clock: Clock, seconds: float) -> Callable[[Tensor], None]:
    def spending(_parameter: Tensor) -> None:
        clock.spend(seconds)

    return spending


class _PacedFunction(torch.autograd.Function):
    # Plain numbers are cheaper than one-element tensors: hundreds of layers share their host's
    # cores with the measured communication.

    @staticmethod
    def forward(ctx: Any, layer: PacedLayer, activation: Tensor, *parameters: Tensor) -> Tensor:
        clock = layer.clock
        clock.enter()
        # Read here, not at the start of the pass: an overlapped optimizer may update a layer just
        # before it runs.
        firsts = [p.as_strided((), ()).item() for p in parameters]
        ctx.layer = layer
        ctx.specs = [(f, p.shape, p.dtype) for f, p in zip(firsts, parameters, strict=True)]
        out = activation + 0.5 * layer.factor * sum(f * f for f in firsts)
        clock.spend(layer.forward_s)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        layer: PacedLayer = ctx.layer
        layer.clock.enter()
        slope = grad.item() * layer.factor
        # One value, expanded: autograd's accumulation writes the gradient's bytes in one pass.
        out = [
            torch.scalar_tensor(slope * first, dtype=dtype).expand(shape)
            for first, shape, dtype in ctx.specs
        ]
        layer.clock.spend(layer.own_backward_s)
        return (None, grad, *out)


class _FirstNode(torch.autograd.Function):
    """First in forward, so last in backward: sleeps the rest of backward."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, seed: Tensor) -> Tensor:
        ctx.clock = clock
        return seed.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[None, None]:
        ctx.clock.enter()
        ctx.clock.settle()
        return None, None


class _LastNode(torch.autograd.Function):
    """Last in forward, so first in backward: restarts the clock."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, total: Tensor) -> Tensor:
        ctx.clock = clock
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.clock.restart()
        return None, grads[0]


class PacedModel(nn.Module):
    """A network's real parameters at a stated device's pace, for measuring communication.

    ``model(x)`` ignores ``x`` and returns a scalar loss, so that the usual loop works::

        model = PacedModel(load_profile("resnet50"), rank=rank)
        loss = model(x)
        loss.backward()

    Each layer is a child module, in execution order. Its forward and backward take the profile's
    times, multiplied by ``time_scale``. Each parameter's gradient is written in full, from the last
    layer to the first, and hooks on gradients fire when the layer's time has passed. A layer's
    backward time is divided among its parameters by size.

    **The loss does not measure learning.** It is ``(1 + 0.1 rank) / 2`` times the sum over the
    parameters of the square of each one's first element, and every element of a parameter's
    gradient is ``(1 + 0.1 rank)`` times that element. Parameters start at 1, and the elements of
    each stay equal. So SGD on averaged gradients lowers the loss, and exact strategies end with the
    same loss: it shows whether gradients arrived.

    The model is on the CPU. Buffers (BatchNorm's running statistics) are omitted.

    Raises:
        ValueError: ``time_scale`` is negative.
    """

    def __init__(self, profile: Profile, rank: int = 0, *, time_scale: float = 1.0) -> None:
        super().__init__()
        if not time_scale >= 0:
            raise ValueError(f"time_scale {time_scale!r}: allowed is 0 or more")
        self.profile = profile
        self._clock = Clock()
        for layer in profile.layers:
            child = PacedLayer(layer, self._clock, factor=1.0 + 0.1 * rank, time_scale=time_scale)
            taken = hasattr(self, layer.attribute)  # such as a layer that is called "profile"
            self.add_module(f"{layer.attribute}_" if taken else layer.attribute, child)

    def forward(self, x: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Run the layers at their pace and return the loss; ``x`` is ignored."""
        self._clock.restart()
        # float64, so that a sum over hundreds of layers shows small differences between strategies.
        seed = torch.zeros((), dtype=torch.float64, requires_grad=torch.is_grad_enabled())
        out: Tensor = _FirstNode.apply(self._clock, seed)
        for layer in self.children():
            out = layer(out)
        out = _LastNode.apply(self._clock, out)
        self._clock.settle()
        return out
