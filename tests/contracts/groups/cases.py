"""What every transport's groups must do: each case is run by all four ranks of a world."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest
import torch

from wingbeat import compression
from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded, Handle
from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.world import World
from wingbeat.types import Group, Span

SIZE = 4
PATIENCE = 30.0
"""Seconds after which a case that waits for another rank fails."""

Case = Callable[[World], None]
CASES: dict[str, Case] = {}


def case(body: Case) -> Case:
    CASES[body.__name__] = body
    return body


def value(rank: int) -> float:
    """A power of four: a sum tells who has added how often, up to three times each."""
    return 4.0**rank


def total(ranks: Iterable[int]) -> float:
    return sum(map(value, ranks))


def summed(members: World, numel: int = 5, topology: str = "ring") -> torch.Tensor:
    """What this rank gets from an all-reduce in the group, which it starts and waits for."""
    buffer, handle = started(members, numel, topology)
    handle.wait()
    return buffer


def started(members: World, numel: int = 5, topology: str = "ring") -> tuple[torch.Tensor, Handle]:
    buffer = torch.full((numel,), value(members.ranks[members.rank]))
    return buffer, Collectives(members, topology).all_reduce(buffer)


def right(buffer: torch.Tensor, ranks: Iterable[int]) -> None:
    expected = torch.full_like(buffer, total(ranks))
    assert torch.equal(buffer, expected), f"{buffer[:4].tolist()} in place of {expected[0]}"


def error_of(act: Callable[[], object]) -> str:
    """The one line that a failed group says."""
    with pytest.raises(PeerError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text
    return text


@case
def every_operation_on_every_topology(world: World) -> None:
    if world.rank == 1:
        return  # no member, and never asked
    ranks = (0, 2, 3)
    for epoch, topology in enumerate(("ring", "mesh", "doubling")):
        with world.open_group(Group(ranks, epoch)) as members:
            assert (members.size, members.ranks[members.rank]) == (3, world.rank)
            group = Collectives(members, topology)
            for numel in (0, 1, 2, 7, 200_000):
                right(summed(members, numel, topology), ranks)
                halves = torch.full((numel,), value(world.rank))
                scattered = group.reduce_scatter(halves)
                group.all_gather(halves, after=scattered).wait()
                right(halves, ranks)
            copied = torch.full((9,), value(world.rank))
            group.broadcast(copied, root=ranks.index(2)).wait()
            assert copied.tolist() == [value(2)] * 9


@case
def what_travels_narrow_or_encoded(world: World) -> None:
    ranks = (1, 2, 3)
    if world.rank not in ranks:
        return
    settings = compression.parse("fp16")
    assert not isinstance(settings, str)
    with world.open_group(Group(ranks)) as members:
        group = Collectives(members)
        narrow = torch.full((1000,), value(world.rank))
        group.all_reduce(narrow, wire=torch.bfloat16).wait()
        right(narrow, ranks)
        wire = Encoded(Coding([Region(Span(0, 1000), make(settings))]))
        encoded = torch.full((1000,), value(world.rank))
        group.all_reduce(encoded, wire=wire).wait()
        right(encoded, ranks)
        gathered = torch.full((1000,), value(world.rank))
        group.all_gather_sum(gathered, wire=wire).wait()
        right(gathered, ranks)


@case
def overlapping_groups_in_another_order_on_every_rank(world: World) -> None:
    groups = [Group(ranks, 5) for ranks in ((0, 1, 2), (1, 2, 3), (0, 1, 3), (2, 3), (0, 1, 2, 3))]
    mine = [group for group in groups if world.rank in group.ranks]
    turn = world.rank % len(mine)
    for size in (3, 100_000):
        opened = []
        for group in mine[turn:] + mine[:turn]:
            members = world.open_group(Group(group.ranks, group.epoch + size))
            opened.append((members, started(members, size)))
        for members, (buffer, handle) in reversed(opened):
            handle.wait()
            right(buffer, members.ranks)
            members.close()


@case
def groups_go_on_while_the_world_does(world: World) -> None:
    everybody = Collectives(world)
    with world.open_group(Group((world.rank // 2 * 2, world.rank // 2 * 2 + 1))) as members:
        whole = torch.full((50_000,), value(world.rank))
        if world.rank % 2:
            handle = everybody.all_reduce(whole)
            right(summed(members, 50_000), members.ranks)
        else:
            right(summed(members, 50_000), members.ranks)
            handle = everybody.all_reduce(whole)
        handle.wait()
        right(whole, range(SIZE))


@case
def collectives_of_a_group_keep_their_order(world: World) -> None:
    ranks = (0, 1, 3)
    if world.rank not in ranks:
        return
    with world.open_group(Group(ranks)) as members:
        many = [started(members, 1 + n % 5) for n in range(60)]
        for buffer, handle in many:
            handle.wait()
            right(buffer, ranks)


@case
def one_epoch_after_the_other(world: World) -> None:
    ranks = (0, 2)
    if world.rank not in ranks:
        return
    for epoch in (0, 1, 2, 1_000_000_007, 2**40):
        with world.open_group(Group(ranks, epoch)) as members:
            right(summed(members), ranks)


@case
def two_epochs_of_the_same_ranks_at_once(world: World) -> None:
    ranks = (0, 1, 2)
    if world.rank not in ranks:
        return
    first, second = (world.open_group(Group(ranks, epoch)) for epoch in (1, 2))
    order = (first, second) if world.rank else (second, first)
    buffers = {}
    for members in order:
        # Were their messages taken for each other's, a sum would have parts of both.
        buffer = torch.full((6,), value(world.rank) * (1 if members is first else 1000))
        buffers[members] = (buffer, Collectives(members).all_reduce(buffer))
    for _, handle in buffers.values():
        handle.wait()
    assert buffers[first][0].tolist() == [total(ranks)] * 6
    assert buffers[second][0].tolist() == [1000 * total(ranks)] * 6
    first.close()
    second.close()


@case
def a_group_of_one(world: World) -> None:
    with world.open_group(Group((world.rank,), 3)) as members:
        buffer, handle = started(members)
        assert handle.done()
        handle.wait()
        right(buffer, (world.rank,))
        Collectives(members).broadcast(buffer, root=0).wait()
        right(buffer, (world.rank,))


@case
def who_is_done_first_may_leave(world: World) -> None:
    """A broadcast's root has nothing to wait for."""
    for epoch in range(5):
        with world.open_group(Group(range(SIZE), epoch)) as members:
            buffer = torch.full((30_000,), value(world.rank))
            Collectives(members).broadcast(buffer, root=epoch % SIZE).wait()
        assert buffer.tolist() == [value(epoch % SIZE)] * 30_000


