"""What a group that failed leaves behind: nothing, and nobody who still writes to its buffers."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from wingbeat.collectives import Collectives, native
from wingbeat.collectives.handle import wait_for_all
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport import world as world_module
from wingbeat.transport.world import World
from wingbeat.types import Group

PATIENCE = 20.0


def fail(world: World, epoch: int, close: bool) -> tuple[str, weakref.ref[torch.Tensor]]:
    """Start an all-reduce of which the other member never hears, in frames that hold everything."""
    members = world.open_group(Group((0, 1), epoch))
    buffer = torch.ones(1000)
    try:
        Collectives(members).all_reduce(buffer).wait()
    except PeerError as error:
        said = str(error)
    try:
        Collectives(members).all_reduce(buffer)
    except PeerError as error:
        again = str(error)
    assert again == said
    if close:
        members.close()
    return said, weakref.ref(buffer)


@pytest.mark.parametrize("close", [True, False])
def test_failed_group_is_collected(close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "MAX_OPEN_GROUPS", 3)
    world, other = loopback.worlds(2, timeout=0.02)
    gc.collect()
    before = len(native._executors)
    buffers = []
    for epoch in range(6):
        said, buffer = fail(world, epoch, close)
        assert "rank 1" in said
        buffers.append(buffer)
        gc.collect()  # those who catch an error hold it in a circle
    assert len(native._executors) <= before
    assert not any(buffer() is not None for buffer in buffers)
    world.close()
    other.close()


def test_buffer_is_unchanged_after_its_wait_has_raised() -> None:
    """One of two cards fails; the other member comes later, and its other card works."""
    worlds = loopback.worlds(2, interfaces=2, timeout=PATIENCE)
    groups = [world.open_group(Group((0, 1))) for world in worlds]
    loopback.run(groups, lambda members: Collectives(members).all_reduce(torch.ones(8)).wait())
    buffer, late = torch.ones(8), torch.full((8,), 7.0)
    handle = Collectives(groups[1]).all_reduce(buffer)
    groups[0].links[0].close()
    begin = time.monotonic()
    with pytest.raises(PeerError, match="rank 0 failed during all-reduce on interface lo0"):
        handle.wait()
    assert time.monotonic() - begin < PATIENCE / 2, "the other link was left to its deadline"
    assert handle.done()
    buffer.fill_(100.0)
    with pytest.raises(PeerError):
        Collectives(groups[0]).all_reduce(late).wait()
    assert buffer.tolist() == [100.0] * 8
    for job in handle.jobs:  # all links say the same
        with pytest.raises(PeerError, match="on interface lo0"):
            job.wait()
    for world in worlds:
        world.close()


def test_wait_ends_when_all_links_are_done() -> None:
    ended, waited = threading.Event(), []

    def lost() -> None:
        waited.append("first")
        raise PeerError("lost")

    def slow() -> None:
        assert ended.wait(PATIENCE)
        waited.append("second")

    timer = threading.Timer(0.05, ended.set)
    timer.start()
    with pytest.raises(PeerError, match="lost"):
        wait_for_all([lost, slow])
    assert waited == ["first", "second"]
