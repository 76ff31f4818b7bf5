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
from wingbeat.collectives import Collectives, Encoded
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Span
from wingbeat_lab.bench import models, pace
from wingbeat_lab.bench.pace import Calls, Pace, fixed_costs


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
    Pace(factor).slowed(time.work, "work")(1.0)
    assert time.slept == pytest.approx([slept])


@pytest.mark.parametrize(
    ("stretch", "scale", "fixed", "whole"),
    [
        (1.0, 0.05, 0.0, 20.0),
        (1.0, 0.05, 0.5, 10.5),
        (8.0, 0.05, 0.5, 84.0),
        (2.0, 0.05, 1.0, 2.0),
        (2.0, 0.05, 3.0, 2.0),  # a call that was shorter than the fixed part
    ],
)
def test_what_does_not_grow_with_the_model_is_only_stretched(
    time: Time, stretch: float, scale: float, fixed: float, whole: float
) -> None:
    own = Pace(stretch, scale, {"work": fixed})
    own.slowed(time.work, "work")(1.0)
    assert sum(time.slept) == pytest.approx(whole - 1.0)


def test_other_functions_have_their_own_fixed_costs(time: Time) -> None:
    Pace(1.0, 0.5, {"other": 1.0}).slowed(time.work, "work")(1.0)
    assert time.slept == pytest.approx([1.0])


def test_work_that_is_measured_is_not_slowed(time: Time) -> None:
    own = Pace(1.0, 0.05)
    work = own.slowed(time.work, "work")
    with own.measured() as calls:
        work(1.0)
        work(3.0)
    assert time.slept == []
    assert calls == {"work": Calls(4.0, 2)}
    work(1.0)
    assert time.slept == pytest.approx([19.0])


@pytest.mark.parametrize(
    ("large", "small", "fixed"),
    [(1.0, 0.25, 0.0), (1.0, 1.0, 1.0), (1.0, 0.4, 0.2), (1.0, 0.1, 0.0), (1.0, 2.0, 1.0)],
)
def test_fixed_costs_are_what_a_smaller_model_takes_too(
    large: float, small: float, fixed: float
) -> None:
    here, smaller = {"work": Calls(2 * large, 2)}, {"work": Calls(small, 1)}
    assert fixed_costs(here, smaller, 0.25) == pytest.approx({"work": fixed})


def test_a_function_that_was_not_called_has_no_fixed_costs() -> None:
    assert fixed_costs({"a": Calls(1.0, 1)}, {"b": Calls(1.0, 1)}, 0.25) == {}


def test_codec_pace_combines_short_sleeps(time: Time) -> None:
    work = Pace(2.0).slowed(time.work, "work")
    for _ in range(3):
        work(0.09e-3)
    assert time.slept == pytest.approx([0.27e-3])
    work(0.09e-3)
    assert len(time.slept) == 1


def test_a_sleep_that_is_too_long_shortens_the_next(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: time.slept.append(seconds + 0.5))
    work = Pace(2.0).slowed(time.work, "work")
    work(1.0)
    work(1.0)
    assert time.slept == pytest.approx([1.5, 1.0])


def test_a_codec_inside_of_another_is_slowed_once(time: Time) -> None:
    own = Pace(3.0)
    inner = own.slowed(time.work, "inner")
    own.slowed(inner, "outer")(1.0)
    assert time.slept == pytest.approx([2.0])


def test_work_that_fails_takes_its_time_and_raises(time: Time) -> None:
    def fail() -> None:
        time.work(1.0)
        raise ValueError("payload")

    work = Pace(2.0).slowed(fail, "fail")
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
    ns = sum(new[1] - old[1] for old, new in zip(spent, _native.codec_work(), strict=True))
    assert seconds > 0.9 * 100.0 * ns / 1e9 / 2  # the two ranks sleep at the same time
    assert lane_seconds(members) < seconds


def test_fixed_costs_of_lanes_are_only_stretched(members: list[World]) -> None:
    sum_in_lanes(members)
    own = Pace(2.0, 0.001)
    undo = own.install()
    try:
        own.use({"pack": 1e3, "unpack": 1e3})
        spent = _native.codec_work()
        seconds = lane_seconds(members)
        ns = sum(new[1] - old[1] for old, new in zip(spent, _native.codec_work(), strict=True))
    finally:
        undo()
    assert seconds < 500.0 * ns / 1e9  # without fixed costs each rank would take 1000 times


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
    assert all(each.count >= 2 and each.seconds > 0.0 for each in calls.values())
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
    own.slowed(time.work, "work")(1.0)
    assert time.slept == pytest.approx([1.0])


def test_a_models_fixed_costs_are_of_it_and_of_a_quarter_of_it(time: Time) -> None:
    own, shares = Pace(1.0, 0.5), []
    work = own.slowed(time.work, "work")

    @contextlib.contextmanager
    def opened(share: float) -> Iterator[Callable[[int], None]]:
        shares.append(share)
        yield lambda _: work(0.25 + share)

    assert own.price(opened) == pytest.approx({"work": 0.25})
    assert shares == [1.0, 0.25]
