"""Averages over groups in virtual time: what must follow does follow, and runs repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wingbeat import AllReduce
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.rules import ABLATION, Rules, count_components
from wingbeat.simulator import (
    GroupRun,
    Links,
    Model,
    TimedLayer,
    Traffic,
    Work,
    simulate,
    simulate_groups,
)
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.network import GroupNetwork, Network, Wires
from wingbeat.types import Layout, TensorSpec

FREE = Work(
    chunk_s=0.0, wire_s_per_byte=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0,
    update_s_per_byte=0.0, message_s=0.0, meeting_s=0.0, copy_s_per_byte=0.0,
)  # fmt: skip
LINKS = Links(bytes_per_s=1e6, latency_s=0.0)
NEAR = Links(bytes_per_s=1e12, latency_s=0.0)
MODEL = Model((TimedLayer(0.2, 0.8, (0,)),), (TensorSpec("w", (30_000,), "float32", 4),))
"""A second of computation, and 0.12 s to carry all parameters over a link."""


def run(rules: Rules | None, layout: Layout, **options: object) -> GroupRun:
    given: dict = {"work": FREE, "local": NEAR, "jitter": 0.0, "iterations": 8, "warmup": 4}
    return simulate_groups(MODEL, rules, layout, LINKS, **given | options)


@pytest.mark.parametrize("rules", [None, Rules(), Rules.paper()])
def test_the_same_arguments_give_the_same_run_to_the_last_bit(rules: Rules | None) -> None:
    layout = Layout.even(2, 3)
    runs = [run(rules, layout, jitter=0.1, slow={1: 2.0}, work=Work()) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != run(rules, layout, jitter=0.1, slow={1: 2.0}, work=Work(), seed=1)


def test_two_workers_average_in_every_iteration() -> None:
    made = run(ABLATION["+ division"], Layout.even(2, 1))
    assert made.iteration_s == pytest.approx(1.0 + 0.12)
    assert made.waited == pytest.approx(0.12 / 1.12)
    assert made.averages == pytest.approx(1)


def test_the_static_schedule_averages_in_every_other_iteration_of_two_single_workers() -> None:
    assert run(None, Layout.even(2, 1)).iteration_s == pytest.approx(1.0 + 0.12 / 2)


def test_workers_of_a_host_share_its_card_and_need_none_among_themselves() -> None:
    # Phase 0: one group over both cards. Phases 1 and 3: within hosts. Phase 2: another one.
    assert run(None, Layout.even(2, 2)).iteration_s == pytest.approx(1.0 + 0.12 / 2, rel=1e-3)
    pairs = Rules(size=2, inter_intra=False, threshold=None)
    seconds = {True: set(), False: set()}
    for seed in range(8):
        made = run(pairs, Layout.even(2, 2), seed=seed, iterations=1, warmup=0)
        seconds[set(made.groups[0]) in ({0, 1}, {2, 3})].add(made.iteration_s)
    assert list(seconds[True]) == pytest.approx([1.0], rel=1e-3)
    assert list(seconds[False]) == pytest.approx([1.0 + 2 * 0.12])


def test_messages_to_and_from_the_generator_take_their_time() -> None:
    slow_messages = replace(FREE, message_s=0.01)
    made = run(ABLATION["+ division"], Layout.even(2, 1), work=slow_messages)
    # A trip there, two requests heard one after the other, two answers, a trip back.
    assert made.iteration_s == pytest.approx(1.12 + 0.01 * (1 + 2 + 2 + 1), abs=0.011)


def test_the_first_meeting_of_a_group_takes_its_time_and_later_ones_none() -> None:
    meetings = replace(FREE, meeting_s=0.5)
    together = ABLATION["+ division"]
    at_first = run(together, Layout.even(2, 1), work=meetings, iterations=4, warmup=0)
    assert at_first.iteration_s == pytest.approx(1.12 + 0.5 / 4)
    later = run(together, Layout.even(2, 1), work=meetings, iterations=4, warmup=2)
    assert later.iteration_s == pytest.approx(1.12)
    # Each of eight workers keeps connections for 16 of the 35 groups of four that it can be in.
    rules = Rules.random(4)
    free, anew = (
        run(rules, Layout.even(8, 1), work=replace(FREE, meeting_s=s), iterations=30)
        for s in (0.0, 0.5)
    )
    assert anew.iteration_s > free.iteration_s + 0.25


def test_static_groups_of_an_odd_number_of_hosts_meet_anew() -> None:
    for hosts, anew in ((2, 0.0), (3, 0.5 / 4)):
        made, free = (
            run(None, Layout.even(hosts, 1), work=replace(FREE, meeting_s=s), warmup=8)
            for s in (0.5, 0.0)
        )
        assert made.iteration_s - free.iteration_s == pytest.approx(
            anew, abs=0.13 if anew else 1e-9
        )
        assert (made.iteration_s > free.iteration_s + 1e-9) == bool(anew)


def test_parameters_are_copied_before_and_after_an_average() -> None:
    copies = replace(FREE, copy_s_per_byte=1e-6)
    made = run(ABLATION["+ division"], Layout.even(2, 1), work=copies)
    assert made.iteration_s == pytest.approx(1.12 + 4 * 0.12)


def test_averages_of_every_other_step_take_half_as_long() -> None:
    for overlap in (False, True):
        made = run(Rules.all_workers(), Layout.even(2, 1), every=2, overlap=overlap)
        assert made.iteration_s == pytest.approx(1.0 if overlap else 1.0 + 0.12 / 2)
    with pytest.raises(UsageError, match="every=0"):
        run(Rules.all_workers(), Layout.even(2, 1), every=0)


def test_overlapped_averages_hide_behind_the_next_step() -> None:
    made = run(ABLATION["+ division"], Layout.even(2, 1), overlap=True)
    assert made.iteration_s == pytest.approx(1.0)
    assert made.waited == pytest.approx(0.0, abs=1e-9)


def test_an_average_that_takes_longer_than_a_step_is_waited_for() -> None:
    slow_links = Links(bytes_per_s=1e5, latency_s=0.0)
    for overlap, seconds in ((True, 1.2), (False, 2.2)):
        made = simulate_groups(
            MODEL, ABLATION["+ division"], Layout.even(2, 1), slow_links, work=FREE, local=NEAR,
            jitter=0.0, overlap=overlap, iterations=4, warmup=2,
        )  # fmt: skip
        assert made.iteration_s == pytest.approx(seconds)


def test_meetings_of_the_same_members_do_not_mix() -> None:
    agenda = Agenda()
    network = Network(agenda, Wires(Layout.even(3, 1), LINKS, NEAR))
    first, second = (GroupNetwork(network, meeting, (2, 1)) for meeting in (1, 2))
    ours, others = (each.channel((0, 1, 0, 0), (0, 0), (1, 0)) for each in (first, second))
    ours.announce(7)
    ours.send(7, 1000)
    agenda.run()
    assert others.receive(7, lambda _when: None) is None
    assert ours.receive(7, lambda _when: None) is not None


@pytest.mark.parametrize("rules", [None, Rules()], ids=["static", "smart"])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"inside": 2}, {"compression": "sketch"}, {"slow": {1: 2.5}}],
    ids=lambda options: next(iter(options), "usual"),
)
def test_averages_of_separate_hosts_take_as_long_as_among_all_others(
    rules: Rules | None, options: dict
) -> None:
    """Where a host's rate is given, it might differ, and all averages share the network."""
    layout = Layout.even(7, 1)
    given: dict = {"jitter": 0.05, "iterations": 12, "warmup": 2, **options}
    sent = Traffic(), Traffic()
    apart, shared = (
        simulate_groups(MODEL, rules, layout, links, traffic=traffic, **given)
        for links, traffic in zip(
            (Links(bytes_per_s=1e7), Links(bytes_per_s=1e7, rates={0: 1e7})), sent, strict=True
        )
    )
    assert apart.iteration_s == pytest.approx(shared.iteration_s, rel=1e-6)
    assert apart.groups == shared.groups
    assert apart.steps == shared.steps
    # Averages that have begun when the last iteration ends are in one of them alone.
    assert set(sent[0].sent) == set(sent[1].sent)
    assert sum(sent[0].sent.values()) == pytest.approx(sum(sent[1].sent.values()), rel=0.05)


