"""Who goes on when workers or halves of a network are gone: one part, and the rest is told why."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Sequence
from unittest.mock import Mock

import pytest

from helpers.cards import Cards, bcube, star
from wingbeat.errors import PeerError, RendezvousError
from wingbeat.exchanges.attendance import Attendance, News, announce, arrive
from wingbeat.exchanges.departures import Departures
from wingbeat.exchanges.presence import Back, Gone, Presence
from wingbeat.stale.letters import Malformed
from wingbeat.stale.messages import Report
from wingbeat.stale.pace import Pace
from wingbeat.stale.roll import Change, Entry, Roll
from wingbeat.stale.view import View, whole
from wingbeat.stale.worker import Worker
from wingbeat.transport.failures import publish_failure
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages.peers import PeerInfo


class Store(Switchboard):
    """One that some cannot reach."""

    unreachable = False

    def claim(self, key: str, value: str) -> str:
        if self.unreachable:
            raise TimeoutError("connection reset")
        return super().claim(key, value)


class Party:
    """Workers that only look who is there; over one interface each if ``reach`` is not said."""

    def __init__(
        self,
        n: int,
        *,
        survives: bool = True,
        reach: Sequence[Sequence[Collection[int]]] | None = None,
        said: Store | None = None,
    ) -> None:
        self.cards = Cards(star(n, 1) if reach is None else reach, patience=5.0)
        self.store, self.lines = Store(), list[str]()
        self.said = said
        self.hidden = Store()
        self.hidden.unreachable = True
        self.machines = [Worker(w, n, Pace(1, 1, 1), lambda *_: None) for w in range(n)]
        self.rolls = [
            Attendance(self.store, "r", w, Roll(n), clock=self.cards.clock) for w in range(n)
        ]
        self.presences = [
            Presence(
                self.cards.boxes[w], self.cards.lanes[w], self.machines[w], self.rolls[w],
                survives=survives, me=f"rank {w}", name="rank {}".format, clock=self.cards.clock,
                departures=Departures(self.said, f"rank {w}", n, say=self.lines.append),
            )
            for w in range(n)
        ]  # fmt: skip
        self.ended: dict[int, str] = {}
        self.gone: dict[int, list[Gone | Back]] = {w: [] for w in range(n)}

    def look(self) -> None:
        for worker, presence in enumerate(self.presences):
            if worker in self.ended or worker in self.cards.dead:
                continue
            try:
                self._work(worker)
                for event in presence.look(presence.missing()):
                    self.gone[worker].append(event)
                    if isinstance(event, Gone):
                        self.cards.lanes[worker].forget(event.worker)
                    if isinstance(event, Gone) and event.missed:
                        self.machines[worker].lost(event.worker, event.life)
            except PeerError as error:
                self.ended[worker] = str(error)
                self.cards.dead.add(worker)

    def _work(self, worker: int) -> None:
        try:
            self.rolls[worker].work()
        except TimeoutError as error:
            self.rolls[worker]._failure = str(error)

    def run(self, seconds: float) -> Party:
        self.cards.run(seconds, 0.1, self.look)
        return self

    def split(self, *halves: tuple[int, ...], resets: bool = False) -> None:
        """Let no half reach another; with ``resets`` connections end, as by some firewalls."""
        for a, b in itertools.combinations(halves, 2):
            pairs = {frozenset(pair) for pair in itertools.product(a, b)}
            self.cards.apart |= pairs
            if resets:
                self.cards.ended |= dict.fromkeys(pairs, self.cards.clock.now)

    def mend(self) -> None:
        """Let all reach each other again, over new connections."""
        self.cards.apart.clear()
        self.cards.ended.clear()
        for way, flow in self.cards._flows.items():
            if flow:
                self.cards._later(way)


def test_who_failed_by_an_exception_is_named_where_none_may_be_missing() -> None:
    """Not the one that is noticed first, which had waited for it."""
    party = Party(3, survives=False, said=Store()).run(2.0)
    assert party.said is not None
    publish_failure(party.said, 2, ValueError("boom"))
    publish_failure(party.said, 1, PeerError("rank 1: rank 2 failed"))
    party.cards.dead.add(1)
    party.run(12.0)
    assert party.ended[0] == (
        "rank 0: before all had settled, rank 2 failed with ValueError: boom; start the job again "
        "from a checkpoint"
    )


def test_who_is_gone_is_named_once_by_each() -> None:
    party = Party(4).run(2.0)
    party.cards.dead.add(2)
    party.run(12.0)
    assert party.ended == {}
    for worker in (0, 1, 3):
        assert party.gone[worker] == [Gone(2, 0, missed=True)]
        assert party.machines[worker].life_of(2) is None
    assert len(party.lines) == 3
    assert any("rank 0: rank 2 gave no sign for" in line for line in party.lines)
    assert all(line.endswith("; the others go on without it") for line in party.lines)


def test_who_is_killed_is_missed_a_second_after_its_connections_have_ended() -> None:
    """And not before: a process that lives makes them anew."""
    party = Party(3).run(2.0)
    party.cards.kill(2)
    party.run(0.9)
    assert not any(party.gone.values())
    party.run(1.1)
    assert party.ended == {}
    assert party.gone[0] == party.gone[1] == [Gone(2, 0, missed=True)]
    said = "rank 2 has ended without a word; the others go on without it"
    assert sorted(party.lines) == [f"rank {worker}: {said}" for worker in (0, 1)]
    assert party.rolls[0].roll.entries == 1


def test_who_is_killed_is_blocked_member_its_neighbours_and_gone_for_all() -> None:
    """Of 8 hosts with three interfaces each 3 are joined to one: the roll tells the others."""
    party = Party(8, reach=bcube(2, 3)).run(2.0)
    party.cards.kill(5)
    party.run(2.5)
    assert party.ended == {}
    for worker in set(range(8)) - {5}:
        assert party.gone[worker] == [Gone(5, 0, missed=True)]
    knew = {int(line[5]) for line in party.lines if "rank 5 has ended without a word" in line}
    assert {1, 4, 7} >= knew != set()
    told = {int(line[5]) for line in party.lines if "rank 5 was missed by rank" in line}
    assert knew | told == set(range(8)) - {5}


def test_two_that_are_killed_together_are_both_missed() -> None:
    party = Party(5).run(2.0)
    party.cards.kill(1)
    party.cards.kill(4)
    party.run(2.0)
    assert party.ended == {}
    for worker in (0, 2, 3):
        assert {event.worker for event in party.gone[worker]} == {1, 4}


def test_who_is_killed_ends_training_in_a_second_where_all_are_needed() -> None:
    party = Party(3, survives=False).run(2.0)
    party.cards.kill(2)
    party.run(2.0)
    assert set(party.ended) == {0, 1}
    said = "rank 0: before all had settled, rank 2 has ended without a word"
    assert party.ended[0].startswith(said)


def test_who_was_killed_is_named_and_not_who_has_left_because_of_that() -> None:
    party = Party(3, survives=False).run(2.0)
    party.cards.kill(2)
    party.run(0.9)
    party.cards.boxes[0].left = party.cards.boxes[2].left = frozenset({1})  # has found out first
    party.run(0.1)
    assert party.ended[0].startswith("rank 0: before all had settled, rank 2 has ended without")


def test_who_leaves_is_named_though_a_connection_has_just_ended() -> None:
    party = Party(3, survives=False).run(2.0)
    party.cards.kill(2)
    party.run(0.3)
    party.cards.boxes[0].left = frozenset({1})
    party.run(0.1)
    assert party.ended[0].startswith("rank 0: before all had settled, rank 1 has left")


def test_nobody_is_dead_whose_connection_has_ended_and_who_makes_it_anew() -> None:
    """Also again and again; or who is heard otherwise, for whatever reason."""
    party = Party(3).run(2.0)
    for _ in range(8):
        party.split((0,), (1,), resets=True)
        party.run(0.7)
        party.mend()
        party.run(0.3)
    party.cards.ended[frozenset((0, 2))] = 0.0
    party.run(10.0)
    assert party.ended == {}
    assert party.lines == []


def test_a_network_that_is_cut_is_no_death() -> None:
    """After a minute without an answer connections end as well: who speaks over others lives."""
    party = Party(3).run(2.0)
    party.split((0,), (1,))
    party.run(60.0)
    party.split((0,), (1,), resets=True)
    party.cards.dead.add(1)  # it computes, and none of its threads gets to say a word
    party.run(3.0)
    party.cards.dead.clear()
    party.mend()
    party.split((0,), (1,), resets=True)
    party.run(10.0)
    assert party.ended == {}
    assert party.lines == []


def test_who_is_stopped_keeps_its_connections_and_is_waited_for() -> None:
    party = Party(3).run(2.0)
    party.cards.dead.add(2)
    party.run(4.0)
    assert not any(party.gone.values())
    party.run(4.0)
    assert party.gone[0] == party.gone[1] == [Gone(2, 0, missed=True)]
    assert all("rank 2 gave no sign for" in line for line in party.lines)


def test_who_comes_again_is_not_taken_for_the_one_that_was_killed() -> None:
    party = Party(3).run(2.0)
    party.cards.kill(2)
    party.run(2.0)
    for worker in (0, 1):
        party.rolls[worker]._news.append(News(Change(2, 1, True, 2), Mock(PeerInfo)))
    party.cards.ended.clear()
    party.cards.dead.clear()
    party.run(0.1)
    for worker in (0, 1):
        assert [type(event) for event in party.gone[worker]] == [Gone, Back]
        party.cards.lanes[worker].renew(2, 1)
    party.cards.dead.add(2)  # it has much to load before it says a word
    party.run(20.0)
    assert [len(events) for events in party.gone.values()] == [2, 2, 0]


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("halves", [((0, 1), (2, 3, 4)), ((0, 1, 2, 3), (4,)), ((0,), (1, 2))])
def test_of_two_halves_one_goes_on(
    halves: tuple[tuple[int, ...], tuple[int, ...]], resets: bool
) -> None:
    party = Party(sum(map(len, halves))).run(2.0)
    party.split(*halves, resets=resets)
    party.run(20.0)
    goes_on = [half for half in halves if not set(half) & set(party.ended)]
    assert len(goes_on) == 1, party.ended
    (winners,) = goes_on
    (losers,) = (half for half in halves if half != winners)
    assert set(party.ended) == set(losers)
    for worker in losers:
        assert "had no sign of it, and the others go on; start it anew" in party.ended[worker]
    for worker in winners:
        assert {event.worker for event in party.gone[worker]} == set(losers)


def test_an_entry_waits_for_whoever_may_be_missed_next() -> None:
    party = Party(4).run(2.0)
    party.split((0, 1), (2,))
    party.split((2,), (3,))
    party.run(1.5)
    party.split((0, 1), (3,))
    party.run(20.0)
    assert party.rolls[0].roll.view == (0, 0, 1, 1)
    assert party.rolls[0].roll.entries == 1
    assert set(party.ended) == {2, 3}


def test_a_second_life_may_end_as_well() -> None:
    party = Party(3).run(2.0)
    for worker in (0, 1):
        ended, begun = Change(2, 0, False, 2), Change(2, 1, True, 2)
        party.rolls[worker].roll.read(Entry(2, View((0, 0, 2))).to_text())
        party.rolls[worker]._news += [News(ended, None), News(begun, Mock(PeerInfo))]
    party.store.set("roll/r/0", Entry(2, View((0, 0, 2))).to_text())
    party.ended[2] = "in its first life"
    party.run(0.2)
    for worker in (0, 1):
        assert [type(event) for event in party.gone[worker]] == [Gone, Back]
        party.cards.lanes[worker].renew(2, 1)
        party.machines[worker].receive(2, 1, Report(View((0, 0, 2)), -1, ()))
    party.cards.lanes[2] = party.cards.new(2, [0, 0, 1], None, 5.0)
    party.run(2.0)
    party.cards.dead.add(2)
    party.run(12.0)
    assert party.rolls[0].roll.view == (0, 0, 3)
    for worker in (0, 1):
        assert party.gone[worker][2:] == [Gone(2, 1, missed=True)]


def test_who_leaves_when_all_have_settled_is_missed_if_training_goes_on() -> None:
    party = Party(2).run(2.0)
    machine = Mock(rank=0, life=0, settled=True)
    machine.life_of.return_value = 0
    party.presences[0]._machine = machine
    party.cards.boxes[0].left = frozenset({1})
    party.cards.dead.add(1)
    party.run(0.2)
    assert party.gone[0] == [Gone(1, 0, missed=False)]
    party.cards.boxes[0].left = frozenset()
    party.run(0.2)
    assert len(party.gone[0]) == 1
    machine.settled = False
    party.run(0.4)
    assert party.gone[0][1:] == [Gone(1, 0, missed=True)]


def test_the_half_without_the_store_ends() -> None:
    party = Party(5).run(2.0)
    for worker in (2, 3, 4):
        party.rolls[worker]._store = party.hidden
    party.split((0, 1), (2, 3, 4))
    party.run(25.0)
    assert set(party.ended) == {2, 3, 4}
    assert party.ended[2].startswith("rank 2: misses rank 0, rank 1, and cannot have it decided")
    assert "the rendezvous store is not to be reached: connection reset" in party.ended[2]


def test_two_that_do_not_reach_each_other_speak_over_a_third() -> None:
    party = Party(3).run(2.0)
    party.cards.apart.add(frozenset((0, 1)))
    party.run(20.0)
    assert party.ended == {}
    assert party.lines == []


def test_nobody_is_given_up_where_all_are_needed() -> None:
    party = Party(3, survives=False).run(2.0)
    party.cards.dead.add(2)
    party.run(12.0)
    assert set(party.ended) == {0, 1}
    assert "rank 0: before all had settled, rank 2 gave no sign for" in party.ended[0]
    assert not party.store.has("roll/r/0")


def test_one_that_is_heard_again_stays() -> None:
    party = Party(3).run(2.0)
    party.cards.apart.add(frozenset((0, 2)))
    party.cards.apart.add(frozenset((0, 1)))  # so nothing is decided before all are missed
    party.run(4.0)
    party.mend()
    party.run(10.0)
    assert party.ended == {}
    assert all(not events for events in party.gone.values())


def test_the_roll_is_read_as_it_was_written() -> None:
    roll = Roll(3)
    assert roll.read(Entry(1, View((0, 0, 1))).to_text()) == [Change(2, 0, False, 1)]
    assert roll.read(Entry(2, View((0, 0, 2))).to_text()) == [Change(2, 1, True, 2)]
    both = roll.read(Entry(2, View((0, 0, 4))).to_text())
    assert both == [Change(2, 1, False, 2), Change(2, 2, True, 2)]
    assert roll.read(Entry(0, View((0, 0, 3))).to_text()) == []
    assert roll.view == (0, 0, 4)
    assert roll.entries == 4
    assert not roll.wants(View((0, 0, 3)))
    assert roll.wants(View((1, 0, 0)))


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"by": 0}', '{"by": 3, "view": [0, 0, 0]}', '{"by": 0, "view": [0, 0]}',
     '{"by": 0, "view": [0, 0, -1]}', '{"by": 0, "view": [0, 0, true]}', "[" * 100_000,
     '{"by": true, "view": [0, 0, 0]}', '{"by": 0, "view": 5}'],
)  # fmt: skip
def test_what_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(Malformed, match="is no entry of the roll"):
        Roll(3).read(text)


def test_of_two_entries_the_first_is_right_and_the_second_adds_to_it() -> None:
    store = Switchboard()
    one, two = (Attendance(store, "r", w, Roll(4)) for w in range(2))
    one.miss(View((0, 0, 1, 0)))
    two.miss(View((0, 0, 1, 1)))
    one.work()
    two.work()
    one.work()
    assert one.roll.view == two.roll.view == (0, 0, 1, 1)
    assert one.roll.entries == 2
    assert [news.change for news in two.news()] == [Change(2, 0, False, 0), Change(3, 0, False, 1)]


def test_a_malformed_card_is_refused_and_the_roll_is_read_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Switchboard()
    roll = Attendance(store, "r", 0, Roll(3))
    store.set("messages/r/1.1", '{"session": Infinity}')
    store.set("roll/r/0", Entry(1, View((0, 2, 0))).to_text())
    store.set("roll/r/1", Entry(1, View((0, 2, 1))).to_text())
    heard = threading.Event()
    roll.start(heard.set)
    try:
        assert heard.wait(20.0)
        changes = [news.change for news in roll.news()]
    finally:
        roll.stop()
    assert Change(2, 0, False, 1) in changes
    assert Change(1, 1, True, 1) not in changes
    refused = "rank 1 comes back, and is refused: the rendezvous store has under 'messages/r/1.1'"
    assert caplog.text.count(refused) == 1


def test_the_end_of_the_roll_by_an_exception_ends_the_worker() -> None:
    party = Party(2)

    def broken(_key: str) -> bool:
        raise KeyError("torn")

    party.store.has = broken  # type: ignore[method-assign]
    heard = threading.Event()
    party.rolls[0].start(heard.set)
    assert heard.wait(20.0)
    with pytest.raises(PeerError, match="rank 0: thread wingbeat-roll has ended by KeyError: "):
        list(party.presences[0].look({}))


def test_who_has_been_missed_misses_nobody() -> None:
    store = Switchboard()
    one, two = (Attendance(store, "r", w, Roll(2)) for w in range(2))
    one.miss(View((0, 1)))
    one.work()
    two.miss(View((1, 0)))
    two.work()
    assert two.roll.view == (0, 1)
    assert not store.has("roll/r/1")


def test_a_worker_comes_back_in_a_new_life() -> None:
    store = Switchboard()
    assert arrive(store, "r", 1, 3)[1] == 0
    roll, life = arrive(store, "r", 1, 3)
    assert life == 1
    for other in (0, 2):
        store.set(f"roll/r/met/1.1/{other}", "1")
    assert announce(store, "r", 1, 1, roll, 1.0) == {0: 0, 2: 0}
    assert roll.view == (0, 2, 0)
    assert arrive(store, "r", 1, 3)[1] == 2


def test_who_comes_back_names_who_does_not_answer() -> None:
    store = Switchboard()
    store.set("roll/r/met/1.1/0", "1")
    roll = Roll(3)
    with pytest.raises(RendezvousError, match=r"rank 1: came back, and rank 2 did not answer wit"):
        announce(store, "r", 1, 1, roll, 0.1)


def test_who_comes_back_waits_for_nobody_who_is_gone_meanwhile() -> None:
    store, whole_ = Switchboard(), whole(3)
    store.set("roll/r/met/1.1/0", "1")
    store.set("roll/r/0", Entry(1, View((0, 2, 0))).to_text())
    store.set("roll/r/1", Entry(0, View((0, 0, 1))).to_text())
    roll = Roll(3)
    assert roll.view == whole_
    assert announce(store, "r", 1, 1, roll, 5.0) == {0: 0}
    assert roll.entries == 1  # the rest is read by whoever goes on


def test_of_two_processes_in_one_place_one_goes_on() -> None:
    store = Switchboard()
    store.set("roll/r/0", Entry(1, View((0, 4, 0))).to_text())
    with pytest.raises(RendezvousError, match="rank 1: another process came back in its place"):
        announce(store, "r", 1, 1, Roll(3), 1.0)
