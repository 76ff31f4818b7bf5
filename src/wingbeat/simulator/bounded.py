"""Simulate training under bounded staleness with the state machines of a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wingbeat import topologies
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.simulator import paths
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cards import Cards
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.colayers import Bundled, Coding, Letters, bundled
from wingbeat.simulator.cores import Cores
from wingbeat.simulator.courier import Courier
from wingbeat.simulator.crowd import Crowd
from wingbeat.simulator.model import Model
from wingbeat.simulator.staleness import Log, StaleRun
from wingbeat.simulator.traffic import Traffic
from wingbeat.simulator.trainer import Machine, Trainer
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
        crowd: let one owner of pieces represent all (`wingbeat.simulator.crowd`). An approximation
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
    log = Log(agenda, workers, bound.colayers, gradients)
    if crowd:
        machines = job.stand_in(network, agenda, traffic)
    else:
        machines = job.all_of_them(network, agenda, shared, traffic)
    for rank, (machine, posted, hear) in enumerate(machines):
        trainer = Trainer(
            rank,
            machine,
            posted,
            job.model,
            job.coding,
            1 if crowd else workers,
            job.work,
            agenda,
            shared,
            log,
            sleeps or (lambda _rank, _iteration: 0.0),
        )
        hear(trainer.heard)
    agenda.run()
    assert log.whole, "all workers wait for each other"
    return log.run([machine.dropped for machine, _, _ in machines])


_Member = tuple[Machine, Callable[[], None], Callable[[Callable[[], None]], None]]
"""A machine, its callback after posting, and the trainer to notify after it has received."""


@dataclass(frozen=True, slots=True)
class _Job:
    model: Bundled
    bound: StalenessBound
    workers: int
    links: Links
    coding: Coding
    work: Work

    @property
    def letters(self) -> Letters:
        return Letters(self.model, self.workers, self.coding)

    def all_of_them(
        self, network: str, agenda: Agenda, cores: Cores, traffic: Traffic | None
    ) -> Sequence[_Member]:
        cards = Cards(agenda, self.links, lambda n: n, self._paths(network), traffic)
        crew: list[Courier] = []
        letters = self.letters
        for rank in range(self.workers):
            machine = Worker(rank, self.workers, self.bound, lambda *_: None)
            crew.append(
                Courier(machine, letters, self.coding, self.work, agenda, cores, cards, crew)
            )

        def member(courier: Courier) -> _Member:
            return courier.machine, courier.wake, lambda heard: setattr(courier, "heard", heard)

        for courier in crew:
            agenda.at(0.0, courier.wake)
        return [member(courier) for courier in crew]

    def _paths(self, network: str) -> paths.Paths:
        if network == "star":
            return paths.star(self.links.count)
        return paths.bcube(self._cube())

    def _cube(self) -> topologies.BCube:
        return topologies.BCube().fitted(self.workers, self.links.count)

    def stand_in(self, network: str, agenda: Agenda, traffic: Traffic | None) -> Sequence[_Member]:
        hops = 1.0
        if network == "bcube":
            cube = self._cube()
            away = [sum(map(bool, _digits(cube, other))) for other in range(1, self.workers)]
            hops = sum(away) / len(away)
        crowd = Crowd(
            self.bound, self.workers, self.links, hops, self.letters, self.coding, self.work,
            agenda, traffic,
        )  # fmt: skip
        return crowd.members


def _digits(cube: topologies.BCube, rank: int) -> list[int]:
    return [cube.digit(rank, level) for level in range(cube.levels)]
