"""The probe of a cluster: hosts, their ranks, and the rate and latency of each NIC, in a file.

Hosts are measured between their first ranks, over one NIC at a time. In each round every host sends
to the host that is some places after it, and receives from the one as many places before it. A
host's rate is that with its best partner, so a slow host does not slow the others' figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.schema import Range
from wingbeat.transport.link import Link
from wingbeat.transport.world import World

HEADERS = 1538 / 1448
"""Bytes on an Ethernet wire for each byte of TCP payload, with an MTU of 1500."""

LIKE = 0.1
"""Relative difference below which a NIC has the rate of the others."""

_FIRST_BYTES, _MOST_BYTES = 256 << 10, 256 << 20
_LONG_ENOUGH_S = 0.2
_PARTNERS = 4
_PARTS, _MORE = 4, 2
_PINGS = 50
_MAX_SECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Nic:
    """A NIC: its name, bit/s on the wire in its slower direction, and one-way seconds.

    ``latency_s`` is half of the shortest round trip of a byte, with the time of the software.
    """

    name: str
    rate: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class ProbedHost:
    """A host: its name, its number of ranks, and its NICs."""

    name: str
    ranks: int
    nics: tuple[Nic, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What `probe` measured; all hosts have the same number of NICs."""

    hosts: tuple[ProbedHost, ...]

    def to_toml(self) -> str:
        """Return a cluster file, which `wingbeat lab` and `wingbeat bench --lab` take.

        The lab emulates a star with these rates; the table ``measured`` is not emulated.
        """
        rates = [nic.rate for host in self.hosts for nic in host.nics]
        usual = statistics.median_high(rates)
        lines = ["# Written by wingbeat probe.", 'kind = "star"', f"hosts = {len(self.hosts)}"]
        lines += [f"rails = {len(self.hosts[0].nics)}", f'rate = "{_rate(usual)}"', ""]
        others = [
            f'"h{h}.eth{n}" = "{_rate(nic.rate)}"'
            for h, host in enumerate(self.hosts)
            for n, nic in enumerate(host.nics)
            if abs(nic.rate / usual - 1) > LIKE
        ]
        lines += ["[override]", *others, ""] if others else []
        for host in self.hosts:
            lines += ["[[measured]]", f"host = {_text(host.name)}", f"ranks = {host.ranks}"]
            lines.append("nics = [")
            lines += [
                f"  {{ name = {_text(nic.name)}, gbit_per_s = {nic.rate / 1e9:.4g}, "
                f"latency_us = {1e6 * nic.latency_s:.1f} }},"
                for nic in host.nics
            ]
            lines += ["]", ""]
        return "\n".join(lines)


def _rate(rate: float) -> str:
    """Three digits of a rate in Mbit/s, as the lab spells it."""
    digits = max(0, 2 - len(str(int(rate / 1e6))) + 1)
    return f"{rate / 1e6:.{digits}f}mbit"


def _text(value: str) -> str:
    """A TOML string of a name, of which characters that need quoting are left out."""
    return '"' + "".join(c for c in value if c.isprintable() and c not in '"\\') + '"'


def probe(
    world: World,
    name: str,
    progress: Callable[[str], None],
    *,
    long_enough_s: float = _LONG_ENOUGH_S,
) -> Cluster:
    """Measure the NICs between the hosts of a job; all ranks call this together.

    Args:
        world: the job.
        name: of this rank's host.
        progress: gets a line for each step.
        long_enough_s: seconds of a transfer from which no longer one is measured.

    Raises:
        UsageError: all ranks are on one host.
        PeerError: a peer was lost.
    """
    leaders = [ranks[0] for ranks in world.layout.hosts]
    if len(leaders) < 2:
        raise UsageError(
            f"all {world.size} ranks are on one host; a probe measures between hosts: start it on "
            "two or more, such as with torchrun --nnodes 2"
        )
    names: list[str] = world.exchange("probe-name", name[:200], str)
    found: list[list[Nic]] = [[] for _ in leaders]
    for number, link in enumerate(world.links):
        progress(f"measuring NIC {number + 1} of {len(world.links)}, {link.name}")
        rates = _rates(world, link, leaders, long_enough_s)
        latencies = _latencies(world, link, leaders)
        nic_names: list[str] = world.exchange("probe-nic", link.name[:200], str)
        for host, leader in enumerate(leaders):
            nic = Nic(nic_names[leader], 8 * HEADERS * rates[host], latencies[host])
            found[host].append(nic)
    hosts = zip(leaders, world.layout.hosts, found, strict=True)
    return Cluster(
        tuple(ProbedHost(names[leader], len(ranks), tuple(nics)) for leader, ranks, nics in hosts)
    )


