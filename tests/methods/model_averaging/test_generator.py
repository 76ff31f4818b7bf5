"""The group generator: the paper's examples, and thousands of random histories."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.group_simulation import Simulation, in_one_order
from wingbeat.methods.model_averaging.generator import Generator, ProtocolError, Run
from wingbeat.methods.model_averaging.rules import (
    ABLATION,
    THRESHOLD,
    Connectivity,
    Rules,
    WorkerPool,
    count_components,
    inter_and_intra,
)
from wingbeat.types import Layout

ASKED = ABLATION | {"paper": Rules.paper(), "everyone": Rules.all_workers()}

ALL = ASKED | {
    f"{name}, notified": Rules(
        **{f: getattr(rules, f) for f in Rules.__dataclass_fields__ if f != "notified"},
        notified=True,
    )
    for name, rules in ABLATION.items()
}

EIGHT = Layout.even(2, 4)


class Scripted(Generator):
    """Makes the groups that it is given, one request after the other."""

    def __init__(self, layout: Layout, rules: Rules, groups: list[list[list[int]]]) -> None:
        super().__init__(layout, rules)
        script = iter(groups)

        def policy(initiator: int, pool: WorkerPool) -> list[list[int]]:
            now = next(script)
            for group in now:
                for member in group:
                    pool.mark_busy(member)
            return now

        self._policy = policy


# -- the paper's examples -----------------------------------------------------------------


def test_figure_8_conflicting_group_is_pending_until_the_locks_are_released() -> None:
    generator = Scripted(EIGHT, Rules.random(notified=True), [[[0, 4, 5]], [[4, 5, 7]]])
    assert generator.request(0) == [Run(0, 0, (0, 4, 5), 0)]
    assert generator.request(7) == []
    assert generator.acknowledge(4, 0) == []
    assert generator.acknowledge(0, 0) == []
    assert generator.acknowledge(5, 0) == [Run(1, 0, (4, 5, 7), 7)]
    assert not generator.is_waiting(0)
    assert generator.is_waiting(7)


def test_section_5_1_group_runs_when_all_members_have_sent_requests() -> None:
    generator = Scripted(EIGHT, Rules(inter_intra=False), [[[0, 4, 5]]])
    assert generator.request(0) == []
    assert generator.request(5) == []
    assert generator.request(4) == [Run(0, 0, (0, 4, 5), 0)]


def test_figure_11_groups_overlap_without_division_and_do_not_with_it() -> None:
    four = Layout.even(1, 4)
    apart = Scripted(four, Rules.random(2), [[[0, 1]], [[3, 1]], [[1, 0]]])
    assert [apart.request(w) for w in (0, 3)] == [[], []]
    assert apart.request(1) == [Run(0, 0, (0, 1), 0)]
    divided = Scripted(four, Rules(inter_intra=False), [[[0, 2], [1, 3]]])
    assert [divided.request(w) for w in (0, 3)] == [[], []]
    assert divided.request(1) == [Run(1, 0, (1, 3), 0)]
    assert divided.request(2) == [Run(0, 0, (0, 2), 0)]


def test_request_without_a_buffer_runs_older_groups_first() -> None:
    generator = Scripted(EIGHT, Rules.random(), [[[0, 1]], [[1, 2]], [[2, 3]]])
    assert generator.request(0) == []
    assert generator.request(1) == [Run(0, 0, (0, 1), 0)]
    assert generator.acknowledge(1, 0) == []
    assert generator.is_waiting(1)
    assert generator.request(2) == [Run(1, 0, (1, 2), 1)]
    assert generator.acknowledge(1, 1) == []
    assert not generator.is_waiting(1)


def test_group_never_overtakes_an_older_one_of_a_member() -> None:
    groups = [[[0, 1]], [[1, 2]], [[2, 3]]]
    generator = Scripted(EIGHT, Rules.random(notified=True), groups)
    generator.request(0)
    generator.request(1)
    assert generator.request(2) == [], "2's lock is free, and it has an older group"


def test_request_with_a_buffer_takes_the_oldest_group() -> None:
    generator = Scripted(EIGHT, ABLATION["+ buffer"], [[[0, 1]], [[2, 1]]])
    generator.request(0)
    generator.request(2)
    assert generator.request(1) == [Run(0, 0, (0, 1), 0)]
    generator.acknowledge(1, 0)
    assert not generator.is_waiting(1)
    assert generator.request(1) == [Run(1, 0, (2, 1), 2)]


# -- divisions ------------------------------------------------------------------------------


def made(generator: Generator, worker: int) -> list[tuple[int, ...]]:
    """Groups, in their order, that ``worker``'s request makes."""
    before = generator._next_number
    generator.request(worker)
    groups = {g.number: tuple(g.members) for own in generator._buffers for g in own}
    return [groups[number] for number in sorted(groups) if number >= before]


