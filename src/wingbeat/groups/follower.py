"""Groups that nobody has to be asked for: the static schedule's, or everyone's."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection

from wingbeat.errors import PeerError
from wingbeat.groups.averages import GIVEN_UP, STATIC, STATIC_MEETINGS, Averages, Coming
from wingbeat.groups.board import Board, Sign
from wingbeat.groups.generator import Run
from wingbeat.groups.layout import Layout
from wingbeat.groups.static import PHASES, group_of
from wingbeat.observe.events import stream
from wingbeat.transport.liveness import LONGEST, Wait, stuck_text

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Seconds between two looks at how far the others are, while they are waited for."""

_PAUSE_S = 0.05
"""Seconds between two looks while all are waited for."""

CALL = "the call of wingbeat.synchronize()"

_SAY_S = 1.0
"""Seconds between two words on how far this worker is."""


def alone_text(worker: int, others: str) -> str:
    """Return the error of a mean over all workers that was of one alone.

    Args:
        worker: its rank.
        others: who took no part, and why.
    """
    return (
        f"rank {worker}: no other worker takes part in the mean of all models: {others}; this "
        "rank's weights are its own alone: start the job again from a checkpoint, or save them "
        "with model.state_dict() if the others' are not needed"
    )


_NO_STORE = "the rendezvous store has ended (with rank 0, or the launcher), by which they are found"


