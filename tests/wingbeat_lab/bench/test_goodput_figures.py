"""``benchmarks/goodput.py``: the schedule of faults, useful steps, pauses, and the bound."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import Refusal, benchmark


@pytest.fixture(scope="module")
def faults() -> Iterator[ModuleType]:
    with benchmark("fault_schedule") as module:
        yield module


@pytest.fixture(scope="module")
def goodput() -> Iterator[ModuleType]:
    with benchmark("goodput") as module:
        yield module


# -- the schedule ------------------------------------------------------------------------------


def test_schedule_with_equal_arguments_is_equal_and_with_another_seed_differs(
    faults: ModuleType,
) -> None:
    first = faults.schedule(3, 30, 16, 62)
    assert faults.schedule(3, 30, 16, 62) == first
    assert faults.schedule(4, 30, 16, 62) != first
    assert faults.schedule(3, 30, 8, 62) != first


@pytest.mark.parametrize(("minutes", "replicas", "count"), [(30, 16, 62), (30, 32, 62), (2, 4, 5)])
def test_schedule_faults_are_in_order_end_before_the_run_and_hit_existing_replicas(
    faults: ModuleType, minutes: float, replicas: int, count: int
) -> None:
    for seed in range(50):
        drawn = faults.schedule(seed, minutes, replicas, count)
        assert len(drawn) == count
        assert [fault.at for fault in drawn] == sorted(fault.at for fault in drawn)
        for fault in drawn:
            assert 0.02 * 60 * minutes <= fault.at <= fault.end < 60 * minutes
            assert 0 <= fault.victim < replicas
            assert (fault.lasts > 0) == (fault.kind in faults.LASTING)
            assert fault.lasts <= faults.MOST_S
            assert fault.kind != "rank 0" or fault.victim == 0


def test_schedule_of_many_faults_has_every_kind_equally_often(faults: ModuleType) -> None:
    counts = Counter(fault.kind for fault in faults.schedule(0, 30, 16, 62))
    assert set(counts) == set(faults.KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {f.kind for f in faults.schedule(0, 30, 16, 62, ["stop", "kill"])} == {"stop", "kill"}


def test_applied_kind_that_a_strategy_lacks_becomes_the_next_one_and_is_listed(
    faults: ModuleType,
) -> None:
    fault = faults.Fault(10.0, "server", 3, 0.0)
    kept = faults.Fault(12.0, "stop", 2, 4.0)
    assert faults.applied([fault, kept], ["generator", "stop"], 20.0) == [
        faults.Fault(10.0, "generator", 3, 0.0, "server"),
        kept,
    ]
    (rank,) = faults.applied([fault], ["rank 0", "kill"], 20.0)
    assert rank == faults.Fault(10.0, "rank 0", 0, 0.0, "server")
    (cut,) = faults.applied([faults.Fault(1.0, "rank 0", 0, 0.0)], ["cut"], 20.0)
    assert (cut.kind, cut.lasts) == ("cut", 2.0)
    assert "in place of rank 0" in str(cut)


# -- useful steps ------------------------------------------------------------------------------


def record(faults: ModuleType, text: str) -> Any:
    """Events, as ``begin@1 step@2:7``."""
    parts = (each.partition("@") for each in text.split())
    return [
        faults.Event(kind, float(rest.partition(":")[0]), int(rest.partition(":")[2] or 0))
        for kind, _, rest in parts
    ]


def test_read_of_a_record_ignores_the_line_that_a_killed_process_left(faults: ModuleType) -> None:
    assert faults.read("begin 1.5 7\nstep 2.5 1\nstep 3.") == [
        faults.Event("begin", 1.5, 7), faults.Event("step", 2.5, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "useful"),
    [
        ("begin@0 step@1 step@2 merged@2", 2),
        ("begin@0 step@1 merged@1 step@2", 1),
        ("begin@0 step@1 merged@1 step@2 begin@5 step@6 merged@6", 2),
        ("begin@0 step@1 lost@1 step@2 merged@2", 1),
        ("begin@0 step@1 step@2 end@3", 2),
        ("begin@0 step@9 step@11 merged@12", 1),
        ("begin@0 step@1 full@1 step@2 merged@2", 2),
        ("", 0),
    ],
)
def test_merged_steps_are_those_that_reach_the_shared_model(
    faults: ModuleType, text: str, useful: int
) -> None:
    assert faults.merged_steps(record(faults, text), 10.0) == useful


@pytest.mark.parametrize(
    ("text", "useful"),
    [
        ("begin@0 step@1:1 step@2:2 step@3:3", 3),
        ("begin@0 step@1:1 step@2:2 step@3:3 begin@5 step@6:2 step@7:3", 3),
        ("begin@0 step@1:1 step@2:2 step@3:3 begin@8 step@9:2 step@11:3", 2),
    ],
)
def test_kept_steps_that_a_restart_repeats_count_once_when_they_last_ended(
    faults: ModuleType, text: str, useful: int
) -> None:
    assert faults.kept_steps(record(faults, text), 10.0) == useful


def test_counted_steps_are_those_whose_contributions_were_applied(faults: ModuleType) -> None:
    events = record(faults, "begin@0 step@1:1 step@2:2 step@3:3 step@12:4")
    assert faults.counted_steps(events, 10.0, {1, 3, 4, 9}) == 2
    assert faults.model_steps([events, []], 10.0) == 3


def test_differing_steps_are_those_with_two_digests_within_or_between_runs(
    faults: ModuleType,
) -> None:
    calm, disturbed = "20 a\n40 b\n60 c\n", "20 a\n40 b\n40 b\n"
    assert faults.differing_steps(calm, disturbed) == []
    assert faults.differing_steps(calm, disturbed + "60 d\n") == [60]
    assert faults.differing_steps(calm, "20 a\n40 b\n40 x\n") == [40]


# -- pauses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "pause"),
    [
        ([9.0, 11.0, 12.0, 13.0], (1.0, 7.0)),
        ([9.0, 11.0, 14.0, 17.0, 20.0, 21.0], (1.0, 3.0)),
        ([9.0, 10.5, 14.5, 15.0, 20.5], (0.5, 5.5)),
        ([9.0, 27.0], (17.0, 17.0)),
        ([9.0], (10.0, 10.0)),
        ([9.0, 11.0], (1.0, 9.0)),
    ],
)
def test_pause_after_a_fault_is_the_longest_time_without_a_step(
    faults: ModuleType, times: list[float], pause: tuple[float, float]
) -> None:
    assert faults.pause(times, 10.0, 20.0) == pause


def test_returned_counts_from_a_kill_or_from_the_end_of_a_lasting_fault(faults: ModuleType) -> None:
    events = record(faults, "begin@0 step@11 step@101 step@103 begin@110 step@125")
    kill = faults.Fault(2.0, "kill", 0, 0.0)
    assert faults.returned(kill, 100.0, events) == 23.0
    assert faults.returned(kill, 100.0, events[:-1]) is None
    assert faults.returned(faults.Fault(0.5, "stop", 0, 2.0), 100.0, events) == 0.5


def test_survivors_are_the_replicas_that_no_fault_holds_up(faults: ModuleType) -> None:
    records = [
        record(faults, "begin@0 step@1 begin@12 step@30"),
        record(faults, "begin@0 step@1 step@16"),
        record(faults, "begin@0 step@1"),
    ]
    schedule = [
        faults.Fault(1.0, "kill", 0, 0.0),
        faults.Fault(2.0, "stop", 1, 3.0),
        faults.Fault(10.0, "cut", 2, 1.0),
        faults.Fault(25.0, "cut", 1, 1.0),
    ]
    assert faults.survivors(schedule, 0, 10.0, records) == [1, 2]
    assert faults.survivors(schedule, 2, 10.0, records) == [1]
    assert faults.survivors(schedule, 3, 10.0, records) == [0]
    assert faults.watched(schedule, 0, 100.0) == 2.0
    assert faults.watched(schedule, 3, 1000.0) == 25.0 + faults.WATCHED_S
    assert faults.watched(schedule, 3, 26.0) == 26.0


# -- the bound ---------------------------------------------------------------------------------


def bound(faults: ModuleType, *schedule: tuple[float, str, float], **changes: float) -> float:
    usual = {"seconds": 100.0, "step_s": 1.0, "every": 10, "restart_s": 5.0, "slow_step_s": 2.0}
    found = [faults.Fault(at, kind, 0, lasts) for at, kind, lasts in schedule]
    share: float = faults.bound(found, **(usual | changes))
    return share


@pytest.mark.parametrize(
    ("schedule", "made"),
    [
        ([], 100),
        ([(24.5, "kill", 0.0)], 20 + 70),  # back at 29.5, at step 20
        ([(24.5, "supervisor", 0.0), (26.5, "rank 0", 0.0)], 20 + 68),
        ([(20.0, "stop", 7.0)], 93),
        ([(20.0, "cut", 7.0)], 93),
        ([(20.0, "slow", 10.0)], 95),
        ([(19.5, "disk", 3.0)], 100),
        ([(19.5, "disk", 3.0), (24.5, "kill", 0.0)], 10 + 70),
        ([(99.5, "kill", 0.0)], 90),
        ([(24.5, "generator", 0.0)], 100),
    ],
)
def test_bound_is_what_checkpoints_and_restarts_leave(
    faults: ModuleType, schedule: list[tuple[float, str, float]], made: int
) -> None:
    assert bound(faults, *schedule) == pytest.approx(made / 100)


# -- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "localsdg"], "localsgd"),
        (["--strategies", "adpsgd"], "no process can rejoin it, and it is not exact"),
        (["--strategies", "torchft:fsdp"], "localsgd"),
        (["--kinds", "kil"], "kill"),
        (["--replicas", "1000", "--strategies", "ripples"], "GiB are available"),
    ],
)
def test_goodput_of_what_does_not_exist_or_fit_is_refused_before_a_run(
    goodput: ModuleType, refusal: Refusal, words: list[str], said: str
) -> None:
    assert said in refusal(goodput, words)


def test_goodput_schedule_is_printed_and_stored(
    goodput: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    words = ["goodput.py", "--schedule", "--json", str(tmp_path / "goodput.json"), "--faults", "9"]
    monkeypatch.setattr(sys, "argv", words)
    assert goodput.main() == 0
    stored = json.loads((tmp_path / "goodput.json").read_text())
    assert len(stored["schedule"]) == 9
    assert stored["settings"]["pace"] == pytest.approx(0.4)
    printed = capsys.readouterr().out
    assert all(f"{each['at']:.1f} s  {each['kind']}" in printed for each in stored["schedule"])


def run_of(goodput: float, family: str = "averaging", **more: Any) -> dict[str, Any]:
    calm = {"wrong": []}
    return {"goodput": goodput, "family": family, "wrong": [], "calm": calm} | more


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (run_of(0.98), []),
        (run_of(0.979), ["row: a goodput of 0.9790; goal 0.9800"]),
        (run_of(0.94, "staleness"), ["row: a goodput of 0.9400; goal 0.9500"]),
        (run_of(0.71, "exact", bound=0.72), []),
        (run_of(0.69, "exact", bound=0.72), ["row: a goodput of 0.6900; goal 0.7000"]),
        (run_of(0.1, "torchft"), []),
        (run_of(0.99, wrong=["2 different weights"]), ["row, with faults: 2 different weights"]),
    ],
)
def test_goodput_below_a_goal_is_named(goodput: ModuleType, found: Any, said: list[str]) -> None:
    assert goodput.judged("row", found) == said
