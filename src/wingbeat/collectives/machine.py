"""The state machine that schedules collectives on a link, without threads, clocks or I/O.

A generator yields commands, and its driver performs each before it requests the next. An
`Executor` drives it over links, a simulator over modelled links, a test over a dictionary.

1. The next collective begins as soon as the previous one has sent its last chunk to the link.
   Earlier, its chunks would precede those chunks in the socket; later, the link would idle for a
   round trip.
2. A collective whose result is complete does not delay the next one while its last chunks are sent.
3. Receives are posted ahead, because a link may send only chunks that the peer expects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from wingbeat.collectives.program import Program, Transfer, last_overlap

RECEIVES_AHEAD = 128
"""Receives posted ahead, so that peers can send without waiting. They complete in order: in a mesh,
they must cover the lag of the slowest peer.
"""

DEPTH = 4
"""Maximum number of collectives in progress."""


class Task:
    """The progress of one collective's program on one link.

    ``after`` is the previous collective on the same buffer, whose finished chunks this one may
    send; None: all chunks may be sent.
    """

    def __init__(self, program: Program, after: Task | None = None) -> None:
        self.program = program
        self.after = after
        self.taken = 0
        self.unsent = len(program.first) + sum(map(len, program.unlocks))
        self.held: deque[tuple[int, Transfer]] = deque()

    @property
    def complete(self) -> bool:
        """Whether all chunks have been received, so that the result can be read."""
        return self.taken == len(self.program.receives)

    def hold(self) -> None:
        """Queue the first sends, each after the chunk of ``after`` that it needs.

        An all-gather can thus begin with the first chunk that the reduce-scatter has finished.
        """
        receives = self.after.program.receives if self.after is not None else ()
        self.held.extend((last_overlap(receives, t.span), t) for t in self.program.first)

    def may_send(self) -> bool:
        """Whether ``after`` has finished the next chunk in the queue."""
        if not self.held:
            return False
        return self.after is None or self.held[0][0] < self.after.taken


T = TypeVar("T", bound=Task)


@dataclass(slots=True)
class Begin(Generic[T]):
    """Begin ``task``."""

    task: T


@dataclass(slots=True)
class PostReceive(Generic[T]):
    """Post a receive of a chunk of ``task``."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class AwaitChunk(Generic[T]):
    """Wait for the oldest posted chunk of ``task``, and add or store it."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class SendChunk(Generic[T]):
    """Send a chunk of ``task`` to the link."""

    task: T
    transfer: Transfer


@dataclass(slots=True)
class Complete(Generic[T]):
    """The result of ``task`` can be read; parts of it may still be in transmission."""

    task: T


@dataclass(slots=True)
class AwaitSends(Generic[T]):
    """Wait until all chunks of ``task`` are sent; then it is done."""

    task: T


@dataclass(slots=True)
class Idle:
    """Wait until a task is submitted."""


TaskCommand = Begin[T] | PostReceive[T] | AwaitChunk[T] | SendChunk[T] | Complete[T] | AwaitSends[T]
Command = TaskCommand[T] | Idle


class Machine(Generic[T]):
    """Schedules tasks first in, first out.

    Any thread may call `submit`; only the driver may call the other methods. At most ``depth``
    tasks are in progress, each with ``ahead`` posted receives.
    """

    def __init__(self, ahead: int = RECEIVES_AHEAD, depth: int = DEPTH) -> None:
        self._ahead = ahead
        self._depth = depth
        self._queue: deque[T] = deque()
        self._active: deque[T] = deque()
        self._draining: deque[T] = deque()

    def submit(self, task: T) -> None:
        """Queue ``task``."""
        self._queue.append(task)

    @property
    def waiting(self) -> bool:
        """Whether a task has not begun."""
        return bool(self._queue)

    def begun(self) -> list[T]:
        """Return the tasks in progress, oldest first."""
        return [*self._draining, *self._active]

    def drop_waiting(self) -> list[T]:
        """Remove and return the tasks that have not begun."""
        dropped = list(self._queue)
        self._queue.clear()
        return dropped

    def commands(self) -> Iterator[Command[T]]:
        """Yield commands indefinitely; the driver performs each before it requests the next."""
        while True:
            if self._queue or self._active:
                yield from self._begin_more()
                yield from self._process_first()
            else:
                yield Idle()

    def _begin_more(self) -> Iterator[Command[T]]:
        while self._queue and len(self._active) < self._depth:
            if self._active and self._active[-1].unsent:
                return
            task = self._queue.popleft()
            self._active.append(task)
            yield Begin(task)
            for transfer in task.program.receives[: self._ahead]:
                yield PostReceive(task, transfer)
            task.hold()
            yield from self._release(task)

    def _process_first(self) -> Iterator[Command[T]]:
        """Process the next chunk of the first task, and keep no reference to a task."""
        task = self._active[0]
        if not task.complete:
            yield from self._advance(task)
            for later in list(self._active):
                if later.after is task:
                    yield from self._release(later)
        if task.complete:
            yield Complete(self._active.popleft())
            self._draining.append(task)
            # Its last chunks may queue behind the next task's, which proceeds first.
            while len(self._draining) > (1 if self._active else 0):
                yield AwaitSends(self._draining[0])
                self._draining.popleft()

    def _advance(self, task: T) -> Iterator[Command[T]]:
        receives, index = task.program.receives, task.taken
        yield AwaitChunk(task, receives[index])
        task.taken += 1
        if index + self._ahead < len(receives):
            yield PostReceive(task, receives[index + self._ahead])
        for transfer in task.program.unlocks[index]:
            yield SendChunk(task, transfer)
            task.unsent -= 1

    def _release(self, task: T) -> Iterator[Command[T]]:
        """Send the first chunks that the previous task has finished."""
        while task.may_send():
            yield SendChunk(task, task.held.popleft()[1])
            task.unsent -= 1
