"""Comparisons of workers that must be equal, while the store is down and after it is back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.interrupted import InterruptedStore
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.consistency import ConsistencyCheck
from wingbeat.transport.loopback import Switchboard


def check(store: Switchboard, rank: int, value: float) -> ConsistencyCheck:
    weight = torch.nn.Parameter(torch.full((3,), value))
    training = SimpleNamespace(
        optimizer=SimpleNamespace(state={}),
        bucketing=SimpleNamespace(slots=[SimpleNamespace(name="weight", param=weight)]),
        collectives=SimpleNamespace(
            world=SimpleNamespace(
                store=store, rank=rank, me=f"rank {rank}", name="rank {}".format, timeout=5.0
            )
        ),
    )
    return ConsistencyCheck(training, SimpleNamespace(made=2, room="alike", members=[rank]))


def test_comparison_while_the_store_is_down_fails_in_one_line_and_succeeds_again_later() -> None:
    store = InterruptedStore()
    one = check(store, 0, 1.0)
    store.down = True
    with pytest.raises(PeerError, match=r"rank 0: the rendezvous store does not answer \(.*again"):
        one.different()
    store.down = False
    assert one.different() is None
