"""Measurements of exchanges: encoding and exchange of buckets and matrices, and plain links.

Figures are those of the slowest worker, and equal on all workers. No property of a cluster is
assumed, neither its size nor its rates (OMGS-SGD, sections II-E, II-F and V-B).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wingbeat import topologies
from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region, regions
from wingbeat.codecs.lowrank import Factors, Matrix
from wingbeat.collectives import Collectives, Encoded, Handle, WireFormat, wire_dtype
from wingbeat.compression import (
    Coded,
    for_parameter,
    options_of,
)
from wingbeat.errors import PeerError, UsageError, unknown
from wingbeat.planning.costs import Fit, best_fit, fit_linear
from wingbeat.planning.files import digest
from wingbeat.planning.probe import COLLECTIVES, LinkFit, MatrixCost
from wingbeat.transport.link import Link
from wingbeat.transport.world import World
from wingbeat.types import Span, TensorSpec

MIN_SIZE = 1024
"""Elements, or bytes, of the smallest measured exchange, as in the paper (V-B)."""

MAX_ELEMENTS = 1 << 24
"""Elements of the largest exchange; curves are extrapolated beyond, which saves memory."""

REPEATS = 5
BUDGET_S = 0.125
"""Seconds of an exchange after which no larger one is measured. A larger one takes up to
`GROWTH` times as long, and is repeated seven times, so a measurement ends within five seconds."""

GROWTH = 4.0
"""Ratio of neighbouring amounts."""

SECOND_PHASE = "all-gather"
"""The second phase of an all-reduce whose first is ``"reduce-scatter"``."""

MAX_MATRICES = 8
"""Shapes of matrices that are measured, the largest of a model."""

_MAX_REPEATS_FACTOR, _SHARE = 4, 0.4
_MIN_AMOUNTS = 2
"""Minimum number of amounts for a line, however long they take."""

_LONGEST_S = 1e6
_AFTER_WARMUP = 1 << 40
"""A step after every warm-up."""

_FLAG_BYTES = 4
"""Bytes of the float32 flag that each parameter sends in addition to its encoded gradient."""

Points = tuple[tuple[float, float], ...]
"""Amounts, in elements or bytes, and the seconds of each."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An exchange that can be repeated; one worker contributes ``nbytes``.

    ``start`` encodes and launches. ``prepare`` is called before each repetition and not measured.
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
        cpu: the same bytes, and seconds of CPU time of all threads meanwhile.
    """

    encode: Points
    exchange: Points
    cpu: Points = ()


def geometric(first: int, last: int, factor: float = GROWTH) -> list[int]:
    """Return amounts that grow geometrically, up to ``last``.

    >>> geometric(1000, 20_000)
    [1000, 4000, 16000, 20000]
    """
    amounts = [min(first, last)]
    while amounts[-1] < last:
        amounts.append(min(last, max(amounts[-1] + 1, round(amounts[-1] * factor))))
    return amounts


def measure_exchange(
    collectives: Collectives,
    make_operation: Callable[[int], Operation],
    amounts: Sequence[int],
    repeats: int = REPEATS,
    *,
    budget_s: float = BUDGET_S,
    device: torch.device | None = None,
    whole: World | None = None,
    now: Callable[[], float] = time.perf_counter,
    used: Callable[[], float] = time.process_time,
) -> Samples:
    """Measure exchanges of growing amounts; all workers call this together.

    Every repetition begins with a barrier. The first two of each amount determine the number of
    amounts and repetitions; then amounts take turns, so that a disturbance affects all of them. No
    amount follows one that took longer than ``budget_s``. Each figure is the median of a worker,
    then that of the slowest. The time for which a worker waits for slower encoders is not part of
    the exchange, which is the slowest worker's total time less the slowest encoding.
    """
    world = whole if whole is not None else collectives.world
    barrier, tiny = (
        Collectives(collectives.world, "doubling"),
        torch.zeros(collectives.world.size, device="cpu"),
    )

    def synchronize() -> None:
        if device is not None and device.type != "cpu":  # not for wingbeat's own streams
            torch.accelerator.current_stream(device).synchronize()

    def repeat(operation: Operation) -> tuple[float, float, float]:
        """Return seconds of the starting call, of the whole, and of CPU time between the two."""
        operation.prepare()
        synchronize()
        barrier.all_gather(tiny).wait()
        begin = now()
        handle = operation.start()
        synchronize()
        called, busy = now(), used()
        handle.wait()
        synchronize()
        return called - begin, now() - begin, used() - busy

    operations: list[Operation] = []
    counts: list[int] = []
    for amount in amounts:
        operations.append(make_operation(amount))
        mine = min(repeat(operations[-1])[1] for _ in range(2))
        [(_, slowest, _)] = _slowest(world, [(0.0, mine, 0.0)])
        # Short exchanges are disturbed most, and are cheapest to repeat.
        most = _MAX_REPEATS_FACTOR * repeats
        enough = int(_SHARE * budget_s / slowest) if slowest > 0 else most
        counts.append(max(repeats, min(most, enough)))
        if slowest > budget_s and len(counts) >= _MIN_AMOUNTS:
            break
    taken: list[list[tuple[float, float, float]]] = [[] for _ in operations]
    for turn in range(max(counts, default=0)):
        for operation, count, times in zip(operations, counts, taken, strict=True):
            if turn < count:
                times.append(repeat(operation))
    medians = [[statistics.median(column) for column in zip(*row, strict=True)] for row in taken]
    encode, exchange, cpu = [], [], []
    for amount, operation, (call, total, busy) in zip(
        amounts, operations, _slowest(world, medians), strict=False
    ):
        encode.append((float(amount), call))
        exchange.append((float(operation.nbytes), total - call))
        cpu.append((float(operation.nbytes), busy))
    return Samples(tuple(encode), tuple(exchange), tuple(cpu))


def _slowest(world: World, own: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """Exchange measurements, and return the maxima of all workers."""

    def valid(row: Any) -> bool:
        if not isinstance(row, list) or not all(isinstance(each, list) for each in row):
            return False
        if any([type(v) in (int, float) for v in each] != [True] * 3 for each in row):
            return False
        return len(row) == len(own) and all(
            0 <= call <= total <= _LONGEST_S and 0 <= busy <= _LONGEST_S
            for call, total, busy in row
        )

    rows = world.exchange("probe", [list(each) for each in own])
    for peer, row in enumerate(rows):
        if not valid(row):
            raise PeerError(
                f"{world.me}: {world.name(peer)} sent a malformed measurement of an exchange: "
                f"{str(row)[:60]}; all workers have to run the same wingbeat"
            )
    columns = (zip(*each, strict=True) for each in zip(*rows, strict=True))
    return [(float(max(a)), float(max(b)), float(max(c))) for a, b, c in columns]


# -- buckets -------------------------------------------------------------------------------------


def measure_wire(
    collectives: Collectives,
    wire: str | Coded,
    collective: str,
    largest: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    repeats: int = REPEATS,
) -> Samples:
    """Measure the exchange of a bucket as training does it, from 1 K elements on.

    An unknown collective, or ``"payload all-gather"`` without a codec, is a `UsageError`.
    """
    if collective not in (*COLLECTIVES, SECOND_PHASE):
        raise unknown("collective", collective, (*COLLECTIVES, SECOND_PHASE))
    if collective == "payload all-gather" and not options_of(wire).encodes:
        raise UsageError(
            f"collective={collective!r} with wire={wire!r}: only payloads of a codec can be "
            "gathered; use collective='all-reduce', or a wire such as topk"
        )
    size = collectives.world.size
    # The length of a bucket is a multiple of the number of workers.
    largest = min(max(1, largest), MAX_ELEMENTS)
    amounts = [-(-amount // size) * size for amount in geometric(MIN_SIZE, largest)]
    buffers = _Buffers(amounts[-1], device if device is not None else torch.device("cpu"), dtype)

    def operation(numel: int) -> Operation:
        start, nbytes = _bucket_operation(collectives, wire, collective, buffers, numel)
        return Operation(start, nbytes, lambda: buffers.fill(numel))

    return measure_exchange(collectives, operation, amounts, repeats, device=buffers.buffer.device)


class _Buffers:
    """Buffers that all exchanges share, as each ends before the next begins."""

    def __init__(self, numel: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)  # leaves the global random state unchanged
        self.gradients = torch.randn(numel, generator=generator, device="cpu").to(device, dtype)
        self.buffer = torch.empty_like(self.gradients)
        self._state: dict[str, torch.Tensor] = {}

    def fill(self, numel: int) -> None:
        self.buffer[:numel].copy_(self.gradients[:numel])

    def float32(self, name: str, numel: int) -> torch.Tensor:
        """Return optimizer or codec state of a bucket: zeros at first."""
        if name not in self._state:
            self._state[name] = torch.zeros(self.buffer.numel(), device=self.buffer.device)
        return self._state[name][:numel]


def _bucket_operation(
    collectives: Collectives, wire: str | Coded, collective: str, buffers: _Buffers, numel: int
) -> tuple[Callable[[], Handle], float]:
    buffer, size = buffers.buffer[:numel], collectives.world.size
    options = options_of(wire)
    if not options.encodes:
        narrow = wire_dtype(options.dtype)
        itemsize = buffer.element_size()
        if narrow is not None:
            itemsize = min(itemsize, narrow.itemsize)
        return _reduction(collectives, collective, buffer, narrow), numel * itemsize
    if options.summed and collective != "payload all-gather":
        # One matrix, as square as possible; the rest is dense.
        rows, cols = options.matrix_of((math.isqrt(numel),) * 2)
        if not rows:
            return _reduction(collectives, "all-reduce", buffer, None), buffer.nbytes
        residual = buffers.float32("residual", numel) if options.feedback else None
        matrix = Matrix("probed", 0, rows, cols, options.rank)
        factors = Factors([matrix], numel, size, residual, device=buffer.device)
        collectives.open_second()
        return lambda: collectives.all_reduce_factors(buffer, factors), factors.nbytes
    codec = make(options, _AFTER_WARMUP)
    coding = Coding([Region(Span(0, numel), codec)])
    encoded = Encoded(coding, buffers.float32("residual", numel) if codec.feedback else None)
    nbytes = coding.room(Span(0, numel))
    if collective != "payload all-gather":
        return _reduction(collectives, collective, buffer, encoded), nbytes
    velocity = None
    if options.momentum:
        velocity = buffers.float32("velocity", numel)
    return lambda: collectives.all_gather_sum(
        buffer, wire=encoded, velocity=velocity, beside=True
    ), nbytes


def _reduction(
    collectives: Collectives, collective: str, buffer: torch.Tensor, wire: WireFormat | None
) -> Callable[[], Handle]:
    """Return a function that starts an all-reduce of a buffer, or one of its phases."""
    if collective == SECOND_PHASE:
        return lambda: collectives.all_gather(buffer, wire=wire)
    whole = collective == "all-reduce"
    start = collectives.all_reduce if whole else collectives.reduce_scatter
    return lambda: start(buffer, wire=wire)


def fit_samples(samples: Samples, wire: str | Coded) -> tuple[Fit, Fit]:
    """Return the fits of encoding and exchange; encoding top-k may follow Eq. 10."""
    density = options_of(wire).fixed_density
    return best_fit(samples.encode, density=density), best_fit(samples.exchange)


# -- matrices ------------------------------------------------------------------------------------


def matrix_region(spec: TensorSpec, wire: Coded) -> Region | None:
    """Return how a tensor is encoded alone; None unless it is a matrix with factors."""
    found = regions(wire, [(spec.name, spec.shape)])
    return next((region for region in found if region.cols), None)


def payload_of(spec: TensorSpec, wire: Coded) -> float:
    """Return the payload bytes of a tensor that travels alone."""
    coding = Coding(list(regions(wire, [(spec.name, spec.shape)])))
    return float(coding.room(Span(0, spec.numel))) if spec.numel else 0.0


def measure_matrices(
    collectives: Collectives,
    wire: str | Coded,
    collective: str,
    specs: Sequence[TensorSpec],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[MatrixCost, ...]:
    """Exchange a matrix of each of the model's largest shapes; all workers call this together.

    Only `LowRank` with sketched factors has matrices; `measure_wire` measures summed factors, with
    the same arguments.
    """
    options = options_of(wire)
    if not options.rank or options.summed:
        return ()
    found = {spec.shape: matrix_region(spec, options) for spec in specs}
    known = [(shape, region) for shape, region in found.items() if region is not None]
    known = [each for each in known if len(each[1].span) <= MAX_ELEMENTS]
    # The largest, in rising order, so that none follows one that takes too long.
    largest = sorted(known, key=lambda each: (len(each[1].span), each[0]))[-MAX_MATRICES:]
    if not largest:
        return ()
    size = collectives.world.size

    def padded(region: Region) -> int:
        return -(-len(region.span) // size) * size

    buffers = _Buffers(padded(largest[-1][1]), device, dtype)

    def operation(number: int) -> Operation:
        region = largest[number][1]
        numel, coding = padded(region), Coding([region])
        residual = buffers.float32("residual", numel) if region.codec.feedback else None
        start = _reduction(
            collectives, collective, buffers.buffer[:numel], Encoded(coding, residual)
        )
        return Operation(start, coding.room(region.span), lambda: buffers.fill(numel))

    samples = measure_exchange(collectives, operation, range(len(largest)), device=device)
    # The starting call is not work of the thread that runs backward.
    return tuple(
        MatrixCost(shape[0], shape[1], nbytes, call + seconds)
        for (shape, _), (_, call), (nbytes, seconds) in zip(
            largest, samples.encode, samples.exchange, strict=False
        )
    )


# -- links ---------------------------------------------------------------------------------------


def measure_links(
    collectives: Collectives,
    *,
    topology: str = "ring",
    largest_bytes: int = 1 << 20,
    repeats: int = REPEATS,
    budget_s: float = BUDGET_S,
) -> tuple[LinkFit, ...]:
    """Measure plain collectives on each network interface alone, then on all together (II-F).

    All-gathers take the topology of small payloads (`topologies.in_few_rounds`). All-reduces
    use ``topology``, or a ring where the topology spans several interfaces (a BCube) and one is
    measured. Tensors are on the CPU. No other exchange may be in progress. Other arguments are
    those of `measure_exchange`.
    """
    whole = collectives.world

    def measure(name: str, world: World) -> LinkFit:
        alone = topologies.get(topology).spans_links and world is not whole
        gathering = Collectives(world).in_few_rounds()
        reducing = Collectives(world, "ring" if alone else topology)

        def gather(nbytes: int) -> Operation:
            rows = torch.zeros(world.size * nbytes, dtype=torch.uint8, device="cpu")
            return Operation(lambda: gathering.all_gather(rows), nbytes)

        def reduce(nbytes: int) -> Operation:
            buffer = torch.zeros(-(-nbytes // 4), dtype=torch.float32, device="cpu")
            return Operation(lambda: reducing.all_reduce(buffer), 4 * buffer.numel())

        fits = []
        for over, operation in ((gathering, gather), (reducing, reduce)):
            samples = measure_exchange(
                over, operation, geometric(MIN_SIZE, largest_bytes), repeats,
                budget_s=budget_s, whole=whole,
            )  # fmt: skip
            # Nothing is encoded, so the starting call is a part of the exchange.
            pairs = zip(samples.encode, samples.exchange, strict=True)
            fits.append(fit_linear([(nbytes, call + s) for (_, call), (nbytes, s) in pairs]))
        return LinkFit(name, *fits)

    found = []
    for link in whole.links:
        with _world_of_link(whole, link) as world:
            found.append(measure(link.name, world))
    if len(whole.links) > 1:
        found.append(measure(" + ".join(link.name for link in whole.links), whole))
    return tuple(found)


@contextlib.contextmanager
def _world_of_link(whole: World, link: Link) -> Iterator[World]:
    """Return a world of one link. Its thread ends with the context; the link stays open.

    Tags start again from 0. Between two workers messages of the same tag match in order, and all
    messages of one world arrive before the other uses the link. After a peer was lost the executor
    closes the link, so that the others detect it.
    """
    world = World(
        rank=whole.rank,
        size=whole.size,
        links=(link,),
        speeds=(whole.speeds[whole.links.index(link)],),
        timeout=whole.timeout,
        store=whole.store,
        layout=whole.layout,
        nccl_devices=frozenset(),
        channel=whole.channel,
    )
    try:
        yield world
    finally:
        world.links = ()  # they are those of `whole`
        world.close()


# -- keys ----------------------------------------------------------------------------------------


def wire_text(wire: str | Coded) -> str:
    """Return the text for a wire in files and messages: ``fp32`` is the gradients' own dtype.

    The density is always included, even if it is the default; a warm-up never is, because
    measurements apply after it.

    >>> from wingbeat import TopK
    >>> wire_text("bfloat16"), wire_text(TopK(density=0.01, warmup=9, momentum=0.9))
    ('bf16', 'TopK(density=0.01, momentum=0.9)')
    """
    return options_of(wire).key_text


def payload_bytes(
    specs: Sequence[TensorSpec], wire: str | Coded, dense: Collection[str] = ()
) -> list[float]:
    """Return the approximate bytes that each tensor adds to a bucket's payload, with its flag.

    The density of a group counts; the minimum of one value of top-k does not. Tensors whose names
    are in ``dense`` are not encoded.
    """
    each, encodes = [], options_of(wire).encodes
    for spec in specs:
        mine = options_of("" if spec.name in dense else for_parameter(wire, spec.name))
        flag = _FLAG_BYTES if encodes else mine.least_bytes((1,), spec.itemsize)
        # Small matrices have no factors.
        if mine.rank and not mine.summed:
            each.append(payload_of(spec, mine) + flag)
        else:
            each.append(float(mine.least_bytes(spec.shape, spec.itemsize) + flag))
    return each


def key_of(
    specs: Sequence[TensorSpec],
    workers: int,
    links: Sequence[str],
    wire: str | Coded,
    collective: str,
    dense: Collection[str] = (),
) -> dict[str, Any]:
    """Return the key of a model on a cluster, as JSON values.

    Parameters named in ``dense`` are not encoded.
    """
    shapes = [
        [spec.name, list(spec.shape), spec.dtype, spec.device.partition(":")[0], spec.name in dense]
        for spec in specs
    ]
    return {
        "parameters": digest(shapes),
        "workers": workers,
        "links": list(links),
        "wire": wire_text(wire),
        "collective": collective,
    }
