"""How a wire is written, and what is refused."""

from __future__ import annotations

import json

import pytest

import wingbeat
from wingbeat import compression
from wingbeat.compression import Half, LowRank, Sketch, TopK
from wingbeat.errors import UsageError
from wingbeat_lab import baselines


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
        ("lowrank@8:bits=3:level=ends", LowRank(rank=8, bits=3, level="ends")),
        ("sketch:split=count:feedback=false", Sketch(split="count", feedback=False)),
        ("sketch:groups=a.*@fp32+*@3", Sketch(groups={"a.*": "fp32", "*": 3})),
        (
            "sketch@2:level=ends:groups=a@lowrank@3:bits=5+b@fp16",
            Sketch(bits=2, level="ends", groups={"a": LowRank(rank=3, bits=5), "b": "fp16"}),
        ),
        (
            "sketch:share=0.25:total=80:auto_disable=false",
            Sketch(share=0.25, total=80, auto_disable=False),
        ),
        ("topk@0.5:warmup=3:groups=a*@0.25", TopK(density=0.5, warmup=3, groups={"a*": 0.25})),
        ("fp16:auto_disable=true", Half(auto_disable=True)),
    ],
)
def test_a_name_stands_for_settings_in_every_strategy(text, meant) -> None:
    assert compression.parse(text) == meant
    for name in ("allreduce", "dear"):
        assert baselines.parse(f"{name}:compression={text}").wire == meant
    if not isinstance(meant, str):
        assert wingbeat.AllReduce(compression=meant).wire == meant


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sketch@9", r"Sketch\(bits=9\): allowed are whole numbers, 1 to 8"),
        ("sketch@x", "'x' is no valid bits; write for example sketch@8"),
        ("topk@0", r"TopK\(density=0.0\): allowed are numbers above 0 up to 1"),
        ("topk@nan", r"TopK\(density=nan\)"),
        ("lowrank@0", r"LowRank\(rank=0\): allowed are whole numbers, 1 to 256"),
        ("fp16@2", "fp16 has no option"),
        ("scetch", r"unknown compression 'scetch' \(did you mean 'sketch'\?\)"),
        ("fp32@1", "unknown compression"),
        ("fp32:bits=3", "'fp32:bits=3': fp32 has no options; write fp32"),
        ("sketch:bit=3", r"unknown option 'bit' in 'sketch:bit=3' \(did you mean 'bits'"),
        (
            "sketch:bits=x",
            "option bits='x' in 'sketch:bits=x' is no valid value: it takes a whole number",
        ),
        ("sketch:bits=", "option 'bits' in 'sketch:bits=' has no value"),
        ("fp16:groups=a@3", "unknown option 'groups'"),
        ("sketch:groups=a", "groups='a': 'a' is no group; write PATTERN@BITS"),
        ("sketch:groups=a@3+", "'' is no group; write PATTERN@BITS"),
        ("sketch:groups=@3", "'@3' is no group"),
        ("sketch:groups=a@9", r"'a': 9: allowed are whole numbers of bits, 1 to 8"),
        ("lowrank:groups=a@0", r"LowRank\(groups=...\): 'a': 0: allowed are whole numbers"),
        ("sketch:groups=a@fp23", "unknown compression 'fp23'"),
        ("sketch:groups=a@bf16", "'a': 'bf16' is no group; allowed are patterns"),
        ("sketch:groups=a@topk", "'a': 'topk' is no group; allowed are patterns"),
        ("sketch:groups=a@sketch:groups=b@3", "without groups and share of its own"),
        (
            "sketch:groups=a@sketch:share=0.5:total=9:auto_disable=false",
            "without groups and share of its own",
        ),
        ("sketch:share=0.5", r"Sketch\(share=0.5\): a share of how many iterations\?"),
        ("sketch:share=1.5", r"Sketch\(share=1.5\): allowed are numbers from 0 to 1"),
        ("sketch:share=0.5:total=-1", r"Sketch\(total=-1\)"),
        ("lowrank:bits=9", r"LowRank\(bits=9\): allowed are whole numbers, 1 to 8, or 32"),
        ("lowrank:split=count", r"LowRank\(split='count'\): it is how factors are sketched"),
        ("lowrank:level=ends:groups=a@fp32", r"add bits=8, or leave out level"),
        ("lowrank:share=0:total=9", "a trial might end the codec sooner; write auto_disable=False"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text, why) -> None:
    for name in set(baselines.names()) - {"auto"}:  # which chooses its codec
        with pytest.raises(UsageError, match=why) as caught:
            baselines.parse(f"{name}:compression={text}")
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
        (LowRank, {"rank": 0}),
        (LowRank, {"split": "counts"}),
        (Sketch, {"groups": {"a": True}}),
        (Sketch, {"groups": {"": 3}}),
        (Sketch, {"groups": {3: 3}}),
        (Sketch, {"groups": {"a": 2.0}}),
        (Sketch, {"groups": {"a": TopK()}}),
        (Sketch, {"groups": "ab"}),
        (Sketch, {"groups": [("a",)]}),
        (Sketch, {"groups": 3}),
        (Sketch, {"share": True}),
        (Sketch, {"total": 0.5}),
        (Half, {"auto_disable": None}),
    ],
)
def test_settings_check_themselves(cls, options) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        cls(**options)