def test_smart_groups_keep_their_speed_beside_a_slow_worker_and_static_ones_do_not() -> None:
    layout, slow = Layout.even(4, 4), {5: 3.0}
    options: dict = {"jitter": 0.02, "iterations": 30}
    alike, uneven = (
        {rules: run(rules, layout, slow=s, **options) for rules in (None, Rules())}
        for s in ({}, slow)
    )
    kept = {rules: alike[rules].iteration_s / uneven[rules].iteration_s for rules in alike}
    assert kept[Rules()] > 0.75
    assert kept[None] < 0.5
    assert uneven[Rules()].steps[5] < 0.6 * uneven[Rules()].steps[0]
    assert count_components(uneven[Rules()].groups, 16) == 1


def test_with_the_papers_rules_a_slow_worker_holds_up_its_host() -> None:
    made = run(Rules.paper(), Layout.even(4, 2), slow={5: 6.0}, iterations=60, jitter=0.02)
    others = min(steps for worker, steps in enumerate(made.steps) if worker not in (4, 5))
    assert made.steps[4] < 0.5 * others
    assert made.steps[4] - made.steps[5] <= 2


@pytest.mark.parametrize("slowness", [3.0, 6.0])
def test_who_shares_a_host_with_a_slow_worker_makes_as_many_steps_as_others(
    slowness: float,
) -> None:
    made = run(Rules(), Layout.even(4, 2), slow={5: slowness}, iterations=60, jitter=0.02)
    others = [steps for worker, steps in enumerate(made.steps) if worker not in (4, 5)]
    assert made.steps[5] < min(others) / 2
    assert made.steps[4] > 0.85 * min(others)


