"""Model averaging: the group generator's service, its clients, and the ranks of their replicas."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

from simulation.averages import Averages, Column
from simulation.network import Network, SimulatedStore, detectors
from simulation.scenario import FaultRates, Scenario, draw_faults
from simulation.world import Process, World, virtual
from wingbeat.errors import PeerError, RendezvousError, WingbeatError
from wingbeat.methods.model_averaging import (
    client,
    followers,
    group_all_reduce,
    service,
    static_client,
    succession,
)
from wingbeat.methods.model_averaging.followers import Call, Channel, Follower, Leader
from wingbeat.methods.model_averaging.rules import Rules, rules_of
from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.transport import actor, failures, membership, services
from wingbeat.transport.failures import MAX_WAIT_FACTOR

MODULES = [
    actor, client, failures, followers, group_all_reduce, membership, service, services,
    static_client, succession,
]  # fmt: skip

TIMEOUT_S = 20.0
"""The timeout of `init`."""

FOUND_S = 20.0
"""Seconds for the others to continue after processes were killed."""

ROOM = "groups"


class Groups:
    """Workers that make steps, average in groups, synchronize, copy states, and leave.

    A worker is a replica of ``ranks`` processes: its leader has its number, and the others follow.
    The generator has the number after those of the workers.
    """

    name = "groups"

    @staticmethod
    def draw(seed: int) -> Scenario:
        chance = random.Random(f"groups {seed}")
        workers = chance.randint(2, 6)
        hosts = sorted(chance.randrange(min(workers, 3)) for _ in range(workers))
        hosts = [sorted(set(hosts)).index(host) for host in hosts]
        options = {
            "hosts": ",".join(map(str, hosts)),
            "policy": chance.choice(["smart", "paper", "random", "buffered", "divided", "all"]),
            "ranks": str(chance.choice([1, 1, 2, 3])),
            "steps": str(chance.randint(4, 12)),
            "synchronize": str(chance.choice([0, 3, 7])),
            "copies": str(int(chance.random() < 0.3)),
        }
        rates = FaultRates(
            processes=tuple(range(workers + 1)),
            pairs=tuple((a, b) for b in range(workers + 1) for a in range(b)),
            until=int(options["steps"]) * 0.6,
            killable=tuple(range(workers + (chance.random() < 0.3))),
            startable=tuple(range(workers)),
            stop_s=12.0,
            cut_s=12.0,
            store_s=3.0,
        )
        faults = draw_faults(rates, chance, 8)
        return Scenario("groups", seed, tuple(options.items()), faults)

    def __init__(self, scenario: Scenario, world: World) -> None:
        options = dict(scenario.options)
        self.world = world
        self.hosts = tuple(map(int, options["hosts"].split(",")))
        self.workers, self.ranks = len(self.hosts), int(options["ranks"])
        self.steps, self.every = int(options["steps"]), int(options["synchronize"])
        self.copies = options["copies"] == "1"
        self.rules = rules_of(options["policy"], 2, 4)
        self.network = Network(world)
        self.store = SimulatedStore(world)
        self.averages = Averages(world, TIMEOUT_S, self.network.is_cut)
        self.states: dict[tuple[int, int], Any] = {}
        self.final: dict[tuple[int, int], float] = {}  # by worker and rank
        self.records: dict[tuple[int, int, int], list[Any]] = {}
        self.errors: list[str] = []
        self.pending: set[int] = set()
        self.limit_s = MAX_WAIT_FACTOR * TIMEOUT_S + 60.0
        world.on_start = self.start
        self.kills_only = scenario.kills_only and all(
            fault.where != (self.workers,) for fault in scenario.faults if fault.kind == "kill"
        )
        self.finished_at = math.inf  # when the first rank began the last group of all workers
        self.generators = 0  # that have replaced one which had ended
        # A fault as short as these, and connections that are renewed, harm nobody.
        self.harmless = all(
            fault.kind in ("reset", "unstore") and fault.seconds < 1.0 for fault in scenario.faults
        )
        # Of a kept scenario, in which all processes that were not killed finish.
        self.all_finish = options.get("errors") == "0"

    def run(self) -> None:
        others = detectors(self.world) | {
            "open_mailbox": self.network.open_mailbox,
        }
        with virtual(self.world, MODULES, **others):
            self.start_generator(0)
            for worker in range(self.workers):
                self.start(worker, 0)
            self.world.run(lambda: not self.pending, 3600.0)
        self.check_end()

    # -- processes ------------------------------------------------------------------------

    def config(self, incarnation: int = 0) -> GeneratorConfig:
        return GeneratorConfig(
            room=ROOM, host_of=self.hosts, interfaces=(), timeout=TIMEOUT_S, rules=self.rules,
            seed=self.world.scenario.seed, incarnation=incarnation,
        )  # fmt: skip

    def start_generator(self, incarnation: int) -> None:
        """Start an incarnation of the generator, whose former one has ended."""
        former = self.world.processes.get(self.workers)
        if former is not None and former.alive:
            self.world.end(former)
        self.generators += incarnation > 0
        self.world.spawn(self.workers, lambda: self.generator(incarnation), "generator")

    def generator(self, incarnation: int) -> None:
        try:
            serve = self.config(incarnation).connect(self.store.handle())
            serve(lambda: True)
        except (RendezvousError, PeerError) as error:
            self.note("the generator", error)
        self.world.end(self.world.current)

    def number(self, worker: int, rank: int) -> int:
        return worker if rank == 0 else 100 + 10 * worker + rank

    def start(self, worker: int, incarnation: int) -> None:
        """Start all processes of a replica, if none of it is left."""
        processes = [self.world.processes.get(self.number(worker, r)) for r in range(self.ranks)]
        if worker >= self.workers or any(p is not None and p.alive for p in processes):
            return
        if self.final:  # the training of others is over
            return
        self.pending.add(worker)
        leader = self.world.spawn(worker, lambda: self.replica(worker, 0, incarnation))
        leader.at_end.append(lambda: self.pending.discard(worker))
        for rank in range(1, self.ranks):
            self.world.spawn(
                self.number(worker, rank),
                lambda rank=rank: self.replica(worker, rank, incarnation),
            )

    def replica(self, worker: int, rank: int, incarnation: int) -> None:
        process = self.world.current
        trainer = Trainer(self, process, worker, rank, incarnation)
        try:
            trainer.train()
        except (PeerError, RendezvousError, RuntimeError) as error:
            needs_store = trainer.connected_at is None and "store is unavailable" in str(error)
            if not isinstance(error, WingbeatError) and not needs_store:
                raise
            self.note(f"worker {worker} rank {rank}", error)
            self.check_may_fail(trainer, error)
        self.world.end(process)

    def note(self, who: str, error: Exception) -> None:
        self.world.log(f"{self.world.now:10.3f} {who}: {error}")
        text = str(error)
        assert "violated the protocol" not in text, f"{who}: {text}"
        assert "thread" not in text, f"{who}: {text}"
        self.errors.append(f"{who}: {text}")

    # -- invariants -----------------------------------------------------------------------

    def check_may_fail(self, trainer: Trainer, error: Exception) -> None:
        """If processes are killed and nothing else, a replica fails only with its leader.

        Or it has returned after the last group of the others began, or none of them has a state.
        """
        worker, incarnation = trainer.worker, trainer.incarnation
        if self.kills_only and (worker, incarnation) not in self.world.killed:
            returned_at = trainer.connected_at or math.inf
            in_time = returned_at < self.finished_at and not self.generators
            alone = not self.final and "no other worker is active" in str(error)
            late = incarnation and (alone or (self.final and not in_time))
            # The end of a synchronization is not atomic: some may have its mean, and leave.
            late = late or (self.final and "completed the last mean of all models" in str(error))
            assert late, f"worker {worker}.{incarnation} was not killed: {error}"

    def record(self, trainer: Trainer) -> None:
        """Compare what the ranks of a replica have done: all the same, in the same order."""
        key = trainer.worker, trainer.incarnation, trainer.calls
        state = [trainer.column.applied[trainer.seen :], trainer.step, trainer.client.must_fetch]
        trainer.seen = len(trainer.column.applied)
        before = self.records.setdefault(key, state)
        assert before == state, f"ranks of worker {trainer.worker} differ: {before} and {state}"

    def check_end(self) -> None:
        for rank in range(self.ranks):
            values = {worker: v for (worker, r), v in self.final.items() if r == rank}
            assert len(set(values.values())) <= 1, f"weights differ after the drain: {values}"
        if self.harmless or self.all_finish:
            assert not self.errors, self.errors
            assert len(self.final) == self.workers * self.ranks


class Trainer:
    """A rank of a replica: its training loop."""

    def __init__(
        self, groups: Groups, process: Process, worker: int, rank: int, incarnation: int
    ) -> None:
        self.groups, self.world, self.process = groups, groups.world, process
        self.worker, self.rank, self.incarnation = worker, rank, incarnation
        self.column = Column(groups.averages, process, rank, worker)
        self.chance = self.world.random("worker", worker, incarnation)  # the same on all ranks
        self.own = self.world.random("rank", worker, rank, incarnation)
        self.column.value = 1000.0 * rank + worker
        self.step = self.syncs = self.calls = self.seen = 0
        self.leader: Leader | None = None
        self.connected_at: float | None = None

    def connect(self) -> None:
        groups, worker = self.groups, self.worker
        store = groups.store.handle()
        self.channel = None
        numbers = tuple(groups.number(worker, rank) for rank in range(groups.ranks))
        if groups.ranks > 1:
            inside = SimpleNamespace(
                leader=worker, number=worker, ranks=numbers, mesh_store=store,
                life=f"{worker}.{self.incarnation}",
            )  # fmt: skip
            self.channel = Channel(
                SimpleNamespace(
                    ranks={groups.number(worker, self.rank): groups.number(worker, self.rank)},
                    rank=groups.number(worker, self.rank), inside=inside, timeout=TIMEOUT_S,
                    size=groups.workers, store=store, threads=True, interfaces=(),
                ),  # type: ignore[arg-type]
                ROOM,
                encrypted=False,
            )  # fmt: skip
        if self.rank:
            self.client: Any = Follower(self.channel, self.column)
            self.client.on_fetch = self.send_state
            return
        if self.channel is not None:
            self.leader = Leader(self.channel, self.column)
        try:
            self.client = groups.config().client(
                store, worker, self.incarnation > 0, self.is_running, start=groups.start_generator,
                has_died=self.has_died,
            )  # fmt: skip
        except BaseException as error:
            if self.channel is not None:
                self.channel.tell_error(error)
                self.channel.close(quick=False)
            raise
        self.client.on_fetch = self.send_state
        self.client.copies_state = groups.copies
        self.client.on_generation = (self.leader or self.column).renew
        if self.leader is not None:
            self.client.set_watch(self.leader.watch)

    def is_running(self, worker: int) -> bool:
        return self.world.processes[worker].alive

    def has_died(self, worker: int) -> bool:
        return not self.is_running(worker) and (worker, 0) not in self.groups.final

    def train(self) -> None:
        with self.world.limited(self.groups.limit_s, "connecting"):
            self.connect()
        self.connected_at = self.world.now
        if self.incarnation:
            self.fetch()
        while self.step < self.groups.steps:
            self.world.sleep(self.own.choice([0.05, 0.2, 0.2, 0.8]) * (1 + self.worker % 2))
            self.column.value += self.own.uniform(-1.0, 1.0)
            self.step += 1
            self.call(Call.STEP, "a step")
            if self.client.must_fetch:
                self.fetch()
            every = self.groups.every
            if every and self.step // every > self.syncs and self.step < self.groups.steps:
                self.synchronize()
        self.column.finished = True
        while True:  # until all others have made their last step too
            self.column.all_finished = None
            self.synchronize()
            if self.column.all_finished in (None, True):
                break
        self.groups.finished_at = min(self.groups.finished_at, self.column.begun_at)
        self.groups.final[self.worker, self.rank] = self.column.value
        self.leave()

    def synchronize(self) -> None:
        self.call(Call.SYNCHRONIZE, "a synchronization")
        # Not before: a worker that copies this one's state meanwhile has to take part too.
        self.syncs += 1

    def call(self, call: Call, what: str) -> None:
        # Others synchronize, and are awaited, only after steps of their own.
        step = call == Call.STEP and self.groups.kills_only
        with self.world.limited(FOUND_S if step else self.groups.limit_s, what):
            reducer = self.leader or self.column
            work = self.client.step if call == Call.STEP else self.client.synchronize
            if self.leader is None:
                work(reducer)
            else:
                with self.leader.call(call, self.client):
                    work(reducer)
        self.calls += 1
        self.groups.record(self)

    def fetch(self) -> None:
        with self.world.limited(self.groups.limit_s, "the copy of a state"):
            # As `DiLoCo` does, whose workers share one model.
            join = self.groups.copies and self.groups.rules.whole
            if self.leader is None:
                state = self.client.fetch_state(self.receive, join=join)
            else:
                with self.leader.call(Call.FETCH, self.client):
                    state = self.client.fetch_state(
                        lambda *args: self.leader.receive(self.receive, *args), join=join
                    )
        self.column.value, self.step, self.syncs = state
        self.calls += 1
        self.groups.record(self)

    def send_state(self, receiver: int, connection: int) -> None:
        if self.leader is not None:
            self.leader.send(receiver, connection)
        key = connection, self.rank
        state = self.column.value, self.step, self.syncs

        def arrive() -> None:
            late = self.groups.network.is_cut(self.worker, receiver)
            if late:
                self.world.after(late, arrive)
            elif self.process.alive:
                self.groups.states[key] = state

        self.world.after(self.groups.averages.chance.random(), arrive)

    def receive(self, sender: int, connection: int, is_active: Any) -> Any:
        begun = self.world.now
        while (connection, self.rank) not in self.groups.states:
            self.world.sleep(0.1)
            if not is_active() or self.world.now > begun + TIMEOUT_S:
                return None
        return self.groups.states[connection, self.rank]

    def leave(self) -> None:
        self.client.leave()
        self.column.close()
        if self.rank == 0:
            try:
                self.client.mailbox.close()
            except PeerError as error:
                self.groups.note(f"worker {self.worker}", error)
        if self.channel is not None:
            self.channel.close(quick=False)


__all__ = ["Groups", "Rules"]
