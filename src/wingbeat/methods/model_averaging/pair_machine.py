"""One worker of AD-PSGD: whom it asks, whom it serves, and when it may go on. Pure.

Models are averaged two at a time and one after the other. An active worker asks a passive one, at
random, whenever it has made a step, and waits until the average is its model. A passive worker
serves one at a time, in the order in which they have asked, and only between `Worker.begin` and
`Worker.shut`: in between, its model changes. So whoever waits does so for a passive worker, and
passive workers wait for nobody but the one they serve, who waits for nothing else: no deadlock. If
all could ask and serve, as in the algorithm (Fig. 3), workers could wait for each other in a ring
(Fig. 2a); ``restricted=False`` plays that.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeAlias

WRAPS = 1 << 32
"""Numbers in messages are below this."""


class Kind(enum.IntEnum):
    """Kinds of messages, and whose they are."""

    ASK = 1
    """Active: let us average, when it is my turn."""
    GRANT = 2
    """Passive: it is your turn; until you are done, it is nobody else's."""
    PIECE = 3
    """Active: a part of its model."""
    MEAN = 4
    """Passive: what becomes of that part."""
    DONE = 5
    """Active: all parts have come."""
    LEVEL = 6
    """Active: it asks no more until all workers have been averaged, for the ``number``-th time."""
    ALIVE = 7
    """Anybody: nothing. It has to arrive, so whoever is dead is found out."""
    FAILED = 8
    """Anybody: training has failed here."""


class Unexpected(Exception):
    """A message that the other worker does not send now; says what is wrong with it."""


def is_active(rank: int) -> bool:
    """Whether the worker asks others; if not, it is asked.

    Of an odd number of workers the larger part is active, as each of their steps is averaged with
    somebody's; a single worker finds nobody to ask.
    """
    return rank % 2 == 0


def partners(rank: int, workers: int) -> tuple[int, ...]:
    """Return those of the other set: whom an active worker may ask, or who may ask a passive one.

    >>> partners(0, 5), partners(1, 5)
    ((1, 3), (0, 2, 4))
    """
    return tuple(range(1 - rank % 2, workers, 2))


WINDOW = 16
"""Parts of a model that are under way at a time, so that neither end has to wait to send one."""


class Say(NamedTuple):
    """Send a message; a `Kind.PIECE` or `Kind.MEAN` with the part of that number."""

    peer: int
    kind: Kind
    number: int
    piece: int = 0


class Adopt(NamedTuple):
    """The average is whole: make it this worker's model.

    Attributes:
        peer: with whom.
        asked: whether this worker has asked the other, and not the other this one.
    """

    peer: int
    asked: bool


class Drop(NamedTuple):
    """The other worker is gone: leave the model as it was, and what has come of the average."""

    peer: int


Order: TypeAlias = "Say | Adopt | Drop"


@dataclass(slots=True)
class Meeting:
    """An average of this worker's model and another's.

    Attributes:
        peer: the other worker.
        number: the asking worker's number of it.
        missing: numbers of the parts that have not come.
        sent: how many parts have been sent, of the one who has asked.
        granted: whether it is this worker's turn; True if this worker serves.
    """

    peer: int
    number: int
    missing: set[int]
    sent: int = 0
    granted: bool = False


