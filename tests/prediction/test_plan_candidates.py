"""The ranked strategies, what they are compared with, their code, and the costs of devices."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_code_cases
import pytest

import wingbeat
from helpers.pool import Pool
from helpers.profiles import dense_profile
from wingbeat.errors import UsageError
from wingbeat.prediction import Cluster, predict
from wingbeat.prediction.baselines import BASELINES, baselines_for
from wingbeat.prediction.candidates import CANDIDATES, candidates, code_of
from wingbeat.prediction.costs import of_replica, work_of
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


@pytest.fixture(scope="module")
def job() -> Iterator[Pool]:
    """Four processes, two replicas of two."""
    pool = Pool(4, default_group=False)
    yield pool
    pool.close()


@pytest.mark.parametrize("text", ["dear:plan=fixed", "diloco:every=2", "strategy:plan=merged"])
def test_code_of_strategy_in_replicas_trains_with_it(job: Pool, text: str) -> None:
    strategy = parse(text)
    found = job.run(plan_code_cases.train_by, code_of(strategy, inside=2))
    for shown, divided, moved in found:
        assert shown == repr(strategy)
        assert divided == 2
        assert moved > 0
    assert found[0][2] == found[2][2]  # the same shard in the other replica


def test_code_of_strategy_on_gpus_begins_as_the_page_of_fsdp2_does() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/fsdp2.md").read_text(encoding="utf-8")
    lines = code_of(parse("dear"), inside=8, device="cuda").splitlines()
    begin = lines.index("world = wingbeat.init()")
    assert len(lines[begin - 2 : begin]) == 2
    for line in lines[begin - 2 : begin]:
        assert f"    {line}\n" in page
    assert lines[0] == "import os"
    assert 'mesh = init_device_mesh("cuda", (world.size // 8, 8), mesh_dim_' in lines[begin + 1]


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


def test_optimizer_of_a_replica_is_divided_among_its_processes() -> None:
    profile = dense_profile()
    optimizer = replace(profile.layers[-1], name="(optimizer)", parameters=(), backward_ms=0.0)
    whole = replace(profile, layers=(*profile.layers, optimizer))
    assert of_replica(whole, 1) == whole
    *others, divided = of_replica(whole, 8).layers
    assert tuple(others) == profile.layers
    assert divided.forward_ms == optimizer.forward_ms / 8


def test_work_of_accelerator_has_no_copies_and_says_that_codecs_are_pessimistic() -> None:
    profile = dense_profile(device="NVIDIA H100, float32")
    work, notes = work_of(profile)
    assert (work.update_s_per_byte, work.fill_s_per_byte) == (0, 0)
    assert "pessimistic" in notes[-1]
    on_cpu = work_of(replace(profile, device="AMD EPYC, 1 thread, float32"))
    assert on_cpu[0].fill_s_per_byte > 0
    assert "pessimistic" not in on_cpu[1][-1]
