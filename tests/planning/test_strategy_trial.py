"""Which strategy is the fastest, decided in virtual time, and what its result holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.compression import CodecOptions, Sketch, TopK
from wingbeat.errors import UsageError
from wingbeat.parts import Chosen
from wingbeat.planning import files
from wingbeat.planning.choice import StrategyResult, TimedStrategy
from wingbeat.planning.trials import STRATEGY_WARMUP, strategy_trial

MOST = 60
"""Iterations within which a training has decided, the first of which learns the order."""

STEPS = Chosen().steps
BLOCK = STRATEGY_WARMUP + STEPS + 1


def decide(times: list[list[float]]) -> tuple[int, list[int]]:
    """Run a trial; ``times`` has the seconds of a candidate's iterations, in turn, by candidate.

    As control does it: what an iteration takes is sent in the next one, and received after that.
    """
    trial = strategy_trial(len(times), STEPS, 0, range(1))
    taken = [0] * len(times)
    sent, known = [0.0, 0.0], 0.0
    used: list[int] = []
    while True:
        if trial.process_rows([sent]):
            known = 0.0
        if trial.done:
            return trial.candidate, used
        sent = trial.report(known)
        used.append(trial.candidate)
        own = times[trial.candidate]
        known = own[taken[trial.candidate] % len(own)]
        taken[trial.candidate] += 1


@pytest.mark.parametrize("best", range(5))
def test_strategy_trial_keeps_fastest_within_limit(best: int) -> None:
    chosen, used = decide([[1.0] if each == best else [1.03 + each / 1000] for each in range(5)])
    assert chosen == best
    assert len(used) < MOST
    assert [used.count(each) > BLOCK for each in range(5)].count(True) <= 3
    assert [used.count(each) > 2 * BLOCK for each in range(5)].count(True) <= 2


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=17), min_size=6, max_size=6))
@settings(max_examples=examples(200))
def test_strategy_trial_any_times_end_within_limit(times: list[list[float]]) -> None:
    chosen, used = decide(times)
    assert 0 <= chosen < 6
    assert len(used) + 1 <= 1 + (6 + 3 + 2) * BLOCK < MOST


def test_strategy_trial_disturbed_first_block_is_not_the_end() -> None:
    """The last is a tenth faster; another job has slowed its first block by a third."""
    disturbed = [1.2] * (BLOCK) + [0.9] * 100
    chosen, used = decide([[1.0], [1.1], [1.3], [1.4], disturbed])
    assert chosen == 4
    assert used.count(2) == used.count(3) == BLOCK
    assert used.count(4) > 2 * BLOCK


def test_strategy_trial_much_slower_candidates_are_tried_once() -> None:
    chosen, used = decide([[1.0], [1.6], [1.7], [2.0], [3.0]])
    assert chosen == 0
    assert len(used) == 5 * BLOCK


@pytest.mark.parametrize(
    ("topology", "codec", "count"),
    [("", None, 4), ("mesh", None, 5), ("", TopK(), 5), ("mesh", Sketch(), 6)],
)
def test_chosen_has_six_candidates_at_most_initial_first(
    topology: str, codec: CodecOptions | None, count: int
) -> None:
    plan = Chosen(mb=10)
    found = plan.candidates(topology, codec)
    assert len(found) == len({each.name for each in found}) == count
    assert found[0].fusion == plan.fusion()
    assert found[0].codec is None
    assert any(each.schedule == "wfbp" for each in found)
    assert any(each.codec == codec for each in found if each.codec) == bool(codec)


def test_chosen_sketch_is_tried_with_half_of_its_bits_too() -> None:
    codecs = [each.codec for each in Chosen().candidates("", Sketch(bits=8, split="count"))]
    assert codecs[3:] == [Sketch(split="count")] * 2 + [Sketch(bits=4, split="count")]
    assert [each.codec for each in Chosen().candidates("", Sketch(bits=2))][3:] == [
        Sketch(bits=2)
    ] * 2


RESULT = StrategyResult(
    tried=(TimedStrategy("DeAR()", 0.02), TimedStrategy("AllReduce()", 0.03)),
    chosen="DeAR()",
    iterations=41,
)


def test_strategy_result_round_trip_is_equal(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.save(path, RESULT, {"workers": 3})
    assert files.load(path, StrategyResult) == files.Saved(RESULT, {"workers": 3})


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ('"chosen": "DeAR()"', '"chosen": "Canary()"', "'Canary.*not tried"),
        ('"seconds": 0.03', '"seconds": -1', "seconds is -1"),
        ('"iterations": 41', '"iterations": 0', "iterations is 0"),
    ],
)
def test_strategy_result_damaged_is_refused(
    tmp_path: Path, was: str, becomes: str, told: str
) -> None:
    path = tmp_path / "plan.json"
    files.save(path, RESULT, {})
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes))
    with pytest.raises(UsageError, match=told):
        files.load(path, StrategyResult)
