"""The ranked strategies, what they are compared with, their code, and the costs of devices."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest

import wingbeat
from helpers.profiles import dense_profile
from wingbeat.errors import UsageError
from wingbeat.prediction import Cluster, predict
from wingbeat.prediction.baselines import BASELINES, baselines_for
from wingbeat.prediction.candidates import CANDIDATES, candidates, code_of
from wingbeat.prediction.costs import work_of
from wingbeat.prediction.predict import ASYNCHRONOUS, EXACT, FEEDBACK, LOCAL_STEPS, convergence_of
from wingbeat.profiling import simulator_model
from wingbeat.simulator import Links
from wingbeat.strategies.spelling import parse
from wingbeat.types import Layout


def test_candidates_have_every_kind_of_convergence() -> None:
    kinds = {convergence_of(strategy) for strategy in candidates().values()}
    assert {EXACT, FEEDBACK, LOCAL_STEPS, ASYNCHRONOUS} <= kinds


def test_candidates_with_a_codec_are_ranked_beside_the_others() -> None:
    found = candidates(codecs=["lowrank@2"])
    assert list(found)[: len(CANDIDATES)] == list(CANDIDATES)
    assert list(found)[len(CANDIDATES) :] == [
        "allreduce:compression=lowrank@2",
        "dear:plan=fixed,compression=lowrank@2",
    ]


def test_candidates_of_the_user_replace_the_usual_ones() -> None:
    assert list(candidates(["ripples"])) == ["ripples"]


def test_candidates_with_unknown_name_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown strategy 'deer'"):
        candidates(["deer"])


@pytest.mark.parametrize(
    "text",
    [
        *CANDIDATES,
        "mgwfbp",
        "geryon",
        "dear:compression=sketch@4",
        "strategy:plan=merged,compression=sketch@4,schedule=dear",
    ],
)
def test_code_of_strategy_makes_the_strategy(text: str) -> None:
    strategy = parse(text)
    tree = ast.parse(code_of(strategy))
    given: list[Any] = []
    call = tree.body[-1]
    assert isinstance(call, ast.Assign)
    names: dict[str, Any] = {"model": None, "optimizer": None}
    real = wingbeat.distribute
    try:
        wingbeat.distribute = lambda *each: given.append(each) or (None, None)  # type: ignore
        exec(compile(tree, "code", "exec"), names)
    finally:
        wingbeat.distribute = real
    assert given == [(None, None, strategy)]


@pytest.mark.parametrize("slow", [{}, {0: 1.5}])
def test_ddp_passes_each_host_more_than_sums_inside_hosts(slow: dict[int, float]) -> None:
    model = simulator_model(dense_profile())
    cluster = Cluster(links=Links(bytes_per_s=1e8), layout=Layout.even(2, 4), slow=slow)
    flat = predict(BASELINES["ddp"], model, cluster).bytes_per_host
    inside_first = predict(parse("allreduce"), model, cluster).bytes_per_host
    # 2 * 7/8 of the gradients over eight ranks, 2 * 1/2 over two hosts.
    assert flat / inside_first == pytest.approx(1.75, rel=0.02)


def test_ddp_with_one_worker_per_host_is_an_all_reduce() -> None:
    model = simulator_model(dense_profile())
    cluster = Cluster(links=Links(bytes_per_s=1e8), layout=Layout.even(4, 1))
    ddp, ring = (predict(each, model, cluster) for each in (BASELINES["ddp"], parse("allreduce")))
    assert ddp == ring


def test_baselines_inside_replicas_are_hsdp_alone() -> None:
    assert list(baselines_for(inside=True)) == ["hsdp"]
    assert next(iter(baselines_for(inside=False))) == "ddp"


def test_work_of_profiled_optimizer_counts_it_once() -> None:
    profile = dense_profile()
    layers = (*profile.layers, replace(profile.layers[-1], name="(optimizer)", parameters=()))
    assert work_of(profile)[0].update_s_per_byte > 0
    assert work_of(replace(profile, layers=layers))[0].update_s_per_byte == 0


def test_work_of_accelerator_has_no_copies_and_says_that_codecs_are_pessimistic() -> None:
    profile = dense_profile(device="NVIDIA H100, float32")
    work, notes = work_of(profile)
    assert (work.update_s_per_byte, work.fill_s_per_byte) == (0, 0)
    assert "pessimistic" in notes[-1]
    on_cpu = work_of(replace(profile, device="AMD EPYC, 1 thread, float32"))
    assert on_cpu[0].fill_s_per_byte > 0
    assert "pessimistic" not in on_cpu[1][-1]
