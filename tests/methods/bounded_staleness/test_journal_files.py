"""Journal files of real training, enabled by the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wingbeat
from helpers.disk import room_for
from helpers.training import net, on, sgd, train
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.journal import FOLDER, open_journal
from wingbeat_lab.audit import audit, read_journal

BOUND = StalenessBound(1, 1, 2)


def test_journal_without_folder_is_disabled() -> None:
    assert not open_journal("a", 0, 0, 2, BOUND, env={}).enabled
    assert not open_journal("a", 0, 0, 2, BOUND, env={FOLDER: ""}).enabled


def test_journal_is_unbuffered_and_separate_by_incarnation(tmp_path: Path) -> None:
    env = {FOLDER: str(tmp_path)}
    for incarnation in range(2):
        journal = open_journal("a", 1, incarnation, 2, BOUND, env=env)
        journal.began(7 + incarnation)
        assert (
            (tmp_path / f"a-1.{incarnation}.jsonl")
            .read_text()
            .endswith(f'{{"began":{7 + incarnation}}}\n')
        )


def test_journal_in_missing_folder_warns_and_is_disabled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = open_journal("a", 3, 0, 4, BOUND, env={FOLDER: str(tmp_path / "nowhere")})
    journal.began(1)
    assert not journal.enabled
    [warning] = caplog.messages
    assert warning == (
        f"{FOLDER}={tmp_path / 'nowhere'}: No such file or directory: cannot write the journal of "
        "rank 3; training continues without it"
    )


def test_journal_on_full_disk_warns_once_and_keeps_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with room_for(200):
        journal = open_journal("a", 1, 0, 2, BOUND, env={FOLDER: str(tmp_path)})
        for iteration in range(100):
            journal.began(iteration)
    [warning] = caplog.messages
    assert (
        "File too large: cannot write the journal of rank 1; training continues without it"
        in warning
    )
    written = (tmp_path / "a-1.0.jsonl").read_text()
    assert len(written) == 200
    lines = written.splitlines(keepends=True)
    assert read_journal(lines).began == list(range(written.count("\n") - 1))


def test_journal_of_training_passes_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
