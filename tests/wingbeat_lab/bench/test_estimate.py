"""How long a bench is said to take: the arithmetic, and when it is said."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from wingbeat.errors import LabError
from wingbeat_lab import lab
from wingbeat_lab.bench import demo, estimate, runner
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.estimate import Progress


def checked(**changes: Any) -> Checked:
    values: dict[str, Any] = {
        "lab": "star:2@1gbit",
        "model": "paced:resnet50@0.1",
        "strategies": ("ddp", "dear:plan=fixed", "single"),
        "iterations": 8,
        "rounds": 3,
        "warmup": 2,
    }
    return BenchConfig(**{**values, **changes}).check()


def test_an_iteration_is_the_bound_at_what_links_carry_and_the_processors_share() -> None:
    made = checked()
    one, two = estimate.of(made, cores=2), estimate.of(made, cores=1)
    times = made.model.compute_s()
    assert times is not None
    nbytes = estimate.gradient_bytes(made)
    assert nbytes == pytest.approx(10.2e6, rel=0.01)  # a tenth of ResNet-50's 25.6 million floats
    busy = estimate.CORE_S + estimate.CORE_S_PER_BYTE * nbytes
    ddp, dear, single = (row.iteration_s for row in one.rows)
    assert single == pytest.approx(sum(times) + estimate.CORE_S)
    # Two hosts: half the bytes leave each for a reduce-scatter, at 100 Mbit/s.
    both_ways = nbytes / (100e6 / 8) / estimate.OF_LINE_RATE
    assert both_ways < ddp - busy < both_ways + sum(times)
    assert both_ways < dear - busy < ddp - busy
    assert two.rows[0].iteration_s == pytest.approx(ddp + busy)


def test_what_is_gathered_grows_with_the_workers() -> None:
    """Under whole all-reduces top-k's payloads go to everyone; in two halves they are summed."""
    rows = ("allreduce:compression=topk@0.5", "dear:plan=fixed,compression=topk@0.5")

    def spent(hosts: int, row: int) -> float:
        made = checked(lab=f"star:{hosts}@10mbit", strategies=rows)
        seconds = estimate.of(made, cores=64).rows[row].iteration_s
        return seconds - sum(made.model.compute_s() or ())

    assert spent(8, 0) > 3 * spent(2, 0)
    assert spent(8, 1) < 2 * spent(2, 1)


def test_estimate_total_is_the_sum_of_its_parts() -> None:
    made = estimate.of(checked(), cores=2)
    times = sum(row.iteration_s for row in made.rows)
    parts = made.start_s + 3 * made.round_s + 9 * made.turn_s + (8 + 3 * 2) * times
    assert made.total_s == pytest.approx(parts)
    assert estimate.of(checked(measure=False), cores=2).round_s == 0


def test_estimate_of_done_iterations_increases_to_the_total() -> None:
    made = estimate.of(checked(strategies=("ddp", "omgs")), cores=2)
    config = made.checked.config
    over = [
        made.done_s(row, round_, i)
        for round_ in range(3)
        for row in range(2)
        for i in range(-config.warmup, config.share(round_))
    ]
    assert all(a < b for a, b in itertools.pairwise(over))
    assert over[-1] == pytest.approx(made.total_s)


def test_estimate_includes_iterations_of_tuning_and_measuring() -> None:
    made = estimate.of(checked(strategies=("ddp", "allreduce:compression=sketch", "omgs")), cores=2)
    assert [row.deciding for row in made.rows] == [0, 25, 24 + 40]
    ddp, sketch, omgs = (row.iteration_s for row in made.rows)
    # Once, on a model of its own.
    seconds = (8 + 3 * 2) * (ddp + sketch + omgs) + 25 * sketch + 64 * omgs
    parts = made.start_s + 3 * made.round_s + (9 + 2) * made.turn_s + seconds
    assert made.total_s == pytest.approx(parts)
    both, small, alone = (
        estimate.of(checked(strategies=("dear:compression=sketch",), **more)).rows[0].deciding
        for more in ({}, {"lab": "loopback:2", "model": "digits"}, {"lab": "star:1@1gbit"})
    )
    assert (both, small, alone) == (25 + 140, 25 + 2, 0)
    tuned = ("geryon:threshold=tuned", "geryon:threshold=tuned,classes=3,steps=2")
    found = [row.deciding for row in estimate.of(checked(strategies=tuned)).rows]
    assert found == [2 + (14 + 3) * (1 + 5 + 2), 2 + (14 + 9 + 3) * (1 + 2 + 2)]


def test_slow_workers_make_iterations_longer() -> None:
    made, slowed = checked(), checked(slow=("0=+2x@1-4",))
    normal = sum(made.model.compute_s() or ())
    before, after = (estimate.of(own, cores=2).rows for own in (made, slowed))
    for row, longer in zip(before, after, strict=True):
        assert longer.iteration_s == pytest.approx(row.iteration_s + normal)


def test_pictures_and_slow_motion_take_longer() -> None:
    plain = estimate.of(checked(), cores=2)
    assert plain.after_s == 0
    broken_down = estimate.of(checked(breakdown=True), cores=2).after_s
    assert broken_down > estimate.of(checked(trace=True), cores=2).after_s > 0
    slow = estimate.of(checked(stretch=4.0), cores=2)
    assert slow.rows[0].iteration_s > 3.8 * plain.rows[0].iteration_s


def test_a_real_model_and_an_unshaped_lab_have_an_estimate_too() -> None:
    made = estimate.of(checked(lab="loopback:2", model="digits"), cores=2)
    assert 0 < made.rows[0].iteration_s < 1
    both = demo.plan("no root")
    total = estimate.of_all([both.digits, both.paced])
    assert total == sum(estimate.of(each.check()).total_s for each in (both.digits, both.paced))
    assert demo.about(both)[-1] == f"Both take about {estimate.about(total)}."


def test_estimate_is_shown_before_the_first_worker_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def refuse(*_args: object, **_options: object) -> None:
        said.append(capsys.readouterr().err)
        raise LabError("no lab here")

    monkeypatch.setattr(lab, "run", refuse)
    made = checked()
    with pytest.raises(LabError):
        runner.run(made.config)
    expected = estimate.about(estimate.of(made).total_s)
    [line] = said[0].splitlines()
    assert line.endswith(f"2 workers: ddp, dear:plan=fixed, single; takes about {expected}")


def test_progress_piped_with_forced_colours_has_a_line_for_each_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(checked()) as progress:
        progress.at(1, 0, 0, 0)
    shown = capsys.readouterr().err
    assert [line for line in shown.splitlines() if "iterations done, about" in line]
    assert "\r" not in shown


def test_time_left_is_the_estimate_scaled_by_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(checked())
    made = estimate.of(checked())
    for pace in (1.0, 2.5):
        now[0] = 100.0 + pace * made.done_s(1, 1, 0)
        left = pace * (made.total_s - made.done_s(1, 1, 0))
        assert progress.left_s(1, 1, 0) == pytest.approx(left)
    assert progress.left_s(2, 2, 1) == 0
