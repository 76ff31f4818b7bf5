"""Bytes by class, from what the kernel prints."""

from __future__ import annotations

import pytest

from wingbeat_lab.bench.sent import Sent
from wingbeat_lab.lab import counters
from wingbeat_lab.lab.counters import ClassCounters, InterfaceCounters
from wingbeat_lab.lab.spec import LabSpec


def test_classes_of_all_interfaces_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = InterfaceCounters(0, 0, 100, 1)
    monkeypatch.setattr(
        counters, "read", lambda: {"eth0": interface, "eth1": interface, "lo": interface}
    )
    asked: list[int] = []

    def classes(prio: int) -> dict[str, dict[str, ClassCounters]]:
        asked.append(prio)
        port = {"ef": ClassCounters(10, 1, 0), "be": ClassCounters(95, 1, 0)}
        return {"eth0": port, "eth1": port}

    monkeypatch.setattr(counters, "read_classes", classes)
    sent = Sent.read(LabSpec.parse("star:2x2@1gbit,prio=2"))
    assert sent == Sent(200, {"ef": 20, "be": 190})
    assert Sent.read(LabSpec.parse("star:2x2@1gbit")) == Sent(200, {})
    assert Sent.read(LabSpec.parse("loopback:2")) == Sent(100, {})
    assert asked == [2]


def test_since_is_an_iteration() -> None:
    before, after = Sent(100, {"ef": 10, "be": 90}), Sent(500, {"ef": 110, "be": 390})
    assert after.since(before, 4) == Sent(100, {"ef": 25, "be": 75})
