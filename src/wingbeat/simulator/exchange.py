"""Exchanges in virtual time, and the one along a topology: programs in the lanes of links."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from wingbeat import topologies
from wingbeat.collectives import program as programs
from wingbeat.collectives.program import (
    DIRECT_BYTES,
    DIRECT_RANKS,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    NATIVE_CHUNK_BYTES,
    SMALL_GATHER_BYTES,
    Machine,
    Task,
    compile_collective,
    least_message,
    small_sum,
    sums_in_one_round,
)
from wingbeat.compression import Coded, options_of
from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Coding, Links, Traffic, Work
from wingbeat.simulator.codecs import (
    ADDED,
    FactorsSent,
    Packing,
    Seconds,
    Slowed,
    factors_sent,
    packing_of,
)
from wingbeat.simulator.interfaces import Ports
from wingbeat.simulator.model import ITEMSIZE, Buckets
from wingbeat.simulator.network import Carrier, Channel
from wingbeat.simulator.processors import Cores
from wingbeat.topologies import Hierarchical, Mesh, Ring, in_few_rounds
from wingbeat.types import Layout, Span, blocks_of

if TYPE_CHECKING:
    from wingbeat.collectives.program import Program, Transfer
    from wingbeat.simulator.mailbox import Mailboxes
    from wingbeat.topologies import Topology

NO_BLOCK = Span(0, 0)

_TAG_BITS = 40
"""Bits of the tags of a collective's chunks."""

_ROW_BYTES = 64
"""Bytes by which a worker announces how it uses its gradients, more or less."""


