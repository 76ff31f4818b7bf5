"""Tables of ``benchmarks/``: a median stands beside the spread of its runs, with its unit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat.simulator.codecs import Price
from wingbeat_lab.bench import contenders
from wingbeat_lab.bench.pace import Pace


def best_row(seconds: list[float], *, ddp: bool, cores: bool = False) -> dict[str, Any]:
    made = {"iteration_s": seconds[1], "samples_s": seconds, "mb_sent": 1.5, "ddp": ddp}
    return made | {"exact": True, "each_step": True, "limited_by_cores": cores}


def test_a_cell_has_the_range_and_the_best_of_either() -> None:
    rows = {
        "ddp": best_row([0.2, 0.21, 0.4], ddp=True, cores=True),
        "ddp+bf16": best_row([0.1, 0.2, 0.3], ddp=True),
        "dear": best_row([0.09, 0.1, 0.2], ddp=False),
    }
    with benchmark("best") as best:
        made = best.table({"model": "vgg16", "rate": "1gbit", "stretch": 2.0, "rows": rows})
    assert made.rows == (
        ("ddp", "210", "200 .. 400", "0.95", "1.50", "cores"),
        ("ddp+bf16", "200", "100 .. 300", "1.00", "1.50", "best"),
        ("dear", "100", "90 .. 200", "2.00", "1.50", "best"),
    )


def test_the_summary_compares_each_strategy_with_ddps_fastest_form() -> None:
    some = {
        "ddp": best_row([0.2, 0.2, 0.2], ddp=True),
        "ddp+bf16": best_row([0.1, 0.1, 0.1], ddp=True),
        "dear": best_row([0.05, 0.05, 0.05], ddp=False),
    }
    fast = some | {"dear": best_row([0.4, 0.4, 0.4], ddp=False)}
    cells = [
        {"model": "vgg16", "rate": rate, "rows": rows}
        for rate, rows in (("1gbit", some), ("10gbit", fast))
    ]
    with benchmark("best") as best:
        made = best.summary(cells)
    assert made.columns == ("strategy", "vgg16 at 1gbit", "vgg16 at 10gbit")
    assert made.rows == (("dear", "2.00", "0.25"),)


def defaults_bench(preset: str, seconds: dict[str, float]) -> dict[str, Any]:
    rows = [
        {"option": option, "s": s, "p10_s": s, "p90_s": s, "mb": 1.0, "cores": False}
        for option, s in seconds.items()
    ]
    at = {"preset": preset, "lab": "star:4@1gbit", "model": "digits", "slow": ""}
    return at | {"iterations": 8, "rounds": 2, "rows": rows}


@pytest.mark.parametrize(
    ("seconds", "missed"),
    [
        ({"geryon": 0.1, "geryon:pull=start": 0.096}, []),
        (
            {"geryon": 0.1, "geryon:pull=start": 0.09},
            ["star:4@1gbit: geryon:pull=start takes 0.900 of the default's time"],
        ),
        ({"geryon": 0.1, "geryon:encrypted=false": 0.05}, []),
    ],
)
def test_a_faster_option_that_changes_nothing_else_is_missed(
    seconds: dict[str, float], missed: list[str]
) -> None:
    with benchmark("defaults") as defaults:
        assert defaults.missed([defaults_bench("geryon", seconds)]) == missed


def test_options_table_has_the_default_beside_each() -> None:
    bench = defaults_bench("geryon", {"geryon": 0.1, "geryon:encrypted=false": 0.05})
    with benchmark("defaults") as defaults:
        made = defaults.table(bench)
    assert made.rows == (
        ("geryon (default)", "100", "100 .. 100", "1.000", "1.00", ""),
        ("geryon:encrypted=false", "50", "50 .. 50", "0.500", "1.00", "in the clear"),
    )


def test_all_rows_of_defaults_can_be_made() -> None:
    with benchmark("defaults") as defaults:
        for preset, rows in defaults.PRESETS.items():
            assert next(iter(rows)) == preset
            for row in rows:
                contenders.parse(row)


def test_turns_of_defaults_with_an_odd_number_of_iterations_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["defaults.py", "--iterations", "6"])
    with benchmark("defaults") as defaults, pytest.raises(SystemExit, match="2"):
        defaults.main()
    said = "--iterations 6 in 2 rounds: a turn needs an even number of iterations; choose a"
    assert said in " ".join(capsys.readouterr().err.split())


def test_hooks_have_the_range_and_what_sends_too_much() -> None:
    turns = [
        {"row": "ddp", "seconds": [0.2, 0.4, 0.3], "sent_bytes": 4e6, "buckets": [1000]},
        {"row": "sketch@8", "seconds": [0.1, 0.2, 0.15], "sent_bytes": 2e6, "buckets": [1000]},
    ]
    with benchmark("hooks") as hooks:
        rows = hooks.summary(turns, ["ddp", "sketch@8"], 4)
        made = hooks.table(rows, "paced:resnet50@0.1", "star:4@1gbit", 2.0)
    assert made.rows == (
        ("ddp", "300.0", "200.0 .. 400.0", "1.000", "4.000", "1.0000"),
        ("sketch@8", "150.0", "100.0 .. 200.0", "0.500", "2.000", "0.5000"),
    )
    assert made.title.endswith("on star:4@1gbit, slow motion of 2")
    assert made.notes == (
        "missed: sketch@8 sends more than its payloads",
        "encoding: what grows with the model takes 20 times as long as measured here, as on the "
        "whole model; the rest 2 times",
    )


def test_a_hook_that_is_slower_than_none_stands_first() -> None:
    turns = [
        {"row": "ddp", "seconds": [0.2], "sent_bytes": 4e6, "buckets": [1000]},
        {"row": "lowrank@4", "seconds": [0.3], "sent_bytes": 2e6, "buckets": [1000]},
    ]
    with benchmark("hooks") as hooks:
        rows = hooks.summary(turns, ["ddp", "lowrank@4"], 4)
        made = hooks.table(rows, "paced:resnet50@0.1", "star:4@10gbit", 1.0)
    assert made.notes[0] == "behind: lowrank@4 takes 1.500 times as long as ddp"


def test_hooks_encode_at_the_pace_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> None:
        return None

    paces: list[Pace] = []

    price = {"encode": Price(0.25, 0.0)}

    def priced(_name: str, _args: Any, pace: Pace) -> dict[str, Price]:
        paces.append(pace)
        return price

    seen: list[Any] = []
    group = {"init_process_group": nothing, "barrier": nothing, "destroy_process_group": nothing}
    with benchmark("hooks") as hooks:
        monkeypatch.setattr(hooks, "dist", SimpleNamespace(get_rank=lambda: 1, **group))
        monkeypatch.setattr(hooks.torch, "set_num_threads", nothing)
        monkeypatch.setattr(hooks.Pace, "install", lambda _: nothing)
        monkeypatch.setattr(hooks, "priced", priced)
        monkeypatch.setattr(hooks, "turn", lambda *_: seen.append(dict(paces[0].prices)))
        rows = ["sketch@8", "ddp"]
        hooks.worker(SimpleNamespace(rounds=1, rows=rows, model="paced:resnet50@0.1", stretch=2.0))
    assert [(pace.stretch, pace.scale) for pace in paces] == [(2.0, 0.1)]
    assert seen == [price, {}]


def test_requests_have_the_range_of_repeats() -> None:
    row = {"workers": 1000, "rules": "random", "requests": 1000, "cpu_s": [0.01, 0.02, 0.04]}
    row |= {"requests_per_s": 50_000.0, "members": 3.0, "alone": 0.1, "spectral_gap": None}
    with benchmark("generator") as generator:
        made = generator.table([row])
    assert made.rows == (("1,000, random", "50,000", "25,000 .. 100,000", "3.00", "10.0%", ""),)


def test_interfaces_table_has_the_range_of_rounds() -> None:
    def turn(seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "mb": {"eth0": 0.5, "eth1": 0.7}}

    found = {"2": [turn(0.1), turn(0.2)], "1": [turn(0.3), turn(0.3)]}
    with benchmark("average_interfaces") as cards:
        made = cards.table({"rows": {"ripples": found}}, "star:4x2@1gbit")
    times = ("150.0", "100.0 .. 200.0", "300.0", "300.0 .. 300.0")
    assert made.rows == (("ripples", "0.500", "0.700", *times, "2.00"),)


@pytest.mark.parametrize("same", [True, False])
def test_weights_that_differ_between_workers_are_said(same: bool) -> None:
    found = {"strategy": "dear", "optimizer": "sgd", "steps": 50, "moved": 0.25}
    found |= {"max_relative_difference": 2e-7, "same_bits_on_all_workers": same}
    with benchmark("exactness") as exactness:
        made = exactness.table("star:4@1gbit", [found], "optimizer", "moved")
        assert exactness.good(found) is same
    assert made.columns[0] == "strategy, optimizer"
    assert made.rows == (("dear, sgd", "2.00e-07", "yes" if same else "NO", "0.25"),)


def test_rows_of_virtual_time_have_the_columns_of_their_figure() -> None:
    row = {"iterations_s": 0.5, "images_per_s": 128.0, "mb_sent_per_iteration": 90.0}
    stale = row | {"mean_delay": 2.0, "dropped": 3, "peak": 0.75}
    with benchmark("canary_virtual") as virtual:
        made = virtual.table("t", {"bml": row, "canary": stale}, {"peak of links": ("peak", ".0%")})
    assert made.columns[-1] == "peak of links"
    assert made.rows == (
        ("bml", "500", "128", "90", "", "", ""),
        ("canary", "500", "128", "90", "2.0", "3", "75%"),
    )
