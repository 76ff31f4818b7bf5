"""What a worker's machine wants to say, until the lanes take it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from wingbeat.exchanges.lanes.lanes import BEGIN, MORE, Lanes
from wingbeat.servers.documents import messages
from wingbeat.stale.letters import words_of
from wingbeat.stale.messages import Message, Report
from wingbeat.stale.worker import Worker


class Outgoing:
    """Messages by whom they are for, cut into parts.

    Args:
        machine: whose ``posts`` are sent.
        lanes: to the other workers.
    """

    def __init__(self, machine: Worker, lanes: Lanes) -> None:
        self._machine, self._lanes = machine, lanes
        self._waiting: dict[int, deque[tuple[int, Iterator[tuple[int, Any]]]]] = {}
        self._held: dict[int, tuple[int, Any]] = {}
        self._last = machine.rank  # to whom a part went last

    @property
    def busy(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting or self._machine.posts)

    def forget(self, worker: int, life: int) -> None:
        """Drop what is for a life that is over; what is for a later one waits for it."""
        self._held.pop(worker, None)
        later = deque(item for item in self._waiting.pop(worker, ()) if item[0] > life)
        if later:
            self._waiting[worker] = later

    def send(self) -> None:
        """Send what there is room for.

        Raises:
            PeerError: nothing can be sent any more; says why.
        """
        while self._machine.posts:
            post = self._machine.posts.popleft()
            for worker in post.to:
                life = self._life(worker, post.message)
                if life >= 0:
                    item = life, self._cut(post.message)
                    self._waiting.setdefault(worker, deque()).append(item)
        # A part to each by turns, first to who comes next: so not all send to one at a time.
        turns = deque(sorted(self._waiting, key=lambda worker: (worker <= self._last, worker)))
        while turns:
            worker = turns.popleft()
            if self._post(worker):
                self._last = worker
                turns.append(worker)
            if not self._waiting[worker]:
                del self._waiting[worker]
                turns = deque(each for each in turns if each != worker)

    def _life(self, worker: int, message: Message) -> int:
        """Return which life of a worker a message is for; -1 if there is none.

        A report is for any: it tells who is taken for dead, and whoever has come back tells all of
        itself before it has heard which lives theirs are.
        """
        known, now = self._machine.life_of(worker), self._lanes.life(worker)
        if known is None:
            return now
        return max(known, now) if isinstance(message, Report) else known

    def _cut(self, message: Message) -> Iterator[tuple[int, Any]]:
        payload = getattr(message, "payload", None)
        arrays = [] if payload is None else [memoryview(payload).cast("B")]
        words = words_of(message, self._machine.life)
        for number, each in enumerate(messages(words, arrays, self._lanes.largest)):
            yield (MORE if number else BEGIN), each

    def _post(self, worker: int) -> bool:
        """Post the next part to a worker; return whether there was one, and room for it."""
        waiting, life = self._waiting[worker], self._lanes.life(worker)
        while waiting and life >= waiting[0][0]:  # else it has come again, and is not met yet
            if life > waiting[0][0]:
                waiting.popleft()
                continue
            item = self._held.pop(worker, None) or next(waiting[0][1], None)
            if item is None:
                waiting.popleft()
            elif self._lanes.send(worker, *item):
                return True
            else:
                self._held[worker] = item
                return False
        return False
