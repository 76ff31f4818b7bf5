from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wingbeat import topologies
from wingbeat.collectives.program import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Program,
    chunk_elements,
    compile_rounds,
)
from wingbeat.types import blocks_of

name_st = st.sampled_from(["ring", "mesh"])


def programs(name: str, what: str, size: int, length: int, chunk: int) -> list[Program]:
    blocks = blocks_of(length, size)
    make = getattr(topologies.get(name), what)
    return [compile_rounds(make(rank, blocks), chunk) for rank in range(size)]


@given(
    name=name_st,
    what=st.sampled_from(["reduce_scatter", "all_gather", "all_reduce"]),
    size=st.integers(1, 9),
    length=st.integers(0, 80),
    chunk=st.integers(1, 20),
)
def test_both_ends_of_a_link_number_the_same_chunks(name, what, size, length, chunk) -> None:
    compiled = programs(name, what, size, length, chunk)
    sent, received = set(), set()
    for rank, program in enumerate(compiled):
        sends = [*program.first, *(t for unlocked in program.unlocks for t in unlocked)]
        sent |= {(rank, t.peer, t.tag, t.span) for t in sends}
        received |= {(t.peer, rank, t.tag, t.span) for t in program.receives}
        assert all(0 < len(t.span) <= chunk for t in sends)
    assert sent == received


@given(name=name_st, size=st.integers(2, 9), length=st.integers(1, 80), chunk=st.integers(1, 20))
def test_a_chunk_is_sent_only_after_all_that_it_sums(name, size, length, chunk) -> None:
    for program in programs(name, "all_reduce", size, length, chunk):
        seen: dict[int, int] = {}
        for index, receive in enumerate(program.receives):
            for element in range(receive.span.start, receive.span.stop):
                seen[element] = index
            for send in program.unlocks[index]:
                needed = range(send.span.start, send.span.stop)
                assert any(seen.get(element) == index for element in needed)


@given(name=name_st, size=st.integers(2, 6), length=st.integers(1, 60), chunk=st.integers(1, 9))
def test_no_program_can_deadlock(name, size, length, chunk) -> None:
    """Drive all ranks in virtual time: deliver what is sent, until everything has arrived."""
    compiled = programs(name, "all_reduce", size, length, chunk)
    wire = {(r, t.peer, t.tag) for r, p in enumerate(compiled) for t in p.first}
    position = [0] * size
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(compiled):
            while position[rank] < len(program.receives):
                expected = program.receives[position[rank]]
                if (expected.peer, rank, expected.tag) not in wire:
                    break
                for send in program.unlocks[position[rank]]:
                    wire.add((rank, send.peer, send.tag))
                position[rank] += 1
                progress = True
    assert position == [len(p.receives) for p in compiled]


@given(elements=st.integers(0, 10**9), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_chunks_stay_within_bounds(elements: int, itemsize: int) -> None:
    size = chunk_elements(elements, itemsize) * itemsize
    assert MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES
