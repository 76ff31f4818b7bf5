"""What is saved on SIGTERM loads into a new run, which goes on as one that was never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers.ports import free_port

SCRIPT = """
import contextlib, os, pathlib, sys, time
import torch, wingbeat
from wingbeat.strategies import parse
from wingbeat.transport import on_terminate

strategy, saved, stop, mine = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
rank = int(os.environ["RANK"])
wingbeat.init(timeout=60)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
begin = 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
model, optimizer = wingbeat.distribute(model, optimizer, parse(strategy))

def save():
    wingbeat.synchronize(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    print("SAVED", step, flush=True)
    if rank == 0:
        torch.save(state, saved)

on_terminate(save)
uneven = rank == 1 and "join" in mine
with wingbeat.join(model) if "join" in mine else contextlib.nullcontext():
    for step in range(begin, 3 if uneven else stop):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
        if step == 2:
            print("TRAINS", flush=True)
step = stop
save()
"""


class Job:
    """Workers, each with what it starts in a process group of its own, as under torchrun."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        env = {**os.environ, **meeting, "OMP_NUM_THREADS": "1", "WINGBEAT_TOP": "off"}
        self.logs = [folder / f"{rank}.log" for rank in range(2)]
        self.workers = []
        for rank, path in enumerate(self.logs):
            with path.open("w") as log:
                self.workers.append(
                    subprocess.Popen(
                        [sys.executable, str(folder / "train.py"), *arguments],
                        env={**env, "RANK": str(rank)},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def said(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in self.logs]

    def terminate(self) -> None:
        deadline = time.monotonic() + 120
        while not all("TRAINS" in text for text in self.said()):
            assert time.monotonic() < deadline, self.said()
            assert all(worker.poll() is None for worker in self.workers), self.said()
            time.sleep(0.01)
        for worker in self.workers:
            os.killpg(worker.pid, signal.SIGTERM)

    def ends(self) -> list[int]:
        try:
            return [worker.wait(120) for worker in self.workers]
        finally:
            for worker in self.workers:
                worker.kill()


def steps(job: Job) -> list[str]:
    """After how many steps each rank has saved."""
    return [text.partition("SAVED ")[2].split()[0] for text in job.said()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "strategy", ["geryon:update=server", "dear:plan=fixed,shard_optimizer=true"]
)
def test_a_stopped_and_restarted_run_ends_as_an_uninterrupted_one(
    strategy: str, tmp_path: Path
) -> None:
    """With the optimizer's state, also where servers or other ranks have it."""
    saved, whole = tmp_path / "saved.pt", tmp_path / "whole.pt"
    stopped = Job(tmp_path, [strategy, str(saved), "100000"])
    stopped.terminate()
    assert stopped.ends() == [143, 143], stopped.said()
    first, second = steps(stopped)
    assert first == second
    end = str(int(first) + 5)
    assert Job(tmp_path, [strategy, str(saved), end]).ends() == [0, 0]
    assert Job(tmp_path, [strategy, str(whole), end]).ends() == [0, 0]
    again, never = (torch.load(path, weights_only=True) for path in (saved, whole))
    assert again["step"] == never["step"] == int(end)
    for name, value in never["model"].items():
        assert torch.equal(again["model"][name], value)
    for number, kept in never["optimizer"]["state"].items():
        assert set(kept) == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in kept.items():
            assert torch.equal(again["optimizer"]["state"][number][name], value)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["diloco:every=10", "canary"])
def test_workers_at_different_steps_save_the_same_model(strategy: str, tmp_path: Path) -> None:
    job = Job(tmp_path, [strategy, str(tmp_path / "saved.pt"), "100000"])
    job.terminate()
    assert job.ends() == [143, 143], job.said()
    assert all("SAVED" in text for text in job.said())


@pytest.mark.slow
def test_a_worker_that_has_run_out_of_batches_saves_with_the_others(tmp_path: Path) -> None:
    """In `join` it makes no forwards of its own, and servers' state needs all workers."""
    job = Job(tmp_path, ["geryon:update=server", str(tmp_path / "saved.pt"), "100000", "join"])
    job.terminate()
    assert job.ends() == [143, 143], job.said()
    assert all("SAVED" in text for text in job.said())
