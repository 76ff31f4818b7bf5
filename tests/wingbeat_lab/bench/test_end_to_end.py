"""A whole small bench on loopback: what it measures beside the rows."""

from __future__ import annotations

import json

import pytest

from wingbeat_lab.bench import runner
from wingbeat_lab.bench.config import BenchConfig


@pytest.mark.slow
@pytest.mark.alone
def test_the_speedup_and_the_breakdown_are_measured_with_the_rows() -> None:
    config = BenchConfig(
        lab="loopback:2",
        model="paced:resnet50@0.02",
        strategies=("ddp", "dear:plan=fixed", "single"),
        iterations=2,
        rounds=1,
        warmup=2,
        breakdown=True,
    )
    outcome = runner.run(config, quiet=True)
    data = json.loads(json.dumps(outcome.report.to_json()))
    measured = data["measured"]
    assert measured["bound_s"] == max(measured["t_ff_s"], measured["t_ag_s"]) + max(
        measured["t_bp_s"], measured["t_rs_s"]
    )
    ddp, dear, single = data["runs"]
    for run in (ddp, dear):
        median = run["iteration_s"]["median"]
        assert run["fraction_of_s_max"] == pytest.approx(run["speedup"] / measured["s_max"])
        assert run["fraction_of_s_max"] == pytest.approx(measured["bound_s"] / median)
    assert list(ddp["breakdown"]) == list(single["breakdown"]) == ["whole"]
    assert list(dear["breakdown"]) == ["whole", "RS-only", "AG-only"]
    compute = config.check().model.compute_s()
    assert compute is not None
    for run in data["runs"]:
        for parts in run["breakdown"].values():
            assert parts["forward_s"] >= 0.9 * compute[0]
            assert parts["backward_s"] >= 0.9 * compute[1]
    assert ddp["breakdown"]["whole"]["all_reduce_s"] > 0
    assert dear["breakdown"]["RS-only"]["all_gather_s"] == 0
    assert dear["breakdown"]["AG-only"]["reduce_scatter_s"] == 0
    assert outcome.events == []
