from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat import topologies
from wingbeat.collectives.program import (
    MAX_CHUNK_BYTES,
    MAX_LEAST_BYTES,
    MAX_SPANNING_BYTES,
    MESSAGE_S,
    MIN_CHUNK_BYTES,
    RECEIVES_AHEAD,
    SPANNING_CHUNKS,
    Program,
    Transfer,
    chunk_elements,
    compile_collective,
    compile_rounds,
    last_overlap,
    least_message,
)
from wingbeat.topologies import Doubling, Hierarchical, Mesh, Ring
from wingbeat.types import Layout, Recv, Send, Span, blocks_of

BCUBES = [("bcube@2x2", 4), ("bcube@3x2", 9), ("bcube@2x3", 8)]
place_st = st.sampled_from(BCUBES) | st.tuples(st.sampled_from(["ring", "mesh"]), st.integers(1, 9))
several_st = place_st.filter(lambda place: place[1] > 1)


def programs(place: tuple[str, int], what: str, length: int, chunk: int) -> list[Program]:
    name, size = place
    blocks = blocks_of(length, size)
    make = getattr(topologies.get(name), what)
    return [compile_rounds(make(rank, blocks), chunk) for rank in range(size)]


@given(
    place=place_st,
    what=st.sampled_from(["reduce_scatter", "all_gather", "all_reduce"]),
    length=st.integers(0, 80),
    chunk=st.integers(1, 20),
)
def test_both_ends_of_a_link_number_the_same_chunks(place, what, length, chunk) -> None:
    compiled = programs(place, what, length, chunk)
    sent, received = set(), set()
    for rank, program in enumerate(compiled):
        sends = [*program.first, *(t for unlocked in program.unlocks for t in unlocked)]
        sent |= {(rank, t.peer, t.link, t.tag, t.span) for t in sends}
        received |= {(t.peer, rank, t.link, t.tag, t.span) for t in program.receives}
        assert len({(t.peer, t.link, t.tag) for t in sends}) == len(sends)
        assert all(0 < len(t.span) <= chunk for t in sends)
    assert sent == received


@given(place=several_st, length=st.integers(1, 80), chunk=st.integers(1, 20))
def test_a_chunk_is_sent_only_after_all_that_it_sums(place, length, chunk) -> None:
    for program in programs(place, "all_reduce", length, chunk):
        seen: dict[int, int] = {}
        for index, receive in enumerate(program.receives):
            for element in range(receive.span.start, receive.span.stop):
                seen[element] = index
            for send in program.unlocks[index]:
                needed = range(send.span.start, send.span.stop)
                assert any(seen.get(element) == index for element in needed)


@given(place=several_st, length=st.integers(1, 60), chunk=st.integers(1, 9))
def test_no_program_can_deadlock(place, length, chunk) -> None:
    """Drive all ranks in virtual time: deliver what is sent, until everything has arrived."""
    compiled = programs(place, "all_reduce", length, chunk)
    wire = {(r, t.peer, t.link, t.tag) for r, p in enumerate(compiled) for t in p.first}
    position = [0] * len(compiled)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(compiled):
            while position[rank] < len(program.receives):
                expected = program.receives[position[rank]]
                if (expected.peer, rank, expected.link, expected.tag) not in wire:
                    break
                for send in program.unlocks[position[rank]]:
                    wire.add((rank, send.peer, send.link, send.tag))
                position[rank] += 1
                progress = True
    assert position == [len(p.receives) for p in compiled]


@given(
    elements=st.integers(0, 10**9),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    speed=st.floats(0.0, 1e12),
)
def test_chunks_stay_within_bounds(elements: int, itemsize: int, speed: float) -> None:
    size = chunk_elements(elements, itemsize) * itemsize
    assert MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES
    least = least_message([speed, 2 * speed])
    assert MIN_CHUNK_BYTES <= least <= max(MIN_CHUNK_BYTES, speed * MESSAGE_S)
    assert least <= chunk_elements(elements, itemsize, least) * itemsize <= MAX_LEAST_BYTES


def test_faster_links_carry_larger_messages() -> None:
    """On 10 Gbit/s a message of 128 KB costs processors as much time as it is on the wire."""
    slow, fast = (
        compile_collective(
            "all_reduce", topologies.get("ring"), 0, 2, 2**20, 4, (speed,), least_message([speed])
        )
        for speed in (1.25e8, 1.25e9)
    )
    assert [len(p[0].receives) for p in (slow, fast)] == [8, 4]


@given(
    place=st.sampled_from([("bcube@2x2", 4, 2), ("bcube@3x2", 9, 2), ("bcube@4x2", 16, 2)]),
    megabytes=st.integers(20, 200),
)
def test_receives_over_several_links_are_all_posted_at_once(place, megabytes) -> None:
    """Were it not, a link whose chunks come later in the one order of all would have to wait."""
    name, size, links = place
    numel = megabytes * 2**18
    whole, *others = compile_collective(
        "all_reduce", topologies.get(name), 1, size, numel, 4, (1.0,) * links
    )
    assert not any(other.receives or other.first for other in others)
    assert len(whole.receives) <= 1.5 * SPANNING_CHUNKS <= 1.5 * RECEIVES_AHEAD
    assert all(4 * len(t.span) <= MAX_SPANNING_BYTES for t in whole.receives)


def test_undivided_payload_stays_whole_over_several_links() -> None:
    [whole, _] = compile_collective("all_gather", topologies.get("bcube@2x2"), 0, 4, 800, 0, (1, 1))
    assert all(len(t.span) == 100 for t in whole.receives)


