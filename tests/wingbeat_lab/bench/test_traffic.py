"""Shares of links over time are right, however unevenly the counters were looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat_lab.bench import traffic
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.traffic import Sent
from wingbeat_lab.lab import counters
from wingbeat_lab.lab.counters import ClassCounters, InterfaceCounters
from wingbeat_lab.lab.cross import Sample
from wingbeat_lab.lab.spec import LabSpec

STEADY = [Sample(float(t), 1000 * t, 0.1 * t) for t in range(11)]
"""1000 bytes in each second, for a tenth of a core."""
FAST_LATER = [Sample(0.0, 0, 0.0), Sample(5.0, 5000, 0.5), Sample(10.0, 25_000, 1.0)]


def test_a_rate_is_that_of_each_iteration_in_one_direction() -> None:
    found = traffic.during({"x0": STEADY, "x1": FAST_LATER}, [[1.0, 3.5, 5.0, 7.5]], 2)
    assert found.bytes == pytest.approx(6500 + 4000 + 10_000)
    assert found.bit_per_s == pytest.approx([8000, 8000, 8 * (2500 + 10_000) / 2.5 / 2])
    assert found.cores == pytest.approx(0.2)


def test_traffic_between_rounds_is_not_counted() -> None:
    found = traffic.during({"x0": STEADY}, [[0.0, 1.0], [8.0, 9.0, 10.0]], 1)
    assert found.bytes == pytest.approx(3000)
    assert len(found.bit_per_s) == 3


def test_before_the_first_sample_nothing_is_known_to_have_been_sent() -> None:
    found = traffic.during({"x0": STEADY[5:]}, [[1.0, 4.0]], 1)
    assert (found.bytes, found.bit_per_s) == (0.0, [0.0])


def test_notes_name_what_was_asked_and_what_each_row_met() -> None:
    lab = LabSpec.parse("fat-tree:4/2@1gbit+500mbit,cross=400mbitx4")
    own = traffic.CrossTraffic(1e9, [3e8, 4e8, 5e8], 0.05)
    asked, row = traffic.notes(lab, [("geryon", own)])
    assert "400mbit requested each way on trunks of 500mbit, in 4 flows" in asked
    assert row.startswith("geryon: 1000 MB; each way 400 Mbit/s")
    assert traffic.notes(lab, []) == []


def test_classes_of_all_interfaces_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = InterfaceCounters(0, 0, 100, 1)
    monkeypatch.setattr(
        counters, "read", lambda: {"eth0": interface, "eth1": interface, "lo": interface}
    )
    asked: list[int] = []

    def classes(prio: int) -> dict[str, dict[str, ClassCounters]]:
        asked.append(prio)
        port = {"ef": ClassCounters(10, 1, 0), "be": ClassCounters(95, 1, 0)}
        return {"eth0": port, "eth1": port}

    monkeypatch.setattr(counters, "read_classes", classes)
    sent = Sent.read(LabSpec.parse("star:2x2@1gbit,prio=2"))
    assert sent == Sent(200, {"ef": 20, "be": 190})
    assert Sent.read(LabSpec.parse("star:2x2@1gbit")) == Sent(200, {})
    assert Sent.read(LabSpec.parse("loopback:2")) == Sent(100, {})
    assert asked == [2]


def test_bytes_since_are_divided_by_iterations() -> None:
    before, after = Sent(100, {"ef": 10, "be": 90}), Sent(500, {"ef": 110, "be": 390})
    assert after.since(before, 4) == Sent(100, {"ef": 25, "be": 75})


def test_a_burst_is_seen_in_its_window_and_in_the_mean() -> None:
    quiet_then_busy = [(0.0, 100.0), (1.0, 100.0), (2.0, 100.0 + 125.0)]  # 1,000 bit
    found = traffic.traffic([[quiet_then_busy]], lambda _: 2000.0, 1.0)
    assert found.series == pytest.approx([0.0, 0.5])
    assert (found.mean, found.peak) == pytest.approx((0.25, 0.5))


def test_the_peak_is_of_one_host_and_the_series_of_all() -> None:
    one, two = [(0.0, 0.0), (1.0, 100.0)], [(5.0, 0.0), (6.0, 50.0)]
    found = traffic.traffic([[one, two]], lambda host: (800.0, 1600.0)[host], 1.0)
    assert found.peak == pytest.approx(1.0)
    assert found.series == pytest.approx([(1.0 + 0.25) / 2])


def test_traffic_rounds_are_joined_in_order() -> None:
    found = traffic.traffic(
        [[[(0.0, 0.0), (2.0, 250.0)]], [[(9.0, 0.0), (10.0, 0.0)]]], lambda _: 1000.0, 1.0
    )
    assert found.series == pytest.approx([1.0, 1.0, 0.0])


def test_traffic_shorter_than_a_window_has_only_a_mean(tmp_path: Path) -> None:
    found = traffic.traffic([[[(0.0, 0.0), (0.4, 25.0)]]], lambda _: 1000.0, 1.0)
    assert found.mean == pytest.approx(0.5)
    assert found.series == []
    with pytest.raises(UsageError, match="more --iterations"):
        traffic.draw_png([("ddp", found)], tmp_path / "a.png", title="t")


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0, 1e6)), min_size=1, max_size=30))
def test_whole_windows_have_all_bytes(steps: list[tuple[float, float]]) -> None:
    samples = [(0.0, 0.0)]
    for seconds, sent in steps:
        samples.append((samples[-1][0] + seconds, samples[-1][1] + sent))
    window = samples[-1][0] / 4
    found = traffic.traffic([[samples]], lambda _: 8.0, window)
    assert len(found.series) in (3, 4)  # the last may miss its end by rounding
    if len(found.series) == 4:
        assert sum(found.series) * window == pytest.approx(samples[-1][1])


def test_the_counters_are_looked_at_first_last_and_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter(range(10_000))
    monkeypatch.setattr(Sent, "read", lambda lab, *, classes: Sent(float(next(readings)), {}))
    with traffic.Sampler(LabSpec.parse("star:2@1gbit"), 1e-3) as sampler:
        while len(sampler.samples) < 5:
            pass
    assert [sent for _, sent in sampler.samples] == [float(i) for i in range(len(sampler.samples))]
    assert sampler.samples == sorted(sampler.samples)
    assert not sampler._thread.is_alive()


def test_traffic_is_drawn_to_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [("bml", traffic.Traffic(0.5, 0.8, 0.5, [0.2, 0.8])), ("x", traffic.Traffic(0, 0, 0.5))]
    traffic.draw_png(rows, tmp_path / "traffic.png", title="here")
    assert (tmp_path / "traffic.png").stat().st_size > 1000


def test_links_without_a_rate_are_refused() -> None:
    config = BenchConfig(lab="loopback:2", model="digits", strategies=("ddp",), traffic=True)
    with pytest.raises(UsageError, match="no rate to compare with"):
        config.check()
