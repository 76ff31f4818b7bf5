"""Codec work takes as long as on the whole model: in time that is not the real one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from wingbeat.bench import models, pace
from wingbeat.codecs.coding import Coding, Region
from wingbeat.codecs.sketch import SketchCodec
from wingbeat.types import Span


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
def test_work_is_followed_by_the_rest_of_its_time(time: Time, factor: float, slept: float) -> None:
    pace.slowed(time.work, factor)(1.0)
    assert time.slept == pytest.approx([slept])


def test_short_sleeps_are_put_together(time: Time) -> None:
    work = pace.slowed(time.work, 2.0)
    for _ in range(3):
        work(0.09e-3)
    assert time.slept == pytest.approx([0.27e-3])
    work(0.09e-3)
    assert len(time.slept) == 1


def test_a_sleep_that_is_too_long_shortens_the_next(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: time.slept.append(seconds + 0.5))
    work = pace.slowed(time.work, 2.0)
    work(1.0)
    work(1.0)
    assert time.slept == pytest.approx([1.5, 1.0])


def test_a_codec_inside_of_another_is_slowed_once(time: Time) -> None:
    inner = pace.slowed(time.work, 3.0)
    pace.slowed(inner, 3.0)(1.0)
    assert time.slept == pytest.approx([2.0])


def test_work_that_fails_takes_its_time_and_raises(time: Time) -> None:
    def fail() -> None:
        time.work(1.0)
        raise ValueError("payload")

    work = pace.slowed(fail, 2.0)
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
    undo = pace.slow_codecs(1000.0)
    try:
        assert torch.equal(encoded(), plain)
        assert len(seconds) == 2
    finally:
        undo()
    encoded()
    assert len(seconds) == 2


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
    undo = pace.slow_codecs(50.0)
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


def test_nothing_changes_at_the_real_pace() -> None:
    before = Coding.encode
    pace.slow_codecs(1.0)()
    pace.slow_codecs(0.5)()
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
