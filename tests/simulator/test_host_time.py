"""The processor time of a training thread beside the time of its device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wingbeat.simulator import Links, Model, Run, TimedLayer, Work, simulate
from wingbeat.simulator.cluster import SLACK_S
from wingbeat.types import TensorSpec
from wingbeat_lab import baselines

FAST = Links(bytes_per_s=1e15, latency_s=0.0)
FREE = Work(
    chunk_s=0.0, wire_s_per_byte=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0,
    update_s_per_byte=0.0, message_s=0.0, message_s_per_byte=0.0,
)  # fmt: skip
LAYERS, LAYER_S = 10, 1e-3


def model(layer_s: float = LAYER_S) -> Model:
    layers = tuple(TimedLayer(layer_s, layer_s, (number,)) for number in range(LAYERS))
    return Model(layers, tuple(TensorSpec(f"t{n}", (250,), "float32", 4) for n in range(LAYERS)))


def run(
    strategy: str = "allreduce", layer_s: float = LAYER_S, workers: int = 2, **work: float
) -> Run:
    made = baselines.parse(strategy)
    return simulate(model(layer_s), made, workers, FAST, work=replace(FREE, **work))


COMPUTED_S = 2 * LAYERS * LAYER_S


def test_launches_are_hidden_by_the_device() -> None:
    assert run(launch_s=0.9 * LAYER_S).median_s == pytest.approx(COMPUTED_S, rel=1e-6)


def test_a_device_waits_for_launches_that_take_longer() -> None:
    assert run(launch_s=3 * LAYER_S).median_s == pytest.approx(3 * COMPUTED_S, rel=1e-6)


def test_a_thread_that_is_late_catches_up() -> None:
    """One long layer covers what short ones are late, as the queue of a device does."""
    first = TimedLayer(1e-5, 1e-5, (0,))
    rest = [TimedLayer(LAYER_S, LAYER_S, (number,)) for number in range(1, LAYERS)]
    made = simulate(
        replace(model(), layers=(first, *rest)),
        baselines.parse("allreduce"),
        1,
        FAST,
        work=replace(FREE, launch_s=0.3e-3),
    )
    # The first layer of forward is late by its launch, which the second absorbs.
    forward, backward = 1e-5 + 9 * LAYER_S, 9 * LAYER_S + 0.3e-3
    assert made.median_s == pytest.approx(forward + backward, rel=1e-3)


def test_a_device_that_was_late_before_a_wait_still_catches_up() -> None:
    layers = (TimedLayer(1e-3, 1e-3, (0,)), TimedLayer(1e-5, 1e-5, (1,)))
    own = Model(layers, model().tensors[:2])
    work = replace(FREE, launch_s=0.3e-3, hook_s=1e-3)
    made = simulate(own, baselines.parse("allreduce:plan=none"), 1, FAST, work=work)
    # Backward: 0.3 ms for the short layer, 0.29 of them late; a hook; the long layer; a hook.
    backward = 0.3e-3 + 1e-3 + (1e-3 - 0.29e-3) + 1e-3
    assert made.median_s == pytest.approx(1.3e-3 + backward, rel=1e-6)


@pytest.mark.parametrize(("hook_s", "delayed"), [(0.04e-3, False), (0.2e-3, True)])
def test_hooks_delay_the_device_beyond_its_queue(hook_s: float, delayed: bool) -> None:
    """A bucket of all ten gradients at the end, or one of each: all at once is beyond the slack."""
    assert (LAYERS * hook_s > SLACK_S) is delayed
    made = run("allreduce:plan=none", launch_s=1e-6, hook_s=LAYERS * hook_s)
    expected = COMPUTED_S + (LAYERS * LAYERS * hook_s if delayed else LAYERS * hook_s)
    assert made.median_s == pytest.approx(expected, rel=1e-3)


def test_gradients_of_a_bucket_are_copied_when_it_is_complete() -> None:
    made = run(fill_s_per_byte=1e-6, workers=1)
    assert made.median_s == pytest.approx(COMPUTED_S + LAYERS * 1000 * 1e-6, rel=1e-6)
    ready = [when for when, _, what, _ in made.trace if what == "all_reduce"]
    assert ready[0] == pytest.approx(COMPUTED_S + LAYERS * 1000 * 1e-6, rel=1e-6)


def test_starts_and_steps_count_by_bucket() -> None:
    for plan, buckets in (("none", LAYERS), ("fixed", 1)):
        made = run(f"allreduce:plan={plan}", start_s=1e-3)
        assert made.median_s == pytest.approx(COMPUTED_S + buckets * 1e-3, rel=1e-6)
        stepped = run(f"allreduce:plan={plan}", step_s=1e-3, update_s=1e-4)
        assert stepped.median_s == pytest.approx(COMPUTED_S + 1e-3 + LAYERS * 1e-4, rel=1e-6)
        dear = run(f"dear:plan={plan}", step_s=1e-3, update_s=1e-4)
        assert dear.median_s == pytest.approx(COMPUTED_S + buckets * 1e-3 + LAYERS * 1e-4, rel=1e-6)