_Seconds = Annotated[float, Range(0, _MAX_SECONDS)]


def _rates(world: World, link: Link, leaders: Sequence[int], long_enough_s: float) -> list[float]:
    """Return the payload bytes per second of each host, in its slower direction."""
    count = len(leaders)
    sent, received = [0.0] * count, [0.0] * count
    for shift in range(1, min(count - 1, _PARTNERS) + 1):
        nbytes = _FIRST_BYTES
        while max(seconds := _round(world, link, leaders, shift, nbytes)) < long_enough_s:
            if nbytes >= _MOST_BYTES:
                break
            nbytes *= 2
        rounds = [seconds, *(_round(world, link, leaders, shift, nbytes) for _ in range(_MORE))]
        for receiver, took in enumerate(map(statistics.median, zip(*rounds, strict=True))):
            sender = (receiver - shift) % count
            sent[sender] = max(sent[sender], nbytes / took)
            received[receiver] = max(received[receiver], nbytes / took)
    return [min(pair) for pair in zip(sent, received, strict=True)]


def _round(
    world: World, link: Link, leaders: Sequence[int], shift: int, nbytes: int
) -> list[float]:
    """Return by host the seconds to receive from the host ``shift`` places before it.

    The first of several messages does not count: it hides that processes begin at different times,
    and fills the buffers on the way.
    """
    own, part = 0.0, nbytes // _PARTS
    world.exchange("probe-begin", nbytes, int)  # all begin together
    if world.rank in leaders:
        me, count = leaders.index(world.rank), len(leaders)
        before, after = leaders[(me - shift) % count], leaders[(me + shift) % count]
        messages = torch.zeros(2, _PARTS, part, dtype=torch.uint8, device="cpu")
        with _naming(world, link):
            received = [link.recv(each, before, 0) for each in messages[0]]
            sent = [link.send(each, after, 0) for each in messages[1]]
            received[0].wait(world.timeout)
            begin = time.perf_counter()
            for each in received[1:]:
                each.wait(world.timeout)
            own = (time.perf_counter() - begin) * _PARTS / (_PARTS - 1)
            for each in sent:
                each.wait(world.timeout)
    times = world.exchange("probe-seconds", own, _Seconds)
    return [max(1e-9, times[leader]) for leader in leaders]


def _latencies(world: World, link: Link, leaders: Sequence[int]) -> list[float]:
    """Return half of the shortest round trip of a byte from each host to the next one."""
    own = 0.0
    world.exchange("probe-begin", 1, int)
    if world.rank in leaders:
        me, count = leaders.index(world.rank), len(leaders)
        after, before = leaders[(me + 1) % count], leaders[(me - 1) % count]
        with _naming(world, link):
            own = min(_round_trip(world, link, before, after) for _ in range(_PINGS)) / 2
    times = world.exchange("probe-latency", own, _Seconds)
    return [times[leader] for leader in leaders]


def _round_trip(world: World, link: Link, before: int, after: int) -> float:
    ping, pong, byte = (torch.zeros(1, dtype=torch.uint8, device="cpu") for _ in range(3))
    begin = time.perf_counter()
    pending = [link.recv(ping, before, 0), link.send(byte, after, 0)]
    pending[0].wait(world.timeout)
    pending.append(link.send(byte, before, 1))
    returned = link.recv(pong, after, 1)
    returned.wait(world.timeout)
    took = time.perf_counter() - begin
    for each in pending[1:]:
        each.wait(world.timeout)
    return took


@contextmanager
def _naming(world: World, link: Link) -> Iterator[None]:
    """Name the NIC in the error of a transfer."""
    try:
        yield
    except RuntimeError as err:
        raise PeerError(
            f"{world.me}: measuring NIC {link.name} failed: {str(err).splitlines()[0]}; check that "
            "it connects all hosts, or name others: --interface eth0"
        ) from None
