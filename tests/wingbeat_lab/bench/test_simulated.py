"""Rows of a bench in virtual time: on links as the lab's, at the lab's pace."""

from __future__ import annotations

import pytest

from wingbeat import simulator
from wingbeat.errors import UsageError
from wingbeat.simulator.cluster import SLACK_S
from wingbeat_lab import paced
from wingbeat_lab.bench import pace, simulated
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.paced.model import SLACK


def test_simulated_row_runs_at_the_pace_of_its_lab() -> None:
    config = BenchConfig(
        lab="star:2@8gbit,prio=2",
        model="paced:resnet50@0.05",
        strategies=("allreduce", "ddp"),
        iterations=1,
        rounds=1,
        stretch=4.0,
    )
    checked = config.check()
    row, ddp = checked.rows
    links = simulator.Links(bytes_per_s=8e9 * 0.05 / 4 / 8 * simulated.GOODPUT)
    model = paced.simulator_model(paced.parse("paced:resnet50@0.05"), 4.0)
    assert row.strategy is not None
    work = simulated.work_of(checked.model)
    assert (work.codecs, work.codecs_idle) == (80.0, 79 / 80)
    want = simulator.simulate(model, row.strategy, 2, links, work=work, cores=3, one_machine=True)
    assert simulated.iteration_s(checked, row, cores=3) == want.median_s
    assert sum(layer.forward_s for layer in model.layers) == pytest.approx(
        4 * sum(layer.forward_ms for layer in paced.load_profile("resnet50").layers) / 1e3
    )
    with pytest.raises(UsageError, match="only wingbeat's strategies on paced models"):
        simulated.iteration_s(checked, ddp)


def test_device_queues_of_paced_models_hide_what_they_do_in_the_simulator() -> None:
    assert SLACK_S == SLACK


def config_of(strategy: str, **options: object) -> BenchConfig:
    given: dict = {"lab": "star:4@4gbit", "model": "paced:resnet50@0.05", "iterations": 6}
    return BenchConfig(strategies=(strategy,), **(given | {"rounds": 1} | options))


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("canary:s=2,p=none", {}),
        ("ripples", {}),
        ("ripples:overlap=true", {}),
        ("adpsgd", {}),
        ("localsgd:every=4", {}),
        ("localsgd:every=4", {"per_host": 2}),
    ],
)
def test_rows_without_lockstep_take_at_least_their_computation(strategy: str, more: dict) -> None:
    checked = config_of(strategy, **more).check()
    computed = sum(checked.model.compute_s() or ())
    seconds = simulated.iteration_s(checked, checked.rows[0])
    assert 1.01 * computed < seconds < 5 * computed


def test_averages_in_every_step_take_longer_than_seldom_ones() -> None:
    often, seldom = (config_of(f"localsgd:every={each}").check() for each in (1, 3))
    assert simulated.iteration_s(often, often.rows[0]) > 1.3 * simulated.iteration_s(
        seldom, seldom.rows[0]
    )


def test_fewer_processors_take_longer() -> None:
    for strategy in ("allreduce", "geryon", "canary:s=2,p=none"):
        lab, model = "star:4@100gbit,prio=2", "paced:resnet50@0.2"
        checked = config_of(strategy, lab=lab, model=model).check()
        one, many = (simulated.iteration_s(checked, checked.rows[0], cores=c) for c in (1, 16))
        assert one > 1.05 * many, strategy


@pytest.mark.parametrize(
    ("strategy", "named"), [("diloco", "outer optimizer"), ("adpsgd:overlap=false", "overlap only")]
)
def test_what_cannot_be_simulated_is_named(strategy: str, named: str) -> None:
    checked = config_of(strategy).check()
    with pytest.raises(UsageError, match=named):
        simulated.iteration_s(checked, checked.rows[0])


def test_switches_without_classes_have_none_in_virtual_time() -> None:
    times = []
    for lab in ("star:4@10gbit,prio=2", "star:4@10gbit"):
        config = BenchConfig(
            lab=lab,
            model="paced:vgg19_k40@0.05",
            strategies=("geryon:pull=start",),
            iterations=1,
            rounds=1,
        )
        checked = config.check()
        times.append(simulated.iteration_s(checked, checked.rows[0]))
    assert times[0] < times[1]


@pytest.mark.parametrize(
    ("lab", "times"),
    [
        ("star:4@100mbit,h3@50mbit", 2.0),
        ("star:4x2@100mbit,h3.eth1@50mbit", 2 / 3),
        # Two of three hops of a ring of four stay on a leaf switch.
        ("fat-tree:4/2@100mbit+50mbit", 2.0),
        ("fat-tree:4/2@100mbit+100mbit", 1.0),
    ],
)
def test_uneven_hosts_and_trunks_take_their_time(lab: str, times: float) -> None:
    found = []
    for each in ("star:4@100mbit", lab):
        config = BenchConfig(
            lab=each, model="paced:vgg16@0.05", strategies=("allreduce",), iterations=1, rounds=1
        )
        checked = config.check()
        found.append(simulated.iteration_s(checked, checked.rows[0]))
    assert found[1] / found[0] == pytest.approx(times, rel=0.05)


def test_cross_traffic_is_refused() -> None:
    config = BenchConfig(
        lab="fat-tree:4/2@1gbit+1gbit,cross=800mbitx4",
        model="paced:resnet50@0.05",
        strategies=("allreduce",),
        iterations=1,
        rounds=1,
    )
    checked = config.check()
    with pytest.raises(UsageError, match="cross-traffic cannot be simulated"):
        simulated.iteration_s(checked, checked.rows[0])


def test_a_row_has_the_prices_of_its_bench() -> None:
    """Of slow motion, too: fixed times of calls are stretched, those of bytes scaled besides."""
    config = BenchConfig(
        lab="star:2@8gbit",
        model="paced:vgg16@0.05",
        strategies=("allreduce:compression=sketch",),
        iterations=1,
        rounds=1,
        stretch=4.0,
    )
    checked = config.check()
    dear, cheap = (
        {
            "pack": {"fixed_s": fixed, "s_per_byte": each},
            "unpack": {"fixed_s": 0.0, "s_per_byte": each},
        }
        for fixed, each in ((3e-6, 9e-9), (0.0, 1e-12))
    )
    work = simulated.work_of(checked.model, dear)
    assert work.prices is not None
    assert work.prices.pack == pytest.approx((12e-6, 9e-9))
    assert work.prices.encode == (0.0, 0.0)
    assert work.codecs == pytest.approx(80.0)
    found = [simulated.iteration_s(checked, checked.rows[0], prices=each) for each in (dear, cheap)]
    assert found[0] > 2 * found[1]
    assert simulated.work_of(checked.model).prices is None


def test_codecs_that_only_python_has_are_packed_at_the_prices_of_python() -> None:
    checked = config_of("allreduce").check()
    each = {"fixed_s": 1e-6, "s_per_byte": 2e-9}
    names = ("Coding.encode", "Coding.decode", *simulated.LOW_RANK)
    work = simulated.work_of(checked.model, dict.fromkeys(names, each))
    assert work.prices is not None
    wanted = (1e-6, 2e-9)
    assert work.prices.pack == work.prices.unpack == work.prices.decode == wanted
    assert work.prices.factors == (wanted,) * 4


def test_steps_of_low_rank_have_the_names_that_a_bench_reports() -> None:
    names = {f"{owner.__name__}.{name}" for owner, name, _ in pace.WORK}
    assert set(simulated.LOW_RANK) <= names
