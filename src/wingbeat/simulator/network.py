"""Chunks in transit: each direction of each interface carries one at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links
from wingbeat.simulator.traffic import Traffic

Side = tuple[int, int]
"""A worker and one of its interfaces."""

Key = tuple[Hashable, ...]
"""Unique key of a chunk."""


class Carrier(Protocol):
    """The interface of `Network`."""

    def announce(self, key: Key) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""

    def hand(self, key: Key, source: Side, target: Side, nbytes: int) -> None:
        """Hand over the chunk ``key`` for sending."""

    def take(self, key: Key, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        ...


class Network:
    """Carries chunks between workers in virtual time.

    A chunk leaves when it has been handed over, its receiver has announced a buffer, and the
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
        self._handed: dict[Hashable, tuple[Side, Side, int]] = {}
        self._arrived: set[Hashable] = set()
        self._waiting: dict[Hashable, Callable[[], None]] = {}

    def announce(self, key: Hashable) -> None:
        """Announce that the receiver has a buffer for the chunk ``key``."""
        handed = self._handed.pop(key, None)
        if handed is None:
            self._announced.add(key)
        else:
            self._send(key, *handed)

    def hand(self, key: Hashable, source: Side, target: Side, nbytes: int) -> None:
        """Hand over the chunk ``key`` for sending."""
        if key in self._announced:
            self._announced.remove(key)
            self._send(key, source, target, nbytes)
        else:
            self._handed[key] = source, target, nbytes

    def take(self, key: Hashable, resume: Callable[[], None]) -> bool:
        """Receive the chunk ``key`` if it has arrived; otherwise call ``resume`` when it does."""
        if key in self._arrived:
            self._arrived.remove(key)
            return True
        self._waiting[key] = resume
        return False

    def _send(self, key: Hashable, source: Side, target: Side, nbytes: int) -> None:
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
