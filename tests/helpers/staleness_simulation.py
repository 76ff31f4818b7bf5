"""A simulation of workers under bounded staleness in virtual time, from a seed, with journals."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.colayers import ColayerChange, ColayerDecision
from wingbeat.methods.bounded_staleness.journal import Journal
from wingbeat.methods.bounded_staleness.messages import Contribution, PieceSum, ViewProposal
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat_lab.audit import audit

TENSORS = 6
"""Tensors that are bundled."""


class Store:
    """An in-memory rendezvous store."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str, seconds: float) -> str:
        return self._values[key]

    def has(self, key: str) -> bool:
        return key in self._values

    def claim(self, key: str, value: str) -> str:
        return self._values.setdefault(key, value)


def gradient(worker: int, iteration: int, colayer: int, piece: int) -> float:
    """Return numbers of very different size, so that each order of addition has its own bits."""
    rng = random.Random(f"{worker} {iteration} {colayer} {piece}")
    return rng.uniform(-1, 1) * 10.0 ** rng.randrange(-6, 6)


def add(colayer: int, piece: int, waiting: dict[Contribution, Any]) -> float | None:
    """Sum contributions in the given order."""
    total = None
    for value in waiting.values():
        total = value if total is None else total + value
    return total


@dataclass
class Replica:
    """Parameters and momentum, one number a piece: an optimizer whose steps do not commute."""

    workers: int
    colayers: int
    values: list[list[float]] = field(default_factory=list)
    momenta: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for table in (self.values, self.momenta):
            table += [[0.0] * self.workers for _ in range(self.colayers)]

    def apply_round(self, parts: tuple[PieceSum, ...]) -> None:
        for part in parts:
            if part.payload is None:
                continue
            z, q = part.colayer, part.piece
            self.momenta[z][q] = 0.9 * self.momenta[z][q] + part.payload
            self.values[z][q] -= 0.1 * self.momenta[z][q]

    def state(self) -> tuple[list[list[float]], list[list[float]]]:
        return [list(r) for r in self.values], [list(r) for r in self.momenta]

    def bits(self) -> str:
        return str([[v.hex() for v in row] for row in self.values + self.momenta])


