"""`DTensor` parameters by their parts: what needs no process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from wingbeat.engine.gradients.placed import GatherHook, divides


class Group:
    """A parameter group of ``fully_shard``."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.shard = torch.ones(2)
        self.fsdp_params = [SimpleNamespace(sharded_param=self.shard)]
        self.comm_ctx = SimpleNamespace(
            wait_all_gather_streams_on_event=lambda event: calls.append(("waits", event))
        )

    def unshard(self, async_op: bool = False) -> str:
        self.calls.append(("gathered", async_op))
        return "handle"


def test_gather_of_the_group_waits_for_the_hook_that_gets_its_shards() -> None:
    calls: list[Any] = []
    group, other = Group(calls), Group(calls)

    def update(shards: list[torch.Tensor]) -> str:
        calls.append(shards)
        return "updated"

    GatherHook(group, update)  # type: ignore[arg-type]
    assert group.unshard(async_op=True) == "handle"
    [shards], waits, gathered = calls
    assert shards is group.shard
    assert (waits, gathered) == (("waits", "updated"), ("gathered", True))
    assert other.unshard() == "handle"
    assert calls[3:] == [("gathered", False)], "of another group"


def test_gather_hook_that_is_removed_leaves_the_group_as_it_was() -> None:
    calls: list[Any] = []
    group = Group(calls)
    before = dict(vars(group))
    GatherHook(group, calls.append).remove()
    assert vars(group) == before
    group.unshard()
    assert calls == [("gathered", False)]


def test_shards_and_strided_shards_divide_a_tensor_and_others_do_not() -> None:
    assert divides(Shard(1))
    assert divides(_StridedShard(0, split_factor=2))
    assert not divides(Replicate())
    assert not divides(Partial())
