"""What can be asked of a group's collectives: by several threads, in callbacks, of which root."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from wingbeat import compression
from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded, native
from wingbeat.collectives.encoded import Gathered, GatheredSum
from wingbeat.collectives.executor import Executor
from wingbeat.collectives.handle import Handle
from wingbeat.collectives.nccl import GroupRows
from wingbeat.errors import PeerError, UsageError
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Group, Span

PATIENCE = 20.0


def test_gathered_sum_awaited_by_two_threads_is_added_once() -> None:
    adding, added = threading.Event(), []

    class Slow(GatheredSum):
        def __init__(self) -> None:
            pass

        def add(self) -> None:
            adding.set()
            time.sleep(0.05)  # a second thread that does not wait gets through meanwhile
            added.append("once")

    handle = Gathered(Handle([]), Slow())
    seen: list[list[str]] = []
    first = threading.Thread(target=handle.wait)
    first.start()
    assert adding.wait(PATIENCE)
    handle.wait()
    seen.append(list(added))
    first.join(PATIENCE)
    assert seen == [["once"]]
    assert added == ["once"]


def test_failed_gathered_sum_raises_in_every_wait() -> None:
    class Malformed(GatheredSum):
        def __init__(self) -> None:
            pass

        def add(self) -> None:
            raise PeerError("rank 1 sent a malformed payload")

    handle = Gathered(Handle([]), Malformed())
    for _ in range(2):
        with pytest.raises(PeerError, match="malformed"):
            handle.wait()


def test_a_malformed_row_is_named_by_its_rank_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    numel, encode = 1000, GatheredSum.encode

    def spoiled(gathered: GatheredSum) -> None:
        encode(gathered)
        if gathered.rank == 1:
            gathered.rows[1].fill_(255)

    monkeypatch.setattr(GatheredSum, "encode", spoiled)
    wire = Encoded(Coding([Region(Span(0, numel), make(compression.TopK(density=0.01)))]))

    def body(world: World) -> str:
        if world.rank == 1:
            return ""
        with world.open_group(Group((0, 2))) as members, pytest.raises(PeerError) as caught:
            Collectives(members).all_gather_sum(torch.ones(numel), wire=wire).wait()
        return str(caught.value)

    said = loopback.run(loopback.worlds(3, timeout=PATIENCE), body)
    words = "a gathered sum in group (0, 2) of epoch 0: rank 2 sent a malformed payload"
    assert said[0].startswith(f"rank 0: {words}")
    assert said[2].startswith(f"rank 2: {words}")


@pytest.mark.parametrize("root", [3, -1, True, "0"])
def test_root_outside_of_the_group_is_refused(root: int) -> None:
    world = loopback.worlds(6)[0]
    with world.open_group(Group((0, 3, 5))) as members:
        with pytest.raises(UsageError) as caught:
            Collectives(members).broadcast(torch.ones(3), root=root)
        assert str(caught.value) == (
            f"broadcast(root={root!r}) in group (0, 3, 5) of epoch 0: allowed are 0 to 2, which "
            "are ranks (0, 3, 5) among all"
        )


def test_a_callback_may_close_its_group() -> None:
    def body(world: World) -> float:
        members, closed = world.open_group(Group((0, 1))), threading.Event()

        def close(_: Handle) -> None:
            members.close()
            closed.set()

        begin = time.monotonic()
        Collectives(members).all_reduce(torch.ones(3)).add_done_callback(close)
        assert closed.wait(2 * PATIENCE)
        return time.monotonic() - begin

    worlds = loopback.worlds(2, timeout=5.0)
    assert max(loopback.run(worlds, body)) < 4
    for world in worlds:
        world.close()


def test_two_threads_that_start_together_share_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With lanes of their own, both would number their collectives from 0 on."""
    made: list[int] = []
    never = threading.Event()

    class Slow(Executor):
        def __init__(self, *args: Any) -> None:
            made.append(1)
            never.wait(0.1)
            super().__init__(*args)

    monkeypatch.setattr(native, "Executor", Slow)
    with loopback.worlds(2)[0] as world:
        threads = [threading.Thread(target=Collectives, args=(world,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert made == [1]


def test_local_failure_during_a_gather_names_no_peer() -> None:
    class Rows:
        rank, size = 0, 2

        def all_gather(self, _: torch.Tensor) -> Any:
            return None

    def between() -> None:
        raise RuntimeError("out of memory")

    group: Any = Rows()
    with pytest.raises(RuntimeError, match=r"^out of memory"):
        GroupRows(group, "bucket 3", between).all_gather(torch.zeros(2, 2))
