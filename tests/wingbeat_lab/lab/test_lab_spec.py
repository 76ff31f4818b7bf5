from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat_lab.lab.spec import (
    MAX_RATE,
    MIN_RATE,
    LabSpec,
    Override,
    format_rate,
    parse_rate,
    parse_time,
)

rates = st.integers(MIN_RATE, MAX_RATE)


@st.composite
def specs(draw: st.DrawFn) -> LabSpec:
    kind = draw(st.sampled_from(["star", "bcube", "fat-tree", "loopback"]))
    if kind == "loopback":
        return LabSpec(kind=kind, hosts=draw(st.integers(1, 1000)))
    rails = draw(st.integers(1, 4))
    if kind == "bcube":
        hosts = draw(st.integers(2, 250 ** (1 / rails) // 1)) ** rails
    else:
        hosts = draw(st.integers(1, 1000))
    targets = draw(
        st.lists(
            st.tuples(st.integers(0, hosts - 1), st.one_of(st.none(), st.integers(0, rails - 1))),
            max_size=5,
            unique=True,
        )
    )
    tree = kind == "fat-tree"
    leaf, trunk = (draw(st.integers(1, hosts)), draw(rates)) if tree else (0, 0)
    crossed = tree and leaf < hosts and draw(st.booleans())
    return LabSpec(
        kind=kind,
        hosts=hosts,
        rails=rails,
        rate=draw(rates),
        leaf=leaf,
        trunk=trunk,
        cross=draw(st.integers(MIN_RATE, trunk)) if crossed else 0,
        cross_flows=draw(st.integers(1, 64)) if crossed else 1,
        overrides=tuple(Override(h, i, draw(rates)) for h, i in targets),
        prio=draw(st.sampled_from([0, 2, 3, 4])),
    )


@given(specs())
def test_spec_round_trips_through_text(spec: LabSpec) -> None:
    assert LabSpec.parse(spec.to_text()) == spec


def toml_of(spec: LabSpec) -> str:
    values: dict[str, int | str] = {"kind": spec.kind, "prio": spec.prio}
    if spec.kind == "bcube":
        values |= {"alpha": spec.alpha, "levels": spec.rails}
    else:
        values |= {"hosts": spec.hosts, "rails": spec.rails}
    if spec.rate:
        values["rate"] = format_rate(spec.rate)
    if spec.kind == "fat-tree":
        values |= {"leaf": spec.leaf, "trunk": format_rate(spec.trunk)}
    if spec.cross:
        values |= {"cross": format_rate(spec.cross), "cross_flows": spec.cross_flows}
    lines = [f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in values.items()]
    lines.append("[override]" if spec.overrides else "")
    return "\n".join([*lines, *(f'"{o.target}" = "{format_rate(o.rate)}"' for o in spec.overrides)])


@given(specs())
def test_what_stands_in_a_toml_document_is_read(spec: LabSpec) -> None:
    assert LabSpec.from_toml(toml_of(spec)) == spec


@given(specs())
def test_overrides_have_one_canonical_order(spec: LabSpec) -> None:
    turned = dataclasses.replace(spec, overrides=spec.overrides[::-1])
    assert turned == spec
    assert turned.to_text() == spec.to_text()


@given(rates)
def test_rate_round_trips_through_text(rate: int) -> None:
    assert parse_rate(format_rate(rate)) == rate


@given(st.text(max_size=30))
def test_any_text_parses_or_is_a_usage_error_of_one_line(text: str) -> None:
    for candidate in (text, f"star:{text}", f"star:4@{text}", f"star:4@1gbit,{text}"):
        message = ""
        try:
            LabSpec.parse(candidate)
        except UsageError as err:
            message = str(err)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("star:4@1gbit", LabSpec(kind="star", hosts=4, rate=10**9)),
        ("star:4x2@1gbit", LabSpec(kind="star", hosts=4, rails=2, rate=10**9)),
        ("bcube:3x2@250mbit", LabSpec(kind="bcube", hosts=9, rails=2, rate=250 * 10**6)),
        (
            "fat-tree:8/4@1gbit+500mbit",
            LabSpec(kind="fat-tree", hosts=8, leaf=4, rate=10**9, trunk=500 * 10**6),
        ),
        ("loopback:4", LabSpec(kind="loopback", hosts=4)),
        ("star:4@1gbit,prio", LabSpec(kind="star", hosts=4, rate=10**9, prio=2)),
        ("star:4@1gbit,ip=6", LabSpec(kind="star", hosts=4, rate=10**9, ip=6)),
        ("star:2@2.5Gbit", LabSpec(kind="star", hosts=2, rate=2_500_000_000)),
    ],
)
def test_spec_forms_of_the_documentation_are_parsed(text: str, expected: LabSpec) -> None:
    assert LabSpec.parse(text) == expected


@pytest.mark.parametrize(
    ("amount", "rate"),
    [("0.8", 400 * 10**6), ("1", 500 * 10**6), (".5", 25 * 10**7), ("3mbit", 3 * 10**6)],
)
def test_cross_traffic_is_a_share_of_the_trunk_or_a_rate(amount: str, rate: int) -> None:
    spec = LabSpec.parse("fat-tree:4/2@1gbit+500mbit").with_cross(amount, 3)
    assert (spec.cross, spec.cross_flows) == (rate, 3)


