"""The generator's options, and the policies that they stand for."""

from __future__ import annotations

from random import Random

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging import policies
from wingbeat.methods.model_averaging.policies import Crowd, shuffle
from wingbeat.methods.model_averaging.rules import ABLATION, FORGET, Layout, Rules, rules_of


def test_each_step_of_the_ablation_is_one_option_more() -> None:
    fields = ("buffer", "division", "inter_intra", "threshold")
    on = [[getattr(rules, f) not in (False, None) for f in fields] for rules in ABLATION.values()]
    assert on == [[i < step for i in range(4)] for step in range(5)]
    assert ABLATION["random"] == Rules.random()
    assert ABLATION["+ filter"] == Rules()


def test_the_papers_rules_are_ours_without_what_we_added() -> None:
    added = {"filter_intra": True, "forget": FORGET, "connect": 2}
    without = {"filter_intra": False, "forget": None, "connect": None}
    assert Rules.paper() == Rules(**without)
    assert Rules() == Rules(**added)
    assert rules_of("paper", 5, 7) == Rules(size=5, threshold=7, **without)
    assert rules_of("random", 5, None) == Rules.random(5)
    assert Rules.random().forget is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"size": 1}, r"size=1\): allowed are groups of 2"),
        ({"threshold": 1}, r"threshold=1\): allowed are 2"),
        ({"connect": 0}, r"connect=0\): allowed are 1"),
        ({"forget": 1}, r"forget=1\): allowed are 2"),
        ({"buffer": False}, "division=True, buffer=False"),
        ({"whole": True}, r"whole=True, division=True\): .*Rules\.everyone"),
        ({"whole": True, "size": 4}, r"Rules\(whole=True, size=4\)"),
        ({"division": False}, "inter_intra=True, division=False"),
    ],
)
def test_what_cannot_be_done_is_refused(given: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Rules(**given)


def test_parts_are_as_equal_as_can_be_and_none_has_one_worker() -> None:
    for size in range(2, 9):
        for n in range(2, 60):
            lengths = [len(part) for part in policies.parts(range(n), size)]
            assert sum(lengths) == n
            assert max(lengths) - min(lengths) <= 1
            assert min(lengths) >= 2
            assert max(lengths) < 2 * size
            if n % size == 0:
                assert set(lengths) == {size}
    assert policies.parts([7], 3) == [[7]]
    assert policies.parts([], 3) == []


def crowd(rules: Rules, workers: int = 9, seed: int = 0) -> Crowd:
    return Crowd(Layout.even(1, workers), rules, Random(seed))


def test_random_groups_have_the_initiator_and_anybody_else() -> None:
    everyone = crowd(Rules.random(4))
    groups = [policies.one_at_random(2, everyone)[0] for _ in range(300)]
    assert all(len(set(group)) == 4 and group[0] == 2 for group in groups)
    met = [worker for group in groups for worker in group[1:]]
    assert sorted(set(met)) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert all(80 < met.count(worker) < 150 for worker in set(met))


def test_random_groups_are_never_smaller_than_their_size_where_so_many_are_there() -> None:
    everyone = crowd(Rules.random(9))
    assert all(len(set(policies.one_at_random(2, everyone)[0])) == 9 for _ in range(2000))


def test_a_group_is_no_larger_than_all() -> None:
    two = crowd(Rules.random(4), workers=2)
    assert sorted(policies.one_at_random(1, two)[0]) == [0, 1]
    two.leave(0)
    assert policies.one_at_random(1, two) == [[1]]


def test_idle_workers_are_taken_once_in_random_order() -> None:
    orders = set()
    for seed in range(50):
        everyone = crowd(Rules(), seed=seed)
        everyone.busy(3)
        taken = everyone.idle_for(3)
        assert sorted(taken) == list(range(9))
        orders.add(tuple(taken))
        everyone.rest(4)
        everyone.busy(5)
        assert sorted(everyone.idle_for(5)) == [4, 5]
    assert len(orders) == 50


def test_who_leaves_is_not_idle_and_who_enters_is() -> None:
    everyone = crowd(Rules(), workers=4)
    everyone.leave(1)
    everyone.leave(3)
    assert sorted(everyone.here) == [0, 2]
    everyone.enter(1)
    assert sorted(everyone.here) == [0, 1, 2]
    everyone.busy(0)
    assert sorted(everyone.idle_for(0)) == [0, 1, 2]
    everyone.leave(0)
    everyone.leave(2)
    assert everyone.here == [1]
    assert [worker in everyone for worker in range(4)] == [False, True, False, False]


def test_shuffling_is_fair() -> None:
    chance, firsts = Random(1), [[0] * 4 for _ in range(4)]
    for _ in range(4000):
        items = [0, 1, 2, 3]
        shuffle(items, chance)
        for place, item in enumerate(items):
            firsts[place][item] += 1
    assert all(900 < times < 1100 for row in firsts for times in row)
