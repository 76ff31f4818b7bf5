"""Recording a row: what an earlier row has left says nothing about it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from wingbeat.observe.events import stream
from wingbeat_lab.bench import contenders, tracing
from wingbeat_lab.bench.attach import Attached


def _recorded(last_bucket_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events of one iteration in whose backward DDP's last bucket was at this time."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Attached(model, optimizer, lambda: None, lambda: None)

    def loss(own: nn.Module) -> Tensor:
        out: Tensor = own(torch.ones(1, 2)).sum()
        out.register_hook(in_backward)
        return out

    def in_backward(_grad: Tensor) -> None:
        monkeypatch.setattr(
            tracing, "_last_bucket_ns", (last_bucket_ns or [time.monotonic_ns()])[0]
        )

    tracing.record(0, contenders.parse("single"), made, loss, iterations=1)
    return [event.what for event in stream.stop()]


def test_backward_waits_from_its_last_bucket_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wait" in _recorded([], monkeypatch)


def test_a_bucket_of_an_earlier_row_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _recorded([time.monotonic_ns()], monkeypatch)
    assert found == ["forward", "backward", "step", "update"]
