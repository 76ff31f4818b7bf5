"""Journals of real training, where the environment asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wingbeat
from helpers.disk import room_for
from helpers.training import net, on, sgd, train
from wingbeat.exchanges.journals import FOLDER, opened
from wingbeat.stale.audit import audit, read
from wingbeat.stale.pace import Pace

PACE = Pace(1, 1, 2)


def test_without_a_folder_nothing_is_written() -> None:
    assert not opened("a", 0, 0, 2, PACE, env={}).kept
    assert not opened("a", 0, 0, 2, PACE, env={FOLDER: ""}).kept


def test_lines_are_there_at_once_and_lives_have_their_own(tmp_path: Path) -> None:
    env = {FOLDER: str(tmp_path)}
    for life in range(2):
        journal = opened("a", 1, life, 2, PACE, env=env)
        journal.began(7 + life)
        assert (tmp_path / f"a-1.{life}.jsonl").read_text().endswith(f'{{"began":{7 + life}}}\n')


def test_folder_that_cannot_be_written_is_warned_of_and_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened("a", 3, 0, 4, PACE, env={FOLDER: str(tmp_path / "nowhere")})
    journal.began(1)
    assert not journal.kept
    [warning] = caplog.messages
    assert warning == (
        f"{FOLDER}={tmp_path / 'nowhere'}: No such file or directory: the journal of rank 3 ends "
        "here; training goes on"
    )


def test_disk_that_is_full_is_warned_of_once_and_whole_lines_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with room_for(200):
        journal = opened("a", 1, 0, 2, PACE, env={FOLDER: str(tmp_path)})
        for iteration in range(100):
            journal.began(iteration)
    [warning] = caplog.messages
    assert "File too large: the journal of rank 1 ends here; training goes on" in warning
    written = (tmp_path / "a-1.0.jsonl").read_text()
    assert len(written) == 200
    assert read(written.splitlines(keepends=True)).began == list(range(written.count("began") - 1))


def test_training_is_written_down_and_stands_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def body(world: Any) -> None:
        torch.manual_seed(0)
        model = net()
        strategy = wingbeat.Canary(s=3, p=None, encrypted=False)
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        for step in range(5):
            train(model, optimizer, [step])
        model.synchronize()
        wingbeat.release(model, optimizer)

    on(2, body)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 2
    found = audit(path.read_text().splitlines(keepends=True) for path in paths)
    assert found.findings == ()
    assert found.counted == 2 * 5
    assert all('"digest":"' in path.read_text() for path in paths)
