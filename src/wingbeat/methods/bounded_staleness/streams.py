"""Ordered streams of parts between workers, over all interfaces that reach a worker.

The mailbox delivers in order, and reports arrival, over one interface to a worker that the
interface reaches. A stream uses all interfaces, each part the one over which it arrives earliest.
If none reaches the receiver, as for most workers in a BCube, a worker on a shortest path forwards
the part, and the receiver acknowledges it. The receiver orders parts by their numbers, and drops
duplicates: parts on a cut interface, or sent through a lost worker, are sent again over another
path.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.paths import (
    PATH_TIMEOUT_S,
    Path,
    PathTable,
    RoutingTable,
)
from wingbeat.observe.log import log_event
from wingbeat.schema import MalformedMessage
from wingbeat.transport.detector import AdaptiveTimeout, Deadlines
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from wingbeat.transport.messages.frames import Message, Posted
    from wingbeat.transport.messages.mailbox import Mailbox

HEARTBEAT, BEGIN, MORE = 1, 2, 3
"""Kinds of messages: a sign of life; first part of a message; further parts."""

CHUNK = 1 << 18
"""Bytes of a part, so that a queue on one interface drains quickly."""

WINDOW = 64
"""Maximum distance of a number from the oldest one that has not arrived."""

HEARTBEATS_PER_TIMEOUT = 20
"""Heartbeats of an idle worker in the time after which it is lost."""

MAX_TIMEOUT_FACTOR = 6.0
"""Maximum of an adaptive timeout, in multiples of its minimum."""

FIRST_MESSAGE_S = 300.0
"""Seconds for a worker to send its first message."""

_CHECK_INTERVAL_S = 0.01
"""Seconds between two checks for arrivals."""

_ACKNOWLEDGE_S = 0.1
"""Seconds in which a part may take along the acknowledgement of forwarded ones."""

_STALL_FRACTION = 5.0
"""Divisor of the timeout: after that time without a turn, this process counts as suspended."""

_LINGER_S = 1.0

_MAX_HOPS = 8
_MAX_FORWARDED = 16 * WINDOW
"""Maximum parts queued for forwarding. Further parts are dropped, and sent again."""

_WORD, _HALF = 1 << 32, 1 << 31
"""Messages contain the lowest 32 bits of a number."""


@dataclass(slots=True)
class _Part:
    """A part that was sent, lastly over ``path``, and may not have arrived."""

    kind: int
    payload: Any
    number: int
    path: Path
    posted: Posted
    at: float
    tries: int = 1

    def reached(self, worker: int) -> bool:
        """Whether the part has arrived at this worker without being forwarded."""
        return self.posted.arrived and self.path.worker == worker


class Stream:
    """Both directions between this worker and one incarnation of another worker.

    ``out`` has the parts that may not have arrived, oldest first. ``forwarded`` counts the parts
    that other workers have forwarded since this worker last acknowledged some.
    """

    def __init__(self, incarnation: int, now: float, timeout: float) -> None:
        self.incarnation = incarnation
        self.out: deque[_Part] = deque()
        self.next_out = self.next_in = self.forwarded = 0
        self._early: dict[int, tuple[int, Any]] = {}
        self.sent_at = now
        self.delays = AdaptiveTimeout(0.0, MAX_TIMEOUT_FACTOR * timeout)  # of acknowledgements

    def receive(self, low: int, kind: int, payload: Any) -> Iterator[tuple[int, Any]]:
        """Add a part by the lowest 32 bits of its number; yield all parts now in order.

        A `MalformedMessage` if the number is beyond the window, which bounds the memory.
        """
        ahead = (low - self.next_in) % _WORD
        if WINDOW <= ahead < _HALF:
            number = self.next_in + ahead
            raise MalformedMessage(f"number {number} is beyond the window at {self.next_in}")
        if ahead < WINDOW:
            self._early.setdefault(self.next_in + ahead, (kind, payload))
        while self.next_in in self._early:
            self.next_in += 1
            yield self._early.pop(self.next_in - 1)

    def acknowledge(self, low: int, now: float) -> None:
        """Release all parts before a number; a `MalformedMessage` if they were never sent."""
        count = (low - self.next_out + len(self.out)) % _WORD
        if len(self.out) < count < _HALF:
            sent = self.next_out
            raise MalformedMessage(f"{sent - len(self.out) + count} parts arrived of {sent} sent")
        if not 0 < count < _HALF:
            return
        if self.out[0].tries == 1:
            self.delays.record(now - self.out[0].at)
        for _ in range(count):
            self.out.popleft()

    def release_arrived(self, worker: int) -> None:
        """Release the oldest parts if they have arrived at the worker without being forwarded."""
        while self.out and self.out[0].reached(worker):
            self.out.popleft()


class Streams:
    """One worker's streams to all others.

    ``incarnations`` are those of the workers; None: all are in their first one. ``joined`` is as in
    `RoutingTable`, and ``near`` are the workers that this worker's interfaces reach. A worker is
    `silent` after ``timeout`` seconds or more, or after ``begin`` seconds without a first message.
    An interface is cut after ``cut`` seconds of silence or more. ``interface_name`` returns its
    name in messages. ``record`` logs an event and its text when an interface is cut or restored.
    """

    def __init__(
        self,
        box: Mailbox,
        me: int,
        workers: int,
        *,
        incarnations: Sequence[int] | None = None,
        joined: Sequence[Collection[int]] | None = None,
        timeout: float = 10.0,
        begin: float = FIRST_MESSAGE_S,
        cut: float = PATH_TIMEOUT_S,
        interface_name: Callable[[int], str] = "interface {}".format,
        name: Callable[[int], str] = "rank {}".format,
        record: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._box, self._me, self._clock = box, me, clock
        self._interface_name, self._name = interface_name, name
        self._record = record or functools.partial(log_event, rank=me)
        self.timeout = timeout
        incarnations = incarnations or (0,) * workers
        self._incarnation, self._workers = incarnations[me], workers
        self._paths, self._routes = PathTable(cut), RoutingTable(joined, me)
        self._resend_s = cut
        self.near = frozenset(range(workers) if joined is None else joined[me])
        self._cut: set[int] = set()  # interfaces reported as cut
        self._forward_queue: deque[tuple[Message, int]] = deque()
        self._last_check = self._last = clock()
        self._streams = {
            worker: Stream(incarnations[worker], self._last_check, timeout)
            for worker in range(workers)
            if worker != me
        }
        self._deadlines = Deadlines(timeout, MAX_TIMEOUT_FACTOR * timeout)
        for worker in self._streams:
            self._deadlines.start(worker, self._last_check, begin)
        for worker in box.peers:
            self._paths.add(worker, box.interfaces(worker))

    def forget(self, worker: int) -> None:
        """Stop sending to or through a lost worker."""
        self._streams.pop(worker, None)
        self._deadlines.forget(worker)
        self._paths.forget(worker)
        self._routes.without(worker)

    def renew(self, worker: int, incarnation: int) -> None:
        """Reset the stream of a rejoined worker, to which the mailbox is connected."""
        self.forget(worker)
        self._routes.again(worker)
        now = self._clock()
        self._streams[worker] = Stream(incarnation, now, self.timeout)
        self._deadlines.start(worker, now, MAX_TIMEOUT_FACTOR * self.timeout)
        if worker in self._box.peers:
            self._paths.add(worker, self._box.interfaces(worker))

    @property
    def known(self) -> tuple[int, ...]:
        """The workers that are not lost."""
        return tuple(self._streams)

    def incarnation(self, worker: int) -> int:
        """Return the incarnation of a worker; -1 if it is lost."""
        return self._streams[worker].incarnation if worker in self._streams else -1

    def silent(self) -> dict[int, str]:
        """Return an explanation for each worker that was silent for too long."""
        overdue = self._deadlines.overdue(self._clock())
        return {worker: f"has been silent for {waited:.1f} s" for worker, waited in overdue.items()}

    @property
    def reached(self) -> set[int]:
        """The workers reachable directly, over an interface that is not cut."""
        return self._paths.neighbours

    def has_sent_since(self, worker: int, when: float) -> bool:
        """Whether a message of a worker has arrived after ``when``, by this worker's clock."""
        return worker not in self._streams or self._deadlines.since(worker) > when

    @property
    def largest(self) -> int:
        """Current maximum bytes of a part."""
        return min(self._box.largest, CHUNK, self._paths.part)

    @property
    def busy(self) -> bool:
        """Whether parts may not have arrived, or are queued for forwarding."""
        return bool(self._forward_queue) or any(
            stream.out or stream.forwarded for stream in self._streams.values()
        )

    @property
    def linger(self) -> float:
        """Seconds for which this worker continues forwarding after it is done."""
        return _LINGER_S if self._routes.relays else 0.0

    @property
    def cut(self) -> bool:
        """Whether data may be stuck on a path that is cut."""
        return bool(self._paths.cut)

    def send(self, worker: int, kind: int, payload: Any) -> bool:
        """Send a part; return whether the window had room, which is always true for a lost worker.

        ``payload`` must not change until it has arrived.
        """
        stream = self._streams.get(worker)
        if stream is None:
            return True
        stream.release_arrived(worker)
        if len(stream.out) >= WINDOW:
            return False
        now = self._clock()
        posted = self._post(worker, stream, kind, stream.next_out, payload, now)
        if posted is None:
            return False
        stream.out.append(_Part(kind, payload, stream.next_out, *posted, now))
        stream.next_out += 1
        return True

    def _post(
        self, worker: int, stream: Stream, kind: int, number: int, payload: Any, now: float
    ) -> tuple[Path, Posted] | None:
        """Post a part over the path that takes it there first; return None if none has room."""
        kind_field = _pack_kind(kind, 0, self._incarnation, stream.incarnation)
        ids = (number % _WORD, stream.next_in % _WORD, self._me, worker)
        posted = self._post_to(worker, kind_field, payload, ids, now)
        if posted is not None:
            stream.forwarded, stream.sent_at = 0, now
        return posted

    def _post_to(
        self, worker: int, kind_field: int, payload: Any, ids: Sequence[int], now: float
    ) -> tuple[Path, Posted] | None:
        paths, box, size = self._paths, self._box, MAX_HEADER_BYTES + len(payload)
        for path in paths.to(self._routes.next(worker, paths.neighbours), len(payload)):
            peer, interface = path
            if payload and not paths.room(interface):
                continue
            if box.room(peer, interface=interface, urgency=0) < size:
                continue
            try:
                sent = box.post(peer, kind_field, payload, ids=ids, interface=interface, urgency=0)
            except PeerError:
                # The peer may be lost since the last check; the next check handles it.
                if peer in box.lost or peer in box.left:
                    continue
                raise
            paths.posted(path, sent, now)
            return path, sent
        return None

    def receive(self, message: Message) -> Iterator[tuple[int, int, Any]]:
        """Process a message; yield sender, kind and payload of all parts that are now in order.

        A `MalformedMessage` if no worker of this job sends such a message.
        """
        number, acknowledged, source, target = message.ids
        kind, hops, mine, yours = _unpack_kind(message.kind)
        if max(source, target) >= self._workers or kind not in (HEARTBEAT, BEGIN, MORE):
            raise MalformedMessage(f"kind {message.kind}, ids {message.ids}")
        if target != self._me:
            if hops < _MAX_HOPS and len(self._forward_queue) < _MAX_FORWARDED:
                self._forward_queue.append((message, hops + 1))
            return
        stream = self._streams.get(source)
        if stream is None or (mine, yours) != (
            stream.incarnation & _INCARNATION_MASK,
            self._incarnation & _INCARNATION_MASK,
        ):
            return  # of a former incarnation
        now = self._clock()
        self._deadlines.arrived(source, now)
        self._deadlines.start(source, now)
        stream.acknowledge(acknowledged, now)
        if kind != HEARTBEAT:
            stream.forwarded += message.peer != source
            for part in stream.receive(number, kind, message.payload):
                yield source, *part

    def tick(self) -> None:
        """Forward, send again, and send heartbeats. Called regularly."""
        now = self._clock()
        if now - self._last > self.timeout / _STALL_FRACTION:
            self._paths.ignore_silence(now)
            self._deadlines.postpone(now - self._last)
        self._last = now
        self._forward(now)
        due = now >= self._last_check + _CHECK_INTERVAL_S
        if due:
            self._last_check = now
            self._check_paths(now)
        for worker, stream in self._streams.items():
            if due and stream.out:
                self._send_again(worker, stream, now)
            if (
                now >= stream.sent_at + self.timeout / HEARTBEATS_PER_TIMEOUT
                or stream.forwarded >= WINDOW // 4
                or (stream.forwarded and now >= stream.sent_at + _ACKNOWLEDGE_S)
            ):
                self._post(worker, stream, HEARTBEAT, stream.next_out, b"", now)

    def _forward(self, now: float) -> None:
        for _ in range(len(self._forward_queue)):
            message, hops = self._forward_queue.popleft()
            target = message.ids[3]
            if target not in self._streams:
                continue
            kind, _, *incarnations = _unpack_kind(message.kind)
            kind_field = _pack_kind(kind, hops, *incarnations)
            if self._post_to(target, kind_field, message.payload, message.ids, now) is None:
                self._forward_queue.append((message, hops))

    def _send_again(self, worker: int, stream: Stream, now: float) -> None:
        """Send parts again that are on a cut path, or possibly lost with a forwarding worker."""
        stream.release_arrived(worker)
        for part in stream.out:
            wait = max(self._resend_s * 2 ** min(part.tries - 1, 4), stream.delays.seconds)
            late = part.path.worker != worker and now - part.at > wait
            if late or not (self._paths.up(part.path) or part.reached(worker)):
                posted = self._post(worker, stream, part.kind, part.number, part.payload, now)
                if posted is None:
                    return
                (part.path, part.posted), part.at = posted, now
                part.tries += 1

    def _check_paths(self, now: float) -> None:
        for (worker, interface), seconds in self._paths.check(now):
            if interface not in self._cut:
                self._cut.add(interface)
                self._record(
                    "path-cut",
                    f"{self._name(self._me)}: {self._interface_name(interface)} has received "
                    f"nothing from {self._name(worker)} for {seconds:.1f} s; its parts take other "
                    "paths until it does",
                )
        for interface in self._cut - self._paths.cut:
            self._cut.discard(interface)
            self._record(
                "path-restored",
                f"{self._name(self._me)}: {self._interface_name(interface)} is used again",
            )


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
