"""Only backward counts, on the host and on a device; stragglers and liars do not."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.errors import PeerError
from wingbeat.planning import backward
from wingbeat.planning.backward import BackwardProfiler, combine

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(backward, "time", made)
    return made


def run(times: BackwardProfiler, clock: Clock, order, increments, engine_s: float = 3.0) -> None:
    """One backward: forward's tail, then each layer's time, then the engine's own."""
    times.begin()
    clock.now += 7.0
    for index, seconds in zip(order, increments, strict=True):
        clock.now += seconds
        times.enter(index)
        clock.now += engine_s
        times.leave()
    clock.now += 11.0
    times.end()


def test_profiler_engine_time_does_not_count(clock: Clock) -> None:
    times = BackwardProfiler(3, CPU, asynchronous=False)
    run(times, clock, [2, 1, 0], [5.0, 1.0, 2.0])
    assert times.order() == [2, 1, 0]
    assert times.medians() == pytest.approx([0.0, 1.0, 3.0])
    assert times.totals() == pytest.approx([3.0])


def test_profiler_each_iteration_counts_once_and_in_order(clock: Clock) -> None:
    times = BackwardProfiler(2, CPU, asynchronous=False)
    for seconds in (1.0, 2.0):
        run(times, clock, [1, 0], [0.0, seconds])
    assert times.totals() == pytest.approx([1.0, 2.0])
    run(times, clock, [1, 0], [0.0, 3.0])
    assert times.totals() == times.totals() == pytest.approx([1.0, 2.0, 3.0])


def test_profiler_straggler_is_left_out(clock: Clock) -> None:
    times = BackwardProfiler(2, CPU, asynchronous=False)
    for seconds in (1.0, 1.1, 9.0, 9.0, 1.2, 1.3, 1.4):
        run(times, clock, [1, 0], [0.0, seconds])
    assert times.totals() == pytest.approx([1.0, 1.1, 9.0, 9.0, 1.2, 1.3, 1.4])
    assert times.medians() == pytest.approx([0.0, 1.2])  # of the five that are left; else 1.3


def test_profiler_iteration_at_straggler_limit_counts(clock: Clock) -> None:
    times = BackwardProfiler(2, CPU, asynchronous=False)
    for seconds in (2.0, 3.0, 2.0):
        run(times, clock, [1, 0], [0.0, seconds])
    assert len(times._typical()) == 3
    run(times, clock, [1, 0], [0.0, 3.25])
    run(times, clock, [1, 0], [0.0, 2.0])
    assert len(times._typical()) == 4


def test_profiler_parameter_without_gradient_is_ready_at_end(clock: Clock) -> None:
    times = BackwardProfiler(4, CPU, asynchronous=False)
    run(times, clock, [3, 0], [0.0, 2.0])
    assert times.medians([3, 2, 1, 0]) == pytest.approx([0.0, 2.0, 2.0, 2.0])
    assert times.order()[0] == 3


def test_profiler_agreed_order_is_never_overtaken(clock: Clock) -> None:
    times = BackwardProfiler(3, CPU, asynchronous=False)
    run(times, clock, [1, 2, 0], [0.0, 1.0, 1.0])
    assert times.order() == [1, 2, 0]
    # Slot 2 stands before slot 1 in the plan, so slot 1 cannot be sent before it.
    assert times.medians([2, 1, 0]) == pytest.approx([1.0, 1.0, 2.0])


def test_profiler_equal_times_keep_measured_order(clock: Clock) -> None:
    times = BackwardProfiler(3, CPU, asynchronous=False)
    run(times, clock, [1, 2, 0], [0.0, 0.0, 0.0])
    assert times.order() == [1, 2, 0]


def test_profiler_interrupted_backward_is_discarded(clock: Clock) -> None:
    times = BackwardProfiler(2, CPU, asynchronous=False)
    times.begin()
    times.enter(1)  # and an exception in the hook
    times.end()
    times.enter(0)  # no backward of this model
    times.leave()
    run(times, clock, [1, 0], [0.0, 4.0])
    times.begin()
    times.enter(1)
    times.leave()  # and an exception in backward: nobody calls end()
    run(times, clock, [1, 0], [0.0, 4.0])
    times.begin()
    times.end()  # nothing had a gradient
    assert times.totals() == pytest.approx([4.0, 4.0])


def test_profiler_gradients_between_backwards_are_ignored(clock: Clock) -> None:
    """Gradients of another model, or of a backward that is not measured."""
    times = BackwardProfiler(2, CPU, asynchronous=False)
    run(times, clock, [1, 0], [0.0, 4.0])
    times.enter(1)
    times.leave()
    times.end()
    assert times.totals() == pytest.approx([4.0])


