"""Workers that share their hosts' cards, and groups of workers on a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from wingbeat.methods.model_averaging.rules import Layout
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links
from wingbeat.simulator.network import Carrier, Key, Network, Side

LOCAL = Links(bytes_per_s=4e9, latency_s=20e-6)
"""Between two workers of one host: what gloo makes of the loopback interface."""


class Hosts:
    """A network on which the workers of a host share its cards, and need none among themselves.

    A chunk's key begins with the worker that sends it and the one that receives it.

    Args:
        links: of each host.
        local: of each worker, to others of its host.
    """

    def __init__(self, agenda: Agenda, layout: Layout, links: Links, local: Links = LOCAL) -> None:
        self._host_of = layout.host_of
        self._far, self._near = Network(agenda, links), Network(agenda, local)

    def announce(self, key: Key) -> None:
        """The receiver of the chunk ``key`` has room for it."""
        self._under(key).announce(key)

    def hand(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """The sender of the chunk ``key`` has it ready."""
        network = self._under(key)
        if network is self._far:
            source = self._host_of[source[0]], source[1]
            target = self._host_of[target[0]], target[1]
        network.hand(key, source, target, nbytes)

    def take(self, key: Key, resume: Callable[[], None]) -> bool:
        """Whether the chunk is there, to be taken now; else ``resume`` is called when it is."""
        return self._under(key).take(key, resume)

    def _under(self, key: Key) -> Network:
        source, target = cast(tuple[int, int], key[:2])
        return self._near if self._host_of[source] == self._host_of[target] else self._far


class Among:
    """A network as the members of a group see it, who count from 0.

    Args:
        meeting: tells the group's chunks from those of all others.
        members: the workers, by their numbers in the group.
    """

    def __init__(self, network: Carrier, meeting: object, members: Sequence[int]) -> None:
        self._network, self._meeting, self._members = network, meeting, members

    def announce(self, key: Key) -> None:
        """The receiver of the chunk ``key`` has room for it."""
        self._network.announce(self._known(key))

    def hand(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """The sender of the chunk ``key`` has it ready."""
        source = self._members[source[0]], source[1]
        target = self._members[target[0]], target[1]
        self._network.hand(self._known(key), source, target, nbytes)

    def take(self, key: Key, resume: Callable[[], None]) -> bool:
        """Whether the chunk is there, to be taken now; else ``resume`` is called when it is."""
        return self._network.take(self._known(key), resume)

    def _known(self, key: Key) -> Key:
        source, target = cast(tuple[int, int], key[:2])
        return (self._members[source], self._members[target], self._meeting, *key[2:])
