"""BCube: BML's program and Canary's Table 2, by rounds; and what is no BCube."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.rounds import execute, hops, relay, start
from wingbeat import topologies
from wingbeat.errors import UsageError
from wingbeat.topologies import BCube, Mesh, Topology
from wingbeat.types import Recv, Round, Send, Span, blocks_of
from wingbeat_lab.bcube import AggregatingBCube

SIZES = [(2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (4, 2), (5, 2)]
KINDS = [BCube, AggregatingBCube]
sizes = st.sampled_from(SIZES)
kinds = st.sampled_from(KINDS)
lengths = st.integers(0, 120)


@given(kind=kinds, size=sizes, length=lengths)
def test_every_element_is_summed_exactly_once_on_every_worker(kind, size, length) -> None:
    """Each worker's share is a power of the base, so that a digit counts how often it came."""
    topology, workers = kind(*size), size[0] ** size[1]
    base = workers + 1
    buffers: list[list[Any]] = [[base**rank for _ in range(length)] for rank in range(workers)]
    once = [sum(base**rank for rank in range(workers))] * length
    blocks = blocks_of(length, workers)
    execute([topology.all_reduce(rank, blocks) for rank in range(workers)], buffers)
    assert all(buffer == once for buffer in buffers)


@given(kind=kinds, size=sizes, length=lengths)
def test_the_two_halves_leave_sums_with_owners_and_spread_them(kind, size, length) -> None:
    topology, workers = kind(*size), size[0] ** size[1]
    blocks, buffers, total = start(workers, length)
    execute([topology.reduce_scatter(rank, blocks) for rank in range(workers)], buffers)
    for rank, block in enumerate(blocks):
        assert buffers[rank][block.start : block.stop] == total[block.start : block.stop]
        for other in set(range(workers)) - {rank}:
            buffers[rank][blocks[other].start : blocks[other].stop] = [0.0] * len(blocks[other])
    execute([topology.all_gather(rank, blocks) for rank in range(workers)], buffers)
    assert all(buffer == total for buffer in buffers)


@given(size=sizes, length=st.integers(0, 60), root=st.integers(0, 24))
def test_a_broadcast_reaches_everyone_once(size, length, root) -> None:
    topology, workers = BCube(*size), size[0] ** size[1]
    root %= workers
    blocks, buffers, _ = start(workers, length)
    wanted = list(buffers[root])
    programs = [topology.broadcast(rank, root, blocks) for rank in range(workers)]
    mail = {(r, s.peer): [] for r, p in enumerate(programs) for s in hops(p, Send)}
    relay(programs, buffers, mail)
    assert all(buffer == wanted for buffer in buffers)
    assert not any(mail.values()), "a message was sent that nobody receives"
    for rank, program in enumerate(programs):
        received = sum(len(s.span) for s in hops(program, Recv))
        assert received == (0 if rank == root else length)
        assert_neighbours(topology, rank, program)


def assert_neighbours(topology: BCube, rank: int, program: list[Round]) -> None:
    """Over interface l a worker speaks to those alone who differ from it in digit l."""
    for hop in [*hops(program, Send), *hops(program, Recv)]:
        assert hop.peer != rank
        assert hop.peer in topology.cube(rank, hop.interface)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_each_interface_reaches_its_own_cube_and_is_busy_in_every_round(kind, size) -> None:
    topology, workers = kind(*size), size[0] ** size[1]
    blocks = blocks_of(workers * size[1], workers)
    for rank in range(workers):
        program = topology.all_reduce(rank, blocks)
        assert_neighbours(topology, rank, program)
        for each in program:
            sent: Counter[int] = Counter()
            for hop in hops([each], Send):
                sent[hop.interface] += len(hop.span)
            assert set(sent) == set(range(size[1]))
            assert len(set(sent.values())) == 1, "the interfaces carry different amounts"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_nobody_is_sent_to_by_two_at_once(kind, size) -> None:
    """What a worker sends k-th over an interface in a round is what its peer receives k-th."""
    topology, workers = kind(*size), size[0] ** size[1]
    blocks = blocks_of(workers * size[1], workers)
    programs = [topology.all_reduce(rank, blocks) for rank in range(workers)]

    def over(rank: int, number: int, interface: int, what: type) -> list[Any]:
        found = hops([programs[rank][number]], what)
        return [hop for hop in found if hop.interface == interface]

    for rank in range(workers):
        for number in range(len(programs[0])):
            for interface in range(size[1]):
                for position, sent in enumerate(over(rank, number, interface, Send)):
                    came = over(sent.peer, number, interface, Recv)[position]
                    assert (came.peer, came.span) == (rank, sent.span)