class Worker:
    """What one worker knows of its averages.

    Args:
        rank: its number.
        workers: how many there are.
        pieces: in how many parts a model is sent; the same on all.
        seed: of whom it asks.
        restricted: whether workers are active or passive; if not, each asks and serves, which ends
            in deadlocks.
        choose: returns one of several workers; at random if None.

    Attributes:
        rank: as given.
        orders: what is to be done, oldest first; whoever drives the machine takes them out.
        asked: the average that this worker has asked for.
        served: the average that another has asked for, and whose turn it is.
        averages: how many are complete.
        alone: steps without an average, as nobody was left to ask.
        lost: partners that were lost, and did not just leave.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        pieces: int,
        seed: int = 0,
        *,
        restricted: bool = True,
        choose: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self.rank = rank
        self.asks = is_active(rank) or not restricted
        self.serves = not is_active(rank) or not restricted
        others = tuple(other for other in range(workers) if other != rank)
        self.partners = partners(rank, workers) if restricted else others
        self._there = dict.fromkeys(self.partners)
        self._pieces = pieces
        self._choose = Random(f"pairs {seed} {rank}").choice if choose is None else choose
        self._open = self._leaving = False
        self._queue: deque[tuple[int, int]] = deque()
        self._number = 0
        self._level = 0
        self._levels = dict.fromkeys(self.partners, 0)
        self.orders: deque[Order] = deque()
        self.asked: Meeting | None = None
        self.served: Meeting | None = None
        self.averages = self.alone = 0
        self.lost: set[int] = set()

    # -- what training does ---------------------------------------------------------------

    @property
    def there(self) -> tuple[int, ...]:
        """The partners that are not gone."""
        return tuple(self._there)

    @property
    def queue(self) -> tuple[int, ...]:
        """Those that have asked and wait for their turn, the first one first."""
        return tuple(peer for peer, _ in self._queue)

    @property
    def pending(self) -> bool:
        """Whether the model is in an average: training has to wait for it."""
        return self.asked is not None or (self.served is not None and bool(self.served.missing))

    @property
    def amid(self) -> bool:
        """Whether parts of models are under way."""
        return self.served is not None or (self.asked is not None and self.asked.granted)

    @property
    def levelled(self) -> bool:
        """Whether nobody asks this worker for an average any more, before the next step."""
        behind = self.serves and any(self._levels[peer] < self._level for peer in self._there)
        return not (behind or self.pending)

    def behind(self) -> tuple[int, ...]:
        """Return whom training waits for: in an average, or before all can be levelled."""
        if self.asked is not None:
            return (self.asked.peer,)
        if self.served is not None:
            return (self.served.peer,)
        if self.serves:
            return tuple(p for p in self._there if self._levels[p] < self._level)
        return ()

    def begin(self) -> None:
        """The model is complete, and does not change until `shut`: let it be averaged."""
        assert not self._open, "a step ends before the next begins"
        self._open = True
        if self.asks:
            self._ask()
        self._serve()

    def shut(self) -> None:
        """Begin no other average; once this worker is not `pending`, the model may change."""
        self._open = False

    def level(self) -> None:
        """Ask no more, and serve until nobody does; then `levelled`, and `shut` is to be called."""
        assert not self._open, "a step ends before all are averaged"
        assert self.asks != self.serves, "only active and passive workers can be levelled"
        self._level += 1
        if self.asks:
            for peer in self._there:
                self.orders.append(Say(peer, Kind.LEVEL, self._level))
        else:
            self._open = True
            self._serve()

    def unlevel(self) -> None:
        """Go on without all levelled, of whom some have not come: the next `level` is this one."""
        self._open = False
        if self.serves:  # who asks has told the others, and waits for nobody
            self._level -= 1

    def leave(self) -> None:
        """Begin nothing more; what is under way goes on."""
        self._open, self._leaving = False, True
        if self.asked is not None and not self.asked.granted:
            self.asked = None  # who has been asked sees that this worker leaves

    def _ask(self) -> None:
        if not self._there:
            self.asked = None
            self.alone += 1
            return
        peer = self._choose(self.there)
        self._number = (self._number + 1) % WRAPS
        self.asked = Meeting(peer, self._number, set(range(self._pieces)))
        self.orders.append(Say(peer, Kind.ASK, self._number))

    def _serve(self) -> None:
        """Let the next one have its turn, if there is one and the model may be averaged."""
        free = self.asked is None and self.served is None
        if self._open and free and self._queue:
            peer, number = self._queue.popleft()
            self.served = Meeting(peer, number, set(range(self._pieces)), granted=True)
            self.orders.append(Say(peer, Kind.GRANT, number))

    # -- what others say ------------------------------------------------------------------

    def heard(self, peer: int, kind: int, number: int, piece: int = 0) -> bool:
        """Take in what another worker has said; its payload has been checked.

        Returns:
            Whether it counts; False if the other is gone, or this worker leaves.

        Raises:
            Unexpected: it does not say so now.
        """
        if peer not in self._levels:
            raise Unexpected(f"a message of rank {peer}, which is no partner")
        if peer not in self._there:
            return False
        match kind:
            case Kind.ASK:
                self._hear_ask(peer, number)
            case Kind.GRANT | Kind.MEAN:
                return self._hear_answer(peer, kind, number, piece)
            case Kind.PIECE | Kind.DONE:
                self._hear_asker(peer, kind, number, piece)
            case Kind.LEVEL:
                if not self.serves or number != self._levels[peer] + 1:
                    raise Unexpected(f"level {number} after {self._levels[peer]}")
                self._levels[peer] = number
            case Kind.ALIVE:
                pass
            case Kind.FAILED:
                self.gone(peer, lost=True)
            case _:
                raise Unexpected(f"a message of kind {kind}")
        return True

    def _hear_ask(self, peer: int, number: int) -> None:
        waits = any(peer == other for other, _ in self._queue)
        if not self.serves or waits or (self.served is not None and self.served.peer == peer):
            raise Unexpected(f"it asks for average {number}, and may not")
        self._queue.append((peer, number))
        self._serve()

    def _hear_answer(self, peer: int, kind: int, number: int, piece: int) -> bool:
        """Take in what a worker says that this one has asked."""
        meeting = self.asked
        if meeting is None and self._leaving:
            return False
        if meeting is None or (meeting.peer, meeting.number) != (peer, number):
            raise Unexpected(f"an answer to {number}, which was not asked")
        if kind == Kind.GRANT:
            if meeting.granted:
                raise Unexpected(f"a second turn for average {number}")
            meeting.granted = True
        else:
            if piece not in meeting.missing or piece >= meeting.sent:
                raise Unexpected(f"part {piece} of average {number}, which was not sent")
            meeting.missing.remove(piece)
        self._send(meeting)
        return True

    def _send(self, meeting: Meeting) -> None:
        """Send as many parts as may be under way; end the average with the last one."""
        came = self._pieces - len(meeting.missing)
        while meeting.sent < min(self._pieces, came + WINDOW):
            self.orders.append(Say(meeting.peer, Kind.PIECE, meeting.number, meeting.sent))
            meeting.sent += 1
        if not meeting.missing:
            self.orders.append(Adopt(meeting.peer, asked=True))
            self.orders.append(Say(meeting.peer, Kind.DONE, meeting.number))
            self.asked = None
            self.averages += 1
            self._serve()

    def _hear_asker(self, peer: int, kind: int, number: int, piece: int) -> None:
        """Take in what a worker says whose turn it is."""
        meeting = self.served
        if meeting is None or (meeting.peer, meeting.number) != (peer, number):
            raise Unexpected(f"it speaks of average {number}, and it is not its turn")
        if kind == Kind.DONE:
            if meeting.missing:
                raise Unexpected(f"average {number} ends without {len(meeting.missing)} parts")
            self.served = None
            self.averages += 1
            self._serve()
            return
        if piece not in meeting.missing:
            raise Unexpected(f"part {piece} of average {number}, which it has sent or has not")
        meeting.missing.remove(piece)
        self.orders.append(Say(peer, Kind.MEAN, number, piece))
        if not meeting.missing:
            self.orders.append(Adopt(peer, asked=False))

    def gone(self, peer: int, *, lost: bool) -> None:
        """Have nothing more to do with a worker that has left, or was lost; ask another."""
        if peer not in self._there:
            return
        del self._there[peer]
        if lost:
            self.lost.add(peer)
        self._queue = deque(each for each in self._queue if each[0] != peer)
        kept = [o for o in self.orders if not isinstance(o, Say) or o.peer != peer]
        self.orders.clear()
        self.orders.extend(kept)
        if self.served is not None and self.served.peer == peer:
            self.served = None
            self.orders.append(Drop(peer))
        if self.asked is not None and self.asked.peer == peer:
            self.asked = None
            self.orders.append(Drop(peer))
            if not self._leaving:
                self._ask()
        self._serve()
