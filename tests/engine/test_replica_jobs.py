"""Replicas that are torch jobs of their own, under `distribute(mesh=...)`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

import pytest
import replica_job_cases as cases
import torch.distributed as dist

from helpers.pool import Pool
from wingbeat.transport.replica_jobs import serve_store

Stores: TypeAlias = tuple[list[dist.TCPStore], dist.TCPStore]
"""Those of two torch jobs, and the one of the whole job."""


@pytest.fixture(scope="module")
def job() -> Iterator[Pool]:
    """Four processes without a default group."""
    pool = Pool(4, default_group=False)
    yield pool
    pool.close()


@pytest.fixture
def stores() -> Stores:
    return [serve_store(0) for _ in range(2)], serve_store(0)


def test_exact_strategies_between_torch_jobs_have_the_weights_of_one_process(
    job: Pool, stores: Stores
) -> None:
    ports = [each.port for each in stores[0]]
    for found in job.run(cases.exact, ["allreduce", "dear"], 5, ports, stores[1].port):
        assert max(found) < 1e-12, found


REFUSED = {
    "across": "this torch job is one replica .*leave across out",
    "terminated": r"on_terminate\(\) was called in a job of several torch jobs",
    "other shapes": r"rank 0's mesh has dimensions \[\], rank 1's has \['dp_shard'\]",
}


def test_what_a_replica_cannot_do_is_refused_in_one_line(job: Pool, stores: Stores) -> None:
    ports = [each.port for each in stores[0]]
    for found in job.run(cases.refusals, ports, stores[1].port):
        assert found.keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            assert re.search(words, found[name]), found[name]
            assert "\n" not in found[name]


def test_two_replicas_of_one_number_are_refused_on_all_of_their_ranks(
    job: Pool, stores: Stores
) -> None:
    ports, same = [each.port for each in stores[0]], [{"WINGBEAT_REPLICA": "0"}] * 4
    errors = job.run(cases.joined, ports, stores[1].port, 4.0, same)
    taken = [error for error in errors if "is taken: a process of the job whose store" in error]
    missing = [error for error in errors if re.search("rank 2 published nothing", error)]
    assert len(taken) in (2, 4), errors
    assert len(taken) + len(missing) == 4, errors
    assert taken[0].startswith("replica 0 cannot join: rank ")
    assert not any("\n" in error for error in errors)


def test_ranks_of_a_torch_job_with_several_numbers_are_refused(job: Pool, stores: Stores) -> None:
    ports, turned = [each.port for each in stores[0]], [{"WINGBEAT_REPLICA": n} for n in "0101"]
    for error in job.run(cases.joined, ports, stores[1].port, 4.0, turned):
        assert "rank 0 of a torch job has WINGBEAT_REPLICA=0, and rank 1 1" in error
