"""``wingbeat doctor`` as a user runs it, on one host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.verbs import wingbeat
from wingbeat.cli.doctor import rendezvous_of
from wingbeat.errors import UsageError


def doctor(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WINGBEAT_")}
    return wingbeat("doctor", *args, timeout=120, env={**kept, **env})


def test_one_host_is_checked_without_a_launcher(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = doctor("--json", str(report))
    assert done.returncode == 0, done
    assert done.stderr == ""
    first, *lines = done.stdout.splitlines()
    assert first.startswith("wingbeat doctor: ")
    assert any(line.startswith("ok       versions       wingbeat ") for line in lines)
    found = json.loads(report.read_text())
    assert found["failed"] is False
    assert {"versions", "NICs", "open files"} <= {each["check"] for each in found["findings"]}


def test_an_interface_that_this_host_lacks_is_a_failed_check() -> None:
    done = doctor("--interface", "nosuch9")
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert "unknown interface 'nosuch9'" in line
    assert "fix: allowed are " in done.stdout


def test_a_failed_check_is_exit_1_with_the_error_of_the_library() -> None:
    done = doctor(WINGBEAT_ENCRYPTED="yes")
    assert done.returncode == 1
    assert "failed   environment    WINGBEAT_ENCRYPTED='yes'" in done.stdout
    assert "fix: allowed are 0 and 1" in done.stdout
    assert "1 failed, " in done.stdout.splitlines()[-1]


def test_a_rank_without_a_store_reports_itself() -> None:
    port = free_port()
    done = doctor(
        *("--timeout", "4"),
        **{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
    )
    assert done.returncode == 1
    assert done.stdout.startswith("wingbeat doctor: ")
    assert f"rank 1 did not reach localhost:{port}" in done.stdout
    assert "Traceback" not in done.stderr


def test_an_incomplete_environment_is_a_finding() -> None:
    done = doctor(RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    assert "failed   launcher       MASTER_ADDR, MASTER_PORT not set" in done.stdout


def test_the_job_key_is_not_printed() -> None:
    done = doctor(WINGBEAT_JOB_KEY="a key that is secret")
    assert done.returncode == 0, done
    assert "secret" not in done.stdout
    assert "from WINGBEAT_JOB_KEY" in done.stdout


def test_a_timeout_out_of_range_is_exit_2() -> None:
    done = doctor("--timeout", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--timeout 1: allowed are 4 to 86400 s" in done.stderr


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_rank_0_serves_the_store_unless_torchrun_does() -> None:
    rendezvous = rendezvous_of(TORCHRUN)
    assert rendezvous is not None
    assert rendezvous.serves
    assert rendezvous.where == "node1:29500 (MASTER_ADDR, MASTER_PORT)"
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    kept = rendezvous_of({**TORCHRUN, **agent})
    assert kept is not None
    assert (kept.serves, kept.attempt) == (False, "3")
    assert rendezvous_of({}) is None


@pytest.mark.parametrize("wrong", [
    {"RANK": "2"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "99999999"}, {"MASTER_PORT": "0"},
    {"MASTER_PORT": "65536"},
])  # fmt: skip
def test_values_out_of_range_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="MASTER_PORT 1 to 65535"):
        rendezvous_of({**TORCHRUN, **wrong})


@pytest.mark.slow
def test_torchrun_starts_it_as_a_module(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "wingbeat", "doctor", "--json", str(report)],
        capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    values = {each["check"]: each["value"] for each in json.loads(report.read_text())["findings"]}
    assert values["ranks"] == "2 of 2 came"
    assert values["store"].startswith("reached at ")
