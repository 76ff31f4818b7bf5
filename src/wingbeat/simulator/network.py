"""Chunks in transit: each direction of each interface carries one at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, cast

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Traffic
from wingbeat.types import Layout

Side = tuple[int, int]
"""A worker and one of its interfaces."""

Key = tuple[Hashable, ...]
"""Unique key of a chunk."""


class Carrier(Protocol):
    """The interface of `Network`."""

    def announce(self, key: Key) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""

    def send(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """Send the chunk ``key``."""

    def receive(self, key: Key, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        ...


class Network:
    """Carries chunks between workers in virtual time.

    A chunk leaves when it has been sent, its receiver has announced a buffer, and the
    sender's interface is free. It arrives when the receiver's interface has had the time for it, so
    senders to one receiver share its rate.
    """

    def __init__(self, agenda: Agenda, links: Links, traffic: Traffic | None = None) -> None:
        self._agenda, self._traffic = agenda, traffic
        self._seconds_per_byte = 1 / links.bytes_per_s
        self._latency_s = links.latency_s
        self._out_free: dict[Side, float] = {}
        self._in_free: dict[Side, float] = {}
        self._announced: set[Hashable] = set()
        self._submitted: dict[Hashable, tuple[Side, Side, int]] = {}
        self._arrived: set[Hashable] = set()
        self._waiting: dict[Hashable, Callable[[], None]] = {}

    def announce(self, key: Hashable) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""
        handed = self._submitted.pop(key, None)
        if handed is None:
            self._announced.add(key)
        else:
            self._transmit(key, *handed)

    def send(self, key: Hashable, source: Side, target: Side, nbytes: int) -> None:
        """Send the chunk ``key``."""
        if key in self._announced:
            self._announced.remove(key)
            self._transmit(key, source, target, nbytes)
        else:
            self._submitted[key] = source, target, nbytes

    def receive(self, key: Hashable, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        if key in self._arrived:
            self._arrived.remove(key)
            return True
        self._waiting[key] = resume
        return False

    def _transmit(self, key: Hashable, source: Side, target: Side, nbytes: int) -> None:
        seconds = nbytes * self._seconds_per_byte
        leaves = max(self._agenda.now, self._out_free.get(source, 0.0)) + seconds
        self._out_free[source] = leaves
        if self._traffic is not None:
            self._traffic.carried(source[0], leaves - seconds, leaves, nbytes)
        # The first byte arrives one latency after it left; the last one no sooner.
        first = max(leaves - seconds + self._latency_s, self._in_free.get(target, 0.0))
        self._in_free[target] = first + seconds
        self._agenda.at(first + seconds, lambda: self._arrive(key))

    def _arrive(self, key: Hashable) -> None:
        self._arrived.add(key)
        resume = self._waiting.pop(key, None)
        if resume is not None:
            resume()


LOCAL = Links(bytes_per_s=4e9, latency_s=20e-6)
"""Connections within a host: gloo over the loopback interface."""


class Hosts:
    """A network on which the workers of a host share its interfaces.

    Workers of one host use ``local`` among themselves. A chunk's key begins with its sender and
    receiver.
    """

    def __init__(self, agenda: Agenda, layout: Layout, links: Links, local: Links = LOCAL) -> None:
        self._host_of = layout.host_of
        self._far, self._near = Network(agenda, links), Network(agenda, local)

    def announce(self, key: Key) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""
        self._network_of(key).announce(key)

    def send(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """Send the chunk ``key``."""
        network = self._network_of(key)
        if network is self._far:
            source = self._host_of[source[0]], source[1]
            target = self._host_of[target[0]], target[1]
        network.send(key, source, target, nbytes)

    def receive(self, key: Key, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        return self._network_of(key).receive(key, resume)

    def _network_of(self, key: Key) -> Network:
        source, target = cast(tuple[int, int], key[:2])
        return self._near if self._host_of[source] == self._host_of[target] else self._far


class GroupNetwork:
    """A view of a network in which the members of a group are numbered from 0.

    ``average`` makes the chunks distinct from those of other averages.
    """

    def __init__(self, network: Carrier, average: object, members: Sequence[int]) -> None:
        self._network, self._average, self._members = network, average, members

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
