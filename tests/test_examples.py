"""The scripts in ``examples``, each for a few steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

RUNS = {
    "digits.py": (2, ["4"], r"test accuracy after 4 epochs on 2 workers: [89]\d\.\d%"),
    "finetune.py": (2, ["dear", "10"], r"loss"),
    "images.py": (2, ["--epochs", "2", "--folder", "{folder}"], r"epoch 2: accuracy 9\d\.\d%"),
    "lightning_digits.py": (2, ["--epochs", "3"], r"accuracy [89]\d\.\d% after 3 epochs"),
    "sharded.py": (4, ["--shards", "2", "--steps", "40"], r"step 40: loss \d+\.\d"),
    "sites.py": (2, ["--steps", "90"], r"accuracy 9\d\.\d% after 90 steps"),
    "straggler.py": (4, ["--seconds", "4"], r"rank 3: \d+ steps.*\n(.*\n)*accuracy [89]\d"),
    "transformer.py": (2, ["--steps", "40", "--strategy", "dear"], r"step 40: loss [23]\.\d\d"),
}
"""By script: its processes, its arguments, and what it prints."""


def run(script: str, processes: int, words: list[str]) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    found = subprocess.run(
        [*command, f"--nproc-per-node={processes}", str(EXAMPLES / script), *words],
        capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_example_trains(script: str, tmp_path: Path) -> None:
    processes, words, printed = RUNS[script]
    text = run(script, processes, [word.format(folder=tmp_path) for word in words])
    assert re.search(printed, text), text


@pytest.mark.slow
def test_images_continue_from_their_checkpoint(tmp_path: Path) -> None:
    words = ["--folder", str(tmp_path), "--epochs"]
    assert "epoch 1:" in run("images.py", 2, [*words, "1"])
    text = run("images.py", 2, [*words, "2"])
    assert "epoch 2:" in text
    assert "epoch 1:" not in text
