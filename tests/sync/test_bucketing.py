"""Buckets come and go with plans."""

from __future__ import annotations

from typing import Any

from helpers.training import net, on
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
