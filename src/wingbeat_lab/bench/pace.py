"""Codec work at the pace of a bench's links and computation.

A paced model at scale 0.05 has a twentieth of the parameters on links of a twentieth of the rate,
and slow motion stretches links and computation once more. A codec then has a twentieth of the work
at the processor's real pace: its share of an iteration would be far too small. A sleep after each
piece of codec work therefore extends it to its share on the whole model. The processor is idle
meanwhile, as that of another host would be.

How long a call takes is its price, not a multiple of its own time: that would multiply the noise
of short calls too. Before a row is timed, `Pace.measure` counts calls on its model and on a smaller
one, and `prices` draws a line through both: seconds of a call, or of each matrix of a low-rank
round, that are independent of the model's size (Python, the start of a kernel), and seconds for
each byte of float32. Both are typical CPU time: the median of some iterations, and of all workers,
which have the same prices. The scale multiplies the bytes, and slow motion the whole. A call
without a price takes its own time, all of it scaled, which overestimates many small calls.

wingbeat's codecs and DDP's hooks are treated alike. The lanes of the extension, which encode and
decode without Python, sleep likewise (``native/src/net/codec_clock.h``). Other work of the
processor (copies into buckets, sums, TCP) keeps its real pace.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from wingbeat import _native
from wingbeat.codecs.coding import Coding
from wingbeat.codecs.lowrank import Factors, Round
from wingbeat.simulator.codecs import Price
from wingbeat.simulator.model import ITEMSIZE
from wingbeat.types import Span

SHORTEST_S = 0.2e-3
"""Shorter sleeps overshoot. They are added to a later sleep of the thread."""


class Size(NamedTuple):
    """What a call has to do: matrices, or 1, and bytes of float32."""

    units: int
    nbytes: int


def _of_span(*args: Any, **options: Any) -> Size:
    span = next(each for each in (*args, *options.values()) if isinstance(each, Span))
    return Size(1, ITEMSIZE * len(span))


def _of_factors(factors: Factors, buffer: Tensor) -> Size:
    return Size(max(1, len(factors.matrices)), ITEMSIZE * buffer.numel())


def _of_new_round(_: Round, factors: Factors, buffer: Tensor, *__: Any) -> Size:
    return _of_factors(factors, buffer)


def _of_round(own: Round, *_: Any) -> Size:
    return _of_factors(own.factors, own.buffer)


def _of_bucket(_: Any, bucket: Any) -> Size:
    return Size(1, ITEMSIZE * bucket.buffer().numel())


def _of_future(future: Any) -> Size:
    value = future.value()
    tensor = value if isinstance(value, Tensor) else value[0]
    return Size(1, ITEMSIZE * tensor.numel())


WORK: tuple[tuple[Any, str, Callable[..., Size]], ...] = (
    (Coding, "encode", _of_span),
    (Coding, "decode", _of_span),
    (Round, "__init__", _of_new_round),
    (Round, "compute_second", _of_round),
    (Round, "keep_residual", _of_round),
    (Round, "write_result", _of_round),
    (default_hooks, "fp16_compress_hook", _of_bucket),
    (default_hooks, "bf16_compress_hook", _of_bucket),
    (powerSGD_hook, "powerSGD_hook", _of_bucket),
)
"""The functions that do codec work: owner, name, and how much a call with its arguments is."""

NATIVE_WORK = ("pack", "unpack")
"""The names of codec work of the extension's lanes."""

SMALLER = 0.25
"""Share of the model's parameters in the model that separates fixed times from those of bytes."""

BEFORE, COUNTED = 3, 5
"""Iterations before those whose calls are counted, and those; PowerSGD starts with its third."""

Open = Callable[[float], contextlib.AbstractContextManager[Callable[[int], object]]]
"""Creates a model with a share of the bench's parameters; yields a function that runs an iteration
by number, 0 and below.
"""

_owed = threading.local()


class Calls(NamedTuple):
    """CPU seconds of all calls of one function, and their size."""

    seconds: float = 0.0
    units: int = 0
    nbytes: int = 0

    def and_one(self, seconds: float, size: Size) -> Calls:
        """Return these calls and one more."""
        return Calls(self.seconds + seconds, self.units + size.units, self.nbytes + size.nbytes)

    @property
    def rate(self) -> float:
        """Seconds for each byte."""
        return self.seconds / max(1, self.nbytes)


Measured = Mapping[str, Calls]
"""Calls by function."""


