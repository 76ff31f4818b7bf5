"""How a wire is written, and what is refused."""

from __future__ import annotations

import pytest

import wingbeat
from wingbeat import strategies, wires
from wingbeat.errors import UsageError
from wingbeat.wires import Half, LowRank, Sketch, TopK


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("fp32", ""),
        ("bf16", "bfloat16"),
        ("fp16", Half()),
        ("sketch", Sketch()),
        ("sketch@4", Sketch(bits=4)),
        ("topk", TopK()),
        ("topk@0.01", TopK(density=0.01)),
        ("topk@1", TopK(density=1.0)),
        ("lowrank@8", LowRank(rank=8)),
    ],
)
def test_a_name_stands_for_settings_in_every_strategy(text, meant) -> None:
    assert wires.of(text) == meant
    for name in ("allreduce", "dear"):
        assert strategies.parse(f"{name}:wire={text}").choices().wire == meant
    if not isinstance(meant, str):
        assert wingbeat.AllReduce(wire=meant).choices().wire == meant


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sketch@9", r"Sketch\(bits=9\): allowed are whole numbers, 1 to 8"),
        ("sketch@x", "'x' is no valid bits; write for example sketch@8"),
        ("topk@0", r"TopK\(density=0.0\): allowed are numbers above 0 up to 1"),
        ("topk@nan", r"TopK\(density=nan\)"),
        ("lowrank@0", r"LowRank\(rank=0\): allowed are whole numbers, 1 to 256"),
        ("fp16@2", "fp16 has no option"),
        ("scetch", r"unknown wire 'scetch' \(did you mean 'sketch'\?\)"),
        ("fp32@1", "unknown wire"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text, why) -> None:
    for name in strategies.names():
        with pytest.raises(UsageError, match=why) as caught:
            strategies.parse(f"{name}:wire={text}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Sketch, {"bits": True}),
        (Sketch, {"split": "counts"}),
        (Sketch, {"level": "median"}),
        (Sketch, {"feedback": 1}),
        (TopK, {"warmup": -1}),
        (TopK, {"momentum": 1.0}),
        (TopK, {"momentum": -0.1}),
        (LowRank, {"bits": 0}),
        (Half, {"auto_disable": None}),
    ],
)
def test_settings_check_themselves(cls, options) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        cls(**options)


def test_strategies_say_which_wire_they_have() -> None:
    assert repr(wingbeat.DeAR(wire=Sketch(bits=4))) == "DeAR(wire=Sketch(bits=4))"
    assert wingbeat.AllReduce(wire="topk@0.5") == strategies.parse("allreduce:wire=topk@0.5")


@pytest.mark.parametrize(
    ("wire", "nbytes"),
    [
        ("", 400_000),
        ("bfloat16", 200_000),
        (Half(), 200_000),
        (Sketch(bits=2), 25_000),
        (TopK(density=0.01), 6000),
        (LowRank(rank=2), 2 * (1000 + 100)),
    ],
)
def test_the_least_bytes_of_a_matrix(wire, nbytes) -> None:
    assert wires.least_bytes(wire, (1000, 100), 4) == nbytes


def test_groups_have_densities_of_their_own() -> None:
    wire = TopK(density=0.01, groups={"embedding.*": 0.5, "*.bias": 1.0})
    assert wire == TopK(density=0.01, groups=(("embedding.*", 0.5), ("*.bias", 1.0)))
    assert hash(wire)
    names = ["embedding.weight", "embedding.bias", "fc.bias", "fc.weight"]
    assert [wire.density_of(name) for name in names] == [0.5, 0.5, 1.0, 0.01]
    assert eval(repr(wire)) == wire


@pytest.mark.parametrize(
    "groups", [{"": 0.1}, {"a": 0}, {"a": True}, {"a": "0.1"}, {3: 0.1}, [("a",)], "ab", 0.1]
)
def test_what_is_no_group_is_refused(groups: object) -> None:
    with pytest.raises(UsageError, match="is no group; allowed are patterns"):
        TopK(groups=groups)  # type: ignore[arg-type]
