"""Reliable multipath streams between workers: ordered, over all interfaces that reach a worker.

A large message is split, and each part uses the interface with the fewest queued bytes. If no own
interface reaches the receiver, as for most workers in a BCube, a worker on a shortest path forwards
the part. Both ends number and acknowledge parts. Parts on a cut interface, or sent through a lost
worker, are retransmitted over another path, and duplicates are dropped.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from wingbeat.errors import PeerError
from wingbeat.observe.log import log
from wingbeat.transport.detector import AdaptiveTimeout, Deadlines
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Posted

if TYPE_CHECKING:
    from wingbeat.transport.messages.frames import Message
    from wingbeat.transport.messages.mailbox import Mailbox

WINDOW = 64
"""Maximum distance of a number from the oldest unacknowledged one."""

_WORD = 1 << 32

T = TypeVar("T")


class ProtocolError(Exception):
    """A number that no sender of this job uses."""


def unwrap(low: int, near: int) -> int:
    """Return the number closest to ``near`` whose lowest 32 bits are ``low``.

    >>> unwrap(1, 2**32 - 1) - 2**32
    1
    """
    return near + (low - near + _WORD // 2) % _WORD - _WORD // 2


class ReorderBuffer(Generic[T]):
    """The receiver's end.

    ``next`` is the next number in order. ``unacknowledged`` counts the items received since
    `acknowledged`, duplicates included.
    """

    def __init__(self) -> None:
        self.next = 0
        self.unacknowledged = 0
        self._early: dict[int, T] = {}

    def receive(self, low: int, item: T) -> Iterator[T]:
        """Add an item by the lowest 32 bits of its number; return all items now in order.

        A `ProtocolError` if the number is beyond the window, which bounds the memory.
        """
        number = unwrap(low, self.next)
        if number >= self.next + WINDOW:
            raise ProtocolError(f"number {number} is beyond the window at {self.next}")
        self.unacknowledged += 1
        if number >= self.next:
            self._early.setdefault(number, item)
        return self._in_order()

    def _in_order(self) -> Iterator[T]:
        while self.next in self._early:
            item = self._early.pop(self.next)
            self.next += 1
            yield item

    def acknowledged(self) -> int:
        """Return the lowest 32 bits of `next`, to be sent as acknowledgement."""
        self.unacknowledged = 0
        return self.next % _WORD


class RetransmitBuffer(Generic[T]):
    """The sender's end; ``next`` is the number of the next item."""

    def __init__(self) -> None:
        self.next = 0
        self._kept: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[T]:
        """Yield the unacknowledged items, oldest first."""
        return iter(self._kept)

    @property
    def open(self) -> bool:
        """Whether the window has room for another item."""
        return len(self._kept) < WINDOW

    def add(self, item: T) -> int:
        """Store an item; return the lowest 32 bits of its number."""
        self._kept.append(item)
        self.next += 1
        return (self.next - 1) % _WORD

    def acknowledge(self, low: int) -> bool:
        """Process an acknowledgement of all items before a number; return whether it was new.

        A `ProtocolError` if the items were never sent.
        """
        oldest = self.next - len(self._kept)
        number = unwrap(low, oldest)
        if number > self.next:
            raise ProtocolError(f"{number} items were acknowledged, but only {self.next} were sent")
        for _ in range(oldest, number):
            self._kept.popleft()
        return number > oldest


TARGET_DELAY_S = 0.25
"""Target seconds for a part to arrive, as heartbeats queue behind it."""

INITIAL_BYTES, MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 15, 1 << 26
"""Initial, minimum and maximum bytes of a window."""


