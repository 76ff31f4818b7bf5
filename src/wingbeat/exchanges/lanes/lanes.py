"""Messages from worker to worker, each one's in its order, over all interfaces that lead there.

A large piece is cut, and each part goes over the interface on which the least waits: to a worker
that no own interface reaches (in a BCube, most) to one that is on a shortest way there, whose lanes
pass it on. Both ends number and acknowledge the parts, so it does not matter what is lost on
the way: what went over an interface that is cut, or over a worker that is gone, is sent again over
another, and what comes twice is dropped.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from wingbeat.errors import PeerError
from wingbeat.exchanges.lanes.order import AHEAD, Astray, Ordered, Unacked
from wingbeat.exchanges.lanes.paths import CUT_S, Paths, Patience, Sent, Way, Ways
from wingbeat.observe.log import log
from wingbeat.transport.messages.frames import LARGEST

SIGN, BEGIN, MORE = 1, 2, 3
"""Kinds of messages: what has come and no more; words; what follows them, in parts."""

CHUNK = 1 << 18
"""Bytes of a part: what waits of it on one interface is soon gone."""

SIGNS = 20
"""How often a worker that has nothing to say says so, in the time after which it is missed."""

MOST_TIMES = 6.0
"""How many times its least patience a worker has at most."""

BEGIN_S = 300.0
"""Seconds that a worker may take until it is heard for the first time."""

_LOOK_S = 0.01
"""Seconds between two looks at what has arrived."""

_STALLS = 5.0
"""Part of the patience that passes between two looks only if this process has not run: then
others are not to blame."""

_LINGER_S = 1.0

_MOST_HOPS = 8
_MOST_PASSED = 16 * AHEAD
"""Parts of others that may wait to be passed on; more are dropped, and come again."""


class Box(Protocol):
    """What lanes need of a `wingbeat.transport.messages.mailbox.Mailbox`."""

    @property
    def largest(self) -> int: ...  # noqa: D102

    @property
    def peers(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def lost(self) -> Mapping[int, str]: ...  # noqa: D102

    @property
    def left(self) -> frozenset[int]: ...  # noqa: D102

    def interfaces(self, peer: int) -> tuple[int, ...]: ...  # noqa: D102

    def room(self, peer: int, *, interface: int, urgency: int) -> int: ...  # noqa: D102

    def post(  # noqa: D102
        self,
        peer: int,
        kind: int,
        payload: Any = b"",
        *,
        ids: Sequence[int],
        interface: int,
        urgency: int,
    ) -> Sent: ...


class Arrived(Protocol):
    """A message as it comes from a mailbox."""

    @property
    def peer(self) -> int: ...  # noqa: D102
    @property
    def kind(self) -> int: ...  # noqa: D102
    @property
    def ids(self) -> tuple[int, int, int, int]: ...  # noqa: D102
    @property
    def payload(self) -> Any: ...  # noqa: D102


@dataclasses.dataclass(slots=True)
class _Part:
    """What was sent to a worker, until it has told that it has it."""

    kind: int
    payload: Any
    number: int = 0
    way: Way | None = None
    at: float = 0.0
    tries: int = 0


class _Lane:
    """Both directions between this worker and another one's life."""

    def __init__(self, life: int, now: float, patience: float, begin: float) -> None:
        self.life, self._begin = life, begin
        self.out: Unacked[_Part] = Unacked()
        self.into: Ordered[tuple[int, Any]] = Ordered()
        self.heard = self.said = now
        self.met = False
        self.patience = Patience(patience, MOST_TIMES * patience)
        self.delays = Patience(0.0, MOST_TIMES * patience)  # until a part is told of

    @property
    def allowed(self) -> float:
        """Seconds that may pass without a sign."""
        return self.patience.seconds if self.met else self._begin


