"""Lightning's Trainer with wingbeat's strategies, against Lightning's own DDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helpers.amounts import slow_except
from helpers.pool import Pool
from integrations import lightning_cases as cases

PoolOf = Callable[[int], Pool]
NOT_WITH = {"gan": ("sharded",), "gan, untoggled": ("sharded",), "lbfgs": ("dear", "sharded")}
"""What is refused: a second optimizer's backward after a step has used the gradients up, and LBFGS
with updates that come later."""


QUICK = (
    "clipped accumulation",
    "16-mixed",
    "unused",
    "gan",
)
"""One of each kind: of how gradients are used, of precision, of what is called when."""


@pytest.mark.parametrize("name", slow_except(QUICK, cases.CASES))
def test_weights_are_those_of_ddp(name: str, pool_of: PoolOf) -> None:
    kinds = [kind for kind in cases.EXACT if kind not in NOT_WITH.get(name, ())]
    pool_of(2).run(cases.as_ddp, name, kinds, deadline=150.0)


@pytest.mark.slow
def test_a_step_gets_its_closure_where_nobody_is_ahead(pool_of: PoolOf) -> None:
    pool_of(2).run(cases.as_ddp, "lbfgs", list(cases.BOUND), deadline=150.0)
