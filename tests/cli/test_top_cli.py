"""``wingbeat top`` from outside: no job, one job, no terminal, no Textual."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.reports import report
from wingbeat.observe import top
from wingbeat.observe.reporter import SupervisorProcess
from wingbeat.observe.supervisor import Places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def job(folder: Path) -> Iterator[str]:
    """A job that one worker has reported of."""
    launched = SupervisorProcess("train-1", Places(str(folder)), lambda _: None)
    for second in range(4):
        launched.send_report(0, report(0, second, size=1).to_text())
    deadline = time.monotonic() + 30
    while not any(found.query().workers for found in top.running(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield "train-1"
    launched.close()


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "wingbeat.cli.main", "top", *args]


def _env(folder: Path, **more: str) -> dict[str, str]:
    usual = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return {**usual, "WINGBEAT_RUNTIME_DIR": str(folder), **more}


def _top(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*args),
        env=_env(folder, **env),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_no_job_is_one_line(folder: Path) -> None:
    for args in ((), ("--json",), ("train-9",)):
        done = _top(folder, *args)
        assert done.returncode == 2
        assert done.stdout == ""
        [line] = done.stderr.splitlines()
        assert line.startswith("wingbeat: no wingbeat job of this user runs on this host")


def test_json_is_printed_once(folder: Path, job: str) -> None:
    done = _top(folder, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said["name"] == job
    [worker] = said["workers"]
    assert worker["report"]["iteration"] == 6
    assert worker["rate"] == 2.0
    assert worker["state"] == "running"


def test_without_a_terminal_it_is_text_once(folder: Path, job: str) -> None:
    done = _top(folder, "train")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("train-1: iteration 6, 2 iterations/s; 1 worker; ")
    assert "\x1b" not in done.stdout
    assert any(line.startswith("rank  host") and "codec ms" in line for line in lines)
    narrow = _top(folder, COLUMNS="40").stdout.splitlines()
    assert max(map(len, narrow[2:6])) <= 40


def test_whoever_has_seen_enough_may_go(folder: Path, job: str) -> None:
    for args in (("--json",), ()):
        top = subprocess.Popen(
            _command(*args), env=_env(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert top.stdout is not None
        assert top.stderr is not None
        top.stdout.close()  # as head does, only sooner
        assert top.wait(60) == 0
        assert top.stderr.read() == b""
        top.stderr.close()


@pytest.mark.parametrize("every", ["0", "-1", "nan", "1e9", "soon"])
def test_a_time_that_is_none_is_one_line(folder: Path, job: str, every: str) -> None:
    done = _top(folder, "--every", every)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "every" in done.stderr


def test_without_textual_one_line_says_what_to_install(
    folder: Path, tmp_path: Path, job: str
) -> None:
    (tmp_path / "textual").mkdir()
    (tmp_path / "textual" / "__init__.py").write_text(
        "raise ModuleNotFoundError('no textual', name='textual')\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    code, said = _on_a_terminal(_command(), _env(folder, PYTHONPATH=path))
    assert code == 2
    [line] = said.splitlines()
    assert line.startswith("wingbeat: the live view needs Textual: pip install 'wingbeat[top]'")
    assert _top(folder, "--json", PYTHONPATH=path).returncode == 0
    assert _top(folder, PYTHONPATH=path).returncode == 0


def test_on_a_terminal_it_is_live_until_q(folder: Path, job: str) -> None:
    code, said = _on_a_terminal(_command(), _env(folder, TERM="xterm"), until="iteration", keys="q")
    assert code == 0
    assert "train-1: iteration 6" in said


def _on_a_terminal(
    command: list[str], env: dict[str, str], until: str = "", keys: str = ""
) -> tuple[int, str]:
    """Run a command on a terminal of its own; type ``keys`` once it has written ``until``."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        said, typed = "", False
        while True:
            try:
                said += os.read(ours, 4096).decode(errors="replace")
            except OSError:  # it has closed its end
                break
            if keys and not typed and until in said:
                os.write(ours, keys.encode())
                typed = True
        return process.wait(60), said
    finally:
        os.close(ours)
