"""What waits on each interface to each worker that it reaches, and whether the two still meet.

Pure but for what the mailbox says has arrived; time is given.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, Protocol

from wingbeat.exchanges.lanes.signs import Patience
from wingbeat.exchanges.lanes.window import Window

CUT_S = 2.0
"""Seconds without a sign, at least, after which an interface counts as cut."""

_CUT_MOST_S = 30.0


class Way(NamedTuple):
    """To a worker, over one of this worker's interfaces."""

    worker: int
    interface: int


class Sent(Protocol):
    """A message that was posted; see `wingbeat.transport.messages.flow.Posted`."""

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