def test_each_random_request_makes_a_group_of_three() -> None:
    made = run(Rules.random(), Layout.even(2, 4), iterations=4, warmup=0)
    assert made.averages == pytest.approx(3, abs=0.8)
    assert {len(group) for group in made.groups} == {3}


def test_workers_of_a_host_sum_before_they_send_to_another() -> None:
    made = AllReduce()
    own = simulate(MODEL, made, 4, LINKS, work=FREE).median_s
    layout = Layout([0, 1, 0, 1])
    shared = simulate(MODEL, made, 4, LINKS, work=FREE, layout=layout, local=NEAR).median_s
    near = simulate(MODEL, made, 4, LINKS, work=FREE, layout=Layout.even(1, 4), local=NEAR)
    assert near.median_s == pytest.approx(1.0, rel=1e-3)
    # A ring of four sends 3/2 of the buffer over each card, the exchange of two hosts 1.
    assert shared - 1.0 == pytest.approx((own - 1.0) / 1.5, rel=1e-3)
    with pytest.raises(UsageError, match="layout has 4; give as many"):
        simulate(MODEL, made, 3, LINKS, layout=layout)


@pytest.mark.parametrize("wrong", [{"iterations": 0}, {"warmup": -1}, {"jitter": -0.1}])
def test_what_cannot_be_simulated_is_refused(wrong: dict) -> None:
    with pytest.raises(UsageError, match="1 or more iterations"):
        run(None, Layout.even(2, 1), **wrong)


@pytest.mark.slow
def test_a_thousand_workers() -> None:
    made = run(Rules(), Layout.even(250, 4), iterations=6, jitter=0.05, work=Work())
    assert made.iteration_s < 2.0
    assert count_components(made.groups, 1000) < 50


def test_replicas_of_several_processes_average_parts_on_the_interface_of_their_host() -> None:
    together = ABLATION["+ division"]
    for processes in (1, 2, 4):
        made = run(together, Layout.even(2, 1), inside=processes)
        assert made.iteration_s == pytest.approx(1.0 + 0.12, rel=1e-3)
    # Three times half of 120 KB pass from process to process of a host.
    slow_inside = Links(bytes_per_s=1e6, latency_s=0.0)
    made = run(together, Layout.even(2, 1), inside=2, local=slow_inside)
    assert made.iteration_s == pytest.approx(1.0 + 0.12 + 3 * 0.06, rel=1e-3)
    with pytest.raises(UsageError, match="the layout has 2 hosts"):
        run(together, Layout.even(2, 2), inside=2)


