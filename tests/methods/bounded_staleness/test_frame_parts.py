"""Frames are sent in parts to one incarnation, and are assembled again."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cards import Cards, star
from helpers.one_stream import OneStream
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.communication import FrameReceiver, FrameSender, _Queued
from wingbeat.methods.bounded_staleness.messages import (
    Envelope,
    Frame,
    MalformedMessage,
    Message,
    Piece,
    PullRequest,
    ViewProposal,
    encode_frame,
)
from wingbeat.methods.bounded_staleness.streams import BEGIN, MORE
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport.membership import initial_view


def queued(incarnation: int, header: bytes, nbytes: int = 0) -> _Queued:
    return _Queued(incarnation, Frame(header, memoryview(bytes(nbytes))))


def test_frames_are_sent_to_their_incarnation() -> None:
    cards = Cards(star(2, 1))
    machine = Worker(0, 2, StalenessBound(1, 1, 1), lambda *_: None)
    machine.outbox.clear()
    out = FrameSender(machine, cards.streams[0])
    out._queues[1] = deque([queued(0, b"old"), queued(1, b"new")])
    cards.streams[0].forget(1)
    out.remove_worker(1, 0)
    out.send_pending()
    assert out.busy
    cards.streams[0].renew(1, 1)
    cards.streams[1] = cards.new(1, [0, 1], None, 10.0)
    out.send_pending()
    assert not out.busy
    cards.run(1.0)
    assert cards.from_(0, 1) == [b"new"]
    out._queues[1] = deque([queued(0, b"late")])
    out.send_pending()
    assert not out.busy
    cards.run(1.0)
    assert cards.from_(0, 1) == [b"new"]


def test_message_to_a_worker_that_left_is_discarded() -> None:
    """The machine still addresses a worker that left after all had drained."""
    cards = Cards(star(2, 1))
    machine = Worker(0, 2, StalenessBound(1, 1, 1), lambda *_: None)
    out = FrameSender(machine, cards.streams[0])
    cards.streams[0].forget(1)
    out.remove_worker(1, 0)
    machine.outbox.append(Envelope((1,), PullRequest(1, VIEW)))
    out.send_pending()
    assert not out.busy


def test_frames_of_two_incarnations_are_not_combined() -> None:
    stream, machine = OneStream(100), Worker(0, 2, StalenessBound(1, 1, 1), lambda *_: None)
    machine.outbox.clear()
    out = FrameSender(machine, stream)
    out._queues[1] = deque([queued(0, b"a"), queued(0, b"b"), queued(1, b"next")])
    out.send_pending()
    assert stream.parts == [(BEGIN, b"ab")]
    assert out.busy


def test_proposal_reaches_all_incarnations() -> None:
    """A restarted worker does not know the incarnations of the others yet."""
    cards = Cards(star(3, 1))
    for worker, life in ((1, 4), (2, 1)):
        for other in (0, 3 - worker):
            cards.streams[other].renew(worker, life)
        cards.streams[worker] = cards.new(worker, [0, 4, 1], None, 10.0)
    machine = Worker(0, 3, StalenessBound(1, 1, 1), lambda *_: None, incarnation=1)
    reports = [post for post in machine.outbox if isinstance(post.message, ViewProposal)]
    assert [post.to for post in reports] == [(1, 2)]
    out, went = FrameSender(machine, cards.streams[0]), []
    cards.streams[0].send = lambda worker, *_: went.append(worker) or True  # type: ignore
    out.send_pending()
    assert {1, 2} <= set(went)


def test_parts_are_sent_round_robin() -> None:
    cards = Cards(star(4, 1))
    machine = Worker(1, 4, StalenessBound(1, 1, 1), lambda *_: None)
    machine.outbox.clear()
    out = FrameSender(machine, cards.streams[1])
    went: list[int] = []
    real, half = cards.streams[1].send, cards.streams[1].largest // 2

    def send(worker: int, kind: int, payload: bytes) -> bool:
        went.append(worker)
        return real(worker, kind, payload)

    cards.streams[1].send = send  # type: ignore[method-assign]
    for worker in (0, 2, 3):
        out._queues[worker] = deque([queued(0, b"a", half), queued(0, b"b", half)])
    out.send_pending()
    assert went == [2, 3, 0, 2, 3, 0]
    assert not out.busy
    went.clear()
    for worker in (0, 2, 3):
        out._queues[worker] = deque([queued(0, b"c")])
    out.send_pending()
    assert went == [2, 3, 0]  # rank 0 was the last receiver


VIEW = initial_view(2)


def send(messages: list[Message], stream: OneStream) -> FrameSender:
    machine = Worker(0, 2, StalenessBound(1, 1, 1), lambda *_: None)
    machine.outbox.clear()
    machine.outbox.extend(Envelope((1,), message) for message in messages)
    out = FrameSender(machine, stream)
    out.send_pending()
    return out


def receive(parts: list[tuple[int, bytes]], max_payload: int = 1 << 20) -> list[Message]:
    receiver = FrameReceiver(2, 1, max_payload)
    return [message for kind, part in parts for _, message in receiver.receive_part(kind, part)]


@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=300)), max_size=8),
    st.integers(60, 400),
    st.integers(1, 4),
)
def test_messages_split_into_parts_arrive_unchanged(
    payloads: list[bytes | None], largest: int, room: int
) -> None:
    said: list[Message] = [
        PullRequest(number, VIEW) if payload is None else Piece(number, 0, 1, VIEW, payload or None)
        for number, payload in enumerate(payloads)
    ]
    stream = OneStream(largest, room)
    out = send(said, stream)
    while out.busy:
        assert not stream.room
        stream.room = room
        out.send_pending()
    assert all(len(part) <= largest for _, part in stream.parts)
    back = receive(stream.parts)
    assert back == said
    assert [getattr(each, "payload", None) for each in back] == [
        getattr(each, "payload", None) for each in said
    ]


def test_short_frames_are_combined_and_long_ones_split() -> None:
    short, long = PullRequest(1, VIEW), Piece(0, 0, 1, VIEW, bytes(250))
    stream = OneStream(100)
    send([short, short, long, short], stream)
    one = len(encode_frame(short, 0).header)
    assert [(kind, len(part)) for kind, part in stream.parts] == [
        (BEGIN, 2 * one), (BEGIN, len(encode_frame(long, 0).header)), (MORE, 100), (MORE, 100),
        (MORE, 50), (BEGIN, one),
    ]  # fmt: skip


def test_unexpected_part_is_rejected() -> None:
    stream = OneStream(100)
    send([Piece(0, 0, 1, VIEW, bytes(150))], stream)
    begin, more, last = stream.parts
    for parts in ([more], [begin, begin], [begin, (MORE, b"")], [begin, more, (MORE, bytes(51))],
                  [begin, more, last, last]):  # fmt: skip
        with pytest.raises(MalformedMessage):
            receive(parts)
    with pytest.raises(MalformedMessage, match="payload of 150 bytes; the limit is 149"):
        receive([begin], max_payload=149)


def test_messages_of_other_epochs_wait_or_are_dropped() -> None:
    """A worker may change its colayers earlier or later than this one."""
    receiver = FrameReceiver(2, 1, 100)
    watermarks = ((((-1,) * 2,) * 3),) * 2  # of three colayers, of the next epoch
    early, now = ViewProposal(initial_view(2), 4, watermarks), PullRequest(7, initial_view(2))
    parts = [b"".join(encode_frame(message, 0, epoch)) for message, epoch in ((early, 1), (now, 0))]
    assert [list(receiver.receive_part(BEGIN, part)) for part in parts] == [[], [(0, now)]]
    assert list(receiver.change_colayers(3)) == [(0, early)]
    assert list(receiver.receive_part(BEGIN, parts[1])) == []  # late
    assert list(receiver.receive_part(BEGIN, parts[0])) == [(0, early)]
    with pytest.raises(MalformedMessage, match="epoch is 3; this worker is in epoch 1"):
        list(receiver.receive_part(BEGIN, b"".join(encode_frame(now, 0, 3))))
