"""Every declared record round trips, and other words and texts are refused with one error."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from types import NoneType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.received import Received
from wingbeat.methods.bounded_staleness import messages as staleness
from wingbeat.methods.model_averaging import generator
from wingbeat.observe.meter import Section
from wingbeat.observe.report import Report
from wingbeat.schema import (
    Length,
    MalformedMessage,
    Table,
    from_words,
    parse_json,
    table_of,
    to_json,
    to_words,
)

from . import page
from .declared import FRAMES, HEADERS, MAILBOXES, TEXTS

QUICK = settings(
    deadline=None,
    max_examples=examples(50),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
SIZES = {"kinds": 2, "workers": 3, "colayers": 2, "chunks": 5, "tensors": 4}

MESSAGES = {group.title: group.messages for group in MAILBOXES}
IN_WORDS = sorted(
    {record for each in (*MESSAGES.values(), FRAMES.messages) for record in each.records.values()}
    | set(HEADERS),
    key=lambda record: record.__name__,
)
IN_JSON = list(TEXTS)


def with_rows(given: dict[str, Any]) -> dict[str, Any]:
    first = given["retired"] % 1000
    rows = {first + 2 * place: row for place, row in enumerate(given["rows"].values())}
    return {**given, "retired": first, "zeta": max(rows, default=first), "rows": rows}


FITTED: dict[Any, Callable[[dict[str, Any]], dict[str, Any]]] = {
    staleness.GeiState: with_rows,
    generator.RunMessage: lambda given: {
        **given,
        "members": tuple(dict.fromkeys(given["members"])),
    },
    Report: lambda given: {**given, "rank": 0, "size": max(1, given["size"])},
    Section: lambda given: {**given, "unit": ""},
}
"""How values are changed that a check of several fields would refuse."""


def values(table: Table) -> st.SearchStrategy[Any]:
    """Every value that a table allows."""
    limits = table.limits
    if table.form == "number":
        end = SIZES.get(limits.end, limits.end)
        if table.type is float:
            return st.floats(limits.least, float(end), exclude_max=True)
        return st.integers(limits.least, end - 1).map(table.type)
    if table.form == "mask":
        return st.integers(0, (1 << SIZES[limits.size]) - 1)
    if table.form == "items":
        return items(table, limits)
    if table.form == "record":
        parts = {name: values(part) for name, part in table.parts.items()}
        if table.payload:
            parts[table.payload] = st.binary(min_size=1, max_size=9)
        fit = FITTED.get(table.type, lambda given: given)
        made = st.fixed_dictionaries(parts).map(fit)
        return made.map(
            lambda given: (
                table.type(**given)
                if table.type is not tuple
                else tuple(given[name] for name in table.parts)
            )
        )
    if table.form == "union":
        return st.one_of(*(values(part) for part in table.parts.values()))
    if table.type is NoneType:
        return st.none()
    alphabet = st.characters(min_codepoint=32, max_codepoint=126)
    return st.text(alphabet, max_size=8)


def items(table: Table, limits: Length) -> st.SearchStrategy[Any]:
    size = SIZES.get(limits.size)
    least, most = (limits.least, min(limits.most, 4)) if size is None else (size, size)
    item = values(table.parts["item"])
    unique = (lambda pair: pair[0]) if table.type is dict else None
    some = st.lists(item, min_size=least, max_size=most, unique_by=unique)
    if limits.increasing:
        some = some.map(lambda found: sorted(set(found)))
    return some.map(table.type)


def is_allowed(table: Table, value: Any) -> bool:
    """Whether a value is within the limits of a table."""
    limits = table.limits
    if table.form == "number":
        return type(value) is table.type and limits.least <= value < SIZES.get(
            limits.end, limits.end
        )
    if table.form == "mask":
        return 0 <= value < 1 << SIZES[limits.size]
    if table.form == "items":
        size = SIZES.get(limits.size)
        each = list(value.items() if table.type is dict else value)
        rising = each == sorted(set(each)) if limits.increasing else True
        count = len(each) == size if size is not None else limits.least <= len(each) <= limits.most
        return rising and count and all(is_allowed(table.parts["item"], item) for item in each)
    if table.form == "record":
        pairs = enumerate(table.parts.values()) if table.type is tuple else table.parts.items()
        return all(
            is_allowed(part, value[name] if table.type is tuple else getattr(value, name))
            for name, part in pairs
        )
    return True


def payload_of(record: Any) -> Any:
    name = table_of(type(record)).payload
    return getattr(record, name) if name else None


@pytest.mark.parametrize("record", IN_WORDS, ids=lambda record: record.__name__)
@QUICK
@given(st.data())
def test_record_round_trips_as_words(record: type, data: st.DataObject) -> None:
    made = data.draw(values(table_of(record)))
    words = to_words(made)
    assert is_allowed(table_of(record), made)
    assert all(word >= 0 for word in words)
    back = from_words(record, words, payload_of(made), **SIZES)
    assert back == made
    assert payload_of(back) == payload_of(made)


@pytest.mark.parametrize("record", IN_WORDS, ids=lambda record: record.__name__)
@QUICK
@given(st.data())
def test_changed_words_are_refused_or_another_valid_record(record: type, data: Any) -> None:
    words = to_words(data.draw(values(table_of(record))))
    place = data.draw(st.integers(0, len(words)))
    other = data.draw(st.integers(0, 1 << 63) | st.integers(0, 9))
    for changed in ([*words[:place], other, *words[place + 1 :]], words[:place], [*words, other]):
        try:
            back = from_words(record, changed, **SIZES)
        except MalformedMessage:
            continue
        assert is_allowed(table_of(record), back)
        assert to_words(back) == changed, "each record has one encoding"


@pytest.mark.parametrize("record", IN_WORDS, ids=lambda record: record.__name__)
@QUICK
@given(st.data())
def test_shortened_or_extended_words_are_refused(record: type, data: st.DataObject) -> None:
    words = to_words(data.draw(values(table_of(record))))
    for wrong in ([*words, 0], *(words[:place] for place in range(len(words)))):
        with pytest.raises(MalformedMessage):
            from_words(record, wrong, **SIZES)


@pytest.mark.parametrize("record", IN_WORDS, ids=lambda record: record.__name__)
@QUICK
@given(st.lists(st.integers(0, 1 << 64) | st.integers(0, 5), max_size=60))
def test_random_words_are_refused_or_a_valid_record(record: type, words: list[int]) -> None:
    with contextlib.suppress(MalformedMessage):
        found = from_words(record, words, **SIZES)
        assert is_allowed(table_of(record), found)
        assert to_words(found) == words


@pytest.mark.parametrize("name", MESSAGES)
@QUICK
@given(st.data())
def test_message_round_trips_through_a_mailbox(name: str, data: st.DataObject) -> None:
    schema = MESSAGES[name]
    kind = data.draw(st.sampled_from(sorted(schema.records)))
    made = data.draw(values(table_of(schema.records[kind])))
    packed = schema.pack(made, kind)
    assert packed[0] == kind
    assert schema.parse(Received(*packed), **SIZES) == made


@pytest.mark.parametrize("name", MESSAGES)
@QUICK
@given(
    st.integers(0, 20),
    st.tuples(*[st.integers(0, (1 << 32) - 1) | st.integers(0, 3)] * 4),
    st.binary(max_size=40),
)
def test_random_message_is_refused_or_valid(
    name: str, kind: int, ids: tuple[int, ...], payload: bytes
) -> None:
    schema = MESSAGES[name]
    try:
        made = schema.parse(Received(kind, ids, payload), **SIZES)
    except MalformedMessage:
        return
    assert type(made) is schema.records[kind]
    assert is_allowed(table_of(type(made)), made)
    if kind in schema.payloads:
        payload = b""
    assert schema.pack(made, kind) == (kind, ids, payload)


@pytest.mark.parametrize("record", IN_JSON, ids=lambda record: record.__name__)
@QUICK
@given(st.data())
def test_record_round_trips_as_json(record: type, data: st.DataObject) -> None:
    made = data.draw(values(table_of(record)))
    assert parse_json(record, json.dumps(to_json(made)), **SIZES) == made


@pytest.mark.parametrize("record", IN_JSON, ids=lambda record: record.__name__)
@QUICK
@given(st.data())
def test_value_of_another_type_in_json_is_refused(record: type, data: st.DataObject) -> None:
    values_ = to_json(data.draw(values(table_of(record))))
    keys = list(range(len(values_))) if isinstance(values_, list) else list(table_of(record).parts)
    key = data.draw(st.sampled_from(keys))
    values_[key] = [[None]] if isinstance(values_[key], dict) else {"": [None]}
    with pytest.raises(MalformedMessage):
        parse_json(record, json.dumps(values_), **SIZES)


@pytest.mark.parametrize("record", IN_JSON, ids=lambda record: record.__name__)
@QUICK
@given(st.text() | st.binary())
def test_random_text_is_refused(record: type, text: Any) -> None:
    with pytest.raises(MalformedMessage):
        parse_json(record, text, **SIZES)


def test_page_shows_the_declared_records() -> None:
    found = page.PAGE.read_text(encoding="utf-8")
    assert found == page.text(), (
        "write it again: PYTHONPATH=tests .venv/bin/python -m contracts.messages.page"
    )
