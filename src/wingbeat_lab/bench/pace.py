"""Codec work at the pace of a bench's links and computation.

A paced model at scale 0.05 has a twentieth of the parameters on links of a twentieth of the rate,
and slow motion stretches links and computation once more. A codec then has a twentieth of the work
at the processor's real pace: its share of an iteration would be far too small. A sleep after each
piece of codec work therefore extends it to its share on the whole model. The processor is idle
meanwhile, as that of another host would be.

A part of each call is independent of the model's size: Python, the start of a kernel, one of the
few operations for each matrix. Slow motion stretches this part, the scale does not. `fixed_costs`
derives it from the same calls on a smaller model. Without it the whole call is scaled, which
overestimates many small calls.

wingbeat's codecs and DDP's hooks are treated alike. The lanes of the extension, which encode and
decode without Python, sleep likewise (``native/src/net/codec_clock.h``). Other work of the
processor (copies into buckets, sums, TCP) keeps its real pace.
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

from wingbeat import _native
from wingbeat.codecs.coding import Coding
from wingbeat.codecs.lowrank import Round

SHORTEST_S = 0.2e-3
"""Shorter sleeps overshoot. They are added to a later sleep of the thread."""

WORK: tuple[tuple[Any, str], ...] = (
    (Coding, "encode"),
    (Coding, "decode"),
    (Round, "__init__"),
    (Round, "compute_second"),
    (Round, "keep_residual"),
    (Round, "write_result"),
    (default_hooks, "fp16_compress_hook"),
    (default_hooks, "bf16_compress_hook"),
    (powerSGD_hook, "powerSGD_hook"),
)
"""The functions that do codec work: owner and name of each."""

NATIVE_WORK = ("pack", "unpack")
"""The names of codec work of the extension's lanes."""

SMALLER = 0.25
"""Share of the model's parameters in the model that serves to measure fixed costs."""

PRICED = 3
"""Iterations before and during the measurement of calls; PowerSGD starts with its third."""

Open = Callable[[float], contextlib.AbstractContextManager[Callable[[int], object]]]
"""Creates a model with a share of the bench's parameters; yields a function that runs an iteration
by number, 0 and below.
"""

_owed = threading.local()


@dataclass
class Calls:
    """CPU seconds and number of all calls of one function."""

    seconds: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        """Seconds per call; 0 without calls."""
        return self.seconds / self.count if self.count else 0.0


@dataclass
class Pace:
    """How codec work of this process is slowed.

    Attributes:
        stretch: factor on the times of links and computation.
        scale: the model's share of the whole model's parameters.
        fixed: CPU seconds of a call that are independent of the model's size, by function.
    """

    stretch: float = 1.0
    scale: float = 1.0
    fixed: Mapping[str, float] = field(default_factory=dict)
    _measured: dict[str, Calls] | None = None
    _installed: bool = False

    @property
    def slows(self) -> bool:
        """Whether the work takes longer on the whole model at this pace than here."""
        return self.stretch > self.scale

    def install(self) -> Callable[[], None]:
        """Slow all codec work of this process; return a function that undoes it.

        Without effect if the whole model at this pace takes less time than the work here.
        """
        if not self.slows:
            return lambda: None
        before = [(owner, name, getattr(owner, name)) for owner, name in WORK]
        for owner, name, plain in before:
            setattr(owner, name, self.slowed(plain, f"{owner.__name__}.{name}"))
        future: Any = torch._C.Future
        then = future.then

        # The second half of DDP's hooks, such as the cast back to float32, is a callback.
        def slowed_then(awaited: Any, callback: Callable[[Any], Any]) -> Any:
            return then(awaited, self.slowed(callback, f"then {callback.__qualname__}"))

        future.then = slowed_then
        self._installed = True
        self._slow_lanes()

        def undo() -> None:
            self._installed = False
            _native.pace_codecs(1.0, 1.0, 0.0, 0.0)
            for owner, name, plain in before:
                setattr(owner, name, plain)
            future.then = then

        return undo

    def use(self, fixed: Mapping[str, float]) -> None:
        """Set `fixed`."""
        self.fixed = fixed
        self._slow_lanes()

    def _slow_lanes(self) -> None:
        """Slow the codec work of the extension's lanes, unless it is measured."""
        if self._installed and self._measured is None:
            fixed = (self.fixed.get(name, 0.0) for name in NATIVE_WORK)
            _native.pace_codecs(self.stretch, self.scale, *fixed)

    def slowed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return ``work`` followed by a sleep for the additional time of the whole model."""

        @functools.wraps(work)
        def run(*args: Any, **options: Any) -> Any:
            if getattr(_owed, "inside", False):  # a codec inside another codec is slowed once
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
        """Return the additional seconds of the whole model at this pace."""
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
        """Return `fixed` for one model, from iterations of it and of a smaller one."""
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
        """Measure calls by function in the body, without slowing them."""
        self._measured = {}
        _native.pace_codecs(1.0, 1.0, 0.0, 0.0)
        before = _native.codec_work()
        try:
            yield self._measured
            for name, old, new in zip(NATIVE_WORK, before, _native.codec_work(), strict=True):
                if new[0] > old[0]:
                    calls = Calls((new[1] - old[1]) / 1e9, new[0] - old[0])
                    self._measured[name] = calls
        finally:
            self._measured = None
            self._slow_lanes()


def fixed_costs(
    here: Mapping[str, Calls], smaller: Mapping[str, Calls], share: float
) -> dict[str, float]:
    """Return the CPU seconds of a call that are independent of the model's size, by function.

    ``here`` are calls on the bench's model, ``smaller`` as many on a model of a ``share`` of its
    parameters. The result is the intercept of a line, limited to 0 to the time of a call.
    """
    made = {}
    for name in here.keys() & smaller.keys():
        large, small = here[name].mean, smaller[name].mean
        made[name] = min(large, max(0.0, (small - share * large) / (1.0 - share)))
    return made