class CongestionWindow:
    """The congestion window of one interface, as LEDBAT (RFC 6817).

    It grows while parts arrive quickly and shrinks when they queue. The delay is measured up to the
    next worker's process, so it includes other traffic on the link. ``nbytes`` may be in flight.
    """

    def __init__(self) -> None:
        self.nbytes = INITIAL_BYTES
        self._shrunk = float("-inf")

    def arrived(self, nbytes: int, seconds: float, now: float, *, full: bool) -> None:
        """Update the window after an arrival that took ``seconds``; it grows only if ``full``."""
        if seconds < TARGET_DELAY_S:
            if full:
                self.nbytes = min(MAX_BYTES, self.nbytes + nbytes)
        elif seconds > 2 * TARGET_DELAY_S and now - self._shrunk > seconds:
            self.nbytes = max(MIN_BYTES, int(self.nbytes * TARGET_DELAY_S / seconds))
            self._shrunk = now

    @property
    def part(self) -> int:
        """Maximum bytes of a part, so that several are in flight."""
        return max(1 << 14, self.nbytes // 4)


PATH_TIMEOUT_S = 2.0
"""Minimum seconds of silence after which a path counts as cut."""

_MAX_PATH_TIMEOUT_S = 30.0


class Path(NamedTuple):
    """A path to a worker over one of this worker's interfaces."""

    worker: int
    interface: int


class _PathState:
    def __init__(self, least: float) -> None:
        self.up = True
        self.posted: deque[tuple[float, Posted]] = deque()
        self.bytes = 0
        self.last_arrival = float("-inf")
        self.timeout = AdaptiveTimeout(least, _MAX_PATH_TIMEOUT_S)

    def silence(self, now: float) -> float:
        """Seconds since an arrival was due."""
        return now - max(self.posted[0][0], self.last_arrival) if self.posted else 0.0

    def check(self, now: float) -> tuple[int, float]:
        """Remove arrived messages; return their bytes and the duration of the last one."""
        found, seconds, silence = 0, 0.0, self.silence(now)
        while self.posted and self.posted[0][1].arrived:
            begun, message = self.posted.popleft()
            found, seconds = found + message.size, now - begun
        if found:
            self.timeout.record(silence)
            self.last_arrival = now
            self.bytes -= found
        return found, seconds


class PathTable:
    """All paths of one worker; a path is cut after ``least`` seconds of silence or more."""

    def __init__(self, least: float = PATH_TIMEOUT_S) -> None:
        self._least = least
        self._states: dict[Path, _PathState] = {}
        self._waiting: Counter[int] = Counter()  # by interface, bytes on paths that are up
        self._windows: defaultdict[int, CongestionWindow] = defaultdict(CongestionWindow)

    def add(self, paths: Iterable[Path]) -> None:
        """Add paths."""
        for path in paths:
            self._states[path] = _PathState(self._least)

    def forget(self, worker: int) -> None:
        """Remove the paths to a worker."""
        for path in [path for path in self._states if path.worker == worker]:
            state = self._states.pop(path)
            self._waiting[path.interface] -= state.bytes * state.up

    def posted(self, path: Path, message: Posted, now: float) -> None:
        """Record a message on a path that is up."""
        state = self._states[path]
        state.posted.append((now, message))
        state.bytes += message.size
        self._waiting[path.interface] += message.size

    def check(self, now: float) -> Iterator[tuple[Path, bool]]:
        """Yield each path that was cut or restored since the last check, and whether it is up."""
        for path, state in self._states.items():
            found, seconds = state.check(now)
            if state.up:
                if found:
                    window = self._windows[path.interface]
                    full = 2 * self._waiting[path.interface] >= window.nbytes
                    window.arrived(found, seconds, now, full=full)
                self._waiting[path.interface] -= found
                if state.silence(now) > state.timeout.seconds:
                    state.up = False
                    self._waiting[path.interface] -= state.bytes
                    yield path, False
            elif found:
                state.up = True
                self._waiting[path.interface] += state.bytes
                yield path, True

    def room(self, interface: int) -> bool:
        """Whether one more part of any size may be sent on an interface.

        The size does not matter, as small parts could otherwise delay a large one forever.
        """
        return self._waiting[interface] < self._windows[interface].nbytes

    @property
    def part(self) -> int:
        """Maximum bytes of a part on any interface."""
        used = {path.interface for path in self._states}
        return min((self._windows[interface].part for interface in used), default=1 << 14)

    def ignore_silence(self, now: float) -> None:
        """Measure silence from ``now``: this process was suspended."""
        for state in self._states.values():
            state.last_arrival = now

    def silence(self, path: Path, now: float) -> float:
        """Return the seconds since an arrival was due."""
        return self._states[path].silence(now)

    def up(self, path: Path) -> bool:
        """Whether a path exists and is not cut."""
        state = self._states.get(path)
        return state is not None and state.up

    @property
    def cut(self) -> list[Path]:
        """The paths that are cut."""
        return [path for path, state in self._states.items() if not state.up]

    @property
    def neighbours(self) -> set[int]:
        """The workers that are reachable directly."""
        return {path.worker for path, state in self._states.items() if state.up}

    def by_waiting(self, workers: Collection[int]) -> list[Path]:
        """Return the paths to these workers, the one with the fewest queued bytes first."""
        paths = [w for w, state in self._states.items() if state.up and w.worker in workers]
        return sorted(paths, key=lambda path: (self._waiting[path.interface], path))


class RoutingTable:
    """The shortest paths between live workers that are not all connected directly, as in a BCube.

    ``joined`` lists, by worker, the workers that its interfaces reach; None: all reach all.
    """

    def __init__(self, joined: Sequence[Collection[int]] | None, me: int) -> None:
        self._joined, self._me = joined, me
        self._gone: set[int] = set()
        self._known: dict[int, dict[int, int]] = {}

    @property
    def relays(self) -> bool:
        """Whether some workers are reachable only through others."""
        return self._joined is not None

    def without(self, worker: int) -> None:
        """Stop routing through this worker."""
        self._gone.add(worker)
        self._known.clear()

    def again(self, worker: int) -> None:
        """Route through this worker again."""
        self._gone.discard(worker)
        self._known.clear()

    def next(self, to: int, neighbours: Collection[int]) -> list[int]:
        """Return those of ``neighbours`` with the fewest hops to ``to``; may be empty."""
        if to in neighbours:
            return [to]
        if self._joined is None:  # any neighbour may reach it over another interface
            return list(neighbours)
        hops = self._known.get(to)
        if hops is None:
            hops = self._known[to] = self._hops(to, self._joined)
        least = min((hops[n] for n in neighbours if n in hops), default=-1)
        return [n for n in neighbours if hops.get(n, -2) == least]

    def _hops(self, to: int, joined: Sequence[Collection[int]]) -> dict[int, int]:
        """Return the number of hops from each worker to ``to``, not through this worker."""
        out, queue = {to: 0}, deque([to])
        while queue:
            at = queue.popleft()
            for worker in joined[at]:
                if worker not in out and worker not in self._gone and worker != self._me:
                    out[worker] = out[at] + 1
                    queue.append(worker)
        return out


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

    def __init__(self, incarnation: int, now: float, timeout: float) -> None:
        self.incarnation = incarnation
        self.out: RetransmitBuffer[_Part] = RetransmitBuffer()
        self.into: ReorderBuffer[tuple[int, Any]] = ReorderBuffer()
        self.sent_at = now
        self.delays = AdaptiveTimeout(0.0, MAX_TIMEOUT_FACTOR * timeout)  # of acknowledgements


class Lanes:
    """One worker's lanes to all others.

    ``incarnations`` are those of the workers; None: all are in their first one. ``joined`` is as in
    `RoutingTable`, and ``near`` are the workers that this worker's interfaces reach. A worker is
    `silent` after ``timeout`` seconds or more, or after ``begin`` seconds without a first message.
    An interface is cut after ``cut`` seconds of silence or more. ``interface_name`` returns its
    name in messages. ``warn`` logs one line for each interface that is cut or restored.
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
        name: Callable[[int], str] = "rank {}".format,
        interface_name: Callable[[int], str] = "interface {}".format,
        warn: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._box, self._me, self._clock = box, me, clock
        self._name, self._interface_name, self._warn = name, interface_name, warn
        self.timeout = timeout
        incarnations = incarnations or (0,) * workers
        self._incarnation, self._workers = incarnations[me], workers
        self._path_table, self._routes = PathTable(cut), RoutingTable(joined, me)
        self._resend_s = cut
        self.near = frozenset(range(workers) if joined is None else joined[me])
        self._cut: set[int] = set()  # interfaces reported as cut
        self._forward_queue: deque[tuple[Message, int]] = deque()
        self._last_check = self._last = clock()
        self._lanes = {
            worker: _Lane(incarnations[worker], self._last_check, timeout)
            for worker in range(workers)
            if worker != me
        }
        self._deadlines = Deadlines(timeout, MAX_TIMEOUT_FACTOR * timeout)
        for worker in self._lanes:
            self._deadlines.start(worker, self._last_check, begin)
        for worker in box.peers:
            self._path_table.add(Path(worker, each) for each in box.interfaces(worker))

    def forget(self, worker: int) -> None:
        """Stop sending to or through a lost worker."""
        self._lanes.pop(worker, None)
        self._deadlines.forget(worker)
        self._path_table.forget(worker)
        self._routes.without(worker)

    def renew(self, worker: int, incarnation: int) -> None:
        """Reset the lane of a rejoined worker, to which the mailbox is connected."""
        self.forget(worker)
        self._routes.again(worker)
        now = self._clock()
        self._lanes[worker] = _Lane(incarnation, now, self.timeout)
        self._deadlines.start(worker, now, MAX_TIMEOUT_FACTOR * self.timeout)
        if worker in self._box.peers:
            self._path_table.add(Path(worker, each) for each in self._box.interfaces(worker))

    @property
    def known(self) -> tuple[int, ...]:
        """The workers that are not lost."""
        return tuple(self._lanes)

    def incarnation(self, worker: int) -> int:
        """Return the incarnation of a worker; -1 if it is lost."""
        return self._lanes[worker].incarnation if worker in self._lanes else -1

    def silent(self) -> dict[int, str]:
        """Return an explanation for each worker that was silent for too long."""
        overdue = self._deadlines.overdue(self._clock())
        return {worker: f"has been silent for {waited:.1f} s" for worker, waited in overdue.items()}

    @property
    def reached(self) -> set[int]:
        """The workers reachable directly, over an interface that is not cut."""
        return self._path_table.neighbours

    def has_sent_since(self, worker: int, when: float) -> bool:
        """Whether a message of a worker has arrived after ``when``, by this worker's clock."""
        return worker not in self._lanes or self._deadlines.since(worker) > when

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
        kind_field = _pack_kind(part.kind, 0, self._incarnation, lane.incarnation)
        ids = (part.number % (1 << 32), lane.into.next % (1 << 32), self._me, worker)
        path = self._post_to(worker, kind_field, part.payload, ids)
        if path is None:
            return False
        now = self._clock()
        part.path, part.at = path, now
        part.tries += 1
        lane.into.acknowledged()
        lane.sent_at = now
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

    def receive(self, message: Message) -> Iterator[tuple[int, int, Any]]:
        """Process a message; return sender, kind and payload of all parts that are now in order.

        A `ProtocolError` if no worker of this job sends such a message.
        """
        number, acked, source, target = message.ids
        kind, hops, mine, yours = _unpack_kind(message.kind)
        if max(source, target) >= self._workers or kind not in (HEARTBEAT, BEGIN, MORE):
            raise ProtocolError(f"kind {message.kind}, ids {message.ids}")
        if target != self._me:
            if hops < _MAX_HOPS and len(self._forward_queue) < _MAX_FORWARDED:
                self._forward_queue.append((message, hops + 1))
            return iter(())
        lane = self._lanes.get(source)
        if lane is None or (mine, yours) != (
            lane.incarnation & _INCARNATION_MASK,
            self._incarnation & _INCARNATION_MASK,
        ):
            return iter(())  # of a former incarnation
        now = self._clock()
        self._deadlines.arrived(source, now)
        self._deadlines.start(source, now)
        oldest = next(iter(lane.out), None)
        if lane.out.acknowledge(acked) and oldest is not None and oldest.tries == 1:
            lane.delays.record(now - oldest.at)
        if kind == HEARTBEAT:
            return iter(())
        items = lane.into.receive(number, (kind, message.payload))
        return ((source, *item) for item in items)

    def tick(self) -> None:
        """Forward, retransmit, and send heartbeats. Called regularly."""
        now = self._clock()
        if now - self._last > self.timeout / _STALL_FRACTION:
            self._path_table.ignore_silence(now)
            self._deadlines.postpone(now - self._last)
        self._last = now
        self._forward()
        due = now >= self._last_check + _CHECK_INTERVAL_S
        if due:
            self._last_check = now
            self._check_paths(now)
        for worker, lane in self._lanes.items():
            if due and len(lane.out):
                self._retransmit(worker, lane, now)
            late = due and lane.into.unacknowledged and now >= lane.sent_at + _CHECK_INTERVAL_S
            if (
                late
                or lane.into.unacknowledged >= WINDOW // 4
                or now >= lane.sent_at + self.timeout / HEARTBEATS_PER_TIMEOUT
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
                self._warn(
                    f"{self._name(self._me)}: {self._interface_name(interface)} has received "
                    f"nothing from {self._name(worker)} for {seconds:.1f} s; its parts take other "
                    "paths until it does"
                )
        for interface in self._cut - {path.interface for path in self._path_table.cut}:
            self._cut.discard(interface)
            self._warn(f"{self._name(self._me)}: {self._interface_name(interface)} is used again")


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
