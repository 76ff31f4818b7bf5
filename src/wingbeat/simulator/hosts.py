"""Workers that share their hosts' interfaces, and groups of workers on a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links
from wingbeat.simulator.network import Carrier, Key, Network, Side
from wingbeat.types import Layout

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
        self._under(key).announce(key)

    def hand(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """Hand over the chunk ``key`` for sending."""
        network = self._under(key)
        if network is self._far:
            source = self._host_of[source[0]], source[1]
            target = self._host_of[target[0]], target[1]
        network.hand(key, source, target, nbytes)

    def take(self, key: Key, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        return self._under(key).take(key, resume)

    def _under(self, key: Key) -> Network:
        source, target = cast(tuple[int, int], key[:2])
        return self._near if self._host_of[source] == self._host_of[target] else self._far


class Among:
    """A view of a network in which the members of a group are numbered from 0.

    ``meeting`` makes the group's chunks distinct from all others.
    """

    def __init__(self, network: Carrier, meeting: object, members: Sequence[int]) -> None:
        self._network, self._meeting, self._members = network, meeting, members

    def announce(self, key: Key) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""
        self._network.announce(self._known(key))

    def hand(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """Hand over the chunk ``key`` for sending."""
        source = self._members[source[0]], source[1]
        target = self._members[target[0]], target[1]
        self._network.hand(self._known(key), source, target, nbytes)

    def take(self, key: Key, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        return self._network.take(self._known(key), resume)

    def _known(self, key: Key) -> Key:
        source, target = cast(tuple[int, int], key[:2])
        return (self._members[source], self._members[target], self._meeting, *key[2:])
