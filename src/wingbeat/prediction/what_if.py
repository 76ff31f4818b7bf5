"""Changes to a cluster, as text: ``rate=10gbit``, ``nics=2,add-hosts=32``, ``slow-host=3:2``."""

from __future__ import annotations

from dataclasses import replace

from wingbeat.errors import UsageError, unknown
from wingbeat.prediction.cluster import (
    MOST_NICS,
    MOST_WORKERS,
    Cluster,
    checked_size,
    parse_rate,
    parse_time,
    payload,
)

SLOW = 2.0
"""Factor of a slow host's compute times where none is given."""

_KEYS = ("rate", "latency", "nics", "add-hosts", "slow-host")


def changed(cluster: Cluster, text: str) -> Cluster:
    """Return the cluster with all changes of ``text``.

    ``rate`` and ``latency`` replace those of all NICs, also of slower ones. ``nics`` is the number
    of each host. ``add-hosts`` adds hosts with the usual number of workers. ``slow-host=3:2``
    doubles the compute times on host 3, which may be given by its name.

    Raises:
        UsageError: a key does not exist, or a value is out of range.
    """
    for change in text.split(","):
        key, _, value = change.strip().partition("=")
        where = f"--what-if {text}"
        if key not in _KEYS:
            raise unknown("change", key, _KEYS, where=where)
        links = cluster.links
        if key == "rate":
            links = replace(links, bytes_per_s=payload(parse_rate(value, where)), rates={})
            cluster = replace(cluster, links=links, spread=0.0)
        elif key == "latency":
            links = replace(links, latency_s=parse_time(value, where), latencies={})
            cluster = replace(cluster, links=links)
        elif key == "nics":
            links = replace(links, count=_count(value, where, MOST_NICS))
            cluster = replace(cluster, links=links)
        elif key == "add-hosts":
            more = _count(value, where, MOST_WORKERS)
            cluster = checked_size(cluster.with_hosts(more), where)
        else:
            cluster = _slowed(cluster, value, where)
    return cluster


def _slowed(cluster: Cluster, value: str, where: str) -> Cluster:
    name, _, times = value.partition(":")
    if name in cluster.names:
        host = cluster.names.index(name)
    else:
        host = int(name.removeprefix("h")) if name.removeprefix("h").isdecimal() else cluster.hosts
    if host >= cluster.hosts:
        known = f", or {', '.join(cluster.names)}" if len(cluster.names) <= 16 else ""
        raise UsageError(
            f"{where}: no host {name!r}; allowed are 0 to {cluster.hosts - 1}"
            f"{known if cluster.names else ''}"
        )
    try:
        factor = float(times) if times else SLOW
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= 1000:
        raise UsageError(f"{where}: {times!r} times slower; allowed are 1 to 1000")
    return replace(cluster, slow={**cluster.slow, host: factor})


def _count(value: str, where: str, most: int) -> int:
    count = int(value) if value.isdecimal() else 0
    if not 1 <= count <= most:
        raise UsageError(f"{where}: {value!r}; allowed are 1 to {most}")
    return count
