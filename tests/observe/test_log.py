"""Where log lines go: to standard error without a configuration, otherwise where a script says."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.errors import UsageError
from wingbeat.observe.log import EVENTS, LEVELS, chosen_level, log_event, set_incarnation

LEADS = "log_to_stderr('rank 0'); log_to_stderr('rank 0')"
FOLLOWS = "log_to_stderr('rank 3', leads=False)"
SAY = "log.debug('d'); log.info('tuned to %d', 7); log.warning('w'); log.error('e')"
CONFIGURED = "logging.basicConfig(stream=sys.stdout, format='me %(message)s')"
ON_INFO = "logging.basicConfig(stream=sys.stdout, level=20, format='me %(message)s')"
OWN_LEVEL = "logging.getLogger('wingbeat').setLevel(logging.ERROR)"


def lines_of(*script: str, level: str = "") -> tuple[list[str], list[str]]:
    """Run the statements; return the lines of standard output and of standard error."""
    before = "import logging, sys", "from wingbeat.observe.log import log, log_to_stderr"
    done = subprocess.run(
        [sys.executable, "-c", "; ".join((*before, *script, SAY))],
        env={**os.environ, "WINGBEAT_LOG": level},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_rank_0_without_a_configuration_logs_from_info_on() -> None:
    out, err = lines_of(LEADS)
    assert (out, err) == ([], ["wingbeat: tuned to 7", "wingbeat: w", "wingbeat: e"])


def test_another_rank_without_a_configuration_logs_warnings_with_its_name() -> None:
    assert lines_of(FOLLOWS) == ([], ["wingbeat (rank 3): w", "wingbeat (rank 3): e"])


@pytest.mark.parametrize(
    ("level", "logged"),
    [
        ("debug", ["d", "tuned to 7", "w", "e"]),
        ("INFO", ["tuned to 7", "w", "e"]),
        ("warning", ["w", "e"]),
        ("error", ["e"]),
        ("off", []),
    ],
)
@pytest.mark.parametrize(("rank", "start"), [(0, LEADS), (3, FOLLOWS)])
def test_the_variable_sets_the_level_of_every_rank(
    level: str, logged: list[str], rank: int, start: str
) -> None:
    prefixed = [f"wingbeat (rank {rank}): {line}" for line in logged]
    assert lines_of(start, level=level) == ([], prefixed)


def test_a_scripts_handlers_receive_the_lines_and_nothing_is_logged_twice() -> None:
    assert lines_of(CONFIGURED, LEADS) == (["me tuned to 7", "me w", "me e"], [])
    assert lines_of(CONFIGURED, FOLLOWS) == (["me w", "me e"], [])
    assert lines_of(ON_INFO, FOLLOWS) == (["me tuned to 7", "me w", "me e"], [])


def test_a_configuration_after_the_start_receives_the_lines() -> None:
    assert lines_of(LEADS, CONFIGURED) == (["me tuned to 7", "me w", "me e"], [])


@pytest.mark.parametrize("level", ["", "debug"])
def test_a_scripts_own_level_stays(level: str) -> None:
    assert lines_of(CONFIGURED, OWN_LEVEL, LEADS, level=level) == (["me e"], [])


def test_the_variable_sets_the_level_for_a_scripts_handlers() -> None:
    out, err = lines_of(CONFIGURED, FOLLOWS, level="debug")
    assert (out, err) == (["me d", "me tuned to 7", "me w", "me e"], [])


def test_an_unknown_level_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'warn' in WINGBEAT_LOG \(did you mean 'warning'\?\)"):
        chosen_level({"WINGBEAT_LOG": "warn"})
    assert [chosen_level({"WINGBEAT_LOG": name}) for name in LEVELS] == list(LEVELS.values())
    assert chosen_level({}) is None


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_ends_its_line_with_rank_and_incarnation_and_its_record_has_them(
    event: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "wingbeat")
    log_event(event, "rank 0: 100% is lost", rank=1, incarnation=2)
    [record] = caplog.records
    assert record.getMessage() == (f"rank 0: 100% is lost [event={event} rank=1 incarnation=2]")
    assert record.levelno == EVENTS[event]
    assert vars(record).items() >= {"event": event, "rank": 1, "incarnation": 2}.items()


def test_an_event_of_this_process_has_its_incarnation(caplog: pytest.LogCaptureFixture) -> None:
    set_incarnation(3)
    try:
        log_event("path-cut", "rank 0: eth1", rank=0)
    finally:
        set_incarnation(0)
    assert caplog.messages == ["rank 0: eth1 [event=path-cut rank=0 incarnation=3]"]


def test_events_are_those_on_the_page_each_with_its_level() -> None:
    page = Path(__file__).parents[2] / "docs/how-to/monitor.md"
    told = {}
    table = page.read_text(encoding="utf-8").partition("| event | level |")[2].partition("\n\n")[0]
    for names, levels in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE):
        events, given = re.findall(r"`(.*?)`", names), levels.split(", ")
        told.update(zip(events, given * len(events) if len(given) == 1 else given, strict=False))
    assert told == {event: logging.getLevelName(level).lower() for event, level in EVENTS.items()}
