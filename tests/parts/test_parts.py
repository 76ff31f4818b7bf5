"""What each part refuses and declares, by itself."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from wingbeat import compression, parts, schedules, topologies
from wingbeat.errors import UsageError
from wingbeat.parts import names
from wingbeat.settings import Settings, named
from wingbeat.traits import Part
from wingbeat_lab.bench.bound import BOUNDS

CONCRETE = [
    value
    for name in parts.__all__
    if isinstance(value := getattr(parts, name), type) and issubclass(value, Part)
    if value
    not in (
        Part,
        parts.Fragments,  # has no default
        parts.PlanPart,
        parts.SchedulePart,
        parts.UpdatePart,
        parts.PartnersPart,
        parts.ExchangePart,
    )
]


def wrong(make: Any, *args: Any, **options: Any) -> str:
    """The one line with which these arguments are refused."""
    with pytest.raises(UsageError) as caught:
        make(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (parts.FixedBuckets, {"mb": 0}, "FixedBuckets(mb=0): allowed are sizes above 0 up to 4096"),
        (parts.FixedBuckets, {"last_mb": -1}, "(last_mb=-1): allowed are sizes from 0 up to"),
        (parts.FixedBuckets, {"mbs": 3}, "(did you mean 'mb'?)"),
        (parts.TunedBuckets, {"search": "bayes"}, "unknown TunedBuckets search 'bayes'"),
        (parts.TunedBuckets, {"min_mb": 5, "max_mb": 5}, "min_mb must be the smaller"),
        (parts.TunedBuckets, {"trials": 0}, "trials=0"),
        (parts.TunedBuckets, {"steps": True}, "steps=True"),
        (parts.TunedBuckets, {"drift": 1}, "TunedBuckets(drift=1): allowed are numbers above 1"),
        (parts.TunedBuckets, {"topology": "mesh"}, "topology='mesh'): allowed are True and False"),
        (parts.TunedBuckets, {"first_mb": 5000}, "first_mb=5000"),
        (parts.TunedBuckets, {"file": 7}, "file=7"),
        (parts.Layers, {"count": 0}, "Layers(count=0)"),
        (parts.Elements, {"count": 1.5}, "Elements(count=1.5)"),
        (parts.Merged, {"rule": "exakt"}, "(did you mean 'exact'?)"),
        (parts.Merged, {"steps": 0}, "Merged(steps=0)"),
        (parts.Merged, {"drift": 1}, "Merged(drift=1): allowed are numbers above 1"),
        (parts.Merged, {"file": "a\0b"}, "Merged(file='a\\x00b')"),
        (parts.Colayers, {"count": 0}, "Colayers(count=0)"),
        (parts.Bounded, {"s": -1}, "Bounded(s=-1): allowed are whole numbers, 0 to"),
        (parts.Bounded, {"p": 0}, "Bounded(p=0): allowed are whole numbers, 1 to"),
        (parts.Bounded, {"s": None, "p": 3}, "Bounded(s=None, p=3): without a bound no worker"),
        (parts.Bounded, {"encrypted": 1}, "Bounded(encrypted=1): allowed are True and False"),
        (parts.Groups, {"policy": "smrt"}, "(did you mean 'smart'?)"),
        (parts.Groups, {"size": 1}, "Groups(size=1): allowed are whole numbers, 2 to"),
        (parts.Groups, {"policy": "random", "threshold": 9}, 'only policy="smart" and "paper"'),
        (parts.Pairs, {"seed": -1}, "Pairs(seed=-1)"),
        (parts.Local, {"every": 3, "delay": 4}, "allowed is delay=0 to 3"),
        (parts.Outer, {"lr": 0}, "Outer(lr=0): allowed are numbers above 0"),
        (parts.Outer, {"momentum": 1}, "Outer(momentum=1): allowed are 0 to below 1"),
        (parts.PerTensor, {"mb": 3}, "unknown option 'mb' in PerTensor(mb=3); allowed: none"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(make: Any, options: Any, words: str) -> None:
    assert words in wrong(make, **options)


def test_a_part_without_options_says_so() -> None:
    assert wrong(parts.OneBucket, 3) == "OneBucket(3): there are no options; write OneBucket()"


@pytest.mark.parametrize("make", CONCRETE, ids=lambda cls: cls.__name__)
def test_a_part_is_a_value(make: Any) -> None:
    made = make()
    assert made == make()
    assert hash(made) == hash(make())
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert repr(made) == f"{make.__name__}()"
    if isinstance(made, Settings):
        with pytest.raises(AttributeError):
            made.new = 3


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("fixed", parts.FixedBuckets()),
        ("fixed@2.5", parts.FixedBuckets(mb=2.5)),
        ("bo", parts.TunedBuckets()),
        ("grid", parts.TunedBuckets(search="grid")),
        ("layers@3", parts.Layers(count=3)),
        ("elements@100", parts.Elements(count=100)),
        ("none", parts.PerTensor()),
        ("one", parts.OneBucket()),
        ("merged", parts.Merged()),
        ("merged@paper", parts.Merged(rule="paper")),
        ("merged@printed", parts.Merged(rule="printed")),
        ("colayers@4", parts.Colayers(count=4)),
    ],
)
def test_a_plan_has_a_name(text: str, meant: Any) -> None:
    assert named("plan", text, names.PLANS) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fixd", "unknown plan 'fixd' (did you mean 'fixed'?); allowed: bo, chosen, colayers, "),
        ("bo@3", "plan='bo@3': bo has no option; write bo"),
        ("layers@x", "plan='layers@x': 'x' is no valid count; write for example layers@4"),
        ("layers@0", "Layers(count=0)"),
        ("merged@best", "unknown Merged rule 'best'"),
    ],
)
def test_a_name_that_cannot_work_is_refused(text: str, words: str) -> None:
    assert words in wrong(named, "plan", text, names.PLANS)


def test_every_plan_has_a_name_and_a_rule() -> None:
    made = [entry.make() for entry in names.PLANS.values()]
    assert {type(one) for one in made} == {
        cls for cls in CONCRETE if issubclass(cls, parts.PlanPart)
    }
    for one in made:
        assert one.fusion().kind in ("buffer", "layers", "elements", "one", "none", "colayers")
        assert one.tuning() is None or one.merging() is None


def test_every_schedule_names_its_machine_and_its_bound() -> None:
    # Updates of parts of the optimizer bring machines of their own.
    machines = {entry.make().machine for entry in names.SCHEDULES.values()}
    machines.add(parts.Served(pull="start").machine)
    served = {name.replace("served", "served_updates") for name in machines if "served" in name}
    assert {*machines, *served, "sharded"} == {*schedules.BY_NAME}
    for name, entry in names.SCHEDULES.items():
        made = entry.make()
        assert made.name == name
        assert made.bound in BOUNDS
        assert made.update.needs <= made.has


def test_updates_need_what_some_schedule_has() -> None:
    offered = parts.Servers.has.union(*(e.make().has for e in names.SCHEDULES.values()))
    for entry in names.UPDATES.values():
        assert entry.make().needs <= offered


def test_codecs_and_parts_are_not_exact_and_everything_else_is() -> None:
    codecs = {parts.Sketch, parts.TopK, parts.LowRank, parts.Half}
    inexact = {parts.Bounded, parts.Groups, parts.Pairs}
    assert {cls for cls in CONCRETE if not cls().exact} == {*codecs, *inexact}
    assert all(issubclass(cls, compression.CodecOptions) for cls in codecs)
    assert {cls for cls in CONCRETE if not cls().synchronous} == inexact


def test_sizes_follow_a_models() -> None:
    fixed = parts.FixedBuckets(mb=8, first_mb=2, last_mb=0)
    assert fixed.scaled(0.5) == parts.FixedBuckets(mb=4, first_mb=1, last_mb=0)
    edges = {"first_mb": 1, "last_mb": 1}
    tuned = parts.TunedBuckets(mb=8, min_mb=2, max_mb=64, trials=3, **edges).scaled(0.25)
    sizes = {"mb": 2, "min_mb": 0.5, "max_mb": 16, "first_mb": 0.25, "last_mb": 0.25}
    assert tuned == parts.TunedBuckets(**sizes, trials=3)
    assert parts.Elements(count=8192).scaled(0.1) == parts.Elements(count=819)
    assert parts.Elements(count=3).scaled(0.01) == parts.Elements(count=1)
    for other in (parts.Layers(count=3), parts.Merged(), parts.PerTensor()):
        assert other.scaled(0.5) == other


def test_a_topology_says_its_name() -> None:
    for name, topology in topologies.BY_NAME.items():
        assert topologies.name_of(topology) == name

    class Star(parts.Ring):
        """Not known to anybody else."""

    assert "allowed are Ring(), Mesh(), Doubling(), BCube()" in wrong(topologies.name_of, Star())
