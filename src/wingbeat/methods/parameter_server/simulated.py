"""Parameter servers in virtual time: the machines of a real run, without payloads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.coding import MAX_HEADER_BYTES as PAYLOAD_HEADER_BYTES
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.protocol import (
    Flow,
    Ids,
    Kind,
    Order,
    SendQueue,
    link_of,
    position_of,
    urgency_of,
)
from wingbeat.methods.parameter_server.slicing import KIND_OF, RequestPlanner, Slice
from wingbeat.parts.strategy import Strategy
from wingbeat.planning.thresholds import (
    Cuts,
    ThresholdResult,
    cuts_from_thresholds,
    threshold_trial,
    thresholds_from_cuts,
    untuned,
)
from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Coding, Links, Work
from wingbeat.simulator.exchange import Exchange, SimulatedExchanges, SimulationContext
from wingbeat.simulator.interfaces import Interfaces
from wingbeat.simulator.mailbox import LIMITS, Mailbox, Mailboxes
from wingbeat.simulator.model import ITEMSIZE, Buckets, Model, buckets_of
from wingbeat.simulator.processors import Cores
from wingbeat.simulator.run import simulate
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Message, Posted
from wingbeat.transport.messages.peers import Route

Item = TypeVar("Item")


def _route(flow: Flow) -> Route:
    return Route(flow.peer, flow.link, flow.urgency)


# -- threads ---------------------------------------------------------------------------------


class SimulatedThread(ABC, Generic[Item]):
    """The common part of a worker's client and a server.

    It receives messages, then sends the items that have room, one after the other. Each takes time,
    during which the thread processes no events.
    """

    at_once: int | None = None
    """Messages that are received before something is sent; None: all."""

    def __init__(
        self,
        agenda: Agenda,
        cores: Cores,
        mailbox: Mailbox,
        work: Work,
        order: Order,
        byte_s: float,
    ) -> None:
        self._agenda, self._cores, self._mailbox = agenda, cores, mailbox
        self._message_s, self._byte_s = work.message_s, byte_s
        self._queue: SendQueue[Item] = SendQueue(order)
        self._resting, self._woken, self._slept = True, False, True
        self._thread = self._run()
        mailbox.wake = self.wake

    def wake(self) -> None:
        """Wake the thread to process pending work."""
        self._woken = True
        if self._resting:
            self._resting = False
            self._agenda.at(self._agenda.now, self._advance)

    @abstractmethod
    def process(self, message: Message) -> Iterator[float]:
        """Process a message; yield the seconds that this takes."""

    @abstractmethod
    def post(self, flow: Flow, item: Item) -> Posted:
        """Post an item to the mailbox."""

    @abstractmethod
    def nbytes(self, item: Item) -> int:
        """Return the bytes of an item's payload."""

    def encode_s(self, item: Item) -> float:  # noqa: ARG002  not everything is encoded
        """Return the seconds to encode an item."""
        return 0.0

    def ready(self, item: Item) -> bool:  # noqa: ARG002  not every thread has to wait
        """Whether an item can be sent."""
        return True

    def enqueue_new(self) -> None:
        """Move new items to the send queue."""

    def complete_stored(self) -> None:
        """Complete what has ended after a send or an arrival."""

    def _advance(self) -> None:
        for pause in self._thread:
            if pause is None:
                self._resting = self._slept = True
                return
            if pause > 0:
                woken, self._slept = self._slept, False
                self._cores.work(pause, self._advance, woken)
                return

    def _run(self) -> Iterator[float | None]:
        while True:
            while self._woken:
                self._woken = False
                yield from self._receive_all()
                self.enqueue_new()
                yield from self._send_all()
                self.complete_stored()
                self._woken |= self._mailbox.waiting > 0
            yield None

    def _receive_all(self) -> Iterator[float]:
        taken = 0
        while self.at_once is None or taken < self.at_once:
            message = self._mailbox.poll()
            if message is None:
                return
            yield self._message_time(message.nbytes)
            yield from self.process(message)
            taken += 1

    def _send_all(self) -> Iterator[float]:
        while (chosen := self._choose()) is not None:
            flow, item, posted = chosen
            yield self._message_time(self.nbytes(item)) + self.encode_s(item)
            posted.append(self.post(flow, item))

    def _choose(self) -> tuple[Flow, Item, list[Posted]] | None:
        """Remove the next item from the send queue."""
        chosen: list[tuple[Flow, Item, list[Posted]]] = []

        def room(flow: Flow) -> int:
            return -1 if chosen else self._mailbox.room(_route(flow))

        def send(flow: Flow, item: Item) -> Callable[[], bool]:
            posted: list[Posted] = []
            chosen.append((flow, item, posted))
            return lambda: bool(posted) and posted[0].arrived

        if self._queue.queued:
            self._queue.flush(room, send, self.ready)
        return chosen[0] if chosen else None

    def _message_time(self, nbytes: int) -> float:
        return self._message_s + nbytes * self._byte_s