def test_division_takes_all_idle_workers_and_no_others() -> None:
    generator = Scripted(EIGHT, Rules(inter_intra=False), [[[0, 6, 7]]])
    generator.request(0)
    generator._policy = Generator(EIGHT, Rules(inter_intra=False))._policy
    groups = made(generator, 3)
    assert sorted(w for group in groups for w in group) == [1, 2, 3, 4, 5]
    assert sorted(map(len, groups)) == [2, 3]
    assert made(generator, 5) == []


def test_inter_and_intra_makes_two_groups_per_worker_in_order() -> None:
    for seed in range(20):
        layout = Layout.even(4, 4)
        groups = made(Generator(layout, Rules(), seed), 5)
        of = {w: [g for g in groups if w in g] for w in range(16)}
        heads = {w for w in range(16) if len({layout.host_of[m] for m in of[w][0]}) > 1}
        assert sorted(layout.host_of[w] for w in heads) == [0, 1, 2, 3]
        for w in range(16):
            inter, intra = of[w]
            assert (
                set(inter) <= heads if w in heads else len({layout.host_of[m] for m in inter}) == 1
            )
            assert sorted(intra) == list(layout.hosts[layout.host_of[w]])


def test_inter_and_intra_isolates_slow_workers_in_second_groups() -> None:
    def pool_of(rules: Rules) -> WorkerPool:
        made = WorkerPool(Layout.even(1, 3), rules, Random(0))
        for worker, requests in enumerate((9, 2, 8)):
            made.mark_busy(worker)
            for _ in range(requests):
                made.count_request(worker)
            if worker != 1:
                made.mark_idle(worker)
        return made

    assert pool_of(Rules()).min_requests_of_all == 9 - THRESHOLD + 1
    *_, together, alone = inter_and_intra(1, pool_of(Rules()))
    assert sorted(together) == [0, 2]
    assert alone == [1]
    for unfiltered in (Rules(threshold=None), Rules.paper()):
        assert sorted(inter_and_intra(1, pool_of(unfiltered))[-1]) == [0, 1, 2]


def test_heads_are_random_and_all_pairs_of_heads_meet() -> None:
    layout, heads, pairs = Layout.even(3, 2), set(), set()
    for seed in range(200):
        groups = made(Generator(layout, Rules(size=2), seed), 0)
        for group in groups:
            if len({layout.host_of[m] for m in group}) > 1:
                heads |= set(group)
                pairs |= {frozenset((a, b)) for a in group for b in group if a < b}
    assert heads == set(range(6))
    assert len(pairs) == 3 * 2 * 2


def test_worker_without_partners_gets_a_group_of_its_own() -> None:
    layout = Layout([0, 0, 1])
    groups = made(Generator(layout, Rules()), 0)
    assert all(sum(w in group for group in groups) == 2 for w in range(3))


# -- the slowdown filter ----------------------------------------------------------------------


def asked(counts: list[int], **rules: object) -> Generator:
    """A generator of idle workers of one host that have asked so often."""
    generator = Generator(Layout.even(1, len(counts)), Rules(inter_intra=False, **rules))
    for worker in range(len(counts)):
        generator._pool.mark_busy(worker)
    generator._pool.requests = list(counts)
    for worker in range(len(counts)):
        generator._pool.mark_idle(worker)
    return generator


