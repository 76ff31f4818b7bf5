"""`Collectives`: queue a collective, get a handle; one executor thread per link does the work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wingbeat import topologies
from wingbeat.codecs.factors import Factors
from wingbeat.collectives import native
from wingbeat.collectives.cast import narrower
from wingbeat.collectives.encoded import Gathered, GatheredSum
from wingbeat.collectives.factored import FactoredSum
from wingbeat.collectives.handle import Handle, wait_for_all
from wingbeat.collectives.in_turn import InTurn
from wingbeat.collectives.job import Job
from wingbeat.collectives.lanes import decoding, executors_of, turning
from wingbeat.collectives.native_encoded import start_encoded, start_factored
from wingbeat.collectives.packing import CastPacking, CodecPacking, Encoded, Packing, WireFormat
from wingbeat.collectives.program import MIN_CHUNK_BYTES, Program, compile_collective, least_message
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe import meter
from wingbeat.observe.events import stream
from wingbeat.topologies import Doubling, Mesh, Topology
from wingbeat.transport.world import World
from wingbeat.types import Span, blocks_of

if TYPE_CHECKING:
    import torch


Blocks = tuple[Span, ...] | None
"""Which part of a buffer each worker owns, in order and end to end; None: nearly equal ones."""

SHORT_BYTES = 80 << 10
"""All payloads together from which a gather goes another way than by doubling (Thakur, Rabenseifner
and Gropp 2005, section 4.1; of 16 workers at 7.3 Mbit/s both took the same at 64 KB)."""


class Collectives:
    """Queues collectives in the order of the calls, which must be the same on every worker.

    Every collective works in place on a flat, contiguous tensor; rank ``r`` owns
    ``owned(numel)``, the r-th of ``size`` nearly equal blocks, where no other ``blocks`` are given:
    one for each rank, in order, end to end, empty ones allowed. On several links, each block is
    cut by the links' measured speed. Tensors on a GPU must be a multiple of ``size`` long.

    With a dtype as ``wire`` (bfloat16 or float16) the elements travel in that, and the buffer keeps
    its own: each chunk is rounded when it is sent, and sums are made in the buffer's dtype (by
    NCCL in the wire's). What is too large for the wire arrives as infinite, NaN as NaN. A buffer
    that is as narrow already or holds no floating point numbers travels as it is.

    With an `Encoded` wire each chunk is encoded by itself and goes straight to the block's owner,
    who decodes and adds what it gets, encodes the sum once and sends that to everyone. So the
    bytes do not grow with the number of workers, and everything is rounded twice.

    Every worker must choose the same.
    """

    def __init__(self, world: World, topology: str | Topology = "ring") -> None:
        """Take the world's links.

        Raises:
            UsageError: the topology is not for these workers, their interfaces or networks.
        """
        self.world = world
        self._topology = _fitted(topology, world)
        self._executors = executors_of(world)
        self._turns = InTurn(turning)
        self._second: Collectives | None = None

    def use(self, topology: str) -> None:
        """Go along another topology from the next call on; on every worker at the same place.

        Blocks and their owners are the same along all of them.

        Raises:
            UsageError: as for a new object.
        """
        self._topology = _fitted(topology, self.world)

    def fits(self, topology: str) -> bool:
        """Whether the topology is for these workers, their interfaces and networks."""
        try:
            _fitted(topology, self.world)
        except UsageError:
            return False
        return True

    def abandon(self) -> None:
        """Close the links of a group that is given up, without waiting for what is under way.

        Buffers of collectives under way may still be written to, until the group's timeout.
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
        """Sum all workers' buffers into each owner's block; the rest becomes scratch.

        Raises:
            UsageError: gradients cannot travel in the dtype ``wire``.
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
        """Spread each owner's block to everyone; a chunk starts when ``after`` is done with it.

        ``label`` says in a word or two what it is that is no bucket, for messages. With a ``wire``
        each owner rounds its own block too: all workers get the same bits.

        Raises:
            UsageError: gradients cannot travel in the dtype ``wire``.
        """
        return self._submit("all_gather", buffer, bucket, after, wire, label=label, blocks=blocks)

    def all_reduce(
        self, buffer: torch.Tensor, *, bucket: int = -1, wire: WireFormat | None = None
    ) -> Handle:
        """Sum all workers' buffers on every worker, with the same bits on each.

        Raises:
            UsageError: gradients cannot travel in the dtype ``wire``.
        """
        return self._submit("all_reduce", buffer, bucket, wire=wire)

    def all_gather_sum(
        self,
        buffer: torch.Tensor,
        *,
        wire: Encoded,
        bucket: int = -1,
        velocity: torch.Tensor | None = None,
        beside: bool = False,
    ) -> Handle:
        """Sum what all workers have encoded on every worker: everyone gets everyone's payload.

        The buffer is encoded before this returns, and decoded when the result is waited for; or
        ``beside`` training, as soon as all payloads are here, if nobody is going to use the buffer
        without having waited. On a GPU it is decoded by whoever waits, on its stream.
        ``velocity``, as long as the buffer, is where momentum correction gathers momentum.
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
        # What counts is the number of hops while payloads are small, and how full links are later.
        short = Doubling() if gathered.rows.nbytes < SHORT_BYTES else self._topology
        handle = self._submit("all_gather", gathered.rows.view(-1), bucket, topology=short)
        on_cpu = buffer.device.type == "cpu" and "cpu" not in world.native_on
        return Gathered(handle, gathered, decoding if beside and on_cpu else None)

    def open_second(self) -> None:
        """Open the channel of the second sums of factors; every worker must call it.

        Raises:
            UsageError: all channels are in use, or this is the world of a group.
        """
        if self._second is None and self.world.size > 1:
            channel = (self.world.parent or self.world).open_channel()
            self.world.on_close(channel.close)
            self._second = Collectives(channel, self._topology)

    def all_reduce_factors(
        self, buffer: torch.Tensor, factors: Factors, *, bucket: int = -1
    ) -> Handle:
        """Sum all workers' buffers as low-rank factors, with the same bits on every worker.

        The first factors are made before this returns; the result is in the buffer when it was
        waited for. `open_second` comes first, once.
        """
        if self.world.size == 1:
            return Handle([])
        where = f"bucket {bucket}" if bucket >= 0 else "a sum of factors"
        if buffer.device.type in self.world.native_on:
            return Handle([start_factored(self.world, buffer, factors, where)])
        assert self._second is not None, "open_second() opens what the second sums travel in"
        begin = time.monotonic_ns()
        summed = FactoredSum(factors, buffer, f"rank {self.world.rank}: {where}")
        end = time.monotonic_ns()
        meter.codec.add(end - begin)
        if stream.on:
            stream.record("encode", begin, end, bucket=bucket, nbytes=buffer.nbytes)
        first = self._sum(summed.first, bucket)
        second = self._second._sum
        self._turns.start(lambda: summed.turn(first, lambda factor: second(factor, bucket)))
        return summed

    def _sum(self, buffer: torch.Tensor, bucket: int) -> Handle:
        short = Doubling() if buffer.nbytes < SHORT_BYTES else None
        return self._submit("all_reduce", buffer, bucket, topology=short)

    def broadcast(self, buffer: torch.Tensor, root: int, *, label: str = "") -> Handle:
        """Overwrite every worker's buffer with that of rank ``root``, as numbered in this world.

        Raises:
            UsageError: there is no such rank.
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
    ) -> Handle:
        """Queue it on every link; on a GPU hand it to NCCL, which keeps the order by itself."""
        world = self.world
        own = self.owned(buffer.numel()) if blocks is None else blocks[world.rank]
        packing = self._packing(buffer, wire, own)
        if buffer.device.type in world.native_on:
            return Handle([self._start_native(what, buffer, _native_of(after), packing, blocks)])
        encoded = isinstance(packing, CodecPacking)
        itemsize: float = buffer.element_size()
        if packing is not None:
            itemsize = packing.bytes_per_element
        # Encoding anew what others have encoded would lose more at every hop of a ring.
        topology = Mesh() if encoded else topology or self._topology
        if not topology.in_place:  # packed chunks are copies; of no block is one good for all peers
            packing = CastPacking(buffer.dtype if packing is None else packing.dtype, Span(0, 0))
        programs = compile_collective(
            what,
            topology,
            world.rank,
            world.size,
            buffer.numel(),
            itemsize,
            world.speeds,
            # Chunks are encoded one by one: what they are must not depend on what was measured.
            MIN_CHUNK_BYTES if encoded else least_message(world.speeds),
            blocks,
        )
        call = ""
        if world.group is not None:
            way = None if packing is None else (type(packing).__name__, packing.dtype, itemsize)
            said = (what, bucket, label, buffer.numel(), buffer.dtype, way, type(topology).__name__)
            call = repr(said)
        return self._queue(programs, (buffer, what, bucket), after, (packing, label, call))

    def _queue(
        self,
        programs: Sequence[Program],
        what: tuple[torch.Tensor, str, int],
        after: Handle | None,
        how: tuple[Packing | None, str, str],
    ) -> Handle:
        """Give each lane its program."""
        jobs: list[Job] = []
        try:
            for i, (executor, program) in enumerate(zip(self._executors, programs, strict=True)):
                jobs.append(executor.submit(program, *what, _job_of(after, i), *how))
        except PeerError:  # a lane has failed meanwhile; the buffer must be in nobody's hands
            with contextlib.suppress(PeerError):
                wait_for_all(job.wait for job in jobs)
            raise
        return Handle(jobs)

    def _start_native(
        self,
        what: str,
        buffer: torch.Tensor,
        after: native.NativeJob | None,
        packing: Any,
        blocks: Blocks,
    ) -> native.NativeJob:
        if not isinstance(packing, CodecPacking):
            return native.start(self.world, what, buffer, after, packing, blocks)
        assert blocks is None, "codecs on GPUs have equal blocks"
        if after is not None:
            after.wait()  # on the host nothing waits; streams are ordered
        return start_encoded(self.world, what, buffer, packing)

    def _packing(self, buffer: torch.Tensor, wire: WireFormat | None, own: Span) -> Packing | None:
        assert not isinstance(wire, Factors), "these are summed by all_reduce_factors"
        alone = self.world.size == 1  # nothing travels and nothing is rounded
        if isinstance(wire, Encoded):
            return None if alone else CodecPacking(wire.coding, wire.residual, own)
        dtype = narrower(wire, buffer)
        if dtype is None or alone:
            return None
        return CastPacking(dtype, own)


def _fitted(topology: str | Topology, world: World) -> Topology:
    """Return what goes along the links of this world.

    Raises:
        UsageError: the topology is not for so many workers, interfaces, or for how they are wired.
    """
    known = topologies.get(topology) if isinstance(topology, str) else topology
    fitted = known.fitted(world.size, len(world.links))
    if world.networks:
        fitted.check_networks(world.networks)
    return fitted


def _job_of(handle: Handle | None, link: int) -> Job | None:
    job = handle.jobs[link] if handle is not None else None
    return job if isinstance(job, Job) else None


def _native_of(handle: Handle | None) -> native.NativeJob | None:
    job = handle.jobs[0] if handle is not None else None
    return job if isinstance(job, native.NativeJob) else None
