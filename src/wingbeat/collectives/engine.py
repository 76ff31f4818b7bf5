"""`Collectives` queues a collective and returns a handle; one executor thread per link runs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import cast

import torch

from wingbeat import topologies
from wingbeat.codecs.lowrank import Factors
from wingbeat.collectives import nccl, staging
from wingbeat.collectives.encoded import FactoredSum, Gathered, GatheredSum
from wingbeat.collectives.executor import decode_queue, factor_threads
from wingbeat.collectives.handle import Call, Handle, Job, NativeJob, NcclJob, wait_for_all
from wingbeat.collectives.native import NATIVE_DTYPES, NativeExecutor, executors_of
from wingbeat.collectives.packing import (
    Cast,
    Encoded,
    Packing,
    WireFormat,
    dtype_of,
    encoded_of,
    narrower_dtype,
)
from wingbeat.collectives.program import (
    DIRECT_BYTES,
    DIRECT_RANKS,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    NATIVE_CHUNK_BYTES,
    SMALL_GATHER_BYTES,
    compile_collective,
    least_message,
    small_sum,
    sums_in_one_round,
)
from wingbeat.collectives.threads import SerialQueue
from wingbeat.collectives.two_level import TwoLevel
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe import meter
from wingbeat.observe.events import stream
from wingbeat.observe.log import log
from wingbeat.topologies import Hierarchical, Mesh, Ring, Topology, in_few_rounds
from wingbeat.transport.host_group import open_host_group
from wingbeat.transport.world import World
from wingbeat.types import Span, blocks_of

Blocks = tuple[Span, ...] | None
"""The contiguous span of a buffer that each worker owns, in order; None: nearly equal spans."""


class Collectives:
    """Queues collectives in the order of the calls, which must be the same on every worker.

    Every collective works in place on a flat, contiguous tensor. Rank ``r`` owns ``owned(numel)``,
    the r-th of ``size`` nearly equal blocks, unless ``blocks`` has one span per rank: contiguous,
    in order, possibly empty. With several links, each block is divided in proportion to the links'
    measured speeds. Tensors of an accelerator travel in NCCL, where their length must be a multiple
    of ``size``, or through pinned memory of the host (`wingbeat.collectives.staging`).

    If ``wire`` is a dtype (bfloat16 or float16), elements are sent in that dtype. Each chunk is
    rounded when it is sent, and sums are computed in the buffer's dtype (NCCL uses the narrower
    dtype). Values that are too large become infinite; NaN stays NaN. Buffers that are not wider, or
    that do not hold floating point numbers, are sent unchanged.

    If ``wire`` is `Encoded`, each chunk is encoded separately and sent to the block's owner, which
    decodes and adds it, encodes the sum once and sends that to all workers. The number of bytes
    does not grow with the number of workers, and every value is rounded twice.

    ``wire``, ``blocks`` and the topology must be equal on all workers.
    """

    def __init__(self, world: World, topology: str | Topology = "ring") -> None:
        """Raise a `UsageError` if the topology does not fit the workers, interfaces or networks."""
        self._turns = SerialQueue(factor_threads)
        self._second: Collectives | None = None
        self._staged: dict[Topology, Collectives] = {}  # those on the host, by topology
        self._two_level: TwoLevel | None = None
        self._requested = topology
        self.move(world)

    def move(self, world: World) -> None:
        """Run the following collectives in ``world``, another group of workers."""
        self.world = world
        self._topology = _fit_topology(self._requested, world)
        self._executors = executors_of(world)
        self._native = all(isinstance(each, NativeExecutor) for each in self._executors)
        self._is_direct = self._can_be_direct()

    def in_few_rounds(self) -> Collectives:
        """Return collectives on the same links along the topology of small payloads."""
        return Collectives(self.world, in_few_rounds(self._topology))

    def sum_inside_hosts(self, device: torch.device) -> None:
        """Have the device's process group of torch sum tensors inside each host, where it can.

        Every worker must call it. Without effect on the CPU, where NCCL carries all tensors, and
        unless several hosts have several workers each. A `RendezvousError` as in `World.exchange`.
        """
        world, layout = self.world, self.world.layout
        used = self._topology
        staged = device.type not in ("cpu", *world.nccl_devices)
        apart = world.threads or world.returned or world.members or world.torch_job is not None
        if not staged or apart or world.group is not None or not isinstance(used, Hierarchical):
            return
        group = open_host_group(world, device)
        if group is None:
            return
        self._two_level = TwoLevel(world, group, device, used, Collectives)
        if world.leads:
            log.info(
                "tensors on %s are summed inside each host of %d workers by %s, and between %d "
                "hosts by wingbeat's connections",
                *(device.type, group.size, group.backend, len(layout.hosts)),
            )

    def use(self, topology: str) -> None:
        """Change the topology of subsequent calls. Every worker must call this at the same point.

        Blocks and their owners do not depend on the topology. A `UsageError` if the topology does
        not fit the workers, their interfaces or networks.
        """
        self._topology = _fit_topology(topology, self.world)
        self._is_direct = self._can_be_direct()

    def _can_be_direct(self) -> bool:
        """Whether small buffers are exchanged in single rounds."""
        few, used = self._native and self.world.size <= DIRECT_RANKS, self._topology
        ring = isinstance(used, Ring) or (isinstance(used, Hierarchical) and not used.direct)
        return few and ring and self.fits("mesh")

    def sums_in_one_round(self, buffer: torch.Tensor) -> bool:
        """Whether all ranks send a buffer of this size to all others, and add what they receive."""
        size, nbytes = self.world.size, buffer.nbytes
        return self._is_direct and sums_in_one_round(self._topology, size, nbytes)

    def fits(self, topology: str) -> bool:
        """Whether the topology fits the workers, their interfaces and networks."""
        try:
            _fit_topology(topology, self.world)
        except UsageError:
            return False
        return True

    def abandon(self) -> None:
        """Close the links of an aborted group without waiting for transfers in progress.

        Collectives that Python runs may write to their buffers until the group's timeout.
        """
        for executor in self._executors:
            executor.abandon()
        for link in self.world.links:
            link.close()

    def owned(self, numel: int) -> Span:
        """Return the span of a buffer of ``numel`` elements that this rank reduces."""
        return blocks_of(numel, self.world.size)[self.world.rank]

    def reduce_scatter(
        self,
        buffer: torch.Tensor,
        *,
        bucket: int = -1,
        wire: WireFormat | None = None,
        blocks: Blocks = None,
    ) -> Handle:
        """Sum all workers' buffers into each owner's block; other elements become undefined.

        A `UsageError` if the dtype ``wire`` is not supported.
        """
        return self._submit("reduce_scatter", buffer, bucket, wire=wire, blocks=blocks)

    def all_gather(
        self,
        buffer: torch.Tensor,
        *,
        bucket: int = -1,
        after: Handle | None = None,
        wire: WireFormat | None = None,
        label: str = "",
        blocks: Blocks = None,
    ) -> Handle:
        """Send each owner's block to all workers. A chunk is sent once ``after`` has finished it.

        ``label`` names a buffer that is not a bucket in error messages. With a ``wire``, each owner
        also rounds its own block, so that the result is bitwise equal on all workers. A
        `UsageError` if the dtype ``wire`` is not supported.
        """
        return self._submit("all_gather", buffer, bucket, after, wire, label=label, blocks=blocks)

    def all_reduce(
        self, buffer: torch.Tensor, *, bucket: int = -1, wire: WireFormat | None = None
    ) -> Handle:
        """Sum all workers' buffers on every worker; the result is bitwise equal on all workers.

        A `UsageError` if the dtype ``wire`` is not supported.
        """
        return self._submit("all_reduce", buffer, bucket, wire=wire, put_off=True)

    def all_gather_sum(
        self,
        buffer: torch.Tensor,
        *,
        wire: Encoded,
        bucket: int = -1,
        velocity: torch.Tensor | None = None,
        beside: bool = False,
    ) -> Handle:
        """Sum the encoded buffers of all workers on every worker: each receives all payloads.

        The buffer is encoded before this returns, and decoded by the thread that calls ``wait``, on
        its current stream on a GPU. With ``beside``, a CPU buffer is decoded in the background once
        all payloads have arrived; it must not be used before ``wait`` returns. ``velocity``, of the
        buffer's length, accumulates momentum for momentum correction.
        """
        world = self.world
        if world.size == 1:
            return Handle([])
        begin = time.monotonic_ns() if stream.on else 0
        where = f"bucket {bucket}" if bucket >= 0 else "a gathered sum"
        where = where if world.group is None else f"{where} in {world.group}"
        gathered = GatheredSum(buffer, wire, world.rank, world.size, where, velocity, world.ranks)
        gathered.encode()
        if begin:
            nbytes = buffer.nbytes
            stream.record("encode", begin, time.monotonic_ns(), bucket=bucket, nbytes=nbytes)
        # Small payloads are limited by latency, large ones by bandwidth.
        few = gathered.rows.nbytes < SMALL_GATHER_BYTES
        short = in_few_rounds(self._topology) if few else self._topology
        rows = gathered.rows.view(-1)
        handle = self._submit("all_gather", rows, bucket, topology=short, put_off=True)
        on_cpu = buffer.device.type == "cpu" and "cpu" not in world.nccl_devices
        return Gathered(handle, gathered, decode_queue if beside and on_cpu else None)

    def open_second(self) -> None:
        """Open the channel of the second sums of factors. Every worker must call this.

        A `UsageError` if all channels are in use, or the world is that of a group.
        """
        if self._second is None and self.world.size > 1:
            channel = (self.world.parent or self.world).open_channel()
            self.world.on_close(channel.close)
            self._second = Collectives(channel, self._topology)

    def all_reduce_factors(
        self, buffer: torch.Tensor, factors: Factors, *, bucket: int = -1
    ) -> Handle:
        """Sum all workers' buffers as low-rank factors, bitwise equal on all workers.

        The first factors are computed before this returns. The buffer holds the result after
        ``wait``. Requires a previous call of `open_second`.
        """
        if self.world.size == 1:
            return Handle([])
        where = f"bucket {bucket}" if bucket >= 0 else "a sum of factors"
        if buffer.device.type in self.world.nccl_devices:
            return Handle([nccl.start_factored(self.world, buffer, factors, where)])
        assert self._second is not None, "open_second() opens what the second sums travel in"
        begin = time.monotonic_ns()
        summed = FactoredSum(factors, buffer, f"{self.world.me}: {where}")
        end = time.monotonic_ns()
        meter.codec.add(end - begin)
        if stream.on:
            stream.record("encode", begin, end, bucket=bucket, nbytes=buffer.nbytes)
        first = self._sum(summed.first, bucket)
        second = self._second._sum
        self._turns.start(lambda: summed.start_second(first, lambda factor: second(factor, bucket)))
        return summed

    def _sum(self, buffer: torch.Tensor, bucket: int) -> Handle:
        short = in_few_rounds(self._topology) if buffer.nbytes < SMALL_GATHER_BYTES else None
        # Two sums in two orders, one of which a thread starts: not those of a group of devices.
        return self._submit("all_reduce", buffer, bucket, topology=short, on_host=True)

    def broadcast(self, buffer: torch.Tensor, root: int, *, label: str = "") -> Handle:
        """Copy the buffer of this world's rank ``root`` to all workers.

        A `UsageError` if ``root`` is not a rank of this world.
        """
        world = self.world
        if type(root) is not int or not 0 <= root < world.size:
            here = f"0 to {world.size - 1}"
            if world.group is not None:
                here += f", which are ranks {world.ranks} among all"
            whose = "" if world.group is None else f" in {world.group}"
            raise UsageError(f"broadcast(root={root!r}){whose}: allowed are {here}")
        return self._submit(f"broadcast:{root}", buffer, -1, label=label)

    def _submit(
        self,
        what: str,
        buffer: torch.Tensor,
        bucket: int,
        after: Handle | None = None,
        wire: WireFormat | None = None,
        topology: Topology | None = None,
        label: str = "",
        blocks: Blocks = None,
        put_off: bool = False,
        on_host: bool = False,
    ) -> Handle:
        """Queue a collective on every link, or submit it to NCCL, which preserves the order.

        ``put_off``: whether the caller starts all buckets before it waits for one. ``on_host``:
        whether no device sums tensors.
        """
        world = self.world
        packing = None if wire is None else self._packing(buffer, wire, blocks)
        if buffer.device.type in world.nccl_devices:
            return Handle([self._start_nccl(what, buffer, after, packing, blocks)])
        if buffer.device.type != "cpu" and world.size > 1:
            two = None if on_host or blocks is not None else self._two_level_of(what, buffer, wire)
            return (
                self._stage(what, buffer, bucket, after, wire, topology, label, blocks)
                if two is None
                else Handle([two.start(what, buffer, bucket, wire, label, after, put_off)])
            )
        encoded = encoded_of(packing) is not None
        itemsize = buffer.element_size() if packing is None else packing.bytes_per_element
        # A ring would encode again at each hop, with additional loss.
        topology = _fit_topology("mesh", world) if encoded else topology
        size, numel, speeds, compiled, rows = world.size, buffer.numel(), world.speeds, what, 0
        plain = packing is None and self._native and buffer.dtype in NATIVE_DTYPES
        if topology is None and self._is_direct and buffer.nbytes <= DIRECT_BYTES:
            topology = small_sum(self._topology, buffer.nbytes)
            speeds = speeds[:1]  # the first link only
            if what == "all_reduce" and plain and self.sums_in_one_round(buffer):
                topology, compiled, numel, rows = Mesh(), "all_gather", size * numel, size
        topology = topology or self._topology
        if not topology.in_place:  # packed chunks are copies; no block is shared by all peers
            packing = Cast(buffer.dtype if packing is None else packing.dtype, Span(0, 0))
        least, most = NATIVE_CHUNK_BYTES if plain else _chunk_bytes(encoded, speeds)
        programs = compile_collective(
            compiled, topology, world.rank, size, numel, itemsize, speeds, least, blocks, most
        )
        identity = ""
        if world.group is not None:
            way = None if packing is None else (type(packing).__name__, packing.dtype, itemsize)
            shape = (label, buffer.numel(), buffer.dtype, way, type(topology).__name__)
            identity = repr((what, bucket, *shape))
        if after is not None and len(after.jobs) != len(programs):
            after.wait()  # rare: only one of two halves has a codec, and the buffer is small
            after = None
        call = Call(buffer, what, bucket, packing, label, identity, rows)
        jobs: list[Job | NativeJob] = []
        try:
            for link, program in enumerate(programs):
                jobs.append(self._executors[link].submit(program, call, _job_of(after, link)))
        except PeerError:  # no job may use the buffer after this returns
            with contextlib.suppress(PeerError):
                wait_for_all(job.wait for job in jobs)
            raise
        return Handle(jobs)

    def _two_level_of(
        self, what: str, buffer: torch.Tensor, wire: WireFormat | None
    ) -> TwoLevel | None:
        """Return the collectives on two levels if this one fits."""
        two = self._two_level
        fits = two is not None and two.topology == self._topology and two.fits(what, buffer, wire)
        return two if fits else None

    def _stage(
        self,
        what: str,
        buffer: torch.Tensor,
        bucket: int,
        after: Handle | None,
        wire: WireFormat | None,
        topology: Topology | None,
        label: str,
        blocks: Blocks,
    ) -> Handle:
        """Queue a collective on the host's copy of a buffer of an accelerator."""
        staged = staging.staging_of(self.world)
        used = topology or self._topology
        on_host = self._staged.get(used)
        if on_host is None:
            on_host = self._staged[used] = Collectives(staged.channel, used)
        first = None if after is None or not after.jobs else after.jobs[0]
        if after is not None and not isinstance(first, staging.StagedJob):
            after.wait()

        def submit(job: staging.StagedJob, previous: Handle | None) -> Handle:
            packed = job.wire_on_host()
            return on_host._submit(
                what, job.host, bucket, previous, packed, topology, label, blocks
            )

        call = staging.StagedCall(what, buffer, bucket, wire, blocks)
        previous = first if isinstance(first, staging.StagedJob) else None
        if previous is not None and previous.call.buffer.data_ptr() != buffer.data_ptr():
            previous.wait()
            previous = None
        return Handle([staged.start(call, previous, submit)])

    def _start_nccl(
        self,
        what: str,
        buffer: torch.Tensor,
        after: Handle | None,
        packing: Packing | None,
        blocks: Blocks,
    ) -> NcclJob:
        previous = None if after is None else after.jobs[0]
        previous = previous if isinstance(previous, NcclJob) else None
        encoded = encoded_of(packing)
        if encoded is None:
            cast_to = cast("Cast | None", packing)
            return nccl.start(self.world, what, buffer, previous, cast_to, blocks)
        assert blocks is None, "codecs on GPUs have equal blocks"
        if previous is not None:
            previous.wait()  # orders streams; the host does not wait
        return nccl.start_encoded(self.world, what, buffer, encoded)

    def _packing(self, buffer: torch.Tensor, wire: WireFormat, blocks: Blocks) -> Packing | None:
        own = self.owned(buffer.numel()) if blocks is None else blocks[self.world.rank]
        encoded = encoded_of(wire)
        if encoded is not None:
            return None if self.world.size == 1 else Encoded(encoded.coding, encoded.residual, own)
        dtype = narrower_dtype(dtype_of(wire), buffer)  # `all_reduce_factors` sums factors
        return None if dtype is None or self.world.size == 1 else Cast(dtype, own)


