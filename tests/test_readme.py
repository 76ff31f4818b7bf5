"""The commands of ``README.md``, run in this checkout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def make(*words: str) -> str:
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("needs the environment of `make setup`")
    done = subprocess.run(
        ["make", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=1100
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_commands_are_targets_of_the_makefile() -> None:
    [block] = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert re.findall(r"^make (\w+)", block, re.MULTILINE) == ["demo", "test"]


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_make_demo_prints_its_table() -> None:
    text = make("demo")
    for row in ("digits (real)", "resnet50 (paced)", "allreduce", "dear:plan=fixed"):
        assert row in text
    assert (ROOT / "out/demo/timeline.png").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_make_test_runs_the_chosen_tests() -> None:
    assert re.search(r"\d+ passed", make("test", "TESTS=tests/test_files.py"))
