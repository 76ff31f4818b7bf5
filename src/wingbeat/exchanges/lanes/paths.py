"""Paths from worker to worker: congestion windows, adaptive timeouts, and next hops."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

TARGET_S = 0.25
"""Seconds that a part may take to arrive: signs of life wait behind it."""

START, LEAST, MOST = 1 << 16, 1 << 15, 1 << 26
"""Bytes at first, at least and at most."""


class Window:
    """Grows while parts arrive soon, and shrinks where they wait, as LEDBAT's does (RFC 6817).

    Links that are slow or shared are found out by how long parts take: to the next worker's hands,
    so another's traffic on the way counts as well.

    Attributes:
        nbytes: that may be under way.
    """

    def __init__(self) -> None:
        self.nbytes = START
        self._shrunk = float("-inf")

    def arrived(self, nbytes: int, seconds: float, now: float, *, full: bool) -> None:
        """Learn from what has arrived.

        Args:
            nbytes: how much that was.
            seconds: how long it took.
            now: by the clock.
            full: whether as much was under way as may be; else nothing is learnt of growing.
        """
        if seconds < TARGET_S:
            if full:
                self.nbytes = min(MOST, self.nbytes + nbytes)
        elif seconds > 2 * TARGET_S and now - self._shrunk > seconds:
            self.nbytes = max(LEAST, int(self.nbytes * TARGET_S / seconds))
            self._shrunk = now

    @property
    def part(self) -> int:
        """Bytes that a part should have at most: several are to be under way."""
        return max(1 << 14, self.nbytes // 4)


TIMES = 8.0
"""How many times the longest usual gap may pass."""

_FADE = 0.95
"""What is left of a long gap's weight with each later sign."""


class Patience:
    """An adaptive deadline.

    Args:
        least: seconds that may always pass.
        most: seconds that may pass at most.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, max(least, most)
        self._longest = 0.0

    def passed(self, seconds: float) -> None:
        """Count the gap that a sign has ended."""
        self._longest = max(seconds, self._longest * _FADE)

    @property
    def seconds(self) -> float:
        """How long it may be silent now."""
        return min(max(self._least, TIMES * self._longest), self._most)


CUT_S = 2.0
"""Seconds without a sign, at least, after which an interface counts as cut."""

_CUT_MOST_S = 30.0


class Way(NamedTuple):
    """To a worker, over one of this worker's interfaces."""

    worker: int
    interface: int


class Sent(Protocol):
    """A message that was posted; see `wingbeat.transport.messages.frames.Posted`."""

    @property
    def arrived(self) -> bool: ...  # noqa: D102

    @property
    def size(self) -> int: ...  # noqa: D102


class _State:
    def __init__(self, least: float) -> None:
        self.up = True
        self.posted: deque[tuple[float, Sent]] = deque()
        self.bytes = 0
        self.sign = float("-inf")
        self.patience = Patience(least, max(least, _CUT_MOST_S))

    def silence(self, now: float) -> float:
        """For how many seconds a sign has been due."""
        return now - max(self.posted[0][0], self.sign) if self.posted else 0.0

    def look(self, now: float) -> tuple[int, float]:
        """Forget what has arrived; return how many bytes that were, and how long the last took."""
        found, seconds, silence = 0, 0.0, self.silence(now)
        while self.posted and self.posted[0][1].arrived:
            begun, message = self.posted.popleft()
            found, seconds = found + message.size, now - begun
        if found:
            self.patience.passed(silence)
            self.sign = now
            self.bytes -= found
        return found, seconds


