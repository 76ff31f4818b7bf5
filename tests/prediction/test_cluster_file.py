"""Clusters from files and from words."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.prediction.cluster import LATENCY_S, Cluster, decode, described, payload
from wingbeat.profiling.cluster import Cluster as Probed
from wingbeat.profiling.cluster import Nic, ProbedHost
from wingbeat_lab.lab.spec import LabSpec


def probed(*hosts: tuple[int, list[tuple[float, float]]]) -> str:
    """Return a probe's file for hosts with ranks and NICs, each with Gbit/s and microseconds."""
    return Probed(
        tuple(
            ProbedHost(
                f"node{number}",
                ranks,
                tuple(
                    Nic(f"eth{n}", 1e9 * rate, 1e-6 * delay) for n, (rate, delay) in enumerate(nics)
                ),
            )
            for number, (ranks, nics) in enumerate(hosts)
        )
    ).to_toml()


def test_decode_file_of_a_probe_has_its_ranks_rates_and_latencies() -> None:
    text = probed(
        (4, [(10.0, 40), (10.2, 40)]), (4, [(9.9, 44), (10.1, 44)]), (2, [(3.0, 900), (10.0, 44)])
    )
    found = decode(text, "c.toml")
    assert [len(host) for host in found.layout.hosts] == [4, 4, 2]
    assert found.names == ("node0", "node1", "node2")
    links = found.links
    assert links.count == 2
    assert links.bytes_per_s == pytest.approx(payload(10.0e9))
    assert links.rates == {(2, 0): pytest.approx(payload(3.0e9))}
    assert links.latency_s == pytest.approx(44e-6)
    assert links.latencies == {2: pytest.approx(900e-6)}
    assert not links.priorities
    assert found.spread == pytest.approx(0.02)


def test_decode_equal_hosts_are_simulated_as_equal() -> None:
    found = decode(probed((1, [(10.0, 40)]), (1, [(9.6, 52)]), (1, [(10.3, 47)])), "c.toml")
    assert found.links.alike


def test_decode_labs_file_agrees_with_the_lab() -> None:
    text = (
        'kind = "fat-tree"\nhosts = 4\nrails = 2\nrate = "2gbit"\nleaf = 2\ntrunk = "1gbit"\n'
        'prio = 2\n[override]\n"h1" = "500mbit"\n"h3.eth1" = "100mbit"\n'
    )
    found, lab = decode(text, "c.toml", per_host=3), LabSpec.from_toml(text)
    for host in range(lab.hosts):
        for nic in range(lab.rails):
            assert found.links.rate(host, nic) == pytest.approx(payload(lab.link_rate(host, nic)))
    assert found.links.leaf == lab.leaf
    assert found.links.trunk_bytes_per_s == pytest.approx(payload(lab.trunk))
    assert found.links.priorities
    assert found.links.latency_s == LATENCY_S
    assert [len(host) for host in found.layout.hosts] == [3, 3, 3, 3]


