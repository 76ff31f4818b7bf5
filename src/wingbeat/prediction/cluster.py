"""The cluster of a prediction: from the file of `wingbeat probe`, or described in words."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wingbeat.errors import UsageError, unknown
from wingbeat.profiling.cluster import HEADERS, LIKE
from wingbeat.simulator.cluster import Links
from wingbeat.simulator.network import LOCAL
from wingbeat.types import Layout

LATENCY_S = 50e-6
"""Seconds of latency where none is stated."""

MOST_WORKERS = 16_384
MOST_NICS = 16

_KINDS = ("star", "fat-tree")
_KEYS = (
    "kind", "hosts", "rails", "rate", "leaf", "trunk", "override", "prio", "ip", "measured"
)  # fmt: skip
_RATES = {"mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-zA-Z]*)")
_TARGET = re.compile(r"h(\d{1,6})(?:\.eth(\d{1,3}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts, their workers, and the links between them.

    Attributes:
        links: network interfaces of the hosts, with payload rates.
        layout: hosts of the workers.
        local: links between the workers of a host, for each worker and direction.
        slow: by host, factor of the compute times of its workers, if they differ.
        names: names of the hosts, if they are known.
        spread: largest relative difference of a measured rate from that of ``links``, among those
            that count as equal.
    """

    links: Links
    layout: Layout
    local: Links = LOCAL
    slow: Mapping[int, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    spread: float = 0.0

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.layout.workers

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.layout.hosts)

    @property
    def slow_workers(self) -> dict[int, float]:
        """The factors of compute times by worker."""
        return {
            worker: factor
            for host, factor in self.slow.items()
            for worker in self.layout.hosts[host]
        }

    def describe(self) -> str:
        """Return the cluster in a line."""
        counts = sorted({len(host) for host in self.layout.hosts})
        each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        links, count = self.links, self.links.count
        nics = "one NIC" if count == 1 else f"{count} NICs"
        text = (
            f"{self.hosts} hosts of {each} worker{'s' * (counts != [1])}, {nics} of "
            f"{8 * HEADERS * links.bytes_per_s / 1e9:.3g} Gbit/s, {1e6 * links.latency_s:.0f} us"
        )
        if counts != [1]:
            text += f", {8 * self.local.bytes_per_s / 1e9:.4g} Gbit/s inside a host"
        for key, rate in links.rates.items():
            host, nic = key if isinstance(key, tuple) else (key, None)
            where = f"h{host}" if nic is None else f"h{host}.eth{nic}"
            text += f", {where} {8 * HEADERS * rate / 1e9:.3g} Gbit/s"
        for host, factor in self.slow.items():
            text += f", h{host} {factor:g} times slower"
        if links.leaf:
            trunk = 8 * HEADERS * links.trunk_bytes_per_s / 1e9
            text += f", {links.leaf} hosts on each leaf switch, trunks of {trunk:.3g} Gbit/s"
        return text

    def with_inside_rate(self, rate: str) -> Cluster:
        """Return the cluster with another rate between the workers of a host, such as ``3600gbit``.

        The rate is of payload, for each worker and direction.

        Raises:
            UsageError: no host has several workers, or the rate is out of range.
        """
        bit_per_s = parse_rate(rate, "--inside-rate")
        if all(len(host) == 1 for host in self.layout.hosts):
            raise UsageError(
                f"--inside-rate {rate}: each host has one worker, so nothing is exchanged inside: "
                "add --per-host 8, or leave it out"
            )
        return replace(self, local=replace(self.local, bytes_per_s=bit_per_s / 8))

    def with_hosts(self, more: int) -> Cluster:
        """Return the cluster with so many more hosts, each with the usual number of workers."""
        counts = [len(host) for host in self.layout.hosts]
        usual = Counter(counts).most_common(1)[0][0]
        return replace(self, layout=_layout([*counts, *[usual] * more]), names=())


