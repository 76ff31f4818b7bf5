"""Chunks in transit: connections that share the ports on their way, max-min fair."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast
from weakref import WeakValueDictionary

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Traffic
from wingbeat.types import Layout

Side = tuple[int, int]
"""A worker and one of its interfaces."""

Name = tuple[Hashable, ...]
"""Unique name of a channel; it begins with its sender and its receiver."""


class Carrier(Protocol):
    """The interface of `Network`."""

    def near(self, source: int, target: int) -> bool:
        """Whether two workers are on one host."""
        ...

    def channel(self, name: Name, source: Side, target: Side) -> Channel:
        """Return the channel called ``name``, the same one for its sender and its receiver."""
        ...


LOCAL = Links(bytes_per_s=5e9, latency_s=10e-6)
"""Shared memory of a host, for each worker and direction.

Two processes on two cores of an AMD EPYC: an all-gather of a buffer of 40 MB, 20 MB each way, took
3.4 to 4.6 ms, and a reduce-scatter 3.1 to 4.8 ms, the shortest of 30 in each of four runs; an
awaited all-gather of 4 KB took 12.7 to 20 microseconds (2026-11-27, load 4 to 6).
"""


class Route(NamedTuple):
    """The ports that a connection passes, and its seconds of latency."""

    ports: tuple[Hashable, ...]
    latency_s: float


class Wires:
    """The ports of a cluster and their rates.

    Workers of a host share its interfaces, each with a port in and a port out. Among themselves
    they use ``local``, whose ports are each worker's own.
    """

    def __init__(self, layout: Layout, links: Links, local: Links = LOCAL) -> None:
        self._host_of, self._links, self._local = layout.host_of, links, local

    def near(self, source: int, target: int) -> bool:
        """Whether two workers are on one host."""
        return self._host_of[source] == self._host_of[target]

    def host_of(self, worker: int) -> int:
        """Return the host of a worker."""
        return self._host_of[worker]

    def route(self, source: Side, target: Side, *, near: bool) -> Route:
        """Return the route between interfaces of two workers."""
        if near:
            return Route((("near out", *source), ("near in", *target)), self._local.latency_s)
        links, (worker, out), (other, into) = self._links, source, target
        here, there = self._host_of[worker], self._host_of[other]
        ports: tuple[Hashable, ...] = (("out", here, out), ("in", there, into))
        if links.crosses(here, there):
            trunks = ("up", here // links.leaf, out), ("down", there // links.leaf, into)
            ports = (ports[0], *trunks, ports[1])
        return Route(ports, links.latency(here, there))

    def bytes_per_s(self, port: Hashable) -> float:
        """Return the rate of a port."""
        kind, number, link = cast(tuple[str, int, int], port)
        if kind.startswith("near"):
            return self._local.bytes_per_s
        if kind in ("up", "down"):
            return self._links.trunk_bytes_per_s
        return self._links.rate(number, link)


class Network:
    """Carries chunks between workers in virtual time.

    The chunks of a connection, of two workers over one interface, travel one after the other; a
    chunk leaves when it has been sent and its receiver has announced a buffer. All connections that
    carry a chunk share their ports max-min fair: the rates of those on the busiest port are equal,
    and what they leave of other ports goes to the others there.

    Attributes:
        waiting: the channels on which an end waits for the other, which may not have it yet.
    """

    def __init__(self, agenda: Agenda, wires: Wires, traffic: Traffic | None = None) -> None:
        self._agenda, self._wires, self._traffic = agenda, wires, traffic
        self._bundles: dict[Route, _Bundle] = {}
        self._on: dict[Hashable, dict[_Bundle, None]] = {}
        self._connections: dict[Name, _Connection] = {}
        # Averages make many, so those that neither an end nor a chunk keeps are removed.
        self._channels: WeakValueDictionary[Name, Channel] = WeakValueDictionary()
        self.waiting: set[Channel] = set()

    def near(self, source: int, target: int) -> bool:
        """Whether two workers are on one host."""
        return self._wires.near(source, target)

    def channel(self, name: Name, source: Side, target: Side) -> Channel:
        """Return the channel called ``name``, the same one for its sender and its receiver.

        Channels between two workers over one interface share a connection.
        """
        channel = self._channels.get(name)
        if channel is None:
            ends = (*name[:2], source[1], target[1])
            connection = self._connections.get(ends)
            if connection is None:
                connection = self._connections[ends] = self._connect(name, source, target)
            channel = self._channels[name] = Channel(self, connection)
        return channel

    def transmit(self, connection: _Connection, channel: Channel, chunk: int, nbytes: int) -> None:
        """Carry a chunk after those of the same connection."""
        connection.chunks.append((channel, chunk, nbytes))
        if len(connection.chunks) == 1:
            bundle = connection.bundle
            bundle.settle(self._agenda.now)
            bundle.begin(connection, self._agenda.now)
            self._share(bundle)

    def _connect(self, name: Name, source: Side, target: Side) -> _Connection:
        near = self._wires.near(*cast(tuple[int, int], name[:2]))
        route = self._wires.route(source, target, near=near)
        if route not in self._bundles:
            limit = min(map(self._wires.bytes_per_s, route.ports))
            self._bundles[route] = _Bundle(route, limit)
        return _Connection(self._bundles[route], -1 if near else self._wires.host_of(source[0]))

    def _share(self, changed: _Bundle) -> None:
        """Share the ports again after a connection of a bundle has begun or ended to carry."""
        alone = True
        for port in changed.route.ports:
            carrying = self._on.setdefault(port, {})
            if changed.ends:
                carrying[changed] = None
                alone = alone and len(carrying) == 1
            else:
                carrying.pop(changed, None)
                alone = alone and not carrying
        if alone:
            rates = {changed: changed.limit / len(changed.ends)} if changed.ends else {}
        else:
            rates = self._rates(self._reached(changed))
        rates.setdefault(changed, 0.0)
        for bundle, rate in rates.items():
            if rate != bundle.rate or bundle is changed:
                bundle.settle(self._agenda.now)
                bundle.rate = rate
                self._expect(bundle)

    def _reached(self, first: _Bundle) -> dict[_Bundle, None]:
        """Return the bundles that share a port with ``first``, those that share one with them..."""
        found = {b: None for port in first.route.ports for b in self._on[port]}
        front = list(found)
        while front:
            for port in front.pop().route.ports:
                for bundle in self._on[port]:
                    if bundle not in found:
                        found[bundle] = None
                        front.append(bundle)
        return found

    def _rates(self, bundles: dict[_Bundle, None]) -> dict[_Bundle, float]:
        """Return the bytes per second of a connection of each bundle."""
        left: dict[Hashable, float] = {}
        count: dict[Hashable, int] = {}
        for bundle in bundles:
            for port in bundle.route.ports:
                left.setdefault(port, self._wires.bytes_per_s(port))
                count[port] = count.get(port, 0) + len(bundle.ends)
        rates: dict[_Bundle, float] = {}
        while len(rates) < len(bundles):
            busiest = min((p for p in count if count[p]), key=lambda p: left[p] / count[p])
            rate = left[busiest] / count[busiest]
            for bundle in self._on[busiest]:
                if bundle not in rates:
                    rates[bundle] = rate
                    for port in bundle.route.ports:
                        left[port] = max(0.0, left[port] - rate * len(bundle.ends))
                        count[port] -= len(bundle.ends)
        return rates

    def _expect(self, bundle: _Bundle) -> None:
        """Schedule the end of the bundle's next chunk."""
        bundle.version = version = bundle.version + 1
        if bundle.ends:
            ahead = max(0.0, bundle.ends[0][0] - bundle.carried) / bundle.rate
            self._agenda.at(self._agenda.now + ahead, partial(self._ended, bundle, version))

    def _ended(self, bundle: _Bundle, version: int) -> None:
        if version != bundle.version:
            return
        now, ends = self._agenda.now, bundle.ends
        carried, bundle.since = ends[0][0], now
        bundle.carried, before = carried, len(ends)
        over = [heapq.heappop(ends)[2]]
        while ends and ends[0][0] <= carried:
            over.append(heapq.heappop(ends)[2])
        for connection in over:
            channel, chunk, nbytes = connection.chunks.popleft()
            if self._traffic is not None and connection.host >= 0:
                self._traffic.carried(connection.host, connection.begun, now, nbytes)
            channel.end(chunk, now + bundle.route.latency_s)
            if connection.chunks:
                bundle.begin(connection, now)
        if len(ends) == before:
            self._expect(bundle)
        else:
            self._share(bundle)


