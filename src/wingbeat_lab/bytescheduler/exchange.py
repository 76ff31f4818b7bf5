"""All-reduces partitions of buckets in the order of rank 0 (ByteScheduler, Peng et al., 2019).

A thread of each worker has the machine of `order`. It receives what rank 0 names, and starts the
all-reduces of partitions on connections of its own, so that the training thread may start other
collectives at any time.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.collectives import Collectives, Handle, dtype_of
from wingbeat.errors import PeerError, WingbeatError
from wingbeat.exchanges.on_host import BucketsOnHost
from wingbeat.schedules.events import Operation
from wingbeat.schema import MalformedMessage, printable
from wingbeat.transport import graceful_shutdown
from wingbeat.transport.actor import Actor
from wingbeat.transport.failures import (
    WaitLog,
    finished_peer_text,
    has_finished,
    is_alive,
    published_failure,
)
from wingbeat.transport.messages import Limits, Mailbox, Message, open_mailbox
from wingbeat.transport.world import World
from wingbeat.types import Span
from wingbeat_lab.bytescheduler.order import (
    MESSAGES,
    Follower,
    Leader,
    Machine,
    Partition,
    Reason,
    divide,
)

if TYPE_CHECKING:
    import torch

    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.observe.meter import Section

LEADER = 0
"""The rank that decides the order."""

_ORDER = "the order of partitions"


class Cut(NamedTuple):
    """A bucket's partitions: their elements, and the bytes of each."""

    spans: list[Span]
    sizes: list[int]


def cut(numel: int, whole: int, itemsize: int, most: int) -> Cut:
    """Divide a bucket of ``numel`` elements of gradients, and ``whole`` with flags and counts.

    The last partition has the flags and counts, which may exceed ``most`` bytes.

    >>> cut(8, 11, itemsize=4, most=16)
    Cut(spans=[Span(start=0, stop=4), Span(start=4, stop=11)], sizes=[16, 28])
    """
    spans = divide(numel, itemsize, most)
    spans[-1] = Span(spans[-1].start, whole)
    return Cut(spans, [itemsize * len(span) for span in spans])


class Sum(Future[None]):
    """The sum of a bucket; usable as a collective's `Handle`.

    Attributes:
        missing: number of partitions that are not summed.
    """

    def __init__(self, bucket: Bucket, spans: Sequence[Span]) -> None:
        super().__init__()
        self.bucket, self.spans, self.missing = bucket.index, spans, len(spans)
        self._flat, self._wire = bucket.flat.detach(), dtype_of(bucket.wire)

    def start(self, collectives: Collectives, number: int) -> Handle:
        """Start the all-reduce of a partition."""
        span = self.spans[number]
        part: torch.Tensor = self._flat[span.start : span.stop]
        return collectives.all_reduce(part, bucket=self.bucket, wire=self._wire)

    def wait(self) -> None:
        """Block until all partitions are summed; a `PeerError` if a worker has failed."""
        # No timeout: the actor's thread completes or fails every sum.
        error = self.exception()
        if error is not None:
            raise PeerError(str(error))

    wait_received = wait


