"""What the ranks of a job do when one of them fails, or is to end: with real processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.forks import Ended, Forks
from helpers.ports import free_port

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("trained.py")

DEAR = "DeAR(plan='fixed')"
EXACT = ["AllReduce()", DEAR, "Geryon()", "Auto()"]
AVERAGES = ["Canary(s=2,p=None)", "Ripples()", "LocalSGD(every=4)", "DiLoCo(every=4)", "ADPSGD()"]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert not {each for each in set(os.listdir("/dev/shm")) - before if "wingbeat" in each}


def others(strategy: str) -> list[int]:
    """Ranks other than 1. Under ADPSGD even ranks average with odd ones, which has to be left."""
    return [0, 2, 3] if strategy == "ADPSGD()" else [0, 2]


def of(ended: list[Ended]) -> list[int]:
    return [each.status for each in ended]


def events_of(ended: Ended) -> list[str]:
    """The lines of its log that are events."""
    return [line for line in ended.said.splitlines() if "[event=" in line]


RAISED = {
    "forward": "RuntimeError: ",
    "loss": "ValueError: bad loss",
    "hook": "ValueError: bad gradient",
    "loader": "ValueError: bad sample",
    "step": "TypeError: ",
    "setup": "ValueError: bad setup",
}


@pytest.mark.parametrize(
    ("strategy", "event"),
    [*((each, "loss") for each in EXACT), *((DEAR, each) for each in RAISED if each != "loss")],
)
def test_exception_ends_all_ranks_of_an_exact_strategy_which_name_it(
    strategy: str, event: str, forks: Forks, tmp_path: Path
) -> None:
    with forks.job(SCRIPT, tmp_path / "job", strategy, "--event", event) as job:
        ended = job.end()
    assert of(ended) == [1, 1, 1]
    assert [each.tracebacks for each in ended] == [1, 1, 1], ended
    own = ended[1].last.removeprefix("[rank1]: ")
    assert own.startswith(RAISED[event])
    for rank in (0, 2):
        error = ended[rank].last.removeprefix(f"[rank{rank}]: ")
        assert re.match(rf"wingbeat\.errors\.\w+: rank {rank}: rank 1 failed with ", error), error
        assert own in error


@pytest.mark.parametrize("strategy", AVERAGES)
def test_exception_on_a_rank_of_averages_leaves_the_others_training(
    strategy: str, forks: Forks, tmp_path: Path
) -> None:
    words, rest = (strategy, "--event", "loss", "--steps", "150"), others(strategy)
    with forks.job(SCRIPT, tmp_path / "job", *words, size=1 + len(rest)) as job:
        ended = job.end()
    assert [ended[rank].status for rank in rest] == [0] * len(rest)
    assert (ended[1].status, ended[1].tracebacks) == (1, 1)
    for rank in rest:
        lines = events_of(ended[rank])
        assert [line.partition(f"rank {rank}: rank 1 ")[2] for line in lines] == [
            "failed with ValueError: bad loss; the others continue without it "
            "[event=lost rank=1 incarnation=0]"
        ]
        assert "done" in ended[rank].said
        assert ended[rank].tracebacks == 0


@pytest.mark.parametrize(
    ("strategy", "event", "status"),
    [
        *((DEAR, *each) for each in (("_exit", 7), ("crash", -11), ("killed-in-setup", -9))),
        *((each, "kill", -9) for each in EXACT),
    ],
)
def test_process_that_dies_ends_all_ranks_of_an_exact_strategy_within_seconds(
    strategy: str, event: str, status: int, forks: Forks, tmp_path: Path
) -> None:
    with forks.job(SCRIPT, tmp_path / "job", strategy, "--event", event) as job:
        job.until(lambda: not os.path.exists(f"/proc/{job.pids[1]}/fd/0"))
        begin = time.monotonic()
        ended = job.end()
    assert time.monotonic() - begin < 30.0, "sooner than the timeout of 60 s"
    assert of(ended) == [1, status, 1]
    for rank in (0, 2):
        assert ended[rank].tracebacks == 1
        assert re.search(rf"rank {rank}: .*rank 1 .*(failed|ended)", ended[rank].last)


@pytest.mark.parametrize("strategy", AVERAGES)
def test_killed_process_leaves_the_others_of_averages_training(
    strategy: str, forks: Forks, tmp_path: Path
) -> None:
    words, rest = (strategy, "--event", "kill", "--steps", "150"), others(strategy)
    with forks.job(SCRIPT, tmp_path / "job", *words, size=1 + len(rest)) as job:
        ended = job.end()
    assert [ended[rank].status for rank in rest] == [0] * len(rest)
    for rank in rest:
        lines = events_of(ended[rank])
        assert len(lines) == 1, ended[rank].said
        assert "ended" in lines[0]
        assert lines[0].endswith("[event=lost rank=1 incarnation=0]")


@pytest.mark.parametrize("strategy", ["Canary(s=2,p=None)", "Ripples()", "DiLoCo(every=4)"])
def test_events_of_a_rank_that_is_killed_and_started_again_have_its_incarnations(
    strategy: str, forks: Forks, tmp_path: Path
) -> None:
    env = {"WINGBEAT_LOG": "info", "WINGBEAT_JOB_ID": "again"}
    with forks.job(SCRIPT, tmp_path / "job", strategy, "--save", "works", env=env) as job:
        job.until_said("trains")
        job.signal(signal.SIGKILL, 1)
        job.until_said("[event=lost rank=1 incarnation=0]", (0, 2))
        job.restart(1)
        job.until_said("[event=returned rank=1 incarnation=1]", (0, 2))
        job.until_said("trains", (1,))
        assert "[event=rejoined rank=1 incarnation=1]" in job.said(1)
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert of(ended) == [143] * 3
    assert "[event=terminated rank=1 incarnation=1]" in ended[1].said


def test_incarnations_of_a_job_that_torchrun_restarts_are_its_restarts(
    forks: Forks, tmp_path: Path
) -> None:
    env = {"WINGBEAT_LOG": "debug", "TORCHELASTIC_RESTART_COUNT": "2"}
    with forks.job(SCRIPT, tmp_path / "job", DEAR, "--steps", "9", env=env) as job:
        ended = job.end()
    assert of(ended) == [0] * 3
    for rank, each in enumerate(ended):
        assert f"rank {rank}: joined a job of 3 workers [event=joined rank={rank} " in each.said
        assert "incarnation=2]" in each.said


def test_exit_of_a_script_is_its_own_status(forks: Forks, tmp_path: Path) -> None:
    with forks.job(SCRIPT, tmp_path / "job", DEAR, "--event", "exit") as job:
        ended = job.end()
    assert of(ended) == [1, 3, 1]
    assert ended[1].said == "trains\n"
    assert all("rank 1 has finished" in ended[rank].last for rank in (0, 2))


# -- SIGTERM and SIGINT ----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*EXACT, *AVERAGES])
def test_sigterm_to_one_rank_saves_on_all_which_exit_with_143(
    strategy: str, forks: Forks, tmp_path: Path
) -> None:
    with forks.job(SCRIPT, tmp_path / "job", strategy, "--save", "works") as job:
        job.until_said("trains")
        job.signal(signal.SIGTERM, 1)
        ended = job.end()
    assert of(ended) == [143] * 3
    saved = [re.findall(r"saved (\d+)", each.said) for each in ended]
    assert all(len(each) == 1 for each in saved), saved
    assert strategy in AVERAGES or saved[0] == saved[1] == saved[2]
    assert all(each.tracebacks == 0 for each in ended)
    lines = events_of(ended[0])
    assert lines[-1].endswith("[event=terminated rank=0 incarnation=0]")


def test_second_sigterm_while_a_rank_exits_changes_no_status(forks: Forks, tmp_path: Path) -> None:
    with forks.job(SCRIPT, tmp_path / "job", DEAR, "--save", "works") as job:
        job.until_said("trains")
        job.signal(signal.SIGTERM)
        job.until_said("saved")
        for _ in range(5):
            job.signal(signal.SIGTERM)
            time.sleep(0.05)
        assert of(job.end()) == [143] * 3


def test_exception_of_save_ends_a_rank_with_its_traceback(forks: Forks, tmp_path: Path) -> None:
    with forks.job(SCRIPT, tmp_path / "job", DEAR, "--save", "raises") as job:
        job.until_said("trains")
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert of(ended) == [1] * 3
    assert all(each.last.endswith("OSError: no space left on device") for each in ended)


@pytest.mark.parametrize("cause", ["save", "step"])
def test_grace_period_ends_all_ranks_with_143(cause: str, forks: Forks, tmp_path: Path) -> None:
    words = ("--save", "hangs") if cause == "save" else ("--save", "works", "--event", "hang")
    with forks.job(SCRIPT, tmp_path / "job", DEAR, *words, "--grace", "3") as job:
        job.until_said("trains")
        begin = time.monotonic()
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert time.monotonic() - begin < 20.0
    assert of(ended) == [143] * 3
    doing = "save() was running" if cause == "save" else "it was completing a step; nothing was"
    assert f"wingbeat: rank 1 ends 3 s after SIGTERM, while {doing}" in ended[1].said


@pytest.mark.parametrize("strategy", [DEAR, "Ripples()"])
def test_sigterm_without_a_handler_ends_as_a_kill_does(
    strategy: str, forks: Forks, tmp_path: Path
) -> None:
    with forks.job(SCRIPT, tmp_path / "job", strategy, "--steps", "150") as job:
        job.until_said("trains")
        job.signal(signal.SIGTERM, 1)
        ended = job.end()
    assert of(ended) == ([1, -15, 1] if strategy == DEAR else [0, -15, 0])


@pytest.mark.parametrize("strategy", [*EXACT, *AVERAGES])
def test_interrupt_of_a_terminal_ends_all_ranks_with_one_traceback_each(
    strategy: str, forks: Forks, tmp_path: Path
) -> None:
    with forks.job(SCRIPT, tmp_path / "job", strategy) as job:
        job.until_said("trains")
        begin = time.monotonic()
        job.signal(signal.SIGINT)
        ended = job.end()
    assert time.monotonic() - begin < 30.0
    assert of(ended) == [-2] * 3
    for each in ended:
        assert each.tracebacks == 1, each.said
        assert "KeyboardInterrupt" in each.said
        assert "Exception ignored" not in each.said


def test_interrupt_of_one_rank_is_named_by_the_others(forks: Forks, tmp_path: Path) -> None:
    with forks.job(SCRIPT, tmp_path / "job", DEAR) as job:
        job.until_said("trains")
        job.signal(signal.SIGINT, 1)
        ended = job.end()
    assert of(ended) == [1, -2, 1]
    assert all("rank 1 failed with KeyboardInterrupt" in ended[rank].last for rank in (0, 2))


# -- beside each other, and one after the other ------------------------------------------------


def test_job_restarts_at_the_same_port_at_once(forks: Forks, tmp_path: Path) -> None:
    port = free_port()
    for number in range(3):
        with forks.job(SCRIPT, tmp_path / f"killed{number}", DEAR, port=port) as job:
            job.until_said("trains")
            job.signal(signal.SIGKILL)
            job.end()
        with forks.job(SCRIPT, tmp_path / f"done{number}", DEAR, "--steps", "9", port=port) as job:
            assert of(job.end()) == [0] * 3


def test_two_jobs_at_a_time_do_not_meet(forks: Forks, tmp_path: Path) -> None:
    with (
        forks.job(SCRIPT, tmp_path / "a", DEAR, "--steps", "50") as one,
        forks.job(SCRIPT, tmp_path / "b", "Ripples()", "--steps", "50") as other,
    ):
        assert of(one.end()) == of(other.end()) == [0] * 3


@pytest.mark.parametrize("files", [16, 32, 64, 128])
@pytest.mark.parametrize("strategy", [DEAR, "Ripples()", "Geryon()"])
def test_too_few_descriptors_are_named_or_suffice(
    files: int, strategy: str, forks: Forks, tmp_path: Path
) -> None:
    words = strategy, "--files", str(files), "--steps", "20"
    with forks.job(SCRIPT, tmp_path / "job", *words) as job:
        job.until(lambda: f"the limit is {files}" in job.said(0) or "done" in job.said(0))
        if "done" not in job.said(0):
            job.signal(signal.SIGTERM, 1, 2)  # as a launcher does; a store that is not there is
            ended = job.end()  # awaited for the timeout
            assert (ended[0].status, ended[0].tracebacks) == (1, 1)
            return
        ended = job.end()
    assert of(ended) == [0] * 3
    assert files >= 64


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_processes_of_every_kind_load(
    method: str, moment: str, forks: Forks, tmp_path: Path
) -> None:
    words = DEAR, "--loader", f"{method}:{moment}", "--steps", "20"
    with forks.job(SCRIPT, tmp_path / "job", *words, size=2) as job:
        ended = job.end()
    assert of(ended) == [0] * 2, ended
    assert all(each.said == "trains\ndone\n" for each in ended), ended


def test_data_loader_processes_end_with_a_killed_rank_and_hide_it_from_no_other(
    forks: Forks, tmp_path: Path
) -> None:
    words = DEAR, "--loader", "fork:after", "--event", "kill"
    with forks.job(SCRIPT, tmp_path / "job", *words, size=2) as job:
        begin = time.monotonic()
        ended = job.end()
    assert time.monotonic() - begin < 40.0
    assert of(ended) == [1, -9]


def test_child_processes_do_not_end_the_job(forks: Forks, tmp_path: Path) -> None:
    with forks.job(SCRIPT, tmp_path / "job", DEAR, "--event", "child", "--steps", "20") as job:
        ended = job.end()
    assert of(ended) == [0] * 3, ended
