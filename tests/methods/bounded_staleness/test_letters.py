"""What workers say in numbers, and what is refused of it."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.methods.bounded_staleness.gei import Gei
from wingbeat.methods.bounded_staleness.letters import (
    MOST,
    Malformed,
    letter_of,
    letters_in,
    message_of,
    numbers_of,
)
from wingbeat.methods.bounded_staleness.messages import (
    Here,
    Message,
    Parameters,
    Piece,
    Pull,
    Report,
    Round,
    Settled,
    Welcome,
)
from wingbeat.methods.bounded_staleness.view import View, whole

N, K = 3, 2
VIEW = View((0, 1, 2))
MARKS = tuple(tuple((-1, 4, 5) for _ in range(K)) for _ in range(N))
HERE, PIECE, ROUND, PARAMETERS = 0, 1, 2, 6


def matrix(workers: int = N) -> Gei:
    gei = Gei(workers, K)
    gei.enter(2)
    gei.apply([Round(1, 2, 0, ((1, workers - 1),), (0,) * workers, whole(workers))])
    return gei


MESSAGES: list[Message] = [
    Here(3, -1, 2, False, 4, VIEW),
    Piece(3, 1, 2, VIEW, b"payload"),
    Round(1, 2, 7, ((3, 2), (4, 0)), (-1, 3, 4), VIEW, b"sum"),
    Report(VIEW, -1, MARKS),
    Welcome(2, (7, 8)),
    Pull(6, VIEW),
    Parameters(6, MARKS, matrix(), b"parameters"),
    Settled(9, VIEW),
]


def read(numbers: Any, payload: bytes | None = None) -> Message:
    return message_of(numbers, N, K, payload)[1]


def payload_of(message: Message) -> bytes | None:
    return getattr(message, "payload", None)


@pytest.mark.parametrize("iteration", [3, 1 << 40], ids=["short", "long"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_they_come_back_as_they_were(message: Message, iteration: int) -> None:
    if isinstance(message, Here):
        message = Here(iteration, -1, 2, True, iteration, VIEW)
    (come,) = letters_in(b"".join(letter_of(message, 5)), 100)
    assert bytes(come.payload) == (payload_of(message) or b"")
    life, back = message_of(come.numbers, N, K, bytes(come.payload) or None)
    assert life == 5
    if isinstance(message, Parameters):
        assert isinstance(back, Parameters)
        assert back.gei.rows == message.gei.rows
        assert (back.gei.retired, back.gei.counted, back.gei.zeta) == (0, 1, 2)
        assert (back.applied, back.marks) == (message.applied, message.marks)
    else:
        assert back == message
    assert payload_of(back) == payload_of(message)


@pytest.mark.parametrize("workers", [1, 30, 31, 100])
def test_a_mask_of_any_length_comes_back(workers: int) -> None:
    gei = Gei.of(workers, 1, 4, 9, 7, {9: [[1 << workers - 1] * workers], 5: [[1] * workers]})
    message = Parameters(6, (((-1,) * workers,),) * workers, gei, b"")
    back = message_of(numbers_of(message, 0), workers, 1, None)[1]
    assert isinstance(back, Parameters)
    assert back.gei.rows == gei.rows


def test_several_come_in_one_part_and_the_last_may_be_cut_off_before_its_payload() -> None:
    letters = [letter_of(message, 0) for message in MESSAGES]
    part = b"".join(each for letter in letters for each in letter)
    assert [read(each.numbers, bytes(each.payload) or None) for each in letters_in(part, 100)][
        :3
    ] == MESSAGES[:3]
    *first, last = letters_in(part[: -len(letters[7].said)] + letters[PIECE].said, 100)
    assert len(first) == 7
    assert (last.nbytes, bytes(last.payload)) == (7, b"")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_numbers_are_neither_more_nor_fewer(message: Message) -> None:
    numbers = numbers_of(message, 0)
    for count in range(len(numbers)):
        with pytest.raises(Malformed):
            read(numbers[:count])
    with pytest.raises(Malformed, match="1 numbers too many"):
        read([*numbers, 0])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_number_out_of_range_is_refused_wherever_it_is(message: Message) -> None:
    numbers = numbers_of(message, 0)
    for place in range(len(numbers)):
        for value in (-2, MOST):
            with pytest.raises(Malformed):
                read([*numbers[:place], value, *numbers[place + 1 :]])


def test_numbers_outside_the_job_are_refused() -> None:
    view = (0, 0, 0)
    for numbers in (
        (8, 0), (HERE, 0, 1, 0, 0, 2, 1, *view), (PIECE, 0, 1, K, 0, *view),
        (PIECE, 0, 1, 0, N, *view), (PIECE, 0, 1, 0, 0, 0, 0, -1), (PIECE, 0, -1, 0, 0, *view),
    ):  # fmt: skip
        with pytest.raises(Malformed):
            read(numbers)
    for entries in ((1, 3, N), (2, 4, 0, 3, 2), (2, 3, 2, 3, 2), (1 << 40,), (1, -1, 0)):
        with pytest.raises(Malformed):
            read((ROUND, 0, 1, 2, 7, *entries, -1, 3, 4, *view))


def test_only_what_has_a_payload_may_have_one() -> None:
    for message in MESSAGES:
        if payload_of(message) is None:
            with pytest.raises(Malformed, match=f"{type(message).__name__} with 2 bytes behind it"):
                read(numbers_of(message, 0), b"ab")


def test_a_malformed_matrix_is_refused() -> None:
    start = (0, PARAMETERS, 0, 6, *([-1] * (N * K * N)), 0, 2, 0)
    row = [1] * (K * N)
    read((*start, 2, 0, *row, 2, *row))
    for rows in ((1, 3, *row), (2, 1, *row, 1, *row), (2, 1, *row, 0, *row), (1, 0, *row[1:]),
                 (1, 0, *row[1:], 8), (1, 0, *row[1:], -1), (1 << 40,)):  # fmt: skip
        with pytest.raises(Malformed):
            read((*start, *rows))


def head(width: int, count: int, nbytes: int) -> bytes:
    return struct.pack("<IIQ", width, count, nbytes)


@pytest.mark.parametrize(
    "part",
    [b"", b"{}", head(4, 1, 0), head(5, 0, 0), head(4, 1 << 31, 0), head(8, 1, 0) + bytes(7),
     head(4, 0, 101), head(4, 0, 5) + bytes(4), head(4, 0, 0) + b"more"],
)  # fmt: skip
def test_what_are_no_letters_is_refused(part: bytes) -> None:
    with pytest.raises(Malformed):
        list(letters_in(part, 100))


@given(st.binary(max_size=200))
def test_nothing_that_comes_does_more_than_to_be_refused(part: bytes) -> None:
    try:
        for letter in letters_in(part, 100):
            read(letter.numbers, bytes(letter.payload) or None)
    except Malformed:
        pass


@given(st.lists(st.integers(-3, 8), max_size=40))
def test_no_numbers_do(numbers: list[int]) -> None:
    try:
        read(numbers)
    except Malformed:
        pass
