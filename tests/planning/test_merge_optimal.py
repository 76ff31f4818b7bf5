"""Plans of merged gradients: what they cost, and which is the best."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.merges import F32, groups, instances, plan_of, profile, work
from wingbeat.errors import UsageError
from wingbeat.planning import merge
from wingbeat.planning.costs import ZERO, CostModel, Linear, Linearithmic, PiecewiseLinear, Workload
from wingbeat.types import Plan, PlannedBucket


def simulate(plan: Plan, workload: Workload, costs: CostModel) -> list[dict[str, float]]:
    """The same backward pass as events: a thread that computes and encodes, and one link."""
    now, link_free = 0.0, 0.0
    gap = dict(zip(workload.tensors, (b - a for a, b in
               pairwise((0.0, *workload.ready_s))), strict=True))  # fmt: skip
    size = dict(zip(workload.tensors, zip(workload.numels, workload.nbytes, strict=True),
                    strict=True))  # fmt: skip
    rows = []
    for bucket in plan.buckets:
        for tensor in bucket.tensors:
            now += gap[tensor]
        begin = now
        now += costs.encode(float(sum(size[t][0] for t in bucket.tensors)))
        encoded = now
        sent = now if now > link_free else link_free
        link_free = sent + costs.exchange(math.fsum(size[t][1] for t in bucket.tensors))
        if bucket is not plan.buckets[-1]:  # backward goes on, and shares its processors
            now += costs.delay(math.fsum(size[t][1] for t in bucket.tensors))
        rows.append({"encode_begin_s": begin, "encode_end_s": encoded, "exchange_begin_s": sent,
                     "exchange_end_s": link_free})  # fmt: skip
    return rows


# -- predict -----------------------------------------------------------------------------------


def test_predict_hand_computed_example_matches() -> None:
    workload = work([1.0, 2.0, 4.0], [10, 20, 30], [1.0, 2.0, 3.0])
    costs = CostModel(Linear(0.5, 0.0), Linear(1.0, 1.0))
    timeline = merge.predict(plan_of((0,), (1, 2)), workload, costs)
    first, second = timeline.buckets
    assert first == merge.BucketTimes(PlannedBucket((0,)), 1.0, 1.0, 1.5, 1.5, 3.5)
    # Encoding the first delays the others' gradients by as much.
    assert second == merge.BucketTimes(PlannedBucket((1, 2)), 4.0, 4.5, 5.0, 5.0, 11.0)
    assert timeline.backward_s == 4.0
    assert timeline.encode_s == 1.0
    assert timeline.exposed_s == 6.0
    assert timeline.finish_s == 11.0


def test_predict_exchange_waits_for_previous_exchange() -> None:
    workload = work([1.0, 2.0], [1, 1], [10.0, 1.0])
    timeline = merge.predict(
        merge.by_elements(workload, 1), workload, CostModel(ZERO, Linear(0.0, 1.0))
    )
    assert [row.exchange_begin_s for row in timeline.buckets] == [1.0, 11.0]
    assert timeline.finish_s == 12.0


def test_predict_exchange_delays_later_gradients() -> None:
    workload = work([1.0, 2.0, 4.0], [1, 1, 1], [2.0, 3.0, 5.0])
    costs = CostModel(Linear(0.5, 0.0), Linear(0.0, 1.0), delay=Linear(0.1, 0.2))
    timeline = merge.predict(merge.by_elements(workload, 1), workload, costs)
    # The first takes 0.1 + 0.2 * 2 from backward, the second 0.1 + 0.2 * 3, the last nothing.
    assert [row.encode_begin_s for row in timeline.buckets] == pytest.approx([1.0, 3.0, 6.2])
    assert [row.exchange_begin_s for row in timeline.buckets] == pytest.approx([1.5, 3.5, 6.7])
    assert timeline.delay_s == pytest.approx(1.2)
    assert timeline.finish_s == pytest.approx(11.7)
    one = merge.predict(merge.single_bucket(workload), workload, costs)
    assert one.delay_s == 0.0
    assert one.finish_s == pytest.approx(14.5)


def test_exact_larger_delay_gives_fewer_exchanges() -> None:
    workload = profile("resnet50")
    counts = [
        len(merge.exact(workload, CostModel(ZERO, Linear(1e-3, 4e-8), Linear(delay, 0.0))).buckets)
        for delay in (0.0, 1e-4, 1e-3, 1e-2, 1.0)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[-1] == 1


@given(instances(), st.data())
@settings(deadline=None, max_examples=examples(150))
def test_predict_equals_simulation(instance: Any, data: st.DataObject) -> None:
    workload, costs = instance
    cuts = data.draw(st.sets(st.integers(1, len(workload)))) | {len(workload)}
    cuts |= {i for i in range(1, len(workload)) if workload.kinds[i] != workload.kinds[i - 1]}
    stops = sorted(cuts)
    plan = plan_of(*(workload.tensors[a:b] for a, b in pairwise([0, *stops])))
    timeline = merge.predict(plan, workload, costs)
    for row, event in zip(timeline.buckets, simulate(plan, workload, costs), strict=True):
        for name, value in event.items():
            assert getattr(row, name) == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert timeline.finish_s == timeline.buckets[-1].exchange_end_s
    assert timeline.finish_s == pytest.approx(
        timeline.backward_s + timeline.encode_s + timeline.delay_s + timeline.exposed_s
    )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of((0,), (2,), (1,)), "bucket 1 holds the tensors [2]"),
        (plan_of((0, 2), (1,)), "bucket 0"),
        (plan_of((0,), (1,)), "2 of 3"),
        (plan_of((0,), (), (1, 2)), "bucket 1"),
        (plan_of((0,), (1, 2), (3,)), "bucket 2"),
        (plan_of((0, 1), (2,)), "mixes a and b"),
    ],
)
def test_predict_plan_of_other_tensors_is_refused(plan: Plan, words: str) -> None:
    workload = work([0.0, 1.0, 2.0], [1, 1, 1], kinds="abb")
    with pytest.raises(UsageError) as caught:
        merge.predict(plan, workload, CostModel(ZERO, ZERO))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# -- simple plans ------------------------------------------------------------------------------


def test_simple_rules_give_expected_buckets() -> None:
    workload = work([0.0] * 6, [5, 3, 4, 1, 9, 2], kinds="aaabbb")
    assert groups(merge.by_elements(workload, 1)) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert groups(merge.single_bucket(workload)) == [(0, 1, 2), (3, 4, 5)]
    assert groups(merge.by_elements(workload, 8)) == [(0, 1), (2,), (3, 4), (5,)]
    # What a kind has left over does not count for the next.
    left = work([1.0, 2.0, 3.0, 4.0], [3, 3, 2, 1], kinds="abbb")
    assert groups(merge.by_elements(left, 5)) == [(0,), (1, 2), (3,)]
    assert groups(merge.by_elements(workload, 10**9)) == groups(merge.single_bucket(workload))
    with pytest.raises(UsageError, match="elements=0"):
        merge.by_elements(workload, 0)


@pytest.mark.parametrize(("name", "tensors", "merged"), [("resnet50", 161, 53)])
def test_by_elements_gives_paper_bucket_counts(name: str, tensors: int, merged: int) -> None:
    workload = profile(name)
    assert len(workload) == tensors
    # Table V says 53; the stem's last tensors make one more here, because they stand alone.
    assert abs(len(merge.by_elements(workload, 8192).buckets) - merged) <= 1


PLANNERS = {
    "each alone": lambda w, _: merge.by_elements(w, 1),
    "one": lambda w, _: merge.single_bucket(w),
    "by_size": lambda w, _: merge.by_elements(w, 1000),
    "greedy": merge.greedy,
    "printed": merge.greedy_as_printed,
    "wfbp": merge.mg_wfbp,
    "exact": merge.exact,
    "exhaustive": merge.exhaustive,
}


@pytest.mark.parametrize("name", PLANNERS)
@given(instances())
@settings(deadline=None, max_examples=examples(40))
def test_planners_all_buckets_are_segments_of_one_kind(name: str, instance: Any) -> None:
    workload, costs = instance
    plan = PLANNERS[name](workload, costs)
    assert tuple(t for bucket in plan.buckets for t in bucket.tensors) == workload.tensors
    for bucket in plan.buckets:
        assert len({workload.kinds[t] for t in bucket.tensors}) == 1
    assert PLANNERS[name](workload, costs) == plan


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_without_tensors_give_empty_plan(name: str) -> None:
    nothing = Workload((), (), (), (), ())
    costs = CostModel(ZERO, Linear(1.0, 1.0))
    plan = PLANNERS[name](nothing, costs)
    assert plan == Plan(())
    assert merge.predict(plan, nothing, costs).finish_s == 0.0


def test_planners_keep_tensor_indices_of_model() -> None:
    workload = Workload((7, 2, 5), (0.0, 0.0, 9.0), (1, 1, 1), (1.0, 1.0, 1.0), (F32,) * 3)
    costs = CostModel(ZERO, Linear(1.0, 1.0))
    for planner in (
        merge.greedy,
        merge.greedy_as_printed,
        merge.mg_wfbp,
        merge.exact,
        merge.exhaustive,
    ):
        assert groups(planner(workload, costs)) == [(7, 2), (5,)]


# -- the best plan -----------------------------------------------------------------------------


@given(instances(most=10))
@settings(deadline=None, max_examples=examples(250))
def test_exact_equals_exhaustive(instance: Any) -> None:
    workload, costs = instance
    found, best = merge.exact(workload, costs), merge.exhaustive(workload, costs)
    # To the last bit: all plans are priced by the same additions in the same order.
    assert merge.predict(found, workload, costs).finish_s == (
        merge.predict(best, workload, costs).finish_s
    )
    assert len(found.buckets) == len(best.buckets)


@given(instances(most=12), st.sampled_from([(1, 1, 2), (2, 1, 3), (3, 2, 2)]))
@settings(deadline=None, max_examples=examples(150))
def test_exact_any_label_limits_equal_exhaustive(instance: Any, room: tuple[int, int, int]) -> None:
    # So little that rounds fail, and bounds are coarse.
    workload, costs = instance
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("WIDTH", "ROOM", "GROWTH"), room, strict=True):
            patch.setattr(merge, name, value)
        found = merge.exact(workload, costs)
    best = merge.exhaustive(workload, costs)
    assert merge.predict(found, workload, costs).finish_s == (
        merge.predict(best, workload, costs).finish_s
    )
    assert len(found.buckets) == len(best.buckets)


@given(instances(most=10), st.integers(0, 400))
@settings(deadline=None, max_examples=examples(150))
def test_search_limited_work_gives_plan_and_bound(instance: Any, work: int) -> None:
    workload, costs = instance
    found = merge.search(workload, costs, work)
    finish = merge.predict(found.plan, workload, costs).finish_s
    best = merge.exact(workload, costs)
    best_s = merge.predict(best, workload, costs).finish_s
    assert found.lower_bound_s <= finish
    assert found.lower_bound_s <= best_s * (1 + 1e-11)
    # Of ties, exact may take the later for its fewer buckets.
    assert finish >= best_s * (1 - 2e-12)
    if found.optimal:
        assert found.plan == best
    assert merge.search(workload, costs, work) == found


def jumpy(count: int, seed: int) -> tuple[Workload, CostModel]:
    """Tensors of similar sizes, and costs that jump at sizes of 1 to 50 of them."""
    rng = np.random.default_rng(seed)
    numels = np.maximum(1, 1000 * np.exp(rng.normal(0, 1, count))).astype(np.int64)
    workload = work(np.cumsum(rng.exponential(1e-3, count)).tolist(), numels.tolist())

    def stairs(each: float, whole: float) -> PiecewiseLinear:
        steps = np.unique(rng.uniform(each / 2, each * 50, 60))
        amounts = np.unique(np.concatenate((steps, steps * (1 + 1e-9))))
        seconds = np.cumsum(rng.exponential(1.0, len(amounts)) ** 2)
        return PiecewiseLinear(
            tuple(amounts.tolist()), tuple((seconds * whole / seconds[-1]).tolist())
        )

    each = float(numels.mean())
    return workload, CostModel(stairs(each, 0.02), stairs(each * 6e-3, 0.1))


@pytest.mark.parametrize("seed", range(3))
def test_search_many_jumps_and_tensors_terminates(seed: int) -> None:
    workload, costs = jumpy(300, seed)
    found = merge.search(workload, costs, 200_000_000)
    assert found.optimal
    finish = merge.predict(found.plan, workload, costs).finish_s
    assert found.lower_bound_s == pytest.approx(finish, rel=2e-12)
    stops = list(accumulate(len(b.tensors) for b in found.plan.buckets))[:-1]
    for place in range(1, len(workload)):
        other = sorted({*stops} ^ {place})
        plan = plan_of(*(workload.tensors[a:b] for a, b in pairwise([0, *other, len(workload)])))
        assert merge.predict(plan, workload, costs).finish_s >= finish * (1 - 1e-12)
    few = merge.search(workload, costs, 1_000)
    assert not few.optimal
    assert (
        few.lower_bound_s
        <= finish
        <= merge.predict(few.plan, workload, costs).finish_s * (1 + 2e-12)
    )


@pytest.mark.parametrize("work", [-1, 1.5, True, 2**63 + 1])
def test_search_invalid_work_is_refused(work: Any) -> None:
    with pytest.raises(UsageError, match=f"work={work!r}: allowed: "):
        merge.search(Workload((), (), (), (), ()), CostModel(ZERO, ZERO), work)


def every_plan(workload: Workload) -> list[Plan]:
    plans = []
    for bits in range(2 ** (len(workload) - 1)):
        stops = [i for i in range(1, len(workload)) if bits >> (i - 1) & 1]
        ends = [0, *stops, len(workload)]
        plan = plan_of(*(workload.tensors[a:b] for a, b in pairwise(ends)))
        if all(len({workload.kinds[t] for t in b.tensors}) == 1 for b in plan.buckets):
            plans.append(plan)
    return plans


@given(instances(most=6))
@settings(deadline=None, max_examples=examples(60))
def test_exhaustive_visits_every_plan(instance: Any) -> None:
    workload, costs = instance
    best = merge.predict(merge.exhaustive(workload, costs), workload, costs).finish_s
    finishes = [merge.predict(plan, workload, costs).finish_s for plan in every_plan(workload)]
    assert best >= min(finishes)
    assert best == pytest.approx(min(finishes), rel=1e-11)


def test_exact_and_exhaustive_ties_give_fewer_buckets() -> None:
    # Whatever is sent before the last gradient is hidden: only that the last goes alone counts.
    workload = work([0.0, 1.0, 2.0, 50.0], [1, 1, 1, 1], [1.0] * 4)
    costs = CostModel(ZERO, Linear(0.0, 1.0))
    for planner in (merge.exact, merge.exhaustive):
        assert groups(planner(workload, costs)) == [(0, 1, 2), (3,)]
    free = CostModel(ZERO, ZERO)
    for planner in (merge.exact, merge.exhaustive):
        assert groups(planner(workload, free)) == [(0, 1, 2, 3)]


def test_exact_and_exhaustive_rounding_adds_no_bucket() -> None:
    # 0.1 + 0.2 > 0.3: in one bucket, or in three, the links are busy for as long.
    workload = work([0.0] * 6, [1] * 6, [0.1, 0.2, 0.3, 0.1, 0.7, 0.1])
    costs = CostModel(ZERO, Linear(0.0, 1.0))
    for planner in (merge.exact, merge.exhaustive):
        assert groups(planner(workload, costs)) == [(0, 1, 2, 3, 4, 5)]


def test_exhaustive_too_many_tensors_is_refused() -> None:
    workload = work([0.0] * 21, [1] * 21)
    with pytest.raises(UsageError, match="21 tensors: allowed: at most 20"):
        merge.exhaustive(workload, CostModel(ZERO, ZERO))


@pytest.mark.parametrize("name", ["resnet50", "inception_v4", "vgg16"])
def test_exact_real_models_no_rule_is_better(name: str) -> None:
    workload = profile(name)
    costs = CostModel(Linearithmic(3.16e-10, 1.0), Linear(0.011, 1e-7))
    finish = {
        rule: merge.predict(PLANNERS[rule](workload, costs), workload, costs).finish_s
        for rule in PLANNERS
        if rule != "exhaustive"
    }
    assert min(finish, key=lambda rule: (finish[rule], rule != "exact")) == "exact"
    # No single change of the plan, a cut more, a cut less or a cut moved, is better.
    stops = list(accumulate(len(b.tensors) for b in merge.exact(workload, costs).buckets))[:-1]
    near = [sorted({*stops} ^ {place}) for place in range(1, len(workload))]
    near += [sorted({*stops} ^ {s, s + d}) for s in stops for d in (-1, 1) if s + d > 0]
    for other in near[:: len(near) // 60]:
        plan = plan_of(*(workload.tensors[a:b] for a, b in pairwise([0, *other, len(workload)])))
        assert merge.predict(plan, workload, costs).finish_s >= finish["exact"] * (1 - 1e-12)
