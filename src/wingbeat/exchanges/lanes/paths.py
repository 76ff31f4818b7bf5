"""Paths between workers: congestion windows, adaptive timeouts, path states and next hops."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

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


GAP_FACTOR = 8.0
"""The timeout in multiples of the longest recent gap."""

_GAP_DECAY = 0.95
"""Factor by which the weight of a long gap decreases with each later message."""


class AdaptiveTimeout:
    """A timeout derived from the gaps between messages, from ``least`` to ``most`` seconds."""

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, max(least, most)
        self._longest = 0.0

    def record_gap(self, seconds: float) -> None:
        """Record the gap before a message."""
        self._longest = max(seconds, self._longest * _GAP_DECAY)

    @property
    def seconds(self) -> float:
        """The current timeout."""
        return min(max(self._least, GAP_FACTOR * self._longest), self._most)


PATH_TIMEOUT_S = 2.0
"""Minimum seconds of silence after which a path counts as cut."""

_MAX_PATH_TIMEOUT_S = 30.0


class Path(NamedTuple):
    """A path to a worker over one of this worker's interfaces."""

    worker: int
    interface: int


class Sent(Protocol):
    """A posted message; see `wingbeat.transport.messages.frames.Posted`."""

    @property
    def arrived(self) -> bool: ...  # noqa: D102

    @property
    def size(self) -> int: ...  # noqa: D102


class _PathState:
    def __init__(self, least: float) -> None:
        self.up = True
        self.posted: deque[tuple[float, Sent]] = deque()
        self.bytes = 0
        self.last_arrival = float("-inf")
        self.timeout = AdaptiveTimeout(least, max(least, _MAX_PATH_TIMEOUT_S))

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
            self.timeout.record_gap(silence)
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

    def posted(self, path: Path, message: Sent, now: float) -> None:
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