@pytest.mark.parametrize("size", [(2, 2), (3, 2), (2, 3)])
def test_a_broadcast_uses_all_interfaces_alike(size: tuple[int, int]) -> None:
    workers = size[0] ** size[1]
    blocks = blocks_of(workers * 6, workers)[: workers - workers % size[1]]
    blocks += [Span(0, 0)] * (workers - len(blocks))  # as many begin at each level
    sent: Counter[int] = Counter()
    for rank in range(workers):
        for hop in hops(BCube(*size).broadcast(rank, 1, blocks), Send):
            sent[hop.interface] += len(hop.span)
    assert len(sent) == size[1]
    assert len(set(sent.values())) == 1


def sent_share(program: list[Round], length: int) -> dict[int, Fraction]:
    """The share of a buffer that is sent over each interface."""
    sent: Counter[int] = Counter()
    for hop in hops(program, Send):
        sent[hop.interface] += len(hop.span)
    return {interface: Fraction(count, length) for interface, count in sent.items()}


@pytest.mark.parametrize("size", SIZES)
def test_what_each_program_sends_over_each_interface(size: tuple[int, int]) -> None:
    """BML 2 (1 - 1/n) / beta of a buffer, Table 2's (beta + 1) (1 - 1/alpha) / beta."""
    ports, levels = size
    workers = ports**levels
    length = workers * levels * 6
    blocks = blocks_of(length, workers)
    for rank in range(workers):
        bml = BCube(ports, levels).all_reduce(rank, blocks)
        each = Fraction(2 * (workers - 1), workers * levels)
        assert sent_share(bml, length) == dict.fromkeys(range(levels), each)
        assert len(bml) == 2 * levels
        table_2 = AggregatingBCube(ports, levels).all_reduce(rank, blocks)
        each = Fraction((levels + 1) * (ports - 1), ports * levels)
        assert sent_share(table_2, length) == dict.fromkeys(range(levels), each)
        assert len(table_2) == levels + 1


def test_bytes_of_the_papers_nine_workers() -> None:
    blocks = blocks_of(18 * 100, 9)
    for kind, each in ((BCube, 1.78), (AggregatingBCube, 2.0)):
        share = sent_share(kind(3, 2).all_reduce(0, blocks), 1800)
        assert round(float(sum(share.values())), 2) == each


def test_the_rounds_of_bml_on_worker_0_of_four() -> None:
    """BCube(2, 2): level 0 joins 0-1 and 2-3, level 1 joins 0-2 and 1-3; block i is [2i, 2i + 2).

    Part 0 of a block is its first element and goes along level 0 first, part 1 along level 1.
    """
    rounds = BCube(2, 2).reduce_scatter(0, blocks_of(8, 4))
    assert {(s.peer, s.interface, s.span.start) for s in hops(rounds[:1], Send)} == {
        (1, 0, 2),
        (1, 0, 6),
        (2, 1, 5),
        (2, 1, 7),
    }
    assert {(s.peer, s.interface, s.span.start) for s in hops(rounds[1:], Send)} == {
        (2, 1, 4),
        (1, 0, 3),
    }
    gathered = BCube(2, 2).all_gather(0, blocks_of(8, 4))
    assert {(s.peer, s.interface, s.span.start) for s in hops(gathered[:1], Send)} == {
        (2, 1, 0),
        (1, 0, 1),
    }


WORKERS = {(a, b): 3 * a + b for a in range(3) for b in range(3)}
"""Canary's W(a,b): its second number is its port in the level-0 cube <0, a>."""


