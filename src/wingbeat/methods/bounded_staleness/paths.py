"""Paths to the workers that this worker's interfaces reach, and routes through them to the others.

The mailbox detects neither a slow nor a cut interface, as it delivers over each one alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.transport.detector import AdaptiveTimeout

if TYPE_CHECKING:
    from wingbeat.transport.messages.frames import Posted

TARGET_DELAY_S = 0.25
"""Target seconds for a part to arrive, as heartbeats queue behind it."""

INITIAL_RATE = 1 << 18
"""Bytes per second of an interface, before any are measured."""

MIN_BYTES = 1 << 15
"""Minimum bytes that may be queued on an interface."""

_WEIGHT = 0.2
"""Weight of a measured rate."""


class Interface:
    """The queue of one interface: ``waiting`` bytes, which arrive at about ``rate`` per second.

    Bytes arrive at the next worker's process, so the rate includes other traffic on the link.
    """

    def __init__(self) -> None:
        self.waiting, self.rate = 0, float(INITIAL_RATE)
        self._since = 0.0  # when the queue was empty, or bytes arrived

    @property
    def limit(self) -> int:
        """Bytes that may be queued."""
        return max(MIN_BYTES, int(self.rate * TARGET_DELAY_S))

    def posted(self, nbytes: int, now: float) -> None:
        """Record queued bytes."""
        if not self.waiting:
            self._since = now
        self.waiting += nbytes

    def arrived(self, nbytes: int, now: float) -> None:
        """Record arrivals and measure the rate; it decreases only if many bytes were queued."""
        if nbytes and now > self._since:
            rate = nbytes / (now - self._since)
            if rate > self.rate or 2 * self.waiting > self.limit:
                self.rate += _WEIGHT * (rate - self.rate)
            self._since = now
        self.waiting -= nbytes


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

    def remove_arrived(self, now: float) -> int:
        """Remove arrived messages; return their bytes."""
        found, silence = 0, self.silence(now)
        while self.posted and self.posted[0][1].arrived:
            found += self.posted.popleft()[1].size
        if found:
            self.timeout.record(silence)
            self.last_arrival = now
            self.bytes -= found
        return found


class PathTable:
    """All paths of one worker; a path is cut after ``least`` seconds of silence or more.

    ``neighbours`` are the workers with a path that is not cut.
    """

    def __init__(self, least: float = PATH_TIMEOUT_S) -> None:
        self._least = least
        self._states: dict[Path, _PathState] = {}
        self._interfaces: defaultdict[int, Interface] = defaultdict(Interface)
        self.neighbours: set[int] = set()

    def add(self, worker: int, interfaces: Iterable[int]) -> None:
        """Add the paths to a worker."""
        for interface in interfaces:
            self._states[Path(worker, interface)] = _PathState(self._least)
            self.neighbours.add(worker)

    def forget(self, worker: int) -> None:
        """Remove the paths to a worker."""
        for path in [path for path in self._states if path.worker == worker]:
            state = self._states.pop(path)
            self._interfaces[path.interface].waiting -= state.bytes * state.up
        self.neighbours.discard(worker)

    def posted(self, path: Path, message: Posted, now: float) -> None:
        """Record a message on a path that is up."""
        state = self._states[path]
        state.posted.append((now, message))
        state.bytes += message.size
        self._interfaces[path.interface].posted(message.size, now)

    def check(self, now: float) -> list[tuple[Path, float]]:
        """Remove arrived messages; return the newly cut paths with the seconds of silence."""
        cut, arrived = [], Counter[int]()
        for path, state in self._states.items():
            found, silence = state.remove_arrived(now), state.silence(now)
            interface = self._interfaces[path.interface]
            if not state.up:
                state.up = bool(found)
                interface.waiting += state.bytes * state.up
                continue
            arrived[path.interface] += found
            if silence > state.timeout.seconds:
                state.up = False
                interface.waiting -= state.bytes
                cut.append((path, silence))
        for number, nbytes in arrived.items():
            self._interfaces[number].arrived(nbytes, now)
        self.neighbours = {path.worker for path, state in self._states.items() if state.up}
        return cut

    def room(self, interface: int) -> bool:
        """Whether one more part of any size may be sent on an interface.

        The size does not matter, as small parts could otherwise delay a large one forever.
        """
        queue = self._interfaces[interface]
        return queue.waiting < queue.limit

    @property
    def part(self) -> int:
        """Maximum bytes of a part on any interface, so that several are in flight."""
        limits = [interface.limit // 4 for interface in self._interfaces.values()]
        return max(1 << 14, min(limits, default=0))

    def ignore_silence(self, now: float) -> None:
        """Measure silence from ``now``: this process was suspended."""
        for state in self._states.values():
            state.last_arrival = now

    def up(self, path: Path) -> bool:
        """Whether a path exists and is not cut."""
        state = self._states.get(path)
        return state is not None and state.up

    @property
    def cut(self) -> set[int]:
        """The interfaces of paths that are cut."""
        return {path.interface for path, state in self._states.items() if not state.up}

    def to(self, workers: Collection[int], nbytes: int) -> list[Path]:
        """Return the paths to these workers, first the one on which a part arrives earliest."""

        def seconds(path: Path) -> tuple[float, Path]:
            queue = self._interfaces[path.interface]
            return (queue.waiting + nbytes) / queue.rate, path

        paths = (
            path for path, state in self._states.items() if state.up and path.worker in workers
        )
        return sorted(paths, key=seconds)


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

    def next(self, to: int, neighbours: Collection[int]) -> Collection[int]:
        """Return those of ``neighbours`` with the fewest hops to ``to``; may be empty."""
        if to in neighbours:
            return (to,)
        if self._joined is None:  # any neighbour may reach it over another interface
            return neighbours
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
