"""Many workers under bounded staleness in virtual time: one owner of pieces represents all of them.

Owners act at about the same times: each receives a piece of every colayer from every worker and
sums them by the same rule. Here the pieces of a colayer arrive at all owners at once, when the last
one has, and all owners close a round at once. This reduces ``2 k n**2`` messages a round to ``2 k
n`` steps. The staleness bound is the real one; messages are those of
`wingbeat.methods.bounded_staleness.worker`, without workers that join or leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wingbeat.methods.bounded_staleness.bound import StalenessBound, StragglerDetector
from wingbeat.methods.bounded_staleness.messages import Contribution, PieceSum
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Coding, Links, Traffic, Work
from wingbeat.simulator.model import ITEMSIZE
from wingbeat.transport.membership import View

if TYPE_CHECKING:
    from wingbeat.methods.bounded_staleness.simulated import FrameSize, FrameSizes

_NO_VIEW = View(())


class PoolMember:
    """One worker's machine: the methods of the real `Worker` that training calls."""

    def __init__(self, pool: WorkerPool, rank: int, bound: StalenessBound) -> None:
        self._pool, self._rank, self._bound = pool, rank, bound
        self.iteration = self.zeta = 0
        self.applied = self.complete = 0
        self._sent = 0
        self._computing = self._out = False
        self._announced: tuple[int, ...] = ()
        self._stragglers = StragglerDetector()
        self.received: Callable[[], None] = lambda: None

    def can_begin(self) -> bool:
        """Whether the requested iteration may be computed."""
        if self.applied < self._bound.rounds_required(
            self.iteration, stragglers=self._stragglers.found
        ):
            return False
        s = self._bound.s
        return s is None or self._pool.all_reached(self._rank, self.iteration - s)

    def begin_iteration(self) -> int:
        """Enter the requested iteration and return it."""
        self._out, self._computing, self._sent = False, True, 0
        self.zeta = max(self.zeta, self.iteration)
        self.advance()
        return self.iteration

    def send_colayer(self, colayer: int, payloads: Sequence[Any]) -> bool:  # noqa: ARG002
        """Send the pieces of a colayer; return whether they were sent."""
        if not self._computing:
            return False
        self._sent += 1
        self._pool.send_pieces(self._rank, self.iteration, colayer)
        self.advance()
        return True

    def end_iteration(self) -> None:
        """End the iteration."""
        if self._computing:
            self.iteration, self._computing, self._sent = self.iteration + 1, False, 0
        self.advance()

    def take_round(self) -> tuple[PieceSum, ...] | None:
        """Return the next round to apply."""
        if self.applied == self.complete:
            return None
        parts = self._pool.rounds[self.applied]
        self._stragglers.observe_round(
            (part.entries for part in parts), self.applied, self._pool.ranks
        )
        self.applied += 1
        self.advance()
        return parts

    def update_zeta(self, zeta: int) -> None:
        """Receive the iteration of the fastest worker."""
        if zeta > self.zeta:
            self.zeta = zeta
            self.advance()

    def completed(self) -> None:
        """Count one more complete round."""
        self.complete += 1
        self.advance()
        self.received()

    def advance(self) -> None:
        """Drop outdated iterations and announce changes."""
        if not self._out:
            self._out = self._bound.is_outdated(self.zeta - self.iteration, self._sent)
            if self._out and self._computing:
                self._computing, self._sent = False, 0
        if self._out:
            self.iteration = self.zeta
        reached = self._bound.last_computed(self.iteration, self.zeta)
        sent_through = reached if reached > self.iteration + 1 else self.iteration - 1
        progress = self.iteration, self.zeta if self._out else sent_through, self.zeta, self.applied
        if progress != self._announced:
            self._announced = progress
            self._pool.announce(self._rank, *progress[:3])


