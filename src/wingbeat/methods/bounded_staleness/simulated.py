"""Training under bounded staleness in virtual time: two threads of a worker, sizes, and the result.

`wingbeat.simulator` has the clock, the network and the run; the state machines are those of a real
run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from wingbeat import topologies
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.messages import (
    Envelope,
    Message,
    Piece,
    PieceSum,
    Progress,
    encode_frame,
)
from wingbeat.methods.bounded_staleness.simulated_pool import PoolMember, WorkerPool
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.planning import plans
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Coding, Links, Traffic, Work
from wingbeat.simulator.interfaces import Interfaces, Paths, Stream, bcube, star
from wingbeat.simulator.mailbox import LIMITS
from wingbeat.simulator.model import ITEMSIZE, Model
from wingbeat.simulator.processors import Busy, Cores
from wingbeat.simulator.run import Sleeps
from wingbeat.transport.membership import initial_view
from wingbeat.transport.messages.frames import HEADER_BYTES
from wingbeat.types import Fusion

_TYPICAL = 100
"""Number of a typical iteration."""


# -- the result ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StaleRun:
    """A run until all replicas have applied the requested number of contributions.

    A contribution is the gradients of one worker in one iteration; if only some colayers were sent,
    it counts for these.

    Attributes:
        seconds: until the last replica had applied them.
        iterations: by worker, iterations begun.
        dropped: by worker, iterations that ended by the rule before all colayers were sent.
        lost: contributions that these have not sent.
        rounds: rounds applied by worker 0: steps of its optimizer.
        waited_s: by worker, seconds for which its training waited for others.
        lags: histogram of the iterations by which the fastest known worker is ahead at the end of
            an iteration that was not dropped.
        delays: histogram of staleness in steps: of contributions that worker 0 applied, the steps
            by which its parameters were ahead of those used to compute them. 0 in BSP.
        begun: by worker and begun iteration, its time, and the contributions applied by then, in
            iterations of all workers.
    """

    seconds: float
    iterations: tuple[int, ...]
    dropped: tuple[int, ...]
    lost: float
    rounds: int
    waited_s: tuple[float, ...]
    lags: Mapping[int, int]
    delays: Mapping[int, float]
    begun: tuple[tuple[tuple[float, float], ...], ...] = ()


class RunRecorder:
    """Records the progress of workers, and stops the agenda at ``target`` contributions."""

    def __init__(self, agenda: Agenda, workers: int, colayers: int, target: float) -> None:
        self._agenda, self._colayers, self._target = agenda, colayers, target
        self.iterations = [0] * workers
        self.rounds = [0] * workers
        self.waited_s = [0.0] * workers
        self._dropped = [0] * workers
        self._lost = 0  # colayers of dropped iterations
        self._applied = [0] * workers  # in entries: a piece of a colayer of a contribution
        self._reached = [False] * workers
        self._lags: Counter[int] = Counter()
        self._delays: Counter[int] = Counter()
        self._begun: dict[tuple[int, int], int] = {}
        self._moments: list[list[tuple[float, int]]] = [[] for _ in range(workers)]
        self._pieces = 1

    @property
    def whole(self) -> bool:
        """Whether all replicas have applied the requested contributions."""
        return all(self._reached)

    def began(self, worker: int, iteration: int) -> None:
        """Record the begin of an iteration."""
        self.iterations[worker] += 1
        self._begun[iteration, worker] = self.rounds[worker]
        self._moments[worker].append((self._agenda.now, self._applied[worker]))

    def ended(self, lag: int) -> None:
        """Record the end of an iteration, ``lag`` iterations behind the fastest."""
        self._lags[lag] += 1

    def dropped(self, worker: int, sent: int) -> None:
        """Record an iteration that has ended by the rule, after ``sent`` of its colayers."""
        self._dropped[worker] += 1
        self._lost += self._colayers - sent

    def applied(self, worker: int, parts: Sequence[PieceSum]) -> None:
        """Record an applied round."""
        self._pieces = len(parts) // self._colayers
        self._applied[worker] += sum(len(part.entries) for part in parts)
        if worker == 0:
            number = self.rounds[0]
            for part in parts:
                for entry in part.entries:
                    self._delays[number - self._begun[entry]] += 1
        self.rounds[worker] += 1
        unit = self._colayers * self._pieces
        if not self._reached[worker] and self._applied[worker] >= self._target * unit:
            self._reached[worker] = True
            if self.whole:
                self._agenda.stop()

    def run(self) -> StaleRun:
        """Return the result."""
        k = self._colayers
        unit = k * self._pieces
        return StaleRun(
            self._agenda.now,
            tuple(self.iterations),
            tuple(self._dropped),
            self._lost / k,
            self.rounds[0],
            tuple(self.waited_s),
            dict(sorted(self._lags.items())),
            {delay: count / unit for delay, count in sorted(self._delays.items())},
            tuple(
                tuple((when, applied / unit / len(self.rounds)) for when, applied in each)
                for each in self._moments
            ),
        )


# -- colayers and sizes of frames ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bundled:
    """A model in colayers, the last layers first; times in seconds for one batch.

    ``backward_s`` is by colayer, from the end of the previous one; ``rest_s`` is backward after the
    last. ``numel`` and ``tensors`` count elements and parameters by colayer.
    """

    forward_s: float
    backward_s: tuple[float, ...]
    rest_s: float
    numel: tuple[int, ...]
    tensors: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Seconds of an iteration without waiting."""
        return self.forward_s + sum(self.backward_s) + self.rest_s


