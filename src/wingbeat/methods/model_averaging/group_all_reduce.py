"""P-Reduce (Ripples, section 3.2): the mean of a flat buffer over the members of a group."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from wingbeat.collectives import Collectives, Encoded, WireFormat, encoded_of
from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.generator import ID_LIMIT
from wingbeat.methods.model_averaging.static_client import ABANDONED, Arrival
from wingbeat.observe.events import AVERAGES, stream
from wingbeat.transport.failures import FailureAttribution
from wingbeat.transport.link import group_prefix
from wingbeat.transport.tcp import GroupLink
from wingbeat.types import Group, Span

if TYPE_CHECKING:
    from wingbeat.codecs import Coding
    from wingbeat.collectives import Handle
    from wingbeat.methods.model_averaging.generator import Run
    from wingbeat.transport.world import World

CHECK_S = 0.5  # interval between checks of whether missing members may still arrive, in seconds

GRACE_S = 5.0
"""Seconds, plus twice the longest average so far, in which data of departed members may arrive."""


class ModelCompression:
    """How parts of a flat model are compressed, with error feedback.

    An average may fail and be repeated. So a part is encoded with a copy of its residual, which
    replaces the residual when the average is applied; until then a checkpoint has the earlier
    residual. If models are sent it is replaced at once, because an average with another group may
    follow before one is applied.

    Args:
        coding: the codec of all parts; None for none.
        residual: the accumulated codec error, float32, as long as the model; None without error
            feedback.
        dtype: the dtype of all parts without a codec; None for their own.
        gathers: whether each worker receives all payloads instead of their sum.
        models: whether models are sent instead of differences; the residual is then a part of this
            worker's model.

    Attributes:
        dtype: the dtype of all parts, if no codec is used.
    """

    def __init__(
        self,
        coding: Coding | None = None,
        residual: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        gathers: bool = False,
        models: bool = False,
    ) -> None:
        self.gathers, self._models = gathers, models
        self.dtype, self._coding = dtype, coding
        self._residual = residual
        self._new_residual = None if residual is None else torch.zeros_like(residual)
        self._averaged: slice | None = None

    def begin(self, part: Span) -> WireFormat | None:
        """Return the wire format of ``part`` for an average that begins now."""
        self._averaged = None
        if self._coding is None:
            return self.dtype
        coding, inside = self._coding.cut(part), slice(part.start, part.stop)
        if self._residual is None or self._new_residual is None:
            return Encoded(coding)
        return Encoded(coding, self._new_residual[inside].copy_(self._residual[inside]))

    def add_residual(self, model: torch.Tensor) -> None:
        """Add the residual to a model before a synchronization, and reset it."""
        if self._models and self._residual is not None:
            model[: self._residual.numel()].add_(self._residual)
            self._residual.zero_()

    def end(self, part: Span) -> None:
        """Record that the average of ``part`` is complete."""
        self._averaged = slice(part.start, part.stop)
        if self._models:
            self.commit()

    def commit(self) -> None:
        """Replace the residual if the last average, which has been applied, is complete."""
        inside, self._averaged = self._averaged, None
        if inside is not None and self._residual is not None and self._new_residual is not None:
            self._residual[inside] = self._new_residual[inside]


class GracePeriod:
    """Decides how long a group waits for members that will not arrive.

    A departed member may have sent all that is needed. If this worker abandoned the collective too
    early, the others would lose this worker. So it waits for ``seconds``.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._departed_at = seconds, float("inf")

    def lasts(self, expected: Arrival) -> bool:
        """Whether to wait on, given what is expected now."""
        now = time.monotonic()
        self._departed_at = float("inf") if expected else min(self._departed_at, now)
        return expected is not Arrival.IMPOSSIBLE and now - self._departed_at <= self._seconds