class SliceTransfer(NamedTuple):
    """A slice within a request, see `wingbeat.methods.parameter_server.client.Transfer`.

    Pushes have ``nbytes``, sums ``back``, and float32 gradients ``dense`` bytes.
    """

    server: int
    ids: Ids
    nbytes: int
    back: int
    dense: int
    urgency: int
    position: int


@dataclass(eq=False, slots=True)
class Request:
    """Slices that were pushed or pulled together, and the number of their ``missing`` sums."""

    kind: Kind
    transfers: Sequence[SliceTransfer]
    missing: int
    posted: list[Posted] = field(default_factory=list)
    over: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def when_over(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when all sums have arrived."""
        self.waiters.append(resume)


class SimulatedClient(SimulatedThread[tuple[Request, SliceTransfer]]):
    """The thread of a `wingbeat.methods.parameter_server.client.Client`, with the same rules."""

    def __init__(
        self,
        agenda: Agenda,
        cores: Cores,
        mailbox: Mailbox,
        work: Work,
        order: Order,
        byte_s: float,
        coding: Coding,
    ) -> None:
        super().__init__(agenda, cores, mailbox, work, order, byte_s)
        self._coding = coding
        self._new: deque[Request] = deque()
        self._wanted: dict[tuple[int, int, int], tuple[Request, SliceTransfer]] = {}
        self._storing: list[Request] = []

    def start(self, kind: Kind, transfers: Sequence[SliceTransfer]) -> Request:
        """Start to push, store or pull slices."""
        request = Request(kind, transfers, len(transfers))
        self._new.append(request)
        self.wake()
        return request

    def process(self, message: Message) -> Iterator[float]:
        """Record an arrived sum after the time to decode it."""
        assert message.kind == Kind.SUM, message
        request, transfer = self._wanted.pop(Ids(*message.ids)[:3])
        assert (message.peer, message.nbytes) == (transfer.server, transfer.back), message
        if transfer.back < transfer.dense:
            yield transfer.dense * self._coding.decode_s_per_byte
        request.missing -= 1
        if not request.missing:
            self._end(request)
        yield from ()

    def encode_s(self, item: tuple[Request, SliceTransfer]) -> float:
        """Return the seconds to encode a slice."""
        return item[1].dense * self._coding.encode_s_per_byte if self.nbytes(item) else 0.0

    def enqueue_new(self) -> None:
        """Move requests of the training thread to the send queue."""
        while self._new:
            request = self._new.popleft()
            pull = request.kind is Kind.PULL
            for transfer in request.transfers:
                if request.kind is not Kind.PUSH:
                    self._wanted[transfer.ids[:3]] = request, transfer
                nbytes = MAX_HEADER_BYTES if pull else MAX_HEADER_BYTES + transfer.nbytes
                link = link_of(transfer.ids.route)
                flow = Flow(transfer.server, 0 if pull else transfer.urgency, link)
                self._queue.enqueue(flow, transfer.position, nbytes, (request, transfer))
            if request.kind is Kind.PUSH:
                self._storing.append(request)

    def nbytes(self, item: tuple[Request, SliceTransfer]) -> int:
        """Return the bytes of a slice that is pushed, 0 if it is pulled."""
        request, transfer = item
        return 0 if request.kind is Kind.PULL else transfer.nbytes

    def post(self, flow: Flow, item: tuple[Request, SliceTransfer]) -> Posted:
        """Push or pull one slice."""
        request, transfer = item
        posted = self._mailbox.post(_route(flow), request.kind, self.nbytes(item), transfer.ids)
        if request.kind is Kind.PUSH:
            request.posted.append(posted)
        return posted

    def complete_stored(self) -> None:
        """Complete slices that were stored and have arrived."""
        for request in list(self._storing):
            if len(request.posted) == len(request.transfers) and all(
                p.arrived for p in request.posted
            ):
                self._storing.remove(request)
                self._end(request)

    def _end(self, request: Request) -> None:
        request.over = True
        for resume in request.waiters:
            self._agenda.at(self._agenda.now, resume)
        request.waiters.clear()


@dataclass(eq=False, slots=True)
class Answer:
    """A sum for a worker, with its size in bytes once it is complete; None until then."""

    worker: int
    ids: Ids
    nbytes: int | None = None


@dataclass(slots=True)
class Total:
    """A slice: `wingbeat.methods.parameter_server.aggregator.Accumulator` without data.

    ``round`` is the current or latest sum, to which ``added`` workers were added in rank order;
    ``waiting`` workers arrived before their turn. ``done`` is the last complete sum, which can be
    pulled until the next one is complete.
    """

    round: int = -1
    added: int = 0
    waiting: set[int] = field(default_factory=set)
    done: int = -1
    nbytes: int = 0
    answers: list[Answer] = field(default_factory=list)


class SimulatedServer(SimulatedThread[Answer]):
    """The loop of a `wingbeat.methods.parameter_server.server.Server`, with the same rules.

    ``sizes`` has for each slice the float32 bytes of its gradients, and the encoded bytes of its
    sum.
    """

    at_once = 32

    def __init__(
        self,
        agenda: Agenda,
        cores: Cores,
        mailbox: Mailbox,
        work: Work,
        order: Order,
        byte_s: float,
        workers: int,
        sizes: Sequence[tuple[int, int]],
        coding: Coding,
    ) -> None:
        super().__init__(agenda, cores, mailbox, work, order, byte_s)
        self._workers, self._sizes = workers, sizes
        self._add_s = work.add_s_per_byte + coding.decode_s_per_byte
        self._encode_s = coding.encode_s_per_byte
        self._forward = order is Order.FORWARD
        self._totals: dict[int, Total] = {}

    def process(self, message: Message) -> Iterator[float]:
        """Add pushed gradients; record or answer a pull."""
        ids, worker = Ids(*message.ids), message.peer
        total = self._totals.setdefault(ids.slice, Total())
        if message.kind == Kind.PULL:
            self._pull(total, worker, ids)
            return
        if message.kind == Kind.PUSH_PULL:
            total.answers.append(Answer(worker, ids))
        dense, back = self._sizes[ids.slice]
        yield self._push(total, worker, ids, message.nbytes) * dense * self._add_s
        if total.added == self._workers:
            if back < dense:
                yield dense * self._encode_s
            total.done = total.round
            answers, total.answers = total.answers, []
            for answer in answers:
                answer.nbytes = back
                if not self._forward or message.kind == Kind.PUSH_PULL:
                    self._enqueue(answer)

    def _push(self, total: Total, worker: int, ids: Ids, nbytes: int) -> int:
        """Record pushed gradients; return how many workers' gradients can be added now."""
        if ids.round == total.round + 1 and total.done == total.round:
            total.round, total.added, total.nbytes = ids.round, 0, nbytes
        assert (ids.round, nbytes) == (total.round, total.nbytes), (ids, total)
        assert worker >= total.added, f"rank {worker} pushed {ids} twice"
        assert worker not in total.waiting, f"rank {worker} pushed {ids} twice"
        total.waiting.add(worker)
        before = total.added
        while total.added in total.waiting:
            total.waiting.remove(total.added)
            total.added += 1
        return total.added - before

    def _pull(self, total: Total, worker: int, ids: Ids) -> None:
        assert ids.round in (total.done, total.done + 1), (ids, total)
        answer = Answer(worker, ids)
        if ids.round == total.done:
            answer.nbytes = self._sizes[ids.slice][1]
        else:
            total.answers.append(answer)
        if answer.nbytes is not None or self._forward:
            self._enqueue(answer)

    def _enqueue(self, answer: Answer) -> None:
        nbytes = MAX_HEADER_BYTES + (LIMITS.message if answer.nbytes is None else answer.nbytes)
        route = answer.ids.route
        flow = Flow(answer.worker, urgency_of(route), link_of(route))
        self._queue.enqueue(flow, position_of(route), nbytes, answer)

    def ready(self, item: Answer) -> bool:
        """Whether the sum is complete."""
        return item.nbytes is not None

    def nbytes(self, item: Answer) -> int:
        """Return the bytes of the sum."""
        return item.nbytes or 0

    def post(self, flow: Flow, item: Answer) -> Posted:
        """Send a sum."""
        return self._mailbox.post(_route(flow), Kind.SUM, self.nbytes(item), item.ids)


# -- the exchange ----------------------------------------------------------------------------


def planner_of(
    options: Servers, servers: int, rank: int, buckets: Buckets, links: int, coding: Coding
) -> RequestPlanner:
    """Return the planner of a worker's requests, with the slices of a real run."""
    planner = RequestPlanner(options, servers, rank, (1 / links,) * links)
    largest = LIMITS.message // ITEMSIZE
    if coding.ratio < 1:  # a header is added, and sums may be dense
        largest = (LIMITS.message - PAYLOAD_HEADER_BYTES) // ITEMSIZE
    planner.set_buckets(
        buckets.numel, buckets.forward, buckets.fully_connected, buckets.places, largest
    )
    return planner


class ServerExchange(Exchange):
    """One worker's pushes and pulls.

    ``rank`` seeds the random order of pulls. Servers are numbered after the ``workers``.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        options: Servers,
        servers: int,
        buckets: Buckets,
        client: SimulatedClient,
        links: int,
        coding: Coding,
    ) -> None:
        self._workers, self._client = workers, client
        self._coding, self._dense = coding, options.dense
        self._planner = planner_of(options, servers, rank, buckets, links, coding)
        self._last: dict[int, Request] = {}

    def sizes(self) -> list[tuple[int, int]]:
        """Return for each slice the bytes of its gradients, and the encoded bytes of its sum."""
        return [(len(each) * ITEMSIZE, self._back(each)) for each in self._planner.slices()]

    def _out(self, each: Slice) -> int:
        return math.ceil(len(each) * self._coding.ratio) * ITEMSIZE

    def _back(self, each: Slice) -> int:
        return len(each) * ITEMSIZE if self._dense else self._out(each)

    def start(self, operation: Operation, bucket: int, chained: bool) -> None:  # noqa: ARG002
        """Start to push or pull a bucket; servers maintain the order themselves."""
        for number in self._planner.begin(operation, bucket):
            self._begin(KIND_OF[operation], number)

    def under_way(self, bucket: int) -> Sequence[Request]:
        """Return the operation that was started last on a bucket."""
        return [self._last[bucket]] if bucket in self._last else []

    def _begin(self, kind: Kind, bucket: int) -> None:
        transfers = [
            SliceTransfer(
                self._workers + each.slice.server,
                each.ids,
                self._out(each.slice),
                self._back(each.slice),
                len(each.slice) * ITEMSIZE,
                each.urgency,
                each.position,
            )
            for each in self._planner.requests(bucket)
        ]
        self._last[bucket] = self._client.start(kind, transfers)


def build_exchanges(options: Servers, context: SimulationContext) -> SimulatedExchanges:
    """Start the servers in host order, and connect every worker to them."""
    layout, links, work, agenda = context.layout, context.links, context.work, context.agenda
    workers, coding = layout.workers, context.coding
    hosts, columns = len(layout.hosts), context.columns
    servers = options.count or -(-hosts // columns)
    first = context.column * servers  # each column begins with another host

    def host(number: int) -> int:
        if number < workers:
            return layout.host_of[number]
        return (first + number - workers) % hosts

    interfaces = Interfaces(
        agenda, links, host, traffic=context.traffic, ports=context.ports, column=context.column
    )
    mailboxes = Mailboxes(agenda, interfaces, options.classes, links.count)
    numbers = range(workers, workers + servers)
    order = Order(options.sending)
    byte_s = work.byte_s(options.encrypted)
    exchanges = []
    for rank in range(workers):
        pushes = Order.URGENT if order is Order.URGENT else Order.READY
        client = SimulatedClient(
            agenda,
            context.cores[host(rank)],
            mailboxes.create(rank, numbers),
            work,
            pushes,
            byte_s,
            coding,
        )
        exchanges.append(
            ServerExchange(
                rank, workers, options, servers, context.buckets, client, links.count, coding
            )
        )
    sizes = exchanges[0].sizes()
    for number in numbers:
        mailbox = mailboxes.create(number, range(workers))
        cores = context.cores[host(number)]
        SimulatedServer(agenda, cores, mailbox, work, order, byte_s, workers, sizes, coding)
    mailboxes.connect()
    return SimulatedExchanges(exchanges, mailboxes)


# -- thresholds ------------------------------------------------------------------------------


class Thresholds:
    """Iteration times of a strategy with servers, by the thresholds between its classes.

    Each division is simulated once.

    Args:
        model: layers and their times.
        strategy: with servers; the number of its classes matters, its thresholds do not.
        workers: number of workers.
        links: network interfaces.
        work: cost of communication in processor time.
        iterations: iterations of each run; the first does not count.

    Attributes:
        layers: number of layers; 1 if all are one bucket.
        classes: number of classes.

    Raises:
        UsageError: the strategy has no servers, or no classes that thresholds divide.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        workers: int,
        links: Links,
        *,
        work: Work | None = None,
    ) -> None:
        servers = strategy.exchange
        if not isinstance(servers, Servers) or not servers.levels:
            raise UsageError(
                "simulator.Thresholds(): no thresholds divide the classes of this strategy; use "
                "Geryon() or another ParameterServer with classes=2 or more"
            )
        buckets = buckets_of(model, strategy.plan.fusion())
        self.layers = buckets.places.layers if len(buckets.forward) > 1 else 1
        self.classes = servers.classes

        def simulated(cuts: Cuts) -> float:
            levels = thresholds_from_cuts(cuts, self.layers, self.classes)
            own = replace(strategy, exchange=replace(servers, threshold=levels, file=""))
            run = simulate(model, own, workers, links, work=work, iterations=3)
            return run.median_s

        self._simulated = cache(simulated)

    def seconds(self, thresholds: Sequence[float]) -> float:
        """Return the median iteration in seconds with these thresholds."""
        return self._simulated(cuts_from_thresholds(thresholds, self.layers))

    def sweep(self, thresholds: Iterable[float]) -> dict[float, float]:
        """Return the median iteration in seconds for each of several thresholds of two classes."""
        return {level: self.seconds((level,)) for level in thresholds}

    def all_levels(self) -> list[float]:
        """Return one threshold for each division into two classes, the most urgent level first."""
        return [
            level
            for place in range(self.layers)
            for level in thresholds_from_cuts((place,) if place else (), self.layers, 2)
        ]

    def tuned(self) -> ThresholdResult:
        """Return the choice of a real run's tuner for these times, which have no noise."""
        if self.layers < 2:
            return untuned(self.layers, self.classes)
        start = thresholds_from_cuts((), self.layers, self.classes)
        trial = threshold_trial(self.layers, start, steps=1, rank=0, ranks=(0,))
        seconds = 0.0
        while not trial.done:
            trial.process_rows([trial.report(seconds)])
            seconds = self._simulated(trial.candidate)
        assert trial.result is not None
        return trial.result
