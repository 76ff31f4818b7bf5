"""Rows of a bench in virtual time: on links as the lab's, at the lab's pace."""

from __future__ import annotations

import pytest

from wingbeat import simulator
from wingbeat.errors import UsageError
from wingbeat_lab import paced
from wingbeat_lab.bench import simulated
from wingbeat_lab.bench.config import BenchConfig


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
    want = simulator.simulate(model, row.strategy, 2, links)
    assert simulated.median_s(checked, row) == pytest.approx(want.median_s)
    assert sum(layer.forward_s for layer in model.layers) == pytest.approx(
        4 * sum(layer.forward_ms for layer in paced.load_profile("resnet50").layers) / 1e3
    )
    with pytest.raises(UsageError, match="only wingbeat's strategies on paced models"):
        simulated.median_s(checked, ddp)


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
        times.append(simulated.median_s(checked, checked.rows[0]))
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
        found.append(simulated.median_s(checked, checked.rows[0]))
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
        simulated.median_s(checked, checked.rows[0])