def named_after(ranks: set[int]) -> str:
    """Return the paper's name of some workers: W(0,*), W(*,0), W(*,*)."""
    for name, wanted in {
        "W(0,0)": {WORKERS[0, 0]},
        "W(0,*)": {WORKERS[0, b] for b in range(3)},
        "W(*,0)": {WORKERS[a, 0] for a in range(3)},
        "W(*,*)": set(range(9)),
    }.items():
        if ranks == wanted:
            return name
    return str(sorted(ranks))


def test_table_2_on_worker_0_0() -> None:
    """What W(0,0) has of each piece after each step, as in the paper's column.

    The paper's text counts 2 x 2 pieces, which do not divide over switches of 3 ports: here each
    thread's part has one for each port. The text sends the gathered pieces along the other cubes,
    where nobody has others than W(0,0): they are along the first.
    """
    topology = AggregatingBCube(3, 2)
    blocks = blocks_of(18, 9)
    buffers: list[list[Any]] = [[Contributions({rank}) for _ in range(18)] for rank in range(9)]
    programs = [topology.all_reduce(rank, blocks) for rank in range(9)]
    column = []
    for step in range(3):
        execute([program[step : step + 1] for program in programs], buffers)
        column.append(
            {
                f"<t[{part}],{piece}>": named_after(pieces_of(topology, buffers[0], part, piece))
                for part in range(2)
                for piece in (range(3) if step == 2 else [0])
            }
        )
    assert column == [
        {"<t[0],0>": "W(0,*)", "<t[1],0>": "W(*,0)"},
        {"<t[0],0>": "W(*,*)", "<t[1],0>": "W(*,*)"},
        {f"<t[{part}],{piece}>": "W(*,*)" for part in range(2) for piece in range(3)},
    ]
    assert all(buffer == [Contributions(range(9))] * 18 for buffer in buffers), "step 4 combines"


class Contributions(frozenset[int]):
    """Whose gradients are in a sum; nobody's may come twice."""

    def __add__(self, other: Contributions) -> Contributions:
        assert not self & other, "summed twice"
        return Contributions(self | other)


def pieces_of(topology: BCube, buffer: list[Any], part: int, piece: int) -> set[int]:
    """Whose gradients a worker has of one piece, the same of all its elements."""
    found = {buffer[2 * block + part] for block in range(9) if topology.digit(block, part) == piece}
    assert len(found) == 1
    return set(found.pop())


def test_fig_14_on_a_mesh_of_three() -> None:
    """Canary, section 4.4.2: after the first step a worker has 3 pieces, after the second all 9."""
    blocks = blocks_of(3, 3)
    buffers: list[list[Any]] = [[Contributions({rank}) for _ in range(3)] for rank in range(3)]
    programs = [Mesh().all_reduce(rank, blocks) for rank in range(3)]
    assert [len(program) for program in programs] == [2, 2, 2]
    execute([program[:1] for program in programs], buffers)
    everyone = Contributions(range(3))
    for rank in range(3):
        assert buffers[rank] == [
            everyone if piece == rank else Contributions({rank}) for piece in range(3)
        ]
    execute([program[1:] for program in programs], buffers)
    assert buffers == [[everyone] * 3] * 3


@pytest.mark.parametrize(
    ("workers", "interfaces", "found"),
    [(9, 2, BCube(3, 2)), (4, 2, BCube(2, 2)), (8, 3, BCube(2, 3)), (5, 1, BCube(5, 1))],
)
def test_ports_and_levels_are_found(workers: int, interfaces: int, found: BCube) -> None:
    assert BCube().fitted(workers, interfaces) == found
    assert found.fitted(workers, interfaces) is found
    assert AggregatingBCube().fitted(workers, interfaces) == AggregatingBCube(
        found.ports, found.levels
    )


def test_a_worker_alone_sends_nothing() -> None:
    topology = BCube().fitted(1, 0)
    alone = [Span(0, 5)]
    for one in (topology, BCube(3, 2), AggregatingBCube()):
        assert one.fitted(1, 0).all_reduce(0, alone) == []
        assert one.broadcast(0, 0, alone) == []


