"""What a strategy refuses, in one line that names the value."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import wingbeat
import wingbeat_lab
from wingbeat import compression, parts
from wingbeat.errors import UsageError
from wingbeat.settings import defaults_of
from wingbeat.strategies import MGWFBP, Strategy
from wingbeat_lab.baselines import PRESETS, parse


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": "bayes"}, "bo"),
        ({"mb": 0}, "mb=0"),
        ({"mb": True}, "mb=True"),
        ({"edge_mb": -1}, "edge_mb=-1"),
        ({"drift": 0.5}, "DeAR(drift=0.5): allowed are numbers above 1"),
        ({"plan": "fixed", "tune_topology": True}, "only plans that are tuned by trials"),
        ({"min_mb": 5, "max_mb": 5}, "min_mb"),
        ({"plan": "layers@0"}, "count=0"),
        ({"trials": 2.5}, "trials=2.5"),
        ({"steps": True}, "steps=True"),
        ({"compression": "int8"}, "int8"),
        ({"shard_optimizer": "false"}, "shard_optimizer='false'"),
        ({"plan_file": 7}, "plan_file=7"),
        ({"plan_file": "a\0b"}, "plan_file"),
        ({"plan": "fixed", "plan_file": "plan.json"}, "plan='fixed'"),
        ({"topology": "star"}, "star"),
        ({"topology": ["ring"]}, "unknown DeAR topology \"['ring']\""),
        ({"plan": ["bo"]}, "unknown plan \"['bo']\""),
        ({"compression": ["fp32"]}, "unknown compression \"['fp32']\""),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        wingbeat.DeAR(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": "tuned"}, "'tuned'"),
        ({"plan": "bo", "mb": 0}, "AllReduce(mb=0)"),
        ({"plan": "bo", "first_mb": 0}, "AllReduce(first_mb=0)"),
        ({"first_mb": -1}, "AllReduce(first_mb=-1): allowed are sizes above 0 up to 4096 MB"),
        ({"plan": "bo", "min_mb": 5, "max_mb": 5}, "AllReduce(min_mb=5, max_mb=5)"),
        ({"plan": "grid", "trials": 0}, "AllReduce(trials=0)"),
        ({"plan_file": "plan.json"}, "AllReduce(plan='fixed', plan_file='plan.json')"),
        ({"plan": "none", "plan_file": "plan.json"}, "only a measured plan has a file"),
        ({"plan": "layers@4", "mb": 5}, "mb is an option for a plan by its name alone"),
        ({"plan": "fixed@4", "first_mb": 2}, "first_mb is an option for a plan by its name alone"),
        ({"edge_mb": 1}, "unknown option 'edge_mb' in AllReduce(edge_mb=1)"),
    ],
)
@pytest.mark.parametrize("preset", [wingbeat.AllReduce, wingbeat.BML])
def test_plans_of_whole_all_reduces_are_refused_in_one_line(
    preset: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        preset(**options)
    assert words.replace("AllReduce", preset.__name__) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tuned_all_reduce_is_spelled_as_dear_is() -> None:
    made = parse("allreduce:plan=bo,mb=64,max_mb=200,trials=5")
    assert made == wingbeat.AllReduce(plan="bo", mb=64, max_mb=200, trials=5)
    assert repr(made) == "AllReduce(plan='bo', mb=64.0, max_mb=200.0, trials=5)"
    assert parse("bml:plan=grid") == wingbeat.BML(plan="grid")
    composed = parse("strategy:plan=bo,schedule=wfbp")
    assert composed.plan.tuning() == wingbeat.AllReduce(plan="bo").plan.tuning()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"s": -1}, "Canary(s=-1): allowed are whole numbers, 0 to 1000000, and None"),
        ({"s": 1.5}, "Canary(s=1.5)"),
        ({"p": 0}, "Canary(p=0): allowed are whole numbers, 1 to 10 (colayers), None and 'auto'"),
        ({"p": True}, "Canary(p=True): allowed are whole numbers"),
        ({"in_flight": 0}, "Canary(in_flight=0): allowed are whole numbers, 1 to 1000000,"),
        ({"p": 11}, "Canary(p=11): allowed are whole numbers, 1 to 10 (colayers), None and 'auto'"),
        ({"s": None, "p": 3}, "Canary(s=None, p=3): without a bound no worker is too late"),
        ({"colayers": 0}, "Canary(colayers=0)"),
        ({"compression": "int8"}, "int8"),
        ({"encrypted": "no"}, "Canary(encrypted='no'): allowed are True and False"),
    ],
)
def test_thresholds_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        wingbeat.Canary(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "auto"])
def test_preset_with_a_list_as_compression_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown compression \"\['fp32'\]\""):
        PRESETS[name](compression=["fp32"])


def test_preset_repr_has_the_options_in_one_order_whatever_the_calls() -> None:
    """Ranks compare strategies by their repr."""
    assert repr(wingbeat.DeAR(steps=3, mb=5)) == "DeAR(mb=5, steps=3)"
    assert repr(parse("p3:mb=2,servers=1")) == repr(wingbeat_lab.P3(servers=1, mb=2.0))


def test_the_defaults_of_canary_are_the_paper_s_and_exact_where_nobody_is_ahead() -> None:
    made = wingbeat.Canary()
    bounded = parts.Bounded(s=18, p="auto", encrypted=True, in_flight=2)
    assert made.exchange == bounded
    assert bounded.exchanged(10) == 6
    assert (made.plan.fusion().layers, made.wire) == (10, wingbeat.Sketch(auto_disable=False))
    assert wingbeat.Canary(s=0).wire == ""
    for s in (0, None):
        assert wingbeat.Canary(s=s).exchange == parts.Bounded(s=s, p="auto")
        assert parts.Bounded(s=s, p="auto").exchanged(10) == 10
    assert wingbeat.Canary(s=0).traits.exact
    assert not wingbeat.Canary(s=0, p=6).traits.exact
    assert parse("canary:p=auto") == wingbeat.Canary()
    assert parse("canary:p=none") == wingbeat.Canary(p=None)


def test_thresholds_are_spelled_with_none() -> None:
    assert parse("canary:s=18,p=6") == wingbeat.Canary(s=18, p=6)
    with pytest.raises(UsageError, match=r"option s='x' in .* it takes a whole number or none$"):
        parse("canary:s=x")
    assert parse("canary:s=none,colayers=4") == wingbeat.Canary(s=None, colayers=4)
    assert parse("strategy:exchange=bounded@none,schedule=stale,plan=colayers") == (
        wingbeat.Canary(s=None, p=None, compression="fp32")
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"merge": "best"}, "exact"),
        ({"density": 0.0}, "density=0.0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"compression": "topk:groups=fc.*@2.0"}, "'fc.*': 2.0"),
        ({"elements": 0}, "elements=0"),
        ({"steps": 0}, "steps=0"),
        ({"drift": 1.0}, "drift=1.0"),
        ({"compression": "fp32", "density": 0.1}, "density is an option of compression"),
        ({"compression": "sketch", "warmup": 9}, "warmup is an option of compression"),
        ({"merge": "none", "plan_file": "plan.json"}, "merge='none'"),
        ({"plan_file": 7}, "plan_file=7"),
        ({"topology": "star"}, "star"),
    ],
)
def test_what_cannot_be_merged_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        wingbeat.OMGS(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


EVERY_KIND = [
    *(wingbeat.AllReduce, wingbeat.DeAR, wingbeat.OMGS, wingbeat_lab.PSGD, MGWFBP),
    *(wingbeat_lab.TopKSGD, wingbeat_lab.LAGS, wingbeat_lab.MGS),
    *(compression.Sketch, compression.TopK, compression.LowRank, compression.Half),
]


@pytest.mark.parametrize("cls", EVERY_KIND, ids=lambda cls: cls.__name__)
def test_an_option_that_does_not_exist_is_refused_by_name(cls: Any) -> None:
    known = defaults_of(cls.__init__ if isinstance(cls, type) else cls)
    names = ", ".join(sorted(known))
    with pytest.raises(UsageError) as caught:
        cls(colour="red")
    where = f"unknown option 'colour' in {cls.__name__}(colour='red')"
    assert str(caught.value).startswith(where)
    assert str(caught.value).endswith(f"; allowed: {names}")
    with pytest.raises(UsageError) as caught:
        cls(torch.nn.Sequential(*[torch.nn.Linear(9, 9)] * 9))
    assert "options are given by name, such as" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        (lambda: wingbeat.DeAR(bucket_mb=3), "DeAR(bucket_mb=3) (did you mean 'mb'?)"),
        (lambda: wingbeat.AllReduce(bucket_cap_mb=3), "(did you mean 'mb'?)"),
        (lambda: wingbeat.DeAR(topolgy="mesh"), "(did you mean 'topology'?)"),
        (lambda: wingbeat.Sketch(bit=4), "(did you mean 'bits'?)"),
        (lambda: wingbeat.DeAR(25), "DeAR(25): options are given by name, such as DeAR(mb=25);"),
        (lambda: wingbeat.TopK(0.01), "such as TopK(density=0.01);"),
        (lambda: wingbeat.DeAR(True), "such as DeAR(tune_topology=True);"),
        (lambda: compression.Half(3), "such as Half(auto_disable=False);"),
    ],
)
def test_the_option_that_was_meant_is_named(wrong: Callable[[], Any], meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrong()
    assert meant in str(caught.value)


def test_options_are_still_copied_pickled_and_listed() -> None:
    made = wingbeat.DeAR(mb=3, compression=compression.TopK(density=0.1, groups={"fc.*": 0.5}))
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == dataclasses.replace(made)
    assert repr(pickle.loads(pickle.dumps(made))) == repr(copy.deepcopy(made)) == repr(made)
    assert repr(dataclasses.replace(made)).startswith("Strategy(plan=TunedBuckets(mb=3), ")
    assert "mb" in inspect.signature(wingbeat.AllReduce).parameters


def test_the_rows_of_table_one_differ_in_what_they_merge_and_send() -> None:
    rows = {name: parse(name) for name in ("psgd", "mgwfbp", "topksgd", "lags", "mgs")}
    assert {name for name, row in rows.items() if row.wire == ""} == {"psgd", "mgwfbp"}
    assert {name: row.plan.fusion().kind for name, row in rows.items()} == {
        "psgd": "none",
        "mgwfbp": "one",
        "topksgd": "one",
        "lags": "none",
        "mgs": "elements",
    }
    assert {name for name, row in rows.items() if row.plan.merging()} == {"mgwfbp"}
    for name in ("topksgd", "lags", "mgs", "omgs"):
        first_try, papers = parse(name), parse(f"{name}:density=0.001,warmup=0")
        assert first_try.wire == compression.TopK(density=0.01, warmup=400, auto_disable=False)
        assert papers.wire == compression.TopK(density=0.001, warmup=0, auto_disable=False)
    assert parse("mgs").plan.fusion().elements == 8192
    assert parse("lags:density=0.01") == wingbeat_lab.LAGS(density=0.01)
    assert wingbeat_lab.LAGS(density=0.01) == wingbeat.OMGS(density=0.01, merge="none")


def test_a_row_of_table_one_merges_as_its_name_says() -> None:
    assert parse("mgs") == wingbeat.OMGS(merge="size")
    with pytest.raises(UsageError, match=r"unknown option 'merge' in 'topksgd:merge=exact'"):
        parse("topksgd:merge=exact")
    with pytest.raises(UsageError, match=r"unknown option 'merge' in TopKSGD\(merge='exact'\)"):
        wingbeat_lab.TopKSGD(merge="exact")


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("allreduce:layers=7", 'write plan="layers@7"'),
        ("bml:layers=7", 'write plan="layers@7"'),
        ("dear:layers=7", 'write plan="layers@7"'),
        ("omgs:momentum=0.9", "as text topk:momentum=0.9"),
        ("omgs:groups=a.*@0.1", "as text topk:groups=PATTERN@DENSITY"),
        ("mgwfbp:density=0.1", "OMGS has it"),
        ("psgd:merge=exact", "OMGS has it"),
        ("parameterserver:threshold=0.5", "Geryon has it"),
        ("tictac:classes=2", "Geryon has it"),
        ("tictac:pull=ready", "ParameterServer has it"),
        ("ripples:wire=bf16", "write compression"),
        ("strategy:wire=bf16", "write compression"),
        ("omgs:momentun=0.9", "as text topk:momentum=0.9"),
        ("parameterserver:plan_fil=x", "plan_file: Geryon has it"),
    ],
)
def test_an_option_that_a_preset_lacks_is_refused_with_what_to_write(
    text: str, instead: str
) -> None:
    name, _, option = text.partition(":")
    key = option.partition("=")[0]
    make = PRESETS.get(name, Strategy)
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert f"unknown option {key!r} in {text!r} (" in str(caught.value)
    assert f"{instead}); allowed: " in str(caught.value)
    with pytest.raises(UsageError) as caught:
        make(**{key: "x"})
    assert f"{instead}); allowed: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_to_write_in_place_of_a_former_option_is_accepted() -> None:
    assert parse("dear:plan=layers@7").plan == parts.Layers(count=7)
    momentum = parse("omgs:compression=topk:momentum=0.9")
    assert momentum.compression == compression.TopK(momentum=0.9, auto_disable=False)
    groups = parse("omgs:compression=topk:groups=a.*@0.1")
    assert groups.compression == compression.TopK(groups={"a.*": 0.1}, auto_disable=False)


@pytest.mark.parametrize("wire", ["topk", "topk@0.01", "sketch", "lowrank@2"])
def test_a_codec_by_name_is_merged_without_asking_whether_it_pays(wire: str) -> None:
    coded = wingbeat.OMGS(compression=wire).wire
    assert not isinstance(coded, str)
    assert not coded.auto_disable


def test_any_size_above_zero_is_at_least_a_byte() -> None:
    plan = wingbeat.DeAR(mb=1e-9, edge_mb=0, min_mb=1e-9).plan
    tuning = plan.tuning()
    assert tuning is not None
    assert (plan.fusion().bucket_bytes, plan.fusion().first_bytes) == (1, 0)
    assert tuning.low_bytes == 1


def test_the_command_line_spells_every_option() -> None:
    assert parse("dear:plan=layers@3,compression=bf16,shard_optimizer=true") == wingbeat.DeAR(
        plan="layers@3", compression="bf16", shard_optimizer=True
    )
    groups = {"embedding.*": 0.1, "*.bias": 1.0}
    assert parse("omgs:compression=topk@0.01:groups=embedding.*@0.1+*.bias@1") == wingbeat.OMGS(
        compression=compression.TopK(density=0.01, groups=groups, auto_disable=False)
    )


@pytest.mark.parametrize("item", ["fc", "@0.1", "fc@", "fc@much", "fc@0.1+"])
def test_a_group_is_spelled_with_its_density(item: str) -> None:
    with pytest.raises(UsageError, match="write PATTERN@DENSITY"):
        parse(f"omgs:compression=topk:groups={item}")
    with pytest.raises(UsageError, match=r"'fc': 2\.0 is no group"):
        parse("lags:compression=topk:groups=fc@2")


def test_a_strategy_says_what_is_not_at_its_default() -> None:
    assert repr(wingbeat.DeAR()) == "DeAR()"
    assert (
        repr(wingbeat.AllReduce(mb=8, compression="fp16")) == "AllReduce(mb=8, compression='fp16')"
    )
