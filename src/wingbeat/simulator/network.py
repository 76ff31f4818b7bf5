"""Chunks in transit: connections that share the ports on their way, max-min fair."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, cast

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Traffic
from wingbeat.types import Layout

Side = tuple[int, int]
"""A worker and one of its interfaces."""

Key = tuple[Hashable, ...]
"""Unique key of a chunk; it begins with its sender and its receiver."""


class Carrier(Protocol):
    """The interface of `Network`."""

    def near(self, source: int, target: int) -> bool:
        """Whether two workers are on one host."""
        ...

    def announce(self, key: Key) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""

    def send(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """Send the chunk ``key``."""

    def receive(self, key: Key, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
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
    """

    def __init__(self, agenda: Agenda, wires: Wires, traffic: Traffic | None = None) -> None:
        self._agenda, self._wires, self._traffic = agenda, wires, traffic
        self._bundles: dict[Route, _Bundle] = {}
        self._on: dict[Hashable, dict[_Bundle, None]] = {}
        self._connections: dict[Key, _Connection] = {}
        self._announced: set[Key] = set()
        self._submitted: dict[Key, tuple[Side, Side, int]] = {}
        self._arrived: set[Key] = set()
        self._waiting: dict[Key, Callable[[], None]] = {}

    def near(self, source: int, target: int) -> bool:
        """Whether two workers are on one host."""
        return self._wires.near(source, target)

    def announce(self, key: Key) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""
        handed = self._submitted.pop(key, None)
        if handed is None:
            self._announced.add(key)
        else:
            self._transmit(key, *handed)

    def send(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """Send the chunk ``key``."""
        if key in self._announced:
            self._announced.remove(key)
            self._transmit(key, source, target, nbytes)
        else:
            self._submitted[key] = source, target, nbytes

    def receive(self, key: Key, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        if key in self._arrived:
            self._arrived.remove(key)
            return True
        self._waiting[key] = resume
        return False

    def _transmit(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        name = (*key[:2], source[1], target[1])
        connection = self._connections.get(name)
        if connection is None:
            connection = self._connections[name] = self._connect(key, source, target)
        connection.chunks.append((key, nbytes))
        if len(connection.chunks) == 1:
            bundle = connection.bundle
            bundle.settle(self._agenda.now)
            bundle.begin(connection, self._agenda.now)
            self._share(bundle)

    def _connect(self, key: Key, source: Side, target: Side) -> _Connection:
        near = self._wires.near(*cast(tuple[int, int], key[:2]))
        route = self._wires.route(source, target, near=near)
        if route not in self._bundles:
            self._bundles[route] = _Bundle(route)
        return _Connection(self._bundles[route], -1 if near else self._wires.host_of(source[0]))

    def _share(self, changed: _Bundle) -> None:
        """Share the ports again after a connection of a bundle has begun or ended to carry."""
        for port in changed.route.ports:
            carrying = self._on.setdefault(port, {})
            if changed.ends:
                carrying[changed] = None
            else:
                carrying.pop(changed, None)
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
            self._agenda.at(self._agenda.now + ahead, lambda: self._ended(bundle, version))

    def _ended(self, bundle: _Bundle, version: int) -> None:
        if version != bundle.version:
            return
        now = self._agenda.now
        bundle.carried, bundle.since = bundle.ends[0][0], now
        before = len(bundle.ends)
        over = []
        while bundle.ends and bundle.ends[0][0] <= bundle.carried:
            over.append(heapq.heappop(bundle.ends)[2])
        for connection in over:
            key, nbytes = connection.chunks.popleft()
            if self._traffic is not None and connection.host >= 0:
                self._traffic.carried(connection.host, connection.begun, now, nbytes)
            self._agenda.at(now + bundle.route.latency_s, lambda key=key: self._arrive(key))  # type: ignore[misc]
            if connection.chunks:
                bundle.begin(connection, now)
        if len(bundle.ends) == before:
            self._expect(bundle)
        else:
            self._share(bundle)

    def _arrive(self, key: Key) -> None:
        self._arrived.add(key)
        resume = self._waiting.pop(key, None)
        if resume is not None:
            resume()


class _Bundle:
    """Connections with the same route, whose rates are equal.

    ``carried`` counts the bytes of one connection that carries all the time, up to ``since``, and
    ``ends`` has what it will be when the first chunk of each connection ends.
    """

    def __init__(self, route: Route) -> None:
        self.route = route
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
        end = self.carried + connection.chunks[0][1]
        heapq.heappush(self.ends, (end, self._begun, connection))


class _Connection:
    """Chunks with their bytes, in order. ``host`` is the sender's; -1: they stay on it."""

    def __init__(self, bundle: _Bundle, host: int) -> None:
        self.bundle, self.host = bundle, host
        self.chunks: deque[tuple[Key, int]] = deque()
        self.begun = math.nan


class GroupNetwork:
    """A view of a network in which the members of a group are numbered from 0.

    ``average`` makes the chunks distinct from those of other averages.
    """

    def __init__(self, network: Carrier, average: object, members: Sequence[int]) -> None:
        self._network, self._average, self._members = network, average, members

    def near(self, source: int, target: int) -> bool:
        """Whether two members are on one host."""
        return self._network.near(self._members[source], self._members[target])

    def announce(self, key: Key) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""
        self._network.announce(self._global_key(key))

    def send(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """Send the chunk ``key``."""
        source = self._members[source[0]], source[1]
        target = self._members[target[0]], target[1]
        self._network.send(self._global_key(key), source, target, nbytes)

    def receive(self, key: Key, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        return self._network.receive(self._global_key(key), resume)

    def _global_key(self, key: Key) -> Key:
        source, target = cast(tuple[int, int], key[:2])
        return (self._members[source], self._members[target], self._average, *key[2:])
