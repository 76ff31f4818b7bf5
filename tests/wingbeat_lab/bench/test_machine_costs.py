"""The costs of a machine, from workers that train alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wingbeat_lab.bench import costs, simulated
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.costs import Alone, Costs, Messages, Served, costs_of

SMALL = Alone(
    layers=10,
    parameters=20,
    nbytes=1000,
    computed_s=0.2,
    sleeps=25,
    iteration_s=0.2051,
    cpu_s=0.0106,
)
LARGE = replace(SMALL, nbytes=1_001_000, iteration_s=0.2061, cpu_s=0.02)
MESSAGES = Messages(message_s=5e-5, wake_s=1e-4)


def config(model: str, strategy: str) -> BenchConfig:
    return BenchConfig(lab="star:2@8gbit", model=model, strategies=(strategy,), rounds=1)


def test_two_models_of_different_size_separate_fixed_costs_from_those_of_bytes() -> None:
    found = costs_of(SMALL, LARGE, MESSAGES, cold=1.5)
    assert found.update_s_per_byte == pytest.approx(1e-9)
    assert found.update_s == pytest.approx((5.1e-3 - 1e-6) / 20)
    assert found.launch_s == pytest.approx(3e-3 / 30)
    assert (found.message_s, found.wake_s, found.cold) == (5e-5, 1e-4, 1.5)


def test_costs_are_never_negative() -> None:
    noisy = replace(LARGE, iteration_s=0.19)
    found = costs_of(replace(SMALL, cpu_s=0.001), noisy, MESSAGES, cold=1.0)
    assert (found.launch_s, found.update_s_per_byte) == (0.0, 0.0)
    assert found.update_s == pytest.approx(5.1e-3 / 20)


def test_models_of_equal_size_are_refused() -> None:
    with pytest.raises(ValueError, match="1000 bytes of the large model, 1000 of the small"):
        costs_of(SMALL, SMALL, MESSAGES, cold=1.0)


def test_an_iteration_alone_is_that_of_the_paced_model() -> None:
    checked = config("paced:resnet50@0.01", "single").check()
    own = costs.alone_of(checked, 0.25, [0.03, 0.05])
    profile = checked.model.profile
    assert profile is not None
    assert (own.layers, own.parameters) == (len(profile.layers), 161)
    assert own.nbytes == 4 * sum(layer.numel for layer in profile.layers)
    assert own.cpu_s == pytest.approx(0.04)
    assert own.updated_s == pytest.approx(0.25 - 1e-3 * (profile.forward_ms + profile.backward_ms))


def test_two_models_and_a_hurry_separate_messages_bytes_and_waits() -> None:
    few = Served(messages=100, nbytes=1e6, cpu_s=100 * 7e-5 + 1e6 * 2e-9)
    many = Served(messages=150, nbytes=2e7, cpu_s=150 * 7e-5 + 2e7 * 2e-9)
    small = replace(few, cpu_s=few.cpu_s + 50 * 1e-4)
    assert costs.messages_of(small, few, many) == pytest.approx((7e-5, 1e-4))
    noisy = replace(few, cpu_s=0.0)
    assert costs.messages_of(noisy, few, many).wake_s == 0.0
    assert costs.messages_of(small, noisy, many).message_s == 0.0


@pytest.mark.parametrize(("stretch", "sleeps"), [(1.0, 195), (0.02, 21)])
def test_short_times_of_layers_are_slept_together(stretch: float, sleeps: int) -> None:
    checked = replace(config("paced:resnet50@0.01", "single"), stretch=stretch).check()
    profile = checked.model.profile
    assert profile is not None
    assert costs.sleeps_of(profile, stretch) == sleeps


def test_a_server_has_half_of_the_messages_of_two_workers() -> None:
    checked = config("paced:resnet50@0.01", "geryon").check()
    own = costs.served_of(checked, [0.03, 0.05])
    profile = checked.model.profile
    assert profile is not None
    assert own.nbytes == 2 * 4 * sum(layer.numel for layer in profile.layers)
    assert own.messages == 2 * 63
    assert own.cpu_s == pytest.approx(0.04)


def test_memory_is_not_faster_after_a_sleep() -> None:
    assert 1.0 <= costs.cold() < 100.0


def test_workers_have_the_costs_of_their_machine() -> None:
    checked = config("paced:vgg16@0.05", "allreduce:compression=sketch").check()
    own = Costs(
        launch_s=1e-3, update_s=2e-3, update_s_per_byte=3e-9, message_s=5e-5, wake_s=6e-5, cold=4.0
    )
    work = simulated.work_of(checked.model, costs=own)
    assert (work.launch_s, work.update_s, work.update_s_per_byte) == (1e-3, 2e-3, 3e-9)
    assert (work.message_s, work.wake_s) == (5e-5, 6e-5)
    # A twentieth of a codec's time occupies a processor, and four times as long after a sleep.
    assert simulated.work_of(checked.model).codecs_idle == pytest.approx(0.95)
    assert work.codecs_idle == pytest.approx(0.80)
    assert work.codecs == pytest.approx(20.0)
    hot = simulated.work_of(checked.model, costs=replace(own, cold=30.0))
    assert hot.codecs_idle == 0.0
