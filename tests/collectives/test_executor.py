from __future__ import annotations

import threading

import pytest
import torch

from helpers import late
from wingbeat.collectives import Collectives
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.world import World


class NeverRead:
    def wait(self, seconds: float) -> None:
        raise RuntimeError("connection closed by peer")


class HalfDeaf(late.LateLink):
    """Receives, but whatever it sends is found out not to have been read."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> NeverRead:
        super().send(tensor, peer, tag)
        return NeverRead()


def test_nothing_is_started_after_shutdown() -> None:
    first, second = loopback.worlds(2, timeout=0.5)
    collectives = Collectives(first)
    first.close()
    with pytest.raises(PeerError, match=r"all-reduce of bucket 3 was started after .*shutdown"):
        collectives.all_reduce(torch.ones(8), bucket=3)
    second.close()


def test_who_has_lost_a_peer_breaks_its_connections() -> None:
    """The others would otherwise wait out the timeout, and could no longer ask it why."""
    board = loopback.Switchboard()
    first, second, _ = loopback.worlds_on(board, 3, timeout=30.0)
    board.fail(2)
    with pytest.raises(PeerError, match="rank 2 failed"):
        Collectives(first).all_reduce(torch.ones(9)).wait()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        second.links[0].recv(torch.ones(1), 0, tag=999).wait(5.0)


def test_a_send_that_fails_at_the_end_fails_the_collective() -> None:
    """Its result is complete by then; nobody may be left waiting for the buffer."""
    members, board = late.worlds(2)
    errors: list[PeerError] = []

    def body(world: World) -> None:
        try:
            Collectives(world).all_reduce(torch.ones(8), bucket=2).wait()
        except PeerError as err:
            errors.append(err)

    # Daemons, because a thread that waits for ever must not keep the test run from ending.
    threads = [threading.Thread(target=body, args=(world,), daemon=True) for world in members]
    for world, thread in zip(members, threads, strict=True):
        world.links = (HalfDeaf(board, world.rank, "lo0"),)
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(errors) == 2
    assert "failed during all-reduce of bucket 2" in str(errors[0])
    for world in members:
        world.close()