def members(groups: list[tuple[int, ...]]) -> list[int]:
    return sorted(w for group in groups for w in group)


def test_filter_excludes_workers_c_thres_requests_behind() -> None:
    counts = [9, 7, 6, 10, 30]
    # The initiator's request counts: c_i = 10, and c_i - c_w < 4 for c_w of 7 and more.
    assert members(made(asked(counts, threshold=4, halve_after=None), 0)) == [0, 1, 3, 4]
    assert members(made(asked(counts, threshold=5, halve_after=None), 0)) == [0, 1, 2, 3, 4]
    assert members(made(asked(counts, threshold=None), 0)) == [0, 1, 2, 3, 4]


def test_slow_initiator_takes_fast_workers() -> None:
    assert members(made(asked([1, 9, 9], threshold=2, halve_after=None), 0)) == [0, 1, 2]
    assert members(made(asked([1, 9, 9], threshold=2, halve_after=None), 1)) == [1, 2]


def test_filter_applies_to_single_groups() -> None:
    rules = Rules(division=False, inter_intra=False, threshold=2, halve_after=None)
    generator = Generator(Layout.even(1, 6), rules)
    generator._pool.requests = [9, 9, 9, 1, 1, 1]
    assert members(made(generator, 0)) == [0, 1, 2]


def test_halved_counters_readmit_a_worker_that_was_slow_once() -> None:
    generator = asked([15, 9, 2], threshold=4, halve_after=16)
    assert members(made(generator, 0)) == [0]
    assert generator._pool.requests == [8, 4, 1]
    generator = asked([7, 5], threshold=4, halve_after=16)
    for _ in range(100):
        for worker in (0, 1):
            for run in generator.request(worker):
                for member in run.members:
                    generator.acknowledge(member, run.number)
    assert max(generator._pool.requests) < 16
    assert generator._pool.requests[0] - generator._pool.requests[1] <= 1


def test_section_5_3_as_published_never_readmits_a_worker_that_was_slow_once() -> None:
    generators = [Generator(Layout.even(1, 3), rules) for rules in (Rules(), Rules.paper())]
    for generator in generators:
        for worker, count in enumerate((8, 8, 2)):
            generator._pool.mark_busy(worker)
            generator._pool.requests[worker] = count
            generator._pool.mark_idle(worker)
        for _ in range(200):  # all are equally fast from now on
            for worker in range(3):
                if not generator.is_waiting(worker):
                    ended(generator, generator.request(worker))
    behind = [max(g._pool.requests) - g._pool.requests[2] for g in generators]
    assert behind[0] < 4, "ours has halved the difference away"
    assert behind[1] == 6
    assert generators[1]._pool.requests[0] > 200
    assert 2 not in members(made(generators[1], 0))


# -- membership -------------------------------------------------------------------------------


def test_waiting_group_runs_without_a_dead_member() -> None:
    generator = Scripted(EIGHT, Rules(), [[[0, 1, 2]]])
    generator.request(0)
    generator.request(1)
    assert generator.remove(2) == [Run(0, 0, (0, 1), 0)]
    assert 2 not in generator
    assert generator.remove(2) == []


def test_dead_worker_with_a_request_leaves_its_group() -> None:
    generator = Scripted(EIGHT, Rules(), [[[0, 1, 2]]])
    generator.request(0)
    assert generator.remove(0) == []
    assert generator.request(1) == []
    assert generator.request(2) == [Run(0, 0, (1, 2), 0)]


def test_running_group_starts_a_new_epoch_with_unfinished_members() -> None:
    generator = Scripted(EIGHT, Rules(), [[[0, 1, 2, 3]]])
    for worker in range(4):
        generator.request(worker)
    assert generator.acknowledge(3, 0) == []
    assert generator.remove(2) == [Run(0, 1, (0, 1), 0)]
    # 0 was done before it heard of the new epoch, so 1 is left alone with it.
    assert generator.acknowledge(0, 0, 0) == [Run(0, 2, (1,), 0)]
    assert generator.acknowledge(1, 0, 1) == []
    assert not generator.is_waiting(1)


