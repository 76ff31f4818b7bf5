"""Every topology, executed on plain lists: one round's messages, then the next's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat import topologies
from wingbeat.errors import UsageError
from wingbeat.topologies import mesh, ring
from wingbeat.types import Recv, Round, Send, Span, blocks_of

NAMES = ["ring", "mesh", "doubling"]
sizes = st.integers(1, 9)
lengths = st.integers(0, 60)


def execute(programs: list[list[Round]], buffers: list[list[float]]) -> None:
    """Interpret all ranks' rounds in lock step; messages carry what the sender had before."""
    for number in range(max((len(p) for p in programs), default=0)):
        mail: dict[tuple[int, int], list[tuple[Span, list[float]]]] = {}
        for rank, program in enumerate(programs):
            for step in program[number]:
                if isinstance(step, Send):
                    piece = buffers[rank][step.span.start : step.span.stop]
                    mail.setdefault((rank, step.peer), []).append((step.span, piece))
        for rank, program in enumerate(programs):
            for step in program[number]:
                if isinstance(step, Recv):
                    span, values = mail[step.peer, rank].pop(0)
                    assert span == step.span
                    old = buffers[rank][span.start : span.stop]
                    new = [a + b for a, b in zip(old, values, strict=True)]
                    buffers[rank][span.start : span.stop] = new if step.reduce else values
        assert not any(mail.values()), "a message was sent that nobody receives"


def start(size: int, length: int) -> tuple[list[Span], list[list[float]], list[float]]:
    buffers = [[float((rank + 1) * (i + 1)) for i in range(length)] for rank in range(size)]
    return blocks_of(length, size), buffers, [sum(column) for column in zip(*buffers, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@given(size=sizes, length=lengths)
def test_reduce_scatter_sums_each_owners_block(name: str, size: int, length: int) -> None:
    blocks, buffers, total = start(size, length)
    module = topologies.get(name)
    execute([module.reduce_scatter(r, blocks) for r in range(size)], buffers)
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
            # Blocks next to each other travel as one; the row of blocks is cut open once.
            assert all(sum(isinstance(s, Send) for s in steps) <= 2 for steps in program)


@pytest.mark.parametrize("name", ["ring", "mesh"])
@given(size=sizes, length=st.integers(0, 40), root=st.integers(0, 8), pieces=st.integers(1, 5))
def test_broadcast_reaches_everyone(
    name: str, size: int, length: int, root: int, pieces: int
) -> None:
    root %= size
    span = Span(0, length)
    if name == "ring":
        programs = [ring.broadcast(r, size, root, span, pieces) for r in range(size)]
    else:
        programs = [mesh.broadcast(r, size, root, span) for r in range(size)]
    sent = {
        (r, s.peer, s.span)
        for r in range(size)
        for x in programs[r]
        for s in x
        if isinstance(s, Send)
    }
    got = {
        (s.peer, r, s.span)
        for r in range(size)
        for x in programs[r]
        for s in x
        if isinstance(s, Recv)
    }
    assert sent == got
    for rank in range(size):
        received = sum(len(s.span) for x in programs[rank] for s in x if isinstance(s, Recv))
        assert received == (0 if rank == root else length)


def test_an_unknown_topology_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown topology 'rnig' \(did you mean 'ring'\?\)"):
        topologies.get("rnig")
