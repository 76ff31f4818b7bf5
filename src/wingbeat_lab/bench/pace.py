"""Codec work at the pace of a bench's links and computation.

A paced model at scale 0.05 has a twentieth of the parameters on links of a twentieth of the rate,
and a bench in slow motion stretches links and computation once more. A codec has a twentieth of
the work then, at the processor's own pace: its share of an iteration would be far too small. Here
each piece of codec work is followed by a sleep, so that it takes as long as its share of the whole
model would. The processor is free meanwhile, as that of another host would be.

A part of each call does not grow with the model: Python, a kernel's start, one of the few
operations for each matrix. Slow motion stretches it, the scale does not. How large it is follows
from the same calls on a smaller model (`fixed_costs`). Without that all of a call grows, which
takes too much for many small calls.

The codecs of wingbeat and the hooks of DDP are treated alike. What a processor does beside them
(copies into buckets, sums, TCP) keeps its own pace.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from wingbeat.codecs.coding import Coding
from wingbeat.codecs.factors import Round

SHORTEST_S = 0.2e-3
"""Shorter sleeps end much too late. What is shorter is added to a later one of the thread."""

WORK: tuple[tuple[Any, str], ...] = (
    (Coding, "encode"),
    (Coding, "decode"),
    (Round, "__init__"),
    (Round, "turn"),
    (Round, "keep"),
    (Round, "end"),
    (default_hooks, "fp16_compress_hook"),
    (default_hooks, "bf16_compress_hook"),
    (powerSGD_hook, "powerSGD_hook"),
)
"""Where codec work is done: the owner and the name of each function."""

SMALLER = 0.25
"""Of the model's parameters: the model beside which fixed costs are measured."""

PRICED = 3
"""Iterations before calls are measured, as PowerSGD begins with its third, and meanwhile."""

Open = Callable[[float], contextlib.AbstractContextManager[Callable[[int], object]]]
"""Makes a model of a share of the bench's parameters; what it yields makes an iteration by number,
0 and below."""

_owed = threading.local()


@dataclass
class Calls:
    """CPU seconds of all calls of one function, and how many there were."""

    seconds: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        """Seconds of a call; 0 if there was none."""
        return self.seconds / self.count if self.count else 0.0


@dataclass
class Pace:
    """How codec work of this process is slowed.

    Attributes:
        stretch: factor on the times of links and computation.
        scale: of the model: its share of the whole one's parameters.
        fixed: CPU seconds of a call that do not grow with the model, by function.
    """

    stretch: float = 1.0
    scale: float = 1.0
    fixed: Mapping[str, float] = field(default_factory=dict)
    _measured: dict[str, Calls] | None = None

    @property
    def slows(self) -> bool:
        """Whether the whole model at this pace takes longer than the work does here."""
        return self.stretch > self.scale

    def install(self) -> Callable[[], None]:
        """Slow all codec work of this process from now on; return what undoes it.

        Where the whole model at this pace would take less time than the work does here, nothing is
        changed: no processor can be made faster.
        """
        if not self.slows:
            return lambda: None
        before = [(owner, name, getattr(owner, name)) for owner, name in WORK]
        for owner, name, plain in before:
            setattr(owner, name, self.slowed(plain, f"{owner.__name__}.{name}"))
        future: Any = torch._C.Future
        then = future.then

        # The second half of a hook of DDP's, such as the cast back to float32, is a callback.
        def slowed_then(awaited: Any, callback: Callable[[Any], Any]) -> Any:
            return then(awaited, self.slowed(callback, f"then {callback.__qualname__}"))

        future.then = slowed_then

        def undo() -> None:
            for owner, name, plain in before:
                setattr(owner, name, plain)
            future.then = then

        return undo

    def slowed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return ``work`` followed by a sleep for what the whole model would take longer."""

        @functools.wraps(work)
        def run(*args: Any, **options: Any) -> Any:
            if getattr(_owed, "inside", False):  # one codec that uses another is slowed once
                return work(*args, **options)
            _owed.inside, began = True, time.thread_time()
            try:
                return work(*args, **options)
            finally:
                _owed.inside = False
                spent = time.thread_time() - began
                if self._measured is None:
                    self._sleep(spent, name)
                else:
                    calls = self._measured.setdefault(name, Calls())
                    calls.seconds += spent
                    calls.count += 1

        return run

    def owed(self, spent: float, name: str) -> float:
        """Return how many seconds longer the whole model would take at this pace."""
        fixed = min(spent, self.fixed.get(name, 0.0))
        return self.stretch * (fixed + (spent - fixed) / self.scale) - spent

    def _sleep(self, spent: float, name: str) -> None:
        debt = getattr(_owed, "seconds", 0.0) + self.owed(spent, name)
        if debt >= SHORTEST_S:
            slept = time.perf_counter()
            time.sleep(debt)
            debt -= time.perf_counter() - slept
        _owed.seconds = debt

    def price(self, opened: Open) -> dict[str, float]:
        """Return what `fixed` is to be for one model, by iterations of it and of a smaller one."""
        found = []
        for share in (1.0, SMALLER):
            with opened(share) as iterate:
                for i in range(PRICED):
                    iterate(-i)
                with self.measured() as calls:
                    for i in range(PRICED):
                        iterate(-i)
            found.append(calls)
        return fixed_costs(found[0], found[1], SMALLER)

    @contextlib.contextmanager
    def measured(self) -> Iterator[dict[str, Calls]]:
        """Slow nothing inside, and count what calls take, by function."""
        self._measured = {}
        try:
            yield self._measured
        finally:
            self._measured = None


def fixed_costs(
    here: Mapping[str, Calls], smaller: Mapping[str, Calls], share: float
) -> dict[str, float]:
    """Return what of a call does not grow with the model, in CPU seconds by function.

    Args:
        here: what calls take on the bench's model.
        smaller: the same on a model of a ``share`` of its parameters, in as many calls.
        share: below 1.

    A line through both is taken; times scatter, so it is kept between 0 and what a call takes.
    """
    made = {}
    for name in here.keys() & smaller.keys():
        large, small = here[name].mean, smaller[name].mean
        made[name] = min(large, max(0.0, (small - share * large) / (1.0 - share)))
    return made
