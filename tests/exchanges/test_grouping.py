"""A job's group generator, from start to end, with workers that are threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.exchanges import grouping
from wingbeat.exchanges.grouping import Grouping
from wingbeat.groups.rules import Rules
from wingbeat.transport import loopback
from wingbeat.transport.world import World


def services() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "wingbeat-service"]


@pytest.mark.parametrize("rules", [Rules(), Rules.random(2)], ids=["smart", "random"])
def test_parameters_are_averaged_and_the_generator_ends_with_the_job(rules: Rules) -> None:
    def body(world: World) -> float:
        buffer = torch.full((100,), float(world.rank))
        groups = Grouping(world, buffer, rules, seed=1)
        for _ in range(20):
            groups.step()
        assert groups.client.fallen is None
        groups.close()
        return float(buffer[0])

    found = loopback.run(loopback.worlds(3), body)
    assert sum(found) == pytest.approx(3.0, rel=1e-4)
    assert max(found) - min(found) < 1.5
    deadline = time.monotonic() + 10
    while services():
        assert time.monotonic() < deadline, "the generator goes on"
        time.sleep(0.01)


def test_a_generator_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(grouping, "InThread", fails)

    def body(world: World) -> None:
        with pytest.raises(UsageError, match="rank 0: cannot start the group generator: no memory"):
            Grouping(world, torch.zeros(4), Rules())

    loopback.run(loopback.worlds(1), body)


def test_a_host_that_is_no_text_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> None:
        monkeypatch.setattr(world, "exchange", lambda what, value: [value, 7])
        with pytest.raises(PeerError, match="rank 1 sent a malformed identity"):
            Grouping(world, torch.zeros(4), Rules())

    loopback.run(loopback.worlds(1), body)


@pytest.mark.parametrize("rules", [None, Rules(), Rules.everyone()], ids=str)
def test_all_buffers_are_one_after_levelling(rules: Rules | None) -> None:
    before = services()

    def body(world: World) -> tuple[float, bool]:
        buffer = torch.full((100,), float(world.rank))
        groups = Grouping(world, buffer, rules, seed=1)
        for _ in range(3 + 2 * world.rank if rules else 4):
            groups.step()
        groups.level()
        found = float(buffer[0])
        groups.step()
        groups.level()
        alike = bool((buffer == buffer[0]).all()) and float(buffer[0]) == found
        if rules is None:
            assert services() == before, "nobody is asked"
        groups.close()
        return found, alike

    found = loopback.run(loopback.worlds(3), body)
    assert len({value for value, _ in found}) == 1
    assert found[0][0] == pytest.approx(1.0, rel=1e-4)
