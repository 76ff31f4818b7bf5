"""A worker's thread: what it puts into the store, what rank 0 hands on; it never hurts."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from helpers.reports import report
from wingbeat.observe import meter as meters
from wingbeat.observe import reporter as module
from wingbeat.observe.meter import Meter, Section
from wingbeat.observe.report import Report
from wingbeat.observe.reporter import Reporter


class Shelf:
    """A store in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.asked: list[str] = []
        self.looked: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str, seconds: float) -> str:
        assert seconds > 0.0  # 0 is for ever, in torch's
        assert key in self.kept, "this would wait, and lock the store"
        self.asked.append(key)
        return self.kept[key]

    def has(self, key: str) -> bool:
        self.looked.append(key)
        return key in self.kept


class Broken(Shelf):
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("the store is gone")


class Listener:
    """Stands for the supervisor's process."""

    def __init__(self, parse: bool = True) -> None:
        self.heard: list[Report] = []
        self.parse = parse
        self.there = True
        self.ended = ""
        self.block: threading.Event | None = None

    def send_report(self, rank: int, text: str) -> bool:
        if self.block is not None:
            self.block.wait(30)
        if self.there and self.parse:
            self.heard.append(Report.from_text(text))
            assert self.heard[-1].rank == rank
        return self.there

    def close(self) -> None:
        self.ended = "closed"

    def kill(self) -> None:
        self.ended = "killed"
        if self.block is not None:
            self.block.set()


def _reporter(
    rank: int, size: int, shelf: Shelf, listener: Any = None, every_s: float = 0.005
) -> Reporter:
    return Reporter(rank, size, ("lo",), shelf, listener, every_s)


def test_each_rank_puts_its_reports_under_its_own_key_and_rank_zero_hands_all_on() -> None:
    shelf, listener = Shelf(), Listener()
    workers = [_reporter(rank, 3, shelf, listener if rank == 0 else None) for rank in range(3)]
    meters = [Meter(f"Net{rank}", "DeAR()") for rank in range(3)]
    for rank, (worker, meter) in enumerate(zip(workers, meters, strict=True)):
        meter.iterations = 10 * rank
        worker.add(meter)
    for worker in (workers[2], workers[0]):
        worker.send()
    assert [(each.rank, each.iteration) for each in listener.heard] == [(0, 0), (2, 20)]
    listener.heard.clear()
    for worker in reversed(workers):
        worker.send()
    assert [(each.rank, each.number) for each in listener.heard] == [(0, 1), (1, 0), (2, 1)]
    assert sorted(shelf.kept) == ["reports/1", "reports/2"]


def test_a_report_says_what_the_meter_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "codec", meters.Tally())
    meters.codec.add(3_000_000_000)
    listener = Listener()
    worker = _reporter(0, 1, Shelf(), listener)
    ns = [0]
    meter = Meter("Net", "DeAR(mb=5)", lambda: ns[0])
    meter.enter("forward")
    ns[0], meter.waited_ns = 2_000_000_000, 500_000_000
    meter.stepped()
    meter.count("dropped", 4)
    meter.show(lambda: [Section("gei", {"c0": "11"})])
    worker.add(meter)
    worker.send()
    [said] = listener.heard
    assert (said.rank, said.size, said.iteration, said.strategy) == (0, 1, 1, "DeAR(mb=5)")
    assert said.spent_s == {
        "forward": 1.5,
        "backward": 0.0,
        "update": 0.0,
        "other": 0.0,
        "exchange": 0.5,
        "codec": 3.0,
    }
    assert said.counts == {"dropped": 4}
    assert said.sections == (Section("gei", {"c0": "11"}),)
    assert list(said.interfaces) == ["lo"]
    assert said.host
    assert not said.ended


def test_two_models_of_a_process_are_one_worker() -> None:
    listener = Listener()
    worker = _reporter(0, 1, Shelf(), listener)
    generator, critic = Meter("Generator", "DeAR()"), Meter("Critic", "AllReduce()")
    generator.iterations, critic.iterations = 10, 50
    generator.waited_ns, critic.waited_ns = 1_000_000_000, 2_000_000_000
    worker.add(generator)
    worker.add(critic)
    worker.send()
    [said] = listener.heard
    assert said.iteration == 50
    assert said.strategy == "AllReduce(), DeAR()"
    assert said.spent_s["exchange"] == 3.0
    assert said.sections == (Section("steps", {"0 Critic": 50, "1 Generator": 10}),)


def test_what_two_models_show_under_one_name_is_added() -> None:
    listener = Listener()
    worker = _reporter(0, 1, Shelf(), listener)
    shown = {
        "Critic": [Section("classes", {"0 in": 5, "1 in": 7}, "B/s"), Section("kind", {"a": "x"})],
        "Generator": [Section("classes", {"0 in": 1, "2 in": 2}, "B/s"), Section("classes", {})],
    }
    kept = [Meter(name) for name in shown]
    for meter in kept:
        meter.show(lambda name=meter.name: shown[name])  # type: ignore[misc]
        worker.add(meter)
    worker.send()
    assert listener.heard[0].sections[1:] == (
        Section("classes", {"0 in": 6, "1 in": 7, "2 in": 2}, "B/s"),
        Section("kind", {"a": "x"}),
        Section("classes", {}),
    )