def bundled(model: Model, count: int, *, measured: bool = False) -> Bundled:
    """Group a model's layers into ``count`` colayers as training does.

    Raises:
        UsageError: the model has fewer layers with parameters.
    """
    plan = plans.make_plan(
        Fusion(kind="colayers", layers=count),
        model.tensors,
        model.ready_order,
        model.measured if measured else None,
    )
    tensors = [bucket.tensors for bucket in plan.buckets]
    if len(tensors) < count:
        raise UsageError(
            f"colayers={count}; allowed: up to {len(tensors)}, as many as the model has layers"
        )
    last = {each[-1] for each in tensors}
    seconds, ends = 0.0, []
    for layer in reversed(model.layers):
        seconds += layer.backward_s
        if last.intersection(layer.tensors):
            ends.append(seconds)
            seconds = 0.0
    return Bundled(
        sum(layer.forward_s for layer in model.layers),
        tuple(ends),
        seconds,
        tuple(sum(model.tensors[t].numel for t in each) for each in tensors),
        tuple(map(len, tensors)),
    )


class FrameSize(NamedTuple):
    """The size of a message in bytes, headers included, and in messages of the message layer."""

    nbytes: int
    parts: int

    def handled_s(self, work: Work) -> float:
        """Return the seconds in which a communication thread sends or receives it."""
        return self.parts * work.message_s + self.nbytes * work.message_s_per_byte


