"""Hosts with several workers: sums inside each host, exchange between hosts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.rounds import execute, hops, relay, start
from wingbeat import topologies
from wingbeat.topologies import Hierarchical
from wingbeat.types import Layout, Recv, Send, blocks_of

layouts = st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
    lambda counts: st.permutations([host for host, n in enumerate(counts) for _ in range(n)])
)
"""The host of each worker, in any order."""


@given(
    host_of=layouts,
    length=st.integers(0, 60),
    direct=st.booleans(),
    what=st.sampled_from(["reduce_scatter", "all_reduce"]),
)
def test_each_worker_has_the_sum_of_its_block_or_of_all(
    host_of: list[int], length: int, direct: bool, what: str
) -> None:
    size, topology = len(host_of), Hierarchical(Layout(host_of), direct)
    blocks, buffers, total = start(size, length)
    execute([getattr(topology, what)(rank, blocks) for rank in range(size)], buffers)
    for rank, block in enumerate(blocks):
        part = slice(block.start, block.stop) if what == "reduce_scatter" else slice(None)
        assert buffers[rank][part] == total[part]


@given(host_of=layouts, length=st.integers(0, 60), direct=st.booleans())
def test_a_host_sends_each_block_of_others_once(
    host_of: list[int], length: int, direct: bool
) -> None:
    layout, blocks = Layout(host_of), blocks_of(length, len(host_of))
    topology = Hierarchical(layout, direct)
    for members in layout.hosts:
        own = sum(len(blocks[rank]) for rank in members)
        sent, received = Counter[str](), Counter[str]()
        for what in ("reduce_scatter", "all_gather"):
            for rank in members:
                for hop in [h for round_ in getattr(topology, what)(rank, blocks) for h in round_]:
                    assert hop.near == (host_of[hop.peer] == host_of[rank])
                    if not hop.near:
                        (sent if isinstance(hop, Send) else received)[what] += len(hop.span)
        assert sent["reduce_scatter"] == received["all_gather"] == length - own
        assert not direct or sent["all_gather"] == own * (len(layout.hosts) - 1)


@given(host_of=layouts)
def test_small_collectives_have_one_round_between_hosts_for_each_half(host_of: list[int]) -> None:
    layout, blocks = Layout(host_of), blocks_of(60, len(host_of))
    topology = topologies.in_few_rounds(Hierarchical(layout))
    for rank in range(len(host_of)):
        for what in ("reduce_scatter", "all_gather"):
            rounds = getattr(topology, what)(rank, blocks)
            # Those that send to other hosts; what arrives there is awaited in the same round.
            assert sum(any(not hop.near for hop in hops_) for hops_ in rounds) <= 1


def test_small_collectives_double_where_each_worker_has_its_own_links() -> None:
    assert topologies.in_few_rounds(topologies.Ring()) == topologies.Doubling()
    assert topologies.in_few_rounds(topologies.BCube(2, 2)) == topologies.Doubling()


@given(host_of=layouts, length=st.integers(0, 40), root=st.integers(0, 15))
def test_broadcast_enters_each_host_once(host_of: list[int], length: int, root: int) -> None:
    size, layout = len(host_of), Layout(host_of)
    root %= size
    blocks, buffers, _ = start(size, length)
    wanted = list(buffers[root])
    programs = [Hierarchical(layout).broadcast(rank, root, blocks) for rank in range(size)]
    sent = [(r, s.peer, s.span) for r, p in enumerate(programs) for s in hops(p, Send)]
    relay(programs, buffers, {(source, to): [] for source, to, _ in sent})
    assert all(buffer == wanted for buffer in buffers)
    between = sum(
        len(hop.span)
        for rank, program in enumerate(programs)
        for hop in hops(program, Recv)
        if host_of[hop.peer] != host_of[rank]
    )
    assert between == length * (len(layout.hosts) - 1)


@pytest.mark.parametrize("name", ["ring", "mesh"])
def test_a_ring_or_mesh_of_hosts_with_several_workers_is_hierarchical(name: str) -> None:
    layout = Layout([0, 0, 1])
    assert topologies.fitted(name, layout, 1) == Hierarchical(layout, direct=name == "mesh")


@pytest.mark.parametrize("host_of", [[0, 0, 0], [0, 1, 2], [0]])
def test_workers_of_one_host_or_of_hosts_of_their_own_use_the_topology_itself(
    host_of: list[int],
) -> None:
    assert topologies.fitted("ring", Layout(host_of), 1) == topologies.Ring()


def test_other_topologies_do_not_depend_on_hosts() -> None:
    layout = Layout([0, 0, 1, 1])
    assert topologies.fitted("doubling", layout, 1) == topologies.Doubling()
    assert topologies.fitted("bcube", layout, 2) == topologies.BCube(2, 2)
