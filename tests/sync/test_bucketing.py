"""What rank 0 says of the order of the gradients is checked before anybody follows it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from wingbeat.errors import PeerError
from wingbeat.sync.bucketing import Bucketing
from wingbeat.types import Fusion


class _World:
    """Rank 1 of two, to which rank 0 has said ``answer``."""

    rank, size = 1, 2

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
    bucketing.tell()
    return bucketing


def test_the_order_of_rank_0_is_taken_over_once() -> None:
    bucketing = _hearing([[2, 0], [1]])
    assert bucketing.learning
    bucketing.hear()
    assert list(bucketing.ready_order) == [2, 0, 1]
    assert bucketing.stale
    assert not bucketing.learning
    bucketing._world.answer = None  # type: ignore[attr-defined]
    bucketing.hear()


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
def test_what_is_no_order_is_refused(answer: Any) -> None:
    bucketing = _hearing(answer)
    with pytest.raises(PeerError, match="rank 1: rank 0 sent a malformed parameter order"):
        bucketing.hear()
    assert list(bucketing.ready_order) == [2, 1, 0]
