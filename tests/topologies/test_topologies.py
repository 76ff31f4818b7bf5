"""Every topology, executed on plain lists: one round's messages, then the next's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.rounds import execute, hops, relay, start
from wingbeat import topologies
from wingbeat.errors import UsageError
from wingbeat.types import Recv, Send, blocks_of

NAMES = [name for name, each in topologies.BY_NAME.items() if not each.spans_links]
sizes = st.integers(1, 9)
lengths = st.integers(0, 60)


@pytest.mark.parametrize("name", NAMES)
@given(size=sizes, length=lengths)
def test_reduce_scatter_sums_each_owners_block(name: str, size: int, length: int) -> None:
    blocks, buffers, total = start(size, length)
    topology = topologies.get(name)
    execute([topology.reduce_scatter(r, blocks) for r in range(size)], buffers)
    for rank, block in enumerate(blocks):
        assert buffers[rank][block.start : block.stop] == total[block.start : block.stop]


@pytest.mark.parametrize("name", NAMES)
@given(size=sizes, length=lengths)
def test_all_reduce_gives_everyone_the_sum(name: str, size: int, length: int) -> None:
    blocks, buffers, total = start(size, length)
    execute([topologies.get(name).all_reduce(r, blocks) for r in range(size)], buffers)
    assert all(buffer == total for buffer in buffers)


@pytest.mark.parametrize("name", NAMES)
@given(size=st.integers(2, 9), length=lengths)
def test_each_worker_sends_its_share_and_no_more(name: str, size: int, length: int) -> None:
    blocks = blocks_of(length, size)
    for what in ("reduce_scatter", "all_gather"):
        for rank in range(size):
            rounds = getattr(topologies.get(name), what)(rank, blocks)
            sent = sum(len(s.span) for r in rounds for s in r if isinstance(s, Send))
            # (P-1)/P of the buffer (DeAR, Eqs. 3 and 4), up to one element a block
            assert abs(sent - length * (size - 1) / size) < size


@pytest.mark.parametrize(("size", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (16, 4)])
def test_doubling_takes_the_logarithm_of_the_workers_in_rounds(size: int, rounds: int) -> None:
    blocks = blocks_of(1000, size)
    for rank in range(size):
        for what in ("reduce_scatter", "all_gather"):
            program = getattr(topologies.get("doubling"), what)(rank, blocks)
            assert len(program) == rounds
            assert sum(isinstance(s, Send) for hops in program for s in hops) == size - 1


@pytest.mark.parametrize("name", NAMES)
@given(size=sizes, length=st.integers(0, 40), root=st.integers(0, 8))
def test_broadcast_reaches_everyone(name: str, size: int, length: int, root: int) -> None:
    root %= size
    blocks, buffers, _ = start(size, length)
    wanted = list(buffers[root])
    topology = topologies.get(name)
    programs = [topology.broadcast(rank, root, blocks) for rank in range(size)]
    sent = [(r, s.peer, s.span) for r, p in enumerate(programs) for s in hops(p, Send)]
    got = [(s.peer, r, s.span) for r, p in enumerate(programs) for s in hops(p, Recv)]
    assert sorted(sent, key=str) == sorted(got, key=str)
    mail = {(source, to): [] for source, to, _ in sent}
    relay(programs, buffers, mail)
    assert all(buffer == wanted for buffer in buffers)
    for rank, program in enumerate(programs):
        received = sum(len(s.span) for s in hops(program, Recv))
        assert received == (0 if rank == root else length)


def test_an_unknown_topology_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown topology 'rnig' \(did you mean 'ring'\?\)"):
        topologies.get("rnig")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["reduce_scatter", "all_gather", "all_reduce"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_symmetric_ones_are_rank_zeros_moved_on(name: str, what: str, size: int) -> None:
    topology = topologies.get(name)
    blocks = blocks_of(4 * size, size)

    def moved(rank: int) -> list[list[tuple[str, int, int]]]:
        """A rank's hops: what it does, how far away the peer is, and how far the block."""
        return [
            [
                (type(s).__name__, (s.peer - rank) % size, (s.span.start // 4 - rank) % size)
                for s in hops
            ]
            for hops in getattr(topology, what)(rank, blocks)
        ]

    alike = all(moved(rank) == moved(0) for rank in range(size))
    assert alike or not topology.symmetric