class Channel:
    """Chunks of one lane from a worker to another one, by unique numbers."""

    __slots__ = (
        "__weakref__", "_announced", "_arrivals", "_awaited", "_connection", "_network",
        "_submitted",
    )  # fmt: skip

    def __init__(self, network: Network, connection: _Connection) -> None:
        self._network, self._connection = network, connection
        self._announced: set[int] = set()
        self._submitted: dict[int, int] = {}
        self._arrivals: dict[int, float] = {}
        self._awaited: dict[int, Callable[[float], None]] = {}

    def announce(self, chunk: int) -> None:
        """Announce that the receiver has a buffer for a chunk."""
        if chunk in self._submitted:
            nbytes = self._submitted.pop(chunk)
            self._release()
            self._network.transmit(self._connection, self, chunk, nbytes)
        else:
            self._announced.add(chunk)

    def send(self, chunk: int, nbytes: int) -> None:
        """Send a chunk once the receiver has a buffer for it."""
        if chunk in self._announced:
            self._announced.remove(chunk)
            self._network.transmit(self._connection, self, chunk, nbytes)
        else:
            self._submitted[chunk] = nbytes
            self._network.waiting.add(self)

    def receive(self, chunk: int, arriving: Callable[[float], None]) -> float | None:
        """Return when a chunk arrives, or has arrived; None: ``arriving`` is called with that.

        It is called as soon as all bytes have left, one latency before they arrive.
        """
        when = self._arrivals.pop(chunk, None)
        if when is None:
            self._awaited[chunk] = arriving
            self._network.waiting.add(self)
        return when

    def end(self, chunk: int, arrival: float) -> None:
        """All bytes of a chunk have left, and arrive at ``arrival``."""
        arriving = self._awaited.pop(chunk, None)
        if arriving is None:
            self._arrivals[chunk] = arrival
        else:
            self._release()
            arriving(arrival)

    def _release(self) -> None:
        if not self._submitted and not self._awaited:
            self._network.waiting.discard(self)


