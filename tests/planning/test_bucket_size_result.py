from __future__ import annotations

from dataclasses import replace

from wingbeat.planning.bucket_size import BucketSizeResult, Sample, choose, untuned
from wingbeat.types import Tuning

MB = 2**20

TUNED = BucketSizeResult(
    search="bo",
    low_bytes=MB,
    high_bytes=100 * MB,
    steps=10,
    samples=(Sample(25 * MB, 10.0), Sample(6 * MB, 12.2), Sample(MB, 9.0)),
    expected=(10.0, 12.0, 9.1),
    chosen_bytes=6 * MB,
    decision_s=(0.0011, 0.0024, 0.0009),
)


def test_result_explains_choice() -> None:
    assert TUNED.explain() == (
        "tuned buckets in 3 trials of 10 iterations (bo): 6 MB, 1.20x the throughput of the start "
        "(25 MB): of the sizes tried, the one expected to be fastest; a decision took up to 2.4 ms"
    )


def test_result_explains_that_start_was_best() -> None:
    stayed = replace(
        TUNED,
        samples=TUNED.samples[:1],
        expected=(10.0,),
        chosen_bytes=25 * MB,
        decision_s=(0.001,),
        steps=1,
    )
    assert stayed.explain() == (
        "tuned buckets in 1 trial of 1 iteration (bo): 25 MB, as at the start: of the sizes tried, "
        "none is expected to be faster; a decision took up to 1.0 ms"
    )


def test_result_explains_that_size_has_no_effect() -> None:
    near = replace(TUNED, expected=(10.0, 10.1, 9.95))
    assert not near.matters
    assert near.explain() == (
        "tuned buckets in 3 trials of 10 iterations (bo): 6 MB, but no size matters here: those "
        "tried are within 1.5% of each other; a decision took up to 2.4 ms"
    )
    assert TUNED.matters
    assert replace(TUNED, expected=(10.0, 10.21, 10.0)).matters


def test_result_explains_single_plan() -> None:
    rule = Tuning(search="bo", low_bytes=MB, high_bytes=100 * MB)
    untried = untuned(rule, 25 * MB, 2)
    assert untried.explain() == (
        "nothing to tune: for this model bucket sizes from 1 to 100 MB are all one plan, 2 buckets"
    )
    assert (untried.start_bytes, untried.chosen_bytes) == (25 * MB, 25 * MB)
    assert not untried.matters


def test_result_properties_follow_from_samples() -> None:
    assert TUNED.start_bytes == 25 * MB
    assert TUNED.chosen_index == 1
    assert TUNED.gain == 1.2


def test_choose_returns_a_measured_size() -> None:
    samples = [Sample(25 * MB, 10.0), Sample(2 * MB, 12.0), Sample(8 * MB, 12.1)]
    chosen, expected = choose(samples)
    assert samples[chosen].bucket_bytes == 8 * MB
    assert len(expected) == 3
    assert all(type(value) is float for value in expected)