def test_all_groups_of_a_dead_worker_run_without_it() -> None:
    generator = Scripted(EIGHT, Rules.random(), [[[0, 1]], [[1, 2, 3]], [[3]]])
    generator.request(0)
    generator.request(2)
    assert generator.remove(1) == [Run(0, 0, (0,), 0)]
    assert generator.request(3) == [Run(1, 0, (2, 3), 2)]


def test_added_worker_is_idle_and_counts_as_fast() -> None:
    generator = asked([5, 9, 9], threshold=4, halve_after=None)
    generator.remove(0)
    assert members(made(generator, 1)) == [1, 2]
    generator.add(0)
    assert generator._pool.requests[0] == 10
    assert made(generator, 0) == [(0,)]


def test_removed_worker_is_in_no_new_group() -> None:
    for rules in ABLATION.values():
        generator = Generator(EIGHT, rules)
        generator.remove(3)
        for worker in (0, 7, 1):
            assert 3 not in members(made(generator, worker))


def test_disallowed_calls_raise_protocol_errors() -> None:
    generator = Scripted(EIGHT, Rules(), [[[0, 1]], [[2]]])
    generator.request(0)
    with pytest.raises(ProtocolError, match="worker 0 requests a group, but already waits"):
        generator.request(0)
    with pytest.raises(ProtocolError, match="group 0, which does not run"):
        generator.acknowledge(0, 0)
    generator.request(1)
    for worker, number, epoch in ((0, 1, 0), (0, 0, 1), (2, 0, 0)):
        with pytest.raises(ProtocolError, match="does not run"):
            generator.acknowledge(worker, number, epoch)
    with pytest.raises(ProtocolError, match="worker 5 joins"):
        generator.add(5)
    generator.remove(5)
    with pytest.raises(ProtocolError, match="worker 5 requests a group, but is not active"):
        generator.request(5)
    assert generator.acknowledge(5, 0) == [], "it may have said so before it heard that it is gone"


def test_is_awaited_is_true_for_members_that_others_wait_for() -> None:
    generator = Scripted(EIGHT, Rules(), [[[0, 1, 2]]])
    generator.request(0)
    assert [w for w in range(8) if generator.is_awaited(w)] == [1, 2]
    generator.request(1)
    generator.request(2)
    assert not any(generator.is_awaited(w) for w in range(8))


# -- all of them ------------------------------------------------------------------------------


def test_worker_added_at_once_joins_the_waiting_group_of_all() -> None:
    generator = Generator(Layout.even(2, 2), Rules.all_workers())
    generator.remove(3)
    assert [generator.request(w) for w in (0, 1)] == [[], []]
    generator.add(3, at_once=True)
    assert generator.request(2) == [], "it waits for the one that joins"
    (run,) = generator.request(3)
    assert sorted(run.members) == [0, 1, 2, 3]
    for worker in range(4):
        assert generator.acknowledge(worker, run.number) == []
    assert not any(map(generator.is_waiting, range(4)))


def test_worker_added_later_is_in_the_next_group_of_all() -> None:
    generator = Generator(Layout.even(2, 2), Rules.all_workers())
    generator.remove(3)
    assert [generator.request(w) for w in (0, 1)] == [[], []]
    generator.add(3)
    assert generator.request(3) == [], "it waits for the next one"
    (run,) = generator.request(2)
    assert sorted(run.members) == [0, 1, 2]
    for worker in run.members:
        generator.acknowledge(worker, run.number)
    assert [generator.request(w) for w in (2, 0)] == [[], []]
    (run,) = generator.request(1)
    assert sorted(run.members) == [0, 1, 2, 3]