@pytest.mark.parametrize(
    ("compression", "share"), [("bf16", 1 / 2), ("sketch", 32_048 / 120_000), ("topk@0.01", 0.015)]
)
def test_averages_take_the_time_of_what_travels(compression: str, share: float) -> None:
    """DiLoCo's differences through a codec; each half of a sketch has a table of 1 KB."""
    free = replace(FREE, codecs=0.0)
    made = run(Rules.all_workers(), Layout.even(2, 1), compression=compression, work=free)
    assert made.iteration_s - 1.0 == pytest.approx(0.12 * share, rel=0.05)
    busy = replace(FREE, codecs=1000.0)
    slower = run(Rules.all_workers(), Layout.even(2, 1), compression=compression, work=busy)
    assert slower.iteration_s > made.iteration_s + 0.01


def test_groups_sum_inside_hosts_first() -> None:
    """All of 2 x 4 workers: each host sends the parameters once, and not 7/4 of them."""
    made = run(Rules.all_workers(), Layout.even(2, 4))
    assert made.iteration_s == pytest.approx(1.0 + 0.12, rel=1e-2)


@pytest.mark.parametrize("layout", [Layout.even(2, 4), Layout.even(3, 2)], ids=["2x4", "3x2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"every": 4},
        {"every": 4, "compression": "sketch@4"},
        {"every": 2, "slow": {0: 1.5}},
    ],
    ids=repr,
)
def test_represented_workers_average_as_all_do_one_by_one(
    layout: Layout, options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"work": Work(), "jitter": 0.02, **options}
    alone, one = Traffic(), Traffic()
    every_worker = run(Rules.all_workers(), layout, traffic=alone, **given)
    represented = run(Rules.all_workers(), layout, traffic=one, represented=True, **given)
    assert represented.iteration_s == pytest.approx(every_worker.iteration_s, rel=0.01)
    assert represented.waited == pytest.approx(every_worker.waited, abs=0.01)
    assert one.sent.keys() == alone.sent.keys()
    assert sum(one.sent.values()) == pytest.approx(sum(alone.sent.values()), rel=0.01)


@pytest.mark.parametrize(
    ("rules", "layout", "links"),
    [
        (Rules(), Layout.even(2, 2), LINKS),
        (Rules.all_workers(), Layout([0, 1, 1]), LINKS),
        (Rules.all_workers(), Layout.even(2, 2), replace(LINKS, rates={0: 5e5})),
    ],
    ids=["groups", "unequal hosts", "unequal links"],
)
def test_represented_makes_no_difference_to_workers_that_are_not_alike(
    rules: Rules, layout: Layout, links: Links
) -> None:
    runs = [
        simulate_groups(MODEL, rules, layout, links, iterations=4, warmup=2, represented=each)
        for each in (False, True)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("grace", [0.1, 0.5])
def test_quorum_and_grace_leave_a_slow_worker_to_later_rounds(grace: float) -> None:
    """One of four workers takes four times as long; averages every second step."""
    whole, rules = Rules.all_workers(), Rules.all_workers(quorum=3, grace=grace)
    options: dict[str, Any] = {"every": 2, "iterations": 40}
    slow: dict[str, Any] = {**options, "slow": {3: 4.0}}
    even = run(whole, Layout.even(4, 1), **options)
    assert run(rules, Layout.even(4, 1), **options) == even, "no grace passes where all are there"
    assert run(whole, Layout.even(4, 1), **slow).iteration_s > 4.0
    made = run(rules, Layout.even(4, 1), **slow)
    assert set(map(len, made.groups)) == {3, 4}, "the late one is in a later round"
    assert made.steps[3] < made.steps[0] / 2
    assert made.steps[0] == pytest.approx(made.steps[1], abs=2)
    # Of each two steps of the others one round, its grace, and some copies of a state.
    assert made.iteration_s < 2.0 * (even.iteration_s + grace / 2)