class GroupAllReduce:
    """Averages this worker's parameters with those of groups. A `Reducer`.

    Connections stay open until `close`. If a group fails, the buffer is unchanged. The buffer has
    all parameters: flat, contiguous, floating point, on the CPU. ``first``, different for each
    buffer, is the epoch of connection id 0 in the world.

    Attributes:
        first: the epoch of connection id 0 of the present generator.
        part: the part of the buffer that is averaged; initially all of it.
        weight: this worker's in the next averages; None: all have the same. All members of a group
            have one or none.
        uncompressed: whether the next averages ignore ``compression``.
        members: of the last group.
        completed: the number of completed averages.
    """

    def __init__(
        self,
        world: World,
        buffer: torch.Tensor,
        compression: ModelCompression | None = None,
        *,
        first: int = 0,
    ) -> None:
        self._world, self._buffer = world, buffer
        self.first = self._base = first
        self.compression = compression or ModelCompression()
        self.uncompressed = False
        self.weight: float | None = None
        self.part = Span(0, buffer.numel())
        self.members: tuple[int, ...] = ()
        self.completed = 0
        # A failed collective leaves undefined values in its buffer.
        self._sum = torch.empty_like(buffer)
        self._longest_s, self._begun_ns = 0.0, 0
        self._open: dict[int, tuple[Group, World, Collectives]] = {}

    def average(self, run: Run, connection: int, arrival: Callable[[], Arrival]) -> int | None:
        """Replace the buffer's part by its mean over the members; same bits on all of them.

        Opens the connections if needed. Returns None on success; otherwise a lost member or
        `ABANDONED`, and the buffer is unchanged.
        """
        lost = self.attempt(run, connection, arrival)
        if lost is None:
            self.apply()
        return lost

    def attempt(self, run: Run, connection: int, arrival: Callable[[], Arrival]) -> int | None:
        """As `average`, without replacing the buffer: `apply` does.

        An empty part, of a rank that holds none of the parameters, has its average at once.
        """
        if not self.part:
            self.members, self._begun_ns = run.members, 0
            return None
        if connection not in self._open:
            group = Group(run.members, epoch=self.first + connection)
            inner = self._world.open_group(group)
            self._open[connection] = group, inner, Collectives(inner)
            for ended in (link.connect() for link in inner.links if isinstance(link, GroupLink)):
                if ended:
                    self.close([connection])
                    return ended[0]
        collectives = self._open[connection][2]
        self.members = run.members
        inside = slice(self.part.start, self.part.stop)
        self._begun_ns = time.monotonic_ns() if stream.on else 0
        total = self._sum[inside].copy_(self._buffer[inside])
        if self.weight is not None:
            weights = torch.tensor([self.weight], dtype=torch.float64, device="cpu")
            start = functools.partial(collectives.all_reduce, weights)
            lost = self._complete(connection, start, arrival)
            if lost is not None:
                return lost
            # The mean of the scaled parts is the weighted mean. Errors of a codec are scaled too.
            total.mul_(len(run.members) * self.weight / float(weights) if weights > 0 else 1.0)
        return self._complete(connection, lambda: self._start(collectives, total), arrival)

    def _complete(
        self, connection: int, start: Callable[[], Handle], arrival: Callable[[], Arrival]
    ) -> int | None:
        """Complete a collective over a connection; return as `attempt`."""
        collectives = self._open[connection][2]
        try:
            handle = start()
        except PeerError:
            return self._lose(connection)
        arrived = False
        try:
            arrived = self._wait(handle, arrival)
        finally:
            if not arrived:
                collectives.abandon()
                self.close([connection])
                self._sum = torch.empty_like(self._sum)  # the collective may still write to it
        if not arrived:
            return ABANDONED
        try:
            handle.wait()
        except PeerError:
            return self._lose(connection)
        return None

    def apply(self) -> None:
        """Replace the buffer's part by the mean of a successful `attempt`."""
        inside = slice(self.part.start, self.part.stop)
        total = self._sum[inside]
        self._buffer[inside].copy_(total.div_(len(self.members)))
        if not self.uncompressed:
            self.compression.end(self.part)
        self.completed += 1
        if self._begun_ns:
            stream.record(
                "average", self._begun_ns, time.monotonic_ns(), nbytes=total.nbytes, lane=AVERAGES,
                group=self.members,
            )  # fmt: skip

    def publish_cause(self, connection: int, member: int) -> None:
        """Publish that a group fails here because of ``member``, before its connections close."""
        if connection in self._open:
            group, inner, _ = self._open[connection]
            self._attribution(group, inner).publish_wait(self._world.ranks[member])

    def renew(self, generation: int) -> None:
        """Count connection ids from 0 again: those of another incarnation of the generator."""
        self.close()
        self.first = self._base + generation * ID_LIMIT

    def close(self, connections: Iterable[int] | None = None) -> None:
        """Close the connections with these ids; all if None."""
        for connection in list(self._open) if connections is None else connections:
            opened = self._open.pop(connection, None)  # another thread may close it at exit
            if opened is not None:
                opened[1].close()

    def _start(self, collectives: Collectives, total: torch.Tensor) -> Handle:
        # The bucket number differs by part, so that members at different fragments do not add them
        # up.
        bucket = self.part.start or -1
        wire = None if self.uncompressed else self.compression.begin(self.part)
        encoded = encoded_of(wire)
        if encoded is not None and self.compression.gathers:
            return collectives.all_gather_sum(total, wire=encoded, bucket=bucket)
        return collectives.all_reduce(total, wire=wire, bucket=bucket)

    def _wait(self, handle: Handle, arrival: Callable[[], Arrival]) -> bool:
        """Wait for a collective; return False if members will not arrive."""
        over = threading.Event()
        handle.add_done_callback(lambda _: over.set())
        begun, grace = time.monotonic(), self.grace_period()
        while not over.wait(CHECK_S):
            if not grace.lasts(arrival()):
                return over.is_set()
        self._longest_s = max(self._longest_s, time.monotonic() - begun)
        return True

    def grace_period(self) -> GracePeriod:
        """Return how long to wait for the data of members that will not arrive, from now on."""
        return GracePeriod(GRACE_S + 2 * self._longest_s)

    def _lose(self, connection: int) -> int:
        """Return the member that has failed; this worker if the others have not waited for any."""
        group, inner, _ = self._open[connection]
        failures, ranks = self._attribution(group, inner), self._world.ranks
        rank = ranks[self._world.rank]
        awaited = failures.awaited_by(rank)
        cause = rank if awaited is None else failures.root_cause(awaited)
        self.close([connection])
        return ranks.index(cause) if cause in inner.ranks else self._world.rank

    def _attribution(self, group: Group, inner: World) -> FailureAttribution:
        # The members of a column have ranks of the job.
        ranks = self._world.ranks
        return FailureAttribution(
            inner.store, ranks[self._world.rank], max(ranks) + 1, inner.timeout, group_prefix(group)
        )