def test_synchronizing_worker_is_in_no_group_until_all_synchronize() -> None:
    generator = Scripted(EIGHT, Rules(), [[[0, 1, 2], [2, 3]], [[0, 1]]])
    for worker in (4, 5, 6, 7):
        generator.remove(worker)
    assert generator.request(0) == []
    assert generator.request(1) == []
    assert generator.synchronize(2) == [Run(0, 0, (0, 1), 0)], "and group 1 has 3 only"
    assert generator.is_waiting(2)
    for worker in (0, 1):
        generator.acknowledge(worker, 0)
    assert generator.synchronize(3) == []
    assert tuple(generator._synchronizing) == (2, 3)
    assert generator.request(0) == [], "for 1, in the next group"
    assert generator.request(1) == [Run(2, 0, (0, 1), 0)]
    for worker in (0, 1):
        generator.acknowledge(worker, 2)
    assert generator.synchronize(0) == []
    assert generator.synchronize(1) == [Run(3, 0, (2, 3, 0, 1), 2)]
    for worker in range(4):
        assert generator.is_waiting(worker)
        generator.acknowledge(worker, 3)
        assert not generator.is_waiting(worker)
    assert made_by_all(generator) == [(0, 1, 2, 3)]


def made_by_all(generator: Generator) -> list[tuple[int, ...]]:
    """The group that a division makes: of all that are idle."""
    generator._policy = Generator(EIGHT, Rules(size=8, inter_intra=False))._policy
    generator.rules = Rules(size=8, inter_intra=False)
    generator._pool.rules = generator.rules
    return [tuple(sorted(group)) for group in made(generator, 0)]


def test_synchronizing_worker_that_dies_is_left_out() -> None:
    generator = Generator(Layout.even(1, 3), Rules())
    assert generator.synchronize(0) == []
    assert generator.synchronize(1) == []
    assert generator.remove(0) == []
    assert 0 not in generator
    assert generator.remove(2) == [Run(0, 0, (1,), 1)]


def test_member_that_dies_in_a_synchronization_is_left_out() -> None:
    generator = Generator(Layout.even(1, 3), Rules.random())
    generator.synchronize(0)
    generator.synchronize(1)
    (run,) = generator.synchronize(2)
    assert generator.remove(1) == [Run(run.number, 1, (0, 2), 0)]
    for worker in (0, 2):
        generator.acknowledge(worker, run.number, 1)
        assert not generator.is_waiting(worker)


def test_request_and_synchronize_exclude_each_other() -> None:
    generator = Generator(Layout.even(1, 3), Rules())
    generator.synchronize(0)
    generator.request(1)
    for wrong in (lambda: generator.request(0), lambda: generator.synchronize(0)):
        with pytest.raises(ProtocolError, match=r"worker 0 .* but already waits for a group"):
            wrong()
    with pytest.raises(ProtocolError, match="worker 1 synchronizes, but already waits"):
        generator.synchronize(1)
    with pytest.raises(ProtocolError, match="worker 0 joins"):
        generator.add(0)
    notified = Generator(Layout.even(1, 3), Rules.random(notified=True))
    with pytest.raises(ProtocolError, match="worker 0 synchronizes, but may"):
        notified.synchronize(0)


# -- histories ----------------------------------------------------------------------------------

layouts = st.lists(st.integers(0, 7), min_size=1, max_size=64).map(Layout.by_name)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(25))
@given(layouts, st.integers(0, 1 << 30), st.integers(2, 5), st.integers(0, 6), st.booleans())
def test_random_histories_have_no_overlap_one_order_and_no_deadlock(
    name: str, layout: Layout, seed: int, size: int, kills: int, back: bool
) -> None:
    fields = {f: getattr(ALL[name], f) for f in Rules.__dataclass_fields__}
    rules = ALL[name] if ALL[name].whole else Rules(**fields | {"size": size})
    game = Simulation(layout, rules, seed, steps=4, kills=kills, back=back, slow=seed % 3).play()
    assert in_one_order([worker.log for worker in game.workers])


