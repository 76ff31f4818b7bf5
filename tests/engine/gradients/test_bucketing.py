"""Buckets come and go with plans, and by the order that rank 0 has told, once it is checked."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from helpers.training import net, on
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.errors import PeerError
from wingbeat.types import Fusion


class _OnItsWay:
    """A collective that the links have not finished."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_old_buckets_are_freed_when_their_collectives_are_done() -> None:
    """Their memory may be anybody's afterwards."""

    def body(world: Any) -> None:
        bucketing = Bucketing(net(), Fusion(bucket_bytes=400), world)
        bucketing.build()
        handles: list[Any] = [_OnItsWay() for _ in bucketing.buckets]
        assert len(handles) > 1
        for bucket, handle in zip(bucketing.buckets, handles, strict=True):
            bucket.handle = handle
        bucketing.use(Fusion(bucket_bytes=10_000))
        bucketing.rebuild()
        assert len(bucketing.buckets) == 1
        assert [handle.waits for handle in handles] == [1] * len(handles)

    on(1, body)


class _World:
    """Rank 1 of two, to which rank 0 has said ``answer``."""

    rank, size, ranks = 1, 2, (0, 1)

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def read(self, what: str, peer: int) -> Any:
        assert (what, peer) == ("order", 0)
        return self.answer


def _hearing(answer: Any) -> Bucketing:
    """Three parameters, after the first backward."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    world: Any = _World(answer)
    bucketing = Bucketing(model, Fusion(), world)
    bucketing.publish_order()
    return bucketing


def test_the_order_of_rank_0_is_adopted_once() -> None:
    bucketing = _hearing([[2, 0], [1]])
    assert bucketing.learning
    bucketing.adopt_order()
    assert list(bucketing.ready_order) == [2, 0, 1]
    assert bucketing.stale
    assert not bucketing.learning
    bucketing._world.answer = None  # type: ignore[attr-defined]
    bucketing.adopt_order()


@pytest.mark.parametrize(
    "answer",
    [
        [[2, 0], []],
        [[2, 0, 1], [1]],
        [[2, 0, 0], []],
        [[2, 0, 3], []],
        [[2, 0, -2], []],
        [[2, 0, 1]],
        [["a", 0, 1], []],
        [2, [0, 1]],
        {},
        None,
    ],
)
def test_a_malformed_order_is_refused(answer: Any) -> None:
    bucketing = _hearing(answer)
    with pytest.raises(PeerError, match="rank 1: rank 0 sent a malformed parameter order"):
        bucketing.adopt_order()
    assert list(bucketing.ready_order) == [2, 1, 0]
