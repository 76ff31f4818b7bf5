"""Collectives over all interfaces of a BCube: sums, bits, bytes, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import late
from helpers.amounts import examples
from wingbeat.collectives import Collectives
from wingbeat.errors import PeerError, UsageError
from wingbeat.topologies import BCube, Topology
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Group
from wingbeat_lab.bcube import AggregatingBCube

SIZES = [(2, 2), (3, 2), (2, 3), (4, 2), (5, 2)]
NUMELS = [0, 1, 7, 1000, 70_003]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]
KINDS = [BCube, AggregatingBCube]


def inputs(size: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        (100 * torch.randn(numel, generator=torch.Generator().manual_seed(rank))).to(dtype)
        for rank in range(size)
    ]


def exact(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([v.double() for v in values]).sum(0)


def near(result: torch.Tensor, values: list[torch.Tensor]) -> bool:
    """One rounding of the dtype for each addition, relative to the magnitudes."""
    if not values[0].is_floating_point():
        return torch.equal(result.double(), exact(values))
    magnitude = torch.stack([v.double().abs() for v in values]).sum(0)
    tolerance = torch.finfo(values[0].dtype).eps * (len(values) - 1) * magnitude + 1e-12
    return bool(((result.double() - exact(values)).abs() <= tolerance).all())


class Noting:
    """A link that notes to whom how many bytes go."""

    def __init__(self, link: object) -> None:
        self._link = link
        self.sent: Counter[int] = Counter()

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> object:
        self.sent[peer] += tensor.nbytes
        return self._link.send(tensor, peer, tag)  # type: ignore[attr-defined]


@contextmanager
def cluster(ports: int, levels: int) -> Iterator[list[World]]:
    """Worlds whose links read memory as late as a link may."""
    with late.open_worlds(ports**levels, levels) as (members, _):
        for world in members:
            world.links = tuple(map(Noting, world.links))  # type: ignore[arg-type]
        yield members


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_is_the_sum_with_equal_bits_everywhere(size, dtype) -> None:
    def body(world: World) -> list[torch.Tensor]:
        buffers = [inputs(world.size, n, dtype)[world.rank] for n in NUMELS]
        for handle in [Collectives(world, "bcube").all_reduce(b) for b in buffers]:
            handle.wait()
        return buffers

    with cluster(*size) as members:
        results = loopback.run(members, body)
    for position, numel in enumerate(NUMELS):
        for result in results:
            assert torch.equal(result[position], results[0][position])
        assert near(results[0][position], inputs(len(members), numel, dtype))


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES[:3])
def test_the_two_halves_make_one_all_reduce(size, wire) -> None:
    def body(world: World) -> torch.Tensor:
        collectives = Collectives(world, BCube())
        for numel in NUMELS:
            values = inputs(world.size, numel, torch.float32)
            whole, halves = values[world.rank].clone(), values[world.rank].clone()
            collectives.all_reduce(whole, wire=wire).wait()
            scattered = collectives.reduce_scatter(halves, wire=wire)
            collectives.all_gather(halves, after=scattered, wire=wire).wait()
            assert torch.equal(halves, whole)
        return whole

    with cluster(*size) as members:
        results = loopback.run(members, body)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("size", SIZES[:3])
def test_broadcast_copies_the_roots_buffer(size) -> None:
    def body(world: World) -> None:
        collectives = Collectives(world, "bcube")
        for numel in NUMELS:
            for root in (0, world.size - 1, 2):
                values = inputs(world.size, numel, torch.float32)
                buffer = values[world.rank].clone()
                collectives.broadcast(buffer, root).wait()
                assert torch.equal(buffer, values[root])

    with cluster(*size) as members:
        loopback.run(members, body)


@pytest.mark.parametrize("size", SIZES)
def test_each_link_carries_its_share_to_its_own_cube(size: tuple[int, int]) -> None:
    ports, levels = size
    workers = ports**levels
    numel = workers * levels * 1000

    def body(world: World) -> None:
        Collectives(world, "bcube").all_reduce(torch.ones(numel)).wait()

    with cluster(*size) as members:
        loopback.run(members, body)
        share = 2 * (workers - 1) * 4 * numel // (workers * levels)
        for world in members:
            for level, link in enumerate(world.links):
                sent = link.sent  # type: ignore[attr-defined]
                assert sum(sent.values()) == share
                cube = BCube(ports, levels).cube(world.rank, level)
                assert set(sent) == set(cube) - {world.rank}


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES[:4])
def test_table_2_programs_whose_pieces_change_while_sent_sum_correctly(size, wire) -> None:
    """On small whole numbers, which any order and dtype adds alike."""

    def body(world: World) -> list[torch.Tensor]:
        collectives = Collectives(world, AggregatingBCube())
        buffers = [torch.full((n,), float(world.rank % 3)) for n in NUMELS]
        for buffer in buffers:
            collectives.all_reduce(buffer, wire=wire).wait()
        return buffers

    with cluster(*size) as members:
        total = float(sum(rank % 3 for rank in range(len(members))))
        for result in loopback.run(members, body):
            for numel, buffer in zip(NUMELS, result, strict=True):
                assert torch.equal(buffer, torch.full((numel,), total))


@settings(max_examples=examples(15))
@given(
    calls=st.lists(st.sampled_from(["ring", "mesh", "bcube", "table 2"]), min_size=1, max_size=6)
)
def test_bcube_alternates_with_other_topologies(calls: list[str]) -> None:
    known: dict[str, str | Topology] = {"table 2": AggregatingBCube()}

    def body(world: World) -> list[torch.Tensor]:
        buffers = [torch.full((500,), float(world.rank + k)) for k in range(len(calls))]
        handles = [
            Collectives(world, known.get(call, call)).all_reduce(buffer, bucket=k)
            for k, (call, buffer) in enumerate(zip(calls, buffers, strict=True))
        ]
        for handle in handles:
            handle.wait()
        return buffers

    with cluster(2, 2) as members:
        for buffers in loopback.run(members, body):
            for k, buffer in enumerate(buffers):
                assert torch.equal(buffer, torch.full((500,), 6.0 + 4 * k))


def test_a_vanished_peer_is_named_with_its_interface() -> None:
    board = loopback.Switchboard()
    members = loopback.worlds(4, switchboard=board, interfaces=2, timeout=5.0)
    board.fail(2)

    def body(world: World) -> str:
        with pytest.raises(PeerError) as caught:
            Collectives(world, "bcube").all_reduce(torch.ones(1000), bucket=3).wait()
        return str(caught.value)

    for text in loopback.run([members[0]], body):
        assert "rank 2 failed during all-reduce of bucket 3 on interface lo1" in text
    for world in members:
        world.close()


WIRED = tuple((f"10.0.{rank // 2}.0/24", f"10.1.{rank % 2}.0/24") for rank in range(4))
PARTS: dict[str, Callable[[World], World]] = {
    "world": lambda world: world,
    "channel": lambda world: world.open_channel(),
    "group": lambda world: world.open_group(Group(range(4))),
}


@pytest.mark.parametrize("part", PARTS)
def test_workers_with_other_networks_are_refused_on_every_rank(part: str) -> None:
    def body(world: World) -> str:
        opened = PARTS[part](world)
        Collectives(opened, "ring")  # goes along any links
        try:
            Collectives(opened, "bcube").all_reduce(torch.ones(8)).wait()
        except UsageError as err:
            return str(err)
        return ""

    for networks, wrong in ((WIRED, False), (WIRED[::-1], False), ((*WIRED[1:], WIRED[0]), True)):
        members = loopback.worlds(4, interfaces=2)
        for world in members:
            world.networks = networks
        found = loopback.run(members, body)
        assert len(set(found)) == 1
        assert ("is to join the ranks [0, 1] by one switch" in found[0]) == wrong
        for world in members:
            world.close()


def test_group_has_the_networks_of_its_members() -> None:
    """Four of nine workers make a BCube(2, 2) where their cubes are parts of the others'."""
    wired = [[f"10.0.{rank // 3}.0/24", f"10.1.{rank % 3}.0/24"] for rank in range(9)]
    members = loopback.worlds(9, interfaces=2)

    def body(world: World) -> str:
        world.networks = tuple(map(tuple, wired))
        said = ""
        for epoch, ranks in enumerate(((0, 2, 6, 8), (0, 1, 2, 3), (0, 1, 2))):
            if world.rank in ranks:
                with world.open_group(Group(ranks, epoch)) as group:
                    try:
                        buffer = torch.ones(16)
                        Collectives(group, "bcube").all_reduce(buffer).wait()
                        assert buffer.tolist() == [4.0] * 16
                    except UsageError as err:
                        said += f"{ranks}: {err}\n"
        return said

    lines = loopback.run(members, body)[0].splitlines()
    assert len(lines) == 2
    assert "(0, 1, 2, 3): BCube(2, 2): interface 0 is to join the ranks [2, 3]" in lines[0]
    assert "you have 3 with 2" in lines[1]
    for world in members:
        world.close()


def test_single_worker_sends_nothing() -> None:
    [world] = loopback.worlds(1)
    world.links = world.speeds = ()  # as init makes it
    for topology in ("bcube", "bcube@3x2", AggregatingBCube()):
        buffer = torch.ones(5)
        Collectives(world, topology).all_reduce(buffer).wait()
        assert buffer.tolist() == [1.0] * 5
    world.close()


def test_number_of_workers_without_a_bcube_is_refused() -> None:
    members = loopback.worlds(3, interfaces=2)
    with pytest.raises(UsageError, match=r"4 workers with 2 interfaces each are BCube\(2, 2\)"):
        Collectives(members[0], "bcube")
    for world in members:
        world.close()
