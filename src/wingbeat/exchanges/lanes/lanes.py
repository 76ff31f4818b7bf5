"""Reliable multipath streams between workers: ordered, over all interfaces that reach a worker.

A large message is split, and each part uses the interface with the fewest queued bytes. If no own
interface reaches the receiver, as for most workers in a BCube, a worker on a shortest path forwards
the part. Both ends number and acknowledge parts. Parts on a cut interface, or sent through a lost
worker, are retransmitted over another path, and duplicates are dropped.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from wingbeat.errors import PeerError
from wingbeat.exchanges.lanes.order import WINDOW, ProtocolError, ReorderBuffer, RetransmitBuffer
from wingbeat.exchanges.lanes.paths import (
    PATH_TIMEOUT_S,
    AdaptiveTimeout,
    Path,
    PathTable,
    RoutingTable,
    Sent,
)
from wingbeat.observe.log import log
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES

HEARTBEAT, BEGIN, MORE = 1, 2, 3
"""Kinds of messages: acknowledgement only; first part of a message; further parts."""

CHUNK = 1 << 18
"""Bytes of a part, so that a queue on one interface drains quickly."""

HEARTBEATS_PER_TIMEOUT = 20
"""Heartbeats of an idle worker in the time after which it is lost."""

MAX_TIMEOUT_FACTOR = 6.0
"""Maximum of an adaptive timeout, in multiples of its minimum."""

FIRST_MESSAGE_S = 300.0
"""Seconds for a worker to send its first message."""

_CHECK_INTERVAL_S = 0.01
"""Seconds between two checks for arrivals."""

_STALL_FRACTION = 5.0
"""Divisor of the timeout: after that time without a turn, this process counts as suspended."""

_LINGER_S = 1.0

_MAX_HOPS = 8
_MAX_FORWARDED = 16 * WINDOW
"""Maximum parts queued for forwarding. Further parts are dropped, and retransmitted."""


class MailboxLike(Protocol):
    """The methods of `wingbeat.transport.messages.mailbox.Mailbox` that lanes use."""

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


class ReceivedMessage(Protocol):
    """A message received from a mailbox."""

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
    """A part that was sent and is not acknowledged yet."""

    kind: int
    payload: Any
    number: int = 0
    path: Path | None = None
    at: float = 0.0
    tries: int = 0


class _Lane:
    """Both directions between this worker and one incarnation of another worker."""

    def __init__(self, life: int, now: float, patience: float, begin: float) -> None:
        self.life, self._begin = life, begin
        self.out: RetransmitBuffer[_Part] = RetransmitBuffer()
        self.into: ReorderBuffer[tuple[int, Any]] = ReorderBuffer()
        self.heard = self.last_sent = now
        self.met = False
        self.patience = AdaptiveTimeout(patience, MAX_TIMEOUT_FACTOR * patience)
        self.delays = AdaptiveTimeout(
            0.0, MAX_TIMEOUT_FACTOR * patience
        )  # until a part is acknowledged

    @property
    def allowed(self) -> float:
        """Seconds of silence after which the worker is lost."""
        return self.patience.seconds if self.met else self._begin


class Lanes:
    """One worker's lanes to all others.

    ``lives`` are the incarnations of the workers; None: all are in their first one. ``joined`` is
    as in `RoutingTable`, and ``near`` are the workers that this worker's interfaces reach. A worker
    is `silent` after ``patience`` seconds or more, or after ``begin`` seconds without a first
    message. An interface is cut after ``cut`` seconds of silence or more. ``card`` returns the name
    of an interface in messages. ``say`` logs one line for each interface that is cut or restored.
    """

    def __init__(
        self,
        box: MailboxLike,
        me: int,
        workers: int,
        *,
        lives: Sequence[int] | None = None,
        joined: Sequence[Collection[int]] | None = None,
        patience: float = 10.0,
        begin: float = FIRST_MESSAGE_S,
        cut: float = PATH_TIMEOUT_S,
        name: Callable[[int], str] = "rank {}".format,
        card: Callable[[int], str] = "interface {}".format,
        say: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._box, self._me, self._clock = box, me, clock
        self._name, self._card, self._say, self.patience = name, card, say, patience
        lives = lives or (0,) * workers
        self._life, self._workers = lives[me], workers
        self._path_table, self._routes = PathTable(cut), RoutingTable(joined, me)
        self._resend_s = cut
        self.near = frozenset(range(workers) if joined is None else joined[me])
        self._cut: set[int] = set()  # interfaces reported as cut
        self._forward_queue: deque[tuple[ReceivedMessage, int]] = deque()
        self._last_check = self._last = clock()
        self._lanes = {
            worker: _Lane(lives[worker], self._last_check, patience, begin)
            for worker in range(workers)
            if worker != me
        }
        for worker in box.peers:
            self._path_table.add(Path(worker, each) for each in box.interfaces(worker))

    def forget(self, worker: int) -> None:
        """Stop sending to or through a lost worker."""
        self._lanes.pop(worker, None)
        self._path_table.forget(worker)
        self._routes.without(worker)

    def renew(self, worker: int, life: int) -> None:
        """Reset the lane of a rejoined worker, to which the mailbox is connected."""
        self.forget(worker)
        self._routes.again(worker)
        begin = MAX_TIMEOUT_FACTOR * self.patience
        self._lanes[worker] = _Lane(life, self._clock(), self.patience, begin)
        if worker in self._box.peers:
            self._path_table.add(Path(worker, each) for each in self._box.interfaces(worker))

    @property
    def known(self) -> tuple[int, ...]:
        """The workers that are not lost."""
        return tuple(self._lanes)

    def life(self, worker: int) -> int:
        """Return the incarnation of a worker; -1 if it is lost."""
        return self._lanes[worker].life if worker in self._lanes else -1

    def silent(self) -> dict[int, str]:
        """Return an explanation for each worker that was silent for too long."""
        now = self._clock()
        return {
            worker: f"gave no sign for {now - lane.heard:.1f} s"
            for worker, lane in self._lanes.items()
            if now - lane.heard > lane.allowed
        }

    @property
    def reached(self) -> set[int]:
        """The workers reachable directly, over an interface that is not cut."""
        return self._path_table.neighbours

    def heard_since(self, worker: int, when: float) -> bool:
        """Whether a message of a worker has arrived after ``when``, by this worker's clock."""
        lane = self._lanes.get(worker)
        return lane is None or lane.heard > when

    @property
    def largest(self) -> int:
        """Current maximum bytes of a part."""
        return min(self._box.largest, CHUNK, self._path_table.part)

    @property
    def busy(self) -> bool:
        """Whether parts are unacknowledged in either direction, or queued for forwarding."""
        return bool(self._forward_queue) or any(
            len(lane.out) or lane.into.unacknowledged for lane in self._lanes.values()
        )

    @property
    def linger(self) -> float:
        """Seconds for which this worker continues forwarding after it is done."""
        return _LINGER_S if self._routes.relays else 0.0

    @property
    def cut(self) -> bool:
        """Whether data may be stuck on a path that is cut."""
        return bool(self._path_table.cut)

    def send(self, worker: int, kind: int, payload: Any) -> bool:
        """Send a part; return whether the window had room, which is always true for a lost worker.

        ``payload`` must not change until it is acknowledged.
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
        """Post a part over the path with the shortest queue; return whether one had room."""
        kind_field = _pack_kind(part.kind, 0, self._life, lane.life)
        ids = (part.number % (1 << 32), lane.into.next % (1 << 32), self._me, worker)
        path = self._post_to(worker, kind_field, part.payload, ids)
        if path is None:
            return False
        now = self._clock()
        part.path, part.at = path, now
        part.tries += 1
        lane.into.acknowledged()
        lane.last_sent = now
        return True

    def _post_to(
        self, worker: int, kind_field: int, payload: Any, ids: Sequence[int]
    ) -> Path | None:
        for path in self._path_table.by_waiting(
            self._routes.next(worker, self._path_table.neighbours)
        ):
            peer, interface = path
            if payload and not self._path_table.room(interface):
                continue
            if self._box.room(peer, interface=interface, urgency=0) < MAX_HEADER_BYTES + len(
                payload
            ):
                continue
            try:
                sent = self._box.post(
                    peer, kind_field, payload, ids=ids, interface=interface, urgency=0
                )
            except PeerError:
                # The peer may be lost since the last check; the next check handles it.
                if peer in self._box.lost or peer in self._box.left:
                    continue
                raise
            self._path_table.posted(path, sent, self._clock())
            return path
        return None

    def take(self, message: ReceivedMessage) -> Iterator[tuple[int, int, Any]]:
        """Process a message; return sender, kind and payload of all parts that are now in order.

        A `ProtocolError` if no worker of this job sends such a message.
        """
        number, acked, source, target = message.ids
        kind, hops, mine, yours = _unpack_kind(message.kind)
        if max(source, target) >= self._workers or kind not in (HEARTBEAT, BEGIN, MORE):
            raise ProtocolError(f"kind {message.kind}, ids {message.ids}")
        if target != self._me:
            self._queue_forward(message, hops)
            return iter(())
        lane = self._lanes.get(source)
        if lane is None or (mine, yours) != (
            lane.life & _INCARNATION_MASK,
            self._life & _INCARNATION_MASK,
        ):
            return iter(())  # of a former incarnation
        now = self._clock()
        if lane.met:
            lane.patience.record_gap(now - lane.heard)
        lane.heard, lane.met = now, True
        oldest = next(iter(lane.out), None)
        if lane.out.acknowledge(acked) and oldest is not None and oldest.tries == 1:
            lane.delays.record_gap(now - oldest.at)
        if kind == HEARTBEAT:
            return iter(())
        items = lane.into.take(number, (kind, message.payload))
        return ((source, *item) for item in items)

    def _queue_forward(self, message: ReceivedMessage, hops: int) -> None:
        if hops < _MAX_HOPS and len(self._forward_queue) < _MAX_FORWARDED:
            self._forward_queue.append((message, hops + 1))

    def tick(self) -> None:
        """Forward, retransmit, and send heartbeats. Called regularly."""
        now = self._clock()
        if now - self._last > self.patience / _STALL_FRACTION:
            self._path_table.ignore_silence(now)
            for lane in self._lanes.values():
                lane.heard += now - self._last
        self._last = now
        self._forward()
        due = now >= self._last_check + _CHECK_INTERVAL_S
        if due:
            self._last_check = now
            self._check_paths(now)
        for worker, lane in self._lanes.items():
            if due and len(lane.out):
                self._retransmit(worker, lane, now)
            late = due and lane.into.unacknowledged and now >= lane.last_sent + _CHECK_INTERVAL_S
            if (
                late
                or lane.into.unacknowledged >= WINDOW // 4
                or now >= lane.last_sent + self.patience / HEARTBEATS_PER_TIMEOUT
            ):
                self._post(worker, lane, _Part(HEARTBEAT, b""))

    def _forward(self) -> None:
        for _ in range(len(self._forward_queue)):
            message, hops = self._forward_queue.popleft()
            if message.ids[3] not in self._lanes:
                continue
            kind, _, source, target = _unpack_kind(message.kind)
            kind_field = _pack_kind(kind, hops, source, target)
            if self._post_to(message.ids[3], kind_field, message.payload, message.ids) is None:
                self._forward_queue.append((message, hops))

    def _retransmit(self, worker: int, lane: _Lane, now: float) -> None:
        """Retransmit parts on a path that is cut, or possibly lost with a forwarding worker."""
        for part in lane.out:
            over = part.path is None or not self._path_table.up(part.path)
            relayed = part.path is not None and part.path.worker != worker
            wait = self._resend_s * 2 ** min(part.tries - 1, 4)
            late = relayed and now - part.at > max(wait, lane.delays.seconds)
            if (over or late) and not self._post(worker, lane, part):
                return

    def _check_paths(self, now: float) -> None:
        for (worker, interface), up in self._path_table.check(now):
            if up:
                continue
            if interface not in self._cut:
                self._cut.add(interface)
                seconds = self._path_table.silence(Path(worker, interface), now)
                self._say(
                    f"{self._name(self._me)}: {self._card(interface)} has not heard "
                    f"{self._name(worker)} for {seconds:.1f} s; its parts take other paths until "
                    "it does"
                )
        for interface in self._cut - {path.interface for path in self._path_table.cut}:
            self._cut.discard(interface)
            self._say(f"{self._name(self._me)}: {self._card(interface)} is used again")


_INCARNATION_MASK = 0xFFF
"""Incarnations are compared by their lowest 12 bits."""


def _pack_kind(kind: int, hops: int, source: int, target: int) -> int:
    """Return a message's kind field: kind, hops, and the incarnations of both ends."""
    return kind | hops << 4 | (source & _INCARNATION_MASK) << 8 | (target & _INCARNATION_MASK) << 20


def _unpack_kind(kind_field: int) -> tuple[int, int, int, int]:
    return (
        kind_field & 0xF,
        kind_field >> 4 & 0xF,
        kind_field >> 8 & _INCARNATION_MASK,
        kind_field >> 20 & _INCARNATION_MASK,
    )