@case
def handles_can_be_asked_and_call_back(world: World) -> None:
    ranks = (0, 3)
    if world.rank not in ranks:
        return
    called = threading.Event()
    with world.open_group(Group(ranks)) as members:
        buffer, handle = started(members)
        handle.add_done_callback(lambda _: called.set())
        assert called.wait(PATIENCE)
        assert handle.done()
        right(buffer, ranks)
        handle.wait_received()


@case
def groups_that_cannot_be_are_refused(world: World) -> None:
    others = Group(rank for rank in range(SIZE) if rank != world.rank)
    refused = {
        f"{others}: rank {world.rank} is not a member": others,
        "rank 4 does not exist: ranks are 0 to 3": Group((world.rank, 4)),
    }
    for words, group in refused.items():
        with pytest.raises(UsageError) as caught:
            world.open_group(group)
        assert words in str(caught.value)
    with world.open_group(Group((world.rank,), 4)) as members:
        with pytest.raises(UsageError, match="on a group or channel"):
            members.open_group(Group((0,), 5))
        for epoch in (4, 3):
            with pytest.raises(UsageError, match=r"opened epoch 4 of these ranks.* 5 or hi"):
                world.open_group(Group((world.rank,), epoch))


@case
def a_group_that_was_closed_starts_nothing(world: World) -> None:
    ranks = (1, 3)
    if world.rank not in ranks:
        return
    with world.open_group(Group(ranks, 7)) as members:
        right(summed(members), ranks)
    assert "was started after group (1, 3) of epoch 7 was closed" in error_of(
        lambda: summed(members)
    )


@case
def calls_that_do_not_match_end_in_an_error_and_others_go_on(world: World) -> None:
    ranks = (1, 3)
    with world.open_group(Group(range(SIZE), 1)) as everybody:
        right(summed(everybody), range(SIZE))
        world.timeout = 1.0  # of groups opened from here on
        if world.rank in ranks:
            with world.open_group(Group(ranks, 1)) as members:
                group, buffer = Collectives(members), torch.ones(6)
                right(summed(members), ranks)
                call = group.all_gather if world.rank == 1 else group.all_reduce
                said = error_of(lambda: call(buffer, bucket=2).wait())
                assert f"rank {4 - world.rank} was in all-" in said or "failed" in said
                assert "in group (1, 3) of epoch 1" in said
        right(summed(everybody), range(SIZE))