def described(hosts: int, per_host: int, rate: str, *, nics: int = 1, latency: str = "") -> Cluster:
    """Return a cluster of equal hosts on one switch.

    Args:
        hosts: number of hosts, 2 or more.
        per_host: workers of each.
        rate: of a NIC on the wire, such as ``"25gbit"``.
        nics: NICs of each host.
        latency: one-way time between two hosts, such as ``"50us"``; `LATENCY_S` if empty.

    Raises:
        UsageError: a value is out of range.
    """
    if hosts < 2 or per_host < 1:
        raise UsageError(
            f"--hosts {hosts} --per-host {per_host}: exchanges between hosts are predicted; "
            "allowed are 2 or more hosts, and 1 or more workers on each"
        )
    _check_nics(f"--nics {nics}", nics)
    return checked_size(
        Cluster(
            links=Links(
                bytes_per_s=payload(parse_rate(rate)),
                latency_s=parse_time(latency) if latency else LATENCY_S,
                count=nics,
                priorities=False,
            ),
            layout=_layout([per_host] * hosts),
        ),
        f"--hosts {hosts} --per-host {per_host}",
    )


def parse_rate(text: str, where: str = "") -> float:
    """Return bit/s of a rate such as ``25gbit``.

    >>> parse_rate("2.5gbit")
    2500000000.0

    Raises:
        UsageError: it is no number with one of the units mbit, gbit, tbit.
    """
    return _parse(text, _RATES, "rate", "25gbit", where)


def parse_time(text: str, where: str = "") -> float:
    """Return the seconds of a time such as ``50us``.

    Raises:
        UsageError: it is no number with one of the units us, ms, s.
    """
    return _parse(text, _TIMES, "time", "50us", where)


def payload(bit_per_s: float) -> float:
    """Return the bytes of payload per second of a rate on the wire."""
    return bit_per_s / 8 / HEADERS


def decode(text: str, where: str, *, per_host: int | None = None) -> Cluster:
    """Read a cluster file: the one of `wingbeat probe`, or a lab's of the kind star or fat-tree.

    Rates, latencies and ranks are those of ``measured``, if it is there; otherwise NICs have the
    stated rate, less overrides, and `LATENCY_S`. A NIC within 10% of the usual rate counts as
    equal, so that equal hosts are simulated as such.

    Args:
        text: TOML.
        where: names the file in messages.
        per_host: workers of each host, in place of the file's.

    Raises:
        UsageError: it is not TOML, or a value is missing or out of range.
    """
    data = _toml(text, where)
    for key in data:
        if key not in _KEYS:
            raise unknown("key", key, _KEYS, where=where)
    kind = data.get("kind", "star")
    if kind not in _KINDS:
        raise unknown("kind of cluster", str(kind), _KINDS, where=where)
    hosts = _whole(data, "hosts", where, 2, MOST_WORKERS)
    measured = data.get("measured")
    if measured is not None:
        counts, links, names, spread = _measured(measured, hosts, where)
    else:
        counts, names, spread = [1] * hosts, (), 0.0
        links = _stated(data, hosts, where)
    if per_host is not None:
        if per_host < 1:
            raise UsageError(f"--per-host {per_host}: allowed are 1 worker and more on each host")
        counts = [per_host] * hosts
    links = replace(links, priorities=bool(data.get("prio", 0)))
    if kind == "fat-tree":
        trunk = parse_rate(_string(data, "trunk", where), where)
        leaf = _whole(data, "leaf", where, 1, hosts)
        links = replace(links, leaf=leaf, trunk_bytes_per_s=payload(trunk))
    found = Cluster(links=links, layout=_layout(counts), names=names, spread=spread)
    return checked_size(found, where)


def _measured(rows: Any, hosts: int, where: str) -> tuple[list[int], Links, tuple[str, ...], float]:
    """Return ranks by host, links, names, and the spread of rates that count as equal."""
    if not isinstance(rows, list) or len(rows) != hosts:
        found = len(rows) if isinstance(rows, list) else 0
        raise UsageError(
            f"{where}: hosts = {hosts}, and [[measured]] has {found}; give as many, or write it "
            "with wingbeat probe"
        )
    counts: list[int] = []
    names: list[str] = []
    rates: list[list[float]] = []
    latencies: list[float] = []
    for number, row in enumerate(rows):
        at = f"{where}, [[measured]] {number}"
        nics = row.get("nics") if isinstance(row, dict) else None
        if not isinstance(nics, list) or not all(isinstance(nic, dict) for nic in nics):
            raise UsageError(f"{at}: nics has to be a list of tables; write it with wingbeat probe")
        _check_nics(f"{at}: {len(nics)} NICs", len(nics))
        if rates and len(nics) != len(rates[0]):
            raise UsageError(
                f"{at}: {len(nics)} NICs, and host 0 has {len(rates[0])}; hosts need equally many"
            )
        counts.append(_whole(row, "ranks", at, 1, MOST_WORKERS))
        names.append(_string(row, "host", at))
        rates.append([payload(1e9 * _number(nic, "gbit_per_s", at, 1e-3, 1e4)) for nic in nics])
        latencies.append(max(1e-6 * _number(nic, "latency_us", at, 0, 1e7) for nic in nics))
    usual = statistics.median_high([rate for each in rates for rate in each])
    alike = [rate for each in rates for rate in each if abs(rate / usual - 1) <= LIKE]
    base, delay_s = statistics.median(alike), statistics.median(latencies)
    links = Links(
        bytes_per_s=base,
        latency_s=delay_s,
        count=len(rates[0]),
        rates={
            (host, nic): rate
            for host, each in enumerate(rates)
            for nic, rate in enumerate(each)
            if rate not in alike
        },
        latencies={
            host: seconds
            for host, seconds in enumerate(latencies)
            if abs(seconds - delay_s) > max(delay_s, _SAME_S)
        },
    )
    return counts, links, tuple(names), max(abs(rate / base - 1) for rate in alike)


