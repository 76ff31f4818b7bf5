"""Streams over several interfaces in virtual time: spread, cut, mended, around and anew."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.cards import Cards, Letter, bcube, star
from wingbeat.methods.bounded_staleness.paths import Path
from wingbeat.methods.bounded_staleness.streams import (
    BEGIN,
    MORE,
    WINDOW,
    Stream,
    _Part,
)
from wingbeat.schema import MalformedMessage

PART = bytes(5_000)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def sent(stream: Stream, path: Path) -> _Part:
    """Send the next part."""
    letter = Letter(path.worker, MORE, b"", (0, 0, 0, 0), 100)
    part = _Part(MORE, stream.next_out, stream.next_out, path, letter, 0.0)  # type: ignore
    stream.out.append(part)
    stream.next_out += 1
    return part


@settings(deadline=None, max_examples=examples(20))
@given(st.integers(0, 2**32), st.integers(0, 300), st.sampled_from([0, 2**32 - 50]))
def test_parts_in_any_order_and_repeated_arrive_in_order_and_once(
    seed: int, count: int, first: int
) -> None:
    """Worker 1 receives them; some are forwarded by worker 2."""
    chance = random.Random(seed)
    out, into = Stream(0, 0.0, 1.0), Stream(0, 0.0, 1.0)
    out.next_out = into.next_in = first
    got, under_way, acknowledgements = list[int](), list[_Part](), list[int]()
    while len(got) < count:
        if len(out.out) < WINDOW and out.next_out - first < count:
            under_way.append(sent(out, Path(chance.choice([1, 2]), 0)))
        what = chance.randrange(4)
        if what == 0 and under_way:
            part = under_way.pop(chance.randrange(len(under_way)))
            got += [number for _, number in into.receive(part.number % 2**32, MORE, part.number)]
            part.posted.arrived = True  # type: ignore[misc]
        elif what == 1 and out.out:
            under_way.append(chance.choice(list(out.out)))
        elif what == 2:
            acknowledgements.append(into.next_in % 2**32)
        elif acknowledgements:
            out.acknowledge(acknowledgements.pop(chance.randrange(len(acknowledgements))), 0.0)
        out.release_arrived(1)
        assert len(into._early) < WINDOW
    assert got == list(range(first, first + count))


def test_number_beyond_the_window_is_refused() -> None:
    into = Stream(0, 0.0, 1.0)
    assert list(into.receive(WINDOW - 1, MORE, b"last")) == []
    with pytest.raises(MalformedMessage, match=f"number {WINDOW} is beyond the window at 0"):
        list(into.receive(WINDOW, MORE, b"too far"))


def test_acknowledgement_of_parts_never_sent_is_refused() -> None:
    out = Stream(0, 0.0, 1.0)
    sent(out, Path(2, 0))
    with pytest.raises(MalformedMessage, match="2 parts arrived of 1 sent"):
        out.acknowledge(2, 0.0)
    out.acknowledge(1, 0.0)
    out.acknowledge(0, 0.0)  # an older one
    assert not out.out


def test_arrival_at_another_worker_releases_no_part() -> None:
    out = Stream(0, 0.0, 1.0)
    forwarded, direct = sent(out, Path(2, 0)), sent(out, Path(1, 0))
    forwarded.posted.arrived = direct.posted.arrived = True  # type: ignore[misc]
    out.release_arrived(1)
    assert list(out.out) == [forwarded, direct]
    out.acknowledge(1, 0.0)
    out.release_arrived(1)
    assert not out.out


def test_workers_that_all_reach_each_other_send_no_acknowledgements() -> None:
    cards = Cards(star(2, 2))
    cards.say(0, 1, [PART] * 100)
    cards.run(10.0)
    assert len(cards.from_(0, 1)) == 100
    assert not any(stream.out for stream in cards.streams[0]._streams.values())
    assert cards.sent[1, 0] + cards.sent[1, 1] <= 100 * 21  # a heartbeat each half second


def test_forwarded_parts_are_acknowledged() -> None:
    cards = Cards(bcube(2, 2))
    cards.say(0, 3, [PART] * 60)
    cards.run(0.4)
    assert cards.from_(0, 3)
    cards.run(2.0)
    assert not cards.streams[0].busy
    assert not cards.streams[3].busy


@pytest.mark.parametrize(
    "reach", [star(3, 1), star(3, 2), bcube(2, 2), bcube(2, 3)], ids=["1", "2", "2x2", "2x3"]
)
def test_all_arrives_in_order_whatever_is_cut_and_mended(reach: list[list[list[int]]]) -> None:
    for seed in range(3):
        cards, chance = Cards(reach, seed, delay=0.05), random.Random(seed)
        pairs = list(itertools.permutations(range(len(reach)), 2))
        for source, to in pairs:
            cards.say(source, to, numbered(30))
        for _ in range(4):
            card = chance.randrange(len(reach)), chance.randrange(len(reach[0]))
            cards.cut(*card)
            cards.run(chance.uniform(0.1, 4.0))
            if chance.random() < 0.7:
                cards.mend(*card)
        for worker, interface in list(cards.down):
            cards.mend(worker, interface)
        cards.run(40.0, 0.1)
        for source, to in pairs:
            assert cards.from_(source, to) == numbered(30), (seed, source, to)
        assert not any(
            len(stream.out) for streams in cards.streams for stream in streams._streams.values()
        )
        assert not any(streams.silent() for streams in cards.streams)


def test_parts_are_spread_over_the_interfaces() -> None:
    cards = Cards(star(2, 2))
    cards.say(0, 1, [PART] * 100)
    cards.run(10.0)
    assert len(cards.from_(0, 1)) == 100
    a, b = cards.sent[0, 0], cards.sent[0, 1]
    assert abs(a - b) < 0.1 * (a + b)


def test_in_a_bcube_what_no_interface_reaches_is_passed_on_over_both() -> None:
    cards = Cards(bcube(2, 2))
    cards.say(0, 3, [PART] * 60)
    cards.run(10.0)
    assert len(cards.from_(0, 3)) == 60
    assert min(cards.sent[0, 0], cards.sent[0, 1]) > 20 * len(PART)
    assert cards.sent[0, 0] + cards.sent[0, 1] < 65 * len(PART)  # none is sent twice


def test_a_cut_interface_is_named_once_and_used_again_when_mended() -> None:
    cards = Cards(star(3, 2))
    cards.cut(0, 1)
    cards.say(0, 1, [PART] * 40)
    cards.run(8.0)
    assert len(cards.from_(0, 1)) == 40
    assert not cards.streams[0].silent()
    mine = [line for line in cards.lines if line.startswith("rank 0")]
    assert len(mine) == 1, mine
    assert "rank 0: eth1 has received nothing from rank" in mine[0]
    assert cards.streams[0].cut
    cut = cards.sent[0, 1]
    cards.say(0, 1, [PART] * 40)
    cards.run(2.0)
    assert cards.sent[0, 1] == cut
    cards.mend(0, 1)
    cards.run(2.0)
    assert [line for line in cards.lines if line.startswith("rank 0")][1:] == [
        "rank 0: eth1 is used again"
    ]
    cards.say(0, 1, [PART] * 40)
    cards.run(4.0)
    assert cards.sent[0, 1] > cut + 10 * len(PART)
    assert len(cards.from_(0, 1)) == 120


def test_who_passes_on_may_die() -> None:
    cards = Cards(bcube(3, 2))
    cards.run(1.0)
    cards.say(0, 4, [PART] * 50)
    cards.run(0.05)
    cards.dead.add(1)
    cards.run(25.0)
    assert len(cards.from_(0, 4)) == 50
    assert set(cards.streams[0].silent()) == {1}


def test_who_is_silent_is_named_after_a_while() -> None:
    cards = Cards(star(3, 2), patience=5.0)
    cards.run(2.0)
    cards.dead.add(2)
    cards.run(4.0)
    assert not cards.streams[0].silent()
    cards.run(2.0)
    said = cards.streams[0].silent()
    assert list(said) == [2]
    assert said[2].startswith("has been silent for 5.") or said[2].startswith(
        "has been silent for 6."
    )
    assert not cards.streams[0].has_sent_since(2, 4.0)
    assert cards.streams[0].has_sent_since(1, 4.0)
    cards.streams[0].forget(2)
    assert not cards.streams[0].silent()
    assert cards.streams[0].send(2, BEGIN, PART)  # into the air


def test_who_has_not_run_for_a_while_does_not_lose_the_others() -> None:
    cards = Cards(star(2, 1), patience=5.0)
    cards.say(0, 1, numbered(3))
    cards.run(1.0)
    cards.clock.now += 60.0
    cards.streams[0].tick()
    assert not cards.streams[0].silent()
    cards.run(0.04)
    assert not cards.streams[0].silent()
    assert cards.lines == []


def test_who_was_never_heard_has_time_to_begin() -> None:
    cards = Cards(star(2, 1), patience=5.0)
    cards.dead.add(1)
    cards.run(290.0, 0.1)
    assert not cards.streams[0].silent()
    cards.run(15.0, 0.1)
    assert list(cards.streams[0].silent()) == [1]


def test_a_new_life_begins_at_nothing_and_hears_nothing_of_the_old() -> None:
    cards = Cards(star(2, 1), delay=0.5)
    cards.say(0, 1, numbered(10))
    cards.say(1, 0, numbered(10))
    cards.run(0.3)
    cards.plan.clear()
    cards.got = {0: [], 1: []}
    cards.streams[0].renew(1, 1)
    cards.streams[1] = cards.new(1, [0, 1], None, 10.0)
    cards.say(0, 1, [b"new", b"life"])
    cards.say(1, 0, [b"I", b"am", b"back"])
    cards.run(10.0)
    assert cards.from_(0, 1) == [b"new", b"life"]
    assert cards.from_(1, 0) == [b"I", b"am", b"back"]


def test_no_more_than_allowed_is_kept() -> None:
    cards = Cards(star(2, 1))
    cards.dead.add(1)
    sent = 0
    while cards.streams[0].send(1, MORE, b"x"):
        sent += 1
    assert sent == WINDOW
    assert cards.streams[0].busy


@pytest.mark.parametrize("ids", [(0, 0, 2, 0), (0, 0, 1, 5), (70, 0, 1, 0), (0, 9, 1, 0)])
def test_nonsense_is_refused(ids: tuple[int, int, int, int]) -> None:
    cards = Cards(star(2, 1))
    cards.boxes[1].post(0, BEGIN, b"", ids=ids, interface=0, urgency=0)
    with pytest.raises(MalformedMessage):
        cards.run(1.0)


def test_what_goes_round_in_circles_ends() -> None:
    cards = Cards(star(3, 1), delay=0.0)
    cards.run(1.0)
    cards.dead.add(2)  # whoever could pass it on gives it back
    cards.streams[0].send(2, BEGIN, b"x")
    cards.run(20.0)
    assert cards.sent.total() < 150_000  # some signs each half second, eight hops each


def test_the_faster_interface_carries_more() -> None:
    cards = Cards(star(2, 2))
    cards.slow[0, 1] = 0.5
    cards.say(0, 1, [PART] * 200)
    cards.run(30.0)
    assert len(cards.from_(0, 1)) == 200
    assert cards.sent[0, 0] > 3 * cards.sent[0, 1]


def test_where_nothing_waits_the_first_interface_is_used() -> None:
    cards = Cards(star(2, 2))
    for _ in range(8):
        cards.say(0, 1, [PART])
        cards.run(0.5)
    assert cards.sent[0, 0] > 8 * len(PART)
    assert cards.sent[0, 1] < len(PART)


def test_on_a_slow_link_a_worker_is_heard_all_the_time() -> None:
    """A mebibyte waits, the link carries 40 KB a second; nobody is cut, or missed."""
    cards = Cards(star(2, 1), patience=4.0)
    cards.slow[0, 0] = 0.4  # for each letter of at most 16 KB
    cards.say(0, 1, [b"x" * 8_000] * 128)
    missed: list[dict[int, str]] = []
    cards.run(200.0, each=lambda: missed.append(cards.streams[1].silent()))
    assert not any(missed)
    assert cards.lines == []
    assert len(cards.from_(0, 1)) == 128


def test_a_large_part_does_not_wait_for_small_ones_of_others() -> None:
    cards = Cards(star(3, 1), delay=0.5)
    cards.say(0, 1, [b"x" * 1_000] * 500)
    cards.say(0, 2, [b"y" * 30_000])  # more than what the small ones leave of the window
    cards.run(6.0)
    assert cards.from_(0, 2) == [b"y" * 30_000]
    assert len(cards.from_(0, 1)) < 500
