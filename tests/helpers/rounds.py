"""Rounds of hops, executed on plain lists: one round's messages, then the next's."""

from __future__ import annotations

from wingbeat.types import Hop, Recv, Round, Send, Span, blocks_of


def execute(programs: list[list[Round]], buffers: list[list[float]]) -> None:
    """Interpret all ranks' rounds in lock step; messages carry what the sender had before."""
    for number in range(max((len(p) for p in programs), default=0)):
        mail: dict[tuple[int, int, int], list[tuple[Span, list[float]]]] = {}
        for rank, program in enumerate(programs):
            for hop in program[number]:
                if isinstance(hop, Send):
                    piece = buffers[rank][hop.span.start : hop.span.stop]
                    mail.setdefault((rank, hop.peer, hop.interface), []).append((hop.span, piece))
        for rank, program in enumerate(programs):
            for hop in program[number]:
                if isinstance(hop, Recv):
                    span, values = mail[hop.peer, rank, hop.interface].pop(0)
                    assert span == hop.span
                    if hop.reduce:
                        old = buffers[rank][span.start : span.stop]
                        values = [a + b for a, b in zip(old, values, strict=True)]
                    buffers[rank][span.start : span.stop] = values
        assert not any(mail.values()), "a message was sent that nobody receives"


def start(size: int, length: int) -> tuple[list[Span], list[list[float]], list[float]]:
    buffers = [[float((rank + 1) * (i + 1)) for i in range(length)] for rank in range(size)]
    return blocks_of(length, size), buffers, [sum(column) for column in zip(*buffers, strict=True)]


def hops(program: list[Round], kind: type) -> list[Hop]:
    return [hop for each in program for hop in each if isinstance(hop, kind)]


def relay(
    programs: list[list[Round]],
    buffers: list[list[float]],
    mail: dict[tuple[int, int], list[list[float]]],
) -> None:
    """Run each rank as far as its messages are there, until all are through."""
    flat = [[hop for each in program for hop in each] for program in programs]
    moved = True
    while moved:
        moved = False
        for rank, left in enumerate(flat):
            while left and (isinstance(left[0], Send) or mail[left[0].peer, rank]):
                hop = left.pop(0)
                part = slice(hop.span.start, hop.span.stop)
                if isinstance(hop, Send):
                    mail[rank, hop.peer].append(buffers[rank][part])
                else:
                    buffers[rank][part] = mail[hop.peer, rank].pop(0)
                moved = True
    assert not any(flat), "somebody waits for ever"