class Follower:
    """Averages with the groups of a schedule that all know; for one thread.

    Who is lost is left out from then on. All learn of that from a board, where they also see who
    waits for a group of all and makes no step any more, and who is past a step that others could
    not end: each such group goes on without them.

    Args:
        worker: its rank.
        layout: which worker is on which host.
        timeout: seconds without a sign after which a worker is lost.
        board: what workers tell each other.
        everyone: whether all are one group in each step, in place of the static schedule.
        absent: workers that take no part to begin with.
        lives: whether the process of a worker that gives no sign runs, as far as is known.

    Attributes:
        fallen: None: there is no generator that could have died.
        absent: the workers that take no part, as far as this one has heard.
        silent: those among them that gave no sign while all waited to be levelled.
        lost: called with each worker that takes no part any more.
        steps: how many it has made.
    """

    def __init__(
        self,
        worker: int,
        layout: Layout,
        timeout: float,
        board: Board,
        *,
        everyone: bool = False,
        absent: Collection[int] = (),
        lives: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._worker, self._layout, self._timeout = worker, layout, timeout
        self._board, self._everyone, self._lives = board, everyone, lives
        self._sign, self._said = Sign(), Sign()
        self._said_at = self._looked_at = time.monotonic()
        self._signs: dict[int, Sign] = {}
        self._met: dict[tuple[int, ...], int] = {}  # of kept connections, the meeting
        self.fallen: str | None = None
        self.absent = set(absent)
        self.silent: set[int] = set()
        self.lost: Callable[[int], None] = lambda _: None

    @property
    def steps(self) -> int:
        """How many it has made."""
        return self._sign.steps

    def step(self, averages: Averages) -> None:
        """Average with this step's group."""
        step = self.steps
        group: Collection[int] = range(self._layout.workers)
        kept = True
        if not self._everyone:
            group = group_of(self._layout, self._worker, step)
            # Of an odd number of hosts each cycle has other pairs: too many to keep.
            kept = step % PHASES != 2 or len(self._layout.hosts) % 2 == 0
        self._meet(group, averages, 2 * step + 2, kept=kept)
        self._sign = self._sign._replace(steps=step + 1)
        if time.monotonic() - self._said_at >= _SAY_S:
            self._say()

    def level(self, averages: Averages) -> None:
        """Average with all that take part, when all of them have called this.

        Raises:
            PeerError: no other worker takes part any more, and not all have left in good order
                after a mean with this one; a worker lives and does not call this; or the store has
                ended.
        """
        self._sign = self._sign._replace(levelling=True)
        self._wait_for_all()
        # All have said how far they are before anybody is through.
        known = [sign.steps for worker, sign in self._signs.items() if worker not in self.absent]
        last = max(self.steps, *known, 0)
        self._meet(range(self._layout.workers), averages, 2 * last + 1, kept=False)
        averages.close()
        self._met.clear()
        self._sign = Sign(self._sign.levels + 1, False, last + 1, self._sign.broken)
        self._say()
        if self._is_alone():
            others = set(range(self._layout.workers)) - {self._worker}
            sign = f"gave no sign for {self._timeout:g} s"
            names = "; ".join(
                f"rank {each} {sign if each in self.silent else 'was lost or has left'}"
                for each in sorted(others)
            )
            if self._worker in self.absent:
                names = f"the others have gone on without rank {self._worker}"
            raise PeerError(alone_text(self._worker, names))

    def _is_alone(self) -> bool:
        """Whether the mean that was just made is of this worker alone, and is not everyone's."""
        if self._worker in self.absent:
            return True
        others = set(range(self._layout.workers)) - {self._worker}
        if not others or not others <= self.absent:
            return False
        if not all(map(self._board.left, others)):
            return True
        # Who has left after a mean of all that this worker was not in has a model of its own.
        return any(self._signs.get(w, Sign()).levels >= self._sign.levels for w in others)

    def leave(self, *, failed: bool = False) -> None:
        """Let nobody wait for this worker any more.

        Args:
            failed: whether an exception ends it.
        """
        self._sign = self._sign._replace(levelling=True)  # it makes no step
        self._say()
        self._board.lose(self._worker, left=not failed)

    def _meet(self, group: Collection[int], averages: Averages, number: int, *, kept: bool) -> None:
        """Average with those of a group who come.

        Args:
            group: all its members.
            averages: does it.
            number: of the group: 2 more with each step.
            kept: whether connections are, for the same members' next group.
        """
        while True:
            members = tuple(sorted(set(group) - self._away() | {self._worker}))
            if len(members) == 1 or self._worker in self.absent:
                return
            first = self._met.setdefault(members, number)
            run = Run(number, 0, members, STATIC)
            come = functools.partial(self._come, members)
            lost = averages.average(run, STATIC_MEETINGS + first, come)
            if lost is None and kept:
                return
            del self._met[members]
            averages.close([STATIC_MEETINGS + first])
            if lost is None or not self._again(members, lost, first, number):
                return

    def _again(self, members: tuple[int, ...], lost: int, first: int, number: int) -> bool:
        """Find out why a group failed; whether it is worth another try."""
        self._sign = self._sign._replace(broken=number)
        self._say()
        self._look()
        if self._worker in self.absent:
            _log.warning(
                "rank %d: the others go on without this worker, which they could not reach; "
                "it trains alone: start the job again from a checkpoint to have it take part",
                self._worker,
            )
            return False
        if self._away() & set(members):
            return True
        others = (self._signs.get(w, Sign()) for w in members if w != self._worker)
        if first < number and any(sign.broken >= first for sign in others):
            return True  # Somebody had a reason to close what was kept, and opens it anew.
        if lost in (GIVEN_UP, self._worker):
            return False
        self._lose(lost, "was lost in an average")
        return True

    def _lose(self, worker: int, why: str) -> None:
        _log.warning("rank %d: rank %d %s; groups go on without it", self._worker, worker, why)
        self._miss({worker})
        self._board.lose(worker)

    def _miss(self, workers: Collection[int]) -> None:
        for worker in sorted(set(workers) - self.absent):
            self.absent.add(worker)
            self.lost(worker)
            stream.happened("left", (worker,))

    def _away(self) -> set[int]:
        """Return who does not come to the group that this worker is about to be in, or is in."""
        mine = self._sign
        at = (mine.levels, mine.levelling, mine.steps)
        if mine.levelling:  # each has its own number of steps then
            past = {w for w, sign in self._signs.items() if sign.levels > mine.levels}
        else:
            past = {w for w, sign in self._signs.items() if sign[:3] > at}
        return (self.absent | past) - {self._worker}

    def _come(self, members: Collection[int]) -> Coming:
        """Whether all members may still come, as far as is known."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            if self._said != self._sign:
                self._say()
            self._look()
        if self._worker in self.absent:
            return Coming.NEVER
        away = self._away() & set(members)
        if not away:
            return Coming.MAYBE
        return Coming.NEVER if any(map(self._stops_before, away)) else Coming.PAST

    def _stops_before(self, worker: int) -> bool:
        """Whether ``worker`` waits for all to level, and has made no more steps than this one."""
        mine, sign = self._sign, self._signs.get(worker)
        if sign is None or mine.levelling or not sign.levelling:
            return False
        return sign.levels == mine.levels and sign.steps <= mine.steps

    def _look(self) -> None:
        self._signs = self._board.signs()
        self._miss(self._board.lost())

    def _say(self) -> None:
        self._said, self._said_at = self._sign, time.monotonic()
        self._board.say(self._worker, self._sign)

    def _wait_for_all(self) -> None:
        """Wait until all that take part level too, or have given no sign for long.

        Raises:
            PeerError: one lives, and does not level; or the store has ended.
        """
        self._say()
        wait = Wait(f"rank {self._worker}", CALL, time.monotonic)
        since: dict[int, tuple[Sign | None, float]] = {}
        while True:
            self._look()
            if self._worker in self.absent:
                return
            if self._worker not in self._signs:
                raise PeerError(alone_text(self._worker, _NO_STORE))
            waited = self._not_levelling(since)
            if not waited:
                return
            peers = ", ".join(f"rank {worker}" for worker in waited)
            wait.look(peers)
            if wait.seconds() > LONGEST * self._timeout:
                raise PeerError(stuck_text(f"rank {self._worker}", peers, CALL, self._timeout))
            time.sleep(_PAUSE_S)

    def _not_levelling(self, since: dict[int, tuple[Sign | None, float]]) -> list[int]:
        """Return who takes part and does not level yet; leave out who is silent and gone.

        Args:
            since: of each worker its last sign, and when that was seen first.
        """
        now, waited = time.monotonic(), []
        for worker in sorted(set(range(self._layout.workers)) - self.absent - {self._worker}):
            sign = self._signs.get(worker)
            if sign is not None and sign[:2] >= self._sign[:2]:
                continue
            waited.append(worker)
            if worker not in since or since[worker][0] != sign:
                since[worker] = sign, now
            elif now - since[worker][1] > self._timeout:
                if self._lives(worker):
                    since[worker] = sign, now
                    continue
                self.silent.add(worker)
                self._lose(worker, f"has given no sign for {self._timeout:g} s")
        return waited
