"""What a worker's machine wants to say, until the lanes take it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from wingbeat.exchanges.lanes.lanes import BEGIN, MORE, Lanes
from wingbeat.methods.bounded_staleness.letters import Letter, letter_of
from wingbeat.methods.bounded_staleness.messages import Message, Report
from wingbeat.methods.bounded_staleness.worker import Worker


class _Waiting(NamedTuple):
    """A letter to a worker, in that life."""

    life: int
    letter: Letter


class Outgoing:
    """Letters by whom they are for; short ones leave together, long ones in parts.

    Args:
        machine: whose ``posts`` are sent.
        lanes: to the other workers.
    """

    def __init__(self, machine: Worker, lanes: Lanes) -> None:
        self._machine, self._lanes = machine, lanes
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._rest: dict[int, Iterator[memoryview]] = {}  # of a long letter that has begun
        self._held: dict[int, tuple[int, Any]] = {}
        self._last = machine.rank  # to whom a part went last

    @property
    def busy(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting or self._machine.posts)

    def forget(self, worker: int, life: int) -> None:
        """Drop what is for a life that is over; what is for a later one waits for it."""
        self._held.pop(worker, None)
        self._rest.pop(worker, None)
        later = deque(each for each in self._waiting.pop(worker, ()) if each.life > life)
        if later:
            self._waiting[worker] = later

    def send(self) -> None:
        """Send what there is room for.

        Raises:
            PeerError: nothing can be sent any more; says why.
        """
        while self._machine.posts:
            post = self._machine.posts.popleft()
            letter = letter_of(post.message, self._machine.life, self._machine.epoch)
            for worker in post.to:
                life = self._life(worker, post.message)
                if life >= 0:
                    self._waiting.setdefault(worker, deque()).append(_Waiting(life, letter))
        # A part to each by turns, first to who comes next: so not all send to one at a time.
        turns = deque(sorted(self._waiting, key=lambda worker: (worker <= self._last, worker)))
        while turns:
            worker = turns.popleft()
            if self._post(worker):
                self._last = worker
                turns.append(worker)
            elif not self._waiting[worker] and worker not in self._held:
                del self._waiting[worker]

    def _life(self, worker: int, message: Message) -> int:
        """Return which life of a worker a message is for; -1 if there is none.

        A report is for any: it tells who is taken for dead, and whoever has come back tells all of
        itself before it has heard which lives theirs are.
        """
        known, now = self._machine.life_of(worker), self._lanes.life(worker)
        if known is None:
            return now
        return max(known, now) if isinstance(message, Report) else known

    def _post(self, worker: int) -> bool:
        """Post the next part to a worker; return whether there was one, and room for it."""
        part = self._held.pop(worker, None) or self._next(worker)
        if part is None:
            return False
        if not self._lanes.send(worker, *part):
            self._held[worker] = part
            return False
        return True

    def _next(self, worker: int) -> tuple[int, Any] | None:
        """Return the kind of the next part, and the part; None if there is none."""
        rest = self._rest.get(worker)
        if rest is not None:
            piece = next(rest, None)
            if piece is not None:
                return MORE, piece
            del self._rest[worker]
        waiting, life = self._waiting[worker], self._lanes.life(worker)
        while waiting and life > waiting[0].life:
            waiting.popleft()
        if not waiting or life < waiting[0].life:  # it has come again, and is not met yet
            return None
        said, payload = waiting.popleft().letter
        largest = self._lanes.largest
        if payload and len(said) + len(payload) > largest:
            self._rest[worker] = _cut(payload, largest)
            return BEGIN, said
        room = largest - len(said) - len(payload)
        together: list[bytes | memoryview] = [said, payload]
        while waiting and waiting[0].life == life:
            said, payload = waiting[0].letter
            room -= len(said) + len(payload)
            if room < 0:
                break
            waiting.popleft()
            together += said, payload
        return BEGIN, b"".join(together)


def _cut(payload: memoryview, largest: int) -> Iterator[memoryview]:
    for start in range(0, len(payload), largest):
        yield payload[start : start + largest]
