"""Many workers under bounded staleness: one owner of pieces represents all of them.

Owners act at about the same times: each receives a piece of every colayer from every worker and
sums them by the same rule. Here the pieces of a colayer arrive at all owners at once, when the last
one has, and all owners close a round at once. This reduces ``2 k n**2`` messages a round to ``2 k
n`` steps. The staleness bound is the real one; messages are those of
`wingbeat.methods.bounded_staleness.worker`, without workers that join or leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wingbeat.methods.bounded_staleness.bound import StalenessBound, StragglerDetector
from wingbeat.methods.bounded_staleness.messages import Contribution, PieceSum, View
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.colayers import Coding, Letter, Letters
from wingbeat.simulator.model import ITEMSIZE
from wingbeat.simulator.traffic import Traffic

_NO_VIEW = View(())


class Member:
    """One worker's machine: the methods of the real `Worker` that training calls."""

    def __init__(self, crowd: Crowd, rank: int, bound: StalenessBound) -> None:
        self._crowd, self._rank, self._bound = crowd, rank, bound
        self.iteration = self.zeta = 0
        self.applied = self.complete = 0
        self.dropped: list[tuple[int, int]] = []
        self._sent = 0
        self._computing = self._out = False
        self._told: tuple[int, ...] = ()
        self._stragglers = StragglerDetector()
        self.heard: Callable[[], None] = lambda: None

    def can_begin(self) -> bool:
        """Whether the requested iteration may be computed."""
        if self.applied < self._bound.rounds_required(
            self.iteration, stragglers=self._stragglers.found
        ):
            return False
        s = self._bound.s
        return s is None or self._crowd.reach(self._rank, self.iteration - s)

    def begin_iteration(self) -> int:
        """Enter the requested iteration and return it."""
        self._out, self._computing, self._sent = False, True, 0
        self.zeta = max(self.zeta, self.iteration)
        self.go_on()
        return self.iteration

    def send_colayer(self, colayer: int, payloads: Sequence[Any]) -> bool:  # noqa: ARG002
        """Send the pieces of a colayer; return whether they were sent."""
        if not self._computing:
            return False
        self._sent += 1
        self._crowd.send_pieces(self._rank, self.iteration, colayer)
        self.go_on()
        return True

    def end_iteration(self) -> None:
        """End the iteration."""
        if self._computing:
            self.iteration, self._computing, self._sent = self.iteration + 1, False, 0
        self.go_on()

    def take_round(self) -> tuple[PieceSum, ...] | None:
        """Return the next round to apply."""
        if self.applied == self.complete:
            return None
        parts = self._crowd.rounds[self.applied]
        self._stragglers.observe_round(
            (part.entries for part in parts), self.applied, self._crowd.ranks
        )
        self.applied += 1
        self.go_on()
        return parts

    def hear(self, zeta: int) -> None:
        """Receive the iteration of the fastest worker."""
        if zeta > self.zeta:
            self.zeta = zeta
            self.go_on()

    def completed(self) -> None:
        """Count one more complete round."""
        self.complete += 1
        self.go_on()
        self.heard()

    def go_on(self) -> None:
        """Drop outdated iterations and announce changes."""
        if not self._out:
            self._out = self._bound.is_outdated(self.zeta - self.iteration, self._sent)
            if self._out and self._computing:
                self.dropped.append((self.iteration, self._sent))
                self._computing, self._sent = False, 0
        if self._out:
            self.iteration = self.zeta
        reached = self._bound.last_computed(self.iteration, self.zeta)
        said = reached if reached > self.iteration + 1 else self.iteration - 1
        told = self.iteration, self.zeta if self._out else said, self.zeta, self.applied
        if told != self._told:
            self._told = told
            self._crowd.say(self._rank, *told[:3])


