"""Compositions: how parts are given, what follows from them, and which do not fit together."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

import wingbeat
import wingbeat_lab
from wingbeat import Strategy, compression, parts
from wingbeat.compression import Half, LowRank, Sketch, TopK
from wingbeat.errors import UsageError
from wingbeat.types import Fusion
from wingbeat_lab import baselines
from wingbeat_lab.baselines import parse

OWN = Strategy(plan=parts.Merged(), compression=Sketch(bits=4), schedule=parts.Decoupled())


STALE = {"exchange": "bounded", "schedule": "stale"}
SHARED = wingbeat.Sketch(share=0.5, total=100, auto_disable=False)


def refused(**options: Any) -> str:
    """The one line with which this composition is refused."""
    with pytest.raises(UsageError) as caught:
        Strategy(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_composition_answers_the_engine() -> None:
    assert (OWN.schedule.machine, OWN.machine, OWN.topology) == ("dear", "dear", "ring")
    assert (OWN.plan.fusion(), OWN.plan.merging()) == (Fusion(kind="one"), parts.Merged())
    assert OWN.wire == OWN.codec == Sketch(bits=4)
    sharded = Strategy(exchange="mesh", schedule="dear", update="sharded", compression="bf16")
    assert (sharded.topology, sharded.wire, sharded.machine) == ("mesh", "bfloat16", "sharded")
    assert sharded.update_part.divides
    assert not OWN.update_part.divides


def test_a_part_may_be_given_by_its_name() -> None:
    assert Strategy(plan="merged", compression="sketch@4", schedule="dear", exchange="ring") == OWN
    assert Strategy(plan="one", update="whole", compression="fp16") == Strategy(
        plan=parts.OneBucket(), update=parts.Whole(), compression=Half()
    )


def test_what_the_schedule_does_anyway_is_equal_to_what_is_left_out() -> None:
    assert Strategy(schedule="dear", update="deferred") == Strategy(schedule="dear")
    assert Strategy(update=parts.Whole()) == Strategy()
    other = dataclasses.replace(wingbeat.AllReduce(mb=8), schedule=parts.Decoupled())
    assert other.traits.in_parts


def test_a_composition_says_what_is_not_at_its_default() -> None:
    assert repr(Strategy()) == "Strategy()"
    assert repr(Strategy(plan="fixed", update="whole", compression="fp32")) == "Strategy()"
    assert repr(OWN) == "Strategy(plan=Merged(), compression=Sketch(bits=4), schedule=Decoupled())"
    shown = repr(Strategy(exchange="mesh", schedule="dear", update="sharded", plan="layers@2"))
    assert shown == (
        "Strategy(plan=Layers(count=2), exchange=Mesh(), schedule=Decoupled(), update=Sharded())"
    )
    assert eval(shown, {"Strategy": Strategy, **vars(parts), **vars(baselines)}) == Strategy(
        exchange="mesh", schedule="dear", update="sharded", plan="layers@2"
    )


def test_a_composition_is_a_value() -> None:
    assert pickle.loads(pickle.dumps(OWN)) == copy.deepcopy(OWN) == OWN
    assert hash(OWN) == hash(copy.deepcopy(OWN))
    assert dataclasses.replace(OWN, compression="fp32").traits.exact


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": "mergd"}, "unknown plan 'mergd' (did you mean 'merged'?)"),
        ({"plan": 3}, "Strategy(plan=3): pass a value of wingbeat.parts, or a name; allowed: "),
        ({"plan": parts.Merged}, "Strategy(plan=Merged): pass Merged() of wingbeat.parts"),
        ({"plan": parts.WaitFree()}, "Strategy(plan=WaitFree()): pass a value"),
        ({"compression": "scetch"}, "unknown compression 'scetch' (did you mean 'sketch'?)"),
        ({"exchange": "star"}, "unknown exchange 'star'"),
        ({"exchange": "ring@2"}, "exchange='ring@2': ring has no option"),
        ({"schedule": "deer"}, "unknown schedule 'deer' (did you mean 'dear'?)"),
        ({"schedule": None}, "Strategy(schedule=None): pass a value"),
        ({"update": "shard"}, "unknown update 'shard' (did you mean 'sharded'?)"),
        ({"update": None}, "Strategy(update=None)"),
        ({"scedule": "dear"}, "(did you mean 'schedule'?)"),
    ],
)
def test_what_is_no_part_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    assert words in refused(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"update": "sharded"},
            "Sharded() needs all-reduces in two halves, which none of FixedBuckets(), Ring(), "
            "WaitFree() has; allowed: schedule=Decoupled(), which DeAR has",
        ),
        ({"update": "deferred"}, "Deferred() needs sums that come after backward"),
        (
            {"exchange": "servers", "schedule": "served", "compression": "topk@0.1"},
            "compression=TopK(density=0.1)): each worker sends other elements, and servers sum "
            'all; allowed: Sketch(), LowRank(), Half(), "bf16", "fp32", or a topology as the '
            "exchange",
        ),
        (
            {"exchange": parts.Servers(back="dense"), "schedule": "served"},
            "compression='fp32'): sums are dense as it is; back=\"dense\" is for another "
            "compression",
        ),
        ({"schedule": "dear", "update": "whole"}, "Whole() needs whole all-reduces"),
        ({"exchange": "bounded"}, "Bounded() needs steps without a wait for all"),
        ({"schedule": "stale"}, "Stale() needs sums in rounds, which none of FixedBuckets(), Ring"),
        ({"schedule": "stale", "exchange": "ring"}, "allowed: exchange=Bounded()"),
        ({**STALE, "update": "whole"}, "Whole() needs whole all-reduces"),
        ({**STALE, "compression": "bf16"}, "pieces are summed by their owners and sent on in the"),
        ({**STALE, "compression": "topk"}, "pieces are summed by their owners and sent on in the"),
        (
            {**STALE, "compression": SHARED},
            "ends in another iteration on each worker; leave share out",
        ),
        ({**STALE, "plan": "bo"}, "each runs its own; allowed: plan=Colayers"),
        ({**STALE, "plan": "merged"}, "each runs its own; allowed: plan=Col"),
        (
            {"schedule": "dear", "compression": TopK(momentum=0.9)},
            "TopK(momentum=0.9) needs whole all-reduces, which none of FixedBuckets(), Ring(), "
            "Decoupled(), Deferred() has; allowed: schedule=WaitFree(), which AllReduce has",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(options: Any, words: str) -> None:
    assert words in refused(**options)


def test_a_preset_refuses_what_its_parts_do() -> None:
    with pytest.raises(UsageError, match=r"TopK.*as in AllReduce\(compression=.topk.\) and OMGS"):
        wingbeat.Geryon(compression="topk")
    with pytest.raises(UsageError, match=r"TopK.*as in AllReduce\(compression=.topk.\) and OMGS"):
        wingbeat.Geryon(compression="topk", update="server")
    with pytest.raises(UsageError, match="unknown Geryon back 'thin'; allowed: dense, wire"):
        wingbeat.Geryon(compression="bf16", back="thin")
    with pytest.raises(UsageError, match="needs whole all-reduces"):
        wingbeat.DeAR(compression=TopK(momentum=0.9))
    assert wingbeat.AllReduce(compression=TopK(momentum=0.9)).wire == TopK(momentum=0.9)


@pytest.mark.parametrize("name", baselines.PRESETS)
def test_a_preset_is_what_it_is_composed_of(name: str) -> None:
    preset = baselines.PRESETS[name]
    composed = dataclasses.replace(preset())
    assert isinstance(composed, Strategy)
    assert composed == preset() == eval(repr(preset()), {preset.__name__: preset})
    assert composed.traits == preset().traits
    assert (
        eval(repr(composed), {"Strategy": Strategy, **vars(parts), **vars(baselines)}) == composed
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (wingbeat.AllReduce(), (True, "whole", False, False, False)),
        (wingbeat.AllReduce(compression="bf16"), (False, "whole", False, False, False)),
        (wingbeat.AllReduce(compression="sketch"), (False, "whole", False, False, False)),
        (wingbeat.AllReduce(compression="topk"), (False, "whole", False, False, True)),
        (wingbeat.DeAR(), (True, "halves", True, True, False)),
        (wingbeat.DeAR(shard_optimizer=True), (True, "halves", True, True, False)),
        (wingbeat.DeAR(compression="topk"), (False, "halves", True, True, False)),
        (wingbeat.OMGS(), (False, "whole", False, False, True)),
        (wingbeat.OMGS(compression="fp32"), (True, "whole", False, False, False)),
        (wingbeat_lab.Ako(), (False, "partial", False, False, False)),
        (wingbeat_lab.ByteScheduler(), (True, "late", False, True, False)),
        (wingbeat.Canary(), (False, "stale", False, False, False)),
        (wingbeat.Canary(s=0, p=4, colayers=4), (True, "whole", False, False, False)),
        (wingbeat.Canary(s=0, p=3, colayers=4), (False, "stale", False, False, False)),
        (OWN, (False, "halves", True, True, False)),
    ],
)
def test_traits_follow_from_the_parts(strategy: Any, expected: tuple[object, ...]) -> None:
    traits = strategy.traits
    found = (traits.exact, traits.bound, traits.halves, traits.in_parts, traits.gathered)
    assert found == expected
    apart = {"Ako", "Canary"} & {repr(strategy).partition("(")[0]} and not traits.exact
    assert traits.synchronous == (not apart)


def test_a_codec_is_not_on_trial_where_workers_are_apart() -> None:
    assert wingbeat.Canary(compression="sketch@4").wire == wingbeat.Sketch(
        bits=4, auto_disable=False
    )
    assert wingbeat.AllReduce(compression="sketch").wire == wingbeat.Sketch()


def test_one_part_that_is_late_or_rounds_makes_the_whole_so() -> None:
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Late(parts.WaitFree):
        """A schedule of somebody's own."""

        synchronous = False
        exact = False

    traits = Strategy(schedule=Late()).traits
    assert (traits.exact, traits.synchronous) == (False, False)
    assert traits.words() == "not exact, not synchronous"


