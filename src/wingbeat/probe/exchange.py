"""What an exchange takes between these workers, and the encoding before it, by its size.

Figures are those of the slowest worker, and all workers hold the same ones. Nothing is known
beforehand of a cluster: neither its size nor its rates (OMGS-SGD, sections II-E, II-F and V-B).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.codecs.lowrank import Factors, Matrix
from wingbeat.collectives import Collectives, Encoded, Handle, WireFormat, wire_dtype
from wingbeat.compression import Coded, LowRank, TopK, matrix_of
from wingbeat.errors import PeerError, UsageError, unknown
from wingbeat.transport.world import World
from wingbeat.types import Span

FIRST = 1024
"""Elements, or bytes, of the smallest exchange that is measured, as in the paper (V-B)."""

LARGEST = 1 << 24
"""Elements of the largest: beyond it curves go on straight, and memory is the model's own."""

REPEATS = 5
BUDGET_S = 0.5
WAYS = ("gather", "reduce", "scatter")
SPREAD = "spread"
"""The other half of ``"scatter"``, which the schedule hides somewhere else."""

_MORE, _SHARE = 4, 0.2
_LEAST = 2
"""Amounts that a line needs, however long they take."""

_LONGEST_S = 1e6
_SETTLED = 1 << 40
"""A step by which every warm-up is over."""

Points = tuple[tuple[float, float], ...]
"""Amounts, in elements or bytes, and the seconds each took."""


@dataclass(frozen=True, slots=True)
class Action:
    """One exchange that can be repeated.

    Attributes:
        start: encodes, launches and returns the handle.
        nbytes: what one worker adds to the exchange, in bytes.
        prepare: called before each repetition; does not count.
    """

    start: Callable[[], Handle]
    nbytes: float
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Samples:
    """Medians of the slowest worker.

    Attributes:
        encode: elements, and seconds until the call that starts the exchange returns.
        exchange: bytes of one worker's payload, and seconds from then until all is decoded.
        cpu: the same bytes, and seconds of processors that the process uses meanwhile, in all of
            its threads.
    """

    encode: Points
    exchange: Points
    cpu: Points = ()


def growing(first: int, last: int, factor: float = 2.0) -> list[int]:
    """Return amounts that grow geometrically, with ``last`` at the end.

    >>> growing(1000, 5000)
    [1000, 2000, 4000, 5000]
    """
    amounts = [min(first, last)]
    while amounts[-1] < last:
        amounts.append(min(last, max(amounts[-1] + 1, round(amounts[-1] * factor))))
    return amounts


def measure_exchange(
    collectives: Collectives,
    make_action: Callable[[int], Action],
    amounts: Sequence[int],
    repeats: int = REPEATS,
    *,
    budget_s: float = BUDGET_S,
    device: torch.device | None = None,
    whole: World | None = None,
    now: Callable[[], float] = time.perf_counter,
    used: Callable[[], float] = time.process_time,
) -> Samples:
    """Measure exchanges of growing amounts; all workers call it alike, and at the same time.

    Every repetition begins with a barrier. The first two of each amount tell how far to go and
    how often; then amounts take turns, so that a disturbance is none of one amount alone. Each
    figure is the median of a worker, then that of the slowest. A worker that has encoded sooner
    than another waits for it: that is no part of the exchange, which is the slowest worker's
    whole time less the slowest encoding.

    Args:
        collectives: what the exchange uses.
        make_action: makes the exchange of so many elements.
        amounts: elements, growing; the same on every worker.
        repeats: repetitions that count, at least; up to four times as many where a fifth of the
            budget is enough for them.
        budget_s: after the first two, no amount follows one that took longer than this, by the
            exchanged figures, so that all workers stop alike.
        device: where the tensors are; on a GPU the current stream is waited for.
        whole: where figures are exchanged; default: the collectives' world.
        now: a clock, in seconds.
        used: seconds that this process has used of processors.

    Raises:
        PeerError: a peer failed, or sent something that is no measurement; names it.
    """
    world = whole if whole is not None else collectives.world
    meter = _Meter(collectives.world, _settler(device), now, used)
    actions: list[Action] = []
    counts: list[int] = []
    for amount in amounts:
        actions.append(make_action(amount))
        mine = min(meter.repeat(actions[-1])[1] for _ in range(2))
        told = world.exchange("probe", [[0.0, mine, 0.0]])
        [(_, slowest, _)] = _slowest(told, 1, world.rank)
        # What is short is disturbed most, and costs least to repeat.
        enough = int(_SHARE * budget_s / slowest) if slowest > 0 else _MORE * repeats
        counts.append(max(repeats, min(_MORE * repeats, enough)))
        if slowest > budget_s and len(counts) >= _LEAST:
            break
    taken: list[list[tuple[float, float, float]]] = [[] for _ in actions]
    for turn in range(max(counts, default=0)):
        for action, count, times in zip(actions, counts, taken, strict=True):
            if turn < count:
                times.append(meter.repeat(action))
    medians = [[statistics.median(column) for column in zip(*row, strict=True)] for row in taken]
    slowest_of_all = _slowest(world.exchange("probe", medians), len(actions), world.rank)
    encode, exchange, cpu = [], [], []
    for amount, action, figures in zip(amounts, actions, slowest_of_all, strict=False):
        call, slowest, busy = figures
        encode.append((float(amount), call))
        exchange.append((float(action.nbytes), slowest - call))
        cpu.append((float(action.nbytes), busy))
    return Samples(tuple(encode), tuple(exchange), tuple(cpu))


