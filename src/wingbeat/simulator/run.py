"""Simulate training with the schedules and state machines of a real run on a described cluster."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wingbeat import schedules, topologies
from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.parts.strategy import Strategy
from wingbeat.schedules.events import Schedule
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.coding import Coding, coding_of
from wingbeat.simulator.exchange import Collectives, Exchange
from wingbeat.simulator.hosts import LOCAL, Hosts
from wingbeat.simulator.mailbox import Room
from wingbeat.simulator.model import Buckets, Model, buckets_of
from wingbeat.simulator.network import Carrier, Network
from wingbeat.simulator.serving import hire
from wingbeat.simulator.traffic import Traffic
from wingbeat.simulator.worker import Sleeps, Worker
from wingbeat.traits import KEPT
from wingbeat.types import Layout

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
            "simulate(layout=, traffic=): what shared cards send is not noted; give one of them"
        )
    if not strategy.exchange.lockstep:
        raise UsageError(
            "simulate(): workers that make iterations of their own (Bounded, Canary) are another "
            "simulation: simulate_bounded()"
        )
    served = KEPT in strategy.exchange.has
    coded, divides = strategy.wire and not served, strategy.update_part.divides
    if coded or divides or strategy.plan.merging() is not None:
        raise UsageError(
            "simulate(): strategies with a compression (but to servers), a divided optimizer "
            '(shard_optimizer, update="server") or measured merging are not simulated yet; '
            "simulate one without"
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
    exchanges, room = _exchanges(
        strategy, layout or Layout.even(workers, 1), buckets, links, work, agenda, network,
        alike=not slow and sleeps is None and layout is None, traffic=traffic, coding=coding,
    )  # fmt: skip
    crew = [
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
        for rank, exchange in enumerate(exchanges)
    ]
    for worker in crew:
        worker.begin(iterations)
    agenda.run()
    for worker in crew:
        worker.check_through(iterations)
    ends = [0.0, *crew[0].ends]
    spans = tuple(b - a for a, b in itertools.pairwise(ends))
    return Run(spans, tuple(trace), room.repeated if room else 0)


def _exchanges(
    strategy: Strategy,
    layout: Layout,
    buckets: Buckets,
    links: Links,
    work: Work,
    agenda: Agenda,
    network: Carrier,
    alike: bool,
    traffic: Traffic | None,
    coding: Coding | None,
) -> tuple[Sequence[Exchange], Room | None]:
    """Return the exchange of each simulated worker, and the mailboxes."""
    exchange = strategy.exchange
    if isinstance(exchange, Servers):
        coding = coding or coding_of(strategy.wire)
        return hire(exchange, layout, buckets, links, work, agenda, traffic, coding)
    workers = layout.workers
    topology = topologies.get(strategy.topology).fitted(workers, links.count)
    # Identical workers act as rank 0 does, so rank 0 represents all.
    alike = topology.symmetric and alike
    crew = [
        Collectives(
            rank,
            workers,
            buckets,
            topology,
            links,
            work,
            agenda,
            network,
            alike,
            exchange.partitions,
        )
        for rank in range(1 if alike else workers)
    ]
    return crew, None
