"""Encoding and validation of messages."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.messages import (
    Drained,
    GeiState,
    MalformedMessage,
    Message,
    Piece,
    PieceSum,
    Progress,
    PullRequest,
    PullResponse,
    ViewProposal,
    Welcome,
    check_workers,
    decode_frames,
    decode_header,
    decode_message,
    encode_frame,
    encode_words,
    largest_control_bytes,
)
from wingbeat.methods.bounded_staleness.rounds import Gei
from wingbeat.transport.membership import View, initial_view
from wingbeat.transport.messages.frames import Limits

N, K = 3, 2
VIEW = View((0, 1, 2))
WATERMARKS = tuple(tuple((-1, 4, 5) for _ in range(K)) for _ in range(N))
PROGRESS, PIECE, PIECE_SUM, PULL_RESPONSE = 0, 1, 2, 6


def make_gei(workers: int = N) -> Gei:
    gei = Gei(workers, K)
    gei.enter(2)
    gei.apply_round([PieceSum(1, 2, 0, ((1, workers - 1),), (0,) * workers, initial_view(workers))])
    return gei


MESSAGES: list[Message] = [
    Progress(3, -1, 2, False, 4, VIEW),
    Piece(3, 1, 2, VIEW, b"payload"),
    PieceSum(1, 2, 7, ((3, 2), (4, 0)), (-1, 3, 4), VIEW, b"sum"),
    ViewProposal(VIEW, -1, WATERMARKS),
    Welcome(2, (7, 8)),
    PullRequest(6, VIEW),
    PullResponse(6, WATERMARKS, make_gei().state(), b"parameters"),
    Drained(9, VIEW),
]


def decode(words: Any, payload: bytes | None = None, n: int = N, k: int = K) -> Message:
    return decode_message(decode_header(words), words, n, k, payload)


def payload_of(message: Message) -> bytes | None:
    return getattr(message, "payload", None)


@pytest.mark.parametrize("iteration", [3, 1 << 40], ids=["short", "long"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_roundtrip(message: Message, iteration: int) -> None:
    if isinstance(message, Progress):
        message = Progress(iteration, -1, 2, True, iteration, VIEW)
    (received,) = decode_frames(b"".join(encode_frame(message, 5)), 100)
    assert bytes(received.payload) == (payload_of(message) or b"")
    back = decode(received.words, bytes(received.payload) or None)
    assert decode_header(received.words).incarnation == 5
    if isinstance(message, PullResponse):
        assert isinstance(back, PullResponse)
        assert back.gei.rows == message.gei.rows
        assert (back.gei.retired, back.gei.counted, back.gei.zeta) == (0, 1, 2)
        assert (back.applied, back.watermarks) == (message.applied, message.watermarks)
    else:
        assert back == message
    assert payload_of(back) == payload_of(message)


@pytest.mark.parametrize("workers", [1, 32, 33, 100])
def test_gei_mask_of_any_length_roundtrip(workers: int) -> None:
    gei = GeiState(4, 9, 7, {9: [[1 << workers - 1] * workers], 5: [[1] * workers]})
    message = PullResponse(6, (((-1,) * workers,),) * workers, gei, b"")
    back = decode(encode_words(message, 0), None, workers, 1)
    assert isinstance(back, PullResponse)
    assert back.gei.rows == gei.rows


def test_part_with_several_frames_is_decoded() -> None:
    frames = [encode_frame(message, 0) for message in MESSAGES]
    part = b"".join(each for frame in frames for each in frame)
    assert [decode(each.words, bytes(each.payload) or None) for each in decode_frames(part, 100)][
        :3
    ] == MESSAGES[:3]
    *first, last = decode_frames(part[: -len(frames[7].header)] + frames[PIECE].header, 100)
    assert len(first) == 7
    assert (last.payload_nbytes, bytes(last.payload)) == (7, b"")


def test_unexpected_payload_is_rejected() -> None:
    for message in MESSAGES:
        if payload_of(message) is None:
            with pytest.raises(
                MalformedMessage, match=f"unexpected payload of 2 bytes in {type(message).__name__}"
            ):
                decode(encode_words(message, 0), b"ab")


def test_contributions_in_another_order_are_rejected() -> None:
    for entries in (((4, 0), (3, 2)), ((3, 2), (3, 2))):
        message = PieceSum(1, 2, 7, entries, (-1, 3, 4), VIEW)
        with pytest.raises(MalformedMessage, match=r"entries is .*; allowed: increasing values"):
            decode(encode_words(message, 0))


def test_gei_rows_outside_its_range_are_rejected() -> None:
    row = [[1] * N] * K
    for rows in ({3: row}, {0: row, 1: row}):
        with pytest.raises(MalformedMessage, match=r"rows is .*; allowed: 1 to 2"):
            GeiState(1, 2, 0, rows)


def head(width: int, count: int, nbytes: int) -> bytes:
    return struct.pack("<IIQ", width, count, nbytes)


@pytest.mark.parametrize(
    "part",
    [b"", b"{}", head(4, 1, 0), head(5, 0, 0), head(4, 1 << 31, 0), head(8, 1, 0) + bytes(7),
     head(4, 0, 101), head(4, 0, 5) + bytes(4), head(4, 0, 0) + b"more"],
)  # fmt: skip
def test_malformed_frames_are_rejected(part: bytes) -> None:
    with pytest.raises(MalformedMessage):
        list(decode_frames(part, 100))


def control_message(workers: int, colayers: int, rows: int) -> Message:
    """The largest message without gradients of a job: all masks have all workers."""
    watermarks = (((rows,) * workers,) * colayers,) * workers
    if not rows:
        return ViewProposal(initial_view(workers), rows, watermarks)
    row = [[(1 << workers) - 1] * workers for _ in range(colayers)]
    gei = GeiState(0, rows - 1, 1, dict.fromkeys(range(rows), row))
    return PullResponse(rows, watermarks, gei, b"parameters")


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(("workers", "colayers"), [(6, 1), (32, 2), (33, 4)])
def test_largest_control_message_has_the_bytes_of_its_frame(
    workers: int, colayers: int, rows: int
) -> None:
    header = encode_frame(control_message(workers, colayers, rows), 5).header
    assert largest_control_bytes(workers, colayers, rows) == len(header)


@pytest.mark.parametrize(("rows", "most"), [(0, 323), (21, 242)])
def test_workers_whose_control_messages_exceed_the_limit_are_refused(rows: int, most: int) -> None:
    limit = Limits().message
    check_workers(most, 10, rows, limit)
    for workers in (most + 1, 4 * most):
        with pytest.raises(UsageError, match=rf"Canary with {workers} .* allowed are {most} w"):
            check_workers(workers, 10, rows, limit)


def test_most_workers_have_control_messages_that_can_be_posted() -> None:
    header = encode_frame(control_message(242, 10, 21), 5).header
    assert Limits().message - len(header) in range(40_000)