@dataclass
class Pace:
    """How codec work of this process is slowed.

    Attributes:
        stretch: factor on the times of links and computation.
        scale: the model's share of the whole model's parameters.
        prices: of a call's units and bytes on one core at real pace, by function.
    """

    stretch: float = 1.0
    scale: float = 1.0
    prices: Mapping[str, Price] = field(default_factory=dict)
    _measured: dict[str, Calls] | None = None
    _installed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
        before = [(owner, name, getattr(owner, name), size) for owner, name, size in WORK]
        for owner, name, plain, size in before:
            setattr(owner, name, self.slowed(plain, f"{owner.__name__}.{name}", size))
        future: Any = torch._C.Future
        then = future.then

        # The second half of DDP's hooks, such as the cast back to float32, is a callback.
        def slowed_then(awaited: Any, callback: Callable[[Any], Any]) -> Any:
            return then(awaited, self.slowed(callback, f"then {callback.__qualname__}", _of_future))

        future.then = slowed_then
        self._installed = True
        self._slow_lanes()

        def undo() -> None:
            self._installed = False
            _native.pace_codecs(1.0, None, None)
            for owner, name, plain, _ in before:
                setattr(owner, name, plain)
            future.then = then

        return undo

    def use(self, prices: Mapping[str, Price]) -> None:
        """Set `prices`."""
        self.prices = prices
        self._slow_lanes()

    def _slow_lanes(self) -> None:
        """Slow the codec work of the extension's lanes, unless it is measured."""
        if not self._installed or self._measured is not None:
            return
        pack, unpack = (
            None
            if price is None
            else (self.stretch * price.fixed_s, ITEMSIZE * self._byte_s(price))
            for price in map(self.prices.get, NATIVE_WORK)
        )
        _native.pace_codecs(self.stretch / self.scale, pack, unpack)

    def slowed(
        self, work: Callable[..., Any], name: str, size_of: Callable[..., Size]
    ) -> Callable[..., Any]:
        """Return ``work`` followed by a sleep for the rest of its time on the whole model."""

        @functools.wraps(work)
        def run(*args: Any, **options: Any) -> Any:
            if getattr(_owed, "inside", False):  # a codec inside another codec is slowed once
                return work(*args, **options)
            size = size_of(*args, **options)
            _owed.inside, began = True, time.thread_time()
            try:
                return work(*args, **options)
            finally:
                _owed.inside = False
                self._end(name, time.thread_time() - began, size)

        return run

    def _end(self, name: str, spent: float, size: Size) -> None:
        if self._measured is None:
            self._sleep(self.charge(name, spent, size) - spent)
            return
        with self._lock:  # codecs have work in several threads
            known = self._measured.get(name, Calls())
            self._measured[name] = known.and_one(spent, size)

    def charge(self, name: str, spent: float, size: Size) -> float:
        """Return the seconds of a call on the whole model at this pace."""
        price = self.prices.get(name)
        if price is None:
            return spent * self.stretch / self.scale
        return self.stretch * size.units * price.fixed_s + size.nbytes * self._byte_s(price)

    def _byte_s(self, price: Price) -> float:
        return self.stretch * price.s_per_byte / self.scale

    def _sleep(self, seconds: float) -> None:
        debt = getattr(_owed, "seconds", 0.0) + seconds
        if debt >= SHORTEST_S:
            slept = time.perf_counter()
            time.sleep(debt)
            debt -= time.perf_counter() - slept
        _owed.seconds = debt

    def measure(self, opened: Open) -> list[dict[str, Calls]]:
        """Count the calls of a typical iteration: of a model, and of a smaller one."""
        found = []
        for share in (1.0, SMALLER):
            each = []
            with opened(share) as iterate:
                for i in range(BEFORE + COUNTED):
                    with self.measured() as calls:
                        iterate(-i)
                    each.append(calls)
            found.append(typical(each[BEFORE:]))
        return found

    @contextlib.contextmanager
    def measured(self) -> Iterator[dict[str, Calls]]:
        """Measure calls by function in the body, without slowing them."""
        self._measured = {}
        _native.pace_codecs(1.0, None, None)
        before = _native.codec_work()
        try:
            yield self._measured
            for name, old, new in zip(NATIVE_WORK, before, _native.codec_work(), strict=True):
                count, elements, ns = (b - a for a, b in zip(old, new, strict=True))
                if count:
                    self._measured[name] = Calls(ns / 1e9, count, ITEMSIZE * elements)
        finally:
            self._measured = None
            self._slow_lanes()


def typical(found: Sequence[Measured]) -> dict[str, Calls]:
    """Return the calls of each function whose seconds for each byte are the median.

    >>> typical([{"pack": Calls(seconds, 1, 100)} for seconds in (3.0, 1.0, 9.0)])
    {'pack': Calls(seconds=3.0, units=1, nbytes=100)}
    """
    made = {}
    for name in dict.fromkeys(name for each in found for name in each):
        own = sorted((each[name] for each in found if name in each), key=lambda calls: calls.rate)
        made[name] = own[len(own) // 2]
    return made


def prices(here: Measured, smaller: Measured) -> dict[str, Price]:
    """Return the prices of each function from calls on a model and on a smaller one.

    The fixed part is limited to 0 to the time of a call. A function without calls on the smaller
    model has none, nor has one whose calls there are as large.
    """
    found = {}
    for name, large in here.items():
        small = smaller.get(name, Calls())
        # Of two lines: seconds = units * fixed_s + nbytes * s_per_byte.
        apart = large.units * small.nbytes - small.units * large.nbytes
        fixed_s = 0.0
        if apart:
            fixed_s = (large.seconds * small.nbytes - small.seconds * large.nbytes) / apart
        fixed_s = min(large.seconds / large.units, max(0.0, fixed_s))
        rest = max(0.0, large.seconds - large.units * fixed_s)
        found[name] = Price(fixed_s, rest / max(1, large.nbytes))
    return found