@pytest.mark.parametrize("name", ASKED)
@settings(max_examples=examples(40))
@given(layouts, st.integers(0, 1 << 30), st.integers(0, 6), st.booleans(), st.integers(1, 5))
def test_random_histories_with_deaths_synchronize_all_workers(
    name: str, layout: Layout, seed: int, kills: int, back: bool, level: int
) -> None:
    game = Simulation(
        layout, ASKED[name], seed, 4, kills, back, slow=seed % 3, synchronize_every=level
    ).play()
    assert in_one_order([worker.log for worker in game.workers])
    if not kills:
        times = -(-4 // level)
        assert len(game.generator.synchronized) == times
        assert [set(range(layout.workers))] * times == list(game.generator.synchronized.values())
        assert len({worker.value for worker in game.workers}) == 1


@pytest.mark.parametrize("name", ALL)
def test_groups_connect_all_workers(name: str) -> None:
    for seed, layout in enumerate((Layout.even(4, 4), Layout.even(16, 1), Layout([0] * 3 + [1]))):
        game = Simulation(layout, ALL[name], seed, steps=30, slow=1).play()
        assert count_components([run.members for run in game.runs], layout.workers) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ALL)
def test_million_requests_with_deaths_have_one_order(name: str) -> None:
    chance, asked = Random(name), 0
    while asked < 1_000_000 // len(ALL):
        layout = Layout.by_name([chance.randrange(9) for _ in range(chance.randrange(1, 65))])
        kills, slow = chance.randrange(20), chance.randrange(4)
        level = chance.randrange(20) if name in ASKED else 0
        seed = chance.randrange(1 << 30)
        game = Simulation(
            layout, ALL[name], seed, 50, kills, slow=slow, synchronize_every=level
        ).play()
        asked += len(game.requested)
        assert in_one_order([worker.log for worker in game.workers])


# -- connection -----------------------------------------------------------------------------------


def ended(generator: Generator, runs: list[Run]) -> list[tuple[int, ...]]:
    """Groups that run, and those that run once all members have acknowledged them."""
    members, due = [], list(runs)
    while due:
        run = due.pop(0)
        members.append(run.members)
        for member in run.members:
            due += generator.acknowledge(member, run.number, run.epoch)
    return members


def in_turns(rules: Rules, rounds: int) -> list[tuple[int, ...]]:
    """Groups of two hosts of two, of whom one is never idle while the other's workers ask."""
    generator = Generator(Layout.even(2, 2), rules, seed=3)
    runs: list[tuple[int, ...]] = []

    def ask(worker: int) -> None:
        runs.extend(
            ended(generator, [] if generator.is_waiting(worker) else generator.request(worker))
        )

    for worker in (2, 3):
        generator.remove(worker)
    for worker in (0, 1, 0):
        ask(worker)  # At last 0 waits for 1, to average their host.
    for worker in (2, 3):
        generator.add(worker)
    for worker in (2, 3, 2):
        ask(worker)
    for _ in range(rounds):
        for first, second in ((0, 1), (2, 3)):
            ask(second)  # ... which it does; now both are idle, and the other host is not.
            for worker in (first, second, first):
                ask(worker)
    return runs


def test_workers_never_idle_together_are_connected_by_the_bound() -> None:
    apart, joined = in_turns(Rules.paper(), 50), in_turns(Rules(), 50)
    assert count_components(apart[len(apart) // 4 :], 4) == 2, (
        "the paper's rules keep the hosts apart"
    )
    # Within 2 * 3 requests of each of 4 workers, of which each makes a group at most.
    most = 2 * 3 * 4 + 4
    assert all(
        count_components(joined[i : i + 2 * most], 4) == 1 for i in range(len(joined) - 2 * most)
    )


@pytest.mark.parametrize("name", ["+ buffer", "+ division", "+ inter-intra", "+ filter"])
def test_groups_connect_all_workers_in_every_window(name: str) -> None:
    layout = Layout.even(4, 2)
    game = Simulation(layout, ALL[name], seed=5, steps=120).play()
    runs = [run.members for run in game.runs]
    while_ = 2 * Connectivity(8, 2)._max_requests
    assert len(runs) > 2 * while_
    assert all(
        count_components(runs[i : i + while_], 8) == 1 for i in range(0, len(runs) - while_, 7)
    )
