"""What an exchange takes between these workers, and the encoding before it, by its size.

Figures are those of the slowest worker, and all workers hold the same ones. Nothing is known
beforehand of a cluster: neither its size nor its rates (OMGS-SGD, sections II-E, II-F and V-B).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded, Handle, Wire, wire_dtype
from wingbeat.errors import PeerError, UsageError, unknown
from wingbeat.transport.world import World
from wingbeat.types import Span
from wingbeat.wires import Coded, TopK

FIRST = 1024
"""Elements, or bytes, of the smallest exchange that is measured, as in the paper (V-B)."""

REPEATS = 5
BUDGET_S = 0.2
WAYS = ("gather", "reduce")

_MORE = 4
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
    """

    encode: Points
    exchange: Points


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
) -> Samples:
    """Measure exchanges of growing amounts; all workers call it alike, and at the same time.

    Every repetition begins with a barrier; one more comes first and does not count. Each figure
    is the median of a worker, then that of the slowest. A worker that has encoded sooner than
    another waits for it: that is no part of the exchange, which is the slowest worker's whole
    time less the slowest encoding.

    Args:
        collectives: what the exchange uses.
        make_action: makes the exchange of so many elements.
        amounts: elements, growing; the same on every worker.
        repeats: repetitions that count, at least; up to four times as many where the budget is
            enough for them.
        budget_s: after the first two, no amount follows one that took longer than this, by the
            exchanged figures, so that all workers stop alike.
        device: where the tensors are; on a GPU the current stream is waited for.
        whole: where figures are exchanged; default: the collectives' world.
        now: a clock, in seconds.

    Raises:
        PeerError: a peer failed, or sent something that is no measurement; names it.
    """
    world = whole if whole is not None else collectives.world
    settle = _settler(device)
    encode, exchange = [], []
    count = _MORE * repeats
    for amount in amounts:
        action = make_action(amount)
        mine = _repeat(collectives.world, action, count, settle, now)
        slowest_call, slowest = _slowest(world.exchange("probe", mine), world.rank)
        encode.append((float(amount), slowest_call))
        exchange.append((float(action.nbytes), slowest - slowest_call))
        if slowest > budget_s and len(encode) >= _LEAST:
            break
        if slowest > 0:
            # What is short is disturbed most, and costs least to repeat.
            count = max(repeats, min(_MORE * repeats, int(budget_s / slowest)))
    return Samples(tuple(encode), tuple(exchange))


def _repeat(
    world: World,
    action: Action,
    repeats: int,
    settle: Callable[[], object],
    now: Callable[[], float],
) -> list[float]:
    """Return this worker's median seconds of the call, and of all from its begin to the end."""
    barrier = Collectives(world, "doubling")
    tiny = torch.zeros(world.size)
    calls, wholes = [], []
    for _ in range(1 + repeats):
        action.prepare()
        settle()
        barrier.all_gather(tiny).wait()
        begin = now()
        handle = action.start()
        settle()
        called = now()
        handle.wait()
        settle()
        calls.append(called - begin)
        wholes.append(now() - begin)
    # The first one met cold buffers and connections.
    return [statistics.median(calls[1:]), statistics.median(wholes[1:])]


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
            `Collectives.all_reduce`, which encodes while it is under way.
        largest: elements of the largest bucket that can come; the last amount.
        device: where the gradients are; default: the CPU.
        dtype: what the gradients are.
        repeats: as for `measure_exchange`.
        budget_s: as for `measure_exchange`.
        now: a clock, in seconds.

    Raises:
        UsageError: no such way, or ``"gather"`` without a codec.
        PeerError: as for `measure_exchange`.
    """
    if way not in WAYS:
        raise unknown("way", way, WAYS)
    if way == "gather" and isinstance(wire, str):
        raise UsageError(
            f"way='gather' with wire={wire!r}: only a codec's payloads can be gathered; "
            "use way='reduce', or a wire such as topk"
        )
    where = device if device is not None else torch.device("cpu")
    size = collectives.world.size

    def action(numel: int) -> Action:
        return _wire_action(collectives, wire, way, numel, where, dtype)

    # A bucket is a multiple of the number of workers long, too.
    amounts = [-(-amount // size) * size for amount in growing(FIRST, max(1, largest))]
    return measure_exchange(
        collectives, action, amounts, repeats, budget_s=budget_s, device=where, now=now
    )


def _wire_action(
    collectives: Collectives,
    wire: str | Coded,
    way: str,
    numel: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Action:
    """A bucket of one region with gradients of a bell curve; the user's random state is kept."""
    generator = torch.Generator().manual_seed(numel)
    gradients = torch.randn(numel, generator=generator).to(device, dtype)
    buffer = torch.empty_like(gradients)

    def prepare() -> None:
        buffer.copy_(gradients)

    if isinstance(wire, str):
        narrow = wire_dtype(wire)
        itemsize = min(dtype.itemsize, dtype.itemsize if narrow is None else narrow.itemsize)
        return Action(_reducing(collectives, buffer, narrow), numel * itemsize, prepare)
    codec = make(wire, _SETTLED)
    coding = Coding([Region(Span(0, numel), codec)])
    owed = torch.zeros(numel, device=device) if codec.feedback else None
    encoded = Encoded(coding, owed)
    nbytes = coding.room(Span(0, numel))
    if way == "reduce":
        return Action(_reducing(collectives, buffer, encoded), nbytes, prepare)
    velocity = None
    if isinstance(wire, TopK) and wire.momentum:
        velocity = torch.zeros(numel, device=device)

    def gather() -> Handle:
        return collectives.all_gather_sum(buffer, wire=encoded, velocity=velocity)

    return Action(gather, nbytes, prepare)


def _reducing(
    collectives: Collectives, buffer: torch.Tensor, wire: Wire | None
) -> Callable[[], Handle]:
    return lambda: collectives.all_reduce(buffer, wire=wire)


def _settler(device: torch.device | None) -> Callable[[], object]:
    """Return what waits for a GPU's current stream, and not for the library's, which exchanges."""
    if device is None or device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()


def _slowest(rows: Sequence[Any], rank: int) -> tuple[float, float]:
    """Return the largest of each figure.

    Raises:
        PeerError: a row is not two times of which the second contains the first.
    """
    for peer, row in enumerate(rows):
        right = isinstance(row, list) and [type(v) in (int, float) for v in row] == [True, True]
        if not right or not 0 <= row[0] <= row[1] <= _LONGEST_S:
            raise PeerError(
                f"rank {rank}: rank {peer} sent a malformed measurement of an exchange: "
                f"{str(row)[:60]}; all workers have to run the same wingbeat"
            )
    return float(max(row[0] for row in rows)), float(max(row[1] for row in rows))
