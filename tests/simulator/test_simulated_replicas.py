"""Replicas of several processes under FSDP2 in virtual time: between hosts, and inside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wingbeat.errors import UsageError
from wingbeat.simulator import Links, Model, Run, TimedLayer, Traffic, Work, simulate
from wingbeat.types import Layout, TensorSpec
from wingbeat_lab import baselines, paced

GBIT = Links(bytes_per_s=125e6, latency_s=0.0)
FAST = Links(bytes_per_s=1e15, latency_s=0.0)
FREE = Work(
    chunk_s=0.0, wire_s_per_byte=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0,
    update_s_per_byte=0.0, message_s=0.0, message_s_per_byte=0.0, codecs=0.0,
)  # fmt: skip
NBYTES = 4 * 2048 * 2048
MODEL = Model((TimedLayer(0.0, 0.0, (0,)),), (TensorSpec("t", (2048, 2048), "float32", 4),))
STRATEGIES = [
    "allreduce",
    "dear:plan=fixed",
    "allreduce:compression=bf16",
    "allreduce:compression=sketch:auto_disable=false",
    "ako",
]


def run(
    strategy: str, inside: int, model: Model = MODEL, replicas: int = 2, **options: object
) -> Run:
    given = {"links": GBIT, "work": FREE, "iterations": 3, "local": FAST} | options
    made = baselines.parse(strategy)
    return simulate(model, made, replicas, inside=inside, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("replicas", "inside"), [(2, 2), (2, 4), (3, 2)])
def test_shards_share_the_interface_of_their_host(
    strategy: str, replicas: int, inside: int
) -> None:
    """As many bytes and as much time as of replicas of one process."""
    found = []
    for processes in (1, inside):
        traffic = Traffic()
        made = run(strategy, processes, replicas=replicas, traffic=traffic)
        found.append((traffic.sent[0], made.median_s))
    assert found[0][0] > 0.1 * NBYTES
    assert found[1] == pytest.approx(found[0], rel=0.05)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "geryon:pull=start"])
def test_one_replica_stands_for_all(strategy: str) -> None:
    model = paced.simulator_model(paced.parse("paced:resnet50@0.02"))
    options: dict = {"model": model, "work": Work(), "iterations": 2, "replicas": 3}
    alone, all_of_them = (run(strategy, 2, slow=slow, **options) for slow in ({}, {0: 1.0}))
    assert alone.iterations_s == pytest.approx(all_of_them.iterations_s, rel=1e-4)
    served = strategy.startswith("geryon")
    assert {m[1] for m in alone.trace} == set(range(6 if served else 2))
    assert {m[1] for m in all_of_them.trace} == set(range(6))


@pytest.mark.parametrize("inside", [2, 4])
def test_layers_are_gathered_twice_and_reduced_once_inside(inside: int) -> None:
    local = Links(bytes_per_s=1e9, latency_s=0.0)
    made = run("allreduce", inside, links=FAST, local=local)
    share = (inside - 1) / inside
    assert made.median_s == pytest.approx(3 * share * NBYTES / 1e9, rel=0.01)
    alone = run("allreduce", inside, replicas=1, links=FAST, local=local)
    assert alone.median_s == pytest.approx(made.median_s, rel=0.01)


def test_chunks_inside_a_host_have_a_processor_time_of_their_own() -> None:
    seconds = {
        work: run("allreduce", 2, replicas=1, links=FAST, work=work).median_s
        for work in (FREE, replace(FREE, chunk_s=1e-3), replace(FREE, local_chunk_s=1e-3))
    }
    free, usual, own = seconds.values()
    assert free == pytest.approx(0.0, abs=1e-6)
    assert usual == own > 0.05
    neither = run(
        "allreduce", 2, replicas=1, links=FAST, work=replace(FREE, chunk_s=1e-3, local_chunk_s=0.0)
    )
    assert neither.median_s == free


def test_exchanges_inside_take_processor_time_which_one_machine_shares() -> None:
    work = replace(FREE, inside_s=1e-3, inside_s_per_byte=1e-9)
    options: dict = {"links": FAST, "work": work, "cores": 1}
    once = 3 * (1e-3 + NBYTES * 1e-9)
    for inside in (2, 4):
        # The processes of a replica share its processor.
        made = run("allreduce", inside, **options)
        assert made.median_s == pytest.approx(inside * once, rel=0.05)
        shared = run("allreduce", inside, one_machine=True, **options)
        assert shared.median_s == pytest.approx(2 * inside * once, rel=0.05)


@pytest.mark.parametrize("inside", [1, 2, 4])
def test_servers_of_all_columns_share_the_interfaces(inside: int) -> None:
    """Each of two hosts pushes and serves a half of the model, and answers with a half."""
    traffic = Traffic()
    made = run("geryon:pull=ready,encrypted=false", inside, traffic=traffic)
    assert sorted(traffic.sent) == [0, 1]
    for sent in traffic.sent.values():
        assert sent == pytest.approx(3 * NBYTES, rel=0.02)
    assert made.median_s >= NBYTES / GBIT.bytes_per_s
    assert made.median_s == pytest.approx(NBYTES / GBIT.bytes_per_s, rel=0.25)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_slow_process_holds_up_its_replica_and_so_all(rank: int) -> None:
    model = paced.simulator_model(paced.parse("paced:resnet50@0.02"))
    options: dict = {"model": model, "links": FAST}
    usual, slowed = (
        run("dear:plan=fixed", 2, slow=s, **options).median_s for s in ({}, {rank: 2.0})
    )
    assert slowed == pytest.approx(2 * usual, rel=0.02)


def test_replicas_without_a_host_of_their_own_are_refused() -> None:
    with pytest.raises(UsageError, match="inside=0"):
        run("allreduce", 0)
    with pytest.raises(UsageError, match="each replica has a host"):
        run("allreduce", 2, layout=Layout.even(1, 2))
