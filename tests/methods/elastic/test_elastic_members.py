"""How members find each other in the store: with few reads, and after a restart."""

from __future__ import annotations

import threading
import time
from collections import Counter

from wingbeat.methods.elastic.agreement import Decision, Report
from wingbeat.methods.elastic.members import Members
from wingbeat.transport import loopback
from wingbeat.transport.failures import LivenessListener
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.world import World


class Counting(Switchboard):
    """A store that counts what each thread reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[int] = Counter()

    def get(self, key: str, seconds: float) -> str:
        self.reads[threading.get_ident()] += 1
        return super().get(key, seconds)

    def has(self, key: str) -> bool:
        self.reads[threading.get_ident()] += 1
        return super().has(key)


def listening(world: World) -> LivenessListener:
    listener = LivenessListener("127.0.0.1")
    world.store.set(f"here/{world.rank}", listener.address.to_text())
    return listener


def test_members_read_the_store_less_and_less_while_one_does_not_report() -> None:
    store = Counting()
    worlds = loopback.worlds(8, switchboard=store)
    listeners = [listening(world) for world in worlds]
    members = [Members(world, 1) for world in worlds]
    reads: dict[int, int] = {}

    def agree(world: World) -> tuple[int, Decision]:
        own = members[world.rank]
        own.enter(0, own.begin())
        if world.rank == 7:
            time.sleep(2.0)  # alive, and in a long backward
        found = own.agree(Report(own.token, 5, 4))
        reads[world.rank] = store.reads[threading.get_ident()]
        return found

    found = loopback.run(worlds, agree)
    assert len(set(found)) == 1
    epoch, decision = found[0]
    assert epoch == 1
    assert sorted(decision.tokens) == list(range(8))
    # Each member reads all reports and addresses once, and then its own report and what is missing;
    # addresses four times per second. With all of it in each of 50 polls per second it were 3300.
    assert all(reads[rank] < 400 for rank in range(7)), reads
    for each in listeners:
        each.close()


def test_report_of_a_restarted_process_replaces_that_of_its_predecessor() -> None:
    store = Counting()
    worlds = loopback.worlds(3, switchboard=store, timeout=30.0)
    listeners = [listening(world) for world in worlds]
    members = [Members(world, 3) for world in worlds]
    former = members[0].begin()
    former_token = members[2].token
    # Rank 2 has reported and was killed: the others wait for it, as three are needed.
    store.set("elastic/1/report/1/2", f'["{former_token}", 5, 4, []]')
    listeners[2].close()

    def agree(world: World) -> tuple[int, Decision]:
        if world.rank == 2:
            time.sleep(0.6)  # the others have read its predecessor's report
            listeners.append(listening(world))
            return Members(world, 3).join()
        own = members[world.rank]
        own.enter(0, former)
        return own.agree(Report(own.token, 5, 4))

    found = loopback.run(worlds, agree)
    assert len(set(found)) == 1
    decision = found[0][1]
    assert sorted(decision.tokens) == [0, 1, 2]
    assert decision.tokens[2] not in ("", former_token)
    assert decision.copies == (2,)
    for each in listeners:
        each.close()
