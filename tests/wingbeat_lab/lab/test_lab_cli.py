"""The verbs, as users type them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wingbeat.errors import LabError, UsageError
from wingbeat_lab import lab
from wingbeat_lab.cli.lab import app
from wingbeat_lab.lab import features, launch
from wingbeat_lab.lab.counters import LabStats

cli = CliRunner()


def test_lab_command_has_its_three_verbs() -> None:
    assert sorted(c.name or "" for c in app.registered_commands) == ["doctor", "run", "stats"]


@pytest.mark.parametrize("verb", ["run", "stats", "doctor"])
def test_lab_help_has_examples(verb: str) -> None:
    shown = cli.invoke(app, [verb, "--help"])
    assert shown.exit_code == 0
    assert "Examples:" in shown.output
    assert f"wingbeat lab {verb}" in shown.output


def test_run_passes_on_code_and_says_who_failed_first(capfd: pytest.CaptureFixture[str]) -> None:
    done = cli.invoke(app, ["run", "loopback:2", "--grace", "5", "--", "sh", "-c", "exit $RANK"])
    assert done.exit_code == 1
    assert "h1 (rank 1) failed first: exit code 1" in done.output
    assert "links are unshaped" in done.output


def test_run_command_names_the_signal_that_ended_a_worker() -> None:
    done = cli.invoke(app, ["run", "loopback:1", "--", "sh", "-c", "kill -KILL $$"])
    assert done.exit_code == 137
    assert "exit code 137 (SIGKILL)" in done.output


def test_run_command_at_the_time_limit_exits_with_124() -> None:
    done = cli.invoke(app, ["run", "loopback:1", "--timeout", "0.3", "--", "sleep", "600"])
    assert done.exit_code == 124
    assert "time limit of 0.3 s" in done.output


@pytest.mark.lab
def test_run_without_the_folders_of_administrators_on_path_finds_tc() -> None:
    program = Path(sys.executable).parent / "wingbeat"
    words = [program, "lab", "run", "star:2@1gbit", "--", "true"]
    done = subprocess.run(
        words, env=os.environ | {"PATH": "/usr/bin:/bin"}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.lab
def test_run_with_stats_priorities_and_faults() -> None:
    arguments = ["run", "star:2@1gbit", "--prio", "2", "--stats", "--fail", "100ms h1 down"]
    done = cli.invoke(app, [*arguments, "--", "sleep", "0.4"])
    assert done.exit_code == 0
    assert "star:2@1gbit,prio=2" in done.output
    assert "fault: 0.1s h1 down" in done.output
    assert " ef " in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "sar:4@1gbit", "--", "true"],
        ["run", "star:2@1gbit", "--prio", "9", "--", "true"],
        ["run", "loopback:2", "--fail", "1s kil h1", "--", "true"],
        ["run", "loopback:2", "--", "no-such-program"],
    ],
)
def test_bad_input_is_a_usage_error(arguments: list[str]) -> None:
    assert isinstance(cli.invoke(app, arguments).exception, UsageError)


def test_stats_command_without_a_running_lab_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "running", list)
    error = cli.invoke(app, ["stats"]).exception
    assert isinstance(error, LabError)
    assert "no lab is running" in str(error)


def test_stats_command_with_several_labs_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    labs = [launch.RunningLab(n, ("true",), LabStats(n, {})) for n in ("12-ab", "34-cd")]
    monkeypatch.setattr(launch, "running", lambda: labs)
    with pytest.raises(LabError, match="12-ab, 34-cd"):
        lab.stats()
    assert lab.stats("34-cd").spec == "34-cd"
    with pytest.raises(UsageError, match=r"'34-ce'.*did you mean '34-cd'"):
        lab.stats("34-ce")
    shown = cli.invoke(app, ["stats", "12-ab", "--json"])
    assert json.loads(shown.output) == {"spec": "12-ab", "hosts": {}, "trunks": {}}


@pytest.mark.lab
def test_doctor_command_where_the_lab_works_exits_with_0() -> None:
    done = cli.invoke(app, ["doctor", "--json"])
    report = json.loads(done.output)
    assert (done.exit_code, report["works"], report["reason"]) == (0, True, None)
    found = {f["name"]: f for f in report["features"]}
    assert all(f["found"] for f in found.values() if f["required"])
    assert {"ip", "tc", "veth", "bridge", "tbf", "htb", "u32", "netem", "tcp"} <= found.keys()
    assert all(f["cost"] and f["remedy"] for f in found.values() if not f["found"])
    assert "hosts use" in found["tcp"]["detail"]
    assert "the lab works here" in cli.invoke(app, ["doctor"]).output


def test_doctor_command_where_the_lab_does_not_work_names_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    features.available.cache_clear()
    features.isolation.cache_clear()
    try:
        done = cli.invoke(app, ["doctor", "--json"])
        report = json.loads(done.output)
        assert done.exit_code == 1
        assert "install iproute2" in report["reason"]
        missing = {f["name"]: f for f in report["features"] if not f["found"]}
        assert missing["ip"]["remedy"] == "apt install iproute2"
        assert missing["user namespace"]["cost"]
    finally:
        features.available.cache_clear()
        features.isolation.cache_clear()