def test_strategies_say_which_wire_they_have() -> None:
    assert repr(wingbeat.DeAR(compression=Sketch(bits=4))) == "DeAR(compression=Sketch(bits=4))"
    assert wingbeat.AllReduce(compression="topk@0.5") == baselines.parse(
        "allreduce:compression=topk@0.5"
    )


@pytest.mark.parametrize(
    ("wire", "nbytes"),
    [
        ("", 400_000),
        ("bfloat16", 200_000),
        (Half(), 200_000),
        (Sketch(bits=2), 25_000),
        (TopK(density=0.01), 6000),
        (LowRank(rank=2, bits=8), 2 * (1000 + 100)),
        (LowRank(rank=2), 4 * 2 * (1000 + 100)),
        (LowRank(rank=50), 400_000),
    ],
)
def test_the_least_bytes_of_a_matrix(wire, nbytes) -> None:
    assert compression.least_bytes(wire, (1000, 100), 4) == nbytes


def test_groups_have_densities_of_their_own() -> None:
    wire = TopK(density=0.01, groups={"embedding.*": 0.5, "*.bias": 1.0})
    assert wire == TopK(density=0.01, groups=(("embedding.*", 0.5), ("*.bias", 1.0)))
    assert hash(wire)
    names = ["embedding.weight", "embedding.bias", "fc.bias", "fc.weight"]
    assert [wire.of_parameter(name).density for name in names] == [0.5, 0.5, 1.0, 0.01]
    assert eval(repr(wire)) == wire


@pytest.mark.parametrize(
    "groups", [{"": 0.1}, {"a": 0}, {"a": True}, {"a": "0.1"}, {3: 0.1}, [("a",)], "ab", 0.1]
)
def test_what_is_no_group_is_refused(groups: object) -> None:
    with pytest.raises(UsageError, match="is no group; allowed are patterns"):
        TopK(groups=groups)  # type: ignore[arg-type]


GROUPED = Sketch(
    bits=5,
    split="count",
    groups={"fc.*": LowRank(rank=2, bits=3), "*.bias": "fp32", "fc*": 7, "c": Sketch(bits=1)},
    share=0.5,
    total=10,
    auto_disable=False,
)


def test_the_first_group_that_matches_counts_and_all_else_is_as_the_wire_has_it() -> None:
    plain = {"split": "count", "auto_disable": False}
    assert compression.for_parameter(GROUPED, "fc.bias") == LowRank(rank=2, bits=3)
    assert compression.for_parameter(GROUPED, "conv.bias") == ""
    assert compression.for_parameter(GROUPED, "fc2.weight") == Sketch(bits=7, **plain)
    assert compression.for_parameter(GROUPED, "c") == Sketch(bits=1)
    assert compression.for_parameter(GROUPED, "conv.weight") == Sketch(bits=5, **plain)
    assert compression.for_parameter(TopK(density=0.1, groups={"a": 1.0}), "a") == TopK(density=1.0)
    assert compression.for_parameter("bfloat16", "a") == "bfloat16"
    assert compression.kinds(GROUPED) == (
        "",
        Sketch(bits=5, **plain),
        LowRank(rank=2, bits=3),
        Sketch(bits=7, **plain),
        Sketch(bits=1),
    )