_SAME_S = 50e-6
"""Latencies count as equal up to this difference, or up to twice the median."""


def _stated(data: Mapping[str, Any], hosts: int, where: str) -> Links:
    """Return the links of a lab's file."""
    count = _whole(data, "rails", where, 1, MOST_NICS) if "rails" in data else 1
    rates: dict[int | tuple[int, int], float] = {}
    overrides = data.get("override", {})
    if not isinstance(overrides, dict):
        raise UsageError(f'{where}: override has to be a table, such as "h3.eth1" = "1gbit"')
    for target, rate in overrides.items():
        match = _TARGET.fullmatch(target)
        host, nic = (int(match[1]), match[2]) if match else (hosts, None)
        if host >= hosts or int(nic or 0) >= count:
            raise UsageError(
                f"{where}: override {target!r} is no host (h0 to h{hosts - 1}) and no NIC of one "
                f"(h0.eth0 to h{hosts - 1}.eth{count - 1})"
            )
        key = host if nic is None else (host, int(nic))
        rates[key] = payload(parse_rate(str(rate), f"{where}, override {target}"))
    return Links(
        bytes_per_s=payload(parse_rate(_string(data, "rate", where), where)),
        latency_s=LATENCY_S,
        count=count,
        rates=rates,
    )


def _layout(counts: Sequence[int]) -> Layout:
    return Layout([host for host, count in enumerate(counts) for _ in range(count)])


def checked_size(cluster: Cluster, where: str) -> Cluster:
    """Return the cluster; `UsageError` if it has too many workers."""
    if cluster.workers > MOST_WORKERS:
        raise UsageError(
            f"{where}: {cluster.workers} workers; allowed are up to {MOST_WORKERS}: simulate a "
            "part of the cluster"
        )
    return cluster


def _check_nics(what: str, count: int) -> None:
    if not 1 <= count <= MOST_NICS:
        raise UsageError(f"{what}: allowed are 1 to {MOST_NICS} NICs for each host")


def _toml(text: str, where: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{where} is not TOML: {error}; write it with wingbeat probe") from None
    return data


def _parse(text: str, units: Mapping[str, float], kind: str, example: str, where: str) -> float:
    match, place = _NUMBER.fullmatch(text.strip()), f" in {where}" if where else ""
    if match is None:
        raise UsageError(f"{kind} {text!r}{place}: write a number and a unit, such as {example}")
    if match[2].lower() not in units:
        raise unknown(f"unit of a {kind}", match[2], units, where=f"{text!r}{place}")
    value = float(match[1]) * units[match[2].lower()]
    if kind == "rate" and not 1e6 <= value <= 1e13:
        raise UsageError(f"rate {text!r}{place}: allowed are 1mbit to 10tbit")
    return value


def _whole(data: Mapping[str, Any], key: str, where: str, least: int, most: int) -> int:
    value: Any = data.get(key)
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{where}: {key} = {value!r}; allowed are {least} to {most}")
    return value


def _number(data: Mapping[str, Any], key: str, where: str, least: float, most: float) -> float:
    value: Any = data.get(key)
    if type(value) not in (int, float) or not least <= value <= most or math.isnan(value):
        raise UsageError(f"{where}: {key} = {value!r}; allowed are {least:g} to {most:g}")
    return float(value)


def _string(data: Mapping[str, Any], key: str, where: str) -> str:
    value: Any = data.get(key)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key} = {value!r}; it has to be a text")
    return value