class Ways:
    """All ways of one worker.

    Args:
        least: seconds without a sign, at least, after which a way is cut.
    """

    def __init__(self, least: float = CUT_S) -> None:
        self._least = least
        self._states: dict[Way, _State] = {}
        self._waiting: Counter[int] = Counter()  # by interface, bytes on the ways that are up
        self._windows: defaultdict[int, Window] = defaultdict(Window)

    def add(self, ways: Iterable[Way]) -> None:
        """Use these ways from now on."""
        for way in ways:
            self._states[way] = _State(self._least)

    def forget(self, worker: int) -> None:
        """Use no way to a worker any more."""
        for way in [way for way in self._states if way.worker == worker]:
            state = self._states.pop(way)
            self._waiting[way.interface] -= state.bytes * state.up

    def posted(self, way: Way, message: Sent, now: float) -> None:
        """Note what goes over a way that is up."""
        state = self._states[way]
        state.posted.append((now, message))
        state.bytes += message.size
        self._waiting[way.interface] += message.size

    def look(self, now: float) -> Iterator[tuple[Way, bool]]:
        """Look what has arrived; yield the ways that are cut since the last look, or mended.

        Yields:
            The way, and whether it can be used again.
        """
        for way, state in self._states.items():
            found, seconds = state.look(now)
            if state.up:
                if found:
                    window = self._windows[way.interface]
                    full = 2 * self._waiting[way.interface] >= window.nbytes
                    window.arrived(found, seconds, now, full=full)
                self._waiting[way.interface] -= found
                if state.silence(now) > state.patience.seconds:
                    state.up = False
                    self._waiting[way.interface] -= state.bytes
                    yield way, False
            elif found:
                state.up = True
                self._waiting[way.interface] += state.bytes
                yield way, True

    def room(self, interface: int) -> bool:
        """Whether one more part may be under way on an interface.

        However large it is: else small ones of others would keep a large one waiting for ever.
        """
        return self._waiting[interface] < self._windows[interface].nbytes

    @property
    def part(self) -> int:
        """Bytes that a part should have at most, whichever interface it takes."""
        used = {way.interface for way in self._states}
        return min((self._windows[interface].part for interface in used), default=1 << 14)

    def excuse(self, now: float) -> None:
        """Count silence from now on: this process has not run, and so has heard nobody."""
        for state in self._states.values():
            state.sign = now

    def silence(self, way: Way, now: float) -> float:
        """Return for how many seconds a sign has been due."""
        return self._states[way].silence(now)

    def up(self, way: Way) -> bool:
        """Whether a way is there and not cut."""
        state = self._states.get(way)
        return state is not None and state.up

    @property
    def cut(self) -> list[Way]:
        """The ways that are cut."""
        return [way for way, state in self._states.items() if not state.up]

    @property
    def neighbours(self) -> set[int]:
        """The workers that are reached directly now."""
        return {way.worker for way, state in self._states.items() if state.up}

    def by_waiting(self, workers: Collection[int]) -> list[Way]:
        """Return the ways to these workers, the interface first on which the least waits."""
        ways = [w for w, state in self._states.items() if state.up and w.worker in workers]
        return sorted(ways, key=lambda way: (self._waiting[way.interface], way))


class Paths:
    """The shortest ways between workers that live.

    Args:
        joined: by worker, those that one of its interfaces reaches; None if all reach all, as long
            as nothing is cut.
        me: who asks.
    """

    def __init__(self, joined: Sequence[Collection[int]] | None, me: int) -> None:
        self._joined, self._me = joined, me
        self._gone: set[int] = set()
        self._known: dict[int, dict[int, int]] = {}

    @property
    def relays(self) -> bool:
        """Whether some are reached over others alone."""
        return self._joined is not None

    def without(self, worker: int) -> None:
        """Lead over this worker no more."""
        self._gone.add(worker)
        self._known.clear()

    def again(self, worker: int) -> None:
        """Lead over it again."""
        self._gone.discard(worker)
        self._known.clear()

    def next(self, to: int, neighbours: Collection[int]) -> list[int]:
        """Return those of ``neighbours`` from which the fewest hops lead to ``to``; maybe none.

        Args:
            to: a worker.
            neighbours: those that this worker reaches now.
        """
        if to in neighbours:
            return [to]
        if self._joined is None:  # whoever is reached may reach it over another interface
            return list(neighbours)
        hops = self._known.get(to)
        if hops is None:
            hops = self._known[to] = self._hops(to, self._joined)
        least = min((hops[n] for n in neighbours if n in hops), default=-1)
        return [n for n in neighbours if hops.get(n, -2) == least]

    def _hops(self, to: int, joined: Sequence[Collection[int]]) -> dict[int, int]:
        """Return how many hops each worker is from ``to``, without this one."""
        out, queue = {to: 0}, deque([to])
        while queue:
            at = queue.popleft()
            for worker in joined[at]:
                if worker not in out and worker not in self._gone and worker != self._me:
                    out[worker] = out[at] + 1
                    queue.append(worker)
        return out
