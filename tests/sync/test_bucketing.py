"""Buckets come and go with plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.training import net, on
from wingbeat.errors import PeerError
from wingbeat.sync.bucketing import Bucketing
from wingbeat.types import Fusion


class _OnItsWay:
    """A collective that the links have not finished."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_buckets_are_let_go_when_the_links_are_done_with_them() -> None:
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


@pytest.mark.parametrize(
    "order",
    [
        None,
        7,
        [],
        [list(range(9))],
        [list(range(8)), []],
        [list(range(10)), []],
        [[0, 0, 2, 3, 4, 5, 6, 7, 8], []],
        [list(range(9)), [8]],
        [["first", *range(1, 9)], []],
    ],
)
def test_an_order_that_is_none_is_refused(order: Any) -> None:
    """Each parameter comes once in it."""
    world: Any = SimpleNamespace(rank=1, size=2, read=lambda _what, _rank: order)
    bucketing = Bucketing(net(), Fusion(), world)
    assert len(bucketing.slots) == 9
    bucketing.tell()
    with pytest.raises(PeerError, match="rank 1: rank 0 sent a malformed parameter order"):
        bucketing.hear()
    assert not bucketing.stale
