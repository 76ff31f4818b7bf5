"""One worker's part of a bench, without links: when a row's iterations begin to count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wingbeat.bench import attach, worker
from wingbeat.bench.attached import Attached
from wingbeat.bench.config import BenchConfig
from wingbeat.bench.worker import Worker
from wingbeat.transport import loopback


class Trial:
    """A codec's trial: over after so many iterations."""

    def __init__(self, left: int) -> None:
        self.left = left

    def active(self) -> bool:
        return self.left > 0

    def decide(self, coded: bool) -> None:
        self.left = 0


class Control:
    """A codec's trial and a merging's planning at once, each if there is one."""

    merging = None

    def __init__(self, codec: int | None, plan: int | None) -> None:
        self.trial = None if codec is None else Trial(codec)
        self.plan = plan or 0

    def deciding(self) -> bool:
        return self.plan > 0 or (self.trial is not None and self.trial.active())


class Compression:
    on = True
    coded = "sketch"


def decided_after(
    monkeypatch: pytest.MonkeyPatch, own: Worker, *, codec: int | None, plan: int | None
) -> int:
    """Iterations until row 0 is timed, where its codec's trial and its plan take so many."""
    module = torch.nn.Linear(1, 1)
    control: Any = Control(codec, plan)
    compression: Any = Compression()
    made = Attached(
        module,
        torch.optim.SGD(module.parameters()),
        lambda: None,
        lambda: None,
        compression,
        control,
    )
    steps = 0

    def step(*_: Any) -> float:
        nonlocal steps
        steps += 1
        control.plan -= 1
        if control.trial is not None:
            control.trial.left -= 1
        return 0.0

    monkeypatch.setattr(attach, "step", step)
    worker._decide(own, 0, made, lambda model: model(torch.ones(1)))
    assert not made.deciding()
    return steps


@pytest.fixture
def own() -> Worker:
    config = BenchConfig(lab="loopback:2", model="paced:resnet50", strategies=("allreduce",))
    return Worker(config.check(), loopback.worlds(2)[1])


@pytest.mark.parametrize(
    ("codec", "plan", "steps"),
    [(None, None, 0), (3, None, 3), (None, 4, 4), (3, 5, 5), (6, 5, 6), (0, 0, 0)],
)
def test_timing_waits_for_the_codec_and_for_the_plan(
    monkeypatch: pytest.MonkeyPatch,
    own: Worker,
    codec: int | None,
    plan: int | None,
    steps: int,
) -> None:
    assert decided_after(monkeypatch, own, codec=codec, plan=plan) == steps


def test_the_codec_is_tried_once_and_the_plan_in_every_round(
    monkeypatch: pytest.MonkeyPatch, own: Worker
) -> None:
    assert decided_after(monkeypatch, own, codec=6, plan=2) == 6
    assert decided_after(monkeypatch, own, codec=6, plan=2) == 2
    assert decided_after(monkeypatch, own, codec=6, plan=None) == 0
