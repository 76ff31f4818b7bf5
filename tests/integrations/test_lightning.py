"""Lightning's Trainer with wingbeat's strategies, against Lightning's own DDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.pool import Pool
from integrations import lightning_cases as cases

PoolOf = Callable[[int], Pool]
NOT_SHARDED = ("gan", "gan, untoggled")
"""Their second backward comes after a step that has used the gradients up; it is refused."""


@pytest.mark.parametrize("name", cases.CASES)
def test_weights_are_those_of_ddp(name: str, pool_of: PoolOf) -> None:
    kinds = [kind for kind in cases.EXACT if kind != "sharded" or name not in NOT_SHARDED]
    pool_of(2).run(cases.as_ddp, name, kinds)
