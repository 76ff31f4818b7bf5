"""What a row says of itself when its gradients travel in another dtype."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat_lab.bench import contenders

SHAPES = [(100, 100), (100,)]


@pytest.mark.parametrize("strategy", ["dear", "allreduce"])
def test_half_precision_on_the_wire_is_half_the_bytes_and_not_exact(strategy: str) -> None:
    for wire in ("bf16", "fp16"):
        row = contenders.parse(f"{strategy}:compression={wire}")
        assert not row.traits.exact
        assert row.wire_bytes(SHAPES) == 20_200
        assert row.wire_bytes(SHAPES, 8) == 20_200
        assert row.at_scale(0.25).wire_bytes(SHAPES) == 20_200
    whole = contenders.parse(f"{strategy}:compression=fp32")
    assert whole.traits.exact
    assert whole.wire_bytes(SHAPES) == 40_400


def test_gradients_that_are_as_narrow_already_stay_as_they_are() -> None:
    for text in ("dear:compression=bf16", "ddp+fp16"):
        assert contenders.parse(text).wire_bytes(SHAPES, 2) == 20_200
    assert contenders.parse("dear:compression=bf16").wire_bytes(SHAPES, 1) == 10_100


def test_groups_of_layers_have_bytes_of_their_own() -> None:
    row = contenders.parse("allreduce:compression=sketch@8:groups=fc.*@4+*.bias@fp32")
    names = ["fc.weight", "fc.bias"]
    assert row.wire_bytes(SHAPES, names=names) == 5_000 + 50
    assert row.wire_bytes(SHAPES, names=["conv.weight", "conv.bias"]) == 10_000 + 400
    assert row.wire_bytes(SHAPES) == 10_100


def test_a_share_of_the_training_is_written_with_the_row() -> None:
    row = contenders.parse(
        "dear:compression=sketch:share=0.25:total=40:auto_disable=false,plan=fixed"
    )
    assert not row.decides
    assert row.wire.ends_after == 10


def test_hsdp_is_refused_with_the_benchmark_that_measures_it() -> None:
    with pytest.raises(UsageError, match=r"python benchmarks/hsdp\.py --lab star:2@1gbit"):
        contenders.parse("hsdp")