@pytest.mark.parametrize(
    "wire",
    [
        Sketch(),
        GROUPED,
        LowRank(rank=9, level="ends", feedback=False, groups=[("a", 2), ("b", Half())]),
        TopK(density=0.25, momentum=0.5, groups={"a.*": 0.5, "b": 1.0}),
        Half(auto_disable=True),
    ],
    ids=repr,
)
def test_text_and_json_say_all_of_a_codec(wire) -> None:
    assert compression.parse(compression.to_text(wire)) == wire
    assert compression.from_json(json.loads(json.dumps(compression.to_json(wire)))) == wire
    assert eval(repr(wire)) == wire
    assert len({wire, eval(repr(wire))}) == 1


def test_patterns_that_match_nothing_are_found() -> None:
    names = ["fc.weight", "fc.bias", "conv.weight"]
    assert compression.unmatched_patterns(GROUPED, names) == ["c"]
    assert compression.unmatched_patterns(TopK(groups={"d*": 0.5, "f*": 0.5}), names) == ["d*"]
    assert (
        compression.unmatched_patterns(Half(), names)
        == compression.unmatched_patterns("", names)
        == []
    )


def test_residuals_are_kept_if_any_group_keeps_them() -> None:
    dropping = Sketch(feedback=False)
    assert not dropping.keeps
    assert not Sketch(feedback=False, groups={"a": "fp32", "b": 4, "c": "fp16"}).keeps
    assert Sketch(feedback=False, groups={"a": "fp32", "b": "sketch"}).keeps
    assert Sketch(groups={"a": dropping}).keeps
    assert TopK().keeps
    assert not Half().keeps


@pytest.mark.parametrize(
    ("share", "total", "ends"), [(0, 10, 0), (0.25, 10, 2), (0.5, 7, 4), (0.999, 10, 10)]
)
def test_a_share_ends_after_so_many_iterations(share, total, ends) -> None:
    assert Sketch(share=share, total=total, auto_disable=False).ends_after == ends
    assert LowRank(share=share, total=total, auto_disable=False).ends_after == ends


def test_a_whole_share_never_ends_whatever_the_total() -> None:
    assert Sketch(share=1.0, total=10).ends_after is None
    assert Sketch().ends_after is TopK().ends_after is Half().ends_after is None


@pytest.mark.parametrize(
    ("wire", "summed"),
    [
        (LowRank(), True),
        (LowRank(groups={"a*": "fp32", "b*": LowRank(rank=9)}), True),
        (LowRank(bits=8), False),
        (LowRank(groups={"a*": 4}), False),
        (LowRank(groups={"a*": "fp16"}), False),
        (Sketch(groups={"*": LowRank()}), False),
        (TopK(), False),
        (Half(), False),
    ],
)
def test_all_reduces_sum_factors_that_are_not_sketched(wire, summed) -> None:
    assert wire.summed is summed


def test_a_group_of_bits_is_sketched_as_the_wire_says_and_the_others_are_not() -> None:
    wire = LowRank(rank=2, split="count", groups={"a*": 4})
    assert compression.for_parameter(wire, "a.weight") == LowRank(rank=2, bits=4, split="count")
    assert compression.for_parameter(wire, "b.weight") == LowRank(rank=2)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (0, 0)),
        ((9000,), (0, 0)),
        ((0, 50), (0, 0)),
        ((8, 1000), (0, 0)),
        ((9, 1000), (9, 1000)),
        ((64, 32, 3, 3), (64, 288)),
        ((1, 1, 64, 32), (64, 32)),
    ],
)
def test_what_is_a_matrix_for_factors_of_rank_4(shape, matrix) -> None:
    """Two factors of a matrix of 9 rows have 4036 elements, and it has 9000."""
    assert LowRank(rank=4).matrix_of(shape) == matrix
    assert compression.options_of("").matrix_of(shape) == Sketch().matrix_of(shape) == (0, 0)
