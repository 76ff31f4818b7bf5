"""Bounded staleness: rounds, streams over several interfaces, membership, pulls."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

from helpers.communication import NumericReplica, combine, pack
from helpers.staleness_simulation import gradient
from simulation.network import Network, SimulatedStore, detectors
from simulation.scenario import FaultRates, Scenario, draw_faults
from simulation.world import Process, World, virtual
from wingbeat.errors import PeerError, RendezvousError
from wingbeat.methods.bounded_staleness import communication as communication_module
from wingbeat.methods.bounded_staleness import membership as monitor
from wingbeat.methods.bounded_staleness import streams
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.communication import CommunicationThread
from wingbeat.methods.bounded_staleness.journal import Journal
from wingbeat.methods.bounded_staleness.membership import join_workers
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport import actor, failures, membership
from wingbeat.transport.failures import MAX_WAIT_FACTOR
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Limits
from wingbeat_lab.audit import audit, read_journal

MODULES = [actor, communication_module, failures, membership, monitor, streams]

TIMEOUT_S = 20.0
"""The timeout of `init`."""

FOUND_S = 30.0
"""Seconds for the others to continue after processes were killed."""

LIMITS = Limits(message=1000, window=1000 + MAX_HEADER_BYTES + 6000)


class Staleness:
    """Workers that train until all have made their iterations, and then drain."""

    name = "staleness"

    @staticmethod
    def draw(seed: int) -> Scenario:
        chance = random.Random(f"staleness {seed}")
        network = chance.choice(["one", "one", "two", "bcube"])
        workers = 4 if network == "bcube" else chance.randint(2, 5)
        colayers = chance.randint(1, 3)
        options = {
            "workers": str(workers),
            "network": network,
            "s": chance.choice(["0", "1", "2", "4", "none"]),
            "p": str(chance.randint(1, colayers)),
            "colayers": str(colayers),
            "iterations": str(chance.randint(3, 8)),
            "drain": str(chance.choice([0, 0, 3])),
        }
        pairs = tuple(itertools.combinations(range(workers), 2))
        until = 1.0 * int(options["iterations"]) * colayers + 2.0
        rates = FaultRates(
            processes=tuple(range(workers)), pairs=pairs, until=until,
            killable=tuple(range(workers)), startable=tuple(range(workers)),
            stop_s=20.0, cut_s=20.0, store_s=5.0,
        )  # fmt: skip
        faults = draw_faults(rates, chance, 5)
        return Scenario("staleness", seed, tuple(options.items()), faults)

    def __init__(self, scenario: Scenario, world: World) -> None:
        options = dict(scenario.options)
        self.world = world
        self.workers, self.iterations = int(options["workers"]), int(options["iterations"])
        s = None if options["s"] == "none" else int(options["s"])
        self.bound = StalenessBound(s, int(options["p"]), int(options["colayers"]))
        self.drain = int(options["drain"])
        self.network = Network(world, 1 if options["network"] == "one" else 2)
        self.neighbours: list[set[int]] | None = None
        if options["network"] == "bcube":
            self.neighbours = [{w ^ 1, w ^ 2} for w in range(4)]
            self.network.reach = lambda a, b: {1: (0,), 2: (1,), 3: ()}[a ^ b]
        self.store = SimulatedStore(world)
        self.lines: dict[tuple[int, int], list[str]] = {}
        self.final: dict[int, bytes] = {}
        self.published: set[int] = set()
        self.pending: set[int] = set()
        self.errors: list[str] = []
        self.limit_s = MAX_WAIT_FACTOR * TIMEOUT_S + 60.0
        self.harmless = all(
            fault.kind in ("reset", "unstore") and fault.seconds < 1.0 for fault in scenario.faults
        )
        world.on_start = self.start

    def run(self) -> None:
        host = self.network.host
        others = detectors(self.world) | {
            "open_mailbox": self.network.open_mailbox,
            "nic": SimpleNamespace(local=lambda: host),
            "listening": lambda _host, _names: host,
        }
        with virtual(self.world, MODULES, **others):
            for worker in range(self.workers):
                self.start(worker, 0)
            self.world.run(lambda: not self.pending, 3600.0)
        if self.lines:  # somebody has joined
            found = audit(self.lines.values())
            assert not found.findings, found.findings
        for worker, state in self.final.items():
            assert state == self.expected(worker), f"worker {worker} has other weights"
        assert len(set(self.final.values())) <= 1, "weights differ after the drain"
        if self.harmless:
            assert not self.errors, self.errors
            assert len(self.final) == self.workers

    def expected(self, worker: int) -> bytes:
        """Return the weights after the rounds of the journals, applied one after the other."""
        records = [read_journal(lines) for lines in self.lines.values()]
        own = next(each for each in reversed(records) if each.rank == worker and each.complete)
        # A round that only dead workers had applied counts if it was pulled from them.
        records.sort(key=lambda each: (each.complete, each.at))
        rounds = {number: parts for each in records for number, parts in each.rounds.items()}
        replica = NumericReplica(self.workers, self.bound.colayers)
        for number in range(own.at):
            for z, q in itertools.product(range(self.bound.colayers), range(self.workers)):
                entries = rounds[number].get((z, q), [])
                total = combine(z, q, {(t, w): pack(gradient(w, t, z, q)) for t, w in entries})
                part: Any = SimpleNamespace(payload=total, colayer=z, piece=q)
                replica.apply_round([part])
        return replica.state_bytes()

    def start(self, worker: int, incarnation: int) -> None:
        if self.final or worker >= self.workers:  # the training of the others is over
            return
        self.pending.add(worker)
        process = self.world.spawn(worker, lambda: self.worker(worker))
        process.at_end.append(lambda: self.pending.discard(worker))

    def worker(self, rank: int) -> None:
        process = self.world.current
        try:
            self.train(rank)
        except (PeerError, RendezvousError) as error:
            self.world.log(f"{self.world.now:10.3f} {error}")
            self.check_may_fail(process, error)
            for wrong in ("malformed", "Error:", "a second process"):
                found = wrong in str(error)
                assert not found, f"worker {rank} has failed: {wrong}"
            self.errors.append(str(error))
        self.world.end(process)

    def check_may_fail(self, process: Process, error: Exception) -> None:
        """If processes are killed and nothing else, the others fail only without all parameters.

        That is, if all that had applied a round were killed. Or they have returned too late.
        """
        self.world.check_not_in_vain(error, FOUND_S)
        if self.world.scenario.kills_only and "no remaining worker has all" not in str(error):
            late = process.incarnation > 0 and bool(self.final)
            assert late, f"{process} was not killed: {error}"

    def train(self, rank: int) -> None:
        world, process = self.world, self.world.current
        with world.limited(self.limit_s, "joining"):
            joined = join_workers(
                self.store.handle(), rank, self.workers, namespace="stale", limits=LIMITS,
                neighbours=self.neighbours, suspect_after=5.0, seconds=TIMEOUT_S,
            )  # fmt: skip
        lines = self.lines[rank, process.incarnation] = []
        bound = self.bound
        machine = Worker(
            rank, self.workers, bound, combine,
            max_buffered=bound.max_buffered, incarnation=joined.incarnation,
        )  # fmt: skip
        replica = NumericReplica(self.workers, bound.colayers)
        thread = CommunicationThread(
            machine, joined.mailbox, replica, timeout=TIMEOUT_S, clock=world.clock,
            streams=joined.streams, membership=joined.membership,
            journal=Journal(lines.append, rank, joined.incarnation, self.workers, bound),
        )  # fmt: skip
        thread.start()
        try:
            self.iterate(rank, thread, world.random("worker", rank, process.incarnation))
            with world.limited(self.limit_s, "the drain"):
                thread.finish()
            self.published.add(rank)
            self.final[rank] = replica.state_bytes()
            if thread.no_failures:
                with world.limited(self.limit_s, "the end"):
                    thread.serve_until(self.published.__contains__)
        except BaseException:
            thread.close(quick=True)
            raise
        thread.close()

    def iterate(self, rank: int, thread: CommunicationThread, chance: random.Random) -> None:
        world, machine = self.world, thread.machine
        limit_s = FOUND_S if world.scenario.kills_only else self.limit_s
        speed, drained = chance.choice([0.05, 0.2, 0.2, 0.5]), 0

        def entered() -> int | None:
            thread._apply_rounds()
            if machine.pull_target is None and machine.next_iteration >= self.iterations:
                return -1
            return thread.try_begin_iteration()

        while True:
            with world.limited(limit_s, "the wait for an iteration"):
                at = thread._wait_for(entered, "cannot begin the next iteration")
            if at < 0:
                return
            for z in range(self.bound.colayers):
                world.sleep(speed * chance.random())
                if not thread.send_colayer(
                    z, [pack(gradient(rank, at, z, q)) for q in range(self.workers)]
                ):
                    break
            thread.end_iteration()
            if self.drain and machine.next_iteration // self.drain > drained:
                drained = machine.next_iteration // self.drain
                with world.limited(self.limit_s, "a drain"):
                    thread.finish()
                thread.resume()
