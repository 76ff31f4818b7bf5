"""Reports in, the state of a job out, in virtual time."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import asdict, replace

import pytest

from helpers.reports import add, job, report
from wingbeat.observe import prometheus
from wingbeat.observe.meter import Section
from wingbeat.observe.report import Job, Report, Watch, Worker
from wingbeat.schema import MalformedMessage


def _worker(watch: Watch, now: float, rank: int = 0) -> Worker:
    return watch.job(now, 0.0).workers[rank]


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    watch = Watch("x", 0.0)
    for second in range(31):
        # Ten times as fast from second 20 on.
        steps = 2 * min(second, 20) + 20 * max(0, second - 20)
        sent = 1_000 * steps
        made = report(
            0,
            second,
            iteration=steps,
            spent_s={"forward": 0.25 * steps},
            interfaces={"eth0": (sent, 2 * sent)},
        )
        add(watch, made, float(second))
    worker = _worker(watch, 30.0)
    assert worker.rate == 20.0
    assert worker.interfaces == {"eth0": (20_000.0, 40_000.0)}
    assert worker.ms == pytest.approx({"forward": 250.0})
    assert worker.state == "running"


def test_the_workers_own_clock_counts_for_rates() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(0, 0), 0.0)
    add(watch, report(0, 4), 100.0)  # it came late
    assert _worker(watch, 100.0).rate == 2.0


def test_a_first_report_has_no_rates_yet() -> None:
    watch = Watch("x", 0.0)
    grows = Section("classes", {"0 out": 5}, "B/s")
    shown = Section("gei", {"c0": "11"})
    add(watch, report(0, 3, sections=(grows, shown)), 3.0)
    worker = _worker(watch, 3.0)
    assert (worker.rate, worker.ms, worker.interfaces) == (None, {}, {})
    assert worker.sections == (shown,)


def test_who_makes_no_step_has_no_milliseconds_an_iteration() -> None:
    watch = Watch("x", 0.0)
    for second in (0, 1):
        add(watch, report(0, second, iteration=5), float(second))
    assert (_worker(watch, 1.0).rate, _worker(watch, 1.0).ms) == (0.0, {})


def test_who_has_not_been_heard_is_said_so() -> None:
    watch = Watch("x", 10.0)
    add(watch, report(1, 0), 12.0)
    assert _worker(watch, 14.0, 0).state == "no report for 4 s"
    assert _worker(watch, 14.0, 0).report is None


def test_silence_is_counted_from_the_last_new_report() -> None:
    watch = Watch("x", 0.0)
    said = report(0, 2).to_text()
    for now in range(2, 31):
        assert (
            watch.add_report(0, said, float(now)) == ""
        )  # rank 0 reads the same text again and again
    assert _worker(watch, 7.0 - 0.1).state == "running"
    add(watch, report(0, 3), 3.0)
    assert _worker(watch, 8.0).rate == 2.0
    assert _worker(watch, 30.0).state == "silent for 27 s"
    silent = _worker(watch, 30.0)
    assert (silent.rate, silent.ms, silent.interfaces) == (None, {}, {})
    add(watch, report(0, 31), 31.0)
    assert _worker(watch, 31.0).state == "running"


def test_reports_without_a_step_are_said_so() -> None:
    watch = Watch("x", 0.0)
    for second in range(40):
        add(watch, report(0, second, iteration=min(second, 5)), float(second))
    worker = _worker(watch, 39.0)
    assert worker.state == "no step for 34 s"
    assert worker.still_s == 34.0


def test_workers_of_a_large_job_are_not_silent_while_others_are_read() -> None:
    watch = Watch("x", 0.0)
    for second in range(0, 60, 8):  # 32 of 256 are read a second
        add(watch, report(5, second, size=256), float(second))
    before, after = (watch.job(now, 0.0).workers[5] for now in (56.0 + 7.9, 56.0 + 12.1))
    assert (before.state, before.rate) == ("running", 2.0)
    assert (after.state, after.rate) == ("silent for 12 s", None)
    still = replace(before, silent_s=0.0, still_s=16.9, rate=2.0)
    assert still.state == "running"
    assert replace(still, still_s=17.1).state == "no step for 17 s"


def test_slow_iterations_are_no_standstill() -> None:
    watch = Watch("x", 0.0)
    for second in range(0, 100, 10):
        add(watch, report(0, second, iteration=second // 10), float(second))
    assert _worker(watch, 90.0 + 4.9).state == "running"
    still = replace(_worker(watch, 90.0), still_s=40.0, rate=0.1)
    assert still.state == "running"
    assert replace(still, still_s=51.0).state == "no step for 51 s"


def test_who_has_ended_is_not_called_silent() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(0, 1, ended=True), 1.0)
    assert _worker(watch, 100.0).state == "ended"


def test_a_process_that_is_started_again_begins_anew() -> None:
    watch = Watch("x", 0.0)
    for second in range(5):
        add(watch, report(0, second), float(second))
    add(watch, report(0, 0, pid=999, at_s=3.0), 6.0)
    assert _worker(watch, 6.0).rate is None
    add(watch, report(0, 1, pid=999, at_s=4.0), 7.0)
    assert _worker(watch, 7.0).rate == 2.0


def test_another_process_of_that_rank_is_not_compared_with_the_first() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(0, 3), 3.0)
    add(watch, report(0, 5, pid=999), 5.0)
    assert _worker(watch, 5.0).rate is None


def test_an_older_report_of_the_same_process_begins_anew_and_not_below_zero() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(0, 5), 5.0)
    add(watch, report(0, 3), 6.0)  # init was called again in one process
    assert _worker(watch, 6.0).rate is None


REFUSED = {
    "": "Report is not JSON",
    "{}": "rank is missing",
    "x" * 100_000: "100000 characters; allowed are 16384",
    report(0, 1).to_text(): "rank is 0; allowed: 1",
    report(1, 1, size=3).to_text(): "size is 3; allowed: 2",
    json.dumps({**asdict(report(1, 1)), "pid": "1\n2"}): "pid is '1\\n2'",
    json.dumps({**asdict(report(1, 1)), "counts": {"\n\x1b[2J": -1}}): "counts.??[2J is -1",
}
"""Texts, and why they are refused as reports of rank 1 of two."""


@pytest.mark.parametrize(("text", "why"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_is_no_report_of_its_sender_is_refused_in_one_line_and_changes_nothing(
    text: str, why: str
) -> None:
    watch = Watch("x", 0.0)
    add(watch, report(0, 0), 0.0)
    before = watch.job(0.0, 0.0)
    said = watch.add_report(1, text, 0.0)
    assert why in said
    assert said.isprintable()
    assert watch.job(0.0, 0.0) == before


def test_a_job_of_a_million_workers_is_none() -> None:
    watch = Watch("x", 0.0)
    text = report(0, 0, size=1_000_000).to_text()
    assert watch.add_report(0, text, 0.0) == "size is 1000000; allowed: up to 4096"
    assert watch.job(0.0, 0.0).workers == ()


EXTREMES = (0, 1, 7, 1e-320, 0.5, 1e14, 2**52, 2**62, float(2**62))
"""Numbers that a report may contain."""


def _extreme(number: int, chance: random.Random) -> Report:
    real = functools.partial(chance.choice, EXTREMES)
    return report(
        0,
        number=number,
        at_s=float(real()),
        iteration=int(real()),
        spent_s={"forward": float(real()), "codec": float(real())},
        interfaces={"eth0": (int(real()), int(real()))},
        counts={"lost": int(real())},
        sections=(
            Section("classes", {"out": int(chance.choice(EXTREMES[:7]))}, "B/s"),
            Section("gei", {"a": chance.choice(EXTREMES[:6]), "b": "text"}),
        ),
    )


def test_reports_of_any_numbers_are_shown_to_whoever_looks() -> None:
    """One worker's figures, whatever they are, must not hide those of the others."""
    for seed in range(500):
        chance, watch = random.Random(seed), Watch("x", 0.0)
        accepted = 0
        for number in range(4):
            text = _extreme(number, chance).to_text()
            accepted += not watch.add_report(0, text, float(number))
            found = watch.job(float(number), 0.0)
            assert Job.from_text(json.dumps(found.to_json())) == found, seed
            assert prometheus.exposition(found)
        assert accepted == 4, watch.add_report(0, text, 4.0)


