"""Journals of real training, where the environment asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import net, on, sgd, train
from wingbeat import sync
from wingbeat.errors import UsageError
from wingbeat.exchanges.journals import FOLDER, opened
from wingbeat.stale.audit import audit
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


def test_a_folder_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{FOLDER}=.*nowhere: No such file.*name a folder"):
        opened("a", 0, 0, 2, PACE, env={FOLDER: str(tmp_path / "nowhere")})


def test_training_is_written_down_and_stands_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def body(world: Any) -> None:
        torch.manual_seed(0)
        model = net()
        strategy = wingbeat.Canary(s=3, encrypted=False)
        model, optimizer = sync.distribute(model, sgd(model.parameters()), strategy, world=world)
        for step in range(5):
            train(model, optimizer, [step])
        model.flush()
        sync.release(model, optimizer)

    on(2, body)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 2
    found = audit(path.read_text().splitlines(keepends=True) for path in paths)
    assert found.findings == ()
    assert found.counted == 2 * 5
    assert all('"digest":"' in path.read_text() for path in paths)
