"""What workers without a group generator tell each other, by the rendezvous store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import NamedTuple

from wingbeat.methods.model_averaging.returns import say_over
from wingbeat.transport.store import Store

_READ_S = 5.0
"""Seconds that the store may take to return what is there."""

_LEFT = "left"


class Sign(NamedTuple):
    """How far a worker is. What it has passed it never comes to again.

    Attributes:
        levels: how many groups of all it is through with.
        levelling: whether it waits for the next one, and makes no steps until then.
        steps: how many it has made without a generator. After a group of all, all go on from the
            largest.
        broken: the number of the latest group that failed there, whose connections it has closed;
            -1 if none has.
    """

    levels: int = 0
    levelling: bool = False
    steps: int = 0
    broken: int = -1


class Board:
    """The signs of all workers, and who is gone for good. Without the store nothing is known.

    Args:
        store: keeps it.
        room: keeps those of one job apart.
        workers: how many there are.
    """

    def __init__(self, store: Store, room: str, workers: int) -> None:
        self._store, self._room, self._workers = store, room, workers

    def say(self, worker: int, sign: Sign) -> None:
        """Publish how far ``worker`` is."""
        self._set(f"sign/{worker}", json.dumps(sign))

    def signs(self) -> dict[int, Sign]:
        """Return how far each worker is, of those that have said so."""
        found = {}
        for worker in range(self._workers):
            sign = _sign_of(self._get(f"sign/{worker}"))
            if sign is not None:
                found[worker] = sign
        return found

    def lose(self, worker: int, *, left: bool = False) -> None:
        """Publish that ``worker`` takes part no more; ``left`` if it has ended in good order."""
        self._set(f"gone/{worker}", _LEFT if left else "1")

    def fall(self, worker: int, last: int) -> None:
        """Publish that ``worker`` goes on without the generator: nobody can come back.

        Args:
            worker: its rank.
            last: the number of the last group that it was through with; it comes to none of later
                numbers.
        """
        self._set(f"fallen/{worker}", str(last))
        with contextlib.suppress(TimeoutError, RuntimeError, OSError):
            say_over(self._store, self._room)

    def fallen(self, workers: Iterable[int]) -> dict[int, int]:
        """Return the last group of each of ``workers`` that goes on without the generator."""
        found = {}
        for worker in workers:
            with contextlib.suppress(ValueError):
                found[worker] = int(self._get(f"fallen/{worker}"))
        return found

    def lost(self) -> set[int]:
        """Return who takes part no more."""
        return {w for w in range(self._workers) if self._store.has(self._key(f"gone/{w}"))}

    def left(self, worker: int) -> bool:
        """Whether ``worker`` takes part no more because it has ended in good order."""
        return self._get(f"gone/{worker}") == _LEFT

    def _key(self, what: str) -> str:
        return f"{self._room}/{what}"

    def _set(self, what: str, value: str) -> None:
        # Groups whose connections stand do not need the store.
        with contextlib.suppress(TimeoutError, RuntimeError, OSError):
            self._store.set(self._key(what), value)

    def _get(self, what: str) -> str:
        with contextlib.suppress(TimeoutError, RuntimeError, OSError):
            if self._store.has(self._key(what)):
                return self._store.get(self._key(what), _READ_S)
        return ""


def _sign_of(text: str) -> Sign | None:
    """Return what a worker has published; None if that is none."""
    try:
        match json.loads(text):
            case [int(levels), bool(levelling), int(steps), int(broken)]:
                return Sign(levels, levelling, steps, broken)
    except (ValueError, RecursionError):
        pass
    return None
