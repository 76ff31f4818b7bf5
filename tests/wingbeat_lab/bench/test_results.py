"""From stamps to figures, on stamps whose figures are known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from wingbeat_lab.bench import bound, demo, results, table
from wingbeat_lab.bench.config import LOSSES, BenchConfig, Checked
from wingbeat_lab.bench.measure import Measured, Quantiles
from wingbeat_lab.bench.results import Block, Deciding, Report, Run, TimeToLoss
from wingbeat_lab.bench.table import NOTES
from wingbeat_lab.lab.cross import Sample

FAST_AND_SLOW = [
    [[0.0, 1.0, 2.0], [0.5, 2.5, 4.5]],
    [[10.0, 12.0], [10.5, 13.5]],
]
"""Two blocks of two workers, of two iterations and of one."""


def test_each_worker_has_its_own_iterations() -> None:
    samples = results.samples_by_rank_s(FAST_AND_SLOW)
    assert samples == [[1.0, 1.0, 2.0], [2.0, 2.0, 3.0]]
    made = results.rates(samples)
    assert made.by_rank == pytest.approx([3 / 4, 3 / 7])
    assert made.total == pytest.approx(3 / 4 + 3 / 7)


def test_cpu_seconds_are_added_by_role() -> None:
    cpu = [{"worker": [0.4, 0.2], "server": [1.0]}, {"worker": [0.2, 0.1], "server": [0.5]}]
    assert results.cpu_s_per_iteration(cpu, 3) == {
        "server": pytest.approx([0.5]),
        "worker": pytest.approx([0.2, 0.1]),
    }
    # From the first worker's begin to the last one's end: 4.5 s and 3.5 s.
    assert results.cores_share(FAST_AND_SLOW, cpu, 2) == pytest.approx(2.4 / 16)
    assert results.cores_share(FAST_AND_SLOW, cpu, 1) == pytest.approx(2.4 / 8)


def test_a_role_that_took_time_in_one_block_alone_counts_there() -> None:
    blocks = [{"worker": [1.0, 2.0]}, {"worker": [1.0, 2.0], "server": [0.0, 0.5]}]
    found = results.cpu_s_per_iteration(blocks, 2)
    assert found == {"server": [0.0, 0.25], "worker": [1.0, 2.0]}


def curve(seconds: float, *losses: float) -> list[tuple[float, float]]:
    return [(seconds, loss) for loss in losses]


HIGH, LOW = [4.0] * LOSSES, [1.0] * LOSSES


def test_the_mean_of_the_last_losses_counts() -> None:
    own = curve(0.5, *HIGH, *LOW)
    # Below 2.5 once more than half of the last ones are low.
    assert results.seconds_to(2.5, [own]) == 0.5 * (LOSSES + LOSSES // 2 + 1)
    assert results.seconds_to(1.0, [own]) is None
    assert results.seconds_to(9.0, [own]) == 0.5 * LOSSES
    assert results.seconds_to(9.0, [own[: LOSSES - 1]]) is None


def test_of_all_workers_and_until_the_last_of_them() -> None:
    low, high = curve(1.0, *LOW), curve(3.0, *HIGH)
    assert results.seconds_to(2.6, [low, high]) == 3.0 * LOSSES
    assert results.seconds_to(2.4, [low, high]) is None


def test_steps_count_as_they_come_where_workers_are_not_in_lockstep() -> None:
    fast, slow = curve(1.0, *HIGH, *LOW, *LOW), curve(4.0, *HIGH[:5])
    # Of the last 20 steps the slow one made 4; 11 are low when the fast one has made its 21st.
    assert results.seconds_to(2.5, [fast, slow]) == 21.0
    assert results.seconds_to(2.5, [slow, fast]) == 21.0
    assert results.seconds_to(0.5, [fast, slow]) is None


def test_rounds_have_a_median_if_all_have_reached_it() -> None:
    fast, slow, never = ([curve(s, *losses)] for s, losses in ((1, LOW), (3, LOW), (1, HIGH)))
    times = [1.0 * LOSSES, 3.0 * LOSSES]
    assert results.time_to_loss(2.0, [fast, slow]) == TimeToLoss(2.0, 2.0 * LOSSES, times)
    assert results.time_to_loss(2.0, [fast, never]) == TimeToLoss(2.0, None, [times[0], None])


FIELDS = {
    "strategy",
    "iteration_s",
    "typical_s",
    "ratio",
    "bytes_per_iteration",
    "ratio_to_best_ddp",
    "samples_by_rank_s",
    "iterations_per_s",
    "cpu_s_per_iteration",
    "cores_share",
    "limited_by_cores",
    "deciding",
    "time_to_loss",
    "class_bytes_per_iteration",
    "exposed_s",
    "bound_s",
    "fraction_of_bound",
    "speedup",
    "bound_measured_s",
    "fraction_of_s_max",
    "final_loss",
}


def checked(model: str = "paced:resnet50", lab: str = "star:2@1gbit", **more: Any) -> Checked:
    rows = more.pop("strategies", ("ddp", "dear"))
    return BenchConfig(
        lab=lab, model=model, strategies=rows, iterations=2, rounds=1, **more
    ).check()


def block(row: int, seconds: float, sent: float = 100.0, **more: Any) -> Block:
    """Two workers, the second always 1 s behind, two iterations of ``seconds``."""
    first = [0.0, seconds, 2 * seconds]
    stamps = [first, [at + 1.0 for at in first]]
    cpu = more.pop("cpu", 0.1)
    return Block(row, stamps, [sent, sent + 50.0], {"worker": [cpu, 2 * cpu]}, 0.5, **more)


def runs(asked: Checked, blocks: list[Block], *more: Any, **options: Any) -> list[Run]:
    return results.runs(asked, blocks, *more, cores=2, **options)


def test_an_iteration_lasts_from_the_last_start_to_the_last_start() -> None:
    # The second worker is late for the second iteration, and the first for the third.
    uneven = Block(0, [[0.0, 1.0, 4.5], [0.1, 2.0, 3.0]], [0.0, 0.0], {}, 0.0)
    assert uneven.iterations_s() == pytest.approx([1.9, 2.5])


def test_quantiles_lie_between_neighbours() -> None:
    assert Quantiles.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Quantiles(3.0, 1.4, 4.6)
    assert Quantiles.of([7.0]) == Quantiles(7.0, 7.0, 7.0)


def test_a_run_says_whether_it_is_exact() -> None:
    rows = ("ddp", "dear", "ddp+fp16", "dear:compression=bf16", "strategy:compression=sketch")
    made = runs(checked(strategies=rows), [block(i, 2.0) for i in range(5)])
    assert [run.exact for run in made] == [True, True, False, False, False]


def test_run_figures_follow_from_its_blocks() -> None:
    asked = checked()
    ddp, dear = runs(asked, [block(0, 2.0), block(1, 1.5)])
    compute = sum(asked.model.compute_s() or ())
    assert (ddp.ratio, dear.ratio) == (1.0, 0.75)
    assert ddp.iteration_s.median == 2.0
    assert ddp.bytes_per_iteration == 125.0
    assert dear.exposed_s == pytest.approx(1.5 - compute)
    layers = asked.model.layers(asked.rows[1])
    assert layers is not None
    floor = bound.floor("halves", layers, 0.5 / 125e6)
    assert dear.bound_s == floor
    assert dear.fraction_of_bound == pytest.approx((floor or 0) / 1.5)
    assert dear.bound_formula == bound.BOUNDS["halves"].formula
    assert dear.final_loss == 0.5


def test_a_run_has_the_first_plan_that_there_was() -> None:
    plans: list[dict[str, Any] | None] = [None, {"buckets": 2}, {"buckets": 3}]
    blocks = [block(0, 2.0), *(block(1, 1.5, merge=plan) for plan in plans)]
    ddp, dear = runs(checked(), blocks)
    assert (ddp.merge, dear.merge) == (None, {"buckets": 2})


def test_bytes_by_class_are_a_worker_s() -> None:
    by_class = [{"ef": 10.0, "be": 90.0}, {"ef": 30.0, "be": 110.0}]
    ddp, dear = runs(checked(), [block(0, 2.0, sent_by_class=by_class), block(1, 2.0)])
    assert ddp.class_bytes_per_iteration == {"ef": 20.0, "be": 100.0}
    assert dear.class_bytes_per_iteration == {}


def test_how_often_a_bound_has_acted_is_added_up_over_rounds_and_told() -> None:
    each = [{"dropped": 1, "pulled": 0}, {"dropped": 2, "pulled": 1}]
    made = report()
    blocks = [block(0, 2.0), block(1, 2.0, fired_by_rank=each), block(1, 2.0, fired_by_rank=each)]
    ddp, canary = runs(checked(strategies=("ddp", "canary")), blocks)
    assert ddp.fired_by_rank is None
    assert canary.fired_by_rank == [{"dropped": 2, "pulled": 0}, {"dropped": 4, "pulled": 2}]
    shown = table.render(replace(made, runs=[ddp, canary])).caption
    said = "canary: the staleness bound dropped 6 iterations of 2 workers; parameters pulled: 2"
    assert said in str(shown)


def test_run_exposed_time_is_never_negative() -> None:
    ddp, _ = runs(checked(), [block(0, 0.01), block(1, 0.01)])
    assert ddp.exposed_s == 0.0


def test_workers_that_share_a_host_share_its_counters() -> None:
    ddp, _ = runs(checked(lab="star:1@1gbit", per_host=2), [block(0, 2.0), block(1, 2.0)])
    assert ddp.bytes_per_iteration == 62.5
    ddp, _ = runs(checked(lab="loopback:2"), [block(0, 2.0), block(1, 2.0)])
    assert ddp.bytes_per_iteration == 62.5


def test_a_real_model_has_no_bound_and_is_exposed_against_training_alone() -> None:
    rows = ("ddp", "single")
    ddp, _ = runs(checked("digits", strategies=rows), [block(0, 2.0), block(1, 1.5)])
    assert ddp.bound_s is None
    assert ddp.bound_formula.startswith("none: digits")
    assert ddp.exposed_s == 0.5
    ddp, _ = runs(checked("digits"), [block(0, 2.0), block(1, 1.5)])
    assert ddp.exposed_s is None


def test_run_on_unshaped_links_has_no_bound() -> None:
    ddp, _ = runs(checked(lab="loopback:2"), [block(0, 2.0), block(1, 2.0)])
    assert ddp.bound_s is None
    assert "no stated rate" in ddp.bound_formula


def alone() -> Measured:
    """Two workers: forward 0.2 s, backward 0.4 s, each half of the exchange 0.5 s."""
    return Measured(2, 400, 100, 0.2, 0.4, 0.5, 0.5, 1.0, 1.2, {}, {})


def test_the_speedup_is_compared_with_the_measured_bound() -> None:
    asked = checked(strategies=("ddp", "dear", "single"))
    blocks = [block(0, 2.0), block(1, 1.25), block(2, 0.6)]
    ddp, dear, single = runs(asked, blocks, alone())
    assert (ddp.speedup, dear.speedup) == pytest.approx((0.6, 0.96))
    assert (ddp.fraction_of_s_max, dear.fraction_of_s_max) == pytest.approx((0.5, 0.8))
    assert dear.bound_measured_s == ddp.bound_measured_s == 1.0
    # What exchanges nothing has a speed-up, but no bound by the links.
    assert single.speedup == pytest.approx(2.0)
    assert single.bound_measured_s is single.fraction_of_s_max is None


def test_without_measuring_there_is_no_speedup() -> None:
    ddp, _ = runs(checked(), [block(0, 2.0), block(1, 1.25)])
    assert ddp.speedup is ddp.bound_measured_s is ddp.fraction_of_s_max is None


def report(model: str = "paced:resnet50") -> Report:
    asked = checked(model)
    accuracy = 0.97 if model == "digits" else None
    blocks = [block(0, 2.0, accuracy=accuracy), block(1, 1.5, accuracy=accuracy)]
    return Report(
        lab=str(asked.lab),
        model=asked.model.name,
        machine={"cores": 2},
        runs=runs(asked, blocks, alone()),
        asked_lab=str(asked.asked),
        workers=asked.workers,
        config={},
        command="wingbeat bench",
        date="2025-01-01T00:00:00+00:00",
        versions={},
        compute_s=None,
        notes=NOTES,
        measured=alone(),
    )


def test_the_json_has_the_fields_it_promises() -> None:
    data = json.loads(json.dumps(report().to_json()))
    assert list(data)[:4] == ["lab", "model", "machine", "runs"]
    for run in data["runs"]:
        assert set(run) >= FIELDS
        assert set(run["iteration_s"]) == {"median", "p10", "p90"}
    assert set(data["notes"]) >= FIELDS - {"strategy"}


def test_a_table_row_holds_the_figures() -> None:
    _, dear = report().runs
    cells = table.cells(dear)
    assert cells[:5] == ["dear", "1500", "1500 .. 1500", "0.750", "0.750"]
    assert cells[-2] == f"{1.0 / 1.5:.3f}"
    made = table.render(report())
    assert len(cells) == len(made.columns)
    assert "S_max 1.20 of 2; each alone, in ms: forward 200, backward 400" in str(made.caption)


def test_the_table_says_when_others_had_the_processors() -> None:
    assert "other machines" not in str(table.render(report()).caption)
    quiet = replace(report(), machine={"cores": 2, "stolen_share": 0.029})
    assert "other machines" not in str(table.render(quiet).caption)
    spoiled = replace(report(), machine={"cores": 2, "stolen_share": 0.15})
    assert "had 15% of the processors' time meanwhile" in str(table.render(spoiled).caption)
    assert "had 15% of" in str(demo.render(demo.printed(quiet, spoiled)).caption)
    busy = replace(report(), machine={"cores": 2, "others_share": 0.4})
    assert "other processes on this machine had 40%" in str(table.render(busy).caption)
    assert "other processes on this machine had 40%" in str(demo.printed(quiet, busy).notes)


def test_without_lockstep_the_mean_counts_and_not_the_median() -> None:
    rows = ("ddp", "canary")
    bursts = Block(
        1, [[0.0, 9.0, 9.0, 9.0], [0.0, 9.0, 9.0, 9.0]], [1.0, 1.0], {"worker": [1.0, 1.0]}, 0.5
    )
    first, late = runs(checked(strategies=rows), [block(0, 2.0), bursts])
    assert (first.typical_s, first.ratio) == (2.0, 1.0)
    assert late.iteration_s.median == 0.0
    assert (late.typical_s, late.ratio) == (3.0, 1.5)


def test_results_table_shows_a_dash_for_a_missing_figure() -> None:
    assert table.milliseconds(None) == table.MISSING
    assert table.milliseconds(0.01234) == "12.3"
    assert table.megabytes(434_000) == "0.434"
    assert table.megabytes(153.4e6) == "153.4"


def test_the_demos_table_says_which_row_is_which() -> None:
    made = demo.render(demo.printed(report("digits"), report()))
    columns = [list(column.cells) for column in made.columns]
    assert columns[0] == ["digits (real)", "", "resnet50 (paced)", ""]
    assert columns[-1] == ["97.0%", "97.0%", table.MISSING, table.MISSING]


def test_the_demo_runs_at_one_gigabit() -> None:
    plan = demo.plan(None)
    assert str(plan.digits.check().lab) == "star:4@1gbit"
    assert str(plan.paced.check().lab) == "star:4@1gbit"
    assert plan.digits.rounds == 1


def test_the_demo_says_so_when_links_are_unshaped() -> None:
    plan = demo.plan("ip is not found: install iproute2 (apt install iproute2)")
    assert plan.digits.check().lab.kind == plan.paced.check().lab.kind == "loopback"
    text = "\n".join(demo.about(plan))
    assert "UNSHAPED" in text
    assert "apt install iproute2" in text
    assert demo.to_json(plan, report("digits"), report())["links"] == "unshaped"


def test_rows_are_compared_with_the_best_form_of_ddp() -> None:
    rows = ("ddp", "ddp+fp16:mb=5", "dear", "single")
    blocks = [block(i, seconds) for i, seconds in enumerate((2.0, 1.25, 1.0, 0.5))]
    made = runs(checked(strategies=rows), blocks)
    assert [run.ratio for run in made] == [1.0, 0.625, 0.5, 0.25]
    assert [run.ratio_to_best_ddp for run in made] == pytest.approx([1.6, 1.0, 0.8, 0.4])
    [dear] = runs(checked(strategies=("dear",)), [block(0, 1.0)])
    assert dear.ratio_to_best_ddp is None
    assert table.cells(dear)[4] == table.MISSING


def test_each_workers_iterations_and_processor_time() -> None:
    blocks = [block(0, 2.0), block(1, 1.0, cpu=1.0), block(1, 3.0, cpu=0.2)]
    _, dear = runs(checked(), blocks)
    assert dear.samples_by_rank_s == [[1.0, 1.0, 3.0, 3.0]] * 2
    assert dear.iterations_per_s.by_rank == [0.5, 0.5]
    assert dear.iterations_per_s.total == 1.0
    # Four iterations; from the first start to the last end 3 s and 7 s, on two cores.
    assert dear.cpu_s_per_iteration == {"worker": pytest.approx([0.3, 0.6])}
    assert dear.cores_share == pytest.approx(3.6 / 20)
    assert not dear.limited_by_cores


def test_the_table_says_which_rows_the_cores_limit() -> None:
    # Two iterations of 1 s in which the second worker begins 1 s late: 3 s on two cores.
    made = runs(checked(), [block(0, 1.0, cpu=1.5), block(1, 1.0, cpu=1.61)])
    assert [run.limited_by_cores for run in made] == [False, True]
    caption = str(table.render(replace(report(), runs=made)).caption)
    assert "cores (80% or more of their time in use): dear\n" in f"{caption}\n"


def test_the_table_says_what_deciding_cost_and_what_came_of_it() -> None:
    found = Deciding(131, 58.04, {"codec": "on", "bucket_bytes": 2_726_297, "buckets": 3})
    _, dear = made = runs(checked(), [block(0, 2.0), block(1, 1.5)], deciding=[None, found])
    assert dear.deciding == found
    caption = str(table.render(replace(report(), runs=made)).caption)
    said = "codec on, buckets of 2.6 MB, layers merged into 3 buckets"
    assert f"dear: decided before it was timed, in 131 iterations (58.0 s): {said}" in caption
    assert "decided" not in str(table.render(report()).caption)
    assert table.decided({"thresholds": [0.8125, 0.25]}) == "thresholds 0.8125+0.25"


def test_results_table_names_slow_workers() -> None:
    assert "slow" not in str(table.render(report()).caption)
    slowed = replace(report(), config={"slow": ["1=+2x", "0=+1x@1-2"]}, normal_iteration_s=0.272)
    caption = str(table.render(slowed).caption)
    assert "slow workers: 1=+2x, 0=+1x@1-2, where a normal iteration is 272 ms" in caption


def test_the_time_to_a_loss_is_there_when_it_is_asked_for() -> None:
    asked = checked("digits", target_loss=1.5, warmup=10)
    low = [[(0.5, 1.0)] * 12] * 2
    high = [[(0.5, 2.0)] * 12] * 2
    blocks = [block(0, 2.0, curves=low), block(1, 1.5, curves=high)]
    ddp, dear = made = runs(asked, blocks)
    assert ddp.time_to_loss is not None
    assert (ddp.time_to_loss.seconds, ddp.time_to_loss.by_round) == (5.0, [5.0])
    assert dear.time_to_loss is not None
    assert dear.time_to_loss.seconds is None
    shown = table.render(replace(report("digits"), runs=made))
    assert shown.columns[-1].header == "to loss 1.5\ns"
    assert list(shown.columns[-1].cells) == ["5", table.MISSING]
    assert runs(checked(), [block(0, 2.0), block(1, 1.5)])[0].time_to_loss is None


def test_a_row_says_what_cross_traffic_it_has_met() -> None:
    asked = checked(lab="fat-tree:2/1@1gbit+500mbit,cross=400mbitx2")
    blocks = [block(0, 2.0), block(1, 1.25)]
    seen = {"x0": [Sample(0.0, 0, 0.0), Sample(9.0, 9_000_000, 0.9)]}
    ddp, dear = runs(asked, blocks, cross=seen)
    assert ddp.cross_traffic is not None
    assert ddp.cross_traffic.bytes == pytest.approx(4e6)  # from 1 s to 5 s
    assert ddp.cross_traffic.bit_per_s == pytest.approx([8e6, 8e6])
    made = table.printed(replace(report(), lab=str(asked.lab), runs=[ddp, dear]))
    assert any("400mbit requested each way on trunks of 500mbit" in note for note in made.notes)
    assert (
        "ddp: 4 MB; each way 8 Mbit/s (p10 .. p90 of iterations: 8 .. 8), 0.10 cores" in made.notes
    )
    without, _ = runs(checked(), blocks)
    assert without.cross_traffic is None
