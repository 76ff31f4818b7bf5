"""Each limit of a record is checked when words, messages and JSON are decoded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import pytest

from helpers.received import Received
from wingbeat.schema import (
    Length,
    MalformedMessage,
    Mask,
    Messages,
    Payload,
    Range,
    Text,
    from_words,
    parse_json,
    read_prefix,
    to_bytes,
    to_words,
)

Small = Annotated[int, Range(0, 10)]


@dataclass(frozen=True)
class Wide:
    """Every form that words can have."""

    flag: bool
    number: Annotated[int, Range(-1, "workers")]
    row: Annotated[tuple[Small, ...], Length("workers")]
    pairs: Annotated[tuple[tuple[Small, Small], ...], Length(least=1, most=3, increasing=True)]
    mask: Annotated[int, Mask("workers")]
    rows: dict[Small, Annotated[list[Small], Length(most=2)]]


WIDE = Wide(True, -1, (7, 8), ((1, 2), (3, 4)), 0b10, {5: [6], 9: []})
WORDS = [1, 0, 7, 8, 2, 1, 2, 3, 4, 1, 2, 2, 5, 1, 6, 9, 0]


def test_record_has_words_in_the_order_of_its_fields() -> None:
    assert to_words(WIDE) == WORDS
    assert from_words(Wide, WORDS, workers=2) == WIDE


@pytest.mark.parametrize(
    ("place", "word", "text"),
    [
        (0, 2, "flag is 2; allowed: true or false"),
        (1, 3, "number is 2; allowed: -1 to 1"),
        (3, 10, r"row\[1\] is 10; allowed: 0 to 9"),
        (4, 0, "the number of pairs is 0; allowed: 1 to 3"),
        (4, 4, "the number of pairs is 4; allowed: 1 to 3"),
        (5, 4, r"pairs is .*; allowed: increasing values"),
        (8, 10, r"pairs\[1\] is 10; allowed: 0 to 9"),
        (10, 4, "mask is '4'; allowed: 2 bits in hexadecimal, in the fewest words"),
        (10, 0, "mask is '0'; allowed: 2 bits in hexadecimal, in the fewest words"),
        (9, 2, "the number of mask is 2; allowed: 0 to 1"),
        (12, 9, r"rows is \[9, 9\]; allowed: increasing values"),
        (13, 3, r"the number of rows\[0\]\S* is 3; allowed: 0 to 2"),
        (14, 10, r"rows\[0\]\S* is 10; allowed: 0 to 9"),
        (16, 2, r"rows\[1\]\S* has 2 items in 0 words"),
    ],
)
def test_word_beyond_a_limit_is_refused(place: int, word: int, text: str) -> None:
    with pytest.raises(MalformedMessage, match=text):
        from_words(Wide, [*WORDS[:place], word, *WORDS[place + 1 :]], workers=2)


def test_extra_words_and_unexpected_payload_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="1 extra words in Wide"):
        from_words(Wide, [*WORDS, 0], workers=2)
    with pytest.raises(MalformedMessage, match="unexpected payload of 2 bytes in Wide"):
        from_words(Wide, WORDS, b"ab", workers=2)


def test_prefix_ends_where_its_words_end() -> None:
    assert read_prefix(Wide, to_bytes(WIDE) + b"rest.", workers=2) == (WIDE, 4 * len(WORDS))


class Plain(NamedTuple):
    """Fits in the ids."""

    first: Small
    second: Small


class Data(NamedTuple):
    """Has a payload of its own."""

    first: Small
    payload: Payload


MESSAGES = Messages({1: Plain, 2: Data, 3: Wide, 4: Plain}, payloads=[4])


@pytest.mark.parametrize("made", [Plain(1, 2), Data(3, b"data"), WIDE], ids=repr)
def test_message_is_parsed_as_it_was_packed(made: Any) -> None:
    assert MESSAGES.parse(Received(*MESSAGES.pack(made)), workers=2) == made


def test_message_with_a_payload_beside_its_record_is_parsed() -> None:
    assert MESSAGES.parse(Received(4, (1, 2, 0, 0), b"any")) == (1, 2)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Received(9, (0,) * 4, b""), "kind is 9; allowed: 1, 2, 3, 4"),
        (Received(1, (1, 2, 0, 5), b""), "2 extra words in Plain"),
        (Received(1, (1, 2, 0, 0), b"\0" * 4), "3 extra words in Plain"),
        (Received(1, (1, 2, 0, 0), b"abc"), "the payload of Plain is 3; allowed: words of 4"),
        (Received(1, (1, 2, 0, 0), bytes(2 << 20)), "the payload of Plain is 2097152"),
        (Received(1, (1, 10, 0, 0), b""), "second is 10; allowed: 0 to 9"),
    ],
    ids=str,
)
def test_message_of_another_form_is_refused(message: Received, text: str) -> None:
    with pytest.raises(MalformedMessage, match=text):
        MESSAGES.parse(message)


@dataclass(frozen=True)
class Written:
    """Forms of JSON."""

    name: Annotated[str, Text(3)]
    share: Annotated[float, Range(0, 2)] = 1.0
    more: int | float | None = None
    by_name: dict[str, int] = field(default_factory=dict)


def test_text_is_cut_and_made_printable() -> None:
    assert parse_json(Written, '{"name": "a\\nbcd", "unknown": 1}') == Written("a?b")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], r"is \[\]; allowed: an object"),
        ({}, "name is missing"),
        ({"name": 1}, "name is 1; allowed: a string"),
        ({"name": "a", "share": float("nan")}, "share is nan; allowed: a number from 0 to 2"),
        ({"name": "a", "share": 2}, "share is 2"),
        ({"name": "a", "share": True}, "share is True; allowed: a number"),
        ({"name": "a", "more": "x"}, "more is 'x'; allowed: a number"),
        ({"name": "a", "more": 1 << 60}, "more is 1152921504606846976"),
        ({"name": "a", "by_name": {"b": 1.5}}, r"by_name.b\S* is 1.5; allowed: a whole number"),
    ],
    ids=str,
)
def test_json_beyond_a_limit_is_refused(data: Any, text: str) -> None:
    with pytest.raises(MalformedMessage, match=text):
        parse_json(Written, json.dumps(data))