class WorkerPool:
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
        sizes: FrameSizes,
        coding: Coding,
        work: Work,
        agenda: Agenda,
        traffic: Traffic | None,
    ) -> None:
        self._n, self._k, self._agenda, self._traffic = workers, bound.colayers, agenda, traffic
        self._sizes, self._work = sizes, work
        self._latency_s, self._hops = hops * links.latency_s, hops
        self._seconds_per_byte = hops / (links.bytes_per_s * links.count)
        byte_s = work.add_s_per_byte + coding.decode_s_per_byte
        self._add_s = [numel * ITEMSIZE * byte_s for numel in sizes.numel]
        self._encode_s = [numel * ITEMSIZE * coding.encode_s_per_byte for numel in sizes.numel]
        # Seconds until which threads and interfaces are busy.
        self._thread, self._interface = np.zeros(workers), np.zeros(workers)
        self._at = np.zeros(workers, np.int64)
        self._sent_through = np.full((self._k, workers), -1, np.int64)
        self._waiting: list[list[Contribution]] = [[] for _ in range(self._k)]
        self._next = [0] * self._k
        self._zeta = 0
        self._arriving: dict[int, tuple[list[PieceSum], Any]] = {}
        self.rounds: list[tuple[PieceSum, ...]] = []
        self.ranks = range(workers)
        self.members = [PoolMember(self, rank, bound) for rank in range(workers)]
        for member in self.members:
            member.advance()

    def all_reached(self, rank: int, iteration: int) -> bool:
        """Whether no other worker is known to be before ``iteration``."""
        before = int((self._at < iteration).sum())
        return before == 0 or (before == 1 and bool(self._at[rank] < iteration))

    # -- what one worker sends to all -----------------------------------------------------

    def announce(self, rank: int, at: int, sent_through: int, zeta: int) -> None:
        """Announce a worker's iteration, and the round up to which it has sent everything."""
        self._broadcast(
            rank, self._sizes.progress, lambda: self._receive_progress(rank, at, sent_through, zeta)
        )

    def send_pieces(self, rank: int, iteration: int, colayer: int) -> None:
        """Send each owner its piece."""

        def arrived() -> None:
            self._sent_through[colayer, rank] = max(self._sent_through[colayer, rank], iteration)
            self._waiting[colayer].append((iteration, rank))
            self._close(colayer)

        self._broadcast(rank, self._sizes.pieces[colayer], arrived)

    def _broadcast(self, rank: int, size: FrameSize, effect: Callable[[], None]) -> None:
        """Occupy a worker's thread and interface and all receiving threads; then run ``effect``."""
        handled_s, now, others = size.handled_s(self._work), self._agenda.now, self._n - 1
        first = max(self._thread[rank], now) + handled_s
        self._thread[rank] = first + (others - 1) * handled_s
        begins = max(self._interface[rank], first)
        ends = max(begins + self._carried_s(size), self._thread[rank])
        self._interface[rank] = ends
        self._note(rank, begins, ends, size)

        def arrive() -> None:
            own = float(self._thread[rank])
            np.maximum(self._thread, self._agenda.now, out=self._thread)
            self._thread += handled_s
            self._thread[rank] = 0.0
            taken = float(self._thread.max())
            self._thread[rank] = own
            self._agenda.at(taken, effect)

        self._agenda.at(float(ends) + self._latency_s, arrive)

    def _carried_s(self, size: FrameSize) -> float:
        return (self._n - 1) * size.nbytes * self._seconds_per_byte

    def _note(self, rank: int, begins: float, ends: float, size: FrameSize) -> None:
        if self._traffic is not None and rank == 0:
            nbytes = round((self._n - 1) * size.nbytes * self._hops)
            self._traffic.carried(0, float(begins), float(ends), nbytes)

    # -- what all take in -----------------------------------------------------------------

    def _receive_progress(self, rank: int, at: int, sent_through: int, zeta: int) -> None:
        moved = at > self._at[rank]
        self._at[rank] = max(at, self._at[rank])
        np.maximum(self._sent_through[:, rank], sent_through, out=self._sent_through[:, rank])
        if max(zeta, at) > self._zeta:  # a requested iteration counts as entered
            self._zeta = max(zeta, at)
            for member in self.members:
                member.update_zeta(self._zeta)
        for colayer, limit in enumerate(self._sent_through.min(axis=1).tolist()):
            if self._next[colayer] <= limit:
                self._close(colayer)
        if moved:
            for member in self.members:
                member.received()

    def _close(self, colayer: int) -> None:
        """Sum a colayer's rounds that all workers have answered (`OwnedPiece.close_rounds`)."""
        limit = int(self._sent_through[colayer].min())
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
        size = self._sizes.round(part.colayer, len(part.entries))
        handled_s, others = size.handled_s(self._work), self._n - 1
        np.maximum(self._thread, self._agenda.now, out=self._thread)
        if part.entries:
            self._thread += len(part.entries) * self._add_s[part.colayer]
            self._thread += self._encode_s[part.colayer]
        begins = np.maximum(self._interface, self._thread + handled_s)
        self._thread += others * handled_s
        self._interface = np.maximum(begins + self._carried_s(size), self._thread)
        self._note(0, begins[0], self._interface[0], size)
        last = float(self._interface.max()) + self._latency_s
        typical = float(np.median(begins)) + self._latency_s

        def arrive() -> None:
            np.maximum(self._thread, self._agenda.now, out=self._thread)
            self._thread += others * handled_s
            self._complete(part, np.maximum(self._thread, last + handled_s))

        self._agenda.at(max(typical, self._agenda.now), arrive)

    def _complete(self, part: PieceSum, moments: Any) -> None:
        """Notify each worker when it has all colayers of a round."""
        parts, latest = self._arriving.setdefault(part.number, ([], np.zeros(self._n)))
        parts.append(part)
        np.maximum(latest, moments, out=latest)
        while len(self._arriving.get(len(self.rounds), ((),))[0]) == self._k:
            parts, latest = self._arriving.pop(len(self.rounds))
            self.rounds.append(tuple(sorted(parts, key=lambda each: each.colayer)))
            for member, moment in zip(self.members, latest.tolist(), strict=True):
                self._agenda.at(max(moment, self._agenda.now), member.completed)