class SimulatedWorker:
    """One incarnation of a worker: machine, replica, training loop and log."""

    def __init__(self, simulation: Simulation, rank: int, incarnation: int = 0) -> None:
        self.simulation, self.rank, self.incarnation = simulation, rank, incarnation
        self.change = ColayerChange(
            simulation.store, "simulation", rank, TENSORS, simulation.choose,
            first=simulation.first or 0, retry_after=3, clock=lambda: simulation.now,
        )  # fmt: skip
        if simulation.first is None:
            self.change.due = None
        self.change.catch_up()
        self.bound, self.epoch = simulation.bound, 0
        if (decision := self.change.decision) is not None and decision.buckets:
            self.bound, self.epoch = simulation.bound_of(len(decision.buckets)), 1
        self.machine = Worker(
            rank, simulation.n, self.bound, add, max_buffered=simulation.keep,
            incarnation=incarnation, epoch=self.epoch,
        )  # fmt: skip
        self.retired: list[tuple[int, ...]] = []  # rows of the index
        self.record_retired_rows()
        self.replica = Replica(simulation.n, self.bound.colayers)
        self.draining = self.written = self.polls = False
        self.lost: set[int] = set()
        self.early: list[tuple[SimulatedWorker, Any]] = []
        self.applied: list[tuple[PieceSum, ...]] = []
        self.pulls = 0
        self.sent: set[tuple[int, int]] = set()
        self.begun: list[int] = []
        self.lost_to: set[int] = set()
        self.alive, self.waiting, self.colayer = True, True, 0
        self.lines: list[str] = []
        self.journal = Journal(self.lines.append, rank, incarnation, simulation.n, self.bound)

    def record_retired_rows(self) -> None:
        gei = self.machine.gei
        apply_round = gei.apply_round
        gei.apply_round = lambda parts: self.retired.extend(apply_round(parts))  # type: ignore

    def tick(self) -> None:
        """Do the next thing that training does."""
        if not self.alive or self.machine.expelled:
            return
        if self.waiting:
            self.between()
            return
        iteration, z = self.begun[-1], self.colayer
        payloads = [gradient(self.rank, iteration, z, q) for q in range(self.simulation.n)]
        sent = self.machine.send_colayer(z, payloads)
        if sent:
            self.sent.add((iteration, z))
            self.journal.sent(iteration, z)
        self.colayer += 1
        if self.colayer == self.bound.colayers or not sent:
            self.machine.end_iteration()
            self.journal.dropped(self.machine.last_dropped)
            self.waiting = True
            self.between()
        else:
            self.simulation.schedule(self.simulation.pause(self.rank), self.tick)

    def between(self) -> None:
        """Apply rounds, and begin the next iteration if that is possible."""
        machine = self.machine
        if self.written and not self.decided():
            return
        self.apply()
        if self.draining:
            self.drain()
        elif machine.joining and self.change.poll_decision() and self.change.decision:
            self.refuse_if_late(self.change.decision)
        if not self.draining and self.alive:
            self.proceed()

    def proceed(self) -> None:
        """Finish, drain, or begin an iteration."""
        machine = self.machine
        if machine.finished:
            if machine.peer_resumed:
                machine.resume()
                machine.finish()
        elif machine.next_iteration >= self.simulation.iterations and machine.pull_target is None:
            self.change.mark_finished()
            machine.finish()
        elif machine.pull_target is None and self.change.is_due(machine.zeta):
            self.draining = True
            machine.finish()
            self.simulation.moment("draining", self)
            self.poll()
        elif machine.can_begin():
            self.simulation.check_bound(self, machine.next_iteration)
            self.begun.append(machine.begin_iteration())
            self.journal.began(self.begun[-1])
            self.waiting, self.colayer = False, 0
            self.simulation.schedule(self.simulation.pause(self.rank), self.tick)

    def apply(self) -> None:
        """Apply rounds to the replica, and answer pull requests."""
        machine = self.machine
        if (pulled := machine.take_pulled_state()) is not None:
            values, momenta, applied, retired = pulled
            self.replica.values = [list(r) for r in values]
            self.replica.momenta = [list(r) for r in momenta]
            self.applied, self.retired = list(applied), list(retired)
            self.pulls += 1
            self.journal.pulled(machine.applied)
        while (parts := machine.take_round()) is not None:
            self.replica.apply_round(parts)
            self.applied.append(parts)
            self.journal.applied(parts)
        for worker in machine.take_pull_requests():
            state = *self.replica.state(), list(self.applied), list(self.retired)
            response = machine.pull_response(state)
            self.simulation.post(self, worker, response)

    # -- other colayers -------------------------------------------------------------------

    def poll(self) -> None:
        """Poll again soon, even without messages."""
        if not self.polls and self.draining and self.alive:
            self.polls = True
            self.simulation.schedule(1.0, self.polled)

    def polled(self) -> None:
        self.polls = False
        if self.draining and self.alive and not self.machine.expelled:
            self.between()
            self.poll()

    def drain(self) -> None:
        """Contribute to the decision if all have drained, or resume if others that had do."""
        machine = self.machine
        if machine.fully_applied:
            self.written = True
            self.simulation.moment("drained", self)
            if self.alive:
                self.decided()
        elif self.change.poll_decision():
            assert self.change.decision is not None
            assert self.change.decision.buckets is None, (
                "this worker is counted in and had not drained"
            )
            self.draining = False
            self.journal.resumed(machine.iteration)
            machine.resume_at(self.change.decision.rounds)

    def decided(self) -> bool:
        """Poll for a decision, and follow it."""
        before = self.change.missing() if self.change._view else None
        decision = self.change.decide(self.machine, self.lost, self.rank)
        if before is None:
            self.simulation.moment("written", self)
        if decision is None or not self.alive:
            return False
        self.simulation.moment("decided", self)
        if not self.alive:
            return False
        self.draining = self.written = False
        self.lost.clear()
        if decision.buckets is None:
            self.journal.resumed(self.machine.iteration)
            self.machine.resume_at(decision.rounds)
            return True
        self.use_colayers(decision)
        self.simulation.moment("changed", self)
        return self.alive

    def use_colayers(self, decision: ColayerDecision) -> None:
        assert decision.buckets is not None
        assert decision.rounds == self.machine.applied, "nothing is applied before the decision"
        self.simulation.digests.append(self.replica.bits())
        before, self.bound = self.replica, self.simulation.bound_of(len(decision.buckets))
        self.epoch += 1
        gei = self.machine.gei
        self.retired += [gei.row(i) for i in range(gei.retired, self.machine.applied)]
        self.machine.change_colayers(self.bound, add, decision.view)
        self.record_retired_rows()
        self.journal.changed_colayers(self.bound, self.machine.iteration)
        self.replica = Replica(self.simulation.n, self.bound.colayers)
        for z in range(self.bound.colayers):
            self.replica.values[z] = list(before.values[z % before.colayers])
        early, self.early = self.early, []
        for sender, message in early:
            self.machine.receive(sender.rank, sender.incarnation, message)

    def refuse_if_late(self, decision: ColayerDecision) -> None:
        """End if the others have changed colayers without this worker."""
        if decision.buckets is not None and decision.view[self.rank] != 2 * self.incarnation:
            self.simulation.refused += 1
            self.alive = False
            self.simulation.dead.append(self)
            self.simulation.workers[self.rank] = None
            self.simulation.schedule(1.0, lambda: self.simulation.restart(self))

    @property
    def done(self) -> bool:
        machine = self.machine
        return (
            machine.drained and machine.pull_target is None and self.waiting and not self.draining
        )