class _Bundle:
    """Connections with the same route, whose rates are equal; ``limit`` is its slowest port's.

    ``carried`` counts the bytes of one connection that carries all the time, up to ``since``, and
    ``ends`` has what it will be when the first chunk of each connection ends.
    """

    def __init__(self, route: Route, limit: float) -> None:
        self.route, self.limit = route, limit
        self.rate = self.carried = self.since = 0.0
        self.ends: list[tuple[float, int, _Connection]] = []
        self.version = 0
        self._begun = 0

    def settle(self, now: float) -> None:
        """Count the bytes up to now."""
        self.carried += self.rate * (now - self.since)
        self.since = now

    def begin(self, connection: _Connection, now: float) -> None:
        """Begin to carry the connection's first chunk."""
        connection.begun = now
        self._begun += 1
        end = self.carried + connection.chunks[0][2]
        heapq.heappush(self.ends, (end, self._begun, connection))


class _Connection:
    """Chunks with their channels and bytes, in order. ``host`` is the sender's; -1: same host."""

    def __init__(self, bundle: _Bundle, host: int) -> None:
        self.bundle, self.host = bundle, host
        self.chunks: deque[tuple[Channel, int, int]] = deque()
        self.begun = math.nan


class GroupNetwork:
    """A view of a network in which the members of a group are numbered from 0.

    ``average`` makes the channels distinct from those of other averages.
    """

    def __init__(self, network: Carrier, average: object, members: Sequence[int]) -> None:
        self._network, self._average, self._members = network, average, members

    def near(self, source: int, target: int) -> bool:
        """Whether two members are on one host."""
        return self._network.near(self._members[source], self._members[target])

    def channel(self, name: Name, source: Side, target: Side) -> Channel:
        """Return the channel called ``name``, the same one for its sender and its receiver."""
        members = self._members
        first, second = cast(tuple[int, int], name[:2])
        return self._network.channel(
            (members[first], members[second], self._average, *name[2:]),
            (members[source[0]], source[1]),
            (members[target[0]], target[1]),
        )