class Collective(Task):
    """One collective of one worker in one lane; its ``number`` is equal on every worker.

    ``packing`` is that of chunks to other hosts. ``rounded`` is the worker's block where it sends
    the result: encoded once for all receivers, and decoded in place. ``costs`` are those of its
    transfers that are known, by their identity; ``first_chunk`` is added to their tags.
    """

    def __init__(
        self,
        program: Program,
        number: int,
        itemsize: float,
        after: Collective | None,
        packing: Packing | None,
        rounded: Span,
        costs: dict[int, _Cost],
    ) -> None:
        super().__init__(program, after)
        self.costs = costs
        self.first_chunk = number << _TAG_BITS
        self.itemsize = itemsize
        self.packing, self.rounded = packing, rounded
        self.encoded: set[Span] = set()
        self.over = False
        self.waiters: list[Callable[[], None]] = []

    def when_over(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when the result can be read."""
        self.waiters.append(resume)


class Alike(NamedTuple):
    """Workers that act identically: each as the one ``period`` ranks before it, modulo ``workers``.

    What a worker sends to the k-th after it then equals what the k-th before it sends to it, so the
    first ``period`` workers represent all.
    """

    workers: int
    period: int

    def represented(self, source: int, target: int) -> tuple[int, int]:
        """Return the sender that represents ``source``, and the receiver of what it sends then."""
        first = source % self.period
        return first, (target - source + first) % self.workers


class _Peer(NamedTuple):
    """Another worker: whether it is on the same host, and the channels from it and to it."""

    near: bool
    inward: Channel
    outward: Channel


class _Cost(NamedTuple):
    """What a chunk takes: its channel, its bytes, and seconds of the lane to send or receive it.

    ``coded`` is the work to decode it before, if the codec's work has idle seconds; else
    ``seconds`` has them.
    """

    channel: Channel
    nbytes: int
    seconds: float
    coded: Slowed | None = None


class Lane:
    """Performs the commands of its machine at their costs.

    With ``alike`` all hosts act identically, and those of the first represent the others; see
    `Alike`.
    """

    def __init__(
        self,
        rank: int,
        lane: int,
        agenda: Agenda,
        network: Carrier,
        work: Work,
        alike: Alike | None = None,
        cores: Cores | None = None,
    ) -> None:
        self._rank = rank
        self._lane = lane
        self._alike = alike
        self._cores = cores or Cores(agenda)
        self._agenda = agenda
        self._network = network
        self._work = work
        self._machine: Machine[Collective] = Machine()
        self._commands: Iterator[programs.Command[Collective]] = self._machine.commands()
        self._peers: dict[tuple[int, int], _Peer] = {}
        self._costs: dict[tuple[int, float], tuple[Program, dict[int, _Cost]]] = {}
        self._receiving: _Cost | None = None
        self._resting, self._woken = True, False
        self._submitted = 0
        # Bound once, as they are passed with each chunk.
        self._resume, self._arriving = self._go, self._await_arrival

    def submit(
        self,
        program: Program,
        itemsize: float,
        after: Collective | None,
        packing: Packing | None = None,
        rounded: Span = NO_BLOCK,
    ) -> Collective:
        """Queue a program."""
        costs = self._known_costs(program, itemsize) if packing is None else {}
        exchange = Collective(program, self._submitted, itemsize, after, packing, rounded, costs)
        self._submitted += 1
        self._machine.submit(exchange)
        if self._resting:
            self._resting, self._woken = False, True
            self._agenda.at(self._agenda.now, self._resume)
        return exchange

    def _go(self) -> None:
        """Perform commands, as the last thing that an action does, until one has to wait."""
        for command in self._commands:
            kind = type(command)
            if kind is programs.AwaitChunk:
                wait = self._await_chunk(command.task, command.transfer)  # type: ignore[union-attr]
            elif kind is programs.SendChunk:
                task, transfer = command.task, command.transfer  # type: ignore[union-attr]
                send = self._send_chunk if task.packing is None else self._encode_chunk
                wait = send(task, transfer)
            elif kind is programs.PostReceive:
                task, transfer = command.task, command.transfer  # type: ignore[union-attr]
                cost = task.costs.get(id(transfer)) or self._receive_cost(task, transfer)
                cost.channel.announce(task.first_chunk + transfer.tag)
                continue
            elif kind is programs.Complete:
                self._complete(command.task)  # type: ignore[union-attr]
                continue
            elif kind is programs.Idle:
                self._resting = wait = True
            else:
                continue
            if wait:
                return

    def _await_chunk(self, task: Collective, transfer: Transfer) -> bool:
        """Receive and apply a chunk; return whether that has to wait."""
        cost = task.costs.get(id(transfer)) or self._receive_cost(task, transfer)
        self._receiving = cost
        when = cost.channel.receive(task.first_chunk + transfer.tag, self._arriving)
        if when is None:
            return True
        if when > self._agenda.now:
            self._await_arrival(when)
            return True
        if cost.coded is not None:
            self._decode(cost.coded, cost.seconds)
            return True
        return not self._cores.spend(cost.seconds, self._resume)

    def _await_arrival(self, when: float) -> None:
        """Apply the awaited chunk from its arrival on."""
        cost = self._receiving
        assert cost is not None, "a chunk is awaited"
        if cost.coded is not None:
            self._agenda.at(when, partial(self._decode, cost.coded, cost.seconds))
        elif self._cores.unlimited:
            self._agenda.at(when + cost.seconds, self._resume)
        else:
            self._agenda.at(when, partial(self._cores.work, cost.seconds, self._resume, woken=True))

    def _decode(self, work: Slowed, seconds: float) -> None:
        """Decode a chunk, and receive it in so many seconds."""
        received = partial(self._cores.work, seconds, self._resume)
        code(work, self._cores, self._agenda, received)

    def _encode_chunk(self, task: Collective, transfer: Transfer) -> bool:
        """Encode and send a chunk; return whether that has to wait."""
        work, encoded = self._encoding(task, transfer), partial(self._sent, task, transfer)
        if work.idle:
            code(work, self._cores, self._agenda, encoded)
            return True
        if not self._cores.spend(work.busy, encoded):
            return True
        return self._send_chunk(task, transfer)

    def _sent(self, task: Collective, transfer: Transfer) -> None:
        if not self._send_chunk(task, transfer):
            self._go()

    def _send_chunk(self, task: Collective, transfer: Transfer) -> bool:
        """Send a chunk; return whether that has to wait."""
        cost = task.costs.get(id(transfer)) or self._send_cost(task, transfer)
        cost.channel.send(task.first_chunk + transfer.tag, cost.nbytes)
        woken, self._woken = self._woken, False
        return not self._cores.spend(cost.seconds, self._resume, woken)

    def _known_costs(self, program: Program, itemsize: float) -> dict[int, _Cost]:
        """Return the costs of a program's transfers so far, by their identity."""
        key = id(program), itemsize
        if key not in self._costs:
            self._costs[key] = program, {}  # which is kept, as its id is the key
        return self._costs[key][1]

    def _receive_cost(self, task: Collective, transfer: Transfer) -> _Cost:
        peer = self._peer(transfer)
        nbytes, packing = self._nbytes(task, transfer), self._packing(task, transfer)
        seconds = self._chunk_s(nbytes, peer)
        coded = None
        if packing is not None:  # decoded and added in one pass
            coded = self._decoding(packing, transfer.span)
            if not coded.idle:
                seconds, coded = seconds + coded.busy, None
        elif transfer.reduce and not peer.near:
            seconds += nbytes * self._work.add_s_per_byte
        cost = task.costs[id(transfer)] = _Cost(peer.inward, nbytes, seconds, coded)
        return cost

    def _send_cost(self, task: Collective, transfer: Transfer) -> _Cost:
        peer, nbytes = self._peer(transfer), self._nbytes(task, transfer)
        cost = _Cost(peer.outward, nbytes, self._chunk_s(nbytes, peer))
        task.costs[id(transfer)] = cost
        return cost

    def _encoding(self, task: Collective, transfer: Transfer) -> Slowed:
        """Return the work to pack a chunk: that of a result once for all receivers."""
        packing, span, prices = self._packing(task, transfer), transfer.span, self._work.prices
        if packing is None or span in task.encoded:
            return Slowed()
        rounded = packing.coding is not None and task.rounded.overlaps(span)
        if rounded:
            task.encoded.add(span)
        if prices is not None and packing.coding is not None:
            return self._work.priced(prices.pack, len(span))
        seconds = packing.seconds(span)
        return self._work.slowed(sum(seconds) if rounded else seconds.encode)

    def _decoding(self, packing: Packing, span: Span) -> Slowed:
        """Return the work to unpack a chunk, and to add it in the same pass."""
        prices = self._work.prices
        if prices is not None and packing.coding is not None:
            return self._work.priced(prices.unpack, len(span))
        return self._work.slowed(packing.seconds(span).decode)

    def _chunk_s(self, nbytes: int, peer: _Peer) -> float:
        work = self._work
        if not peer.near:
            return work.chunk_s + nbytes * work.wire_s_per_byte
        return work.chunk_s if work.local_chunk_s is None else work.local_chunk_s

    def _packing(self, task: Collective, transfer: Transfer) -> Packing | None:
        return None if transfer.near else task.packing

    def _nbytes(self, task: Collective, transfer: Transfer) -> int:
        packing, span = self._packing(task, transfer), transfer.span
        if packing is not None:
            return packing.nbytes(span)
        return int((span.stop - span.start) * task.itemsize)

    def _peer(self, transfer: Transfer) -> _Peer:
        """Return the peer and the channels of a chunk."""
        known = self._peers.get((transfer.peer, transfer.link))
        if known is None:
            rank, peer, link = self._rank, transfer.peer, transfer.link
            known = self._peers[peer, link] = _Peer(
                self._network.near(rank, peer),
                self._channel(peer, rank, link),
                self._channel(rank, peer, link),
            )
        return known

    def _channel(self, source: int, target: int, link: int) -> Channel:
        into = target
        if self._alike:
            source, target = self._alike.represented(source, target)
            into = target % self._alike.period
        return self._network.channel(
            (source, target, link, self._lane), (source, link), (into, link)
        )

    def _complete(self, task: Collective) -> None:
        task.over = True
        waiters, task.waiters = task.waiters, []
        for resume in waiters:
            self._agenda.at(self._agenda.now, resume)


def code(work: Slowed, cores: Cores, agenda: Agenda, over: Callable[[], None]) -> None:
    """Call ``over`` after work of a codec."""

    def busy_over() -> None:
        agenda.at(agenda.now + work.idle, over)

    cores.work(work.busy, busy_over if work.idle else over)


class Waitable(Protocol):
    """An operation in flight; ``over`` once its result can be read."""

    over: bool

    def when_over(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when the operation is complete."""


class Exchange(ABC):
    """The interface on which a worker's schedule starts operations."""

    def before(self, operation: Operation, bucket: int) -> Slowed:  # noqa: ARG002
        """Return a codec's work of the training thread before an operation is started."""
        return Slowed()

    def after(self, bucket: int) -> Slowed:  # noqa: ARG002
        """Return that after the operation that was started last; none if it was returned."""
        return Slowed()

    def announce(self) -> Sequence[Waitable]:
        """Start to tell all workers how this one will use its gradients."""
        raise AssertionError("only collectives divide the optimizer")

    @abstractmethod
    def start(self, operation: Operation, bucket: int, chained: bool) -> None:
        """Start an operation on a bucket."""

    @abstractmethod
    def under_way(self, bucket: int) -> Sequence[Waitable]:
        """Return the operation that was started last on a bucket."""


class Collectives(Exchange):
    """Collectives of one worker along a topology, in the encoding ``wire`` of gradients."""

    def __init__(
        self,
        rank: int,
        workers: int,
        buckets: Buckets,
        topology: Topology,
        links: Links,
        work: Work,
        agenda: Agenda,
        network: Carrier,
        alike: Alike | None = None,
        *,
        wire: str | Coded = "",
        mesh: Topology | None = None,
        hosts: int = 0,
        cores: Cores | None = None,
    ) -> None:
        self._rank, self._workers, self._buckets = rank, workers, buckets
        self._topology, self._mesh = topology, mesh or Mesh()
        self._wire, self._work = wire, work
        self._agenda, self._cores = agenda, cores or Cores(agenda)
        self._decoding: deque[tuple[Slowed, Later]] = deque()
        self._turns: deque[Callable[[], None]] = deque()
        self._speeds = links.speeds(hosts or workers)
        ring = isinstance(topology, Ring | Hierarchical) and not getattr(topology, "direct", False)
        self._direct = ring and workers <= DIRECT_RANKS
        # The second sums of factors travel in a channel of their own.
        self._lanes, self._second = (
            [
                Lane(rank, first + link, agenda, network, work, alike, self._cores)
                for link in range(links.count)
            ]
            for first in (0, links.count)
        )
        self._last: dict[int, Sequence[Collective | Later]] = {}
        self._after: dict[int, Slowed] = {}

    def before(self, operation: Operation, bucket: int) -> Slowed:
        """Return the work to encode a bucket that all others receive, or its first factors."""
        if self._wire_of(operation) == "":
            return Slowed()
        if self._factored:
            return self._factors(bucket).begin
        if self._gathers(operation):
            return self._encode(bucket)
        return Slowed()

    def after(self, bucket: int) -> Slowed:
        """Return the work to compute a bucket from its factors, once."""
        return self._after.pop(bucket, Slowed())

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:
        """Start an operation on a bucket."""
        wire = self._wire_of(operation)
        if wire and self._factored:
            self._sum_factors(bucket)
        elif wire and self._gathers(operation):
            self._gather(bucket)
        elif not (self._factored and operation is Operation.ALL_GATHER):
            self._sum(operation, bucket, wire, chained)

    def under_way(self, bucket: int) -> Sequence[Waitable]:
        """Return the operation that was started last on a bucket."""
        return self._last.get(bucket, ())

    def announce(self) -> Sequence[Waitable]:
        """Start to gather a row of a few bytes of each worker."""
        return self._start_bytes("all_gather", _ROW_BYTES * self._workers, self._lanes)

    @property
    def _factored(self) -> bool:
        return isinstance(self._wire, Coded) and self._wire.summed

    def _gathers(self, operation: Operation) -> bool:
        return options_of(self._wire).gathers and operation is Operation.ALL_REDUCE

    def _wire_of(self, operation: Operation) -> str | Coded:
        """Return the encoding in an operation: factors are summed whole, parameters not at all."""
        bare = operation is Operation.ALL_GATHER_PARAMETERS
        return "" if bare or (self._factored and operation is Operation.ALL_GATHER) else self._wire

    def _packing(self, bucket: int) -> Packing | None:
        return packing_of(self._wire, self._buckets.parameters[bucket])

    def _factors(self, bucket: int) -> FactorsSent:
        assert isinstance(self._wire, Coded)
        parameters, work = self._buckets.parameters[bucket], self._work
        return factors_sent(self._wire, parameters, work.codecs, work.codecs_idle, work.prices)

    def _encode(self, bucket: int) -> Slowed:
        """Return the work to encode a whole bucket."""
        prices = self._work.prices
        if prices is not None:
            return self._work.priced(prices.encode, self._buckets.numel[bucket])
        return self._work.slowed(self._whole(bucket).encode)

    def _decode(self, bucket: int) -> Slowed:
        """Return the work to decode and add the payloads of a whole bucket of all workers."""
        prices, workers = self._work.prices, self._workers
        if prices is not None:
            each = self._work.priced(prices.decode, self._buckets.numel[bucket])
            return Slowed(workers * each.busy, workers * each.idle)
        payloads = 1 + (workers - 1) * ADDED
        return self._work.slowed(payloads * self._whole(bucket).decode)

    def _whole(self, bucket: int) -> Seconds:
        packing = self._packing(bucket)
        assert packing is not None
        return packing.seconds(Span(0, self._buckets.numel[bucket]))

    def _sum(self, operation: Operation, bucket: int, wire: str | Coded, chained: bool) -> None:
        """Start a collective, with the messages that `wingbeat.collectives.Collectives` chooses."""
        packing = self._packing(bucket) if wire else None
        numel, what = self._padded(self._buckets.numel[bucket]), _NAMES[operation]
        itemsize, topology, speeds = float(ITEMSIZE), self._topology, self._speeds
        least, most = NATIVE_CHUNK_BYTES
        if packing is not None:
            itemsize, most = packing.bytes_per_element, MAX_CHUNK_BYTES
            least = least_message(speeds) if packing.coding is None else MIN_CHUNK_BYTES
            topology = topology if packing.coding is None else self._mesh
        if self._direct and numel * ITEMSIZE <= DIRECT_BYTES:
            if packing is None or packing.coding is None:
                topology, speeds = small_sum(topology, numel * ITEMSIZE), speeds[:1]
            once = sums_in_one_round(self._topology, self._workers, numel * ITEMSIZE)
            if packing is None and operation is Operation.ALL_REDUCE and once:
                topology, what, numel = Mesh(), "all_gather", self._workers * numel
        programs = compile_collective(
            what, topology, self._rank, self._workers, numel, itemsize, speeds, least, None, most
        )
        before = self._last.get(bucket, ()) if chained else ()
        rounded = blocks_of(numel, self._workers)[self._rank]
        if what == "reduce_scatter":
            rounded = NO_BLOCK
        self._last[bucket] = [
            lane.submit(program, ITEMSIZE, after, packing, rounded)
            for lane, program, after in zip_longest(
                self._lanes[: len(programs)], programs, cast("Sequence[Collective]", before)
            )
        ]

    def _gather(self, bucket: int) -> None:
        """Send the whole bucket's payload to all others, and add all payloads in the background."""
        packing = self._packing(bucket)
        assert packing is not None
        row = -(-packing.nbytes(Span(0, self._buckets.numel[bucket])) // 8) * 8
        parts = self._start_bytes("all_gather", self._workers * row, self._lanes)
        work = self._decode(bucket)
        later = Later(self._agenda)
        self._last[bucket] = [later]

        def arrived() -> None:
            self._decoding.append((work, later))
            if len(self._decoding) == 1:
                self._decode_next()

        when_all(parts, arrived)

    def _decode_next(self) -> None:
        """Decode what has arrived, one bucket after the other."""
        work, later = self._decoding[0]

        def decoded() -> None:
            self._decoding.popleft()
            later.end()
            if self._decoding:
                self._decode_next()

        code(work, self._cores, self._agenda, decoded)

    def _sum_factors(self, bucket: int) -> None:
        """Sum thin factors, compute the second ones in a thread of their own, and sum these.

        The thread takes one bucket after the other, in the order in which they began.
        """
        sent, later = self._factors(bucket), Later(self._agenda)
        self._last[bucket], self._after[bucket] = [later], sent.end
        first, second = (self._padded(numel) * ITEMSIZE for numel in (sent.first, sent.second))
        arrived = Later(self._agenda)
        when_all(self._start_bytes("all_reduce", first, self._lanes), arrived.end)

        def turn() -> None:
            _when_over(arrived, between)

        def between() -> None:
            if sent.second:
                code(sent.between, self._cores, self._agenda, summed)
            else:
                later.end()
                self._end_turn()

        def summed() -> None:
            parts = self._start_bytes("all_reduce", second, self._second)
            kept = Later(self._agenda)
            when_all([*parts, kept], later.end)
            code(sent.keep, self._cores, self._agenda, partial(after, kept))

        def after(kept: Later) -> None:
            kept.end()
            self._end_turn()

        self._turns.append(turn)
        if len(self._turns) == 1:
            turn()

    def _end_turn(self) -> None:
        self._turns.popleft()
        if self._turns:
            self._turns[0]()

    def _start_bytes(self, what: str, nbytes: int, lanes: Sequence[Lane]) -> list[Collective]:
        """Start a collective of so many bytes, in few rounds if there are few."""
        few = nbytes < SMALL_GATHER_BYTES
        topology = in_few_rounds(self._topology) if few else self._topology
        least, most = NATIVE_CHUNK_BYTES
        programs = compile_collective(
            what, topology, self._rank, self._workers, nbytes, 1, self._speeds, least, None, most
        )
        return [
            lane.submit(program, 1, None) for lane, program in zip(lanes, programs, strict=True)
        ]

    def _padded(self, numel: int) -> int:
        return -(-numel // self._workers) * self._workers


class Later:
    """An operation that ends when `end` is called."""

    def __init__(self, agenda: Agenda) -> None:
        self.over = False
        self._agenda = agenda
        self._waiters: list[Callable[[], None]] = []

    def when_over(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when the operation is complete."""
        self._waiters.append(resume)

    def end(self) -> None:
        """End the operation."""
        self.over = True
        for resume in self._waiters:
            self._agenda.at(self._agenda.now, resume)
        self._waiters.clear()


def _when_over(part: Waitable, action: Callable[[], None]) -> None:
    """Call ``action`` when the operation is complete, or now if it is."""
    if part.over:
        action()
    else:
        part.when_over(action)


def when_all(parts: Sequence[Waitable], action: Callable[[], None]) -> None:
    """Call ``action`` when all operations, of which there is at least one, are complete."""
    left = len(parts)

    def one_over() -> None:
        nonlocal left
        left -= 1
        if not left:
            action()

    for part in parts:
        part.when_over(one_over)


_NAMES = {
    Operation.ALL_REDUCE: "all_reduce",
    Operation.REDUCE_SCATTER: "reduce_scatter",
    Operation.ALL_GATHER: "all_gather",
    Operation.ALL_GATHER_PARAMETERS: "all_gather",
}


def period_of(topology: Topology, layout: Layout, wire: str | Coded = "") -> int:
    """Return the number of workers that represent all if hosts are alike; 0 if none do.

    One worker does if it has no neighbours on its host or no other hosts, else those of a host.
    None do in an encoding whose blocks differ in bytes, because only some of their parameters have
    a codec or factors.
    """
    each, options = len(layout.hosts[0]), options_of(wire)
    uneven = (options.rank or options.groups) and not options.summed
    if uneven or not topology.symmetric or layout != Layout.even(len(layout.hosts), each):
        return 0
    return 1 if len(layout.hosts) == 1 else each


class SimulatedExchanges(NamedTuple):
    """The exchange of each simulated worker, and the mailboxes, if there are any."""

    workers: Sequence[Exchange]
    mailboxes: Mailboxes | None = None


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """What an exchange part makes exchanges from (`ExchangePart.build_simulated`).

    ``topology`` is the name of the strategy's, ``wire`` its encoding of gradients. ``alike``: all
    workers and links are. ``traffic`` and ``coding`` are those of `wingbeat.simulator.simulate`.
    ``cores`` are the processors of each host.

    Where workers are replicas of several processes, ``column`` is the number of the processes of
    this exchange in their replicas, and ``columns`` the number of processes of each; ``ports``
    carry the messages of all columns.
    """

    topology: str
    layout: Layout
    buckets: Buckets
    links: Links
    work: Work
    agenda: Agenda
    network: Carrier
    alike: bool
    traffic: Traffic | None
    coding: Coding
    wire: str | Coded
    cores: Sequence[Cores]
    ports: Ports = field(default_factory=lambda: Ports({}, {}))
    column: int = 0
    columns: int = 1

    def collectives(self, topology: Topology | None = None) -> SimulatedExchanges:
        """Return collectives along a topology; by default the strategy's, fitted to the hosts."""
        workers = self.layout.workers
        topology = topology or topologies.fitted(self.topology, self.layout, self.links.count)
        mesh = topologies.fitted("mesh", self.layout, self.links.count)
        period = period_of(topology, self.layout, self.wire) if self.alike else 0
        alike = Alike(workers, period) if period else None
        return SimulatedExchanges(
            [
                Collectives(
                    rank,
                    workers,
                    self.buckets,
                    topology,
                    self.links,
                    self.work,
                    self.agenda,
                    self.network,
                    alike,
                    wire=self.wire,
                    mesh=mesh,
                    hosts=len(self.layout.hosts),
                    cores=self.cores[self.layout.host_of[rank]],
                )
                for rank in range(period or workers)
            ]
        )
