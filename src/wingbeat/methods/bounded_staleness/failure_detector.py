"""Failure detection: workers are suspected locally, and removed by the membership log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from wingbeat.errors import PeerError
from wingbeat.exchanges.departures import Departures
from wingbeat.exchanges.lanes.lanes import Lanes
from wingbeat.methods.bounded_staleness.membership import MembershipClient
from wingbeat.methods.bounded_staleness.messages import View
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport.messages.frames import NEVER
from wingbeat.transport.messages.mailbox import RECONNECT_S, Mailbox
from wingbeat.transport.messages.peers import PeerInfo

STORE_S = 10.0
"""Timeout for the store to decide which workers are lost, in seconds."""

_ENDED = "has ended without a word"
_LEFT = "has left"

_POLL_S = 0.25
"""Interval between checks for closed connections, in seconds."""


class WorkerLost(NamedTuple):
    """An incarnation of a worker has ended; ``needed`` if training still needed it."""

    worker: int
    incarnation: int
    needed: bool


class WorkerRejoined(NamedTuple):
    """A worker has joined again."""

    worker: int
    incarnation: int
    card: PeerInfo


class FailureDetector:
    """Tracks which workers are alive, for one worker.

    Attributes:
        lost: the workers that are currently lost.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        lanes: Lanes,
        machine: Worker,
        membership: MembershipClient | None,
        *,
        tolerates_loss: bool,
        departures: Departures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox, self._lanes, self._machine = mailbox, lanes, machine
        self._membership, self._tolerates_loss = membership, tolerates_loss
        self._departures, self._clock = departures, clock
        self._me = f"rank {machine.rank}"
        self._workers = len(lanes.known) + 1
        self._suspected_at: dict[int, float] = {}
        self._unneeded: dict[int, int] = {}  # incarnations that ended after all had drained
        self._polled = float("-inf")
        self._closed_at: dict[int, float] = {}  # time of closing; NEVER if not reached directly
        self.lost: set[int] = set()
        if membership is not None:
            view = membership.log.view
            self.lost |= {worker for worker, number in enumerate(view) if number % 2}
            self._workers = len(view)

    def suspects(self) -> dict[int, str]:
        """Return the workers that may be lost, each with the reason."""
        if not self._machine.drained:  # training has resumed and needs them
            self.lost.difference_update(self._unneeded)
        found = dict.fromkeys(self._unneeded, _LEFT)
        found |= dict.fromkeys(self._mailbox.left, _LEFT)
        found |= self._mailbox.lost
        found |= self._lanes.silent()
        found |= dict.fromkeys(self._ended(), _ENDED)
        return {worker: reason for worker, reason in found.items() if worker not in self.lost}

    def poll(self, suspects: Mapping[int, str]) -> Iterator[WorkerLost | WorkerRejoined]:
        """Yield the workers that were lost or have rejoined since the last call.

        Take ``suspects`` before the latest messages, so that a worker's last messages count.
        """
        if self._membership is None:
            for worker, reason in suspects.items():
                yield self._lose(worker, self._machine.incarnation_of(worker), reason)
            return
        for change, card in self._membership.take_events():
            worker = change.worker
            if worker == self._machine.rank:
                self._check_own(change.joined, change.incarnation, change.author)
            elif not change.joined:
                reason = f"was reported lost by rank {change.author}"
                if change.author == worker:
                    reason = "was restarted"
                reason = suspects.get(worker, reason)
                yield self._lose(worker, change.incarnation, reason)
            elif card is not None:
                self.lost.discard(worker)
                self._unneeded.pop(worker, None)
                self._departures.back(worker)
                yield WorkerRejoined(worker, change.incarnation, card)
        yield from self._decide({w: r for w, r in suspects.items() if w not in self.lost})

    def _ended(self) -> list[int]:
        """Return the workers whose connections closed `RECONNECT_S` ago and that are silent since.

        A partition closes connections too, but long after the worker was last reached directly. A
        worker whose messages arrive through other workers is alive.
        """
        now = self._clock()
        if now >= self._polled + _POLL_S:
            self._polled, before, reached = now, self._closed_at, self._lanes.reached
            self._closed_at = {
                worker: before.get(worker, now - seconds if worker in reached else NEVER)
                for worker, seconds in self._mailbox.unconnected().items()
            }
        return self._closed_and_silent_since(now - RECONNECT_S)

    def _closed_and_silent_since(self, when: float) -> list[int]:
        return [
            worker
            for worker, closed_at in self._closed_at.items()
            if closed_at < when and not self._lanes.heard_since(worker, when)
        ]

    def _check_own(self, joined: bool, incarnation: int, author: int) -> None:
        own = self._machine.incarnation
        if joined and incarnation > own:
            raise PeerError(
                f"{self._me}: a second process with this rank was started, and continues"
            )
        if not joined and incarnation == own:
            raise PeerError(
                f"{self._me}: removed by rank {author}, which did not hear from it; the "
                "others continue: restart this worker"
            )

    def _decide(self, suspects: Mapping[int, str]) -> Iterator[WorkerLost]:
        """Propose a view without the suspects once all other workers have sent a message since."""
        assert self._membership is not None
        now = self._clock()
        self._suspected_at = {worker: self._suspected_at.get(worker, now) for worker in suspects}
        if self._machine.drained:
            for worker in suspects:
                yield self._lose_unneeded(worker)
            return
        needed = [w for w in suspects if self._machine.incarnation_of(w) is not None]
        if needed:
            self._check_tolerated(suspects, min(needed))
        since = min((self._suspected_at[worker] for worker in needed), default=now)
        others = set(self._lanes.known) - set(suspects)
        # A worker that misses the majority is probably isolated itself; the others propose first.
        minority = 2 * len(needed) > len(needed) + len(others) + 1
        due = now >= since + (self._lanes.patience if minority else 0.0)
        if needed and due and all(self._lanes.heard_since(each, since) for each in others):
            ended = {worker: 2 * self._incarnation(worker) + 1 for worker in needed}
            self._membership.propose(View(tuple(ended.get(w, 0) for w in range(self._workers))))
        if reason := self._membership.unavailable_reason(STORE_S):
            names = ", ".join(f"rank {worker}" for worker in sorted(needed))
            raise PeerError(
                f"{self._me}: lost {names}, and cannot reach the rendezvous store to decide which "
                f"workers continue: {reason}; restart this worker when the store is reachable"
            )

    def _lose(self, worker: int, incarnation: int | None, reason: str) -> WorkerLost:
        if self._machine.drained:
            return self._lose_unneeded(worker)
        needed = incarnation is not None
        self._unneeded.pop(worker, None)
        if needed:
            self._check_tolerated({worker: reason}, worker)
            self._departures.lost(worker, reason)
        self.lost.add(worker)
        own = self._incarnation(worker) if incarnation is None else incarnation
        return WorkerLost(worker, own, needed)

    def _lose_unneeded(self, worker: int) -> WorkerLost:
        """Mark a worker as lost that training needs only if it resumes."""
        incarnation = self._unneeded.setdefault(worker, self._incarnation(worker))
        self.lost.add(worker)
        return WorkerLost(worker, incarnation, needed=False)

    def _incarnation(self, worker: int) -> int:
        return self._unneeded.get(worker, self._lanes.life(worker))

    def _check_tolerated(self, suspects: Mapping[int, str], worker: int) -> None:
        if self._tolerates_loss:
            return
        # A worker that has left may have been the first to miss a worker that is found lost next.
        ended = self._closed_and_silent_since(self._clock() - RECONNECT_S / 2)
        worker, reason = (min(ended), _ENDED) if ended else (worker, suspects[worker])
        failure = self._departures.blame() or f"rank {worker} {reason}"
        raise PeerError(
            f"{self._me}: lost a worker before training ended: {failure}; "
            "start the job again from a checkpoint"
        )
