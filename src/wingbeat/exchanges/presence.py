"""Who is missed, and who says that a worker is gone: the roll where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from wingbeat.errors import PeerError
from wingbeat.exchanges.attendance import Attendance
from wingbeat.exchanges.departures import Departures
from wingbeat.exchanges.lanes.lanes import Lanes
from wingbeat.stale.view import View
from wingbeat.stale.worker import Worker
from wingbeat.transport.messages.frames import NEVER
from wingbeat.transport.messages.mailbox import RECONNECT_S
from wingbeat.transport.messages.peers import PeerInfo

STORE_S = 10.0
"""Seconds that the store may take to say who is gone."""

_ENDED = "has ended without a word"

_LOOK_S = 0.25
"""Seconds between two looks at whose connections have ended."""


class Gone(NamedTuple):
    """A worker's life is over, for ever; ``missed`` if it was needed."""

    worker: int
    life: int
    missed: bool


class Back(NamedTuple):
    """A worker has come again."""

    worker: int
    life: int
    card: PeerInfo


class Heard(Protocol):
    """What a mailbox knows of those that are gone."""

    @property
    def lost(self) -> Mapping[int, str]: ...  # noqa: D102

    @property
    def left(self) -> frozenset[int]: ...  # noqa: D102

    def unconnected(self) -> Mapping[int, float]: ...  # noqa: D102


