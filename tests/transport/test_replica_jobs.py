"""Jobs of several torch jobs: settings, the store, and what the ranks of a replica agree on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport import rendezvous, replica_jobs
from wingbeat.transport.failures import LivenessListener
from wingbeat.transport.rendezvous import claim_rank
from wingbeat.transport.replica_jobs import Claim, Former, ReplicaSettings, TorchJob, settings_of
from wingbeat.transport.served_store import StoreServer
from wingbeat.transport.torch_store import TorchStore

ENV = {
    "WINGBEAT_REPLICA": "1",
    "WINGBEAT_REPLICAS": "3",
    "WINGBEAT_STORE": "node1:29400",
}
SETTINGS = ReplicaSettings(1, 3, "node1", 29400)
JOB = TorchJob(2, 2, "life")


# -- settings -----------------------------------------------------------------------------


def test_variables_name_a_replica_and_the_store() -> None:
    assert settings_of(ENV) == SETTINGS
    assert settings_of({}) is None
    assert settings_of({**ENV, "WINGBEAT_STORE": "[fd00::1]:80"}) == SETTINGS._replace(
        host="fd00::1", port=80
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"WINGBEAT_REPLICAS": ""}, "WINGBEAT_REPLICA, WINGBEAT_STORE set and WINGBEAT_REPLICAS n"),
        ({"WINGBEAT_STORE": ""}, "WINGBEAT_STORE not: set all of"),
        ({"WINGBEAT_REPLICA": "3"}, "WINGBEAT_REPLICA=3: with WINGBEAT_REPLICAS=3, .* 0 to 2"),
        ({"WINGBEAT_REPLICA": "-1"}, "WINGBEAT_REPLICA='-1' .* whole number"),
        ({"WINGBEAT_REPLICAS": "many"}, "WINGBEAT_REPLICAS='many' .* whole number"),
        ({"WINGBEAT_REPLICAS": "0"}, "WINGBEAT_REPLICAS=0: allowed are 1 to"),
        ({"WINGBEAT_STORE": "node1"}, "WINGBEAT_STORE='node1': set host and port"),
        ({"WINGBEAT_STORE": ":29400"}, "WINGBEAT_STORE=':29400': set host and port"),
        ({"WINGBEAT_STORE": "node1:65536"}, "WINGBEAT_STORE='node1:65536': set host and port"),
    ],
)
def test_incomplete_or_invalid_variables_are_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings_of(ENV | changed)


def test_ranks_of_one_torch_job_must_be_one_replica() -> None:
    replica_jobs.refuse_unequal([[1, 3, "node1", 29400]] * 2)
    with pytest.raises(UsageError, match=r"rank 0 .* WINGBEAT_REPLICA=0, and rank 1 1: the ranks"):
        replica_jobs.refuse_unequal([[0, 3, "node1", 29400], [1, 3, "node1", 29400]])
    with pytest.raises(UsageError, match=r"WINGBEAT_STORE=29400, and rank 1 29401"):
        replica_jobs.refuse_unequal([[0, 3, "node1", 29400], [0, 3, "node1", 29401]])


# -- counts -------------------------------------------------------------------------------


def test_replicas_of_other_sizes_or_numbers_are_refused_with_both_values() -> None:
    store = TorchStore(dist.HashStore())
    replica_jobs.check_counts(store, SETTINGS, 2)
    replica_jobs.check_counts(store, SETTINGS._replace(number=0), 2)
    with pytest.raises(UsageError, match=r"replica 1 has 4 ranks .* has replicas of 2"):
        replica_jobs.check_counts(store, SETTINGS, 4)
    with pytest.raises(UsageError, match=r"WINGBEAT_REPLICAS=2, but .* has 3 replicas"):
        replica_jobs.check_counts(store, SETTINGS._replace(replicas=2), 2)


@pytest.mark.parametrize("text", ["[", "7", "[0, 2]", '["a", 2]'])
def test_malformed_counts_are_refused(text: str) -> None:
    store = TorchStore(dist.HashStore())
    store.set("replicas", text)
    with pytest.raises(RendezvousError, match=r"replica 1: .*node1:29400 .* malformed number of"):
        replica_jobs.check_counts(store, SETTINGS, 2)


# -- agreement ----------------------------------------------------------------------------


def test_replica_returns_as_a_whole_or_not_at_all() -> None:
    new, claimed, connected = (Claim(each) for each in Former)
    assert replica_jobs.agree(SETTINGS, JOB, [new, new]) is False
    assert replica_jobs.agree(SETTINGS, JOB, [connected, connected]) is True
    for claims, rank in (
        ([new, claimed], 2),
        ([claimed, claimed], 2),
        ([connected, claimed], 3),
        ([connected, new], 3),
    ):
        with pytest.raises(RendezvousError, match=f"before the job .* connected, rank {rank}'s"):
            replica_jobs.agree(SETTINGS, JOB, claims)


def test_all_ranks_fail_with_the_error_of_the_first_that_could_not_claim_its_number() -> None:
    claims = [Claim(Former.NONE), Claim(Former.NONE, "rank 3 is taken\n")]
    with pytest.raises(RendezvousError, match="replica 1 cannot join: rank 3 is taken") as error:
        replica_jobs.agree(SETTINGS, JOB, claims)
    assert "\n" not in str(error.value)


def test_former_process_counts_as_connected_once_it_has_said_so() -> None:
    store = TorchStore(dist.HashStore())
    assert replica_jobs.former_of(store, 2, False) is Former.NONE
    assert replica_jobs.former_of(store, 2, True) is Former.CLAIMED
    replica_jobs.publish_joined(store, 2, "place")
    assert replica_jobs.former_of(store, 2, True) is Former.CONNECTED
    assert replica_jobs.former_of(store, 3, True) is Former.CLAIMED


@pytest.fixture
def other() -> Iterator[LivenessListener]:
    """A process of another replica."""
    one = LivenessListener("127.0.0.1")
    yield one
    one.close()


def test_replica_rejoins_only_beside_a_running_process_that_is_connected(
    other: LivenessListener,
) -> None:
    store, place = TorchStore(dist.HashStore()), other.address.to_text()
    for rank in (2, 3):  # its own processes do not count
        store.set(f"here/{rank}", place)
        replica_jobs.publish_joined(store, rank, place)
    store.set("here/5", place)
    alone = "replica 1 cannot rejoin: no process of another replica .* runs any more"
    with pytest.raises(RendezvousError, match=alone):
        replica_jobs.require_others(store, SETTINGS, JOB, 3)
    replica_jobs.publish_joined(store, 5, json.dumps("its former process"))
    with pytest.raises(RendezvousError, match=alone):
        replica_jobs.require_others(store, SETTINGS, JOB, 3)
    replica_jobs.publish_joined(store, 5, place)
    replica_jobs.require_others(store, SETTINGS, JOB, 3)
    other.close()
    with pytest.raises(RendezvousError, match=alone):
        replica_jobs.require_others(store, SETTINGS, JOB, 3)


# -- the store ----------------------------------------------------------------------------


def test_port_in_use_is_refused_in_one_line() -> None:
    served = StoreServer(0)
    with pytest.raises(UsageError, match=f"--port {served.port}: another program uses this port"):
        StoreServer(served.port)
    served.close()


def test_missing_store_is_refused_with_the_command_to_start_it() -> None:
    served = StoreServer(0)
    here = ReplicaSettings(0, 2, "127.0.0.1", served.port)
    assert replica_jobs.reach_store(here, 0, 5.0, None).check(["nothing"]) is False
    served.close()
    words = rf"rank 1 did not reach the store at 127.0.0.1:{here.port} \(WINGBEAT_STORE\) after .*"
    with pytest.raises(RendezvousError, match=words + "`wingbeat store --port"):
        replica_jobs.reach_store(here, 1, 0.5, None)


def test_store_verb_serves_clients_with_its_key_until_it_is_terminated() -> None:
    key = "a key of a job, long enough"
    process = subprocess.Popen(
        [sys.executable, "-m", "wingbeat.cli.main", "store", "--port", "0"],
        env={**os.environ, "WINGBEAT_JOB_KEY": key},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.removeprefix("wingbeat store: serving at port "))
        here = ReplicaSettings(0, 2, "127.0.0.1", port)
        with pytest.raises(UsageError, match="has another job key"):
            replica_jobs.reach_store(here, 0, 10.0, None)
        store = replica_jobs.reach_store(here, 0, 10.0, key.encode())
        store.set("key", "value")
        assert store.compare_set("key", "", "other") == b"value"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_claim_of_a_taken_rank_ends_before_other_ranks_stop_waiting_for_it() -> None:
    store = TorchStore(dist.HashStore())
    holder = LivenessListener("127.0.0.1")
    timeout, claims, begun = 3.0, [], time.monotonic()

    def exchange(_: str, own: Claim, __: type) -> list[Claim]:
        claims.append(own)
        return [own, Claim(Former.NONE)]

    world: Any = SimpleNamespace(rank=2, timeout=timeout, store=store)
    inside: Any = SimpleNamespace(exchange=exchange)
    try:
        claim_rank(store, 2, holder.address, 1.0, "")
        with pytest.raises(RendezvousError, match="replica 1 cannot join: rank 2 is taken"):
            rendezvous._claim_in_replica(world, SETTINGS._replace(host="127.0.0.1"), JOB, inside)
        assert time.monotonic() - begun < 0.8 * timeout
    finally:
        holder.close()
    assert "rank 2 is taken" in claims[0].error
