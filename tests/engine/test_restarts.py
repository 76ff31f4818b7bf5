"""``docs/how-to/checkpoints.md``: torchrun restarts its script, which is killed during training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.ports import free_port

PAGE = Path(__file__).parents[2] / "docs/how-to/checkpoints.md"
KILL = """
    if step == 23 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Path("killed").touch()
        os.kill(os.getpid(), 9)
"""


def trained(folder: Path, script: str) -> dict[str, torch.Tensor]:
    """Run a script on two workers; return the model that it saved last."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--master-port", str(free_port()), "train.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "WINGBEAT_TOP": "off"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model: dict[str, torch.Tensor] = torch.load(folder / "checkpoint.pt", weights_only=True)[
        "model"
    ]
    return model


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_and_restarted_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    (script,) = re.findall(
        r"```python\n(# train\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    loop = "for step in range(begin, 40):\n"
    assert loop in script
    whole = trained(tmp_path / "whole", script)
    again = trained(tmp_path / "again", script.replace(loop, loop + KILL.lstrip("\n")))
    assert (tmp_path / "again" / "killed").exists()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