class Lanes:
    """One worker's lanes to all others.

    Attributes:
        near: the workers that its interfaces reach.
        patience: as it was given.

    Args:
        box: joins it to those that its interfaces reach.
        me: its rank.
        workers: how many there are.
        lives: by rank, which life of each it is; None for the first of all.
        joined: by rank, whom its interfaces reach (see `Paths`); None if all reach all.
        patience: seconds without a sign, at least, after which a worker is `silent`.
        begin: seconds that it may take until it gives the first one.
        cut: seconds without a sign, at least, after which an interface is cut.
        name: what messages call the worker of a rank.
        card: what messages call an interface of that number.
        say: hears of an interface that is cut, or used again: one line each.
        clock: seconds.
    """

    def __init__(
        self,
        box: Box,
        me: int,
        workers: int,
        *,
        lives: Sequence[int] | None = None,
        joined: Sequence[Collection[int]] | None = None,
        patience: float = 10.0,
        begin: float = BEGIN_S,
        cut: float = CUT_S,
        name: Callable[[int], str] = "rank {}".format,
        card: Callable[[int], str] = "interface {}".format,
        say: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._box, self._me, self._clock = box, me, clock
        self._name, self._card, self._say, self.patience = name, card, say, patience
        lives = lives or (0,) * workers
        self._life, self._workers = lives[me], workers
        self._ways, self._paths = Ways(cut), Paths(joined, me)
        self._resend_s = cut
        self.near = frozenset(range(workers) if joined is None else joined[me])
        self._cut: set[int] = set()  # interfaces of which a line has been said
        self._passed: deque[tuple[Arrived, int]] = deque()
        self._looked = self._last = clock()
        self._lanes = {
            worker: _Lane(lives[worker], self._looked, patience, begin)
            for worker in range(workers)
            if worker != me
        }
        for worker in box.peers:
            self._ways.add(Way(worker, each) for each in box.interfaces(worker))

    # -- who is there ---------------------------------------------------------------------

    def forget(self, worker: int) -> None:
        """Carry nothing more to or over a worker that is gone."""
        self._lanes.pop(worker, None)
        self._ways.forget(worker)
        self._paths.without(worker)

    def renew(self, worker: int, life: int) -> None:
        """Begin anew with a worker that has come back, and that the mailbox now knows."""
        self.forget(worker)
        self._paths.again(worker)
        begin = MOST_TIMES * self.patience
        self._lanes[worker] = _Lane(life, self._clock(), self.patience, begin)
        if worker in self._box.peers:
            self._ways.add(Way(worker, each) for each in self._box.interfaces(worker))

    @property
    def known(self) -> tuple[int, ...]:
        """The workers that are not gone."""
        return tuple(self._lanes)

    def life(self, worker: int) -> int:
        """Return which life of a worker these lanes lead to; -1 if it is gone."""
        return self._lanes[worker].life if worker in self._lanes else -1

    def silent(self) -> dict[int, str]:
        """Return what to say of workers that have given no sign for too long."""
        now = self._clock()
        return {
            worker: f"gave no sign for {now - lane.heard:.1f} s"
            for worker, lane in self._lanes.items()
            if now - lane.heard > lane.allowed
        }

    @property
    def reached(self) -> set[int]:
        """The workers that are reached directly now: over an interface that is not cut."""
        return self._ways.neighbours

    def heard_since(self, worker: int, when: float) -> bool:
        """Whether a worker has given a sign after ``when``, by this worker's clock."""
        lane = self._lanes.get(worker)
        return lane is None or lane.heard > when

    # -- what is sent ---------------------------------------------------------------------

    @property
    def largest(self) -> int:
        """Bytes that the largest part should have now."""
        return min(self._box.largest, CHUNK, self._ways.part)

    @property
    def busy(self) -> bool:
        """Whether a worker has not told yet that it has everything, or has not been told."""
        return bool(self._passed) or any(
            len(lane.out) or lane.into.untold for lane in self._lanes.values()
        )

    @property
    def linger(self) -> float:
        """Seconds that others may want something passed on after this worker has all done."""
        return _LINGER_S if self._paths.relays else 0.0

    @property
    def cut(self) -> bool:
        """Whether something may be stuck on a way that is cut."""
        return bool(self._ways.cut)

    def send(self, worker: int, kind: int, payload: Any) -> bool:
        """Send a part; return whether there was room. To a worker that is gone there always is.

        Args:
            worker: whom to.
            kind: `BEGIN` or `MORE`.
            payload: must not change until it has been told of.
        """
        lane = self._lanes.get(worker)
        if lane is None:
            return True
        if not lane.out.open:
            return False
        part = _Part(kind, payload, lane.out.next)
        if not self._post(worker, lane, part):
            return False
        lane.out.add(part)
        return True

    def _post(self, worker: int, lane: _Lane, part: _Part) -> bool:
        """Post a part over the way on which the least waits; return whether one has room."""
        word = _word(part.kind, 0, self._life, lane.life)
        ids = (part.number % (1 << 32), lane.into.next % (1 << 32), self._me, worker)
        way = self._post_to(worker, word, part.payload, ids)
        if way is None:
            return False
        now = self._clock()
        part.way, part.at = way, now
        part.tries += 1
        lane.into.told()
        lane.said = now
        return True

    def _post_to(self, worker: int, word: int, payload: Any, ids: Sequence[int]) -> Way | None:
        for way in self._ways.by_waiting(self._paths.next(worker, self._ways.neighbours)):
            peer, interface = way
            if payload and not self._ways.room(interface):
                continue
            if self._box.room(peer, interface=interface, urgency=0) < LARGEST + len(payload):
                continue
            try:
                sent = self._box.post(peer, word, payload, ids=ids, interface=interface, urgency=0)
            except PeerError:
                # It may be gone since the last look, which the next one takes into account.
                if peer in self._box.lost or peer in self._box.left:
                    continue
                raise
            self._ways.posted(way, sent, self._clock())
            return way
        return None

    # -- what arrives ---------------------------------------------------------------------

    def take(self, message: Arrived) -> Iterator[tuple[int, int, Any]]:
        """Return what has come with a message, in order: who from, its kind and payload.

        Raises:
            Astray: no worker of this job sends such a message.
        """
        number, acked, source, target = message.ids
        kind, hops, mine, yours = _said(message.kind)
        if max(source, target) >= self._workers or kind not in (SIGN, BEGIN, MORE):
            raise Astray(f"kind {message.kind}, ids {message.ids}")
        if target != self._me:
            self._pass_on(message, hops)
            return iter(())
        lane = self._lanes.get(source)
        if lane is None or (mine, yours) != (lane.life & _LIVES, self._life & _LIVES):
            return iter(())  # of a life that is over
        now = self._clock()
        if lane.met:
            lane.patience.passed(now - lane.heard)
        lane.heard, lane.met = now, True
        oldest = next(iter(lane.out), None)
        if lane.out.hear(acked) and oldest is not None and oldest.tries == 1:
            lane.delays.passed(now - oldest.at)
        if kind == SIGN:
            return iter(())
        items = lane.into.take(number, (kind, message.payload))
        return ((source, *item) for item in items)

    def _pass_on(self, message: Arrived, hops: int) -> None:
        if hops < _MOST_HOPS and len(self._passed) < _MOST_PASSED:
            self._passed.append((message, hops + 1))

    # -- what is to be done now and then --------------------------------------------------

    def tick(self) -> None:
        """Pass on, send again, and give signs; to be called again and again."""
        now = self._clock()
        if now - self._last > self.patience / _STALLS:
            self._ways.excuse(now)
            for lane in self._lanes.values():
                lane.heard += now - self._last
        self._last = now
        self._pass()
        due = now >= self._looked + _LOOK_S
        if due:
            self._looked = now
            self._look(now)
        for worker, lane in self._lanes.items():
            if due and len(lane.out):
                self._again(worker, lane, now)
            late = due and lane.into.untold and now >= lane.said + _LOOK_S
            if late or lane.into.untold >= AHEAD // 4 or now >= lane.said + self.patience / SIGNS:
                self._post(worker, lane, _Part(SIGN, b""))

    def _pass(self) -> None:
        for _ in range(len(self._passed)):
            message, hops = self._passed.popleft()
            if message.ids[3] not in self._lanes:
                continue
            kind, _, source, target = _said(message.kind)
            word = _word(kind, hops, source, target)
            if self._post_to(message.ids[3], word, message.payload, message.ids) is None:
                self._passed.append((message, hops))

    def _again(self, worker: int, lane: _Lane, now: float) -> None:
        """Send again what was on a way that is cut, or may be lost with another worker."""
        for part in lane.out:
            over = part.way is None or not self._ways.up(part.way)
            relayed = part.way is not None and part.way.worker != worker
            wait = self._resend_s * 2 ** min(part.tries - 1, 4)
            late = relayed and now - part.at > max(wait, lane.delays.seconds)
            if (over or late) and not self._post(worker, lane, part):
                return

    def _look(self, now: float) -> None:
        for (worker, interface), up in self._ways.look(now):
            if up:
                continue
            if interface not in self._cut:
                self._cut.add(interface)
                seconds = self._ways.silence(Way(worker, interface), now)
                self._say(
                    f"{self._name(self._me)}: {self._card(interface)} has had no sign of "
                    f"{self._name(worker)} for {seconds:.1f} s; what waits goes another way, until "
                    "there is one"
                )
        for interface in self._cut - {way.interface for way in self._ways.cut}:
            self._cut.discard(interface)
            self._say(f"{self._name(self._me)}: {self._card(interface)} is used again")


_LIVES = 0xFFF
"""Lives are told apart by their lowest 12 bits."""


def _word(kind: int, hops: int, source: int, target: int) -> int:
    """Return the kind of a message: its own, hops, and the lives of both ends."""
    return kind | hops << 4 | (source & _LIVES) << 8 | (target & _LIVES) << 20


def _said(word: int) -> tuple[int, int, int, int]:
    return word & 0xF, word >> 4 & 0xF, word >> 8 & _LIVES, word >> 20 & _LIVES
