"""The static schedule: the paper's figures, and any other shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.group_simulation import groups_in
from wingbeat.methods.model_averaging.rules import PHASES, group_of
from wingbeat.types import Layout

FOUR = Layout.even(hosts=4, workers=4)

FIG_9 = (
    "A.11A.22A.33A.44",
    "1111222233334444",
    "1A.12B.23A.34B.4",
    "1111222233334444",
)
"""Workers 0 to 15 in steps 4k to 4k+3: equal signs are a group, a dot is nobody's. As printed, with
other signs for G1 to G6: merged cells are the groups that Fig. 10 says they are."""

FIG_10 = {
    0: {0: {0, 4, 8, 12}, 1: {1}, 2: {2, 3}, 3: {2, 3}},
    1: {local: {0, 1, 2, 3} for local in range(4)},
    2: {0: {0, 3}, 1: {1, 9}, 2: {2}, 3: {0, 3}},
    3: {local: {0, 1, 2, 3} for local in range(4)},
}
"""By phase and local worker, of the first host: opposite on the ring of four hosts is the third."""

shapes = st.lists(st.integers(0, 8), min_size=1, max_size=40).map(Layout.by_name)


@pytest.mark.parametrize("cycle", [0, 1, 7])
@pytest.mark.parametrize("phase", range(PHASES))
def test_phases_are_those_of_figure_9(phase: int, cycle: int) -> None:
    row = FIG_9[phase]
    for worker, sign in enumerate(row):
        alike = tuple(w for w in range(16) if row[w] == sign) if sign != "." else (worker,)
        assert group_of(FOUR, worker, PHASES * cycle + phase) == alike


@pytest.mark.parametrize("phase", FIG_10)
def test_rules_are_those_of_figure_10(phase: int) -> None:
    for worker, group in FIG_10[phase].items():
        assert set(group_of(FOUR, worker, phase)) == group


@given(shapes, st.integers(0, 200))
def test_members_agree_and_groups_are_disjoint(layout: Layout, step: int) -> None:
    for worker in range(layout.workers):
        group = group_of(layout, worker, step)
        assert worker in group
        assert list(group) == sorted(set(group))
        assert all(group_of(layout, member, step) == group for member in group)


@given(shapes)
def test_cycle_connects_all_workers(layout: Layout) -> None:
    parts = [{worker} for worker in range(layout.workers)]
    for step in range(PHASES):
        for group in groups_in(layout, step):
            met = [part for part in parts if part & set(group)]
            parts = [part for part in parts if part not in met] + [set().union(*met)]
    assert len(parts) == 1


@pytest.mark.parametrize("hosts", range(1, 12))
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_each_host_meets_others_and_is_alone_in_turn(hosts: int, workers: int) -> None:
    layout = Layout.even(hosts, workers)
    out = min(1, workers - 1)
    alone = [0] * hosts
    for cycle in range(hosts):
        for host in range(hosts):
            group = group_of(layout, host * workers + out, PHASES * cycle + 2)
            far = {layout.host_of[member] for member in group} - {host}
            assert len(group) == 1 + len(far) <= 2
            alone[host] += not far
            if hosts % 2 == 0:
                assert far == {(host + hosts // 2) % hosts}
    assert alone == [hosts % 2] * hosts


def test_hosts_of_three_and_eight_workers_follow_the_rules() -> None:
    three, eight = Layout.even(2, 3), Layout.even(2, 8)
    assert [group_of(three, w, 0) for w in range(3)] == [(0, 3), (1,), (2,)]
    assert [group_of(three, w, 2) for w in range(3)] == [(0, 2), (1, 4), (0, 2)]
    assert list(groups_in(eight, 0)) == [(0, 8), tuple(range(2, 8)), tuple(range(10, 16))]
    assert next(groups_in(eight, 2)) == (0, 3, 4, 5, 6, 7)
    assert [group_of(eight, 2, step) for step in (0, 2)] == [(2, 3, 4, 5, 6, 7), (2,)]
