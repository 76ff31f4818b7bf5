"""Deferred updates that one thread makes while another one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import wingbeat
from helpers.training import on

MEETING = 0.3
"""Seconds that an update waits for what another thread must not do before its end."""


class _Slow(torch.optim.SGD):
    """Announces each update that it begins, and gives others time before it makes it."""

    begun: threading.Event
    other: threading.Event | None = None

    def step(self, closure: Any = None) -> Any:
        if self.other is not None:
            self.begun.set()
            self.other.wait(MEETING)
        return super().step(closure)


def _meanwhile(act: Callable[[Any, Any, threading.Event], Any]) -> Any:
    """Return what rank 0 gets by ``act`` while a thread of its reads the weights after a step."""

    def body(world: Any) -> Any:
        model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
        nn.init.ones_(model[0].weight)
        params = list(model.parameters())
        optimizer = _Slow(model.parameters(), lr=1.0)
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        model(torch.ones(1, 2)).sum().backward()
        other = threading.Event()
        if world.rank == 0:
            optimizer.begun, optimizer.other = threading.Event(), other
        optimizer.step()  # weights of 1 become 0
        if world.rank:
            return None
        reader = threading.Thread(target=params[0].sum)
        reader.start()
        assert optimizer.begun.wait(10)
        found = act(model, optimizer, other)
        reader.join()
        return found, optimizer.param_groups[0]["lr"]

    return on(2, body)[0]


def test_forward_waits_for_the_update_that_another_thread_makes() -> None:
    def forward(model: Any, _optimizer: Any, other: threading.Event) -> Any:
        model[0].register_forward_hook(lambda *_: other.set())
        return model(torch.ones(1, 2)).sum().item()

    assert _meanwhile(forward)[0] == 0.0


def test_a_learning_rate_set_during_the_update_of_another_thread_stays() -> None:
    def set_rate(_model: Any, optimizer: Any, other: threading.Event) -> None:
        optimizer.param_groups[0]["lr"] = 7.0
        other.set()

    assert _meanwhile(set_rate)[1] == 7.0
