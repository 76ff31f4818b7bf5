"""What ``benchmarks/ripples_kills.py`` judges, and how kills are told from standstills."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark


@pytest.fixture(scope="module")
def kills() -> Iterator[ModuleType]:
    with benchmark("ripples_kills") as module:
        yield module


def kill(rank: int = 1, still: float = 1.0, met: int = 3, loss: float = 1.0) -> dict[str, Any]:
    back = 4.0 if rank else None
    return {
        "rank": rank, "still_s": still, "limit_s": 6.0, "back_s": back, "met": met, "loss": loss,
    }  # fmt: skip


def report(*kills: dict[str, Any], last: float = 0.1, sums: float = 5.0) -> dict[str, Any]:
    return {
        "kills": list(kills),
        "losses": {"loss-1": (2.0, 0.1, [5.0]), "loss-2": (2.0, last, [sums])},
    }


LAST = kill(0, loss=0.1)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (report(kill(), kill(loss=0.5), LAST), []),
        (report(kill(still=6.1), kill(loss=0.5), LAST), ["stood still for 6.10 s; limit 6.00 s"]),
        (report(kill(met=0), kill(loss=0.5), LAST), ["1 came back and were in groups; limit 2"]),
        (report(kill(), kill(loss=1.5), LAST), ["1.5000 in part 2 of 3, 1.0000 before"]),
        (report(kill(), LAST), ["2 kills; expected 2, and rank 0", "1 came back"]),
        (report(kill(), kill(loss=0.5), LAST, last=0.3), ["loss-2: 0.300, it began with 2.000"]),
        (report(kill(), kill(loss=0.5), LAST, sums=5.1), ["loss-2: other weights"]),
    ],
)
def test_kills_report_that_misses_a_limit_names_it(
    kills: ModuleType, found: Any, said: list[str]
) -> None:
    missed = kills.judged(2, found)
    assert len(missed) == len(said), missed
    assert all(text in line for text, line in zip(said, missed, strict=True))


def test_a_standstill_is_the_longest_of_any_worker(kills: ModuleType) -> None:
    still = kills.Killer.__init__.__globals__["Standstill"]([0, 2], now=0.0)
    for now, steps in ((1.0, (5, 5)), (2.0, (6, 5)), (3.0, (7, 5)), (4.0, (8, 6)), (4.5, (9, 7))):
        still.look(now, {0: steps[0], 2: steps[1]})
    assert still.longest_s == 4.0


def test_all_are_killed_that_are_not_spared_and_come_back(
    kills: ModuleType, tmp_path: Path
) -> None:
    """Workers that the test plays: whoever is to be killed begins its next life at once."""
    killer = kills.Killer(tmp_path, 3, 4, seed=1, spared=[0], last=0)
    telling = [kills.Telling(tmp_path, rank, 0) for rank in range(3)]
    thread = threading.Thread(target=killer.run)
    thread.start()
    lives, steps = [0, 0, 0], [0, 0, 0]
    alive = {0, 1, 2}
    while thread.is_alive():
        for rank in sorted(alive):
            asked = tmp_path / f"kill-{rank}"
            if asked.exists():
                lives[rank] += 1
                if asked.read_text() == "false":
                    alive.discard(rank)
                asked.unlink()
                telling[rank] = kills.Telling(tmp_path, rank, lives[rank])
                continue
            steps[rank] += 1
            telling[rank].say(steps[rank], loss=1.0)
        thread.join(0.002)
    assert killer.failure == ""
    assert [each["rank"] for each in killer.kills][-1] == 0
    assert len(killer.kills) == 5
    assert 0 not in [each["rank"] for each in killer.kills][:-1]
    assert all(each["back_s"] is not None for each in killer.kills[:-1])
    assert killer.kills[0]["before"]["loss"] == 1.0
    assert alive == {1, 2}


def test_the_tables_have_each_kill_and_the_losses(kills: ModuleType) -> None:
    found = [{**kill(), "steps": 30, "steps_without": 4}, {**LAST, "steps": 60, "steps_without": 9}]
    (made,) = kills.tables({"kills": found})
    assert made.rows[0] == ("kill 1", "1", "30", "1.00", "6.00", "4", "4.00", "3", "1.0000")
    assert made.rows[1] == ("kill 2", "0", "60", "1.00", "6.00", "9", "", "3", "0.1000")
    assert made.notes == ("the others stood still for 1.00 s (median), 1.00 .. 1.00 s",)
    losses = kills.run_once.__globals__["losses_table"](report()["losses"])
    assert losses.rows[0] == ("loss-1", "2.000", "0.1000")


def test_a_row_of_a_worker_that_did_not_rejoin_has_an_empty_last_cell() -> None:
    """A report that misses a limit is printed too."""
    kill = {"rank": 2, "steps": 40, "still_s": 0.5, "steps_without": 0, "back_s": None}
    with benchmark("killing") as killing:
        first, second = killing.kill_cells([kill, kill | {"back_s": 3.25}])
    assert first == ("kill 1", "2", "40", "0.50", "0", "")
    assert second == ("kill 2", "2", "40", "0.50", "0", "3.25")
