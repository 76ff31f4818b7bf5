"""An in-memory transport whose ranks are threads of one process. For tests."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeVar

import torch

from wingbeat.transport.link import Link, group_prefix
from wingbeat.transport.world import World
from wingbeat.types import Group, Layout

T = TypeVar("T")


class _Place(NamedTuple):
    """Where messages of one kind meet: an interface in the world or a group, two ranks, a tag."""

    group: str
    name: str
    source: int
    target: int
    tag: int


class Switchboard:
    """The messages between all ranks. ``fail(rank)`` simulates the loss of a rank."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._messages: dict[_Place, deque[torch.Tensor]] = defaultdict(deque)
        self._failed: set[tuple[str, int]] = set()
        self._values: dict[str, str] = {}

    def fail(self, rank: int, group: str = "") -> None:
        """Make every further transfer with ``rank`` fail, as a closed socket would.

        With the prefix of a group and the name of a link, only those of this link.
        """
        with self.changed:
            self._failed.add((group, rank))
            self.changed.notify_all()

    def _check(self, place: _Place) -> None:
        ends = {(group, rank) for group in ("", place.group) for rank in place[2:4]}
        if not ends.isdisjoint(self._failed):
            raise RuntimeError("connection closed by peer")

    def post(self, place: _Place, tensor: torch.Tensor) -> None:
        """Store a copy of the tensor."""
        with self.changed:
            self._check(place)
            self._messages[place].append(tensor.clone())
            self.changed.notify_all()

    def take(self, place: _Place, out: torch.Tensor, seconds: float) -> None:
        """Wait for the oldest message at a place and copy it into ``out``."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while place not in self._messages:
                self._check(place)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RuntimeError(f"timed out after {seconds:g} s")
                self.changed.wait(left)
            message = self._messages[place].popleft()
            if not self._messages[place]:
                del self._messages[place]
            out.copy_(message)

    def set(self, key: str, value: str) -> None:
        """As `Store.set`."""
        with self.changed:
            self._values[key] = value
            self.changed.notify_all()

    def get(self, key: str, seconds: float) -> str:
        """As `Store.get`."""
        with self.changed:
            if not self.changed.wait_for(lambda: key in self._values, seconds):
                raise TimeoutError(key)
            return self._values[key]

    def claim(self, key: str, value: str) -> str:
        """As `AtomicStore.claim`."""
        with self.changed:
            found = self._values.setdefault(key, value)
            self.changed.notify_all()
            return found

    def has(self, key: str) -> bool:
        """As `Store.has`."""
        with self.changed:
            return key in self._values


class LoopbackLink:
    """One rank's end of the switchboard, named as an interface; of a group if there is one."""

    def __init__(
        self, switch: Switchboard, rank: int, name: str, group: Group | None = None
    ) -> None:
        self._switch, self._rank, self.name = switch, rank, name
        # Each link of a group fails for itself.
        self._group = "" if group is None else f"{group_prefix(group)}{name}"
        self._ranks = None if group is None else group.ranks

    def _job_rank(self, peer: int) -> int:
        return peer if self._ranks is None else self._ranks[peer]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Done:
        """Deliver a copy at once."""
        place = _Place(self._group, self.name, self._rank, self._job_rank(peer), tag)
        self._switch.post(place, tensor)
        return _Done()

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> _Received:
        """Copy the message in `wait`."""
        place = _Place(self._group, self.name, self._job_rank(peer), self._rank, tag)
        return _Received(self._switch, place, tensor)

    def abort_waits(self) -> None:
        """Fail all transfers with this rank."""
        self.close()

    def close(self) -> None:
        """Fail all transfers with this rank."""
        self._switch.fail(self._rank, self._group)


class _Done:
    def wait(self, seconds: float) -> None:
        """Return at once."""


class _Received:
    def __init__(self, switch: Switchboard, place: _Place, out: torch.Tensor) -> None:
        self._switch, self._place, self._out = switch, place, out

    def wait(self, seconds: float) -> None:
        self._switch.take(self._place, self._out, seconds)


def worlds(
    size: int,
    *,
    interfaces: int = 1,
    timeout: float = 20.0,
    layout: Layout | None = None,
    switchboard: Switchboard | None = None,
) -> list[World]:
    """Return ``size`` connected worlds in this process, one per thread.

    ``layout``: their hosts; None: all are on one host. ``switchboard``: one that the caller keeps,
    for example to fail a rank.
    """
    switch = switchboard or Switchboard()
    names = [f"lo{i}" for i in range(interfaces)]
    return [
        World(
            rank=rank,
            size=size,
            links=tuple(LoopbackLink(switch, rank, name) for name in names),
            speeds=(1.0,) * interfaces,
            timeout=timeout,
            store=switch,
            make_links=functools.partial(_group_links, switch, rank, names),
            threads=True,
            layout=layout or Layout.even(1, size),
        )
        for rank in range(size)
    ]


def _group_links(
    switch: Switchboard, rank: int, names: Sequence[str], group: Group
) -> tuple[Link, ...]:
    return tuple(LoopbackLink(switch, rank, name, group) for name in names)


def run(members: list[World], body: Callable[[World], T]) -> list[T]:
    """Run ``body`` for each world in its own thread; return the results by rank.

    The exception of ``body`` on the lowest rank that failed is raised.
    """
    futures: list[Future[T]] = [Future() for _ in members]

    def work(world: World, future: Future[T]) -> None:
        try:
            future.set_result(body(world))
        except BaseException as err:
            future.set_exception(err)

    for pair in zip(members, futures, strict=True):
        # Daemon threads, so that a blocked one does not prevent an interrupted caller from exiting.
        threading.Thread(target=work, args=pair, daemon=True).start()
    wait(futures)
    return [future.result() for future in futures]
