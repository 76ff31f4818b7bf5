from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from helpers import late
from wingbeat import compression
from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.failures import FailureAttribution
from wingbeat.transport.world import World
from wingbeat.types import Span


class NeverRead:
    def wait(self, seconds: float) -> None:
        raise RuntimeError("connection closed by peer")


class HalfDeaf(late.LateLink):
    """Receives, but whatever it sends is found out not to have been read."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> NeverRead:
        super().send(tensor, peer, tag)
        return NeverRead()


class HalfArrived:
    """A transfer of which a part has arrived, and which ends at its deadline, closed or not."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self, seconds: float) -> None:
        self._ended.wait(seconds)
        raise RuntimeError("timed out")


class Stuck(late.LateLink):
    ended: threading.Event

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> HalfArrived:  # type: ignore[override]
        return HalfArrived(self.ended)


def test_abandoned_collective_with_a_half_arrived_transfer_close_does_not_wait() -> None:
    members, board = late.worlds(2)
    world, link = members[0], Stuck(board, 0, "lo0")
    link.ended = threading.Event()
    world.links = (link,)
    collectives = Collectives(world)
    handle = collectives.all_reduce(torch.ones(8), bucket=2)
    begin = time.monotonic()
    collectives.abandon()
    world.close()
    assert time.monotonic() - begin < world.timeout / 2
    link.ended.set()
    with pytest.raises(PeerError, match="rank 0: the world was abandoned by this rank"):
        handle.wait()
    members[1].close()


def test_submit_after_shutdown_is_refused() -> None:
    first, second = loopback.worlds(2, timeout=0.5)
    collectives = Collectives(first)
    first.close()
    with pytest.raises(PeerError, match=r"all-reduce of bucket 3 was started after .*shutdown"):
        collectives.all_reduce(torch.ones(8), bucket=3)
    second.close()


def test_rank_that_lost_a_peer_closes_its_connections() -> None:
    """The others would otherwise wait out the timeout, and could no longer ask it why."""
    board = loopback.Switchboard()
    first, second, _ = loopback.worlds(3, switchboard=board, timeout=30.0)
    board.fail(2)
    with pytest.raises(PeerError, match="rank 2 failed"):
        Collectives(first).all_reduce(torch.ones(9)).wait()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        second.links[0].recv(torch.ones(1), 0, tag=999).wait(5.0)


def test_first_failed_rank_is_named_with_the_rank_that_noticed_it() -> None:
    board = loopback.Switchboard()
    first, *_ = loopback.worlds(3, switchboard=board, timeout=5.0)
    FailureAttribution(board, 1, 3, 5.0).publish_wait(2)
    board.fail(1)
    with pytest.raises(PeerError) as caught:
        Collectives(first).all_reduce(torch.ones(9), bucket=4).wait()
    words = "rank 0: rank 2 failed during all-reduce of bucket 4 on interface lo0 after 0.0 s"
    assert str(caught.value).startswith(f"{words} (noticed through rank 1): connection closed")


@pytest.mark.timeout(60)
def test_lost_peer_is_named_without_a_store() -> None:
    """It goes with rank 0; who waits for the collective must not wait for ever."""

    class Gone(loopback.Switchboard):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    first, _ = loopback.worlds(2, switchboard=Gone(), timeout=0.1)
    with pytest.raises(PeerError, match="rank 0: rank 1 failed during all-reduce of bucket 3"):
        Collectives(first).all_reduce(torch.ones(8), bucket=3).wait()


def test_failure_of_unknown_cause_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both lanes wait for a reason, and whoever waits for them."""

    def fails(*_: object) -> None:
        raise OverflowError("nothing known")

    monkeypatch.setattr("wingbeat.collectives.executor.explain_loss", fails)
    board = loopback.Switchboard()
    world, other = loopback.worlds(2, switchboard=board, interfaces=2, timeout=5.0)
    board.fail(other.rank)
    handle = Collectives(world).all_reduce(torch.zeros(64))
    with pytest.raises(PeerError, match="nothing known"):
        handle.wait()
    world.close()


def test_closed_link_leaves_no_reference_to_a_transfer() -> None:
    """Gloo closes its sockets when its last transfer is gone, and not when it is told to."""
    made: list[weakref.ref[Waiting]] = []
    left: list[int] = []
    queued = threading.Event()

    class Waiting:
        def __init__(self, arrives: bool) -> None:
            self._arrives = arrives

        def wait(self, seconds: float) -> None:
            assert queued.wait(20)
            if not self._arrives:
                raise RuntimeError("timed out")

    class Silent(late.LateLink):
        def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Waiting:
            return self.recv(tensor, peer, tag)

        def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Waiting:
            waiting = Waiting(arrives=len(made) < 2)
            made.append(weakref.ref(waiting))
            return waiting

        def close(self) -> None:
            left.append(sum(each() is not None for each in made))

    first, _ = loopback.worlds(2, timeout=0.1)
    first.links = (Silent(late.Board(), 0, "lo0"),)
    collectives = Collectives(first)
    handles = [collectives.all_gather(torch.ones(8), bucket=n) for n in range(4)]
    queued.set()
    for handle in handles[1:]:
        with pytest.raises(PeerError, match="rank 1 failed during all-gather of bucket 1"):
            handle.wait()
    assert len(made) == 8
    assert left == [0]


@pytest.mark.parametrize("nonsense", [0, 1])
def test_malformed_chunk_names_its_sender(nonsense: int) -> None:
    class Nonsense(late.LateLink):
        def send(self, tensor: torch.Tensor, peer: int, tag: int) -> late.Sent:
            return super().send(torch.full_like(tensor, 255), peer, tag)

    numel, other = 5003, 1 - nonsense
    codec = make(compression.TopK(density=0.02))
    encoded = Encoded(Coding([Region(Span(0, numel), codec)]))

    def body(world: World) -> str:
        try:
            Collectives(world).all_reduce(torch.ones(numel), wire=encoded).wait()
        except PeerError as err:
            return str(err)
        return ""

    members, board = late.worlds(2)
    for world in members:
        world.timeout = 0.2
    members[nonsense].links = (Nonsense(board, nonsense, "lo0"),)
    said = loopback.run(members, body)[other]
    assert said.startswith(f"rank {other}: rank {nonsense} failed during all-reduce on interface")
    assert ": sent a malformed payload: " in said


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
