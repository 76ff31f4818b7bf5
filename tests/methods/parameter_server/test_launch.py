"""`ServerGroup`: servers end with the model or the worker that uses them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import engine, on
from helpers.waiting import PATIENCE, until
from wingbeat.errors import UsageError, WingbeatError
from wingbeat.methods.parameter_server import launch
from wingbeat.methods.parameter_server.server import ServerConfig
from wingbeat.transport.services import ThreadService
from wingbeat.transport.store import Store


def threads() -> list[str]:
    wanted = ("wingbeat-client", "wingbeat-service", "wingbeat-failures")
    return [each.name for each in threading.enumerate() if each.name in wanted]


def left() -> list[str]:
    """Return the threads that go on; one of them may have held the client for just a moment."""
    gc.collect()
    return threads()


def trained(world: Any, **options: Any) -> Any:
    model = nn.Linear(5, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    how = wingbeat.Geryon(encrypted=False, **options)
    wingbeat.distribute(model, optimizer, how, world=world)
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    wingbeat.synchronize(model)
    return model


@pytest.mark.parametrize("pull", ["ready", "start"])
def test_garbage_collected_model_ends_servers(pull: str) -> None:
    """As when a function that trains returns: nobody calls release, and the world goes on."""
    together = threading.Barrier(2)

    def body(world: Any) -> None:
        model = trained(world, pull=pull)
        client = weakref.ref(engine(model).runtime.exchange._client)
        together.wait(PATIENCE)
        assert client() is not None
        del model
        together.wait(PATIENCE)
        until(lambda: not left(), lambda: f"still there: {threads()}")
        assert client() is None or not client()._thread.is_alive()
        assert not world._channels

    on(2, body)


def test_unsupported_optimizer_starts_no_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(launch, "ThreadService", lambda *given: started.append(given))

    def body(world: Any) -> str:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(UsageError) as caught:
            wingbeat.distribute(model, optimizer, wingbeat.Geryon(), world=world)
        return str(caught.value)

    for text in on(2, body):
        assert text.startswith("torch.optim.LBFGS with updates that wait for the next forward")
    assert not started


def test_too_many_slices_raise_before_push() -> None:
    def body(world: Any, numel: int, slice_: int) -> str:
        model = nn.Linear(numel, 1, bias=False)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        how = wingbeat.Geryon(encrypted=False, servers=1, slice=slice_)
        with pytest.raises(UsageError) as caught:
            wingbeat.distribute(model, optimizer, how, world=world)
        return str(caught.value)

    for text in on(2, lambda world: body(world, 20_000, 1)):
        assert text.startswith("a server would have 20004 slices; the limit is 16")
        assert "\n" not in text


def test_failed_start_kills_started_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[ThreadService] = []

    def start(config: ServerConfig, store: Store) -> ThreadService:
        if config.index == 2:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(ThreadService(config, store))
        return started[-1]

    monkeypatch.setattr(launch, "ThreadService", start)

    def body(world: Any) -> str:
        with pytest.raises(WingbeatError) as caught:
            trained(world, servers=4)
        return str(caught.value)

    first, second = on(2, body, timeout=3.0)
    why = "rank 0: cannot start server 2: [Errno 11] Resource temporarily unavailable"
    assert first.startswith(f"{why}; 2 of 4 servers run beside this worker")
    assert "cannot start server 2" in second
    assert {each._config.index for each in started} == {0, 1, 3}
    assert all(each._stopping for each in started)
