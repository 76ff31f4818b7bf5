"""Which collective each rank is in, for ranks that wait for long to find one that differs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from wingbeat.transport.text import printable

if TYPE_CHECKING:
    from wingbeat.transport.world import World

_LONGEST = 120
"""Characters of what a peer says it is in."""

_PATIENCE = 2.0
"""Seconds for the store to answer with what it has."""


class Calls:
    """The calls of a world's ranks in one lane, in the rendezvous store.

    The n-th collective of a lane must be the same on all ranks. A rank that waits for long
    publishes its calls, and reads what its peers have published. While all goes well nothing is.
    """

    def __init__(self, world: World, lane: int) -> None:
        self._store = world.store
        self._rank = world.ranks[world.rank]
        self._room = f"{world.path}/calls/{lane}"

    def compare(
        self, calls: Mapping[int, str], peers: Iterable[int]
    ) -> tuple[int, str, str] | None:
        """Publish this rank's ``calls`` by their numbers; return a peer whose call differs.

        Returns:
            The first peer that has published another call of the same number, this rank's call
            and the peer's; None if none has.
        """
        mine = "\n".join(f"{number} {call}" for number, call in sorted(calls.items()))
        with contextlib.suppress(RuntimeError, TimeoutError):  # the store may be gone
            self._store.set(f"{self._room}/{self._rank}", mine)
            for peer in peers:
                if peer == self._rank or not self._store.has(f"{self._room}/{peer}"):
                    continue
                for line in self._store.get(f"{self._room}/{peer}", _PATIENCE).splitlines():
                    number, _, theirs = printable(line, _LONGEST).partition(" ")
                    call = calls.get(int(number)) if number.isdecimal() else None
                    if call is not None and theirs != call:
                        return peer, call, theirs
        return None