@pytest.mark.parametrize(
    ("topology", "workers", "interfaces", "words"),
    [
        (BCube(), 8, 2, "9 workers with 2 interfaces each are BCube(3, 2)"),
        (BCube(), 8, 2, "4 workers with 2 interfaces each are BCube(2, 2)"),
        (BCube(), 8, 2, "8 workers with 3 interfaces each are BCube(2, 3)"),
        (BCube(), 8, 2, "8 workers with 1 interface each are BCube(8, 1)"),
        (BCube(), 8, 2, "you have 8 with 2"),
        (BCube(), 2, 2, "2 workers with 1 interface each are BCube(2, 1)"),
        (BCube(), 3, 0, "you have 3 with 0"),
        (BCube(3, 2), 8, 2, "9 workers with 2 interfaces each are BCube(3, 2); you have 8 with 2"),
        (BCube(3, 2), 9, 3, "you have 9 with 3"),
        (BCube(3, 2), 9, 1, "wingbeat.init(interfaces=['eth0', 'eth1'])"),
    ],
)
def test_what_is_no_bcube_is_told_what_would_be(
    topology: Topology, workers: int, interfaces: int, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        topology.fitted(workers, interfaces)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "are BCube(1," not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [(1, 2), (3, 0), (0, 2), (2, 17), (1001, 1), (3.0, 2), (True, 2), ("3", 2)]
)
def test_sizes_that_cannot_be_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="allowed are ports from 2 to 1000 and levels from 1"):
        BCube(*wrong)


def test_rounds_of_another_number_of_workers_are_refused() -> None:
    for topology in (BCube(), BCube(3, 2), AggregatingBCube(3, 2)):
        for what in ("reduce_scatter", "all_gather", "all_reduce"):
            with pytest.raises(UsageError, match="not for 8 workers"):
                getattr(topology, what)(0, blocks_of(8, 8))
        with pytest.raises(UsageError, match="not for 8 workers"):
            topology.broadcast(0, 0, blocks_of(8, 8))


def test_names() -> None:
    assert topologies.get("bcube") == BCube()
    assert topologies.get("bcube@3x2") == BCube(3, 2)
    assert topologies.name_of(BCube(3, 2)) == "bcube@3x2"
    assert topologies.name_of(BCube()) == "bcube"
    assert [repr(BCube()), repr(BCube(3, 2))] == ["BCube()", "BCube(ports=3, levels=2)"]
    for unknown in (AggregatingBCube(), AggregatingBCube(3, 2)):
        with pytest.raises(UsageError, match="has no name"):
            topologies.name_of(unknown)


@pytest.mark.parametrize("size", ["", "3", "3x", "x2", "3x2x1", "axb", "-3x2", "0x0", "3x0", "²x2"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(UsageError, match=r"allowed are PORTSxLEVELS, such as bcube@3x2"):
        topologies.parse_size(size)


def wired(topology: BCube) -> list[list[str]]:
    """Each worker's networks, where each cube is one of its own."""
    return [
        [f"10.{level}.{topology.cube(rank, level)[0]}.0/24" for level in range(topology.levels)]
        for rank in range(topology.workers)
    ]


@given(size=sizes)
def test_ranks_in_the_order_of_their_ports_are_what_they_should_be(size) -> None:
    topology = BCube(*size)
    topology.check_networks(wired(topology))
    topology.check_networks([["10.9.0.0/16"] * topology.levels] * topology.workers)


@given(size=st.sampled_from([s for s in SIZES if s[1] > 1]), data=st.data())
def test_ranks_or_interfaces_in_another_order_are_refused(size, data) -> None:
    topology = BCube(*size)
    last = topology.workers - 1
    if data.draw(st.booleans()):
        moved = wired(topology)
        moved[0], moved[last] = moved[last], moved[0]
    else:
        rank = data.draw(st.integers(0, last))
        moved = wired(topology)
        moved[rank].reverse()
    with pytest.raises(UsageError, match=r"is to join the ranks \[.*\] by one switch, but") as got:
        topology.check_networks(moved)
    assert "\n" not in str(got.value)
