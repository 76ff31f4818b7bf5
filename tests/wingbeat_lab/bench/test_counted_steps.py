"""Steps that workers count in a file that they have in common, and the iterations these make."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.errors import WingbeatError
from wingbeat_lab.bench import worker
from wingbeat_lab.bench.traffic import Sent
from wingbeat_lab.bench.worker import SharedSteps, Training


def three(path: Path, room: int = 10) -> list[SharedSteps]:
    return [SharedSteps(path / "steps", rank, 3, room) for rank in range(3)]


def test_counted_steps_of_each_worker_are_seen_by_all(tmp_path: Path) -> None:
    a, b, c = three(tmp_path)
    a.add(1.0)
    c.add(0.5)
    a.add(2.0)
    late = SharedSteps(tmp_path / "steps", 1, 3, 10)  # whoever comes later loses nothing
    for own in (a, b, c, late):
        assert own.total() == 3
        assert own.by_rank() == [2, 0, 1]
        assert own.made() == [(0.5, 2), (1.0, 0), (2.0, 0)]
    b.add(1.5)
    assert a.made() == [(0.5, 2), (1.0, 0), (1.5, 1), (2.0, 0)]


def test_too_many_steps_are_refused(tmp_path: Path) -> None:
    own, other, _ = three(tmp_path, room=2)
    own.add(1.0)
    own.add(2.0)
    with pytest.raises(WingbeatError, match="rank 0 has made 2 steps in one turn"):
        own.add(3.0)
    assert other.by_rank() == [2, 0, 0]


def test_an_iteration_is_as_many_steps_as_workers_whoever_made_them() -> None:
    made = [(0.1 * number, number % 3 if number < 3 else 0) for number in range(9)]
    ends, by_rank = worker.iterations(made, 3, before=1, count=2, begin=-1.0)
    assert ends == pytest.approx([0.2, 0.5, 0.8])
    assert by_rank == [6, 0, 0]
    ends, by_rank = worker.iterations(made, 3, before=0, count=1, begin=-1.0)
    assert ends == pytest.approx([-1.0, 0.2])
    assert by_rank == [1, 1, 1]


def test_counted_steps_end_a_turn_when_all_together_have_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other, _ = three(tmp_path, room=100)
    checked: Any = SimpleNamespace(workers=3)
    row = Training(checked, 0, 0.0, SimpleNamespace(), SimpleNamespace(), own)  # type: ignore[arg-type]
    numbers: list[int] = []

    def iterate(_: Training, number: int) -> None:
        numbers.append(number)
        own.add(float(len(numbers)))
        other.add(float(len(numbers)))  # the third worker is asleep

    monkeypatch.setattr(Training, "iterate", iterate)
    for _ in range(3):  # one iteration of three before, as this worker has seen already
        other.add(0.0)
    assert row.done() == 1
    assert list(row.iterations(5, 4, since=1.0)) == [0, 1, 2, 3]
    assert numbers == [5, 6, 7, 8, 9, 10]  # 12 steps, two at a time


def test_counted_steps_of_a_late_worker_begin_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other, _ = three(tmp_path)
    row = Training(
        SimpleNamespace(workers=3),  # type: ignore[arg-type]
        0,
        0.0,
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        own,
    )
    monkeypatch.setattr(Training, "iterate", lambda *_: own.add(9.0))
    for now in range(8):
        other.add(float(now))
    assert list(row.iterations(1, 2, since=1.0)) == [0, 1]
    assert own.by_rank() == [1, 8, 0]


def test_bytes_since_exclude_those_that_make_models_equal() -> None:
    first, second = Sent(100, {"be": 90}), Sent(140, {"be": 120})  # 40 and 30 to settle
    end = Sent(180 + 400, {"be": 150 + 300})  # as much again to settle, and four iterations
    assert end.since(first.and_again(second), 4) == Sent(100, {"be": 75})


@pytest.mark.parametrize("row", ["ripples:policy=smart", "adpsgd", "localsgd:every=8", "diloco"])
def test_rows_that_average_models_are_counted_so(row: str, tmp_path: Path) -> None:
    from wingbeat.transport import loopback
    from wingbeat_lab.bench.config import BenchConfig

    made = BenchConfig(lab="loopback:2", model="paced:resnet50@0.02", strategies=(row, "dear"))
    checked = made.check()
    assert [each.averages for each in checked.rows] == [True, False]
    own = worker.Worker(checked, loopback.worlds(2)[1], folder=tmp_path)
    assert own.counted(0, 2) == tmp_path / "steps-0-2"
    assert own.counted(1, 2) is None
    assert own.counted(0, None) is None
