"""What `min_replicas=` is possible with."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import wingbeat
from wingbeat import parts
from wingbeat.errors import UsageError
from wingbeat.strategies import parse


def test_the_option_replaces_the_topology_by_an_elastic_one() -> None:
    for made in (
        wingbeat.AllReduce(min_replicas=2, topology="mesh"),
        parse("allreduce:min_replicas=2,topology=mesh"),
    ):
        assert made.exchange == parts.Elastic(min_replicas=2, topology="mesh")
        assert made.topology == "mesh"
        assert made.traits.exact
        assert made.traits.synchronous
        assert made.exchange.readmits
    assert not wingbeat.AllReduce().exchange.readmits


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        (wingbeat.DeAR, {}, 'use a fixed plan, such as plan="fixed"'),
        (wingbeat.AllReduce, {"plan": "merged"}, "has not measured what a plan is tuned by"),
        (wingbeat.AllReduce, {"compression": "sketch"}, "codecs keep numbers of steps"),
        (
            wingbeat.DeAR,
            {"plan": "fixed", "shard_optimizer": True},
            "each replica needs the whole optimizer",
        ),
        (wingbeat.AllReduce, {"topology": "bcube"}, "unknown AllReduce topology 'bcube'"),
        (wingbeat.AllReduce, {"min_replicas": -1}, "allowed are whole numbers, 1 to"),
    ],
)
def test_what_cannot_continue_without_a_replica_is_refused(
    preset: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        preset(**{"min_replicas": 2, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (torch.nn.Embedding(3, 4, sparse=True), "parameter '0.weight' has sparse gradients"),
        (torch.nn.SyncBatchNorm(4), "'0' is a torch.nn.SyncBatchNorm"),
    ],
)
def test_models_whose_exchanges_cannot_be_dropped_are_refused(
    layer: torch.nn.Module, words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        parts.Elastic().check_model(torch.nn.Sequential(layer))