def test_a_plan_of_ones_own_is_a_part_like_any_other() -> None:
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Pairs(parts.PlanPart):
        """Two layers in each bucket."""

        def fusion(self) -> Fusion:
            return Fusion(kind="layers", layers=2)

    assert Strategy(plan=Pairs()).plan.fusion() == Fusion(kind="layers", layers=2)
    assert wingbeat.DeAR(plan=Pairs()).plan.fusion() == Fusion(kind="layers", layers=2)
    assert repr(wingbeat.DeAR(plan=Pairs())) == "DeAR(plan=Pairs())"


def test_dear_takes_any_plan() -> None:
    assert wingbeat.DeAR(plan="merged", compression="sketch@4") == OWN
    assert wingbeat.DeAR(plan=parts.Merged(), compression=Sketch(bits=4)) == OWN
    with_file = wingbeat.DeAR(plan="merged", plan_file="plan.json", steps=5).plan
    assert with_file == parts.Merged(steps=5, file="plan.json")
    assert wingbeat.DeAR(plan="merged@paper").plan == parts.Merged(rule="paper")


def test_a_plan_by_name_alone_takes_those_options_that_it_has() -> None:
    options = {"mb": 8.0, "trials": 3, "steps": 5}
    found = {
        plan: wingbeat.DeAR(plan=plan, **options).plan
        for plan in ("fixed", "layers", "merged", "one")
    }
    assert found == {
        "fixed": parts.FixedBuckets(mb=8.0, first_mb=0.0),
        "layers": parts.Layers(count=4),
        "merged": parts.Merged(steps=5),
        "one": parts.OneBucket(),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": parts.Merged(), "steps": 3}, "DeAR(plan=Merged(), steps=3): steps is an option"),
        ({"plan": parts.Layers(), "plan_file": "f"}, "plan_file='f'): plan_file is an option"),
        ({"plan": "fixed@3", "mb": 4}, "DeAR(plan='fixed@3', mb=4): mb is an option"),
        ({"plan": "one", "plan_file": "f"}, "only a measured plan has a file; allowed are bo, "),
        ({"plan": "ones"}, "unknown plan 'ones' (did you mean 'one'?)"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        wingbeat.DeAR(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wire", "back"),
    [("bf16", "wire"), ("sketch@4", "dense"), ("lowrank", "wire"), ("fp16", "wire")],
)
def test_servers_take_these_wires(wire: str, back: str) -> None:
    made = parse(f"geryon:compression={wire},back={back}")
    assert made == wingbeat.Geryon(compression=wire, back=back)
    assert not made.traits.exact
    assert made.traits.synchronous
    assert not made.traits.gathered
    assert made.wire == compression.parse(wire)
    assert isinstance(made.exchange, parts.Servers)
    assert made.exchange.dense == (back == "dense")


@pytest.mark.parametrize(
    "wire",
    [Sketch(groups={"a": 3}), LowRank(share=0.5, total=9, auto_disable=False)],
    ids=repr,
)
def test_layers_are_not_merged_by_what_only_some_of_them_cost(wire: Any) -> None:
    """Nor by what a codec costs that is left out later."""
    with pytest.raises(UsageError, match="leave out groups and share") as caught:
        Strategy(plan="merged", compression=wire)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="leave out groups and share"):
        wingbeat.OMGS(compression=wire)
    assert wingbeat.OMGS(compression=wire, merge="size").wire == wire
    assert Strategy(plan="merged", compression=TopK(groups={"a": 0.5})).plan.merging()
    assert Strategy(plan="merged", compression=Sketch(share=1.0, total=9)).plan.merging()