@pytest.mark.parametrize(
    ("lab", "amount", "part"),
    [
        ("star:4@1gbit", "0.8", "0.8 in a star lab"),
        ("fat-tree:4/2@1gbit+1gbit", "1.5", "shares from 0.001 to 1"),
        ("fat-tree:4/2@1gbit+1gbit", "0", "shares from 0.001 to 1"),
        ("fat-tree:4/2@1gbit+1gbit", "much", "needs a number and a unit"),
    ],
)
def test_cross_traffic_that_cannot_be_is_refused(lab: str, amount: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        LabSpec.parse(lab).with_cross(amount)


def test_own_interface_rate_beats_host_rate_beats_lab_rate() -> None:
    spec = LabSpec.parse("star:4x2@1gbit,h3@200mbit,h3.eth1@100mbit")
    assert [spec.link_rate(3, k) for k in (0, 1)] == [200 * 10**6, 100 * 10**6]
    assert spec.link_rate(2, 1) == 10**9


def test_spec_in_a_toml_file_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text('kind = "star"\nhosts = 3\nrate = "1gbit"\n[override]\nh2 = "10mbit"\n')
    assert LabSpec.parse(str(file)) == LabSpec.parse("star:3@1gbit,h2@10mbit")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sar:4@1gbit", ["'sar'", "did you mean 'star'", "bcube, fat-tree, loopback, star"]),
        ("star:4@1gbip", ["'gbip'", "did you mean 'gbit'"]),
        ("star:4@1", ["'1'", "unit"]),
        ("star:4@900gbit", ["1mbit to 100gbit"]),
        ("star:4", ["needs a rate"]),
        ("star:x@1gbit", ["'x'", "star:4@1gbit"]),
        ("star:0@1gbit", ["0 hosts", "1 to 1000"]),
        ("star:4x99@1gbit", ["99 interfaces", "1 to 16"]),
        ("bcube:3@1gbit", ["'3'", "bcube:3x2"]),
        ("bcube:9x9@1gbit", ["bcube:9x9", "250"]),
        ("bcube:999999x999999@1gbit", ["out of range"]),
        ("fat-tree:8/4@1gbit", ["trunk"]),
        ("fat-tree:8/9@1gbit+1gbit", ["9 hosts a leaf", "1 to 8"]),
        ("star:4@1gbit+1gbit", ["trunk"]),
        ("star:4@1gbit,h4@10mbit", ["'h4'", "h0, h1, h2, h3"]),
        ("star:4x2@1gbit,h1.eth2@10mbit", ["'h1.eth2'", "h1.eth0, h1.eth1"]),
        ("star:4@1gbit,h1@10mbit,h1@20mbit", ["h1 has two rates"]),
        ("star:4@1gbit,prio=5", ["prio=5", "2 to 4"]),
        ("star:4@1gbit,ip=5", ["ip=5", "4 or 6"]),
        ("star:4@1gbit,ip", ["ip=''", "4 or 6"]),
        ("star:4@1gbit,prio=2,ip=6", ["ip=6", "without prio"]),
        ("bcube:2x2@1gbit,ip=6", ["ip=6", "a star or a fat-tree"]),
        ("star:4@1gbit,prio=x", ["'x'", "2 to 4"]),
        ("star:4@1gbit,proi=2", ["'proi'", "did you mean 'prio'"]),
        ("loopback:4@1gbit", ["unshaped"]),
        ("star:4@1gbit,cross=1gbit", ["1gbit in a star lab", "a fat-tree of two leaf switches"]),
        ("fat-tree:4/4@1gbit+1gbit,cross=1gbit", ["of 1 leaf switch", "fat-tree:4/2@"]),
        ("fat-tree:4/2@1gbit+1gbit,cross=2gbit", ["2gbit on trunks of 1gbit", "up to"]),
        ("fat-tree:4/2@1gbit+1gbit,cross=1gbitx", ["'1gbitx'", "1gbitx4"]),
        ("fat-tree:4/2@1gbit+1gbit,cross=1gbitx99", ["99 flows", "1 to 64"]),
        ("fat-tree:4/2@1gbit+1gbit,cross=0.8", ["'0.8'", "unit"]),
        ("nowhere.toml", ["nowhere.toml", "No such file"]),
    ],
)
def test_spec_with_an_error_names_the_value_and_what_is_allowed(
    text: str, parts: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        LabSpec.parse(text)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        ('kind = "star"\nhosts = 4\nrat = "1gbit"', ["'rat'", "did you mean 'rate'"]),
        ('kind = "star"\nhosts = "4"\nrate = "1gbit"', ["hosts = '4'", "int"]),
        ('kind = "star"\nrate = "1gbit"', ["lacks hosts"]),
        ("hosts = 4", ["lab kind 'None'"]),
        ("= 4", ["is not TOML"]),
        pytest.param("hosts = " + "[" * 100_000, ["is not TOML"], id="deep"),
    ],
)
def test_spec_in_invalid_toml_is_refused(toml: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        LabSpec.from_toml(toml)
    for part in parts:
        assert part in str(caught.value)


def test_times_are_parsed_by_unit() -> None:
    assert [parse_time(t) for t in ("10s", "250ms", "1.5", "2m")] == [10, 0.25, 1.5, 120]
    with pytest.raises(UsageError, match="'h'"):
        parse_time("3h")
