"""Thousands of random overlapping groups, and what they leave behind."""

from __future__ import annotations

import gc
import os
import random
from collections import deque
from dataclasses import dataclass

import torch

from wingbeat.collectives import Collectives, Handle
from wingbeat.collectives.executor import Executor
from wingbeat.collectives.handle import Job
from wingbeat.transport.world import World
from wingbeat.types import Group

from .cases import right, value

AT_ONCE = 5
"""Groups that a worker has under way at a time."""


@dataclass(frozen=True)
class Held:
    """What a process holds at a moment."""

    threads: int
    files: int
    resident_mb: float
    objects: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        kinds = (World, Executor, Job, Group)
        return Held(
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            sum(type(each) in kinds for each in gc.get_objects()),
        )


def random_groups(size: int, number: int, seed: int = 12) -> list[Group]:
    """Sets of one to four ranks; every worker makes the same list."""
    dice = random.Random(seed)
    return [
        Group(dice.sample(range(size), dice.randint(1, min(4, size))), epoch)
        for epoch in range(number)
    ]


def take_part(world: World, groups: list[Group]) -> None:
    """Sum in each of this worker's groups, several at once, and see that each sum is right."""
    mine = [group for group in groups if world.rank in group.ranks]
    dice = random.Random(world.rank)
    for i in range(0, len(mine) - 1, 2):  # in another order on every worker
        if mine[i].ranks != mine[i + 1].ranks and dice.random() < 0.5:
            mine[i], mine[i + 1] = mine[i + 1], mine[i]
    under_way: deque[tuple[World, torch.Tensor, Handle]] = deque()
    for group in mine:
        members = world.open_group(group)
        buffer = torch.full((1 + group.epoch % 7,), value(world.rank))
        under_way.append((members, buffer, Collectives(members).all_reduce(buffer)))
        if len(under_way) == AT_ONCE:
            _end(*under_way.popleft())
    while under_way:
        _end(*under_way.popleft())


def _end(members: World, buffer: torch.Tensor, handle: Handle) -> None:
    handle.wait()
    right(buffer, members.ranks)
    members.close()


def crowd(world: World, number: int) -> tuple[Held, Held]:
    """Take part in so many groups; return what was held after a tenth of them, and at the end."""
    groups = random_groups(world.size, number)
    take_part(world, groups[: number // 10])
    before = Held.now()
    take_part(world, groups[number // 10 :])
    return before, Held.now()
