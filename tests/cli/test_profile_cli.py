"""``wingbeat profile`` as a user runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from helpers.verbs import wingbeat
from wingbeat.profiling import decode
from wingbeat_lab.bench import models

SCRIPT = """
import sys
import torch
from torch import nn
width = int(sys.argv[1])
model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


def run_profile(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return wingbeat("profile", *args, timeout=120, cwd=folder)


def test_profile_verb_writes_a_file_that_the_bench_takes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    done = run_profile("train.py", "--iterations", "3", "--", "32", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("train on ")
    assert lines[0].endswith(" layers, 4 tensors, 0.000354 M parameters")
    assert "batch 4" in lines[1]
    assert "data and the rest" in lines[2]
    path = tmp_path / "train.json"
    assert f"written: {path}" in lines
    assert "wingbeat profile: warming up, iteration 2 of 10" in done.stderr
    profile = decode(path.read_text(encoding="utf-8"), where="here")
    assert profile.params == 8 * 32 + 32 + 32 * 2 + 2
    taken = models.parse(f"{path}@0.5").profile
    assert taken is not None
    assert (taken.scale, taken.name) == (0.5, "train")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["none.py"], "no such file"),
        (["train"], "allowed: script.py, or module:function"),
        (["train:f", "--", "x"], "a function has no arguments"),
        (["train.py", "--iterations", "1"], "--iterations 1"),
        (["train.py", "--batch-size", "0"], "--batch-size 0"),
        (["train.py", "--out", "x.toml"], "has to end in .json"),
    ],
)
def test_profile_verb_bad_input_is_one_line_and_exit_2(
    tmp_path: Path, args: list[str], words: str
) -> None:
    done = run_profile(*args, folder=tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert words in line
