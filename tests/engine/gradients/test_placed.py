"""`DTensor` parameters by their local parts: snapshots, and errors of collectives inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from wingbeat.engine.gradients.placed import InsideFailureHook, local
from wingbeat.errors import PeerError
from wingbeat.exchanges.snapshot import Snapshot, encode_snapshot
from wingbeat.transport import loopback
from wingbeat.transport.failures import LivenessListener, publish_failure
from wingbeat.transport.mesh import Replica
from wingbeat.transport.world import World


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which only the first one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_snapshot_of_dtensors_has_the_parts_of_this_rank(mesh: DeviceMesh) -> None:
    def made(seed: int) -> tuple[list[Any], torch.optim.Optimizer]:
        torch.manual_seed(seed)
        whole = [torch.randn(4, 3), torch.randn(2), torch.randn(3)]
        params = [
            torch.nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in whole[:2]
        ] + [torch.nn.Parameter(whole[2])]
        optimizer = torch.optim.AdamW(params, lr=0.1, foreach=False)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return params, optimizer

    (params, optimizer), (others, other) = made(0), made(1)
    text = encode_snapshot(params, params, optimizer, "last")
    assert len(text) < 4000
    Snapshot(text, others, others).load_into(other)
    for param, loaded in zip(params, others, strict=True):
        assert torch.equal(local(param.detach()), local(loaded.detach()))
        for key, value in optimizer.state[param].items():
            mine = other.state[loaded][key]
            assert isinstance(mine, DTensor) == isinstance(value, DTensor), key
            assert torch.equal(local(value), local(mine))
    with pytest.raises(PeerError, match="do not fit this model"):
        Snapshot(text, others[1:], others[1:])


class Group:
    """What a hook needs of a group of parameters of ``fully_shard``."""

    def unshard(self) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    def wait_for_unshard(self) -> None:
        raise ValueError("not of a collective")

    def post_backward(self, count: int) -> int:
        return count + 1


@pytest.fixture
def world() -> World:
    """Rank 1 of a job of four, which holds a model with rank 0."""
    board = loopback.Switchboard()
    made = loopback.worlds(2, switchboard=board)[0]
    made.members = (1, 3)
    made.inside = Replica(0, 1, (0, 1), ("shard",), (None,), "cpu", ((0, 1), (2, 3)), board)
    return made


def test_error_inside_names_the_rank_that_failed_first(world: World) -> None:
    group = Group()
    hook = InsideFailureHook(group, world)
    publish_failure(world.store, 0, ValueError("no more data"))
    words = r"rank 1: rank 0 of the same replica 0 \(ranks 0, 1\) failed with ValueError: no more"
    with pytest.raises(PeerError, match=words) as caught:
        group.unshard()
    assert "closed by peer" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="not of a collective"):
        group.wait_for_unshard()
    assert group.post_backward(1) == 2
    hook.remove()
    with pytest.raises(RuntimeError, match="closed by peer"):
        group.unshard()
    assert vars(group) == {}


def test_error_inside_stays_if_all_ranks_live(world: World) -> None:
    group = Group()
    InsideFailureHook(group, world)
    with pytest.raises(PeerError, match=r"rank 0 of the same .* has ended, or does not answer"):
        group.unshard()
    listener = LivenessListener("127.0.0.1")
    try:
        world.store.set("here/0", listener.address.to_text())
        with pytest.raises(RuntimeError, match="closed by peer"):
            group.unshard()
    finally:
        listener.close()
