"""Simulate training with the schedules and state machines of a real run on a described cluster."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from wingbeat import schedules
from wingbeat.errors import UsageError
from wingbeat.parts.strategy import Strategy
from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Event,
    ParametersNeeded,
    Planned,
    Schedule,
    Start,
    Step,
    StepCalled,
    Update,
    Wait,
)
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Coding, Links, Traffic, Work, coding_of
from wingbeat.simulator.exchange import Exchange, SimulationContext, Waitable
from wingbeat.simulator.model import ITEMSIZE, Buckets, Model, buckets_of
from wingbeat.simulator.network import LOCAL, Hosts, Network
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

    ``slow`` is a factor of the layers' times.
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
        slow: float = 1.0,
        sleeps: Sleeps = lambda _rank, _iteration: 0.0,
    ) -> None:
        self._rank, self._model, self._buckets = rank, model, buckets
        self._schedule, self._exchange = schedule, exchange
        self._work, self._agenda, self._record = work, agenda, record
        self._slow, self._sleeps = slow, sleeps
        self.ends: list[float] = []
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
            if isinstance(pause, (int, float)):
                if pause > 0:
                    self._agenda.at(self._agenda.now + pause, self._advance)
                    return
            elif not pause.over:
                pause.when_over(self._advance)
                return

    def _train(self, iterations: int) -> Iterator[Pause]:
        yield from self._notify(Planned(self._buckets.forward))
        for iteration in range(1, iterations + 1):
            yield self._sleeps(self._rank, iteration)
            yield from self._forward()
            yield from self._backward()
            yield from self._notify(StepCalled())
            self.ends.append(self._agenda.now)
        yield from self._notify(ParametersNeeded(self._buckets.forward))

    def _forward(self) -> Iterator[Pause]:
        for layer in self._model.layers:
            if layer.tensors:
                needed = dict.fromkeys(self._buckets.of[t] for t in layer.tensors)
                yield from self._notify(ParametersNeeded(tuple(needed)))
            yield layer.forward_s * self._slow

    def _backward(self) -> Iterator[Pause]:
        missing = list(self._buckets.members)
        ready, begun = 0, False
        for layer in reversed(self._model.layers):
            sizes = {t: self._model.tensors[t].numel for t in reversed(layer.tensors)}
            seconds = layer.backward_s * self._slow
            if not sizes:
                yield seconds
            for tensor, numel in sizes.items():
                yield seconds * numel / sum(sizes.values())
                if not begun:
                    begun = True
                    yield from self._notify(BackwardBegins())
                yield numel * ITEMSIZE * self._work.fill_s_per_byte
                missing[self._buckets.of[tensor]] -= 1
                while ready < len(missing) and missing[ready] == 0:
                    yield from self._notify(BucketReady(ready))
                    ready += 1
        yield from self._notify(BackwardEnds())

    def _notify(self, event: Event) -> Iterator[Pause]:
        """Perform the commands of the schedule for ``event``."""
        for command in self._schedule.react(event):
            match command:
                case Start():
                    self._start(command)
                case Wait(bucket):
                    yield from self._exchange.under_way(bucket)
                case Update(bucket):
                    self._record(self._agenda.now, self._rank, "update", bucket)
                    yield self._update_s(self._buckets.numel[bucket])
                case Step():
                    self._record(self._agenda.now, self._rank, "step", -1)
                    yield self._update_s(sum(self._buckets.numel))

    def _update_s(self, numel: int) -> float:
        return numel * ITEMSIZE * self._work.update_s_per_byte

    def _start(self, command: Start) -> None:
        bucket = command.bucket
        self._record(self._agenda.now, self._rank, command.operation.value, bucket)
        self._exchange.start(command.operation, bucket, command.chained)


Moment = tuple[float, int, str, int]
"""Time, rank, action, and bucket (-1: none)."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a simulated run.

    Attributes:
        iterations_s: seconds of each iteration of rank 0.
        trace: operations and updates, in order of time.
        repeated: messages to and from servers that arrived twice because an acknowledgement was
            late and the sender retransmitted.
    """

    iterations_s: tuple[float, ...]
    trace: tuple[Moment, ...]
    repeated: int = 0

    @property
    def median_s(self) -> float:
        """Median iteration, without the first, in which no update is due."""
        return statistics.median(self.iterations_s[1:] or self.iterations_s)


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
) -> Run:
    """Train ``model`` for ``iterations`` iterations in virtual time.

    Runs are deterministic: equal arguments give bit-identical results.

    Args:
        model: layers and their times.
        strategy: the strategy. Codecs are simulated for gradients to servers only.
        workers: number of workers.
        links: network interfaces.
        work: cost of communication in processor time.
        slow: by rank, factor of a worker's compute times. Without it all workers act identically,
            and only rank 0 is simulated, exchanging messages with itself; with servers all workers
            are simulated.
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

    Raises:
        UsageError: a number is out of range, or the strategy cannot be simulated.
    """
    if workers < 1 or iterations < 1:
        raise UsageError(f"simulate(workers={workers}, iterations={iterations}): 1 or more")
    if layout is not None and layout.workers != workers:
        raise UsageError(f"simulate(workers={workers}): layout has {layout.workers}; give as many")
    if layout is not None and traffic is not None:
        raise UsageError(
            "simulate(layout=, traffic=): what shared interfaces send is not recorded; give one of "
            "them"
        )
    if not strategy.exchange.lockstep:
        raise UsageError(
            "simulate(): workers that make iterations of their own (Bounded, Canary) are another "
            "simulation: simulate_bounded()"
        )
    served = KEPT in strategy.exchange.has
    coded, divides = strategy.wire and not served, strategy.update_part.divides
    decides = strategy.plan.merging() or strategy.plan.choosing()
    if coded or divides or decides is not None:
        raise UsageError(
            "simulate(): strategies with a compression (but to servers), a divided optimizer "
            '(shard_optimizer, update="server"), measured merging or a choice by trial (Auto) are '
            "not simulated yet; simulate one without"
        )
    if coding is not None and not served:
        raise UsageError("simulate(coding=): it is how gradients travel to servers; leave it out")
    if strategy.exchange.tuned:
        raise UsageError(
            "simulate(): thresholds are not tuned within a run; use "
            "simulator.Thresholds(...).tuned(), or threshold=NUMBER"
        )
    work = work or Work()
    make = schedule or schedules.BY_NAME[strategy.schedule.machine]
    agenda = Agenda()
    trace: list[Moment] = []
    buckets = buckets_of(model, strategy.plan.fusion())
    network = Hosts(agenda, layout, links, local) if layout else Network(agenda, links, traffic)
    context = SimulationContext(
        strategy.topology,
        layout or Layout.even(workers, 1),
        buckets,
        links,
        work,
        agenda,
        network,
        alike=not slow and sleeps is None and layout is None,
        traffic=traffic,
        coding=coding or coding_of(strategy.wire),
    )
    exchanges = strategy.exchange.build_simulated(context)
    simulated = [
        Worker(
            rank,
            model,
            buckets,
            make(),
            exchange,
            work,
            agenda,
            lambda *moment: trace.append(moment),
            slow=(slow or {}).get(rank, 1.0),
            sleeps=sleeps or (lambda _rank, _iteration: 0.0),
        )
        for rank, exchange in enumerate(exchanges.workers)
    ]
    for worker in simulated:
        worker.begin(iterations)
    agenda.run()
    for worker in simulated:
        worker.check_finished(iterations)
    ends = [0.0, *simulated[0].ends]
    spans = tuple(b - a for a, b in itertools.pairwise(ends))
    mailboxes = exchanges.mailboxes
    return Run(spans, tuple(trace), mailboxes.repeated if mailboxes else 0)