@pytest.mark.parametrize("what", ["reduce_scatter", "all_gather", "all_reduce", "broadcast:1"])
@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 3.0)])
def test_tiles_are_the_chunks_of_a_buffer_end_to_end(what: str, speeds: tuple[float, ...]) -> None:
    for rank in range(3):
        for program in compile_collective(what, topologies.Ring(), rank, 3, 1001, 4.0, speeds, 64):
            tiles = program.tiles
            assert all(a.stop == b.start for a, b in itertools.pairwise(tiles))
            assert (tiles[0].start if tiles else 0) == 0
            chunks = {transfer.span for transfer in program.transfers()}
            assert chunks <= set(tiles)


def test_chunks_that_overlap_have_no_tiles() -> None:
    program = compile_rounds([[Send(1, Span(0, 8), 0)], [Send(1, Span(4, 12), 0)]], 8)
    assert program.tiles == ()
    assert compile_rounds([[Send(1, Span(4, 8), 0)]], 8).tiles == (Span(0, 4), Span(4, 8))
    assert compile_rounds([], 8).tiles == ()


def overwritten_early(stages: list[list[Program]]) -> list[tuple[int, Span]]:
    """Return rank and span of sends whose receivers may not have them when they are overwritten.

    ``stages``: collectives on one buffer, each after the one before it; programs by rank.

    Sets of chunks are bits of an integer. Chunks arrive in order on each link between two ranks,
    and are written on arrival; a rank applies them in the order of its program.
    """
    ranks = range(len(stages[0]))
    bits: dict[tuple[object, ...], int] = {}
    before: dict[int, int] = {}  # what has arrived, anywhere, before a chunk arrives
    in_order: dict[tuple[int, int, int], int] = {}
    sends: list[tuple[int, Span, int, int]] = []  # rank, span, chunk, applied there before
    writes: list[tuple[int, Span, int]] = []
    applied = [[0] for _ in ranks]
    for number, compiled in enumerate(stages):
        former, applied = applied, [[each[-1]] for each in applied]

        def send(rank: int, t: Transfer, known: int, number: int = number) -> None:
            bit = bits[number, rank, t.peer, t.link, t.tag] = 1 << len(bits)
            sends.append((rank, t.span, bit, known))
            line = rank, t.peer, t.link
            before[bit] = known | in_order.get(line, 0)
            in_order[line] = before[bit] | bit

        for rank, program in enumerate(compiled):
            receives = stages[number - 1][rank].receives if number else ()
            known = 0
            for t in program.first:  # as `Task.hold`
                known |= former[rank][last_overlap(receives, t.span) + 1]
                send(rank, t, known)
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(compiled):
                for index in range(len(applied[rank]) - 1, len(program.receives)):
                    t = program.receives[index]
                    bit = bits.get((number, t.peer, rank, t.link, t.tag), 0)
                    if not bit:
                        break
                    moved = True
                    writes.append((rank, t.span, bit))
                    applied[rank].append(applied[rank][-1] | before[bit] | bit)
                    for unlocked in program.unlocks[index]:
                        send(rank, unlocked, applied[rank][-1])
        assert all(len(a) - 1 == len(p.receives) for a, p in zip(applied, compiled, strict=True))
    return [
        (rank, span)
        for rank, span, bit, known in sends
        for at, written, by in writes
        if at == rank and span.overlaps(written) and not (known & by or before[by] & bit)
    ]


layout_st = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(
    lambda sizes: Layout([n for n, size in enumerate(sizes) for _ in range(size)])
)
topology_st = (
    st.sampled_from([(topologies.get(name), size) for name, size in BCUBES])
    | st.tuples(st.sampled_from([Ring(), Mesh(), Doubling()]), st.integers(1, 9))
    | st.builds(Hierarchical, layout_st, st.booleans()).map(lambda t: (t, t.layout.workers))
)


@given(
    place=topology_st,
    whats=st.sampled_from(
        [("all_reduce",), ("reduce_scatter", "all_gather"), ("all_gather",), ("broadcast",)]
    ),
    length=st.integers(1, 60),
    chunk=st.integers(1, 20),
)
def test_a_chunk_is_overwritten_only_after_its_receiver_has_it(place, whats, length, chunk) -> None:
    # Connections keep references to what may have to be sent again.
    topology, size = place
    blocks = blocks_of(length, size)

    def compiled(what: str, rank: int) -> Program:
        extra = (length % size,) if what == "broadcast" else ()
        return compile_rounds(getattr(topology, what)(rank, *extra, blocks), chunk)

    assert not overwritten_early([[compiled(what, n) for n in range(size)] for what in whats])


def test_exchange_in_place_is_known_to_overwrite() -> None:
    whole = Span(0, 8)
    swap = [compile_rounds([(Send(1 - n, whole), Recv(1 - n, whole, True))], 4) for n in range(2)]
    quarters = Span(0, 4), Span(4, 8)
    assert overwritten_early([swap]) == [(n, each) for n in range(2) for each in quarters]


@given(place=topology_st, length=st.integers(1, 60))
def test_no_rank_sends_its_own_block_before_its_sum_is_complete(place, length) -> None:
    # It is written in place: by an optimizer, or rounded when it is packed.
    topology, size = place
    blocks = blocks_of(length, size)
    for rank in range(size):
        for hop in itertools.chain(*topology.reduce_scatter(rank, blocks)):
            assert not (isinstance(hop, Send) and hop.span.overlaps(blocks[rank]))
