"""Simulate training with the schedules and state machines of a real run on a described cluster."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from wingbeat import schedules
from wingbeat.compression import options_of
from wingbeat.errors import UsageError
from wingbeat.parts.strategy import Strategy
from wingbeat.schedules.events import (
    Announce,
    Await,
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Command,
    Event,
    Operation,
    ParametersNeeded,
    Place,
    Planned,
    Schedule,
    Start,
    Step,
    StepCalled,
    Update,
    UpdateOwn,
    Wait,
)
from wingbeat.schedules.intents import Answer, Intent
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import (
    SHORTEST_WAIT_S,
    SLACK_S,
    Coding,
    Links,
    Traffic,
    Work,
    coding_of,
)
from wingbeat.simulator.codecs import Slowed
from wingbeat.simulator.exchange import Collectives, Exchange, SimulationContext, Waitable
from wingbeat.simulator.merging import merged_buckets
from wingbeat.simulator.model import ITEMSIZE, Buckets, Model, buckets_of, layers_of, shard_of
from wingbeat.simulator.network import LOCAL, GroupNetwork, Network, Wires
from wingbeat.simulator.processors import Busy, Cores
from wingbeat.topologies import Ring
from wingbeat.traits import KEPT
from wingbeat.types import Layout

Pause = float | Waitable
"""What a training thread waits for: seconds, or an operation."""

Sleeps = Callable[[int, int], float]
"""Maps a worker and an iteration, counted from 1, to the seconds of sleep before it."""

RecordAction = Callable[[float, int, str, int], None]
"""Called with time, rank, action, and bucket (-1: none)."""


class Worker:
    """Runs iterations of forward, backward and step with its schedule.

    ``slow`` is a factor of the layers' times, which need no processor of ``cores``. ``shards``:
    each worker updates one of so many parts of a bucket; 0: all of it. ``inside`` exchanges the
    layers, by number, with the other processes of a replica; they have so many elements, ``sizes``.
    """

    def __init__(
        self,
        rank: int,
        model: Model,
        buckets: Buckets,
        schedule: Schedule,
        exchange: Exchange,
        work: Work,
        agenda: Agenda,
        record: RecordAction,
        cores: Cores,
        slow: float = 1.0,
        sleeps: Sleeps = lambda _rank, _iteration: 0.0,
        shards: int = 0,
        inside: Exchange | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._rank, self._model, self._buckets = rank, model, buckets
        self._schedule, self._exchange = schedule, exchange
        self._work, self._agenda, self._record = work, agenda, record
        self._cores, self._slow, self._sleeps, self._shards = cores, slow, sleeps, shards
        self._inside, self._sizes = inside, sizes
        # The device's time, and when the training thread last returned to the model.
        self._due = self._left = 0.0
        self._announced: tuple[Intent, frozenset[int], Sequence[Waitable]] | None = None
        self.ends: list[float] = []
        self.waited: list[float] = []
        self._waited_s = 0.0
        self._slept = False  # since it last had a processor
        self._thread: Iterator[Pause] = iter(())

    def begin(self, iterations: int) -> None:
        """Start training now."""
        self._thread = self._train(iterations)
        self._agenda.at(self._agenda.now, self._advance)

    def check_finished(self, iterations: int) -> None:
        """Check that this worker has ended all iterations."""
        assert len(self.ends) == iterations, (
            f"rank {self._rank} waits for ever in iteration {len(self.ends)}: the workers' "
            "collectives do not match"
        )

    def _advance(self) -> None:
        for pause in self._thread:
            if isinstance(pause, Busy):
                if pause > 0:
                    woken, self._slept = self._slept, False
                    if not self._cores.spend(pause, self._advance, woken):
                        return
            elif isinstance(pause, (int, float)):
                after = self._agenda.now + pause
                if pause > 0:
                    self._slept = True
                    if not self._agenda.skip(after):
                        self._agenda.at(after, self._advance)
                        return
            elif not pause.over:
                self._slept = True
                pause.when_over(partial(self._waited, self._agenda.now))
                return

    def _waited(self, since: float) -> None:
        self._waited_s += self._agenda.now - since
        self._advance()

    def _train(self, iterations: int) -> Iterator[Pause]:
        numbers = iter(range(sum(self._buckets.members)))
        members = tuple(frozenset(islice(numbers, n)) for n in self._buckets.members)
        used = frozenset().union(*members)
        yield from self._notify(Planned(self._buckets.forward, members))
        for iteration in range(1, iterations + 1):
            yield self._sleeps(self._rank, iteration)
            yield from self._forward()
            yield from self._backward()
            yield from self._notify(StepCalled(used=used))
            self.ends.append(self._agenda.now)
            self.waited.append(self._waited_s)
            self._waited_s = 0.0
        yield from self._notify(ParametersNeeded(self._buckets.forward))

    def _compute(self, seconds: float, launch_s: float) -> Iterator[Pause]:
        """Compute on the device, whose queue the training thread fills meanwhile."""
        if not self._work.launch_s:
            yield seconds
            return
        if self._agenda.now - self._left > SLACK_S:
            late = max(0.0, self._left - self._due)
            self._due = max(self._due, self._agenda.now - late)
        yield Busy(launch_s)
        self._due += seconds
        yield from self._await_device(SHORTEST_WAIT_S)

    def _await_device(self, shortest_s: float) -> Iterator[Pause]:
        ahead_s = self._due - self._agenda.now
        if ahead_s > shortest_s:
            yield ahead_s
        self._left = self._agenda.now

    def _settle(self) -> Iterator[Pause]:
        """Wait for the device at the end of a pass."""
        if self._work.launch_s:
            yield from self._await_device(0.0)

    def _forward(self) -> Iterator[Pause]:
        self._due = self._left = self._agenda.now
        for number, layer in enumerate(self._model.layers):
            if layer.tensors:
                needed = dict.fromkeys(self._buckets.of[t] for t in layer.tensors)
                yield from self._notify(ParametersNeeded(tuple(needed)))
                yield from self._exchange_inside(Operation.ALL_GATHER, number)
            yield from self._compute(layer.forward_s * self._slow, self._work.launch_s)
        yield from self._settle()

    def _backward(self) -> Iterator[Pause]:
        self._due = self._left = self._agenda.now
        self._missing, self._ready, self._begun = list(self._buckets.members), 0, False
        last = len(self._model.layers) - 1
        for number, layer in zip(range(last, -1, -1), reversed(self._model.layers), strict=True):
            sizes = {t: self._model.tensors[t].numel for t in reversed(layer.tensors)}
            seconds = layer.backward_s * self._slow
            if not sizes or self._inside is not None:
                if sizes:
                    yield from self._exchange_inside(Operation.ALL_GATHER, number)
                yield from self._compute(seconds, 0.0)
                seconds = 0.0
            if sizes:
                yield from self._exchange_inside(Operation.REDUCE_SCATTER, number)
            for tensor, numel in sizes.items():
                share = seconds * numel / sum(sizes.values())
                yield from self._compute(share, self._work.launch_s)
                yield from self._filled(tensor)
        yield from self._settle()
        yield from self._notify(BackwardEnds())

    def _filled(self, tensor: int) -> Iterator[Pause]:
        """Count a gradient, and copy those of a bucket that is complete."""
        if not self._begun:
            self._begun = True
            yield from self._notify(BackwardBegins())
        bucket = self._buckets.of[tensor]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            count, numel = self._buckets.members[bucket], self._buckets.numel[bucket]
            work = self._work
            yield Busy(count * work.hook_s + numel * ITEMSIZE * work.fill_s_per_byte)
        while self._ready < len(self._missing) and self._missing[self._ready] == 0:
            yield from self._notify(BucketReady(self._ready))
            self._ready += 1

    def _exchange_inside(self, operation: Operation, layer: int) -> Iterator[Pause]:
        """Gather or sum a layer with the other processes of the replica."""
        if self._inside is not None:
            work, numel = self._work, self._sizes[layer]
            yield Busy(work.inside_s + numel * ITEMSIZE * work.inside_s_per_byte)
            self._inside.start(operation, layer, chained=False)
            yield from self._inside.under_way(layer)

    def _notify(self, event: Event) -> Iterator[Pause]:
        """Perform the commands of the schedule for ``event``."""
        commands, answer = self._schedule.react(event), None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration:
                return
            answer = yield from self._perform(command)

    def _perform(self, command: Command) -> Generator[Pause, None, Answer | None]:
        match command:
            case Start(operation, bucket, chained):
                yield Busy(self._work.start_s)
                yield from self._code(self._exchange.before(operation, bucket))
                self._record(self._agenda.now, self._rank, operation.value, bucket)
                self._exchange.start(operation, bucket, chained)
            case Wait(bucket):
                yield from self._exchange.under_way(bucket)
                yield from self._code(self._exchange.after(bucket))
            case Update(bucket):
                self._record(self._agenda.now, self._rank, "update", bucket)
                numel, count = self._buckets.numel[bucket], self._buckets.members[bucket]
                # A divided optimizer has updated them: gathered parameters are copied.
                yield self._copy_s(numel) if self._shards else self._update_s(numel, count)
            case UpdateOwn(bucket):
                numel, count = self._buckets.numel[bucket], self._buckets.members[bucket]
                yield self._update_s(numel / self._shards, count / self._shards)
            case Place(bucket):
                yield self._copy_s(self._buckets.numel[bucket] / self._shards)
            case Step():
                self._record(self._agenda.now, self._rank, "step", -1)
                yield self._update_s(sum(self._buckets.numel), sum(self._buckets.members))
            case Announce(intent, used):
                self._announced = intent, used, self._exchange.announce()
            case Await():
                assert self._announced is not None, "an announcement comes first"
                intent, used, rows = self._announced
                yield from rows
                return Answer((intent,) * self._shards, used)  # all workers do the same
        return None

    def _code(self, work: Slowed) -> Iterator[Pause]:
        """Encode or decode."""
        yield Busy(work.busy)
        yield work.idle

    def _update_s(self, numel: float, count: float) -> Busy:
        work = self._work
        own_s = work.step_s + count * work.update_s
        return Busy(own_s + numel * ITEMSIZE * work.update_s_per_byte)

    def _copy_s(self, numel: float) -> Busy:
        return Busy(numel * ITEMSIZE * self._work.fill_s_per_byte)


_TRIED = 3
"""Iterations of each plan of merged layers that is compared; the first does not count."""

Moment = tuple[float, int, str, int]
"""Time, rank, action, and bucket (-1: none)."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a simulated run.

    Attributes:
        iterations_s: seconds of each iteration of rank 0.
        waited_s: seconds of each in which rank 0's training thread waited for an exchange.
        trace: operations and updates, in order of time.
        bytes_per_host: bytes that a host sends to others in an iteration, the mean over the hosts.
            Headers of TCP and below are not counted.
        repeated: messages to and from servers that arrived twice because an acknowledgement was
            late and the sender retransmitted.
    """

    iterations_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    trace: tuple[Moment, ...]
    bytes_per_host: float
    repeated: int = 0

    @property
    def median_s(self) -> float:
        """Median iteration, without the first, in which no update is due."""
        return statistics.median(self.iterations_s[1:] or self.iterations_s)

    @property
    def exposed_s(self) -> float:
        """Median of the waits in an iteration: communication that nothing overlaps."""
        return statistics.median(self.waited_s[1:] or self.waited_s)


def simulate(
    model: Model,
    strategy: Strategy,
    workers: int,
    links: Links,
    *,
    work: Work | None = None,
    slow: Mapping[int, float] | None = None,
    sleeps: Sleeps | None = None,
    iterations: int = 4,
    schedule: Callable[[], Schedule] | None = None,
    traffic: Traffic | None = None,
    layout: Layout | None = None,
    local: Links = LOCAL,
    coding: Coding | None = None,
    cores: int | None = None,
    one_machine: bool = False,
    inside: int = 1,
) -> Run:
    """Train ``model`` for ``iterations`` iterations in virtual time.

    Runs are deterministic: equal arguments give bit-identical results.

    Args:
        model: layers and their times.
        strategy: the strategy. A codec is on, whatever its trial might decide, and after its
            warm-up.
        workers: number of workers.
        links: network interfaces.
        work: cost of communication in processor time.
        slow: by rank, factor of a worker's compute times. Without it all workers act identically,
            and only those of the first host are simulated, exchanging messages among themselves;
            with servers, or hosts of unequal numbers of workers, all workers are simulated.
        sleeps: by rank and iteration, counted from 1, seconds for which a worker sleeps before it;
            all workers are then simulated.
        iterations: number of iterations, at least 1.
        schedule: creates a worker's schedule; by default the strategy's.
        traffic: records the bytes that simulated workers, and servers on their hosts, send.
        layout: hosts of the workers, which share interfaces; by default one host for each worker.
        local: connections between workers of a host, with ``layout``. Servers on the same host are
            reached without delay.
        coding: encoding of gradients to servers and its cost; by default the strategy's on one
            core.
        cores: processors of each host, which the threads of its workers share; by default each
            thread has its own. The model itself runs on a device.
        one_machine: all hosts share ``cores``, as where one machine emulates them; all workers are
            then simulated.
        inside: processes of each worker, which is then a replica with a host of its own, divided by
            FSDP2: each layer is gathered by ``local`` before its forward and before its backward,
            and its gradients are reduced after it, without overlap with computation. Each process
            exchanges its shards with those of the same number in the other replicas. Ranks are
            numbered host by host.

    Raises:
        UsageError: a number is out of range, or the strategy cannot be simulated.
    """
    _check(strategy, workers, iterations, layout, coding, cores)
    if inside < 1 or (inside > 1 and layout is not None):
        raise UsageError(
            f"simulate(inside={inside}): 1 or more, and without layout=, as each replica has a host"
        )
    served = KEPT in strategy.exchange.has
    job = _Job(
        model,
        strategy,
        links,
        local,
        layout or Layout.even(workers, 1),
        work or Work(),
        coding or (coding_of(strategy.wire) if served else Coding()),
        cores,
        one_machine,
        slow or {},
        sleeps,
        schedule,
        inside,
    )
    divided = shard_of(model, inside)
    if strategy.plan.merging() is None:
        buckets = buckets_of(divided, strategy.plan.fusion())
    else:
        buckets = merged_buckets(
            divided, strategy, job.prepare, lambda tried: job.train(tried, _TRIED).median_s
        )
    return job.train(buckets, iterations, traffic)


def _check(
    strategy: Strategy,
    workers: int,
    iterations: int,
    layout: Layout | None,
    coding: Coding | None,
    cores: int | None,
) -> None:
    """Raise a `UsageError` for what `simulate` cannot do."""
    if workers < 1 or iterations < 1:
        raise UsageError(f"simulate(workers={workers}, iterations={iterations}): 1 or more")
    if layout is not None and layout.workers != workers:
        raise UsageError(f"simulate(workers={workers}): layout has {layout.workers}; give as many")
    if not strategy.exchange.lockstep:
        raise UsageError(
            "simulate(): workers that make iterations of their own (Bounded, Canary) are another "
            "simulation: simulate_bounded()"
        )
    served = KEPT in strategy.exchange.has
    options = options_of(strategy.wire)
    if strategy.update_part.on_servers or options.ends_after is not None:
        raise UsageError(
            'simulate(): servers that update (update="server") and a codec in a share of the '
            "iterations are not simulated yet; simulate one without"
        )
    if strategy.plan.choosing() is not None:
        raise UsageError(
            "simulate(): a choice by trial (Auto) is not simulated; simulate its candidates: "
            "AllReduce(), DeAR(plan='fixed')"
        )
    if cores is not None and cores < 1:
        raise UsageError(f"simulate(cores={cores}): 1 or more, or leave it out")
    if coding is not None and not served:
        raise UsageError("simulate(coding=): it is how gradients travel to servers; leave it out")
    if strategy.exchange.tuned:
        raise UsageError(
            "simulate(): thresholds are not tuned within a run; use "
            "simulator.Thresholds(...).tuned(), or threshold=NUMBER"
        )


@dataclass(frozen=True)
class _Job:
    model: Model
    strategy: Strategy
    links: Links
    local: Links
    layout: Layout
    work: Work
    coding: Coding
    cores: int | None
    one_machine: bool
    slow: Mapping[int, float]
    sleeps: Sleeps | None
    schedule: Callable[[], Schedule] | None
    inside: int

    def prepare(self, agenda: Agenda, buckets: Buckets) -> SimulationContext:
        """Return a new cluster, on which nothing has begun: one column, if replicas have some."""
        return self._columns(agenda, buckets, self._network(agenda, None), None)[0]

    def train(self, buckets: Buckets, iterations: int, traffic: Traffic | None = None) -> Run:
        """Simulate so many iterations on a new cluster."""
        agenda, trace = Agenda(), list[Moment]()
        traffic = traffic or Traffic()
        before = sum(traffic.sent.values())
        network = self._network(agenda, traffic)
        columns = self._columns(agenda, buckets, network, traffic)
        built = [self.strategy.exchange.build_simulated(each) for each in columns]
        simulated = [
            self._worker(rank, column, buckets, exchange, network, context, trace)
            for rank, exchanges in enumerate(zip(*(each.workers for each in built), strict=True))
            for column, (exchange, context) in enumerate(zip(exchanges, columns, strict=True))
        ]
        for worker in simulated:
            worker.begin(iterations)
        agenda.run()
        for worker in simulated:
            worker.check_finished(iterations)
        ends = [0.0, *simulated[0].ends]
        spans = tuple(b - a for a, b in itertools.pairwise(ends))
        repeated = sum(each.mailboxes.repeated for each in built if each.mailboxes)
        # One worker, or those of one host, may represent all.
        hosts = len({self.layout.host_of[rank] for rank in range(len(built[0].workers))})
        sent = (sum(traffic.sent.values()) - before) / hosts / iterations
        return Run(spans, tuple(simulated[0].waited), tuple(trace), sent, repeated)

    def _network(self, agenda: Agenda, traffic: Traffic | None) -> Network:
        layout = self.layout
        if self.inside > 1:
            layout = Layout.even(layout.workers, self.inside)
        return Network(agenda, Wires(layout, self.links, self.local), traffic)

    def _columns(
        self, agenda: Agenda, buckets: Buckets, network: Network, traffic: Traffic | None
    ) -> list[SimulationContext]:
        """Return the workers, or those processes of each that exchange with each other."""
        whole = SimulationContext(
            self.strategy.topology,
            self.layout,
            buckets,
            self.links,
            self.work,
            agenda,
            network,
            alike=not (self.slow or self.sleeps or self.one_machine) and self.links.alike,
            traffic=traffic,
            coding=self.coding,
            wire=self.strategy.wire,
            cores=self._processors(agenda),
            columns=self.inside,
        )
        if self.inside == 1:
            return [whole]
        replicas = range(self.layout.workers)
        return [
            replace(
                whole,
                network=GroupNetwork(
                    network, f"column {column}", [r * self.inside + column for r in replicas]
                ),
                column=column,
            )
            for column in range(self.inside)
        ]

    def _processors(self, agenda: Agenda) -> list[Cores]:
        """Return those of each host."""
        count = len(self.layout.hosts)
        if self.one_machine:
            return [Cores(agenda, self.cores, self.work.wake_s)] * count
        return [Cores(agenda, self.cores, self.work.wake_s) for _ in range(count)]

    def _worker(
        self,
        number: int,
        column: int,
        buckets: Buckets,
        exchange: Exchange,
        network: Network,
        context: SimulationContext,
        trace: list[Moment],
    ) -> Worker:
        rank = number * self.inside + column
        update = self.strategy.update_part
        machine = update.machine(self.strategy.schedule.machine)
        make = self.schedule or schedules.BY_NAME[machine]
        inside, layers = None, layers_of(self.model)
        if self.inside > 1:
            members = range(number * self.inside, (number + 1) * self.inside)
            inside = Collectives(
                column,
                self.inside,
                layers,
                Ring(),
                replace(self.links, count=1),
                self.work,
                context.agenda,
                GroupNetwork(network, "inside", members),
            )
        return Worker(
            rank,
            shard_of(self.model, self.inside),
            buckets,
            make(),
            exchange,
            self.work,
            context.agenda,
            lambda *moment: trace.append(moment),
            context.cores[self.layout.host_of[number]],
            slow=self.slow.get(rank, 1.0),
            sleeps=self.sleeps or (lambda _rank, _iteration: 0.0),
            shards=self.layout.workers if update.shards else 0,
            inside=inside,
            sizes=layers.numel,
        )