class FrameSizes:
    """Sizes of the messages that a communication thread sends.

    ``numel`` and ``pieces`` are elements and size of a `Piece` by colayer, ``progress`` the size of
    a `Progress`.
    """

    def __init__(self, model: Bundled, workers: int, coding: Coding) -> None:
        self.numel = tuple(-(-numel // workers) for numel in model.numel)
        self._flags, self._ratio = model.tensors, coding.ratio
        view, first = initial_view(workers), (_TYPICAL,) * workers
        number = _TYPICAL
        self.progress = _frame_size(
            _words(Progress(number, number, number, False, number, view)), 0
        )
        words = _words(Piece(number, 0, workers - 1, view))
        self.pieces = tuple(_frame_size(words, self._payload(z)) for z in range(len(self.numel)))

        def length(entries: Sequence[tuple[int, int]]) -> int:
            return _words(PieceSum(0, workers - 1, number, tuple(entries), first, view))

        entry = number, workers - 1
        self._entry = length([entry, entry]) - length([entry])
        self._empty = length([entry]) - self._entry

    def of(self, message: Message) -> FrameSize:
        """Return the size of a message."""
        match message:
            case PieceSum():
                return self.round(message.colayer, len(message.entries))
            case Piece():
                return self.pieces[message.colayer]
        return self.progress

    def round(self, colayer: int, entries: int) -> FrameSize:
        """Return the size of the sum of ``entries`` contributions."""
        payload = self._payload(colayer) if entries else 0
        return _frame_size(self._empty + entries * self._entry, payload)

    def _payload(self, colayer: int) -> int:
        return int(self.numel[colayer] * ITEMSIZE * self._ratio) + self._flags[colayer]


def _words(message: Message) -> int:
    return len(encode_frame(message, 0).header)


def _frame_size(words: int, payload: int) -> FrameSize:
    parts = 1
    if words + payload > LIMITS.message:
        parts += -(-payload // LIMITS.message)
    return FrameSize(words + payload + HEADER_BYTES * parts, parts)


# -- the threads of a worker -----------------------------------------------------------------


class SimulatedThread:
    """Receives all arrived messages, then sends all pending ones, as the real thread does.

    Messages and sums take time, during which the thread processes no events.
    """

    def __init__(
        self,
        machine: Worker,
        sizes: FrameSizes,
        coding: Coding,
        work: Work,
        agenda: Agenda,
        cores: Cores,
        interfaces: Interfaces,
        threads: Sequence[SimulatedThread],
    ) -> None:
        self.machine, self._sizes, self._work = machine, sizes, work
        self._agenda, self._cores, self._interfaces, self._threads = (
            agenda,
            cores,
            interfaces,
            threads,
        )
        self._add_s = tuple(
            numel * ITEMSIZE * (work.add_s_per_byte + coding.decode_s_per_byte)
            for numel in sizes.numel
        )
        self._encode_s = tuple(n * ITEMSIZE * coding.encode_s_per_byte for n in sizes.numel)
        self._arrived: deque[tuple[int, Message, FrameSize]] = deque()
        self._resting = self._slept = True
        self._thread = self._run()
        self.received: Callable[[], None] = lambda: None

    def wake(self) -> None:
        """Wake the thread to process pending work."""
        if self._resting and (self._arrived or self.machine.outbox):
            self._resting = False
            self._agenda.at(self._agenda.now, self._advance)

    def _advance(self) -> None:
        for seconds in self._thread:
            if seconds is None:
                self._resting = self._slept = True
                return
            if seconds > 0:
                woken, self._slept = self._slept, False
                self._cores.work(seconds, self._advance, woken)
                return

    def _run(self) -> Iterator[float | None]:
        while True:
            while self._arrived:
                sender, message, size = self._arrived.popleft()
                yield size.handled_s(self._work)
                self.machine.receive(sender, 0, message)
                self.received()
            while self.machine.outbox:
                yield from self._send(self.machine.outbox.popleft())
            if not self._arrived:
                yield None

    def _send(self, post: Envelope) -> Iterator[float]:
        message = post.message
        size = self._sizes.of(message)
        if isinstance(message, PieceSum) and message.entries:
            z = message.colayer
            yield len(message.entries) * self._add_s[z] + self._encode_s[z]
        for to in post.to:
            yield size.handled_s(self._work)
            self._carry(to, message, size)

    def _carry(self, to: int, message: Message, size: FrameSize) -> None:
        other, me = self._threads[to], self.machine.rank

        def arrived() -> None:
            other._arrived.append((me, message, size))
            other.wake()

        self._interfaces.carry(Stream(me, to, 0), size.nbytes, arrived)


class TrainedMachine(Protocol):
    """The methods of `wingbeat.methods.bounded_staleness.worker.Worker` that training calls.

    ``iteration`` is the current or requested iteration, ``zeta`` the latest that any worker has
    entered.
    """

    iteration: int
    zeta: int

    def can_begin(self) -> bool:
        """Whether the requested iteration may be computed."""

    def begin_iteration(self) -> int:
        """Enter the requested iteration and return it."""

    def send_colayer(self, colayer: int, payloads: Sequence[Any]) -> bool:
        """Send the pieces of a colayer; return whether they were sent."""

    def end_iteration(self) -> None:
        """End the iteration."""

    def take_round(self) -> tuple[PieceSum, ...] | None:
        """Return the next round to apply."""


class SimulatedTraining:
    """Runs iterations as the machine permits.

    The backward of a dropped iteration runs to its end, because autograd cannot be stopped.
    ``cores`` run the copying of gradients and the updates; the model itself runs on a device.
    """

    def __init__(
        self,
        rank: int,
        machine: TrainedMachine,
        sent: Callable[[], None],
        model: Bundled,
        coding: Coding,
        workers: int,
        work: Work,
        agenda: Agenda,
        cores: Cores,
        log: RunRecorder,
        sleeps: Sleeps,
    ) -> None:
        self._cores = cores
        self._rank, self._machine, self._sent = rank, machine, sent
        self._model, self._agenda, self._log, self._sleeps = model, agenda, log, sleeps
        self._payloads = (None,) * workers
        fill_s = work.fill_s_per_byte + coding.encode_s_per_byte
        self._fill_s = tuple(Busy(numel * ITEMSIZE * fill_s) for numel in model.numel)
        step_s = work.update_s_per_byte + coding.decode_s_per_byte
        self._step_s = Busy(sum(model.numel) * ITEMSIZE * step_s)
        self._since: float | None = None
        self._slept = False
        self._thread = self._train()
        agenda.at(agenda.now, self._advance)

    def received(self) -> None:
        """Check again whether a waiting iteration may begin."""
        if self._since is not None:
            self._log.waited_s[self._rank] += self._agenda.now - self._since
            self._since = None
            self._advance()

    def _advance(self) -> None:
        for seconds in self._thread:
            if seconds is None:
                self._since, self._slept = self._agenda.now, True
                return
            if isinstance(seconds, Busy) and seconds > 0:
                woken, self._slept = self._slept, False
                self._cores.work(seconds, self._advance, woken)
                return
            if seconds > 0:
                self._slept = True
                self._agenda.at(self._agenda.now + seconds, self._advance)
                return

    def _train(self) -> Iterator[float | None]:
        count = 0
        while True:
            count += 1
            yield from self._between()
            self._log.began(self._rank, self._machine.begin_iteration())
            self._sent()
            yield self._sleeps(self._rank, count)
            yield self._model.forward_s
            yield from self._backward()

    def _between(self) -> Iterator[float | None]:
        """Apply arrived rounds, and wait until the staleness bound permits the next iteration."""
        while True:
            while (parts := self._machine.take_round()) is not None:
                yield self._step_s
                self._log.applied(self._rank, parts)
                self._sent()
            if self._machine.can_begin():
                return
            yield None

    def _backward(self) -> Iterator[float]:
        sends = True
        for colayer, seconds in enumerate(self._model.backward_s):
            yield seconds
            if sends:
                yield self._fill_s[colayer]
            before, sends = sends, self._machine.send_colayer(colayer, self._payloads)
            if before and not sends:
                self._log.dropped(self._rank, colayer)
            self._sent()
        yield self._model.rest_s
        if sends:
            self._log.ended(self._machine.zeta - self._machine.iteration)
        self._machine.end_iteration()
        self._sent()


NETWORKS = ("star", "bcube")


def simulate_bounded(
    model: Model,
    bound: StalenessBound,
    workers: int,
    links: Links,
    *,
    gradients: float,
    network: str = "star",
    coding: Coding | None = None,
    work: Work | None = None,
    sleeps: Sleeps | None = None,
    traffic: Traffic | None = None,
    pool: bool = False,
    cores: int | None = None,
    measured: bool = False,
    encrypted: bool = False,
) -> StaleRun:
    """Train ``model`` in virtual time until all replicas have applied ``gradients`` contributions.

    Runs are deterministic: equal arguments give bit-identical results.

    Args:
        model: layers and their times.
        bound: staleness s, proportion p and the number of colayers k.
        workers: number of workers, at least 2.
        links: network interfaces. With several interfaces of a star each message is divided.
        gradients: number of contributions, each of one worker and one iteration, over all workers.
        network: ``"star"``, or ``"bcube"``, where hosts forward messages between switches.
        coding: encoding of gradients; dense by default.
        work: cost of communication in processor time.
        sleeps: by rank and iteration, counted from 1, seconds for which a worker sleeps before it.
        traffic: records the bytes that leave the workers.
        pool: let one owner of pieces represent all (`simulated_pool`). An approximation
            for more than about 30 workers; the exact simulation has ``2 k n**2`` messages a round.
        cores: processors that the hosts share, as in a lab on one machine; by default each thread
            of each host has its own. Ignored with ``pool``.
        measured: whether colayers are formed from measurements from the beginning on.
        encrypted: whether messages are encrypted, which takes `Work.encrypt_s_per_byte`.

    Raises:
        UsageError: a number or a name is out of range.
    """
    if workers < 2 or gradients <= 0:
        raise UsageError(
            f"simulate_bounded(workers={workers}, gradients={gradients:g}): 2 workers or more, and "
            "more than 0 gradients"
        )
    if network not in NETWORKS:
        raise UsageError(f"simulate_bounded(network={network!r}): allowed are {NETWORKS}")
    colayers = bundled(model, bound.colayers, measured=measured)
    work = work or Work()
    work = replace(work, message_s_per_byte=work.byte_s(encrypted))
    job = _Job(colayers, bound, workers, links, coding or Coding(), work)
    if cores is not None and (pool or cores < 1):
        raise UsageError(f"simulate_bounded(cores={cores}): 1 or more, and without pool=True")
    if not links.alike and (pool or network != "star"):
        raise UsageError(
            f"simulate_bounded(network={network!r}, pool={pool}): hosts with different links, or "
            'leaf switches, need network="star" and pool=False'
        )
    agenda = Agenda()
    shared = Cores(agenda, cores, work.wake_s)
    log = RunRecorder(agenda, workers, bound.colayers, gradients)
    if pool:
        machines = job.pool(network, agenda, traffic)
    else:
        machines = job.each_worker(network, agenda, shared, traffic)
    for rank, (machine, sent, receiver) in enumerate(machines):
        training = SimulatedTraining(
            rank,
            machine,
            sent,
            job.model,
            job.coding,
            1 if pool else workers,
            job.work,
            agenda,
            shared,
            log,
            sleeps or (lambda _rank, _iteration: 0.0),
        )
        receiver.received = training.received
    agenda.run()
    assert log.whole, "all workers wait for each other"
    return log.run()


_Simulated = tuple[TrainedMachine, Callable[[], None], SimulatedThread | PoolMember]
"""A machine, the callback after sending, and what calls the training after it has received."""


@dataclass(frozen=True, slots=True)
class _Job:
    model: Bundled
    bound: StalenessBound
    workers: int
    links: Links
    coding: Coding
    work: Work

    @property
    def sizes(self) -> FrameSizes:
        return FrameSizes(self.model, self.workers, self.coding)

    def each_worker(
        self, network: str, agenda: Agenda, cores: Cores, traffic: Traffic | None
    ) -> Sequence[_Simulated]:
        interfaces = Interfaces(agenda, self.links, lambda n: n, self._paths(network), traffic)
        threads: list[SimulatedThread] = []
        sizes = self.sizes
        for rank in range(self.workers):
            machine = Worker(rank, self.workers, self.bound, lambda *_: None)
            threads.append(
                SimulatedThread(
                    machine, sizes, self.coding, self.work, agenda, cores, interfaces, threads
                )
            )
        for thread in threads:
            agenda.at(0.0, thread.wake)
        return [(thread.machine, thread.wake, thread) for thread in threads]

    def _paths(self, network: str) -> Paths:
        if network == "star":
            return star(self.links.count)
        return bcube(self._cube())

    def _cube(self) -> topologies.BCube:
        return topologies.BCube().fitted(self.workers, self.links.count)

    def pool(self, network: str, agenda: Agenda, traffic: Traffic | None) -> Sequence[_Simulated]:
        hops = 1.0
        if network == "bcube":
            cube = self._cube()
            away = [sum(map(bool, _digits(cube, other))) for other in range(1, self.workers)]
            hops = sum(away) / len(away)
        owners = WorkerPool(
            self.bound, self.workers, self.links, hops, self.sizes, self.coding, self.work,
            agenda, traffic,
        )  # fmt: skip
        return [(member, lambda: None, member) for member in owners.members]


def _digits(cube: topologies.BCube, rank: int) -> list[int]:
    return [cube.digit(rank, level) for level in range(cube.levels)]
