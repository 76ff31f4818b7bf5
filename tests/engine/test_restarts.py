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


HOSTS = """
import os, sys, time
from pathlib import Path
import torch, wingbeat

rank = int(os.environ["RANK"])
Path(f"start-{rank}-{os.getpid()}").touch()
wingbeat.init(timeout=60)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.AllReduce())
for step in range(20):
    if step == 5 and rank == 1 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), 9)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
wingbeat.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_killed_on_one_of_two_agents_restarts_the_job_once(tmp_path: Path) -> None:
    """The agent whose own process has not failed counts no restart."""
    (tmp_path / "train.py").write_text(HOSTS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    command += ["--nnodes", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"localhost:{free_port()}", "train.py"]
    env = {**os.environ, "WINGBEAT_TOP": "off"}
    agents = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=280)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("start-*"))) == 4, "\n".join(said)