class Presence:
    """One worker's view of who is there.

    Args:
        mailbox: knows who has left, and whose connections have ended.
        lanes: know who is silent.
        machine: knows who takes part.
        attendance: decides; None if each worker does by itself.
        survives: whether training goes on without workers that are gone.
        me: what messages call this worker.
        name: what messages call the worker of a rank.
        departures: logs each worker that is gone or back.
        clock: seconds.
    """

    def __init__(
        self,
        mailbox: Heard,
        lanes: Lanes,
        machine: Worker,
        attendance: Attendance | None,
        *,
        survives: bool,
        me: str,
        name: Callable[[int], str],
        departures: Departures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox, self._lanes, self._machine = mailbox, lanes, machine
        self._attendance, self._survives = attendance, survives
        self._me, self._name, self._departures, self._clock = me, name, departures, clock
        self._workers = len(lanes.known) + 1
        self._since: dict[int, float] = {}
        self._excused: dict[int, int] = {}  # lives that ended when all had settled
        self._looked = float("-inf")
        self._unconnected: dict[int, float] = {}  # since when, if reached until then; else NEVER
        self.gone: set[int] = set()
        if attendance is not None:
            view = attendance.roll.view
            self.gone |= {worker for worker, number in enumerate(view) if number % 2}
            self._workers = len(view)

    def missing(self) -> dict[int, str]:
        """Return who is missed, and why."""
        if not self._machine.settled:  # training goes on, and needs them after all
            self.gone.difference_update(self._excused)
        found = dict.fromkeys(self._excused, "has left")
        found |= dict.fromkeys(self._mailbox.left, "has left")
        found |= self._mailbox.lost
        found |= self._lanes.silent()
        found |= dict.fromkeys(self._ended(), _ENDED)
        return {worker: how for worker, how in found.items() if worker not in self.gone}

    def look(self, missing: Mapping[int, str]) -> Iterator[Gone | Back]:
        """Yield who is gone or back since the last look.

        Args:
            missing: who was missed before what has come since was read: so last words count.

        Raises:
            PeerError: this worker cannot go on; says why.
        """
        if self._attendance is None:
            for worker, how in missing.items():
                yield self._end(worker, self._machine.life_of(worker), how)
            return
        for change, card in self._attendance.news():
            if change.worker == self._machine.rank:
                self._check_own(change.begun, change.life, change.by)
            elif not change.begun:
                by = f"was missed by {self._name(change.by)}"
                if change.by == change.worker:
                    by = "has ended, and is started again"
                how = missing.get(change.worker, by)
                yield self._end(change.worker, change.life, how)
            elif card is not None:
                self.gone.discard(change.worker)
                self._excused.pop(change.worker, None)
                self._departures.back(change.worker)
                yield Back(change.worker, change.life, card)
        yield from self._miss({w: how for w, how in missing.items() if w not in self.gone})

    def _ended(self) -> list[int]:
        """Return whose processes have ended, as their connections and their silence say.

        A network that is cut ends connections as well, but later: long after a worker was last
        reached over one. Who is heard by way of others lives.
        """
        now = self._clock()
        if now >= self._looked + _LOOK_S:
            self._looked, before, reached = now, self._unconnected, self._lanes.reached
            self._unconnected = {
                worker: before.get(worker, now - seconds if worker in reached else NEVER)
                for worker, seconds in self._mailbox.unconnected().items()
            }
        return self._unconnected_since(now - RECONNECT_S)

    def _unconnected_since(self, when: float) -> list[int]:
        """Return whose connections had ended ``when``, and who has not been heard since then."""
        return [
            worker
            for worker, since in self._unconnected.items()
            if since < when and not self._lanes.heard_since(worker, when)
        ]

    def _check_own(self, begun: bool, life: int, by: int) -> None:
        own = self._machine.life
        if (begun and life > own) or (not begun and life == own):
            how = f"{self._name(by)} had no sign of it, and the others go on; start it anew"
            if begun:
                how = "was started a second time, and that process goes on"
            raise PeerError(f"{self._me}: {how}")

    def _miss(self, missing: Mapping[int, str]) -> Iterator[Gone]:
        """Have it decided that workers are gone, when everyone else has been heard since."""
        assert self._attendance is not None
        now = self._clock()
        self._since = {worker: self._since.get(worker, now) for worker in missing}
        if self._machine.settled:
            for worker in missing:
                yield self._excuse(worker)
            return
        needed = [worker for worker in missing if self._machine.life_of(worker) is not None]
        if needed:
            self._fail_unless_survived(missing, min(needed))
        begun = min((self._since[worker] for worker in needed), default=now)
        others = set(self._lanes.known) - set(missing)
        # Who misses more than are left is more likely cut off itself: the others are to be first.
        smaller = 2 * len(needed) > len(needed) + len(others) + 1
        ripe = now >= begun + (self._lanes.patience if smaller else 0.0)
        if needed and ripe and all(self._lanes.heard_since(each, begun) for each in others):
            over = {worker: 2 * self._life(worker) + 1 for worker in needed}
            view = (over.get(worker, 0) for worker in range(self._workers))
            self._attendance.miss(View(tuple(view)))
        if why := self._attendance.overdue(STORE_S):
            raise PeerError(
                f"{self._me}: misses {', '.join(map(self._name, sorted(needed)))}, and cannot have "
                f"it decided who goes on, as the rendezvous store is not to be reached: {why}; "
                "start it anew when it is"
            )

    def _end(self, worker: int, life: int | None, how: str) -> Gone:
        if self._machine.settled:
            return self._excuse(worker)
        missed = life is not None
        self._excused.pop(worker, None)
        if missed:
            self._fail_unless_survived({worker: how}, worker)
            self._departures.lost(worker, how)
        self.gone.add(worker)
        return Gone(worker, self._life(worker) if life is None else life, missed)

    def _excuse(self, worker: int) -> Gone:
        """Let a worker go that nobody needs, unless training goes on."""
        life = self._excused.setdefault(worker, self._life(worker))
        self.gone.add(worker)
        return Gone(worker, life, missed=False)

    def _life(self, worker: int) -> int:
        return self._excused.get(worker, self._lanes.life(worker))

    def _fail_unless_survived(self, missing: Mapping[int, str], worker: int) -> None:
        if not self._survives:
            # Who has left may have been the first to miss one who is about to be missed here.
            ended = self._unconnected_since(self._clock() - RECONNECT_S / 2)
            worker, how = (min(ended), _ENDED) if ended else (worker, missing[worker])
            blamed = self._departures.blame() or f"{self._name(worker)} {how}"
            raise PeerError(
                f"{self._me}: before all had settled, {blamed}; "
                "start the job again from a checkpoint"
            )
