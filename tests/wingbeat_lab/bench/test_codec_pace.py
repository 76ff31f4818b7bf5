"""Codec work takes as long as on the whole model: in time that is not the real one."""

from __future__ import annotations

import contextlib
import time as clock
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from helpers import tcp
from wingbeat import _native
from wingbeat.codecs.codec import SketchCodec
from wingbeat.codecs.coding import Coding, Region
from wingbeat.codecs.lowrank import Factors, Matrix
from wingbeat.collectives import Collectives, Encoded
from wingbeat.simulator.codecs import Price
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Span
from wingbeat_lab.bench import models, pace
from wingbeat_lab.bench.pace import Calls, Pace, Size, prices, typical


class Time:
    """CPU time passes only where work says so, and other time where somebody sleeps."""

    def __init__(self) -> None:
        self.cpu, self.slept = 0.0, []

    def thread_time(self) -> float:
        return self.cpu

    def perf_counter(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def work(self, seconds: float) -> None:
        self.cpu += seconds


def one(*_: Any) -> Size:
    """Size of a call: one unit of 100 bytes."""
    return Size(1, 100)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    made = Time()
    monkeypatch.setattr(pace, "time", made)
    monkeypatch.setattr(pace, "_owed", SimpleNamespace())
    return made


@pytest.mark.parametrize(("factor", "slept"), [(1.5, 0.5), (20.0, 19.0), (160.0, 159.0)])
def test_codec_pace_sleeps_the_rest_of_the_stated_time(
    time: Time, factor: float, slept: float
) -> None:
    Pace(factor).slowed(time.work, "work", one)(1.0)
    assert time.slept == pytest.approx([slept])


@pytest.mark.parametrize(
    ("stretch", "scale", "price", "whole"),
    [
        (1.0, 0.05, Price(3.0, 0.0), 3.0),
        (1.0, 0.05, Price(0.0, 0.01), 20.0),
        (1.0, 0.05, Price(3.0, 0.01), 23.0),
        (8.0, 0.05, Price(3.0, 0.01), 184.0),
    ],
)
def test_a_call_lasts_as_long_as_its_price_whatever_it_took(
    time: Time, stretch: float, scale: float, price: Price, whole: float
) -> None:
    work = Pace(stretch, scale, {"work": price}).slowed(time.work, "work", one)
    for spent in (1.0, 2.0, 0.1):
        time.slept.clear()
        work(spent)
        assert sum(time.slept) == pytest.approx(whole - spent)


def test_a_fixed_time_is_of_each_unit(time: Time) -> None:
    own = Pace(1.0, 0.5, {"work": Price(2.0, 0.0)})
    own.slowed(time.work, "work", lambda _: Size(5, 100))(1.0)
    assert time.slept == pytest.approx([9.0])


def test_a_call_that_took_longer_than_its_price_shortens_the_next(time: Time) -> None:
    work = Pace(1.0, 0.5, {"work": Price(2.0, 0.0)}).slowed(time.work, "work", one)
    work(2.5)
    assert time.slept == []
    work(1.0)
    assert time.slept == pytest.approx([0.5])


def test_a_function_without_a_price_is_scaled_whole(time: Time) -> None:
    Pace(1.0, 0.5, {"other": Price(9.0, 0.0)}).slowed(time.work, "work", one)(1.0)
    assert time.slept == pytest.approx([1.0])


def test_work_that_is_measured_is_not_slowed(time: Time) -> None:
    own = Pace(1.0, 0.05)
    work = own.slowed(time.work, "work", one)
    with own.measured() as calls:
        work(1.0)
        work(3.0)
    assert time.slept == []
    assert calls == {"work": Calls(4.0, 2, 200)}
    work(1.0)
    assert time.slept == pytest.approx([19.0])


@pytest.mark.parametrize(
    ("large", "small", "price"),
    [
        # 10 calls of 100 bytes in all, and as many of 25, or half as many.
        (Calls(20.0, 10, 100), Calls(5.0, 10, 25), Price(0.0, 0.2)),
        (Calls(20.0, 10, 100), Calls(20.0, 10, 25), Price(2.0, 0.0)),
        (Calls(20.0, 10, 100), Calls(12.5, 10, 25), Price(1.0, 0.1)),
        (Calls(20.0, 10, 100), Calls(7.5, 5, 25), Price(1.0, 0.1)),
        (Calls(20.0, 10, 100), Calls(1.0, 10, 25), Price(0.0, 0.2)),
        (Calls(20.0, 10, 100), Calls(40.0, 10, 25), Price(2.0, 0.0)),
        (Calls(20.0, 10, 100), Calls(9.0, 10, 100), Price(0.0, 0.2)),  # as large
    ],
)
def test_prices_are_a_line_through_a_model_and_a_smaller_one(
    large: Calls, small: Calls, price: Price
) -> None:
    (found,) = prices({"work": large}, {"work": small}).values()
    assert found == pytest.approx(price)
    assert large.units * found.fixed_s + large.nbytes * found.s_per_byte == pytest.approx(20.0)


def test_a_function_that_the_smaller_model_did_not_call_has_no_fixed_time() -> None:
    found = prices({"a": Calls(1.0, 2, 4)}, {"b": Calls(1.0, 1, 1)})
    assert found == {"a": Price(0.0, 0.25)}


def test_typical_calls_are_the_median_for_each_byte() -> None:
    found = [{"a": Calls(seconds, 1, nbytes)} for seconds, nbytes in ((8.0, 8), (3.0, 1), (2.0, 1))]
    assert typical([*found, {"b": Calls(1.0, 1, 1)}]) == {
        "a": Calls(2.0, 1, 1),
        "b": Calls(1.0, 1, 1),
    }


def test_codec_pace_combines_short_sleeps(time: Time) -> None:
    work = Pace(2.0).slowed(time.work, "work", one)
    for _ in range(3):
        work(0.09e-3)
    assert time.slept == pytest.approx([0.27e-3])
    work(0.09e-3)
    assert len(time.slept) == 1


def test_a_sleep_that_is_too_long_shortens_the_next(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: time.slept.append(seconds + 0.5))
    work = Pace(2.0).slowed(time.work, "work", one)
    work(1.0)
    work(1.0)
    assert time.slept == pytest.approx([1.5, 1.0])


def test_a_codec_inside_of_another_is_slowed_once(time: Time) -> None:
    own = Pace(3.0)
    inner = own.slowed(time.work, "inner", one)
    own.slowed(inner, "outer", one)(1.0)
    assert time.slept == pytest.approx([2.0])


def test_work_that_fails_takes_its_time_and_raises(time: Time) -> None:
    def fail() -> None:
        time.work(1.0)
        raise ValueError("payload")

    work = Pace(2.0).slowed(fail, "fail", lambda: one())
    for count in (1, 2):
        with pytest.raises(ValueError, match="payload"):
            work()
        assert time.slept == pytest.approx([1.0] * count)


def encoded() -> Any:
    coding = Coding([Region(Span(0, 4096), SketchCodec(8))])
    buffer = torch.linspace(-1.0, 1.0, 4096)
    payload = torch.zeros(coding.room(Span(0, 4096)), dtype=torch.uint8)
    coding.encode(buffer, Span(0, 4096), payload)
    coding.decode(payload, buffer, Span(0, 4096))
    return buffer


def test_encoding_and_decoding_are_slowed_and_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, seconds = encoded(), []
    monkeypatch.setattr(pace, "_owed", SimpleNamespace())
    monkeypatch.setattr(pace, "SHORTEST_S", 0.0)
    monkeypatch.setattr(pace.time, "sleep", seconds.append)
    undo = Pace(1.0, 0.001).install()
    try:
        assert torch.equal(encoded(), plain)
        assert len(seconds) == 2
    finally:
        undo()
    encoded()
    assert len(seconds) == 2


def sum_in_lanes(members: list[World]) -> torch.Tensor:
    coding = Coding([Region(Span(0, 1 << 20), SketchCodec(8))])

    def body(world: World) -> torch.Tensor:
        buffer = torch.linspace(-1.0, 1.0, 1 << 20)
        Collectives(world).all_reduce(buffer, wire=Encoded(coding)).wait()
        return buffer

    return loopback.run(members, body)[0]


def lane_seconds(members: list[World]) -> float:
    begin = clock.perf_counter()
    sum_in_lanes(members)
    return clock.perf_counter() - begin


@pytest.fixture
def members() -> Iterator[list[World]]:
    made = tcp.worlds(2)
    yield made
    tcp.close(made)


def test_work_of_lanes_takes_its_share_on_the_whole_model(members: list[World]) -> None:
    """Each rank encodes a half for the other, and a half as the result, and decodes three."""
    plain, spent = sum_in_lanes(members), _native.codec_work()
    undo = Pace(2.0, 0.02).install()
    try:
        begin = clock.perf_counter()
        assert torch.equal(sum_in_lanes(members), plain)
        seconds = clock.perf_counter() - begin
    finally:
        undo()
    ns = sum(new[2] - old[2] for old, new in zip(spent, _native.codec_work(), strict=True))
    assert seconds > 0.9 * 100.0 * ns / 1e9 / 2  # the two ranks sleep at the same time
    assert lane_seconds(members) < seconds


def test_lanes_take_the_price_of_their_calls_and_bytes(members: list[World]) -> None:
    """Each rank packs and unpacks half a buffer twice: 4 MB, in any number of chunks."""
    sum_in_lanes(members)
    for price, wanted in ((Price(0.0, 100e-9), 4 * 0.2), (Price(0.05, 0.0), 4 * 0.05)):
        own = Pace(1.0, 0.999)
        undo = own.install()
        try:
            own.use({"pack": price, "unpack": price})
            seconds = lane_seconds(members)
        finally:
            undo()
        assert seconds > 0.95 * wanted
    # Without a price the same work takes no longer than its own time.
    own = Pace(1.0, 0.999)
    undo = own.install()
    try:
        assert lane_seconds(members) < seconds
    finally:
        undo()


def test_work_of_lanes_that_is_measured_is_not_slowed(members: list[World]) -> None:
    sum_in_lanes(members)
    own = Pace(100.0, 0.01)
    undo = own.install()
    try:
        with own.measured() as calls:
            seconds = lane_seconds(members)
    finally:
        undo()
    assert set(calls) == {"pack", "unpack"}
    assert all(each.units >= 2 and each.seconds > 0.0 for each in calls.values())
    assert calls["pack"].nbytes == 2 * (4 << 20)  # a contribution and a result of each rank
    assert seconds < 100.0 * sum(each.seconds for each in calls.values())


@pytest.mark.parametrize("hook", ["fp16_compress_hook", "bf16_compress_hook"])
def test_both_halves_of_a_hook_of_ddp_are_slowed(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(pace, "_owed", SimpleNamespace())
    monkeypatch.setattr(pace, "SHORTEST_S", 0.0)
    monkeypatch.setattr(pace.time, "sleep", seconds.append)
    summed: Any = torch.futures.Future()
    monkeypatch.setattr(
        default_hooks.dist,
        "all_reduce",
        lambda *_, **__: SimpleNamespace(get_future=lambda: summed),
    )
    monkeypatch.setattr(default_hooks.dist, "group", SimpleNamespace(WORLD=1))
    future: Any = torch._C.Future
    before = future.then
    undo = Pace(50.0).install()
    try:
        values = torch.ones(8)
        bucket: Any = SimpleNamespace(buffer=lambda: values, is_last=lambda: True)
        group = SimpleNamespace(size=lambda: 1)
        made: Any = getattr(default_hooks, hook)(group, bucket)
        halves = len(seconds)
        summed.set_result([torch.ones(8, dtype=torch.float16)])
        made.wait()
    finally:
        undo()
    assert halves == 1
    assert len(seconds) == 2
    assert future.then is before


def test_codec_at_the_real_pace_is_not_slowed() -> None:
    before = Coding.encode
    Pace(0.05, 0.05).install()()
    Pace(0.1, 0.5).install()()
    assert Coding.encode is before


@pytest.mark.parametrize(
    ("model", "stretch", "factor"),
    [
        ("paced:resnet50", 1.0, 1.0),
        ("paced:resnet50@0.05", 1.0, 20.0),
        ("paced:resnet50@0.05", 8.0, 160.0),
        ("digits", 1.0, 1.0),
    ],
)
def test_scale_and_slow_motion_multiply(model: str, stretch: float, factor: float) -> None:
    assert models.parse(model, stretch=stretch).codec_factor == pytest.approx(factor)


def test_work_is_slowed_again_after_measuring_has_failed(time: Time) -> None:
    own = Pace(1.0, 0.5)
    with pytest.raises(ValueError, match="a row"), own.measured():
        raise ValueError("a row")
    own.slowed(time.work, "work", one)(1.0)
    assert time.slept == pytest.approx([1.0])


def test_a_models_calls_are_those_of_it_and_of_a_quarter_of_it(time: Time) -> None:
    own, shares = Pace(1.0, 0.5), []

    @contextlib.contextmanager
    def opened(share: float) -> Iterator[Callable[[int], None]]:
        shares.append(share)
        nbytes = round(100 * share)
        work = own.slowed(time.work, "work", lambda _: Size(1, nbytes))
        yield lambda _: work(0.25 + share)

    found = own.measure(opened)
    assert found == [{"work": Calls(1.25, 1, 100)}, {"work": Calls(0.5, 1, 25)}]
    assert prices(*found)["work"] == pytest.approx(Price(0.25, 0.01))
    assert shares == [1.0, 0.25]
    assert time.slept == []


def test_low_rank_is_counted_by_matrices(time: Time) -> None:
    matrices = [Matrix(name, 12 * i, 4, 3, 1) for i, name in enumerate("ab")]
    own = Pace(1.0, 0.5)
    undo = own.install()
    try:
        with own.measured() as calls:
            made = Factors(matrices, 24, 1).begin(torch.ones(24))
            made.compute_second()
            made.keep_residual()
            made.write_result()
    finally:
        undo()
    assert {name: (each.units, each.nbytes) for name, each in calls.items()} == {
        f"Round.{step}": (2, 96)
        for step in ("__init__", "compute_second", "keep_residual", "write_result")
    }
