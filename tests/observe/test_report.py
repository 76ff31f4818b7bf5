"""What a worker says of itself survives the way, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.reports import report
from wingbeat.observe.meter import Section
from wingbeat.observe.report import LARGEST, Report
from wingbeat.schema import MalformedMessage

FULL = report(
    1,
    3,
    size=4,
    counts={"dropped": 2},
    sections=(
        Section("gei", {"c0": "1101", "c1": 13, "share": 0.5}),
        Section("classes", {"0 out": 12345}, "B/s"),
    ),
    ended=True,
)


def test_a_report_comes_back_as_it_was() -> None:
    assert Report.from_text(FULL.to_text()) == FULL
    assert "\n" not in FULL.to_text()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 4),
        ("rank", -1),
        ("rank", True),
        ("rank", "0"),
        ("size", 0),
        ("host", 7),
        ("pid", 1.5),
        ("number", -1),
        ("at_s", float("nan")),
        ("at_s", float("inf")),
        ("at_s", -1.0),
        ("at_s", 10**400),
        ("iteration", 1 << 63),
        ("spent_s", {"forward": "long"}),
        ("spent_s", [1]),
        ("interfaces", {"eth0": [1]}),
        ("interfaces", {"eth0": [1, -2]}),
        ("interfaces", {f"eth{i}": [1, 2] for i in range(33)}),
        ("counts", {"dropped": None}),
        ("counts", None),
        ("sections", {}),
        ("sections", [{"name": "x", "unit": ""}]),
        ("sections", [{"name": "x", "cells": {"a": 1}, "unit": "km"}]),
        ("sections", [{"name": "x", "cells": {"a": "fast"}, "unit": "B/s"}]),
        ("sections", [{"name": "x", "cells": {"a": [1]}, "unit": ""}]),
        ("sections", [{"name": "x", "cells": {"a": float("nan")}, "unit": ""}]),
        ("sections", [{"name": "x", "cells": {str(i): 1 for i in range(257)}, "unit": ""}]),
        ("sections", [7]),
    ],
)
def test_a_report_with_one_wrong_value_is_refused(field: str, value: Any) -> None:
    data = asdict(FULL)
    data[field] = value
    with pytest.raises(MalformedMessage):
        Report.from_text(json.dumps(data))


@pytest.mark.parametrize(
    "field",
    [each.name for each in fields(Report) if each.default is MISSING is each.default_factory],
)
def test_a_report_that_lacks_a_value_is_refused(field: str) -> None:
    data = asdict(FULL)
    del data[field]
    with pytest.raises(MalformedMessage):
        Report.from_text(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "null", "7", "[]", '"x"', "[" * 9_000, "9" * 9_000])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(MalformedMessage):
        Report.from_text(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(asdict(FULL))), JSON)
def test_whatever_stands_in_a_field_it_is_a_report_or_refused(field: str, value: Any) -> None:
    text = json.dumps({**asdict(FULL), field: value})
    try:
        assert isinstance(Report.from_text(text), Report)
    except MalformedMessage:
        pass


def test_a_text_can_give_no_orders_to_a_terminal() -> None:
    evil = report(0, 0, host="\x1b[2Jhost\n\x9b7")
    assert Report.from_text(evil.to_text()).host == "?[2Jhost??7"


def test_long_texts_are_cut() -> None:
    long = report(0, 0, host="h" * 1_000)
    assert len(Report.from_text(long.to_text()).host) == 128


def test_a_report_that_is_too_long_is_refused_unread() -> None:
    text = FULL.to_text()
    assert Report.from_text(text + " " * (LARGEST - len(text))) == FULL
    with pytest.raises(MalformedMessage, match="characters"):
        Report.from_text(text + " " * (LARGEST - len(text) + 1))


def test_who_has_too_much_to_say_leaves_out_the_last_sections() -> None:
    big = tuple(Section(f"s{i}", {f"c{j}": "x" * 100 for j in range(100)}) for i in range(3))
    said = Report.from_text(report(0, 0, sections=big).to_text())
    assert [section.name for section in said.sections] == ["s0"]


def test_what_nobody_would_take_is_left_out() -> None:
    wide = Section("servers", {f"{i} in": 1 for i in range(257)}, "B/s")
    many = [Section(f"s{i}", {"c": i}) for i in range(40)]
    said = Report.from_text(report(0, 0, sections=(wide, *many)).to_text())
    assert [section.name for section in said.sections] == [f"s{i}" for i in range(32)]
