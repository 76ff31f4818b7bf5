"""What a bench accepts, and the one line it refuses with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wingbeat import strategies
from wingbeat.errors import UsageError
from wingbeat_lab.bench import contenders, models
from wingbeat_lab.bench.config import BenchConfig


def config(**changes: Any) -> BenchConfig:
    values: dict[str, Any] = {
        "lab": "star:4@1gbit",
        "model": "paced:resnet50",
        "strategies": ("ddp", "dear"),
    }
    return BenchConfig(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lab": "sta:4@1gbit"}, ["'sta'", "star"]),
        ({"model": "digit"}, ["'digit'", "'digits'"]),
        ({"model": "paced:resnet5"}, ["'resnet5'", "'resnet50'"]),
        ({"model": "paced:resnet50@2"}, ["2", "at most 1"]),
        ({"strategies": ("ddp", "deer")}, ["'deer'", "'dear'"]),
        ({"strategies": ("ddp+fp61",)}, ["'ddp+fp61'", "'ddp+fp16'"]),
        ({"strategies": ("ddp:bm=5",)}, ["'bm'", "'mb'"]),
        ({"strategies": ("dear:plan=fixd",)}, ["'fixd'", "'fixed'"]),
        ({"strategies": ("ddp+powersgd:rank=0",)}, ["rank=0"]),
        ({"strategies": ()}, ["no strategies", "ddp"]),
        ({"optimizer": "sdg"}, ["'sdg'", "'sgd'"]),
        ({"iterations": 0}, ["iterations = 0", "1 or more"]),
        ({"rounds": 4, "iterations": 3}, ["4 rounds", "3 iterations"]),
        ({"stretch": 0.0}, ["stretch", "0.01 to 100"]),
        ({"model": "digits", "stretch": 2.0}, ["stretch", "digits"]),
        ({"per_host": 17}, ["64"]),
        ({"lab": "star:4@1mbit", "model": "paced:resnet50@0.5"}, ["scale by at least 1"]),
        ({"strategies": ("ddp+powersgd",), "warmup": 2}, ["warmup = 2", "3 or more"]),
        ({"strategies": ("fsdp",)}, ["fsdp", "digits"]),
        (
            {"strategies": ("ddp", "bml"), "lab": "star:8x2@1gbit"},
            ["9 workers with 2 interfaces each are BCube(3, 2)", "you have 8 with 2"],
        ),
        (
            {"strategies": ("bml:topology=bcube@2x2",), "per_host": 2, "lab": "star:4x2@1gbit"},
            ["BCube(2, 2); you have 8 with 2"],
        ),
        ({"slow": ("4=+2x",)}, ["no rank 4", "0 to 3"]),
        ({"slow": ("1=+2x@3-31",)}, ["3 to 31", "of the 30 timed"]),
        ({"slow": ("1=+2x", "random:+1x")}, ["one at a time"]),
        ({"slow": ("1=+900x",)}, ["'1=+900x' sleeps", "up to 60 s"]),
        ({"target_loss": 0.3}, ["target_loss = 0.3", "'paced:resnet50'", "digits"]),
        ({"target_loss": 0.0, "model": "digits"}, ["target_loss = 0", "above 0"]),
        ({"target_loss": float("nan"), "model": "digits"}, ["target_loss = nan", "above 0"]),
        (
            {"target_loss": 0.3, "model": "digits", "iterations": 20, "warmup": 3},
            ["9 iterations in a round", "10 or more"],
        ),
    ],
)
def test_what_cannot_work_is_one_line(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        config(**changes).check()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_rates_follow_the_models_scale_and_the_stretch() -> None:
    checked = config(model="paced:resnet50@0.5", stretch=2.0).check()
    assert str(checked.lab) == "star:4@250mbit"
    assert str(checked.asked) == "star:4@1gbit"
    whole = config().check()
    times, stretched = whole.model.compute_s(), checked.model.compute_s()
    assert times is not None
    assert stretched == pytest.approx((2 * times[0], 2 * times[1]))


def test_buckets_follow_the_models_scale() -> None:
    checked = config(model="paced:resnet50@0.5", strategies=("ddp", "allreduce:mb=8")).check()
    ddp, allreduce = checked.rows
    assert ddp.scale == 0.5
    assert allreduce.strategy == strategies.AllReduce(mb=4.0, first_mb=0.5)


def test_the_usual_bucket_follows_the_models_scale() -> None:
    assert config().check().bucket_bytes == 25 * 2**20
    assert config(model="paced:resnet50@0.04").check().bucket_bytes == 2**20


def test_config_divides_iterations_among_rounds() -> None:
    made = config(iterations=8, rounds=3)
    assert [made.share(i) for i in range(3)] == [3, 3, 2]
    assert [made.before(i) for i in range(3)] == [0, 3, 6]
    assert made.check().total_iterations == 2 * (8 + 3 * made.warmup)


def test_config_is_read_by_workers_as_written(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    made = config(trace=True, stretch=3.0, measure=False, slow=("1=+2x", "2=+1x"))
    path.write_text(made.to_json(), encoding="utf-8")
    assert BenchConfig.load(path) == made


SERVED = ("parameterserver", "geryon", "vanillaps", "partitionedps", "tictac", "p3")


def test_config_rows_have_their_kind_and_bytes() -> None:
    shapes = [(100, 100), (100,)]
    expected = {
        "single": ("single", 0),
        "ddp": ("whole", 40_400),
        "ddp+fp16": ("whole", 20_200),
        "ddp+bf16": ("whole", 20_200),
        "ddp+powersgd:rank=3": ("whole", 2_400 + 400),
        "fsdp": ("fsdp", 40_400),
        "allreduce": ("whole", 40_400),
        "bml": ("whole", 40_400),
        "auto": ("halves", 40_400),
        "dear:mb=5": ("halves", 40_400),
        "omgs": ("whole", 606),
        "omgs:density=0.001": ("whole", 60),
        "psgd": ("whole", 40_400),
        "mgwfbp": ("whole", 40_400),
        "topksgd:density=0.01": ("whole", 606),
        "lags:density=0.01": ("whole", 606),
        "mgs:density=0.01": ("whole", 606),
        "strategy:compression=sketch@4,schedule=dear": ("halves", 5_050),
        "ako": ("partial", 40_400),
        "bytescheduler": ("late", 40_400),
        "canary:s=2,p=6,compression=fp32": ("stale", 40_400),
        "ripples:policy=static": ("local", 40_400),
        "adpsgd": ("local", 40_400),
        "localsgd:every=8": ("local", 40_400),
        "diloco:every=30": ("local", 40_400),
        **dict.fromkeys(SERVED, ("late", 40_400)),
    }
    for text, (kind, nbytes) in expected.items():
        row = contenders.parse(text)
        assert (row.traits.bound, row.wire_bytes(shapes)) == (kind, nbytes), text
    assert set(contenders.names()) == {contenders.parse(text).name for text in expected}


def test_rows_whose_exchange_has_halves_are_recorded_by_them_too() -> None:
    rows = ("ddp", "dear:compression=bf16", "allreduce", "strategy:plan=one,schedule=dear")
    whole = [(number, "whole") for number in range(4)]
    halves = [(number, half) for number in (1, 3) for half in ("RS-only", "AG-only")]
    assert sorted(config(strategies=rows, breakdown=True).check().recorded) == sorted(
        [*whole, *halves]
    )
    assert config(strategies=rows, trace=True).check().recorded == whole
    assert config(strategies=rows).check().recorded == []


def test_rows_say_whether_they_decide_and_whether_they_are_ddp() -> None:
    deciding = ("dear", "omgs", "mgwfbp", "allreduce:compression=sketch", "dear:plan=merged")
    fixed = ("dear:plan=fixed", "allreduce", "psgd", "lags", "mgs", "single", "fsdp")
    forms = ("ddp", "ddp+fp16:mb=3", "ddp+bf16", "ddp+powersgd")
    assert all(contenders.parse(text).decides for text in deciding)
    assert not any(contenders.parse(text).decides for text in (*fixed, *forms))
    assert all(contenders.parse(text).ddp for text in forms)
    assert not any(contenders.parse(text).ddp for text in (*deciding, *fixed))


def test_a_strategy_is_the_dataclass_that_python_users_write() -> None:
    assert contenders.parse("dear:mb=5").strategy == strategies.DeAR(mb=5.0)


def test_layers_of_a_paced_model_add_up_to_the_profile() -> None:
    model = models.parse("paced:resnet50")
    layers = model.layers(contenders.parse("ddp"))
    assert model.profile is not None
    assert layers is not None
    assert sum(layer.nbytes for layer in layers) == model.profile.nbytes
    seconds = sum(layer.forward_s + layer.backward_s for layer in layers)
    assert seconds == pytest.approx((model.profile.forward_ms + model.profile.backward_ms) / 1e3)


def test_a_paced_model_does_not_warm_up_unless_the_row_says_so() -> None:
    rows = (
        "omgs",
        "omgs:warmup=9",
        "allreduce:compression=topk",
        "dear:compression=topk@0.05",
        "omgs:compression=topk@0.05",
    )
    checked = config(strategies=(*rows, "ddp", "mgwfbp", "allreduce:compression=sketch")).check()
    wires = [row.strategy.wire for row in checked.rows if row.strategy is not None]
    assert [getattr(wire, "warmup", None) for wire in wires] == [0, 9, 0, 0, 0, None, None]
    assert [getattr(wire, "density", None) for wire in wires[:5]] == [0.01, 0.01, 0.01, 0.05, 0.05]
    assert [getattr(wire, "auto_disable", None) for wire in wires[:5]] == [
        False,
        False,
        True,
        True,
        False,
    ]
    real = config(strategies=("omgs",), model="digits").check().rows[0].strategy
    assert real == strategies.OMGS()
    assert real.wire.warmup > 0


@pytest.mark.parametrize("lab", ["star:9x2@1gbit", "bcube:3x2@1gbit", "star:3@1gbit", "loopback:3"])
def test_bml_is_for_what_makes_a_bcube(lab: str) -> None:
    assert config(lab=lab, strategies=("bml",)).check().rows[0].name == "bml"


def test_workers_of_one_host_have_its_loopback_alone() -> None:
    assert config(lab="star:1x2@1gbit", per_host=3, strategies=("bml",)).check().workers == 3
