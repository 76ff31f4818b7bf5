"""The membership log: clients that report ends, join again, and acknowledge each other."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from simulation.network import Network, SimulatedStore, detectors
from simulation.scenario import FaultRates, Scenario, draw_faults
from simulation.world import World, virtual
from wingbeat.errors import RendezvousError
from wingbeat.transport import membership
from wingbeat.transport.membership import (
    MembershipClient,
    MembershipLog,
    View,
    covers,
    without_worker,
)
from wingbeat.transport.messages.frames import Limits
from wingbeat.transport.messages.peers import store_key

PATH = "membership/log"

JOIN_S = 20.0
"""Seconds for the others to acknowledge a process that joins again."""


class Members:
    """Processes that report each other's ends, some of them wrong, and return."""

    name = "membership"

    @staticmethod
    def draw(seed: int) -> Scenario:
        chance = random.Random(f"membership {seed}")
        workers = chance.randint(2, 6)
        options = {
            "members": str(workers),
            "seconds": str(chance.choice([20, 100, 600])),
            "wrong": str(chance.choice([0, 0, 1, 5])),  # reports of processes that are alive
        }
        rates = FaultRates(
            processes=tuple(range(workers)), pairs=(), until=float(options["seconds"]),
            killable=tuple(range(workers)), startable=tuple(range(workers)),
            stop_s=30.0, store_s=10.0,
        )  # fmt: skip
        return Scenario("membership", seed, tuple(options.items()), draw_faults(rates, chance, 60))

    def __init__(self, scenario: Scenario, world: World) -> None:
        options = dict(scenario.options)
        self.world, self.store = world, SimulatedStore(world)
        self.members, self.seconds = int(options["members"]), float(options["seconds"])
        self.chance = world.random("reports")
        self.clients: dict[int, MembershipClient] = {}  # of the processes that are members
        self.views: dict[int, View] = {}  # in which each client has joined
        self.info = Network(world).info(0, 1, Limits()).to_json()
        self.reported: dict[int, list[Any]] = {}
        self.proposed: list[tuple[MembershipClient, View]] = []
        self.joining: set[int] = set()
        world.on_start = self.start
        world.check = self.check
        self._entries = MembershipLog(self.members)
        self.wrong = int(options["wrong"])
        for _ in range(self.wrong):
            at = 5.0 * round(self.chance.uniform(1.0, self.seconds) / 5.0)  # as `ended`
            world.at(at, self.report, self.chance.randrange(self.members))

    def run(self) -> None:
        with virtual(self.world, [membership], **detectors(self.world)):
            for worker in range(self.members):
                self.start(worker, 0)
            end = max(self.seconds, self.world.fault_ends) + 2 * JOIN_S + 40.0
            self.world.run(lambda: self.world.now > end, end + 10.0)
        self.check_end()

    def start(self, worker: int, incarnation: int) -> None:
        if worker < self.members:
            process = self.world.spawn(worker, lambda: self.main(worker, incarnation))
            process.at_end.append(lambda: self.ended(worker))

    def ended(self, worker: int) -> None:
        """Let the others find out, of all that have ended in the last seconds at once."""
        self.clients.pop(worker, None)
        self.joining.discard(worker)
        found_at = 5.0 * math.ceil(self.world.now / 5.0 + 0.2)
        self.world.at(found_at + 0.01 * self.chance.random(), self.report_end, worker)

    def report_end(self, worker: int) -> None:
        """Let a member report the end of a dead process, until the log has it."""
        dead = not self.world.processes[worker].alive
        if dead and self._entries.view[worker] % 2 == 0:
            self.report(worker)
            self.world.after(5.0, self.report_end, worker)

    def report(self, worker: int) -> None:
        """Let members report the end of another, which may be alive, at about the same time."""
        others = [
            m for m in self.clients if m != worker and self.world.processes[m].state == "running"
        ]
        if not others:
            return
        for author in self.chance.sample(others, self.chance.randint(1, len(others))):
            client = self.clients[author]
            view = without_worker(client.log.view, worker)
            with self.world.inside(self.world.processes[author]):
                client.propose(view)
            self.proposed.append((client, view))

    def main(self, worker: int, incarnation: int) -> None:
        world, process = self.world, self.world.current
        store = self.store.handle()
        try:
            with world.limited(2 * JOIN_S + 30.0, "joining"):
                client = MembershipClient(store, "log", worker, self.members, clock=world.clock)
                life = client.register()
                store.set(store_key("log", worker, life), self.info)
                if life:
                    self.joining.add(worker)
                    for other in client.announce(life, JOIN_S):
                        found = [(c.worker, c.incarnation) for c in self.reported.get(other, ())]
                        assert (worker, life) in found, f"{other} has not accepted {worker}"
                    self.joining.discard(worker)
        except (RendezvousError, RuntimeError) as error:
            world.log(f"{world.now:10.3f} {error}")
            self.check_may_fail(worker, error)
            found = "another process" in str(error) and not incarnation
            assert not found, "another process has the rank of the first one"
            world.end(process)
            return
        changed = membership.threading.Event()
        client.start(changed.set)
        self.clients[worker], self.views[worker] = client, self.start_view(client)
        seen = self.reported[worker] = []
        while True:
            changed.wait(0.5)
            changed.clear()
            for change in client.take_changes():
                assert change not in seen, f"member {worker} is told twice of {change}"
                seen.append(change)
                if change.worker == worker and not change.joined and change.incarnation == life:
                    client.stop()
                    world.end(process)  # as a worker that was removed
                    return
                if change.joined and change.peer_info is not None:
                    client.acknowledge(change.worker, change.incarnation)

    def check_may_fail(self, worker: int, error: Exception) -> None:
        """If processes are killed and nothing else, they join again unless no other is alive."""
        if self.world.scenario.kills_only and not self.wrong:
            assert not set(self.clients) - {worker}, f"member {worker} cannot join: {error}"

    def start_view(self, client: MembershipClient) -> View:
        """Return what a member knows before it is told of changes."""
        return client.log.view

    # -- invariants -----------------------------------------------------------------------

    def check(self) -> None:
        """Check new entries of the log, and that no member is ahead of it."""
        entries = self._entries
        while (text := self.store.values.get(f"{PATH}/{entries.length}")) is not None:
            before = entries.view
            entries.append(text)
            assert covers(entries.view, before), "numbers of the log have fallen"
            assert entries.view != before, f"an entry has nothing new: {text}"
            author = json.loads(text)[0]  # which has read all entries before
            ended = before[author] % 2 and entries.view[author] % 2
            assert not ended, f"member {author} writes after its end"
        for worker, client in self.clients.items():
            log = client.log
            assert log.length <= entries.length
            if log.length == entries.length:
                assert log.view == entries.view, f"member {worker} has another view of the log"

    def check_end(self) -> None:
        view = self._entries.view
        for worker, client in self.clients.items():
            process = self.world.processes[worker]
            assert client.log.length == self._entries.length, f"member {worker} reads no more"
            assert client._proposal is None, f"what member {worker} proposed was never written"
            assert client._proposed_at is None
            assert view[worker] % 2 == 0, f"member {worker} does not know that it was removed"
            assert process.alive
        for client, proposal in self.proposed:
            if client in self.clients.values():
                assert covers(view, proposal), f"the proposal {proposal} is lost: {view}"
        dead = [w for w, process in self.world.processes.items() if not process.alive]
        for worker in dead if self.clients else ():
            assert view[worker] % 2, f"the end of member {worker} was reported, and is lost"
        for worker in self.clients:
            told = {c.worker: c for c in self.reported[worker]}
            for other, number in enumerate(view):
                if other in told:
                    change = told[other]
                    assert (change.incarnation, change.joined) == (number // 2, number % 2 == 0)
                else:
                    assert number == self.views[worker][other], f"member {worker} is not told"