STAR = 'kind = "star"\nhosts = 2\nrate = "1gbit"\n'
ROW = (
    '[[measured]]\nhost = "a"\nranks = 1\n'
    'nics = [{ name = "e", gbit_per_s = 1.0, latency_us = 9 }]\n'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = ", "c.toml is not TOML: .* write it with wingbeat probe"),
        ('kind = "bcube"\nhosts = 9', "unknown kind of cluster 'bcube' in c.toml"),
        ('hosts = 2\nrates = "1gbit"', r"unknown key 'rates' in c.toml \(did you mean 'rate'"),
        ('hosts = 1\nrate = "1gbit"', "hosts = 1; allowed are 2 to"),
        ("hosts = 2", "rate = None; it has to be a text"),
        ('hosts = 2\nrate = "1gb"', r"unknown unit of a rate 'gb' in '1gb' in c.toml"),
        ('hosts = 2\nrate = "fast"', "rate 'fast' in c.toml: write a number and a unit"),
        ('hosts = 2\nrate = "0.1mbit"', "rate '0.1mbit' in c.toml: allowed are 1mbit to 10tbit"),
        (STAR + '[override]\n"h2" = "1gbit"', r"override 'h2' is no host \(h0 to h1\)"),
        (STAR + '[override]\n"h1.eth1" = "1gbit"', "override 'h1.eth1' is no host"),
        (STAR + "override = 3", "override has to be a table"),
        (STAR + ROW, r"hosts = 2, and \[\[measured\]\] has 1"),
        (STAR + ROW + ROW.replace("ranks = 1", "ranks = 0"), "ranks = 0; allowed are 1 to"),
        (STAR + ROW + ROW.replace("1.0", "nan"), "gbit_per_s = nan; allowed are 0.001 to"),
        (STAR + ROW + ROW.replace("9 }", "-1 }"), "latency_us = -1; allowed are 0 to"),
        (STAR + ROW + ROW.replace("[{", "[{}, {"), "2 NICs, and host 0 has 1"),
        (STAR + ROW + ROW.replace("nics = [{", "nics = 3 #"), "nics has to be a list of tables"),
        ('kind = "fat-tree"\nhosts = 4\nrate = "1gbit"\ntrunk = "1gbit"', "leaf = None; allowed"),
    ],
)
def test_decode_wrong_file_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        decode(text, "c.toml")
    assert "\n" not in str(raised.value)


def test_described_words_give_equal_hosts() -> None:
    found = described(4, 8, "25gbit", nics=2, latency="30us")
    assert found.workers == 32
    assert found.links.alike
    assert found.links.bytes_per_s == pytest.approx(payload(25e9))
    assert (found.links.count, found.links.latency_s) == (2, pytest.approx(30e-6))
    text = "4 hosts of 8 workers, 2 NICs of 25 Gbit/s, 30 us, 40 Gbit/s inside a host"
    assert found.describe() == text


def test_rate_inside_hosts_is_of_payload_and_described() -> None:
    found = described(2, 8, "25gbit").with_inside_rate("3600gbit")
    assert found.local.bytes_per_s == 450e9
    assert found.describe().endswith(", 3600 Gbit/s inside a host")
    assert found.with_hosts(2).local == found.local


@pytest.mark.parametrize(
    ("per_host", "rate", "message"),
    [
        (8, "fast", "rate 'fast' in --inside-rate: write a number and a unit, such as 25gbit"),
        (8, "20tbit", "rate '20tbit' in --inside-rate: allowed are 1mbit to 10tbit"),
        (8, "450gb", "unknown unit of a rate 'gb' in '450gb' in --inside-rate"),
        (1, "40gbit", "--inside-rate 40gbit: each host has one worker.* add --per-host 8"),
    ],
)
def test_rate_inside_hosts_out_of_range_is_refused(per_host: int, rate: str, message: str) -> None:
    cluster = described(2, per_host, "25gbit")
    with pytest.raises(UsageError, match=message):
        cluster.with_inside_rate(rate)


@pytest.mark.parametrize(
    ("hosts", "per_host", "nics", "message"),
    [
        (1, 8, 1, "--hosts 1 --per-host 8: exchanges between hosts"),
        (2, 0, 1, "--per-host 0"),
        (2, 1, 0, "--nics 0: allowed are 1 to 16"),
        (5000, 8, 1, "--hosts 5000 --per-host 8: 40000 workers; allowed are up to 16384"),
    ],
)
def test_described_out_of_range_is_refused(
    hosts: int, per_host: int, nics: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        described(hosts, per_host, "1gbit", nics=nics)


def test_described_latency_with_unknown_unit_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown unit of a time 'ns' in '50ns'"):
        described(2, 1, "1gbit", latency="50ns")


def test_describe_names_what_differs() -> None:
    text = STAR.replace("hosts = 2", "hosts = 4") + '[override]\n"h1" = "500mbit"\n'
    found = decode(text, "c.toml")
    slow = Cluster(links=found.links, layout=found.layout, slow={3: 2.0})
    assert slow.describe() == (
        "4 hosts of 1 worker, one NIC of 1 Gbit/s, 50 us, h1 0.5 Gbit/s, h3 2 times slower"
    )
