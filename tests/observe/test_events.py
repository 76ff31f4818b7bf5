from __future__ import annotations

import threading
import time
import timeit
import warnings

import pytest

from wingbeat.errors import UsageError
from wingbeat.observe.events import Event, Stream


def test_an_event_comes_back_as_it_was_recorded() -> None:
    stream = Stream()
    stream.start(worker=3)
    stream.record("all_gather", 10, 30, bucket=2, nbytes=64, lane="eth1")
    stream.record("forward", 30, 40)
    assert stream.stop() == [
        Event(3, 2, "all_gather", 10, 30, 64, "eth1"),
        Event(3, -1, "forward", 30, 40, 0, "compute"),
    ]


def test_nothing_is_kept_while_off() -> None:
    stream = Stream()
    stream.record("forward", 0, 1)
    stream.start(worker=0)
    assert stream.stop() == []
    assert not stream.on
    stream.record("forward", 0, 1)
    assert stream.take() == []


def test_take_hands_over_and_goes_on() -> None:
    stream = Stream()
    stream.start(worker=0)
    stream.record("forward", 0, 1)
    assert [e.what for e in stream.take()] == ["forward"]
    assert stream.on
    stream.record("backward", 1, 2)
    assert [e.what for e in stream.stop()] == ["backward"]


def test_start_forgets_what_was_before() -> None:
    stream = Stream()
    stream.start(worker=0)
    stream.record("forward", 0, 1)
    stream.start(worker=1)
    stream.record("backward", 1, 2)
    assert [(e.worker, e.what) for e in stream.stop()] == [(1, "backward")]


def test_a_full_stream_drops_and_says_so() -> None:
    stream = Stream(limit=2)
    stream.start(worker=7)
    for i in range(5):
        stream.record("forward", i, i + 1)
    with pytest.warns(RuntimeWarning, match="worker 7: 3 events were dropped"):
        kept = stream.take()
    assert [e.begin_ns for e in kept] == [0, 1]
    assert stream.dropped == 3
    stream.record("forward", 9, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once already
        assert len(stream.stop()) == 1


def test_a_block_is_timed_also_where_it_raises() -> None:
    stream = Stream()
    with stream.timed("forward"):
        pass
    stream.start(worker=0)
    before = time.monotonic_ns()
    with pytest.raises(KeyError), stream.timed("backward", lane="side"):
        raise KeyError
    [event] = stream.stop()
    assert (event.what, event.lane, event.bucket) == ("backward", "side", -1)
    assert before <= event.begin_ns <= event.end_ns <= time.monotonic_ns()


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="event limit 0"):
        Stream(limit=0)


def test_threads_lose_nothing() -> None:
    stream = Stream()
    stream.start(worker=0)
    threads, each = 8, 5_000

    def work(number: int) -> None:
        for i in range(each):
            stream.record("all_reduce", i, i + 1, bucket=number)

    running = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    events = stream.stop()
    for number in range(threads):
        mine = [e.begin_ns for e in events if e.bucket == number]
        assert mine == list(range(each))


def _per_call_ns(statement: str, stream: Stream, calls: int = 20_000) -> float:
    """Of this thread's own time, the least of some repetitions: what others do does not count."""
    names = {"stream": stream, "now": time.monotonic_ns}
    timer = timeit.Timer(statement, timer=time.thread_time, globals=names)
    return min(timer.repeat(repeat=9, number=calls)) / calls * 1e9


GUARDED = "if stream.on: stream.record('all_gather', 1, 2, bucket=3, nbytes=4, lane='eth0')"


def test_off_costs_next_to_nothing() -> None:
    # An iteration guards near 1,000 places at most, so 0.5 us each would be 0.5 ms of it.
    assert _per_call_ns(GUARDED, Stream()) < 500


def test_on_costs_less_than_a_few_microseconds() -> None:
    stream = Stream()
    stream.start(worker=0)
    cost = _per_call_ns(GUARDED, stream)
    assert len(stream.stop()) == 9 * 20_000
    assert cost < 5_000
