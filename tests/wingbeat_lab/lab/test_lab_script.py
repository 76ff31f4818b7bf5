from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat_lab.lab.script import FailEvent, parse_script
from wingbeat_lab.lab.spec import LabSpec

SPEC = LabSpec.parse("star:4x2@1gbit")


def test_script_of_the_documentation_is_parsed_in_order_of_time() -> None:
    text = "10s h2.eth0 down; 12s h2.eth0 up; 20s rate h3 100mbit; 15s kill h1"
    assert parse_script(text, SPEC) == [
        FailEvent(10, "down", 2, 0),
        FailEvent(12, "up", 2, 0),
        FailEvent(15, "kill", 1),
        FailEvent(20, "rate", 3, None, 10**8),
    ]


@given(
    st.lists(
        st.one_of(
            st.builds(
                FailEvent,
                st.integers(0, 10**5).map(lambda n: n / 8),
                st.sampled_from(["down", "up"]),
                st.integers(0, 3),
                st.sampled_from([None, 0, 1]),
            ),
            st.builds(
                FailEvent,
                st.just(1.0),
                st.just("kill"),
                st.integers(0, 3),
                st.sampled_from([None, 0]),
            ),
            st.builds(
                FailEvent,
                st.just(1.0),
                st.just("rate"),
                st.integers(0, 3),
                st.sampled_from([None, 1]),
                st.integers(10**6, 10**11),
            ),
        )
    )
)
def test_script_events_round_trip_through_text(events: list[FailEvent]) -> None:
    text = "; ".join(e.to_text() for e in events)
    assert parse_script(text, SPEC) == sorted(events, key=lambda e: e.at)


def test_script_in_a_toml_file_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    file.write_text('[[fail]]\nat = "500ms"\ndo = "kill h1"\n[[fail]]\nat = 2\ndo = "h0 down"\n')
    assert parse_script(str(file), SPEC) == [
        FailEvent(0.5, "kill", 1),
        FailEvent(2, "down", 0),
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10s kil h1", ["'kil'", "did you mean 'kill'"]),
        ("10s h2.eth0 dwn", ["'dwn'", "did you mean 'down'"]),
        ("10x kill h1", ["'x'"]),
        ("10s kill h9", ["'h9'", "h0, h1, h2, h3"]),
        ("10s kill h1.1", ["'h1.1'", "h1.0"]),
        ("10s h1.eth7 down", ["'h1.eth7'", "h1.eth0, h1.eth1"]),
        ("10s rate h1", ["cannot read"]),
        ("10s rate h1 0mbit", ["0mbit"]),
        ("10s", ["cannot read"]),
        ("gone.toml", ["gone.toml", "No such file"]),
    ],
)
def test_script_with_an_error_names_what_is_allowed(text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_script(text, SPEC)
    for part in parts:
        assert part in str(caught.value)


def test_script_on_loopback_allows_only_kill() -> None:
    spec = LabSpec.parse("loopback:2")
    assert parse_script("1s kill h1", spec) == [FailEvent(1, "kill", 1)]
    with pytest.raises(UsageError, match="only kill"):
        parse_script("1s h1 down", spec)
