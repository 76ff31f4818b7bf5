"""Changes of clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wingbeat.errors import UsageError
from wingbeat.prediction.cluster import Cluster, described, payload
from wingbeat.prediction.what_if import changed


def base() -> Cluster:
    """Four hosts of two workers, of which the second has a slower NIC."""
    found = described(4, 2, "1gbit")
    links = replace(found.links, rates={1: 1e6}, latencies={1: 1.0})
    return replace(found, links=links, names=("a", "b", "c", "d"), spread=0.05)


def test_changed_rate_and_latency_replace_those_of_all_nics() -> None:
    found = changed(base(), "rate=10gbit,latency=5us")
    assert found.links.alike
    assert found.links.bytes_per_s == pytest.approx(payload(10e9))
    assert found.links.latency_s == pytest.approx(5e-6)
    assert found.spread == 0.0


def test_changed_nics_and_hosts_keep_what_differs() -> None:
    found = changed(base(), "nics=2, add-hosts=3")
    assert found.links.count == 2
    assert found.links.rates == base().links.rates
    assert [len(host) for host in found.layout.hosts] == [2] * 7


@pytest.mark.parametrize("host", ["2", "h2", "c"])
def test_changed_slow_host_slows_its_workers(host: str) -> None:
    assert changed(base(), f"slow-host={host}").slow_workers == {4: 2.0, 5: 2.0}
    assert changed(base(), f"slow-host={host}:3.5").slow_workers == {4: 3.5, 5: 3.5}


def test_changed_two_slow_hosts_are_both_slow() -> None:
    assert changed(base(), "slow-host=0,slow-host=3:4").slow == {0: 2.0, 3: 4.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=3", "unknown change 'speed' in --what-if speed=3; allowed: add-hosts"),
        ("rate=10", "unknown unit of a rate '' in '10' in --what-if rate=10"),
        ("nics=0", "--what-if nics=0: '0'; allowed are 1 to 16"),
        ("add-hosts=-1", "'-1'; allowed are 1 to"),
        ("add-hosts=16000", "32008 workers; allowed are up to"),
        ("slow-host=4", "no host '4'; allowed are 0 to 3, or a, b, c, d"),
        ("slow-host=e", "no host 'e'"),
        ("slow-host=1:0.5", "'0.5' times slower; allowed are 1 to 1000"),
        ("slow-host=1:x", "'x' times slower"),
        ("", "unknown change ''"),
    ],
)
def test_changed_wrong_text_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        changed(base(), text)
    assert "\n" not in str(raised.value)