def _job_of(handle: Handle | None, link: int) -> Job | NativeJob | None:
    """Return the job that another job on this link can follow."""
    job = None if handle is None else handle.jobs[link]
    return job if isinstance(job, Job | NativeJob) else None


def _chunk_bytes(encoded: bool, speeds: Sequence[float]) -> tuple[int, int]:
    """Return the minimum and maximum size of a message that Python sends."""
    # Chunks are encoded separately: their bounds must not depend on measurements.
    return MIN_CHUNK_BYTES if encoded else least_message(speeds), MAX_CHUNK_BYTES


def _fit_topology(topology: str | Topology, world: World) -> Topology:
    fitted = topologies.fitted(topology, world.layout, len(world.links))
    if world.networks:
        fitted.check_networks(world.networks)
    return fitted


class Rows:
    """A small all-gather in progress of one ``row`` per worker, all of equal length.

    ``label`` names the values in error messages. On a GPU ``device``, `wait` does not block the
    host.
    """

    def __init__(
        self,
        collectives: Collectives,
        row: Sequence[float] | torch.Tensor,
        label: str,
        device: torch.device | None = None,
    ) -> None:
        mine = torch.as_tensor(row, dtype=torch.float64, device=device).reshape(-1)
        world = collectives.world
        self._rows = torch.zeros(world.size, mine.numel(), dtype=torch.float64, device=device)
        self._rows[world.rank] = mine
        self._handle: Handle = collectives.all_gather(self._rows.view(-1), label=label)

    def wait(self) -> torch.Tensor:
        """Return all rows: float64, shape ``(workers, values)``, equal on every worker.

        A `PeerError` if a worker failed or timed out.
        """
        self._handle.wait()
        return self._rows
