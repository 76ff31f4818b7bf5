"""AD-PSGD in virtual time: what must follow does follow, and runs repeat."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.simulator import GroupRun, Links, Model, TimedLayer, Work, simulate_pairs
from wingbeat.types import Layout, TensorSpec

FREE = Work(
    update_s_per_byte=0.0, message_s=0.0, message_s_per_byte=0.0, encrypt_s_per_byte=0.0,
    copy_s_per_byte=0.0,
)  # fmt: skip
MEGABYTE = 1 << 20


def run(
    layout: Layout, megabytes: int = 8, rate: float = 8.0 * MEGABYTE, **options: object
) -> GroupRun:
    """A second of computation, and as a rule another one to send the model one way."""
    spec = TensorSpec("w", (megabytes * MEGABYTE // 4,), "float32", 4)
    model = Model((TimedLayer(0.2, 0.8, (0,)),), (spec,))
    links = Links(bytes_per_s=rate, latency_s=0.0)
    given: dict = {"work": FREE, "jitter": 0.0, "iterations": 6, "warmup": 2}
    return simulate_pairs(model, layout, links, **given | options)


def test_the_same_arguments_give_the_same_run_to_the_last_bit() -> None:
    layout = Layout.even(2, 3)
    options: dict = {"jitter": 0.1, "slow": {1: 2.0}, "work": Work()}
    first, second = (run(layout, **options) for _ in range(2))
    assert first == second
    assert first != run(layout, seed=1, **options)


def test_averages_hide_behind_computation_where_links_are_fast() -> None:
    made = run(Layout.even(4, 1), rate=1e12)
    assert made.iteration_s == pytest.approx(1.0)
    assert made.waited == pytest.approx(0.0, abs=1e-6)
    # Only active workers ask, once in each step; a pair counts twice.
    assert made.averages == pytest.approx(1.0, abs=0.2)
    assert all(active % 2 == 0 and passive % 2 == 1 for active, passive in made.groups)


def test_an_average_takes_the_time_of_a_model_where_links_are_slow() -> None:
    """Chunks travel both ways at the same time, the last one back after it has arrived."""
    made = run(Layout.even(2, 1), rate=2.0 * MEGABYTE)
    assert made.iteration_s == pytest.approx(4.0 + 0.5, rel=0.03)
    assert run(Layout([0, 0]), rate=2.0 * MEGABYTE).iteration_s == pytest.approx(1.0)


def test_workers_of_a_host_share_its_interface() -> None:
    """Two active workers and their two partners: crossing pairs share, and others need none."""
    apart, together = (
        run(layout, rate=2.0 * MEGABYTE, iterations=12).iteration_s
        for layout in (Layout([0, 1, 2, 3]), Layout([0, 1, 0, 1]))
    )
    assert together > 1.1 * apart


def test_messages_take_the_time_of_a_thread() -> None:
    busy = Work(update_s_per_byte=0.0, message_s=0.0, message_s_per_byte=1 / MEGABYTE)
    made = run(Layout.even(2, 1), rate=1e12, work=busy)
    # The active end sends 8 MB and receives 8 MB, in a second a MB, in each of its steps.
    assert 16 <= made.iteration_s * 8 / made.steps[0] <= 17.5


def test_who_is_slow_keeps_others_back_less_than_in_an_all_reduce() -> None:
    layout, slow = Layout.even(8, 1), {5: 4.0}
    made = run(layout, rate=1e12, slow=slow, iterations=12)
    assert made.steps[5] < 0.5 * max(made.steps)
    assert 1.0 < made.iteration_s < 2.0


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(UsageError, match="layout= of 1 workers"):
        run(Layout.even(1, 1))
    with pytest.raises(UsageError, match="iterations=0"):
        run(Layout.even(2, 1), iterations=0)
