"""Simulate training under bounded staleness with the state machines of a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wingbeat import topologies
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.simulated import (
    Bundled,
    FrameSizes,
    RunRecorder,
    SimulatedThread,
    SimulatedTraining,
    StaleRun,
    TrainedMachine,
    bundled,
)
from wingbeat.methods.bounded_staleness.simulated_pool import PoolMember, WorkerPool
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.simulator import paths
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cards import Cards
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.coding import Coding
from wingbeat.simulator.cores import Cores
from wingbeat.simulator.model import Model
from wingbeat.simulator.traffic import Traffic
from wingbeat.simulator.worker import Sleeps

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
    crowd: bool = False,
    cores: int | None = None,
    measured: bool = False,
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
        crowd: let one owner of pieces represent all (`simulated_pool`). An approximation
            for more than about 30 workers; the exact simulation has ``2 k n**2`` messages a round.
        cores: processors that the hosts share, as in a lab on one machine; by default each thread
            of each host has its own. Ignored with ``crowd``.
        measured: whether colayers are formed from measurements from the beginning on.

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
    job = _Job(colayers, bound, workers, links, coding or Coding(), work or Work())
    if cores is not None and (crowd or cores < 1):
        raise UsageError(f"simulate_bounded(cores={cores}): 1 or more, and without crowd=True")
    agenda = Agenda()
    shared = Cores(agenda, cores)
    log = RunRecorder(agenda, workers, bound.colayers, gradients)
    if crowd:
        machines = job.one_for_all(network, agenda, traffic)
    else:
        machines = job.each_worker(network, agenda, shared, traffic)
    for rank, (machine, sent, receiver) in enumerate(machines):
        training = SimulatedTraining(
            rank,
            machine,
            sent,
            job.model,
            job.coding,
            1 if crowd else workers,
            job.work,
            agenda,
            shared,
            log,
            sleeps or (lambda _rank, _iteration: 0.0),
        )
        receiver.received = training.received
    agenda.run()
    assert log.whole, "all workers wait for each other"
    return log.run([machine.dropped for machine, _, _ in machines])


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
        nics = Cards(agenda, self.links, lambda n: n, self._paths(network), traffic)
        threads: list[SimulatedThread] = []
        sizes = self.sizes
        for rank in range(self.workers):
            machine = Worker(rank, self.workers, self.bound, lambda *_: None)
            threads.append(
                SimulatedThread(
                    machine, sizes, self.coding, self.work, agenda, cores, nics, threads
                )
            )
        for thread in threads:
            agenda.at(0.0, thread.wake)
        return [(thread.machine, thread.wake, thread) for thread in threads]

    def _paths(self, network: str) -> paths.Paths:
        if network == "star":
            return paths.star(self.links.count)
        return paths.bcube(self._cube())

    def _cube(self) -> topologies.BCube:
        return topologies.BCube().fitted(self.workers, self.links.count)

    def one_for_all(
        self, network: str, agenda: Agenda, traffic: Traffic | None
    ) -> Sequence[_Simulated]:
        hops = 1.0
        if network == "bcube":
            cube = self._cube()
            away = [sum(map(bool, _digits(cube, other))) for other in range(1, self.workers)]
            hops = sum(away) / len(away)
        pool = WorkerPool(
            self.bound, self.workers, self.links, hops, self.sizes, self.coding, self.work,
            agenda, traffic,
        )  # fmt: skip
        return [(member, lambda: None, member) for member in pool.members]


def _digits(cube: topologies.BCube, rank: int) -> list[int]:
    return [cube.digit(rank, level) for level in range(cube.levels)]
