"""The line of the log about what training took."""

from __future__ import annotations

import pytest

from wingbeat.observe.report import Report
from wingbeat.observe.summary import FEWEST, WARMUP, Summary, describe


def report(iteration: int, at_s: float, sent: int = 0, **spent: float) -> Report:
    return Report(
        *(0, 2, "a", 1, "DeAR()", 0, at_s, iteration, spent),
        interfaces={"eth0": (sent, 7)},
    )


def summary_of(reports: list[Report], every_s: float = 600.0) -> list[str]:
    lines: list[str] = []
    followed = Summary(lines.append, every_s)
    for each in reports:
        followed.add(each)
    followed.end()
    return lines


def test_the_whole_training_without_its_warmup_is_described_at_the_end() -> None:
    reports = [
        report(WARMUP - 1, 1.0, 0, forward=90.0),
        report(WARMUP, 10.0, 1_000_000, forward=100.0, exchange=1.0),
        report(WARMUP + 50, 15.0, 2_000_000, forward=102.0, exchange=2.0),
        report(WARMUP + 100, 20.0, 3_000_000, forward=104.0, exchange=3.0),
    ]
    assert summary_of(reports) == [
        "DeAR(): 100 steps, 100 ms each, 33% of it waiting for communication; "
        "host a sent 0.02 MB a step"
    ]


def test_a_long_training_is_described_from_time_to_time() -> None:
    reports = [report(WARMUP + 100 * n, 100.0 + 30 * n, forward=1.0 * n) for n in range(6)]
    lines = summary_of(reports, every_s=60.0)
    assert [line.split(",")[0] for line in lines] == [
        "DeAR(): 200 steps",
        "DeAR(): 200 steps",
        "DeAR(): 500 steps",
    ]


@pytest.mark.parametrize("steps", [0, 1, FEWEST - 1])
def test_few_steps_are_not_described(steps: int) -> None:
    assert not summary_of([report(WARMUP, 1.0), report(WARMUP + steps, 2.0)])


def test_a_training_without_reports_is_not_described() -> None:
    assert not summary_of([])


def test_reports_after_the_model_was_freed_do_not_count() -> None:
    reports = [report(WARMUP, 1.0), report(WARMUP + 40, 5.0), report(0, 90.0)]
    assert [line[:29] for line in summary_of(reports)] == ["DeAR(): 40 steps, 100 ms each"]


def test_unknown_interfaces_and_parts_are_left_out() -> None:
    first, last = report(20, 1.0), report(60, 3.0)
    text = describe(first, Report(0, 2, "a", 1, "DeAR()", 1, last.at_s, last.iteration))
    assert text == "DeAR(): 40 steps, 50 ms each"


def test_the_line_ends_with_the_last_comparison() -> None:
    lines: list[str] = []
    followed = Summary(lines.append)
    followed.add(report(WARMUP, 1.0), "")
    followed.add(report(WARMUP + 40, 5.0), "DDP takes 120 ms")
    followed.end()
    assert lines == ["DeAR(): 40 steps, 100 ms each; host a sent 0 MB a step; DDP takes 120 ms"]


def test_bytes_over_the_loopback_interface_are_left_out() -> None:
    def on_one_host(iteration: int, at_s: float, sent: int) -> Report:
        totals = *(0, 2, "a", 1, "DeAR()", 0, at_s, iteration), {}
        return Report(*totals, interfaces={"lo": (sent, sent)})

    assert describe(on_one_host(20, 1.0, 0), on_one_host(60, 3.0, 9_000_000)) == (
        "DeAR(): 40 steps, 50 ms each"
    )
