"""Predictions of single strategies, and rankings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.amounts import slow_except
from wingbeat.errors import UsageError
from wingbeat.parts.strategy import Strategy
from wingbeat.prediction import Cluster, Prediction, predict, rank
from wingbeat.prediction.baselines import BASELINES
from wingbeat.prediction.predict import simulated_alone
from wingbeat.simulator import Links, Model, TimedLayer, Work, simulate
from wingbeat.strategies.presets import (
    ADPSGD,
    AllReduce,
    Auto,
    Canary,
    DeAR,
    DiLoCo,
    Geryon,
    LocalSGD,
    ParameterServer,
    Ripples,
)
from wingbeat.types import Layout, TensorSpec

LAYERS, NUMEL = 4, 250_000
COMPUTE_S = LAYERS * 0.03
LINKS = Links(bytes_per_s=117e6)


def model() -> Model:
    tensors = tuple(TensorSpec(f"{n}.weight", (500, 500), "float32", 4) for n in range(LAYERS))
    layers = tuple(TimedLayer(0.01, 0.02, (n,), True) for n in range(LAYERS))
    return Model(layers, tensors)


def cluster(hosts: int = 4, per_host: int = 1, **changes: Any) -> Cluster:
    given = {"links": LINKS, "layout": Layout.even(hosts, per_host)}
    return Cluster(**given | changes)


def predicted(strategy: Strategy, *, hosts: int = 4, per_host: int = 1) -> Prediction:
    return predict(strategy, model(), cluster(hosts, per_host))


def test_predict_lockstep_is_the_simulators_median_and_bytes() -> None:
    run = simulate(model(), AllReduce(), 4, LINKS, iterations=5)
    found = predicted(AllReduce())
    assert found.iteration_s == pytest.approx(run.median_s)
    assert found.exposed_s == pytest.approx(run.median_s - COMPUTE_S)
    assert found.bytes_per_host == pytest.approx(run.bytes_per_host)
    # A ring of four sends a sum and a copy of three quarters of 4 MB.
    assert found.bytes_per_host == pytest.approx(1.5 * 4 * LAYERS * NUMEL, rel=0.01)
    assert found.low_s < found.iteration_s < found.high_s


def test_predict_hosts_of_several_workers_send_what_one_worker_would() -> None:
    alone, shared = predicted(AllReduce(), hosts=2), predicted(AllReduce(), hosts=2, per_host=2)
    assert alone.bytes_per_host
    assert shared.bytes_per_host
    assert shared.bytes_per_host == pytest.approx(alone.bytes_per_host, rel=0.01)


def test_predict_slow_host_slows_exact_strategies_and_not_pairs() -> None:
    slow = cluster(slow={3: 3.0})
    for strategy, least, most in ((AllReduce(), 2.0, 3.1), (ADPSGD(), 1.0, 1.6)):
        base, slowed = predict(strategy, model(), cluster()), predict(strategy, model(), slow)
        assert least < slowed.iteration_s / base.iteration_s < most
    found = predict(AllReduce(), model(), slow)
    assert found.exposed_s == pytest.approx(found.iteration_s - 3.0 * COMPUTE_S)


@pytest.mark.parametrize(
    ("strategy", "convergence", "copies"),
    [
        (AllReduce(), "exact", 1),
        (DeAR(plan="fixed", shard_optimizer=True), "exact", 1),
        (AllReduce(compression="bf16"), "lossy", 1),
        (AllReduce(compression="sketch"), "lossy, with error feedback", 2),
        (Geryon(), "exact", 1),
        (Ripples(), "asynchronous", 2),
        (ADPSGD(), "asynchronous", 2),
        (LocalSGD(), "local steps", 2),
        (DiLoCo(every=4), "local steps", 4),
        (DiLoCo(every=4, compression="sketch"), "local steps", 6),
        (Canary(compression="fp32", colayers=2), "asynchronous", 1),
    ],
)
def test_predict_every_method_has_time_convergence_and_memory(
    strategy: Strategy, convergence: str, copies: int
) -> None:
    found = predicted(strategy)
    assert found.convergence == convergence
    assert found.memory_bytes == copies * 4 * LAYERS * NUMEL
    assert COMPUTE_S < found.iteration_s < 10 * COMPUTE_S


def test_predict_replicas_divided_inside_exchange_the_whole_model_once() -> None:
    found = predict(AllReduce(), model(), cluster(2, 2), inside=2)
    assert found.bytes_per_host == pytest.approx(4 * LAYERS * NUMEL, rel=0.01)
    assert found.memory_bytes == 2 * LAYERS * NUMEL


def test_predict_replicas_divided_inside_exchange_at_the_inside_rate() -> None:
    free = Work(
        chunk_s=0.0, wire_s_per_byte=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0,
        update_s_per_byte=0.0,
    )  # fmt: skip
    fast = replace(LINKS, bytes_per_s=1e15, latency_s=0.0)
    found = predict(
        AllReduce(),
        model(),
        cluster(2, 4, links=fast, local=replace(fast, bytes_per_s=1e9)),
        inside=4,
        work=free,
    )
    # Layers are gathered twice and reduced once, each time by three quarters of 4 MB.
    assert found.exposed_s == pytest.approx(3 * 0.75 * 4 * LAYERS * NUMEL / 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "inside"),
    [
        (AllReduce(), 1),
        (BASELINES["ddp"], 1),
        (LocalSGD(), 1),
        (AllReduce(), 8),
        (LocalSGD(), 8),
    ],
)
def test_predict_slower_links_inside_hosts_take_longer(strategy: Strategy, inside: int) -> None:
    usual, slow = (
        predict(strategy, model(), each, inside=inside)
        for each in (cluster(2, 8), cluster(2, 8, local=Links(bytes_per_s=5e6)))
    )
    assert slow.iteration_s > usual.iteration_s + 0.1


def test_predict_inside_with_other_hosts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"inside=3.*hosts have \[2\] processes"):
        predict(AllReduce(), model(), cluster(2, 2), inside=3)


def test_predict_canary_encryption_takes_time() -> None:
    work = Work(encrypt_s_per_byte=100e-9)
    plain, encrypted = (
        predict(
            Canary(compression="fp32", encrypted=encrypted), model(), cluster(), work=work
        ).iteration_s
        for encrypted in (False, True)
    )
    assert encrypted > 1.05 * plain


def test_predict_canary_with_several_workers_per_host_is_refused() -> None:
    with pytest.raises(UsageError, match="hosts with several workers"):
        predicted(Canary(), hosts=2, per_host=2)


@pytest.mark.parametrize("hosts", slow_except([2], [2, 6]))
@pytest.mark.parametrize(
    ("strategy", "time_off", "bytes_off"),
    [
        (AllReduce(mb=2.0), 0.012, 0.01),
        (DeAR(plan="fixed", mb=2.0), 0.012, 0.01),
        (DeAR(plan="fixed", mb=2.0, compression="bf16"), 0.012, 0.01),
        # A sketch has a table for each block, and blocks are small here.
        (DeAR(plan="fixed", mb=2.0, topology="mesh", compression="sketch"), 0.012, 0.08),
        # gloo's connections inside a host take the time of TCP too, the simulator's shared memory.
        (BASELINES["ddp"], 0.03, 0.01),
        (BASELINES["ddp+bf16"], 0.03, 0.01),
    ],
    ids=repr,
)
def test_predict_few_workers_of_a_host_represent_all(
    strategy: Strategy, time_off: float, bytes_off: float, hosts: int
) -> None:
    described = cluster(hosts, 8)
    found = predict(strategy, model(), described)
    run = simulate(model(), strategy, 8 * hosts, LINKS, layout=described.layout, iterations=2)
    assert found.iteration_s == pytest.approx(run.iterations_s[-1], rel=time_off)
    assert found.bytes_per_host == pytest.approx(run.bytes_per_host, rel=bytes_off)


UNLIKE: dict[str, dict[str, Any]] = {
    "slow host": {"slow": {1: 1.5}},
    "slow NICs": {"links": replace(LINKS, rates={2: 40e6})},
}


@pytest.mark.parametrize("changes", UNLIKE.values(), ids=UNLIKE)
@pytest.mark.parametrize(
    ("strategy", "time_off"),
    [
        pytest.param(AllReduce(mb=2.0), 0.012, marks=pytest.mark.slow),
        (DeAR(plan="fixed", mb=2.0), 0.012),
    ],
    ids=repr,
)
def test_predict_few_workers_of_unlike_hosts_represent_all(
    strategy: Strategy, time_off: float, changes: dict[str, Any]
) -> None:
    described = cluster(3, 8, **changes)
    assert simulated_alone(strategy, described) == 12
    found = predict(strategy, model(), described)
    run = simulate(
        model(),
        strategy,
        24,
        described.links,
        layout=described.layout,
        slow=described.slow_workers,
        iterations=3,
    )
    assert found.iteration_s == pytest.approx(run.iterations_s[-1], rel=time_off)
    assert found.bytes_per_host == pytest.approx(run.bytes_per_host, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "hosts", "alone"),
    [
        (DiLoCo(every=4), 4, 0),
        (LocalSGD(), 4, 0),
        (Ripples(), 4, 32),
        (AllReduce(), 4, 16),
        (AllReduce(), 5, 10),
        (AllReduce(compression="lowrank@1"), 4, 32),
    ],
    ids=repr,
)
def test_simulated_alone_with_a_slow_host_are_few_of_each_host(
    strategy: Strategy, hosts: int, alone: int
) -> None:
    assert simulated_alone(strategy, cluster(hosts, 8, slow={0: 2.0})) == alone
    assert simulated_alone(strategy, cluster(hosts, 8, slow={0: 2.0}), 8) in (0, 8 * hosts)


def test_predict_spread_of_measured_rates_widens_the_interval() -> None:
    sure, unsure = (predict(AllReduce(), model(), cluster(spread=each)) for each in (0.0, 0.1))
    assert unsure.iteration_s == sure.iteration_s
    assert unsure.low_s == pytest.approx(sure.low_s / 1.1)
    assert unsure.high_s == pytest.approx(sure.high_s * 1.1)


def test_rank_sorts_by_time_and_lists_what_it_refuses() -> None:
    named = {
        "servers": ParameterServer(encrypted=False),
        "ring": AllReduce(),
        "tried": Auto(),
        "sketch": AllReduce(compression="sketch"),
    }
    seen: list[str] = []
    found = rank(named, model(), cluster(), progress=lambda name: seen.append(name) or "")
    assert seen == ["servers", "sketch", "ring", "tried"]  # one of each kind first
    times = [each.iteration_s for each in found.predictions.values()]
    assert times == sorted(times)
    assert list(found.predictions) == ["sketch", "servers", "ring"]
    assert list(found.refused) == ["tried"]
    assert "simulate its candidates" in found.refused["tried"]
    assert found.fastest() == "sketch"
    assert found.fastest(exact=True) == "servers"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, {"pairs", "groups", "servers"}),
        ({"slow": {0: 2.0}}, {"pairs", "groups", "servers", "ring"}),
        (
            {"links": Links(bytes_per_s=117e6, rates={0: 1e6})},
            {"pairs", "groups", "servers", "ring"},
        ),
        ({"layout": Layout([0, 1, 2, 2])}, {"pairs", "groups", "servers", "ring"}),
    ],
)
def test_rank_refuses_more_workers_one_by_one_than_allowed(
    changes: dict[str, Any], refused: set[str]
) -> None:
    named = {
        "pairs": ADPSGD(),
        "groups": Ripples(),
        "servers": ParameterServer(),
        "ring": AllReduce(),
    }
    found = rank(named, model(), replace(cluster(), **changes), most=3)
    assert set(found.refused) == refused
    assert all("4 workers would be simulated one by one" in s for s in found.refused.values())
    assert not rank(named, model(), replace(cluster(), **changes), most=4).refused


def test_rank_refuses_what_progress_gives_a_reason_for() -> None:
    named = {
        "ring": AllReduce(),
        "half": DeAR(plan="fixed"),
        "sketch": AllReduce(compression="sketch"),
    }
    reasons = iter(("", "", "the time is over"))
    found = rank(named, model(), cluster(), progress=lambda _: next(reasons))
    assert set(found.predictions) == {"ring", "sketch"}
    assert found.refused == {"half": "the time is over"}


def test_rank_without_exact_candidate_has_no_fastest_exact() -> None:
    found = rank({"sketch": AllReduce(compression="sketch")}, model(), cluster())
    with pytest.raises(UsageError, match="no exact candidate"):
        found.fastest(exact=True)


def test_rank_equal_arguments_give_equal_predictions() -> None:
    named = {"pairs": ADPSGD(), "groups": Ripples(), "ring": DeAR(plan="fixed")}
    assert rank(named, model(), cluster()) == rank(named, model(), cluster())


def test_rank_allows_more_workers_of_unlike_hosts_in_the_ring_of_ddp() -> None:
    unlike, named = cluster(2, 8, slow={0: 1.5}), {"ddp": BASELINES["ddp"]}
    assert not rank(named, model(), unlike, most=4).refused
    assert "its 16 workers" in rank(named, model(), unlike, most=3).refused["ddp"]
