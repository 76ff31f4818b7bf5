"""Small workloads, and plans as the tests read them."""

from __future__ import annotations

from hypothesis import strategies as st

from wingbeat.planning.costs import (
    ZERO,
    CostModel,
    Curve,
    Linear,
    Linearithmic,
    PiecewiseLinear,
    Workload,
)
from wingbeat.types import Plan, PlannedBucket
from wingbeat_lab.paced.profile import load_profile

F32 = "float32 cpu"


def work(
    ready: list[float], numels: list[int], nbytes: list[float] | None = None, kinds: str = ""
) -> Workload:
    """A workload of tensors 0, 1, 2, ...; each letter of ``kinds`` is a kind."""
    return Workload(
        tensors=tuple(range(len(ready))),
        ready_s=tuple(ready),
        numels=tuple(numels),
        nbytes=tuple(nbytes if nbytes is not None else [6e-3 * n for n in numels]),
        kinds=tuple(kinds) if kinds else (F32,) * len(ready),
    )


def groups(plan: Plan) -> list[tuple[int, ...]]:
    return [bucket.tensors for bucket in plan.buckets]


def plan_of(*buckets: tuple[int, ...]) -> Plan:
    return Plan(tuple(PlannedBucket(bucket) for bucket in buckets))


@st.composite
def curves(draw: st.DrawFn, sizes: st.SearchStrategy[float]) -> Curve:
    """Curves of every kind; times near 1 at the largest amounts, or far from it."""
    kind = draw(st.sampled_from(["none", "line", "sorting", "pieces"]))
    times = st.sampled_from([0.0, 1e-3, 0.1, 0.3, 1.0, 4.0])
    if kind == "none":
        return ZERO
    if kind == "line":
        return Linear(draw(times), draw(times) / 1e3)
    if kind == "sorting":
        return Linearithmic(
            draw(times) / 1e3, draw(st.sampled_from([0.001, 0.1, 1.0])), draw(times)
        )
    amounts = sorted(draw(st.sets(sizes, min_size=1, max_size=5)))
    seconds = sorted(draw(times) for _ in amounts)
    return PiecewiseLinear(tuple(amounts), tuple(seconds))


@st.composite
def instances(draw: st.DrawFn, most: int = 8) -> tuple[Workload, CostModel]:
    count = draw(st.integers(1, most))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]), min_size=count,
                         max_size=count))  # fmt: skip
    numels = draw(st.lists(st.integers(0, 5000), min_size=count, max_size=count))
    kinds = draw(st.lists(st.sampled_from("aaaab"), min_size=count, max_size=count))
    ready = [sum(gaps[: i + 1]) for i in range(count)]
    scale = draw(st.sampled_from([0.006, 1.0, 4.0]))
    workload = work(ready, numels, [scale * n for n in numels], "".join(kinds))
    sizes = st.sampled_from([1.0, 10.0, 500.0, 1000.0, 2000.0, 8000.0, 20000.0])
    delay = draw(st.one_of(st.just(ZERO), curves(sizes)))
    return workload, CostModel(draw(curves(sizes)), draw(curves(sizes)), delay)


def profile(name: str) -> Workload:
    """A paced model's backward pass on its own device."""
    ready, numels, seconds = [], [], 0.0
    for layer in reversed(load_profile(name).layers):
        seconds += layer.backward_ms / 1e3
        for parameter in reversed(layer.parameters):
            ready.append(seconds)
            numels.append(parameter.numel)
    return work(ready, numels)
