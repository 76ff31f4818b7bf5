"""The generator's options and policies."""

from __future__ import annotations

from random import Random

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.rules import (
    ABLATION,
    HALVE_AFTER,
    Rules,
    WorkerPool,
    random_group,
    rules_of,
    shuffle,
    split_evenly,
)
from wingbeat.types import Layout


def test_each_step_of_the_ablation_adds_one_option() -> None:
    fields = ("buffer", "division", "inter_intra", "threshold")
    on = [[getattr(rules, f) not in (False, None) for f in fields] for rules in ABLATION.values()]
    assert on == [[i < step for i in range(4)] for step in range(5)]
    assert ABLATION["random"] == Rules.random()
    assert ABLATION["+ filter"] == Rules()


def test_paper_rules_are_the_defaults_without_additions() -> None:
    added = {"filter_intra": True, "halve_after": HALVE_AFTER, "connect": 2}
    without = {"filter_intra": False, "halve_after": None, "connect": None}
    assert Rules.paper() == Rules(**without)
    assert Rules() == Rules(**added)
    assert rules_of("paper", 5, 7) == Rules(size=5, threshold=7, **without)
    assert rules_of("random", 5, None) == Rules.random(5)
    assert Rules.random().halve_after is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"size": 1}, r"size=1\): allowed are groups of 2"),
        ({"threshold": 1}, r"threshold=1\): allowed are 2"),
        ({"connect": 0}, r"connect=0\): allowed are 1"),
        ({"halve_after": 1}, r"halve_after=1\): allowed are 2"),
        ({"buffer": False}, "division=True, buffer=False"),
        ({"whole": True}, r"whole=True, division=True\): .*Rules\.all_workers"),
        ({"whole": True, "size": 4}, r"Rules\(whole=True, size=4\)"),
        ({"division": False}, "inter_intra=True, division=False"),
    ],
)
def test_invalid_rules_are_refused(given: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Rules(**given)


def test_split_evenly_makes_equal_parts_and_none_of_one_worker() -> None:
    for size in range(2, 9):
        for n in range(2, 60):
            lengths = [len(part) for part in split_evenly(range(n), size)]
            assert sum(lengths) == n
            assert max(lengths) - min(lengths) <= 1
            assert min(lengths) >= 2
            assert max(lengths) < 2 * size
            if n % size == 0:
                assert set(lengths) == {size}
    assert split_evenly([7], 3) == [[7]]
    assert split_evenly([], 3) == []


def pool(rules: Rules, workers: int = 9, seed: int = 0) -> WorkerPool:
    return WorkerPool(Layout.even(1, workers), rules, Random(seed))


def test_random_group_contains_the_initiator_and_random_workers() -> None:
    everyone = pool(Rules.random(4))
    groups = [random_group(2, everyone)[0] for _ in range(300)]
    assert all(len(set(group)) == 4 and group[0] == 2 for group in groups)
    met = [worker for group in groups for worker in group[1:]]
    assert sorted(set(met)) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert all(80 < met.count(worker) < 150 for worker in set(met))


def test_random_group_has_its_size_if_enough_workers_are_active() -> None:
    everyone = pool(Rules.random(9))
    assert all(len(set(random_group(2, everyone)[0])) == 9 for _ in range(2000))


def test_random_group_is_at_most_all_workers() -> None:
    two = pool(Rules.random(4), workers=2)
    assert sorted(random_group(1, two)[0]) == [0, 1]
    two.remove(0)
    assert random_group(1, two) == [[1]]


def test_take_idle_returns_each_idle_worker_once_shuffled() -> None:
    orders = set()
    for seed in range(50):
        everyone = pool(Rules(), seed=seed)
        everyone.mark_busy(3)
        taken = everyone.take_idle(3)
        assert sorted(taken) == list(range(9))
        orders.add(tuple(taken))
        everyone.mark_idle(4)
        everyone.mark_busy(5)
        assert sorted(everyone.take_idle(5)) == [4, 5]
    assert len(orders) == 50


def test_removed_worker_is_not_idle_and_added_one_is() -> None:
    everyone = pool(Rules(), workers=4)
    everyone.remove(1)
    everyone.remove(3)
    assert sorted(everyone.active) == [0, 2]
    everyone.add(1)
    assert sorted(everyone.active) == [0, 1, 2]
    everyone.mark_busy(0)
    assert sorted(everyone.take_idle(0)) == [0, 1, 2]
    everyone.remove(0)
    everyone.remove(2)
    assert everyone.active == [1]
    assert [worker in everyone for worker in range(4)] == [False, True, False, False]


def test_shuffle_is_fair() -> None:
    chance, firsts = Random(1), [[0] * 4 for _ in range(4)]
    for _ in range(4000):
        items = [0, 1, 2, 3]
        shuffle(items, chance)
        for place, item in enumerate(items):
            firsts[place][item] += 1
    assert all(900 < times < 1100 for row in firsts for times in row)


def test_the_most_requests_are_those_of_the_fastest_worker_after_any_change() -> None:
    chance, rules = Random(3), Rules(halve_after=8)
    pool = WorkerPool(Layout.even(6, 1), rules, Random(0))
    halved = 0
    for _ in range(600):
        worker = chance.randrange(6)
        if worker not in pool:
            pool.add(worker)
        elif chance.random() < 0.05 and len(pool.active) > 1:
            pool.remove(worker)
        else:
            before = pool.requests[worker]
            pool.mark_busy(worker)
            pool.count_request(worker)
            pool.mark_idle(worker)
            halved += pool.requests[worker] < before
        assert rules.threshold is not None
        most = max(pool.requests[each] for each in pool.active)
        assert pool.min_requests_of_all == most - rules.threshold + 1
    assert halved > 20
