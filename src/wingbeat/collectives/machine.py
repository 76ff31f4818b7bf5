"""The rules by which collectives go over a link, without a thread, a clock or a link.

A generator says what to do next, one command after the other; whoever drives it does that, and
comes back when it is done. An `Executor`'s thread drives it over real links, a simulator over
modelled ones, a test over a dictionary: all run the same rules.

1. The next collective begins as soon as the one before has handed its last chunk to the link. If it
   began earlier, its chunks would stand before that one's in the socket; if later, the link would
   idle for a round trip.
2. A collective whose result is complete does not hold up the next one while its last chunks drain.
3. Receives are announced ahead, as a link may send only what is expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from wingbeat.collectives.program import Program, Transfer, last_overlap

AHEAD = 128
"""Receives announced before they are needed, so that no peer ever waits for permission. They are
taken in order: in a mesh, as much as the slowest peer is behind the others has to be announced."""

DEPTH = 4
"""Collectives begun at once. One begins when the one before it has handed its last chunk to the
link: then the link never idles, and no chunk queues behind a later collective's."""


class Task:
    """How far one collective's program has come on one link.

    Args:
        program: what this worker does in it.
        after: the collective before, on the same buffer, whose chunks this one may pass on as soon
            as they are finished; None where nothing has to be waited for.
    """

    def __init__(self, program: Program, after: Task | None = None) -> None:
        self.program = program
        self.after = after
        self.taken = 0
        self.unsent = len(program.first) + sum(map(len, program.unlocks))
        self.held: deque[tuple[int, Transfer]] = deque()

    @property
    def complete(self) -> bool:
        """Whether every chunk has come in, so that the result can be read."""
        return self.taken == len(self.program.receives)

    def hold(self) -> None:
        """Put what can be sent at first in line, each behind the chunk of ``after`` that it needs.

        So a bucket's all-gather begins with the first chunk that its reduce-scatter has finished,
        and the links do not idle between the two.
        """
        receives = self.after.program.receives if self.after is not None else ()
        self.held.extend((last_overlap(receives, t.span), t) for t in self.program.first)

    def may_send(self) -> bool:
        """Whether the next chunk in line is finished by the collective before."""
        if not self.held:
            return False
        return self.after is None or self.held[0][0] < self.after.taken


T = TypeVar("T", bound=Task)


@dataclass(slots=True)
class Begin(Generic[T]):
    """``task`` is the next to begin."""

    task: T


@dataclass(slots=True)
class Announce(Generic[T]):
    """Make room for a chunk of ``task``'s, and let the peer send it."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class Take(Generic[T]):
    """Wait for the oldest chunk that is announced for ``task``, and add it or keep it."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class Hand(Generic[T]):
    """Hand a chunk of ``task``'s to the link."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class Complete(Generic[T]):
    """``task``'s result can be read; parts of it may still be on their way out."""

    task: T


@dataclass(slots=True)
class Drain(Generic[T]):
    """Wait until all that ``task`` has handed over is sent; then it is done."""

    task: T


@dataclass(slots=True)
class Rest:
    """Nothing to do until something is submitted."""


TaskCommand = Begin[T] | Announce[T] | Take[T] | Hand[T] | Complete[T] | Drain[T]
Command = TaskCommand[T] | Rest


class Machine(Generic[T]):
    """Says what to do next with the tasks that are submitted, first in, first out.

    `submit` may be called by any thread; all the rest by whoever drives.

    Args:
        ahead: how many receives are announced before they are needed.
        depth: how many tasks may be under way at once.
    """

    def __init__(self, ahead: int = AHEAD, depth: int = DEPTH) -> None:
        self._ahead = ahead
        self._depth = depth
        self._queue: deque[T] = deque()
        self._active: deque[T] = deque()
        self._draining: deque[T] = deque()

    def submit(self, task: T) -> None:
        """Queue ``task`` behind all others."""
        self._queue.append(task)

    @property
    def waiting(self) -> bool:
        """Whether a task has not begun."""
        return bool(self._queue)

    def begun(self) -> list[T]:
        """Return the tasks that have begun and are not done, oldest first."""
        return [*self._draining, *self._active]

    def drop_waiting(self) -> list[T]:
        """Forget the tasks that have not begun, and return them."""
        dropped = list(self._queue)
        self._queue.clear()
        return dropped

    def commands(self) -> Iterator[Command[T]]:
        """Yield what to do, each when the one before is done; without end."""
        while True:
            if self._queue or self._active:
                yield from self._begin_more()
                yield from self._go_on()
            else:
                yield Rest()

    def _begin_more(self) -> Iterator[Command[T]]:
        while self._queue and len(self._active) < self._depth:
            if self._active and self._active[-1].unsent:
                return
            task = self._queue.popleft()
            self._active.append(task)
            yield Begin(task)
            for transfer in task.program.receives[: self._ahead]:
                yield Announce(task, transfer)
            task.hold()
            yield from self._release(task)

    def _go_on(self) -> Iterator[Command[T]]:
        """Take the next chunk of the first task. No task outlives this in a local name."""
        task = self._active[0]
        if not task.complete:
            yield from self._advance(task)
            for later in list(self._active):
                if later.after is task:
                    yield from self._release(later)
        if task.complete:
            yield Complete(self._active.popleft())
            self._draining.append(task)
            # Its last chunks may queue behind the next task's: let that one go on first.
            while len(self._draining) > (1 if self._active else 0):
                yield Drain(self._draining[0])
                self._draining.popleft()

    def _advance(self, task: T) -> Iterator[Command[T]]:
        """Take the next chunk, announce one more, and send on what depends on the one taken."""
        receives, index = task.program.receives, task.taken
        yield Take(task, receives[index])
        task.taken += 1
        if index + self._ahead < len(receives):
            yield Announce(task, receives[index + self._ahead])
        for transfer in task.program.unlocks[index]:
            yield Hand(task, transfer)
            task.unsent -= 1

    def _release(self, task: T) -> Iterator[Command[T]]:
        """Send the first chunks that the task before has finished with."""
        while task.may_send():
            yield Hand(task, task.held.popleft()[1])
            task.unsent -= 1