@settings(deadline=None, max_examples=examples(50))
@given(data=st.data(), count=st.integers(1, 6), iterations=st.integers(1, 5))
def test_profiler_medians_never_fall_and_end_with_total(data, count: int, iterations: int) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "time", clock)
        times = BackwardProfiler(count, CPU, asynchronous=False)
        for _ in range(iterations):
            order = data.draw(st.permutations(range(count)))
            seconds = st.floats(0.5, 0.7)
            drawn = data.draw(st.lists(seconds, min_size=count, max_size=count))
            run(times, clock, order, drawn)
        ready = times.medians()
        order = times.order()
    assert sorted(order) == list(range(count))
    assert all(a <= b for a, b in itertools.pairwise(ready))
    assert ready[-1] <= max(times.totals()) + 1e-9
    assert len(ready) == count


# -- a device -------------------------------------------------------------------------------


class Device:
    """Stands for a GPU: events happen in order, each a second after the one before."""

    def __init__(self) -> None:
        self.recorded = 0
        self.reached = 0
        self.made = 0
        self.waited = 0

    def event(self, device: torch.device, *, enable_timing: bool) -> Event:
        assert enable_timing
        assert device == CUDA
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = 0

    def record(self, stream: torch.device) -> None:
        assert stream == CUDA
        self._device.recorded += 1
        self.at = self._device.recorded

    def query(self) -> bool:
        return self._device.reached >= self.at

    def synchronize(self) -> None:
        self._device.waited += 1
        self._device.reached = max(self._device.reached, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1000.0 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch, "Event", made.event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: device)
    return made


def one_backward(times: BackwardProfiler, order) -> None:
    times.begin()
    for index in order:
        times.enter(index)
        times.leave()
    times.end()


def test_profiler_device_is_synchronized_only_to_read(device: Device) -> None:
    times = BackwardProfiler(3, CUDA, asynchronous=False)
    one_backward(times, [2, 1, 0])
    assert device.waited == 0
    assert times.medians() == [0.0, 1.0, 2.0]
    assert device.waited == 1
    one_backward(times, [2, 1, 0])
    assert times.totals() == [2.0, 2.0]
    assert device.waited == 2
    assert times.medians() == [0.0, 1.0, 2.0]


def test_profiler_events_are_reused(device: Device) -> None:
    times = BackwardProfiler(3, CUDA, asynchronous=False)
    for _ in range(5):
        one_backward(times, [2, 1, 0])
        device.reached = device.recorded
        times.totals()
    times.begin()
    times.enter(2)  # cut short
    one_backward(times, [2, 1, 0])
    assert device.made == 6
    assert len(times.totals()) == 6


@pytest.mark.gpu
def test_profiler_real_device_measures_backward() -> None:
    times = BackwardProfiler(2, CUDA, asynchronous=False)
    for _ in range(4):
        times.begin()
        times.enter(1)
        torch.cuda._sleep(40_000_000)  # the engine's
        times.leave()
        torch.cuda._sleep(20_000_000)
        times.enter(0)
        times.leave()
        times.end()
    first, second = times.medians()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    assert first == 0.0
    assert second == pytest.approx(begin.elapsed_time(end) / 1e3, rel=0.3)


# -- all workers ----------------------------------------------------------------------------


def test_combine_slowest_worker_counts_for_each_layer() -> None:
    rows = [[0.0, 1.0, 5.0, 0.5, 7.0], [0.0, 2.0, 4.0, 0.7, 6.0], [0, 1, 1, 0, 0], None]
    assert combine(rows, 3, 0, range(4)) == ((0.0, 2.0, 5.0), 0.7, 7.0)


@pytest.mark.parametrize(
    "row",
    [
        [0.0, 1.0, 2.0, 3.0],
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        [0.0, math.nan, 2.0, 0.0, 0.0],
        [0.0, 1.0, math.inf, 0.0, 0.0],
        [0.0, 1.0, 1e300, 0.0, 0.0],
        [-0.1, 1.0, 2.0, 0.0, 0.0],
        [0.0, 2.0, 1.0, 0.0, 0.0],
        [0.0, "1", 2.0, 0.0, 0.0],
        [0.0, True, 2.0, 0.0, 0.0],
        [0.0, None, 2.0, 0.0, 0.0],
        [0.0, 10**400, 10**400, 0.0, 0.0],
        [0.0, 1.0, 2.0, -1.0, 0.0],
        "abc",
        {"0": 1},
    ],
)
def test_combine_malformed_rows_name_sender(row) -> None:
    with pytest.raises(PeerError, match=r"rank 5: rank 3 sent malformed backward times") as caught:
        combine([[0.0, 1.0, 2.0, 0.0, 0.0], row, [0.0, 1.0, 2.0, 0.0, 0.0]], 3, 2, [1, 3, 5])
    assert "\n" not in str(caught.value)