class Crowd:
    """All workers, their communication threads and interfaces, as times until which each is busy.

    ``hops`` is the mean number of interfaces that a message leaves. ``rounds`` holds the rounds
    that at least one worker has completed, with one part for all pieces of a colayer.
    """

    def __init__(
        self,
        bound: StalenessBound,
        workers: int,
        links: Links,
        hops: float,
        letters: Letters,
        coding: Coding,
        work: Work,
        agenda: Agenda,
        traffic: Traffic | None,
    ) -> None:
        self._n, self._k, self._agenda, self._traffic = workers, bound.colayers, agenda, traffic
        self._letters, self._work = letters, work
        self._latency_s, self._hops = hops * links.latency_s, hops
        self._seconds_per_byte = hops / (links.bytes_per_s * links.count)
        byte_s = work.add_s_per_byte + coding.decode_s_per_byte
        self._add_s = [numel * ITEMSIZE * byte_s for numel in letters.numel]
        self._encode_s = [numel * ITEMSIZE * coding.encode_s_per_byte for numel in letters.numel]
        self._thread, self._card = np.zeros(workers), np.zeros(workers)  # busy until, in seconds
        self._at = np.zeros(workers, np.int64)
        self._said = np.full((self._k, workers), -1, np.int64)
        self._waiting: list[list[Contribution]] = [[] for _ in range(self._k)]
        self._next = [0] * self._k
        self._zeta = 0
        self._here_at: dict[int, tuple[list[PieceSum], Any]] = {}
        self.rounds: list[tuple[PieceSum, ...]] = []
        self.ranks = range(workers)
        crew = [Member(self, rank, bound) for rank in range(workers)]
        self._crew = crew
        self.members = [
            (member, _nothing, lambda heard, member=member: setattr(member, "heard", heard))
            for member in crew
        ]
        for member in crew:
            member.go_on()

    def reach(self, rank: int, iteration: int) -> bool:
        """Whether no other worker is known to be before ``iteration``."""
        before = int((self._at < iteration).sum())
        return before == 0 or (before == 1 and bool(self._at[rank] < iteration))

    # -- what one worker sends to all -----------------------------------------------------

    def say(self, rank: int, at: int, said: int, zeta: int) -> None:
        """Announce a worker's iteration, and the round up to which it has sent everything."""
        self._broadcast(rank, self._letters.here, lambda: self._hear(rank, at, said, zeta))

    def send_pieces(self, rank: int, iteration: int, colayer: int) -> None:
        """Send each owner its piece."""

        def arrived() -> None:
            self._said[colayer, rank] = max(self._said[colayer, rank], iteration)
            self._waiting[colayer].append((iteration, rank))
            self._close(colayer)

        self._broadcast(rank, self._letters.pieces[colayer], arrived)

    def _broadcast(self, rank: int, letter: Letter, effect: Callable[[], None]) -> None:
        """Occupy a worker's thread and interface and all receiving threads; then run ``effect``."""
        handled_s, now, others = letter.handled_s(self._work), self._agenda.now, self._n - 1
        first = max(self._thread[rank], now) + handled_s
        self._thread[rank] = first + (others - 1) * handled_s
        begins = max(self._card[rank], first)
        ends = max(begins + self._carried_s(letter), self._thread[rank])
        self._card[rank] = ends
        self._note(rank, begins, ends, letter)

        def arrive() -> None:
            own = float(self._thread[rank])
            np.maximum(self._thread, self._agenda.now, out=self._thread)
            self._thread += handled_s
            self._thread[rank] = 0.0
            taken = float(self._thread.max())
            self._thread[rank] = own
            self._agenda.at(taken, effect)

        self._agenda.at(float(ends) + self._latency_s, arrive)

    def _carried_s(self, letter: Letter) -> float:
        return (self._n - 1) * letter.nbytes * self._seconds_per_byte

    def _note(self, rank: int, begins: float, ends: float, letter: Letter) -> None:
        if self._traffic is not None and rank == 0:
            nbytes = round((self._n - 1) * letter.nbytes * self._hops)
            self._traffic.carried(0, float(begins), float(ends), nbytes)

    # -- what all take in -----------------------------------------------------------------

    def _hear(self, rank: int, at: int, said: int, zeta: int) -> None:
        moved = at > self._at[rank]
        self._at[rank] = max(at, self._at[rank])
        np.maximum(self._said[:, rank], said, out=self._said[:, rank])
        if max(zeta, at) > self._zeta:  # a requested iteration counts as entered
            self._zeta = max(zeta, at)
            for member in self._crew:
                member.hear(self._zeta)
        for colayer, limit in enumerate(self._said.min(axis=1).tolist()):
            if self._next[colayer] <= limit:
                self._close(colayer)
        if moved:
            for member in self._crew:
                member.heard()

    def _close(self, colayer: int) -> None:
        """Sum a colayer's rounds that all workers have answered (`OwnedPiece.close_rounds`)."""
        limit = int(self._said[colayer].min())
        while self._next[colayer] <= limit:
            number = self._next[colayer]
            self._next[colayer] += 1
            waiting = self._waiting[colayer]
            due = tuple(sorted(entry for entry in waiting if entry[0] <= number))
            self._waiting[colayer] = [entry for entry in waiting if entry[0] > number]
            part = PieceSum(colayer, 0, number, due, (), _NO_VIEW)
            self._spread(part)

    def _spread(self, part: PieceSum) -> None:
        """Let each owner sum its piece and send it to all others."""
        letter = self._letters.round(part.colayer, len(part.entries))
        handled_s, others = letter.handled_s(self._work), self._n - 1
        np.maximum(self._thread, self._agenda.now, out=self._thread)
        if part.entries:
            self._thread += len(part.entries) * self._add_s[part.colayer]
            self._thread += self._encode_s[part.colayer]
        begins = np.maximum(self._card, self._thread + handled_s)
        self._thread += others * handled_s
        self._card = np.maximum(begins + self._carried_s(letter), self._thread)
        self._note(0, begins[0], self._card[0], letter)
        last = float(self._card.max()) + self._latency_s
        typical = float(np.median(begins)) + self._latency_s

        def arrive() -> None:
            np.maximum(self._thread, self._agenda.now, out=self._thread)
            self._thread += others * handled_s
            self._complete(part, np.maximum(self._thread, last + handled_s))

        self._agenda.at(max(typical, self._agenda.now), arrive)

    def _complete(self, part: PieceSum, moments: Any) -> None:
        """Notify each worker when it has all colayers of a round."""
        parts, latest = self._here_at.setdefault(part.number, ([], np.zeros(self._n)))
        parts.append(part)
        np.maximum(latest, moments, out=latest)
        while len(self._here_at.get(len(self.rounds), ((),))[0]) == self._k:
            parts, latest = self._here_at.pop(len(self.rounds))
            self.rounds.append(tuple(sorted(parts, key=lambda each: each.colayer)))
            for member, moment in zip(self._crew, latest.tolist(), strict=True):
                self._agenda.at(max(moment, self._agenda.now), member.completed)


def _nothing() -> None:
    """Do nothing: members send immediately."""
