"""When a loss is low enough, on losses that are known."""

from __future__ import annotations

from wingbeat_lab.bench import target
from wingbeat_lab.bench.config import LOSSES
from wingbeat_lab.bench.target import TimeToLoss


def curve(seconds: float, *losses: float) -> list[tuple[float, float]]:
    return [(seconds, loss) for loss in losses]


HIGH, LOW = [4.0] * LOSSES, [1.0] * LOSSES


def test_the_mean_of_the_last_losses_counts() -> None:
    own = curve(0.5, *HIGH, *LOW)
    # Below 2.5 once more than half of the last ones are low.
    assert target.seconds_to(2.5, [own]) == 0.5 * (LOSSES + LOSSES // 2 + 1)
    assert target.seconds_to(1.0, [own]) is None
    assert target.seconds_to(9.0, [own]) == 0.5 * LOSSES
    assert target.seconds_to(9.0, [own[: LOSSES - 1]]) is None


def test_of_all_workers_and_until_the_last_of_them() -> None:
    low, high = curve(1.0, *LOW), curve(3.0, *HIGH)
    assert target.seconds_to(2.6, [low, high]) == 3.0 * LOSSES
    assert target.seconds_to(2.4, [low, high]) is None


def test_steps_count_as_they_come_where_workers_are_not_in_lockstep() -> None:
    fast, slow = curve(1.0, *HIGH, *LOW, *LOW), curve(4.0, *HIGH[:5])
    # Of the last 20 steps the slow one made 4; 11 are low when the fast one has made its 21st.
    assert target.seconds_to(2.5, [fast, slow]) == 21.0
    assert target.seconds_to(2.5, [slow, fast]) == 21.0
    assert target.seconds_to(0.5, [fast, slow]) is None


def test_rounds_have_a_median_if_all_have_reached_it() -> None:
    fast, slow, never = ([curve(s, *losses)] for s, losses in ((1, LOW), (3, LOW), (1, HIGH)))
    times = [1.0 * LOSSES, 3.0 * LOSSES]
    assert target.time_to_loss(2.0, [fast, slow]) == TimeToLoss(2.0, 2.0 * LOSSES, times)
    assert target.time_to_loss(2.0, [fast, never]) == TimeToLoss(2.0, None, [times[0], None])
