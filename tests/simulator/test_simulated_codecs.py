"""Codecs, low rank, divided optimizers and shared processors in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from wingbeat import TopK
from wingbeat.codecs import Coding, make
from wingbeat.codecs.codec import Dense, HalfCodec, SketchCodec
from wingbeat.codecs.coding import Region
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.topk import TopKCodec
from wingbeat.compression import Coded
from wingbeat.errors import UsageError
from wingbeat.simulator import Links, Model, Run, TimedLayer, Traffic, Work, simulate
from wingbeat.simulator.codecs import (
    ADDED,
    CAST,
    SKETCH,
    SKETCH_4,
    Price,
    Prices,
    factors_sent,
    seconds_of,
)
from wingbeat.types import Layout, Span, TensorSpec, blocks_of
from wingbeat_lab import baselines, paced

GBIT = Links(bytes_per_s=125e6, latency_s=0.0)
FAST = Links(bytes_per_s=1e15, latency_s=0.0)
FREE = Work(
    chunk_s=0.0, wire_s_per_byte=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0,
    update_s_per_byte=0.0, codecs=0.0,
)  # fmt: skip
NUMEL = 4 * 1024 * 1024
SHAPE = (2048, 2048)
CODECS = ["bf16", "fp16", "sketch", "sketch@4", "topk@0.01", "lowrank@2", "lowrank@2:bits=8"]


def one_tensor(shape: tuple[int, ...] = SHAPE) -> Model:
    """A model of one parameter, which takes no time to compute."""
    return Model((TimedLayer(0.0, 0.0, (0,)),), (TensorSpec("t", shape, "float32", 4),))


def run(strategy: str, model: Model | None = None, workers: int = 4, **options: object) -> Run:
    given = {"links": GBIT, "work": FREE, "iterations": 3} | options
    return simulate(model or one_tensor(), baselines.parse(strategy), workers, **given)  # type: ignore[arg-type]


def sent(strategy: str, workers: int = 4, **options: object) -> float:
    """Bytes that the first host sends in an iteration."""
    traffic = Traffic()
    run(strategy, workers=workers, traffic=traffic, **options)
    assert set(traffic.sent) == {0} or "layout" not in options
    return traffic.sent[0] / 3


def by_blocks(codec: object, workers: int, chunk: int) -> int:
    """Bytes of a sum by blocks: each block to its owner, and the own sum to all others."""
    coding = Coding([Region(Span(0, NUMEL), codec)])  # type: ignore[arg-type]
    blocks = [sum(map(coding.room, block.cut(chunk))) for block in blocks_of(NUMEL, workers)]
    return sum(blocks[1:]) + (workers - 1) * blocks[0]


@pytest.mark.parametrize("kind", ["allreduce", "dear:plan=fixed"])
@pytest.mark.parametrize(
    ("wire", "codec"),
    [("sketch", SketchCodec(8)), ("sketch@4", SketchCodec(4)), ("fp16", HalfCodec())],
)
def test_sums_by_blocks_send_the_bytes_of_the_codec(kind: str, wire: str, codec: object) -> None:
    joined = f"{kind}{',' if ':' in kind else ':'}compression={wire}"
    bits = 16 if wire == "fp16" else codec.bits  # type: ignore[attr-defined]
    chunk = min(NUMEL // 4 // 4, (1 << 20) * 8 // bits)
    assert sent(joined) == by_blocks(codec, 4, chunk)


def test_bf16_halves_the_bytes_of_each_hop() -> None:
    dense = sent("allreduce")
    assert dense == 2 * 3 / 4 * 4 * NUMEL
    assert sent("allreduce:compression=bf16") == dense / 2


def test_top_k_sends_each_payload_to_all_others() -> None:
    codec = make(TopK(density=0.01), 10**9)
    row = math.ceil(codec.nbytes(NUMEL) / 8) * 8
    for workers in (2, 4, 8):
        bytes_sent = sent("allreduce:compression=topk@0.01", workers)
        assert bytes_sent == pytest.approx((workers - 1) * row)
    # In two halves it is summed by blocks.
    halves = sent("dear:plan=fixed,compression=topk@0.01", 8)
    assert halves < 0.5 * sent("allreduce:compression=topk@0.01", 8)


@pytest.mark.parametrize("kind", ["allreduce:", "dear:plan=fixed,"])
def test_low_rank_sums_both_factors(kind: str) -> None:
    first, second = 2048 * 2 + 1 + 3, 2048 * 2  # padded to a multiple of 4
    wanted = 2 * 3 / 4 * 4 * (first + second)
    assert sent(f"{kind}compression=lowrank@2") == pytest.approx(wanted)


def test_codecs_are_not_used_inside_a_host() -> None:
    options: dict = {"layout": Layout.even(2, 4), "workers": 8}
    encoded = sent("allreduce:compression=sketch", **options)
    assert encoded == pytest.approx(sent("allreduce", **options) / 4, rel=0.01)
    slow_inside = Links(bytes_per_s=1e8, latency_s=0.0)
    inside = [
        run(name, links=FAST, local=slow_inside, **options).median_s
        for name in ("allreduce", "allreduce:compression=sketch")
    ]
    assert inside[0] == pytest.approx(inside[1], rel=0.05)


@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize("kind", ["allreduce:mb=1,", "dear:plan=fixed,mb=1,"])
@pytest.mark.parametrize("layout", [Layout.even(4, 1), Layout.even(2, 2)])
def test_one_host_stands_for_all_with_a_codec(wire: str, kind: str, layout: Layout) -> None:
    model = paced.simulator_model(paced.parse("paced:resnet50@0.02"))
    name = f"{kind}compression={wire}"
    options: dict = {"work": Work(), "layout": layout, "iterations": 2}
    alone = run(name, model, **options)
    all_of_them = run(name, model, slow={0: 1.0}, **options)
    # Blocks begin at other places of tensors, so their payloads differ by some bytes.
    assert alone.iterations_s == pytest.approx(all_of_them.iterations_s, rel=1e-4)
    uneven = wire == "lowrank@2:bits=8"
    assert len({m[1] for m in alone.trace}) == (4 if uneven else len(layout.hosts[0]))


@pytest.mark.parametrize(
    ("codec", "wanted"),
    [
        (Dense(), (0.0, 0.0)),
        (HalfCodec(), CAST),
        (SketchCodec(8), SKETCH),
        (SketchCodec(4), SKETCH_4),
    ],
)
def test_seconds_are_those_measured(codec: object, wanted: tuple[float, float]) -> None:
    assert seconds_of(codec) == wanted  # type: ignore[arg-type]


def test_seconds_of_top_k_pass_through_what_was_measured() -> None:
    for density, encode, decode in ((0.001, 8.89, 30.55), (0.01, 5.67, 18.18)):
        made = seconds_of(TopKCodec(density))
        assert made == pytest.approx((1e-9 / encode, 1e-9 / decode), rel=0.02)
    assert seconds_of(LowRankCodec(4)).decode > seconds_of(LowRankCodec(1)).decode


def test_an_owner_decodes_each_contribution_and_encodes_the_sum_once() -> None:
    work = replace(FREE, codecs=1.0)
    for workers in (2, 4, 8):
        made = run("allreduce:compression=sketch", workers=workers, links=FAST, work=work)
        block = 4 * NUMEL / workers
        encoded = (workers - 1) * block + block
        # Contributions, the own sum in place, and the others' sums.
        decoded = (workers - 1) * block + block + (workers - 1) * block
        wanted = encoded * SKETCH.encode + decoded * SKETCH.decode
        assert made.median_s == pytest.approx(wanted, rel=0.02)


def test_gathered_payloads_are_encoded_by_the_training_thread_and_decoded_beside() -> None:
    work = replace(FREE, codecs=1.0)
    made = run("allreduce:compression=topk@0.01", links=FAST, work=work)
    each = seconds_of(TopKCodec(0.01))
    assert made.median_s == pytest.approx(
        4 * NUMEL * (each.encode + (1 + 3 * ADDED) * each.decode), rel=1e-3
    )


@pytest.mark.parametrize("wire", CODECS)
def test_slower_codecs_take_in_proportion(wire: str) -> None:
    name = f"allreduce:compression={wire}"
    once, twice = (
        run(name, links=FAST, work=replace(FREE, codecs=factor)).median_s for factor in (1.0, 2.0)
    )
    # A matrix costs 160 microseconds besides: what is kept is computed after the second sum.
    fixed = 160e-6 if wire == "lowrank@2" else 0.0
    assert once > 1e-5
    assert twice - fixed == pytest.approx(2 * (once - fixed), rel=1e-3)


def test_what_each_matrix_costs_is_work_of_a_processor_however_codecs_are_slowed() -> None:
    wire = baselines.parse("allreduce:compression=lowrank@2").wire
    assert isinstance(wire, Coded)
    parameters = [("a", (64, 32)), ("b", (64, 32))]
    usual = factors_sent(wire, parameters[:1], 1.0, 0.0)
    slow, both = (factors_sent(wire, parameters[:count], 10.0, 0.9) for count in (1, 2))
    for name in ("begin", "between", "keep", "end"):
        plain, slowed = getattr(usual, name), getattr(slow, name)
        # A processor works as long, and is idle for nine times what grows with the matrix.
        assert slowed.busy == pytest.approx(plain.busy)
        assert plain.idle == 0
        assert 0 < slowed.idle < 9 * plain.busy / 2
        assert getattr(both, name).seconds == pytest.approx(2 * slowed.seconds)


def test_workers_of_a_host_wait_for_its_processors() -> None:
    options: dict = {"workers": 8, "layout": Layout.even(2, 4), "work": replace(FREE, codecs=1.0)}
    options |= {"links": FAST, "local": FAST}
    many, one = (
        run("allreduce:compression=sketch", cores=cores, **options).median_s for cores in (None, 1)
    )
    assert one == pytest.approx(4 * many, rel=0.05)
    assert run("allreduce:compression=sketch", cores=4, **options).median_s == pytest.approx(many)


def test_hosts_of_one_machine_share_its_processors() -> None:
    options: dict = {"workers": 4, "work": replace(FREE, codecs=1.0), "links": FAST}
    own, shared = (
        run("allreduce:compression=sketch", cores=1, one_machine=each, **options).median_s
        for each in (False, True)
    )
    assert shared == pytest.approx(4 * own, rel=0.05)


def test_processors_are_free_while_slowed_codecs_sleep() -> None:
    options: dict = {"workers": 4, "links": FAST, "cores": 1, "one_machine": True}
    once, slowed, sleeping = (
        run("allreduce:compression=sketch", work=replace(FREE, **work), **options).median_s
        for work in (
            {"codecs": 1.0},
            {"codecs": 8.0},
            {"codecs": 8.0, "codecs_idle": 7 / 8},
        )
    )
    assert slowed == pytest.approx(8 * once, rel=0.01)
    # Four workers sleep for as long as eight times the work of one.
    assert 2 * once < sleeping < 4 * once


def test_servers_of_a_host_wait_for_its_processors() -> None:
    options: dict = {"workers": 4, "links": FAST, "work": replace(FREE, message_s=1e-3)}
    many, one = (run("geryon", cores=cores, **options).median_s for cores in (None, 1))
    shared = run("geryon", cores=1, one_machine=True, **options).median_s
    assert 1.2 * many < one < shared / 2


def test_a_divided_optimizer_updates_a_part_on_each_worker() -> None:
    work = replace(FREE, update_s_per_byte=1e-9)
    name = "dear:plan=fixed,shard_optimizer={}"
    whole, divided = (
        run(name.format(each), links=FAST, work=work).median_s for each in ("false", "true")
    )
    assert whole == pytest.approx(4 * NUMEL * 1e-9, rel=1e-3)
    assert divided == pytest.approx(NUMEL * 1e-9, rel=1e-2)


def test_a_divided_optimizer_gathers_parameters_and_tells_the_others_before() -> None:
    model = paced.simulator_model(paced.parse("paced:resnet50@0.02"))
    made = run("dear:plan=fixed,mb=1,shard_optimizer=true", model, iterations=3)
    actions = [action for _, _, action, _ in made.trace]
    buckets = actions.count("reduce_scatter") // 3
    assert buckets > 1
    assert actions.count("all_gather_parameters") == 3 * buckets
    assert "all_gather" not in actions
    dense = sent("dear:plan=fixed")
    assert dense < sent("dear:plan=fixed,shard_optimizer=true") < dense + 2000


def test_parameters_of_a_divided_optimizer_are_not_encoded() -> None:
    encoded = sent("dear:plan=fixed,shard_optimizer=true,compression=sketch")
    assert encoded == pytest.approx(3 / 4 * 4 * NUMEL * (1 + 1 / 4), rel=0.01)


def test_processors_that_nobody_can_have_are_refused() -> None:
    with pytest.raises(UsageError, match="cores=0"):
        run("allreduce", cores=0)


NOTHING = Price(0.0, 0.0)
NO_PRICES = Prices(
    pack=NOTHING, unpack=NOTHING, encode=NOTHING, decode=NOTHING, factors=(NOTHING,) * 4
)


def priced_s(strategy: str, **prices: object) -> float:
    """Seconds of an iteration on fast links with codecs at these prices, twice for bytes."""
    work = replace(FREE, codecs=2.0, prices=replace(NO_PRICES, **prices))  # type: ignore[arg-type]
    return run(strategy, links=FAST, work=work).median_s


@pytest.mark.parametrize(
    ("strategy", "step", "calls", "buffers"),
    [
        # Two workers exchange their halves, each in two chunks, then the results.
        ("allreduce:compression=sketch", "pack", None, 1.0),
        ("allreduce:compression=sketch", "unpack", None, 1.0),
        ("allreduce:compression=topk@0.01", "encode", 1, 1.0),
        ("allreduce:compression=topk@0.01", "decode", 2, 2.0),
    ],
)
def test_codecs_take_their_prices(
    strategy: str, step: str, calls: int | None, buffers: float
) -> None:
    def seconds(price: Price) -> float:
        work = replace(FREE, codecs=2.0, prices=replace(NO_PRICES, **{step: price}))
        return run(strategy, workers=2, links=FAST, work=work).median_s

    grown = seconds(Price(0.0, 1e-9))
    assert grown == pytest.approx(2 * buffers * 4 * NUMEL * 1e-9, rel=0.01)
    fixed = seconds(Price(1e-3, 0.0))
    if calls is None:
        calls = round(fixed / 1e-3)
        assert calls >= 2  # a contribution and a result, in any number of chunks
    assert fixed == pytest.approx(calls * 1e-3, rel=0.01)
    assert seconds(NOTHING) < 0.01 * fixed


@pytest.mark.parametrize("step", range(4))
def test_low_rank_takes_a_price_for_each_matrix_and_for_its_bytes(step: int) -> None:
    def seconds(price: Price) -> float:
        factors = tuple(price if i == step else NOTHING for i in range(4))
        return priced_s("allreduce:compression=lowrank@1", factors=factors)

    assert seconds(Price(1e-3, 0.0)) == pytest.approx(1e-3, rel=0.01)
    assert seconds(Price(0.0, 1e-9)) == pytest.approx(2 * 4 * NUMEL * 1e-9, rel=0.01)


def test_casts_have_no_prices() -> None:
    dear = "allreduce:compression=bf16"
    assert priced_s(dear) == run(dear, links=FAST, work=replace(FREE, codecs=2.0)).median_s > 0
