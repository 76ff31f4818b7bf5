"""The protocol of AD-PSGD (Ripples, sections 2.3 and 2.4): one worker's state machine. No I/O.

Workers are active or passive. An active worker requests an average from a random passive one after
each step, and waits until the average is its model. A passive worker serves one request at a time,
in order of arrival, and only between `PairMachine.begin` and `PairMachine.end`; at other times its
model changes. So active workers wait for passive ones, and passive ones only for the one they
serve, which waits for nothing else: there is no deadlock. If all workers could request and serve,
as in the algorithm (Fig. 3), they could wait for each other in a ring (Fig. 2a);
``bipartite=False`` simulates that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, NamedTuple, TypeAlias

from wingbeat import schema
from wingbeat.methods.model_averaging.generator import ID_LIMIT, ProtocolError
from wingbeat.schema import Messages, Payload, Range, Word

WINDOW = 16
"""Chunks of a model in flight at a time, so that no worker blocks when it sends one."""


class Kind(schema.Kind):
    """Kinds of messages, and their senders."""

    REQUEST = 1, "active: requests an average"
    GRANT = 2, "passive: serves the receiver, and no other worker, until `DONE`"
    CHUNK = 3, "active: a chunk of its model"
    AVERAGE = 4, "passive: the average of that chunk"
    DONE = 5, "active: has received all chunks"
    SYNCHRONIZE = (
        6,
        ("active: sends no request until all workers have synchronized for the `number`-th time"),
    )
    KEEPALIVE = 7, "any: is not delivered if the receiver is dead"
    FAILED = 8, "any: training has failed at the sender"


class Numbered(NamedTuple):
    """A message without a chunk.

    Attributes:
        number: of the average, or of the synchronization.
    """

    number: Word = 0


class Chunk(NamedTuple):
    """A message with a chunk of a model.

    Attributes:
        number: of the average.
        chunk: number of the chunk.
        payload: its parameters.
    """

    number: Word
    chunk: Annotated[int, Range(0, "chunks")]
    payload: Payload


MESSAGES = Messages({k: Chunk if k in (Kind.CHUNK, Kind.AVERAGE) else Numbered for k in Kind})


class Send(NamedTuple):
    """Command: send a message; `Kind.CHUNK` and `Kind.AVERAGE` with the chunk of that number."""

    peer: int
    kind: Kind
    number: int
    chunk: int = 0


class Apply(NamedTuple):
    """Command: the average, which ``peer`` or this worker has requested, becomes the model."""

    peer: int
    is_requester: bool


class Discard(NamedTuple):
    """Command: the peer is lost; discard the average, and keep the model."""

    peer: int


Command: TypeAlias = "Send | Apply | Discard"


@dataclass(slots=True)
class PairAverage:
    """An average with one peer.

    Attributes:
        number: of the average, counted by the requester.
        missing: numbers of the chunks that have not arrived.
        sent: on the requester, the number of chunks sent.
        granted: whether the responder serves it now.
    """

    peer: int
    number: int
    missing: set[int]
    sent: int = 0
    granted: bool = False


def is_active(rank: int) -> bool:
    """Whether the worker requests averages; passive workers serve them.

    Ranks alternate. torchrun numbers the workers of a host consecutively, so each host has both
    kinds, its workers also average among themselves, and the traffic is spread over all hosts. With
    an odd number of workers the larger set is active, because only active workers average in each
    step.
    """
    return rank % 2 == 0


def partners(rank: int, workers: int) -> tuple[int, ...]:
    """Return the workers of the other set.

    >>> partners(0, 5), partners(1, 5)
    ((1, 3), (0, 2, 4))
    """
    return tuple(range(1 - rank % 2, workers, 2))


class PairMachine:
    """The state of one worker.

    ``chunks``, the number of chunks of a model, is the same on all workers. If not ``bipartite``,
    all workers request and serve, which deadlocks. ``choose`` returns one of several workers; None
    chooses at random.

    Attributes:
        requests: whether this worker requests averages.
        serves: whether this worker serves requests.
        commands: for the driver to execute and remove, oldest first.
        requested: the average that this worker has requested.
        served: the average that this worker serves.
        averages: the number of averages that it has completed.
        skipped: the number of steps without an average, because no partner was left.
        lost: partners that were lost without leaving.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        chunks: int,
        seed: int = 0,
        *,
        bipartite: bool = True,
        choose: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self.rank = rank
        self.requests = is_active(rank) or not bipartite
        self.serves = not is_active(rank) or not bipartite
        others = tuple(other for other in range(workers) if other != rank)
        self.partners = partners(rank, workers) if bipartite else others
        self._live = dict.fromkeys(self.partners)
        self._chunks = chunks
        self._choose = choose or Random(f"pairs {seed} {rank}").choice
        self._open = self._leaving = False
        self._queue: dict[int, int] = {}  # the numbers of waiting requests, by worker
        self._number = self._round = 0
        self._rounds = dict.fromkeys(self.partners, 0)
        self.commands: deque[Command] = deque()
        self.requested: PairAverage | None = None
        self.served: PairAverage | None = None
        self.averages = self.skipped = 0
        self.lost: set[int] = set()

    # -- calls of the training thread -----------------------------------------------------

    @property
    def live_partners(self) -> tuple[int, ...]:
        """The partners that are neither lost nor have left."""
        return tuple(self._live)

    @property
    def queue(self) -> tuple[int, ...]:
        """The workers whose requests wait, in order."""
        return tuple(self._queue)

    @property
    def pending(self) -> bool:
        """Whether the model is in an average, so that training must wait."""
        return self.requested is not None or (self.served is not None and bool(self.served.missing))

    @property
    def in_transfer(self) -> bool:
        """Whether chunks of models are in flight."""
        return self.served is not None or (self.requested is not None and self.requested.granted)

    @property
    def synchronized(self) -> bool:
        """Whether no request will arrive before the next step."""
        return not (self._not_synchronizing() or self.pending)

    def waiting_for(self) -> tuple[int, ...]:
        """Return the workers that training waits for, in an average or a synchronization."""
        average = self.requested or self.served
        return self._not_synchronizing() if average is None else (average.peer,)

    def begin(self) -> None:
        """Allow averages. The model must not change until `end`."""
        assert not self._open, "a step ends before the next begins"
        self._open = True
        if self.requests:
            self._request()
        self._serve_next()

    def end(self) -> None:
        """Start no further average. The model may change once this worker is not `pending`."""
        self._open = False

    def synchronize(self) -> None:
        """Request no average, and serve until ``synchronized``; the caller then calls `end`."""
        assert not self._open, "a step ends before a synchronization"
        assert self.requests != self.serves, "only active and passive workers can synchronize"
        self._round += 1
        if self.requests:
            for peer in self._live:
                self.commands.append(Send(peer, Kind.SYNCHRONIZE, self._round))
        else:
            self._open = True
            self._serve_next()

    def cancel_synchronization(self) -> None:
        """Abandon a synchronization that not all workers have reached; the next one repeats it."""
        self._open = False
        if self.serves:  # an active worker has notified the others, and waits for none
            self._round -= 1

    def leave(self) -> None:
        """Start no further average. A granted one continues."""
        self._open, self._leaving = False, True
        if self.requested is not None and not self.requested.granted:
            self.requested = None  # the responder detects that this worker leaves

    def _not_synchronizing(self) -> tuple[int, ...]:
        if not self.serves:
            return ()
        return tuple(peer for peer in self._live if self._rounds[peer] < self._round)

    def _request(self) -> None:
        if not self._live:
            self.requested = None
            self.skipped += 1
            return
        peer = self._choose(self.live_partners)
        self._number = (self._number + 1) % ID_LIMIT
        self.requested = PairAverage(peer, self._number, set(range(self._chunks)))
        self.commands.append(Send(peer, Kind.REQUEST, self._number))

    def _serve_next(self) -> None:
        free = self.requested is None and self.served is None
        if self._open and free and self._queue:
            peer = next(iter(self._queue))
            number = self._queue.pop(peer)
            self.served = PairAverage(peer, number, set(range(self._chunks)), granted=True)
            self.commands.append(Send(peer, Kind.GRANT, number))

    # -- messages -------------------------------------------------------------------------

    def receive(self, peer: int, kind: int, number: int, chunk: int = 0) -> bool:
        """Handle a message whose payload is valid; return whether the payload is needed.

        It is not needed if the peer is lost or this worker leaves. Raises ProtocolError if it is
        not allowed now.
        """
        if peer not in self._rounds:
            raise ProtocolError(f"a message of rank {peer}, which is no partner")
        if peer not in self._live:
            return False
        match kind:
            case Kind.REQUEST:
                self._handle_request(peer, number)
            case Kind.GRANT | Kind.AVERAGE:
                return self._handle_response(peer, kind, number, chunk)
            case Kind.CHUNK | Kind.DONE:
                self._handle_requester(peer, kind, number, chunk)
            case Kind.SYNCHRONIZE:
                if not self.serves or number != self._rounds[peer] + 1:
                    raise ProtocolError(f"synchronization {number} after {self._rounds[peer]}")
                self._rounds[peer] = number
            case Kind.KEEPALIVE:
                pass
            case Kind.FAILED:
                self.remove(peer, lost=True)
        return True

    def _handle_request(self, peer: int, number: int) -> None:
        serves_it = self.served is not None and self.served.peer == peer
        if not self.serves or peer in self._queue or serves_it:
            raise ProtocolError(f"request {number} is not allowed now")
        self._queue[peer] = number
        self._serve_next()

    def _handle_response(self, peer: int, kind: int, number: int, chunk: int) -> bool:
        average = self.requested
        if average is None and self._leaving:
            return False
        if average is None or (average.peer, average.number) != (peer, number):
            raise ProtocolError(f"a response to request {number}, which was not sent")
        if kind == Kind.GRANT:
            if average.granted:
                raise ProtocolError(f"a second grant of average {number}")
            average.granted = True
        else:
            if chunk not in average.missing or chunk >= average.sent:
                raise ProtocolError(f"chunk {chunk} of average {number}, which was not sent")
            average.missing.remove(chunk)
        received = self._chunks - len(average.missing)
        while average.sent < min(self._chunks, received + WINDOW):
            self.commands.append(Send(peer, Kind.CHUNK, number, average.sent))
            average.sent += 1
        if not average.missing:
            self.commands.append(Apply(peer, is_requester=True))
            self.commands.append(Send(peer, Kind.DONE, number))
            self.requested = None
            self.averages += 1
            self._serve_next()
        return True

    def _handle_requester(self, peer: int, kind: int, number: int, chunk: int) -> None:
        average = self.served
        if average is None or (average.peer, average.number) != (peer, number):
            raise ProtocolError(f"a message of average {number}, which is not served now")
        if kind == Kind.DONE:
            if average.missing:
                raise ProtocolError(f"average {number} ends without {len(average.missing)} chunks")
            self.served = None
            self.averages += 1
            self._serve_next()
            return
        if chunk not in average.missing:
            raise ProtocolError(f"chunk {chunk} of average {number} came twice, or does not exist")
        average.missing.remove(chunk)
        self.commands.append(Send(peer, Kind.AVERAGE, number, chunk))
        if not average.missing:
            self.commands.append(Apply(peer, is_requester=False))

    def remove(self, peer: int, *, lost: bool) -> None:
        """Remove a partner that has left or was lost; request another average if needed."""
        if peer not in self._live:
            return
        del self._live[peer]
        if lost:
            self.lost.add(peer)
        self._queue.pop(peer, None)
        kept = [c for c in self.commands if not isinstance(c, Send) or c.peer != peer]
        self.commands.clear()
        self.commands.extend(kept)
        if self.served is not None and self.served.peer == peer:
            self.served = None
            self.commands.append(Discard(peer))
        if self.requested is not None and self.requested.peer == peer:
            self.requested = None
            self.commands.append(Discard(peer))
            if not self._leaving:
                self._request()
        self._serve_next()