def test_cells_that_grow_are_shown_by_the_second_and_others_as_they_are() -> None:
    watch = Watch("x", 0.0)
    for second in (0, 1, 2):
        grows = {"0 out": 100 * second, **({"1 out": 50} if second == 2 else {})}
        sections = (Section("classes", dict(grows), "B/s"), Section("gei", {"c0": second}))
        add(watch, report(0, second, sections=sections), float(second))
    classes, gei = _worker(watch, 2.0).sections
    assert classes == Section("classes", {"0 out": 100.0, "1 out": 25.0}, "B/s")
    assert gei == Section("gei", {"c0": 2})


def test_a_section_whose_unit_changes_is_not_compared_with_what_it_was() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(0, 0, sections=(Section("x", {"a": "text"}),)), 0.0)
    add(watch, report(0, 1, sections=(Section("x", {"a": 7}, "/s"),)), 1.0)
    assert _worker(watch, 1.0).sections == (Section("x", {"a": 7.0}, "/s"),)


def test_memory_is_bounded() -> None:
    watch = Watch("x", 0.0)
    for second in range(1_000):
        add(watch, report(0, second), float(second))
    assert len(watch._histories[0].reports) <= 12


def test_memory_is_bounded_for_a_worker_whose_clock_stands() -> None:
    watch = Watch("x", 0.0)
    for second in range(1_000):
        add(watch, report(0, second, at_s=5.0), float(second))
    assert len(watch._histories[0].reports) <= 32


def test_a_job_survives_the_way_to_whoever_looks() -> None:
    made = job(3, sections=(Section("gei", {"c0": "1"}), Section("classes", {"0": 3}, "B/s")))
    assert Job.from_text(json.dumps(made.to_json())) == made
    unheard = Watch("y", 0.0)
    add(unheard, report(1, 0), 0.0)
    made = unheard.job(3.0, 9.0)
    assert Job.from_text(json.dumps(made.to_json())) == made


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"name": 1}', '{"name":"x","watched_s":0,"unix_s":0}']
)
def test_what_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(MalformedMessage):
        Job.from_text(text)


def test_a_job_with_a_malformed_worker_is_refused() -> None:
    data = job(1).to_json()
    for field, value in (("rate", "fast"), ("report", {}), ("interfaces", 3), ("rank", None)):
        broken = {**data, "workers": [{**data["workers"][0], field: value}]}
        with pytest.raises(MalformedMessage):
            Job.from_text(json.dumps(broken))
