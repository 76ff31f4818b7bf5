"""Who is slow when: what is written, what is refused, and what follows."""

from __future__ import annotations

from collections import Counter

import pytest

from wingbeat.errors import UsageError
from wingbeat_lab.bench import slow
from wingbeat_lab.bench.slow import Slow


def parse(*texts: str) -> tuple[Slow, ...]:
    return slow.parse(texts, workers=4, iterations=60)


def factors(slows: tuple[Slow, ...], iteration: int, seed: int = 0) -> list[float]:
    """How long each of four workers sleeps."""
    return [
        slow.factor(slows, rank=rank, iteration=iteration, workers=4, seed=seed)
        for rank in range(4)
    ]


def test_a_slow_worker_is_slow_in_all_iterations() -> None:
    slows = parse("3=+2x", "0=+0.5x")
    assert [factors(slows, i) for i in (-130, 0, 1, 60, 61)] == [[0.5, 0.0, 0.0, 2.0]] * 5


def test_slow_interval_includes_its_first_and_last_iteration() -> None:
    slows = parse("1=+2x@20-60", "1=+5x@3-3")
    slept = {i: factors(slows, i)[1] for i in (-1, 2, 3, 4, 19, 20, 60, 61)}
    assert slept == {-1: 0, 2: 0, 3: 5, 4: 0, 19: 0, 20: 2, 60: 2, 61: 0}
    assert not any(factors(slows, 20)[0:1] + factors(slows, 20)[2:])


def test_a_random_worker_is_one_each_time_and_all_in_their_turn() -> None:
    slows = parse("random:+2x")
    drawn = [factors(slows, i).index(2.0) for i in range(-100, 300)]
    assert all(sorted(factors(slows, i)) == [0, 0, 0, 2] for i in range(300))
    counted = Counter(drawn)
    assert min(counted[rank] for rank in range(4)) > 60
    assert drawn == [factors(parse("random:+2x"), i).index(2.0) for i in range(-100, 300)]
    assert drawn != [factors(slows, i, seed=1).index(2.0) for i in range(-100, 300)]
    assert [sum(factors(parse("random:+3x@5-6"), i)) for i in (4, 5, 6, 7)] == [0, 3, 3, 0]


def test_what_an_iteration_is_longer_by_on_average() -> None:
    assert slow.longest((), iterations=60) == 0
    assert slow.longest(parse("0=+2x", "1=+3x@1-30"), iterations=60) == 2.5
    assert slow.longest(parse("random:+2x@1-15"), iterations=60) == 0.5


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["4=+2x"], ["'4=+2x'", "no rank 4", "0 to 3"]),
        (["3=2x"], ["'3=2x'", "RANK=+2x"]),
        (["+2x"], ["random:+2x"]),
        (["random=+2x"], ["random:+2x"]),
        (["-1=+2x"], ["'-1=+2x'"]),
        (["3=+0x"], ["'0' times", "above 0 up to 1000"]),
        (["3=+-2x"], ["'-2' times"]),
        (["3=+x"], ["'' times"]),
        (["3=+nanx"], ["'nan' times"]),
        (["3=+infx"], ["'inf' times"]),
        (["3=+2x@60-20"], ["60 to 20", "of the 60 timed iterations"]),
        (["3=+2x@0-20"], ["0 to 20", "counted from 1"]),
        (["3=+2x@20-61"], ["20 to 61"]),
        (["3=+2x@20"], ["RANK=+2x@20-60"]),
        (["h3@200mbit"], ["--lab star:4@1gbit,h3@200mbit"]),
        (["1=+2x", "1=+3x@5-6"], ["--slow 1=+2x and --slow 1=+3x@5-6", "one at a time"]),
        (["1=+2x@1-5", "1=+3x@5-6"], ["one at a time"]),
        (["random:+2x", "0=+3x"], ["one at a time"]),
        (["random:+2x", "random:+3x"], ["one at a time"]),
    ],
)
def test_what_cannot_work_is_one_line(texts: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*texts)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_ranges_that_do_not_meet_are_allowed() -> None:
    assert len(parse("1=+2x@1-4", "1=+3x@5-6", "random:+1x@7-9", "2=+1x@1-6")) == 4
