"""What becomes of groups when a member fails: cases as in `cases`, by name of who fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from wingbeat.collectives import Collectives
from wingbeat.transport.world import World
from wingbeat.types import Group

from .cases import SIZE, error_of, right, started, summed
from .crowd import Held

VICTIM = 0
Die = Callable[[], None]


def dies_in_the_middle(world: World, die: Die) -> str:
    """Rank 0 dies while it has groups open; those without it do not notice."""
    with_it = [Group(ranks, 1) for ranks in ((0, 1, 2), (0, 3), (0, 1, 2, 3))]
    without = [Group(ranks, 1) for ranks in ((1, 2, 3), (2, 3))]
    opened = {
        group: world.open_group(group)
        for group in [*with_it, *without]
        if world.rank in group.ranks
    }
    for members in opened.values():
        right(summed(members), members.ranks)
    if world.rank == VICTIM:
        die()
        return ""
    said = []
    under_way = {group: started(members, 40_000) for group, members in opened.items()}
    for group in without:
        if group in opened:
            buffer, handle = under_way[group]
            handle.wait()
            right(buffer, group.ranks)
    for group in with_it:
        if group in opened:
            text = error_of(under_way[group][1].wait)
            assert text.startswith(f"rank {world.rank}: rank {VICTIM} failed during all-reduce"), (
                text
            )
            assert f"in {group}" in text, text
            said.append(text)
            # Whatever is called later in this group says the same; no sum is ever made.
            assert error_of(lambda group=group: summed(opened[group])) == text
    for members in opened.values():
        members.close()
    for epoch in (2, 3):  # in the same process
        with world.open_group(Group((1, 2, 3), epoch)) as survivors:
            right(summed(survivors, 40_000), (1, 2, 3))
    return "\n".join(said)


def dies_before_it_comes(world: World, die: Die) -> str:
    """Rank 0 never joins: the others miss it by name, within their timeout."""
    world.timeout = 2.0
    if world.rank == VICTIM:
        die()
        return ""
    begin = time.monotonic()
    with world.open_group(Group(range(SIZE), 1)) as members:
        text = error_of(lambda: summed(members))
    assert time.monotonic() - begin < 20
    assert f"rank {VICTIM}" in text
    world.timeout = 20.0
    with world.open_group(Group((1, 2, 3), 1)) as survivors:
        right(summed(survivors), (1, 2, 3))
    return text


def is_slow_and_left_out(world: World, late: int) -> str:
    """Rank 2 has its first collectives in time and not the next: it hears that others went on."""
    world.timeout = 1.0
    slow, ranks = 2, (0, 1, 2)
    if world.rank not in ranks:
        return ""
    with world.open_group(Group(ranks, 1)) as members:
        for _ in range(late):
            right(summed(members), ranks)
        if world.rank == slow:
            # Until the others have gone on without it.
            assert world.store.get("went on", 30.0) == "yes"
            buffer = torch.ones(5)
            text = error_of(lambda: Collectives(members).all_reduce(buffer).wait())
            assert "has aborted group (0, 1, 2) of epoch 1" in text, text
            assert "waited for this rank in all-reduce" in text or "waited for rank" in text, text
            return text
        text = error_of(lambda: summed(members))
        assert "rank 2" in text
    world.timeout = 20.0
    with world.open_group(Group((0, 1), 1)) as others:
        right(summed(others), (0, 1))
    if world.rank == 0:
        world.store.set("went on", "yes")
    return text


def fails_in_its_own_code(world: World, _: int) -> str:
    """What one member cannot pack or unpack ends the group on all, at once and by its rank."""
    ranks = (0, 1, 3)
    if world.rank not in ranks:
        return ""
    with world.open_group(Group(ranks, 1)) as members:
        group = Collectives(members)
        buffer = torch.ones(6, dtype=torch.complex64)  # of a dtype that Python exchanges
        if world.rank == 3:
            buffer = _Poisoned(buffer)
        begin = time.monotonic()
        text = error_of(lambda: group.all_reduce(buffer).wait())
        assert time.monotonic() - begin < 10, "the others were not told"
    with world.open_group(Group(ranks, 2)) as members:
        right(summed(members), ranks)
    return text


def fails_often(world: World, times: int) -> str:
    """What was under way in groups that failed is let go: connections, threads, memory."""
    ranks, held = (0, 1, 3), []
    for epoch in range(times if world.rank in ranks else 0):
        with world.open_group(Group(ranks, epoch)) as members:
            right(summed(members), ranks)
            buffer = torch.ones(100_000, dtype=torch.complex64)
            # Its peers have announced receives by then, and sent what is never taken.
            mine = _Poisoned(buffer) if world.rank == 3 else buffer
            error_of(Collectives(members).all_reduce(mine).wait)
        del members
        held.append(Held.now())
    if held:
        early, late = held[2], held[-1]
        assert late.files <= early.files + 3, held
        assert late.threads <= early.threads + 3, held
    return ""


class _Poisoned(torch.Tensor):
    """A tensor that cannot be added to, as one out of memory could not."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> _Poisoned:
        return torch.Tensor._make_subclass(cls, data)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ in ("split_with_sizes", "__getitem__"):
            raise MemoryError("no memory left")
        return super().__torch_function__(func, types, args, kwargs or {})


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
