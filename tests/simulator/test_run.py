"""Whole runs in virtual time: that they repeat, and that what must follow does follow."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat import topologies
from wingbeat.collectives.program import DIRECT_BYTES
from wingbeat.errors import UsageError
from wingbeat.simulator import Links, Model, Run, Work, simulate
from wingbeat.simulator.cluster import Traffic
from wingbeat.simulator.model import TimedLayer, buckets_of
from wingbeat.types import Layout, TensorSpec
from wingbeat_lab import baselines, paced
from wingbeat_lab.bench import bound
from wingbeat_lab.layer_costs import LayerCosts

GBIT = Links(bytes_per_s=125e6)
FREE = Work(
    chunk_s=0.0, wire_s_per_byte=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0, update_s_per_byte=0.0
)  # fmt: skip
KINDS = {"allreduce": "allreduce:mb=1", "dear": "dear:plan=fixed,mb=1"}


def small() -> Model:
    return paced.simulator_model(paced.parse("paced:resnet50@0.05"))


def run(strategy: str, model: Model | None = None, workers: int = 4, **options: object) -> Run:
    made = baselines.parse(strategy)
    links = options.pop("links", GBIT)
    return simulate(model or small(), made, workers, links, **options)  # type: ignore[arg-type]


def fingerprint(made: Run) -> str:
    exact = [[*(s.hex() for s in made.iterations_s)], [[t.hex(), *m] for t, *m in made.trace]]
    return hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:16]


@pytest.mark.parametrize("strategy", KINDS.values())
def test_the_same_arguments_give_the_same_run_to_the_last_bit(strategy: str) -> None:
    first, second = (run(strategy, slow={2: 1.3}) for _ in range(2))
    assert first == second
    assert fingerprint(first) == fingerprint(second)


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [("allreduce:mb=1", "c1e06f8de1b82f0a"), ("dear:plan=fixed,mb=1", "627825e81a31f2d7")],
)
def test_a_run_is_the_one_that_it_has_always_been(strategy: str, wanted: str) -> None:
    """A change of the rules or the model changes this on purpose, or it is a mistake."""
    assert fingerprint(run(strategy, slow={1: 1.5}, iterations=2)) == wanted


@pytest.mark.parametrize("topology", topologies.BY_NAME)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_one_worker_stands_for_all_where_all_are_alike(
    kind: str, topology: str, workers: int
) -> None:
    strategy = f"{KINDS[kind]},topology={topology}"
    alone = run(strategy, workers=workers, iterations=2)
    all_of_them = run(strategy, workers=workers, iterations=2, slow={0: 1.0})
    assert alone.iterations_s == pytest.approx(all_of_them.iterations_s, rel=1e-9)
    first, second = ([m[2:] for m in made.trace if m[1] == 0] for made in (alone, all_of_them))
    assert first == second
    one = topologies.get(topology).symmetric
    assert {m[1] for m in alone.trace} == ({0} if one else set(range(workers)))


PAIRS = Layout.even(3, 2)


@pytest.mark.parametrize(
    ("topology", "links"),
    [
        ("ring", GBIT),
        ("mesh", GBIT),
        ("doubling", GBIT),
        ("ring", Links(bytes_per_s=125e6, count=2)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_host_stands_for_all_where_all_are_alike(
    kind: str, topology: str, links: Links
) -> None:
    strategy = f"{KINDS[kind]},topology={topology}"
    options: dict = {"workers": 6, "layout": PAIRS, "links": links, "iterations": 2}
    alone = run(strategy, **options)
    all_of_them = run(strategy, slow={0: 1.0}, **options)
    assert {m[1] for m in alone.trace} == {0, 1}
    assert {m[1] for m in all_of_them.trace} == set(range(6))
    assert alone.iterations_s == pytest.approx(all_of_them.iterations_s, rel=1e-9)


@pytest.mark.parametrize("host_of", [[0, 0, 1, 1, 1], [0, 1, 0, 1]])
def test_all_workers_are_simulated_where_hosts_differ(host_of: list[int]) -> None:
    made = run("allreduce", workers=len(host_of), layout=Layout(host_of), iterations=1)
    assert {m[1] for m in made.trace} == set(range(len(host_of)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", ["ring", "mesh"])
@pytest.mark.parametrize(("hosts", "each"), [(2, 4), (4, 2), (3, 3)])
def test_a_host_sends_what_its_sums_need_however_many_processes_it_has(
    kind: str, topology: str, hosts: int, each: int
) -> None:
    """``2 (H-1)/H`` of the gradients; a ring of all workers sent ``2 (P-1)/P``."""
    nbytes = 12_000_000
    model = Model((TimedLayer(0.0, 0.0, (0,)),), (TensorSpec("t", (nbytes // 4,), "float32", 4),))
    traffic, layout = Traffic(), Layout.even(hosts, each)
    options: dict = {"workers": hosts * each, "layout": layout, "work": FREE, "iterations": 3}
    made = run(f"{KINDS[kind]},topology={topology}", model, traffic=traffic, **options)
    sent = 2 * (hosts - 1) / hosts * nbytes
    assert traffic.sent == {0: pytest.approx(3 * sent, rel=1e-3)}
    assert made.bytes_per_host == pytest.approx(sent, rel=1e-3)
    assert made.median_s == pytest.approx(sent / GBIT.bytes_per_s, rel=0.08)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hosts", "each"), [(2, 8), (4, 4), (8, 8)])
def test_small_sums_leave_a_host_once_however_many_processes_it_has(
    kind: str, hosts: int, each: int
) -> None:
    nbytes = 40_960
    model = Model((TimedLayer(0.0, 0.0, (0,)),), (TensorSpec("t", (nbytes // 4,), "float32", 4),))
    options: dict = {"workers": hosts * each, "layout": Layout.even(hosts, each), "work": FREE}
    made = run(KINDS[kind], model, iterations=3, **options)
    assert made.bytes_per_host == pytest.approx(2 * (hosts - 1) / hosts * nbytes, rel=0.02)


@pytest.mark.parametrize(("hosts", "each"), [(2, 8), (4, 4), (8, 8)])
def test_factors_leave_a_host_once_however_many_processes_it_has(hosts: int, each: int) -> None:
    model = Model((TimedLayer(0.0, 0.0, (0,)),), (TensorSpec("t", (640, 1280), "float32", 4),))
    options: dict = {"workers": hosts * each, "layout": Layout.even(hosts, each), "work": FREE}
    strategy = "allreduce:compression=lowrank@1:auto_disable=false"
    made = run(strategy, model, iterations=3, **options)
    factors = 4 * (640 + 1280)
    assert made.bytes_per_host == pytest.approx(2 * (hosts - 1) / hosts * factors, rel=0.1)


def test_bytes_of_a_host_count_this_run_and_all_hosts() -> None:
    traffic = Traffic()
    once, again = (run("allreduce", traffic=traffic, iterations=2) for _ in range(2))
    every = run("allreduce", sleeps=lambda _rank, _iteration: 0.0, iterations=2)
    assert once.bytes_per_host == again.bytes_per_host > 0
    assert every.bytes_per_host == pytest.approx(once.bytes_per_host)


def test_exposed_communication_is_what_computation_does_not_hide() -> None:
    for kind in KINDS.values():
        slow = run(kind, links=Links(bytes_per_s=12.5e6), work=FREE)
        computed = sum(layer.forward_s + layer.backward_s for layer in small().layers)
        assert slow.exposed_s == pytest.approx(slow.median_s - computed)
        assert run(kind, workers=1, work=FREE).exposed_s == 0.0


def test_a_slow_worker_holds_up_the_sums_of_its_host() -> None:
    options: dict = {"workers": 4, "layout": Layout.even(2, 2), "links": Links(bytes_per_s=1e12)}
    usual, slowed = (run("allreduce", slow=s, **options).median_s for s in ({}, {3: 2.0}))
    assert slowed == pytest.approx(2 * usual, rel=0.05)


def test_shared_memory_is_the_limit_where_links_are_faster() -> None:
    nbytes = 40_000_000
    model = Model((TimedLayer(0.0, 0.0, (0,)),), (TensorSpec("t", (nbytes // 4,), "float32", 4),))
    fast = Links(bytes_per_s=1e12, latency_s=0.0)
    near = Links(bytes_per_s=1e9, latency_s=0.0)
    options: dict = {"workers": 4, "layout": Layout.even(2, 2), "links": fast, "work": FREE}
    made = run("allreduce", model, local=near, iterations=3, **options)
    # A worker sends half of the gradients to the other of its host, and a half again as the result.
    assert made.median_s == pytest.approx(nbytes / 1e9, rel=0.05)


layers = st.lists(
    st.tuples(st.floats(0, 0.02), st.floats(0, 0.02), st.integers(1, 400_000)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(60))
@given(
    layers=layers,
    kind=st.sampled_from(sorted(KINDS)),
    workers=st.integers(2, 5),
    gbit=st.sampled_from([0.1, 1, 10]),
)
def test_no_iteration_is_shorter_than_the_bound(layers, kind, workers, gbit) -> None:
    model = Model(
        tuple(TimedLayer(f, b, (i,)) for i, (f, b, _) in enumerate(layers)),
        tuple(TensorSpec(f"t{i}", (n,), "float32", 4) for i, (_, _, n) in enumerate(layers)),
    )
    links = Links(bytes_per_s=gbit * 125e6, latency_s=0.0)
    made = run(KINDS[kind], model, workers, links=links, work=FREE, iterations=3)
    rows = [LayerCosts(f, b, 4.0 * n) for f, b, n in layers]
    per_byte = bound.seconds_per_byte([links.bytes_per_s] * workers)
    floor = bound.floor(baselines.parse(KINDS[kind]).traits.bound, rows, per_byte)
    assert floor is not None
    # A padded element or two is in the buckets and not in the bound.
    assert made.median_s >= floor * (1 - 1e-3) - 1e-9
    alone = sum(f + b for f, b, _ in layers)
    # Small buffers travel in single rounds, in which each worker sends to all others.
    single = [4 * workers * n <= DIRECT_BYTES for _, _, n in layers]
    rates = [(workers - 1) / links.bytes_per_s if each else 2 * per_byte for each in single]
    exchange = sum(
        rate * 4 * (n + 2 * workers) for rate, (_, _, n) in zip(rates, layers, strict=True)
    )
    assert made.median_s <= (alone + exchange) * 1.001 + 1e-9


def test_every_bucket_is_exchanged_and_updated_once_in_each_iteration() -> None:
    model = small()
    buckets = len(buckets_of(model, baselines.parse(KINDS["dear"]).plan.fusion()).forward)
    assert buckets > 3
    trace = run(KINDS["dear"], model, iterations=3).trace
    for what in ("reduce_scatter", "all_gather", "update"):
        assert sorted(b for _, _, w, b in trace if w == what) == sorted([*range(buckets)] * 3)
    whole = run(KINDS["allreduce"], model, iterations=3).trace
    assert [w for _, _, w, _ in whole].count("step") == 3
    assert [w for _, _, w, _ in whole].count("all_reduce") == 3 * buckets


@pytest.mark.parametrize("strategy", KINDS.values())
def test_a_slow_worker_holds_everybody_back(strategy: str) -> None:
    usual = run(strategy).median_s
    slowed = run(strategy, slow={3: 2.0}).median_s
    assert slowed > 1.5 * usual


@pytest.mark.parametrize("strategy", KINDS.values())
def test_two_interfaces_are_faster_than_one(strategy: str) -> None:
    slow = Links(bytes_per_s=12.5e6)
    both = Links(bytes_per_s=12.5e6, count=2)
    assert run(strategy, links=both).median_s < 0.75 * run(strategy, links=slow).median_s


def test_who_sleeps_before_an_iteration_holds_everybody_back_by_that() -> None:
    usual = run("allreduce:mb=1", slow={0: 1.0}, iterations=4).iterations_s
    asked = []

    def sleeps(rank: int, iteration: int) -> float:
        asked.append((rank, iteration))
        return 0.7 if (rank, iteration) in ((1, 2), (3, 4)) else 0.0

    slept = run("allreduce:mb=1", sleeps=sleeps, iterations=4).iterations_s
    assert sorted(asked) == [(rank, i) for rank in range(4) for i in range(1, 5)]
    more = [b - a for a, b in zip(usual, slept, strict=True)]
    assert more == pytest.approx([0.0, 0.7, 0.0, 0.7], abs=2e-3)


@pytest.mark.parametrize("partitions", [0, 2, 8])
def test_parts_of_gradients_take_the_time_of_their_bytes(partitions: int) -> None:
    """Ako: each worker sends a part, a flag for each parameter, and four turns."""
    numel, workers = 8_000_000, 4
    model = Model((TimedLayer(0.0, 0.0, (0,)),), (TensorSpec("t", (numel,), "float32", 4),))
    traffic = Traffic()
    links = Links(bytes_per_s=125e6, latency_s=0.0)
    made = run(
        f"ako:partitions={partitions}",
        model,
        workers,
        links=links,
        work=FREE,
        iterations=3,
        traffic=traffic,
    )
    sent = (workers - 1) * 4 * (numel // (partitions or workers) + 1 + 4)
    assert traffic.sent == {0: 3 * sent}
    assert made.median_s == pytest.approx(sent / links.bytes_per_s, rel=0.05)


def test_dear_hides_more_than_wfbp_does() -> None:
    slow = Links(bytes_per_s=12.5e6)
    dear, wfbp = (run(KINDS[kind], links=slow).median_s for kind in ("dear", "allreduce"))
    assert dear < 0.9 * wfbp


def test_one_worker_takes_its_own_time() -> None:
    model = small()
    alone = sum(layer.forward_s + layer.backward_s for layer in model.layers)
    for strategy in KINDS.values():
        assert run(strategy, model, workers=1, work=FREE).median_s == pytest.approx(alone)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: run("allreduce", workers=0), "workers=0"),
        (lambda: run("dear", iterations=0), "iterations=0"),
        (
            lambda: run("allreduce:compression=sketch:share=0.5:total=9:auto_disable=false"),
            "in a share of the iterations",
        ),
        (lambda: run("canary"), "iterations of their own .Bounded, Canary. are another"),
        (lambda: run("geryon:update=server"), 'update="server"'),
        (lambda: Links(bytes_per_s=0.0), "bytes_per_s=0.0"),
        (lambda: Links(bytes_per_s=1.0, latency_s=-1.0), "latency_s=-1.0"),
        (lambda: Links(bytes_per_s=1.0, count=0), "count=0"),
        (lambda: Links(bytes_per_s=1.0, quantum=0), "quantum=0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(call, words) -> None:
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.parametrize(
    ("strategy", "wakes"),
    [("allreduce", 3), ("dear:plan=fixed", 4), ("geryon:classes=1,encrypted=false", 5)],
)
def test_threads_that_wake_idle_processors_prolong_an_iteration(strategy: str, wakes: int) -> None:
    """By so many wakes one after the other: of training, of the lane or client, of the server."""
    model = Model((TimedLayer(0.01, 0.03, (0,)),), (TensorSpec("t", (4096,), "float32", 4),))
    links = Links(bytes_per_s=1e9, latency_s=2e-3)
    usual, late = (
        simulate(
            model,
            baselines.parse(strategy),
            2,
            links,
            work=Work(start_s=1e-6, step_s=1e-6, wake_s=wake_s),
            cores=8,
        ).median_s
        for wake_s in (0.0, 1e-4)
    )
    assert late - usual == pytest.approx(wakes * 1e-4, rel=1e-6)
