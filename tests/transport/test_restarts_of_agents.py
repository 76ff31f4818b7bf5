"""Which start of a job several agents of torchrun have made: one name for all of its ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from wingbeat.errors import RendezvousError
from wingbeat.transport.restarts import agree_on_start, has_agents
from wingbeat.transport.torch_store import Authenticator, TorchStore

SIZE = 3
KEYED = Authenticator(b"k" * 32, "starts")


@pytest.fixture(params=[None, KEYED])
def store(request: pytest.FixtureRequest) -> TorchStore:
    return TorchStore(dist.HashStore(), request.param)


def started(store: TorchStore, ranks: range = range(SIZE)) -> dict[int, str]:
    """The name that each rank of one start has."""
    names: dict[int, str] = {}

    def start(rank: int) -> None:
        names[rank] = agree_on_start(store, rank, SIZE, 20.0)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_start_has_one_name_on_all_ranks_and_another_than_earlier_ones(store: TorchStore) -> None:
    names = [started(store) for _ in range(3)]
    assert [len(each) for each in names] == [SIZE] * 3
    assert [len(set(each.values())) for each in names] == [1] * 3
    assert len({each[0] for each in names}) == 3


def test_start_whose_rank_is_late_waits_for_its_process_and_not_for_an_earlier_one(
    store: TorchStore,
) -> None:
    earlier = started(store)
    names: dict[int, str] = {}
    others = threading.Thread(target=lambda: names.update(started(store, range(SIZE - 1))))
    others.start()
    others.join(0.3)  # rank 0 invites the process of the earlier start in vain
    assert others.is_alive()
    names |= started(store, range(SIZE - 1, SIZE))
    others.join()
    assert len(set(names.values())) == 1
    assert names[0] != earlier[0]


def timed(call: Callable[[], object]) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        call()
    return str(caught.value), time.monotonic() - begin


def test_start_without_a_rank_is_refused_in_time_with_its_number(store: TorchStore) -> None:
    said, seconds = timed(lambda: agree_on_start(store, 0, 4, 0.2))
    assert "rank 1 and 2 more did not start within 0.2 s" in said
    assert seconds < 5
    said, seconds = timed(lambda: agree_on_start(store, 2, 4, 0.2))
    assert said.startswith("rank 2: rank 0 did not give the name of this start within 0.2 s")
    assert seconds < 5


def test_start_ignores_a_token_that_is_no_token() -> None:
    raw = dist.HashStore()
    raw.set("present/1", "../../x")
    with pytest.raises(RendezvousError, match="rank 1 did not start"):
        agree_on_start(TorchStore(raw), 0, 2, 0.2)
    assert not raw.check(["invited/1/../../x"])


@pytest.mark.parametrize(
    ("env", "several"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "1"}, False),
        ({"TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "2"}, True),
        ({"GROUP_WORLD_SIZE": "2"}, False),
    ],
)
def test_has_agents_is_true_for_torchrun_on_several_hosts(
    env: dict[str, str], several: bool
) -> None:
    assert has_agents(env) == several
