"""How workers under bounded staleness decide on other colayers: in one place, where all settle.

When the fastest enters a certain iteration, each worker settles as soon as it hears of that, and
writes down what it has measured, and who takes part as far as it knows. Then it applies nothing
until there is a decision, which is whoever's is written first (the rendezvous store says whose):

- Other colayers, if all who take part have written the same of themselves. So all of these hold the
  same, nothing is under way, and each of them reads the decision and begins with the new ones.
- To go on as before, if somebody came or went meanwhile; it is tried again later. If a worker has
  ended its training, it is not.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from wingbeat.errors import PeerError
from wingbeat.stale.view import View, members
from wingbeat.transport.store import AtomicStore

FIRST = 6
"""The iteration that all meet in: five are measured after the first, which is no measure."""

AGAIN = 50
"""Iterations after which it is tried again."""

_LOOK_S = 0.05
"""Seconds between two looks into the store, whatever else comes meanwhile."""

_STORE_S = 10.0
"""Seconds that the store may take to answer."""

_CAME = "a worker came or went"

Buckets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What all go by.

    Attributes:
        rounds: how many were in the parameters of whoever has decided.
        view: who was there.
        buckets: the tensors of each colayer; None: as before.
        why: in that case.
        again: whether it is tried again.
    """

    rounds: int
    view: View
    buckets: Buckets | None
    why: str = ""
    again: bool = False

    def to_text(self) -> str:
        """Write it down as JSON."""
        return json.dumps([self.rounds, self.view, self.buckets, self.why, self.again])


class Machine(Protocol):
    """What is looked at of a `wingbeat.stale.worker.Worker`."""

    @property
    def view(self) -> View: ...  # noqa: D102

    @property
    def agreeing(self) -> bool: ...  # noqa: D102

    @property
    def applied(self) -> int: ...  # noqa: D102


class Rebundling:
    """One worker's part in it. It never waits, and has no thread.

    Args:
        store: of the job.
        room: of the training; the same on all workers.
        rank: this worker's.
        tensors: how many there are to be bundled.
        choose: makes buckets of what all have measured, in the order of ranks; None of nothing.
        clock: seconds.

    Attributes:
        due: the iteration from which on workers meet; None if they do not any more.
        decision: the last one that was read.
    """

    def __init__(
        self,
        store: AtomicStore,
        room: str,
        rank: int,
        tensors: int,
        choose: Callable[[Sequence[Any]], Buckets | None],
        *,
        first: int = FIRST,
        again: int = AGAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._room, self._rank, self._tensors = store, room, rank, tensors
        self._choose, self._clock, self._again = choose, clock, again
        self.due: int | None = first
        self.decision: Decision | None = None
        self._attempt, self._looked = 0, -1.0
        self._view: View | None = None

    # -- what is written -------------------------------------------------------------------

    @property
    def _key(self) -> str:
        return f"{self._room}/{self._attempt}"

    def ended(self) -> None:
        """Say that this worker trains no more, whatever others decide."""
        with contextlib.suppress(RuntimeError):  # without a store nothing is decided any more
            self._store.set(f"{self._room}/ended", "")

    def is_due(self, iteration: int) -> bool:
        """Whether workers meet, as one has entered this iteration."""
        return self.due is not None and iteration >= self.due

    # -- what is decided -------------------------------------------------------------------

    def catch_up(self) -> None:
        """Read all decisions that there are; for who comes back.

        Raises:
            PeerError: one is malformed.
        """
        while self.due is not None and self._read():
            pass

    def over(self) -> bool:
        """Whether there is a decision, although this worker may not have settled.

        Raises:
            PeerError: it is malformed.
        """
        return self._looks() and self._read()

    def _looks(self) -> bool:
        now = self._clock()
        if now < self._looked + _LOOK_S:
            return False
        self._looked = now
        return True

    def decide(self, machine: Machine, gone: Collection[int], own: Any) -> Decision | None:
        """Say what this worker has, which has settled, and return what all do; None: not known yet.

        Args:
            machine: this worker's; it applies nothing from the first call on.
            gone: workers that are not there any more.
            own: what this one has measured; what JSON can say.

        Raises:
            PeerError: the store does not answer, or what it says is malformed.
        """
        view, rounds = machine.view, machine.applied
        if self._view is None:
            self._view = view
            self._say(json.dumps([view, rounds, own]))
        elif not self._looks():
            return None
        if self._read():
            return self.decision
        if machine.agreeing or view != self._view or not set(gone).isdisjoint(members(view)):
            return self._claim(Decision(rounds, view, None, _CAME, True))
        if self._store.has(f"{self._room}/ended"):
            return self._claim(Decision(rounds, view, None, "a worker has ended its training"))
        if self.missing():
            return None
        heard = [json.loads(self._store.get(f"{self._key}/{w}", _STORE_S)) for w in members(view)]
        if any(each[:2] != [list(view), rounds] for each in heard):
            return self._claim(Decision(rounds, view, None, _CAME, True))
        buckets = self._choose([own for _, _, own in heard])
        why = "" if buckets else "nothing was measured"
        return self._claim(Decision(rounds, view, buckets, why, buckets is None))

    def missing(self) -> list[int]:
        """Return who takes part and has not said what it has."""
        there = () if self._view is None else members(self._view)
        return [w for w in there if not self._store.has(f"{self._key}/{w}")]

    def _say(self, text: str) -> None:
        try:
            self._store.set(f"{self._key}/{self._rank}", text)
        except RuntimeError as error:
            raise self._lost(error) from None

    def _claim(self, decision: Decision) -> Decision:
        try:
            text = self._store.claim(f"{self._key}/decided", decision.to_text())
        except (TimeoutError, RuntimeError) as error:
            raise self._lost(error) from None
        return self._follow(text)

    def _lost(self, error: Exception) -> PeerError:
        return PeerError(
            f"rank {self._rank}: cannot have it decided whether colayers change, as the "
            f"rendezvous store is not to be reached: {error}; start the job again from a checkpoint"
        )

    def _read(self) -> bool:
        key = f"{self._key}/decided"
        if not self._store.has(key):
            return False
        self._follow(self._store.get(key, _STORE_S))
        return True

    def _follow(self, text: str) -> Decision:
        decision = self.decision = self._parsed(text)
        self._attempt += 1
        self._view = None
        self.due = decision.rounds + self._again if decision.again else None
        return decision

    def _parsed(self, text: str) -> Decision:
        """Return the decision that a text says.

        Raises:
            PeerError: it says none.
        """
        try:
            rounds, view, buckets, why, again = json.loads(text)
            if buckets is not None:
                buckets = tuple(map(tuple, buckets))
                found = sorted(tensor for bucket in buckets for tensor in bucket)
                if found != list(range(self._tensors)) or not all(buckets):
                    raise ValueError(text)
            numbers = [rounds, *view]
            if any(type(n) is not int for n in numbers) or type(again) is not bool:
                raise ValueError(text)
        except (ValueError, TypeError, RecursionError):
            raise PeerError(
                f"rank {self._rank}: {text!r:.60} is no decision about {self._tensors} tensors; "
                "all workers have to run the same model and wingbeat"
            ) from None
        return Decision(rounds, View(tuple(view)), buckets, str(why)[:60], again)