class PartitionSums(Actor):
    """Sums partitions in the order of rank 0, in a separate thread after `start`.

    ``world`` is a channel of its own, whose end closes the actor.
    """

    check_s = 0.25
    closed = "the exchange of partitions is closed"

    def __init__(
        self,
        mailbox: Mailbox,
        world: World,
        topology: str,
        machine: Machine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            mailbox, MESSAGES, world.me, "wingbeat-order", clock=clock, close_s=world.timeout
        )
        self._world, self._machine = world, machine
        world.on_close(self._close)  # before the collectives, which end with the channel
        self._collectives = Collectives(world, topology)
        self._sums: dict[int, Sum] = {}
        self._in_flight = 0
        self._wait: WaitLog | None = None

    # -- any thread -----------------------------------------------------------------------

    def plan(self, cuts: Sequence[Cut], forward: Sequence[int]) -> None:
        """Use buckets with these partitions; a `PeerError` if the actor has failed."""
        sizes = [each.sizes for each in cuts]
        self.ask(lambda: self._use(sizes, forward))

    def sum(self, bucket: Bucket, spans: Sequence[Span]) -> Sum:
        """Sum a bucket that is ready; a `PeerError` if the actor has failed."""
        total = Sum(bucket, spans)
        return self.submit(functools.partial(self._accept, total), total)

    def _close(self) -> None:
        self.close(quick=graceful_shutdown.is_failing())

    # -- the thread -----------------------------------------------------------------------

    def handle(self, message: Message, record: Partition | Reason) -> None:
        """Start what rank 0 names; a `PeerError` if it has failed."""
        if message.peer != LEADER or not isinstance(self._machine, Follower):
            raise MalformedMessage("a message that only rank 0 sends")
        if isinstance(record, Reason):
            reason = printable(bytes(record.text).decode(errors="replace"))
            raise PeerError(f"{self.me}: {self._world.name(LEADER)} has failed: {reason}")
        self._wait = None
        self._begin(self._machine.name(record))

    def refuse(self, message: Message, error: MalformedMessage) -> None:
        """Raise PeerError: the workers no longer have one order."""
        raise self._malformed(message.peer, error)

    def check(self, now: float) -> None:  # noqa: ARG002
        """Raise PeerError if rank 0 does not name what this worker waits for.

        All-reduces in flight have deadlines of their own, and name the worker that failed.
        """
        if self._machine.leads or self._in_flight or not self._sums:
            self._wait = None
            return
        world, name = self._world, self._world.name(LEADER)
        bucket = min(self._sums)
        if LEADER in self.gone:
            if has_finished(world.store, world.ranks[LEADER]):
                ranks = world.ranks[world.rank], world.ranks[LEADER]
                raise PeerError(finished_peer_text(*ranks, _ORDER))
            failure = published_failure(world.store, world.ranks[LEADER])
            how = f"failed with {failure}" if failure else self.gone[LEADER].text
            raise PeerError(
                f"{self.me}: {name} {how}, and has not named the next partition of bucket {bucket}"
            )
        if self._wait is None:
            self._wait = WaitLog(self.me, f"the next partition of bucket {bucket}", self.clock)
        waited, rank = self._wait.seconds(), world.ranks[LEADER]
        if waited > world.timeout and not is_alive(world.store, rank):
            raise PeerError(
                f"{self.me}: {name} does not answer, and has not named the next partition of "
                f"bucket {bucket} for {waited:.0f} s: check that it runs, or increase the timeout: "
                "wingbeat.init(timeout=...)"
            )
        self._wait.check(name, world.timeout)

    def busy(self) -> bool:
        """Whether sums are missing, which other workers need too."""
        return bool(self._sums)

    def leave(self) -> None:
        """As rank 0, report a failure to the others, which wait for names."""
        if not (self.failed and self._machine.leads):
            return
        reason = str(self.error).removeprefix(f"{self.me}: ")
        for peer in self.mailbox.peers:
            with contextlib.suppress(WingbeatError):
                self._post(peer, Reason(reason.encode()), 0.0)

    def _use(self, sizes: Sequence[Sequence[int]], forward: Sequence[int]) -> None:
        try:
            self._machine.plan(sizes, forward)
        except MalformedMessage as error:
            raise self._malformed(LEADER, error) from None

    def _malformed(self, peer: int, error: MalformedMessage) -> PeerError:
        name = self._world.name(peer)
        return PeerError(f"{self.me}: {name} sent a malformed message for {_ORDER}: {error}")

    def _accept(self, total: Sum) -> None:
        assert total.bucket not in self._sums, f"bucket {total.bucket} is not summed yet"
        self._sums[total.bucket] = total
        self._begin(self._machine.ready(total.bucket))

    def _begin(self, partitions: Sequence[Partition]) -> None:
        for each in partitions:
            for peer in self.mailbox.peers if self._machine.leads else ():
                self._post(peer, each)
            handle = self._sums[each.bucket].start(self._collectives, each.number)
            self._in_flight += 1
            handle.add_done_callback(functools.partial(self._report, each))

    def _post(self, peer: int, record: Partition | Reason, seconds: float | None = None) -> None:
        kind, ids, payload = MESSAGES.pack(record)
        self.mailbox.post(peer, kind, payload, ids=ids, seconds=seconds)

    def _report(self, partition: Partition, handle: Handle) -> None:
        """Have the actor complete a partition; called by threads of collectives."""
        with contextlib.suppress(WingbeatError):  # the actor has ended
            self.ask(lambda: self._complete(partition, handle))

    def _complete(self, partition: Partition, handle: Handle) -> None:
        handle.wait()  # it is done: returns or raises
        self._in_flight -= 1
        self._begin(self._machine.summed(partition))
        total = self._sums[partition.bucket]
        total.missing -= 1
        if not total.missing:
            del self._sums[partition.bucket]
            total.set_result(None)


class PartitionedExchange:
    """All-reduces buckets in partitions of at most ``partition`` bytes, ``credit`` in flight.

    Buckets of an accelerator travel from pinned memory of the host.
    """

    def __init__(self, world: World, topology: str, partition: int, credit: int) -> None:
        self._partition = partition
        self._cuts: dict[int, Cut] = {}
        channel = (world.parent or world).open_channel()
        world.on_close(channel.close)
        mailbox = open_mailbox(
            channel.store,
            channel.rank,
            range(channel.size) if channel.rank == LEADER else (LEADER,),
            namespace=f"order/{channel.path}",
            interfaces=("lo",) if world.threads else world.interfaces or None,
            classes=1,
            encrypted=channel.encrypted is not False,
            limits=Limits(silence=channel.timeout),
            seconds=channel.timeout,
            name=channel.name,
        )
        machine: Machine = Leader(credit) if channel.rank == LEADER else Follower()
        self._sums = PartitionSums(mailbox, channel, topology, machine)
        self._sums.start()
        # Ends the thread if `close_world` is never called, as of a model that is collected.
        weakref.finalize(self, self._sums.abandon).atexit = False

    def sections(self) -> Sequence[Section]:
        """Return no sections: the interfaces have their own."""
        return ()

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Divide these buckets; ``forward`` has them in the order of their priority.

        A `PeerError` if an earlier exchange failed.
        """
        self._on_host = BucketsOnHost(buckets)
        self._cuts = {
            each.index: cut(
                each.numel, each.flat.numel(), each.flat.element_size(), self._partition
            )
            for each in buckets
        }
        cuts = [self._cuts[number] for number in range(len(buckets))]
        self._sums.plan(cuts, [bucket.index for bucket in forward])

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """All-reduce a bucket when it is its turn, and store the handle in the bucket.

        A `PeerError` if an earlier exchange failed.
        """
        assert operation is Operation.ALL_REDUCE, operation
        own, spans = self._on_host.of(bucket.index), self._cuts[bucket.index].spans
        self._on_host.start(own, functools.partial(self._sums.sum, own, spans))
