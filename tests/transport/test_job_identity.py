"""A store that belongs to another job is refused before anything else in it is read."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from wingbeat.errors import RendezvousError
from wingbeat.transport.rendezvous import check_job
from wingbeat.transport.torch_store import TorchStore

WHERE = "node1:29500 (MASTER_ADDR, MASTER_PORT)"


def joined(store: TorchStore, rank: int, name: str, size: int = 2) -> str:
    return check_job(store, rank, size, name, 0.2, WHERE)


def test_workers_with_the_same_name_form_a_job() -> None:
    store = TorchStore(dist.HashStore())
    assert [joined(store, rank, "run 7") for rank in (0, 1, 0)] == ["run 7"] * 3


def test_without_names_rank_0_draws_one_for_all() -> None:
    stores = [TorchStore(dist.HashStore()) for _ in range(2)]
    names = [[joined(store, rank, "") for rank in (0, 1, 0)] for store in stores]
    assert all(len(set(each)) == 1 for each in names)
    assert names[0] != names[1]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("a", "b", "rank 1 belongs to job 'b', but the store at node1:29500 .* to job 'a': set"),
        ("a", "", "rank 1 belongs to a job without a name, but the store at .* to job 'a': set"),
        ("", "b", "rank 1 belongs to job 'b', but the store at .* to a job without a name: set"),
    ],
)
def test_a_worker_of_another_job_is_refused_with_both_names(
    first: str, second: str, said: str
) -> None:
    store = TorchStore(dist.HashStore())
    joined(store, 0, first)
    with pytest.raises(RendezvousError, match=said):
        joined(store, 1, second)


def test_rank_0_of_another_job_is_refused_by_a_store_that_a_launcher_keeps() -> None:
    store = TorchStore(dist.HashStore())
    joined(store, 0, "a")
    with pytest.raises(RendezvousError, match="rank 0 belongs to job 'b'"):
        joined(store, 0, "b")
    assert joined(store, 1, "a") == "a"


def test_a_worker_of_a_job_of_another_size_is_refused() -> None:
    store = TorchStore(dist.HashStore())
    joined(store, 0, "", size=2)
    with pytest.raises(RendezvousError, match=r"rank 1 is one of 3 workers \(WORLD_SIZE\), but .*"):
        joined(store, 1, "", size=3)


def test_rank_0_that_publishes_nothing_is_named_with_the_timeout() -> None:
    with pytest.raises(RendezvousError, match=r"rank 1: rank 0 did not publish .* within 0\.2 s"):
        joined(TorchStore(dist.HashStore()), 1, "a")


@pytest.mark.parametrize(
    "text",
    [
        "7",
        "[",
        "[" * 100_000,
        "null",
        '["a", false]',
        '["a", 0, 2]',
        "[1, false, 2]",
        '["a", true, 0]',
        json.dumps(["a" * 1000, False, 2]),
    ],
)
def test_a_malformed_name_is_refused(text: str) -> None:
    store = TorchStore(dist.HashStore())
    store.set("job", text)
    with pytest.raises(RendezvousError, match=r"rank 1: the store at .* malformed job name"):
        joined(store, 1, "a")


def test_name_is_shown_without_control_characters() -> None:
    store = TorchStore(dist.HashStore())
    joined(store, 0, "a\nb")
    with pytest.raises(RendezvousError) as caught:
        joined(store, 1, "c")
    assert "\n" not in str(caught.value)


def test_texts_for_replicas_name_their_variables() -> None:
    def replica(store: TorchStore, size: int, name: str = "") -> str:
        return check_job(store, 1, size, name, 0.2, WHERE, replicas=True)

    store, foreign = TorchStore(dist.HashStore()), TorchStore(dist.HashStore())
    joined(store, 0, "a")
    foreign.set("job", "7")
    for own, size, name in ((store, 2, "b"), (store, 3, "a"), (foreign, 2, "a")):
        with pytest.raises(RendezvousError, match="a different WINGBEAT_JOB_ID for each") as caught:
            replica(own, size, name)
        assert "set a different MASTER_PORT" not in str(caught.value)
        assert "WORLD_SIZE" not in str(caught.value)
    with pytest.raises(RendezvousError, match=r"3 workers \(WINGBEAT_REPLICAS times the ranks"):
        replica(store, 3, "a")