class _Meter:
    """Times one repetition of an action after the other."""

    def __init__(
        self,
        world: World,
        settle: Callable[[], object],
        now: Callable[[], float],
        used: Callable[[], float],
    ) -> None:
        self._barrier = Collectives(world, "doubling")
        self._tiny = torch.zeros(world.size)
        self._settle, self._now, self._used = settle, now, used

    def repeat(self, action: Action) -> tuple[float, float, float]:
        """Return seconds of the call that starts it, of all until it is done, and of processors.

        The last are those between the two.
        """
        action.prepare()
        self._settle()
        self._barrier.all_gather(self._tiny).wait()
        begin = self._now()
        handle = action.start()
        self._settle()
        called, busy = self._now(), self._used()
        handle.wait()
        self._settle()
        return called - begin, self._now() - begin, self._used() - busy


def measure_wire(
    collectives: Collectives,
    wire: str | Coded,
    way: str,
    largest: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    repeats: int = REPEATS,
    budget_s: float = BUDGET_S,
    now: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Measure a bucket's exchange as training does it, from 1 K elements on.

    Args:
        collectives: what training uses.
        wire: a dtype's name as in `Choices.wire`, empty for the buffer's own, or a codec's
            settings. Residuals and momentum are kept as in training, after any warm-up.
        way: ``"gather"`` for `Collectives.all_gather_sum`, which needs a codec, ``"reduce"`` for
            `Collectives.all_reduce`, which encodes while it is under way, ``"scatter"`` for its
            first half, `Collectives.reduce_scatter`, if the other is hidden somewhere else, and
            ``"spread"`` for that other one, `Collectives.all_gather`.
        largest: elements of the largest bucket that can come; the last amount, if it is no more
            than ``LARGEST``.
        device: where the gradients are; default: the CPU.
        dtype: what the gradients are.
        repeats: as for `measure_exchange`.
        budget_s: as for `measure_exchange`.
        now: a clock, in seconds.

    Raises:
        UsageError: no such way, or ``"gather"`` without a codec.
        PeerError: as for `measure_exchange`.
    """
    if way not in (*WAYS, SPREAD):
        raise unknown("way", way, (*WAYS, SPREAD))
    if way == "gather" and isinstance(wire, str):
        raise UsageError(
            f"way='gather' with wire={wire!r}: only a codec's payloads can be gathered; "
            "use way='reduce', or a wire such as topk"
        )
    where = device if device is not None else torch.device("cpu")
    size = collectives.world.size
    # A bucket is a multiple of the number of workers long, too.
    largest = min(max(1, largest), LARGEST)
    amounts = [-(-amount // size) * size for amount in growing(FIRST, largest)]
    generator = torch.Generator().manual_seed(0)  # the user's random state is left alone
    gradients = torch.randn(amounts[-1], generator=generator).to(where, dtype)
    room = _Room(gradients, torch.empty_like(gradients))

    def action(numel: int) -> Action:
        return _wire_action(collectives, wire, way, room.cut(numel))

    return measure_exchange(
        collectives, action, amounts, repeats, budget_s=budget_s, device=where, now=now
    )


@dataclass(slots=True)
class _Room:
    """Buffers that exchanges of all amounts share, as each is over before the next begins."""

    gradients: torch.Tensor
    buffer: torch.Tensor
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def cut(self, numel: int) -> _Room:
        """Return the first elements of everything."""
        return _Room(self.gradients[:numel], self.buffer[:numel], self.kept)

    def float32(self, what: str) -> torch.Tensor:
        """Return what is kept of such a bucket beside its gradients: as long, zeros at first."""
        known = self.kept.get(what)
        if known is None or known.numel() < self.buffer.numel():
            known = torch.zeros(self.buffer.numel(), device=self.buffer.device)
            self.kept[what] = known
        return known[: self.buffer.numel()]


def _wire_action(collectives: Collectives, wire: str | Coded, way: str, room: _Room) -> Action:
    """A bucket of one region, with gradients of a bell curve."""
    buffer = room.buffer
    numel = buffer.numel()

    def prepare() -> None:
        buffer.copy_(room.gradients)

    if isinstance(wire, str):
        narrow = wire_dtype(wire)
        itemsize = buffer.element_size()
        if narrow is not None:
            itemsize = min(itemsize, narrow.itemsize)
        return Action(reducing(collectives, way, buffer, narrow), numel * itemsize, prepare)
    if wire.summed and way != "gather":
        return _factored_action(collectives, wire, room, prepare)
    codec = make(wire, _SETTLED)
    coding = Coding([Region(Span(0, numel), codec)])
    encoded = Encoded(coding, room.float32("residual") if codec.feedback else None)
    nbytes = coding.room(Span(0, numel))
    if way != "gather":
        return Action(reducing(collectives, way, buffer, encoded), nbytes, prepare)
    velocity = None
    if isinstance(wire, TopK) and wire.momentum:
        velocity = room.float32("velocity")

    def gather() -> Handle:
        return collectives.all_gather_sum(buffer, wire=encoded, velocity=velocity, beside=True)

    return Action(gather, nbytes, prepare)


def _factored_action(
    collectives: Collectives, wire: Coded, room: _Room, prepare: Callable[[], object]
) -> Action:
    """A bucket of one matrix, as square as it can be: what is left over of it is dense."""
    numel, size = room.buffer.numel(), collectives.world.size
    rows, cols = matrix_of(wire, (math.isqrt(numel),) * 2)
    if not rows or not isinstance(wire, LowRank):
        return Action(
            reducing(collectives, "reduce", room.buffer, None), room.buffer.nbytes, prepare
        )
    residual = room.float32("residual") if wire.feedback else None
    matrix = Matrix("probed", 0, rows, cols, wire.rank)
    factors = Factors([matrix], numel, size, residual, device=room.buffer.device)
    collectives.open_second()

    def start() -> Handle:
        return collectives.all_reduce_factors(room.buffer, factors)

    return Action(start, factors.nbytes, prepare)


def reducing(
    collectives: Collectives, way: str, buffer: torch.Tensor, wire: WireFormat | None
) -> Callable[[], Handle]:
    """Return what starts an all-reduce of a buffer, or one of its halves, by the way's name."""
    if way == SPREAD:
        return lambda: collectives.all_gather(buffer, wire=wire)
    start = collectives.all_reduce if way == "reduce" else collectives.reduce_scatter
    return lambda: start(buffer, wire=wire)


def _settler(device: torch.device | None) -> Callable[[], object]:
    """Return what waits for a GPU's current stream, and not for the library's, which exchanges."""
    if device is None or device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()


def _slowest(rows: Sequence[Any], count: int, rank: int) -> list[tuple[float, float, float]]:
    """Return the largest of each figure.

    Raises:
        PeerError: a row is not ``count`` times three times, the second of which contains the first.
    """
    for peer, row in enumerate(rows):
        right = isinstance(row, list) and len(row) == count and all(map(_right, row))
        if not right:
            raise PeerError(
                f"rank {rank}: rank {peer} sent a malformed measurement of an exchange: "
                f"{str(row)[:60]}; all workers have to run the same wingbeat"
            )
    columns = (zip(*each, strict=True) for each in zip(*rows, strict=True))
    return [(float(max(a)), float(max(b)), float(max(c))) for a, b, c in columns]


def _right(figures: Any) -> bool:
    if not isinstance(figures, list) or [type(v) in (int, float) for v in figures] != [True] * 3:
        return False
    call, whole, busy = figures
    return bool(0 <= call <= whole <= _LONGEST_S and 0 <= busy <= _LONGEST_S)
