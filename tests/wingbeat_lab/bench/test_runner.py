"""The parent's side: what it hears, and how it reports a worker that died."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from wingbeat_lab.bench import protocol, runner
from wingbeat_lab.bench.attach import buckets, wrap
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.estimate import Progress
from wingbeat_lab.lab import Failure, LabStats, RunResult


def listener() -> runner.Listener:
    checked = BenchConfig(
        lab="loopback:2", model="digits", strategies=("ddp", "dear"), iterations=4, rounds=2
    ).check()
    return runner.Listener(Progress(checked))


def ended(code: int) -> RunResult:
    return RunResult((code, 0), Failure(0, "h0", code, 1.5), False, LabStats("loopback:2", {}))


def test_messages_move_the_progress_and_the_rest_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hearing = listener()
    protocol.send_message("progress", done=9, row=1, round=1, iteration=0)
    hearing(0, capsys.readouterr().out.rstrip("\n"))
    hearing(0, "Traceback: something")
    assert "dear, round 2/2 (9/20 iterations done, about " in capsys.readouterr().err
    assert list(hearing.last[0]) == ["Traceback: something"]


@pytest.mark.parametrize("text", ["", " ", " {", " 3", " " + "[" * 100_000])
def test_runner_prints_lines_that_are_no_messages(text: str) -> None:
    assert protocol.parse_message(text and f"@wingbeat-bench{text}") is None


def test_a_dead_worker_is_named_with_its_last_lines_and_its_code() -> None:
    hearing = listener()
    for number in range(20):
        hearing(0, f"line {number}")
    error = runner._failure(ended(137), hearing)
    assert error.exit_code == 137
    text = str(error)
    assert "rank 0 on h0 ended with exit code 137 after 1.5 s" in text
    assert "line 19" in text
    assert "line 11" not in text


def test_runner_names_a_dead_worker_without_output() -> None:
    assert str(runner._failure(ended(1), listener())).endswith("no output")


def test_ddps_buckets_shrink_with_the_model() -> None:
    import torch
    import torch.distributed as dist

    from wingbeat_lab import paced

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sizes = []
        for scale in (1.0, 0.25):
            profile = paced.parse(f"paced:resnet50@{scale}")
            model = wrap(paced.PacedModel(profile, time_scale=0.0), mb=25.0, scale=scale)
            for _ in range(3):  # DDP makes its buckets anew after the first iteration
                torch.autograd.backward(model(None))
            sizes.append(buckets(model))
    finally:
        dist.destroy_process_group()
    whole, quarter = sizes
    assert len(whole) == len(quarter) > 3
    assert quarter == pytest.approx([size / 4 for size in whole], rel=0.02)


def test_bench_removes_folders_of_killed_benches_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = """
import os, sys, tempfile
from wingbeat_lab.bench import runner
with runner._own_folder() as folder:
    (folder / "result.json").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""
    words, env = [sys.executable, "-c", script], os.environ | {"TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(words, env=env, **pipes) as killed,  # type: ignore[call-overload]
        subprocess.Popen(words, env=env, **pipes) as running,  # type: ignore[call-overload]
    ):
        folders = [Path(each.stdout.readline().strip()) for each in (killed, running)]
        for folder in folders:
            os.utime(folder, (0, 0))
        killed.kill()
        killed.wait()
        with runner._own_folder() as own:
            assert sorted(tmp_path.iterdir()) == sorted([folders[1], own])
        running.communicate("")
    assert list(tmp_path.iterdir()) == []
