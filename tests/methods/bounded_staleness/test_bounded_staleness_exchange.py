"""The exchange of bounded staleness after its model is gone."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import engine, on
from helpers.waiting import is_collected, until


@pytest.mark.parametrize("iterations", [0, 1])
def test_worker_whose_model_is_collected_ends_with_the_others(iterations: int) -> None:
    """Otherwise the others would wait for it for ever, and its own thread would not end."""

    def body(world: Any) -> threading.Thread:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy = wingbeat.Canary(s=None, compression="fp32", encrypted=False)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        for _ in range(iterations):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        thread: threading.Thread = engine(model).runtime.exchange._communication._thread
        kept = weakref.ref(engine(model))
        del model, optimizer
        assert is_collected(kept)
        assert thread.is_alive()
        return thread

    threads = on(2, body)  # closes the worlds
    until(lambda: not any(each.is_alive() for each in threads), lambda: "a worker does not end")
