"""What workers say in words, and what is refused of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from wingbeat.stale.gei import Gei
from wingbeat.stale.letters import Malformed, message_of, words_of
from wingbeat.stale.messages import (
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
from wingbeat.stale.view import View

N, K = 3, 2
VIEW = View((0, 1, 2))
MARKS = tuple(tuple((-1, 4, 5) for _ in range(K)) for _ in range(N))


def matrix() -> Gei:
    gei = Gei(N, K)
    gei.enter(2)
    gei.apply([Round(1, 2, 0, ((1, 2),), (0, 0, 0), VIEW)])
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


def told(message: Message, life: int = 5) -> Any:
    return json.loads(json.dumps(words_of(message, life)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_they_come_back_as_they_were(message: Message) -> None:
    payload = getattr(message, "payload", None)
    life, back = message_of(told(message), N, K, payload)
    assert life == 5
    if isinstance(message, Parameters):
        assert isinstance(back, Parameters)
        assert back.gei.to_plain() == message.gei.to_plain()
        assert (back.applied, back.marks) == (message.applied, message.marks)
    else:
        assert back == message
    assert getattr(back, "payload", None) == payload


WRONG: list[Any] = [None, -2, 1.5, True, "1", [], [0], {}, 1 << 60, [[0, 0]], [0, 0, N, 1 << 60]]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_whatever_else_is_in_a_field_is_refused(message: Message) -> None:
    for name in told(message):
        for value in WRONG:
            words = told(message)
            if words[name] == value and type(words[name]) is type(value):
                continue
            words[name] = value
            if name == "entries" and value in ([], [[0, 0]]):
                continue  # these are entries
            if name == "ended" and value is True:
                continue
            with pytest.raises(Malformed):
                message_of(words, N, K, b"")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_fields_are_neither_more_nor_fewer(message: Message) -> None:
    for name in told(message):
        words = told(message)
        del words[name]
        with pytest.raises(Malformed):
            message_of(words, N, K, b"")
    with pytest.raises(Malformed):
        message_of(told(message) | {"more": 1}, N, K, b"")


@pytest.mark.parametrize("words", [None, [], "here", 1, {"kind": "bye", "life": 0}, {"kind": []}])
def test_what_are_no_words_is_refused(words: Any) -> None:
    with pytest.raises(Malformed):
        message_of(words, N, K, b"")


def test_numbers_outside_the_job_are_refused() -> None:
    piece = told(MESSAGES[1])
    for name, value in (("piece", N), ("colayer", K), ("view", [0, 0]), ("view", [0, 0, -1])):
        with pytest.raises(Malformed):
            message_of(piece | {name: value}, N, K, b"")
    summed = told(MESSAGES[2])
    for entries in ([[3, N]], [[4, 0], [3, 2]], [[3, 2], [3, 2]], [[3]], [3, 2]):
        with pytest.raises(Malformed):
            message_of(summed | {"entries": entries}, N, K, b"")


def test_a_malformed_matrix_is_refused() -> None:
    good = told(MESSAGES[6])
    row = [["0x1"] * N] * K
    rows = [("3", row), ("-1", row), ("x", row), ("1", [["0x8"] * N] * K), ("1", [["0x1"] * N]),
            ("1", [["0x1"]] * K), ("1", [[1] * N] * K)]  # fmt: skip
    for name, value in rows:
        words = copy.deepcopy(good)
        words["gei"]["rows"][name] = value
        with pytest.raises(Malformed):
            message_of(words, N, K, b"")