def test_what_one_model_takes_is_not_other_for_the_next() -> None:
    listener = Listener()
    worker = _reporter(0, 1, Shelf(), listener)
    ns = [0]
    generator, critic = (Meter(name, "DeAR()", lambda: ns[0]) for name in ("G", "C"))
    for each in (generator, critic):
        worker.add(each)
        each.enter("forward")
        ns[0] += 3_000_000_000
        each.stepped()
    ns[0] += 1_000_000_000
    for each in (generator, critic):
        each.enter("other")
    worker.send()
    assert listener.heard[0].spent_s["forward"] == 6.0
    assert listener.heard[0].spent_s["other"] == 1.0


def test_a_model_that_is_gone_is_reported_no_more() -> None:
    listener = Listener()
    worker = _reporter(0, 1, Shelf(), listener)
    meter = Meter("Net", "DeAR()")
    meter.iterations = 7
    worker.add(meter)
    del meter
    gc.collect()
    worker.send()
    assert (listener.heard[0].iteration, listener.heard[0].strategy) == (0, "")


def test_a_long_strategy_is_cut() -> None:
    listener = Listener()
    worker = _reporter(0, 1, Shelf(), listener)
    meter = Meter("Net", "S(" + "x" * 500 + ")")
    worker.add(meter)
    worker.send()
    assert listener.heard[0].strategy == "S(" + "x" * 123 + "..."


def test_rank_zero_reads_a_bounded_number_each_time_and_nobody_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "READS", 3)
    shelf = Shelf()
    worker = _reporter(0, 8, shelf, Listener(parse=False))
    keys = [f"reports/{rank}" for rank in range(1, 8)]
    for step in range(1, 8):
        worker.send()
        assert len(shelf.looked) == 3 * step
    assert sorted(shelf.looked) == sorted(3 * keys)
    shelf.kept = dict.fromkeys(keys, "{}")
    shelf.looked.clear()
    for _ in range(14):
        worker.send()
    assert sorted(shelf.asked) == sorted(6 * keys)
    assert sorted(shelf.looked) == keys  # who has been seen is there


def test_report_that_is_replaced_or_deleted_in_the_store_ends_no_other_reports() -> None:
    """A process without the job's key can write to the store: its value counts as missing."""

    class Overwritten(Shelf):
        def get(self, key: str, seconds: float) -> str:
            if key == "reports/1":
                raise TimeoutError("its authentication tag is wrong or missing")
            return super().get(key, seconds)

    shelf, listener = Overwritten(), Listener()
    shelf.kept = {f"reports/{rank}": report(rank, 1, size=3).to_text() for rank in (1, 2)}
    worker = _reporter(0, 3, shelf, listener)
    for _ in range(2):
        worker.send()
    assert [each.rank for each in listener.heard] == [0, 2, 0, 2]
    assert shelf.looked == ["reports/1", "reports/2", "reports/1"]  # it may be there again


def test_without_a_supervisor_rank_zero_reads_nothing() -> None:
    shelf, listener = Shelf(), Listener()
    listener.there = False
    _reporter(0, 4, shelf, listener).send()
    _reporter(0, 4, shelf).send()
    assert (shelf.looked, shelf.asked, shelf.kept) == ([], [], {})


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_thread_reports_until_it_is_closed_and_says_so_at_last() -> None:
    listener = Listener()
    worker = _reporter(0, 1, Shelf(), listener).start()
    _wait_for(lambda: len(listener.heard) >= 3)
    worker.close()
    assert [each.ended for each in listener.heard[-2:]] == [False, True]
    assert [each.number for each in listener.heard] == list(range(len(listener.heard)))
    assert listener.ended == "closed"
    assert not worker._thread.is_alive()


def test_a_store_that_is_gone_ends_reports_and_nothing_else() -> None:
    worker = _reporter(1, 2, Broken()).start()
    _wait_for(lambda: not worker._thread.is_alive())
    worker.close()


def test_a_strategy_that_fails_to_show_itself_ends_reports_and_nothing_else() -> None:
    def fails() -> list[Section]:
        raise ValueError("broken")

    worker = _reporter(0, 1, Shelf(), Listener())
    meter = Meter("Net")
    meter.show(fails)
    worker.add(meter)
    worker.start()
    _wait_for(lambda: not worker._thread.is_alive())
    worker.close()


def test_a_supervisor_that_takes_nothing_is_killed_and_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LEAVE_S", 0.05)
    listener = Listener()
    listener.block = threading.Event()
    worker = _reporter(0, 1, Shelf(), listener).start()
    time.sleep(0.02)
    worker.close()
    assert listener.ended == "killed"


def test_a_forked_child_leaves_its_parents_supervisor_alone() -> None:
    listener = Listener()
    worker = _reporter(0, 1, Shelf(), listener)
    worker._pid -= 1
    worker.close()
    assert listener.ended == ""


def test_who_cannot_read_the_counters_reports_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise PermissionError("no /proc")

    monkeypatch.setattr(module.psutil, "net_io_counters", fails)
    listener = Listener()
    _reporter(0, 1, Shelf(), listener).send()
    assert listener.heard[0].interfaces == {}


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (0, 1)])
def test_rank_zero_of_several_logs_what_training_took(
    rank: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Meter("net", "DeAR()")
    worker = _reporter(rank, size, Shelf(), Listener(), every_s=60.0)
    worker.add(mine)
    for _ in range(10):
        mine.stepped()
    worker.send()
    for _ in range(30):
        mine.stepped()
    with caplog.at_level("INFO", logger="wingbeat"):
        worker.start().close()
    lines = [each.message for each in caplog.records if "30 steps" in each.message]
    assert len(lines) == (rank == 0 and size > 1)