class Simulation:
    """All workers, a network that delivers in order between two workers, and random kills."""

    def __init__(
        self,
        seed: int,
        n: int,
        bound: StalenessBound,
        iterations: int = 5,
        kills: int = 0,
        keep: int | None = None,
        even: bool = False,
        returns: bool = True,
        first: int | None = None,
        dies: str = "",
    ) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.n, self.bound, self.iterations, self.keep = n, bound, iterations, keep
        self.now, self.returns, self.stranded = 0.0, returns, False
        self.store, self.first, self.dies = Store(), first, dies
        self.digests: list[str] = []
        self.refused = 0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.even = even
        self.speed = [1.0 if even else self.rng.choice((0.5, 1, 1, 1, 3, 8)) for _ in range(n)]
        self.lag = self.rng.choice((0.01, 0.3, 3.0))
        self.arrival: dict[tuple[int, int], float] = {}
        self.dead: list[SimulatedWorker] = []
        self.workers: list[SimulatedWorker | None] = []
        self.workers += [SimulatedWorker(self, rank) for rank in range(n)]
        for worker in self.alive_workers():
            self.schedule(self.pause(worker.rank), worker.tick)
        for _ in range(kills):
            self.schedule(self.rng.uniform(0, 2.0 * iterations * bound.colayers), self.kill)

    def alive_workers(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker is not None]

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.count), action))

    def pause(self, rank: int) -> float:
        spread = 0.05 if self.even else 0.5
        return self.speed[rank] * self.rng.uniform(1 - spread, 1 + spread)

    def flush(self, worker: SimulatedWorker) -> None:
        while worker.machine.outbox:
            envelope = worker.machine.outbox.popleft()
            for to in envelope.to:
                self.post(worker, to, envelope.message)

    def post(self, worker: SimulatedWorker, to: int, message: Any) -> None:
        pair = worker.rank, to
        incarnation = (
            None if isinstance(message, ViewProposal) else worker.machine.incarnation_of(to)
        )
        epoch = worker.machine.epoch
        when = max(self.now + self.rng.expovariate(1 / self.lag), self.arrival.get(pair, 0.0))
        self.arrival[pair] = when
        self.at(when, lambda: self.arrive(worker, to, incarnation, message, epoch))

    def arrive(
        self, sender: SimulatedWorker, to: int, incarnation: int | None, message: Any, epoch: int
    ) -> None:
        worker = self.workers[to]
        if worker is None or (not sender.alive and self.cut(sender, to)):
            return
        if incarnation not in (None, worker.incarnation):
            return
        if epoch > worker.machine.epoch:
            worker.early.append((sender, message))
        elif epoch == worker.machine.epoch:
            worker.machine.receive(sender.rank, sender.incarnation, message)
        if worker.waiting:
            worker.tick()

    def cut(self, sender: SimulatedWorker, to: int) -> bool:
        """Whether what is still on its way from a dead worker is lost from now on."""
        if to not in sender.lost_to and self.rng.random() < 0.3:
            sender.lost_to.add(to)
        return to in sender.lost_to

    def kill(self) -> None:
        alive_workers = self.alive_workers()
        whole = [p for p in alive_workers if not p.machine.joining and not p.machine.expelled]
        if len(whole) < 2:
            return  # otherwise the parameters would be lost
        victim = self.rng.choice(alive_workers)
        if all(worker.done for worker in alive_workers):
            return
        self.terminate(victim)

    def terminate(self, victim: SimulatedWorker) -> None:
        victim.alive = False
        self.dead.append(victim)
        self.workers[victim.rank] = None
        for worker in self.alive_workers():
            first = self.rng.uniform(1, 20)
            for after in (0, 20, 60, 180):  # whenever the incarnation became known
                self.schedule(first + after, lambda p=worker: self.notice(p, victim))
        if self.returns and self.rng.random() < 0.7:
            self.schedule(self.rng.uniform(0, 40), lambda: self.restart(victim))

    def notice(self, worker: SimulatedWorker, victim: SimulatedWorker) -> None:
        if worker.alive and not worker.machine.expelled:
            if self.first is not None and worker.machine.drained:
                worker.lost.add(victim.rank)  # not needed unless training resumes
                self.schedule(1.0, lambda: self.notice_if_not_done(worker, victim))
            else:
                worker.machine.mark_lost(victim.rank, victim.incarnation)
            if worker.waiting:
                worker.tick()

    def notice_if_not_done(self, worker: SimulatedWorker, victim: SimulatedWorker) -> None:
        if not worker.done:
            self.notice(worker, victim)

    def moment(self, name: str, worker: SimulatedWorker) -> None:
        """Kill the worker at this moment, if the simulation is set to."""
        if self.dies == name and len(self.alive_workers()) > 2 and self.rng.random() < 0.5:
            self.dies = ""
            self.terminate(worker)

    def bound_of(self, colayers: int) -> StalenessBound:
        """Return the bound with other colayers: p in proportion."""
        bound = self.bound
        p = max(1, colayers * bound.p // bound.colayers)
        return StalenessBound(bound.s, p, colayers, bound.in_flight)

    def choose(self, told: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Bundle tensors into a number of buckets that depends on all contributions."""
        count = 1 + (sum(told) + self.seed) % 4
        ends = [TENSORS * n // count for n in range(count + 1)]
        return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))

    def restart(self, victim: SimulatedWorker) -> None:
        if self.workers[victim.rank] is None and not all(p.done for p in self.alive_workers()):
            worker = SimulatedWorker(self, victim.rank, victim.incarnation + 1)
            self.workers[victim.rank] = worker
            self.schedule(0, worker.tick)
            for other in self.dead:
                for after in (20, 60, 180):
                    self.schedule(after, lambda o=other: self.notice(worker, o))

    def run(self) -> Simulation:
        """Run to the end; fail if it does not end."""
        for _ in range(400_000):
            for worker in self.alive_workers():
                self.flush(worker)
            if not self.agenda:
                break
            self.now, _, action = heapq.heappop(self.agenda)
            action()
        for worker in self.alive_workers():
            worker.between()
            if worker.machine.stranded:
                self.stranded = True  # all workers with all parameters have died
                return self
            assert worker.done, f"worker {worker.rank} is stuck at {worker.machine.iteration}"
            worker.journal.drained(worker.machine.applied, worker.replica.bits())
        return self

    def check_bound(self, worker: SimulatedWorker, iteration: int) -> None:
        """Check that no worker begins an iteration more than s before that of another."""
        stragglers = worker.machine._stragglers.found
        assert len(worker.applied) >= self.bound.rounds_required(
            iteration, stragglers=stragglers
        ), "required rounds are missing"
        if self.bound.s is None:
            return
        for other in self.alive_workers():
            machine = other.machine
            if other is worker or machine.finished or machine.expelled or machine.joining:
                continue
            assert machine.iteration >= iteration - self.bound.s, (
                worker.rank,
                iteration,
                other.rank,
            )


def check_consistency(simulation: Simulation) -> None:
    """Check the journals, replicas and indices of all workers after a drain."""
    workers = simulation.alive_workers()
    found = audit(worker.lines for worker in [*workers, *simulation.dead])
    assert not found.findings, found.findings
    first = workers[0]
    assert len({worker.replica.bits() for worker in workers}) == 1, "replicas differ"
    assert all(_log(worker) == _log(first) for worker in workers), "logs differ"
    counted = {
        (iteration, worker, part.colayer, part.piece)
        for parts in first.applied
        for part in parts
        for iteration, worker in part.entries
    }
    for worker in workers:
        _check_gei(simulation, worker, counted)


def _log(worker: SimulatedWorker) -> list[list[tuple[int, int, int, tuple[Contribution, ...]]]]:
    return [[(p.colayer, p.piece, p.number, p.entries) for p in parts] for parts in worker.applied]


def _check_gei(
    simulation: Simulation, worker: SimulatedWorker, counted: set[tuple[int, int, int, int]]
) -> None:
    """Check that rows agree with the log, and that complete ones are retired."""
    gei = worker.machine.gei
    for iteration in range(gei.zeta + 1):
        changed = worker.change.decision
        before = changed is not None and changed.buckets and iteration < changed.rounds
        row = tuple(
            sum(
                1 << w
                for w in range(simulation.n)
                if all((iteration, w, z, q) in counted for q in range(simulation.n))
            )
            for z in range((simulation.bound if before else worker.bound).colayers)
        )
        if iteration < gei.retired:
            if len(worker.retired) < gei.retired:
                continue  # from before the restart
            assert worker.retired[iteration] == row, f"{iteration}: {worker.retired} {row}"
        else:
            assert gei.row(iteration) == row
    assert gei.retired == simulation.alive_workers()[0].machine.gei.retired
    assert simulation.dead or gei.retired >= worker.machine.iteration
