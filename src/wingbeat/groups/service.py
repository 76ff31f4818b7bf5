"""The group generator at work: takes requests from its mailbox, and tells groups to run."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from wingbeat.errors import PeerError, UsageError
from wingbeat.groups.generator import Generator, Run, Unexpected
from wingbeat.groups.patience import Patience
from wingbeat.groups.protocol import WRAPS, Kind, Malformed, Why, ids_of, payload_of
from wingbeat.groups.returns import Back, Returns
from wingbeat.groups.rooms import Rooms
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.mailbox import CLOSE_TIMEOUT_S, RECONNECT_S, Mailbox

_LOOK_S = 0.25
"""Seconds between two looks at what nobody tells: workers that are gone, steps that are late."""

_AT_ONCE = 256
"""Messages that are taken in between two looks."""

_COMFORT_S = 5.0
"""Seconds between two signs to those who wait, at most."""

_QUICK_S = 1.0
"""Seconds that the last words may take when the worker that started it will not hear them."""


class GroupService:
    """One job's group generator.

    Args:
        mailbox: joins it to all workers, whose numbers are their ranks.
        generator: the rules.
        workers: how many there are.
        patience: how long they may compute.
        rooms: which groups' connections they keep.
        clock: seconds.
        returns: who has come back; None if nobody does.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        generator: Generator,
        workers: int,
        patience: Patience,
        rooms: Rooms | None = None,
        clock: Callable[[], float] = time.monotonic,
        returns: Returns | None = None,
    ) -> None:
        self._mailbox, self._generator, self._workers = mailbox, generator, workers
        self._patience, self._clock = patience, clock
        self._rooms = rooms or Rooms(workers)
        self._returns = returns
        self._looked = clock()
        self._gone: set[int] = set()  # for good: nothing comes from there any more
        self._silent: set[int] = set()  # nothing comes from there, but may again
        self._stale: set[int] = set()  # were silent, and have not fetched a state since
        self._probed: set[int] = set()
        self._levels: set[int] = set()  # their group of all is not done
        self._behind: set[int] = set()  # others have gone on without them
        self._missed: set[int] = set()  # others have made a mean of all without them
        self._fetching: set[int] = set()
        self._comforted = self._looked
        self._asked = [0] * workers
        for worker in range(workers):
            patience.freed(worker, self._looked)

    def run(self, parent: Callable[[], bool] = lambda: True, host: int = 0) -> None:
        """Serve until every worker has left, or the one that started it, ``host``, is gone.

        Or one goes on without a generator, as this one was stopped: then all do.
        """
        while len(self._gone | self._silent) < self._workers and parent():
            if self._returns is not None and self._returns.over:
                break
            self.step(self._mailbox.next(_LOOK_S))
        if not parent() and host not in self._gone:
            self._leave(host)  # otherwise each of the others would have to find that out
        # Workers that are gone without a word hear no last one: nobody is left to be told.
        with contextlib.suppress(PeerError):
            self._mailbox.close(CLOSE_TIMEOUT_S if parent() else _QUICK_S)

    def step(self, message: Message | None) -> None:
        """Do what is to be done now, with the message that has just come if one has."""
        for _ in range(_AT_ONCE):
            if message is None:
                break
            self._take(message.peer, message.kind, message.ids)
            message = self._mailbox.poll()
        if message is not None:
            self._take(message.peer, message.kind, message.ids)
        while self._returns is not None and (back := self._returns.news()) is not None:
            self._come_back(back, self._returns)
        now = self._clock()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._look_after(now)

    def _take(self, worker: int, kind: int, ids: Sequence[int]) -> None:
        if worker in self._gone:
            return
        if worker in self._silent:
            self._hear_again(worker)
        try:
            runs = self._heard(worker, kind, ids)
        except (Unexpected, Malformed) as error:
            self._post(worker, Kind.REFUSED, payload=str(error).encode())
            self._leave(worker)
            return
        self._tell(runs)

    def _heard(self, worker: int, kind: int, ids: Sequence[int]) -> list[Run]:
        """Do what a worker says.

        Raises:
            Unexpected: no worker says so now.
            Malformed: nobody says so ever.
        """
        generator, now = self._generator, self._clock()
        self._probed.discard(worker)
        match kind:
            case Kind.ASK:
                return self._asks(worker, now, renews=bool(ids[0]))
            case Kind.LEVEL:
                return self._asks(worker, now, level=True)
            case Kind.DONE:
                return self._done(worker, ids[0], ids[1], now)
            case Kind.LOST:
                if generator.runs(worker, ids[0], ids[1], ids[2]):
                    return self._without(ids[2])
                return []  # The others go on without it already.
            case Kind.FETCH:
                self._fetches(worker, now, join=bool(ids[1]))
                self._find_state(worker, ids[0] - 1)
                return []
            case Kind.ALIVE:
                return []
        raise Malformed(f"a message of kind {kind}")

    def _asks(
        self, worker: int, now: float, *, renews: bool = False, level: bool = False
    ) -> list[Run]:
        """Let a worker ask for a group, or for one of all; if it was left out it joins again.

        But not if it ``renews``: then it may be at another part of the model than the others, with
        whom no average can be made; and not if it was silent, as its model is old. If there are no
        others any more, it has missed nothing.
        """
        generator = self._generator
        self._asked[worker] += 1
        if worker in self._fetching:  # it has somebody's state by now
            self._fetching.discard(worker)
            self._behind.discard(worker)
            self._stale.discard(worker)
            self._missed.discard(worker)
        fetches = worker in self._stale or (renews and worker in self._behind)
        if fetches and not level and self._others(worker):
            self._tell_out(worker, worker)
            return []
        if worker not in generator:
            generator.joined(worker)
            self._tell_all(Kind.IN, worker)
        if not level:
            self._patience.asked(worker, now)
            return generator.request(worker)
        self._patience.waits(worker)
        self._levels.add(worker)
        return generator.level(worker)

    def _others(self, worker: int) -> list[int]:
        """Return who takes part beside ``worker``."""
        return [w for w in range(self._workers) if w != worker and w in self._generator]

    def _fetches(self, worker: int, now: float, *, join: bool) -> None:
        """Let a worker take somebody's state; its next step comes after that."""
        generator = self._generator
        self._fetching.add(worker)
        self._behind.add(worker)
        if join and worker not in generator:
            generator.joined(worker, at_once=True)
            self._tell_all(Kind.IN, worker)
        if worker in generator and not generator.waits(worker):
            self._patience.pauses(worker, now)

    def _done(self, worker: int, number: int, epoch: int, now: float) -> list[Run]:
        """Let a worker be done with a group, which the others are then about to be."""
        generator, patience = self._generator, self._patience
        others = generator.unfinished(worker)
        runs = generator.acknowledge(worker, number, epoch)
        if worker not in generator:
            return runs
        if generator.waits(worker):
            patience.waits(worker)
        elif worker in self._levels:
            self._levels.discard(worker)
            self._behind.discard(worker)
            self._stale.discard(worker)
            patience.pauses(worker, now)
        else:
            patience.freed(worker, now)
        for other in others:
            if other != worker:
                patience.owes(other, now)
        return runs

    def _tell(self, runs: Iterable[Run]) -> None:
        """Tell members what runs; who cannot be told is gone, whereupon more may run."""
        due = deque(runs)
        while due:
            run = due.popleft()
            meeting = self._rooms.meeting(run.members) if len(run.members) > 1 else 0
            if run.members[0] in self._levels:
                if len(run.members) == 1:
                    self._tell_absent(run.members[0])  # why, as it is known by now
                self._missed |= {w for w in range(self._workers) if w not in self._generator}
                self._missed.difference_update(run.members)
            for member in run.members:
                payload = payload_of(run.members, self._rooms.closed(member))
                if not self._post(member, Kind.RUN, ids_of(run, meeting), payload):
                    due += self._without(member)
                    break  # The others run the next epoch.

    def _find_state(self, taker: int, lost: int) -> None:
        """Have somebody who takes part give its state to ``taker``."""
        generator = self._generator
        here = self._others(taker)
        # Who waits hears it at once, the others when their step is over. Who could not give it
        # before may live.
        here.sort(key=lambda w: (w == lost, w in self._behind, not generator.waits(w)))
        for giver in here:
            ids = (giver, taker, self._rooms.once(), 0)
            if self._post(giver, Kind.STATE, ids):
                self._post(taker, Kind.STATE, ids)
                return
        self._post(taker, Kind.STATE, (taker, taker, 0, 0))

    def _come_back(self, back: Back, returns: Returns) -> None:
        """Connect to a worker that was started again; it takes part when it asks."""
        worker = back.worker
        self._leave(worker)  # The process before may not have been missed yet.
        try:
            self._mailbox.join(worker, back.card)
        except UsageError:
            return  # It was opened differently, and will say that nobody answers.
        self._gone.discard(worker)
        self._probed.discard(worker)
        self._asked[worker] = 0
        self._silent.discard(worker)
        self._stale.discard(worker)
        self._missed.discard(worker)
        self._tell_absent(worker)
        returns.met(back)

    def _hear_again(self, worker: int) -> None:
        """Let a worker that was silent hear what it has missed; it takes part when it asks."""
        self._silent.discard(worker)
        self._tell_absent(worker)
        for other in self._others(worker):
            self._tell_out(worker, other, Kind.IN)
        self._tell_out(worker, worker)

    def _tell_absent(self, worker: int) -> None:
        """Tell a worker which others take no part."""
        for other in range(self._workers):
            if other != worker and other not in self._generator:
                self._tell_out(worker, other)

    def _leave(self, worker: int) -> None:
        """Let a worker be gone for good."""
        self._gone.add(worker)
        self._silent.discard(worker)
        self._tell(self._without(worker, gone=True))

    def _without(self, worker: int, *, gone: bool = False) -> list[Run]:
        """Return what runs when a worker takes no part any more.

        Unless it is ``gone`` it lives, as far as is known: then a mean over all waits for it.
        """
        generator = self._generator
        if worker in generator or (gone and generator.is_late(worker)):
            self._out(worker)
        if gone:
            self._patience.gone(worker)
            return generator.gone(worker)
        self._patience.waits(worker)
        return generator.late(worker)

    def _out(self, worker: int) -> None:
        self._behind.add(worker)
        self._fetching.discard(worker)
        self._levels.discard(worker)
        self._rooms.gone(worker)
        self._tell_all(Kind.OUT, worker)

    def _tell_all(self, kind: Kind, worker: int) -> None:
        """Tell all workers, this one too, who takes part."""
        for other in range(self._workers):
            self._tell_out(other, worker, kind)

    def _tell_out(self, to: int, worker: int, kind: Kind = Kind.OUT) -> None:
        """Tell one worker that ``worker`` takes no part any more, and why, or does again."""
        why = self._why(worker) if kind == Kind.OUT else 0
        ids = (worker, self._asked[worker] % WRAPS, why, int(to in self._missed))
        self._post(to, kind, ids)

    def _why(self, worker: int) -> Why:
        """Return why a worker takes no part, as far as is known now."""
        if worker in self._mailbox.left:
            return Why.LEFT
        if worker in self._mailbox.unconnected():
            return Why.ENDED
        return Why.SILENT if worker in self._silent | self._stale else Why.LATE

    def _post(
        self, worker: int, kind: Kind, ids: Sequence[int] = (0, 0, 0, 0), payload: bytes = b""
    ) -> bool:
        """Send it; whether the worker can be sent anything. Waits for nobody."""
        if worker in self._gone:
            return False
        try:
            self._mailbox.post(worker, kind, payload, ids=ids, urgency=0, seconds=0.0)
        except PeerError:
            return False
        return True

    def _look_after(self, now: float) -> None:
        """Find workers that are gone, and those for whom others have waited long enough."""
        for worker in self._mailbox.left - self._gone:
            self._leave(worker)
        lost = set(self._mailbox.lost) - self._gone
        for worker in self._silent - lost:
            self._hear_again(worker)
        for worker in lost - self._silent:
            self._silent.add(worker)
            self._stale.add(worker)
            self._tell(self._without(worker, gone=True))
        unconnected = self._mailbox.unconnected()
        for worker in range(self._workers):
            generator = self._generator
            here = worker in generator or generator.is_late(worker)
            if here and unconnected.get(worker, 0.0) > RECONNECT_S:
                self._tell(self._without(worker, gone=True))
            elif generator.awaited(worker) and self._patience.overdue(worker, now):
                self._tell(self._without(worker))
            # A dead one that nobody waits for has to go as well.
            elif self._patience.unusual(worker, now) and worker not in self._probed:
                self._probed.add(worker)
                self._post(worker, Kind.ALIVE)
        if now - self._comforted > min(_COMFORT_S, self._patience.first_s / 4):
            self._comforted = now
            self._comfort()

    def _comfort(self) -> None:
        """Give a sign to those who wait for others that live, and say for whom."""
        for worker in range(self._workers):
            waits = worker in self._generator and self._generator.waits(worker)
            if waits and (missing := self._generator.missing(worker)):
                self._post(worker, Kind.ALIVE, (missing[0] + 1, 0, 0, 0))
