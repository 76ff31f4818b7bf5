"""An in-memory transport whose ranks are threads of one process. For tests."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from wingbeat.transport.link import Link, group_prefix
from wingbeat.transport.world import World
from wingbeat.types import Group, Layout

T = TypeVar("T")


class Switchboard:
    """The messages between all ranks. ``fail(rank)`` simulates the loss of a rank."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._messages: dict[tuple[str, int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._failed: set[int] = set()
        self._values: dict[str, str] = {}
        self._groups: dict[str, _GroupSwitch] = {}

    def fail(self, rank: int) -> None:
        """Make every further transfer with ``rank`` fail, as a closed socket would."""
        with self.changed:
            self._failed.add(rank)
            self.changed.notify_all()
            keys = [key for key, members in self._groups.items() if rank in members.ranks]
        for key in keys:
            self.leave(key, rank)

    def enter(self, key: str, ranks: tuple[int, ...]) -> Switchboard:
        """Return the switchboard of a group's members, numbered from 0."""
        with self.changed:
            members = self._groups.get(key)
            if members is None:
                members = self._groups[key] = _GroupSwitch(Switchboard(), ranks)
            failed = self._failed.intersection(ranks)
        for rank in failed:
            self.leave(key, rank)
        return members.switch

    def leave(self, key: str, rank: int) -> None:
        """Make every further transfer with ``rank`` fail in the group of ``key``."""
        with self.changed:
            members = self._groups.get(key)
            if members is None:
                return
            members.gone.add(rank)
            if len(members.gone) == len(members.ranks):
                del self._groups[key]
        members.switch.fail(members.ranks.index(rank))

    def post(self, key: tuple[str, int, int, int], tensor: torch.Tensor) -> None:
        """Store a copy of the tensor under (link, source, destination, tag)."""
        with self.changed:
            if self._failed.intersection(key[1:3]):
                raise RuntimeError("connection closed by peer")
            self._messages[key].append(tensor.clone())
            self.changed.notify_all()

    def take(self, key: tuple[str, int, int, int], out: torch.Tensor, seconds: float) -> None:
        """Wait for the oldest message under ``key`` and copy it into ``out``."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not self._messages[key]:
                if self._failed.intersection(key[1:3]):
                    raise RuntimeError("connection closed by peer")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RuntimeError(f"timed out after {seconds:g} s")
                self.changed.wait(left)
            out.copy_(self._messages[key].popleft())

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


@dataclass
class _GroupSwitch:
    switch: Switchboard
    ranks: tuple[int, ...]
    gone: set[int] = field(default_factory=set)


class LoopbackLink:
    """One rank's end of the switchboard, named as an interface."""

    def __init__(self, switch: Switchboard, rank: int, name: str) -> None:
        self._switch, self._rank, self.name = switch, rank, name

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Done:
        """Deliver a copy at once."""
        self._switch.post((self.name, self._rank, peer, tag), tensor)
        return _Done()

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> _Received:
        """Copy the message in `wait`."""
        return _Received(self._switch, (self.name, peer, self._rank, tag), tensor)

    def abort_waits(self) -> None:
        """Fail all transfers with this rank."""
        self.close()

    def close(self) -> None:
        """Fail all transfers with this rank."""
        self._switch.fail(self._rank)


class _GroupLink(LoopbackLink):
    def __init__(self, switch: Switchboard, key: str, group: Group, rank: int, name: str) -> None:
        super().__init__(switch.enter(key, group.ranks), group.ranks.index(rank), name)
        self._all, self._key, self._member = switch, key, rank

    def close(self) -> None:
        self._all.leave(self._key, self._member)


class _Done:
    def wait(self, seconds: float) -> None:
        """Return at once."""


class _Received:
    def __init__(
        self, switch: Switchboard, key: tuple[str, int, int, int], out: torch.Tensor
    ) -> None:
        self._switch, self._key, self._out = switch, key, out

    def wait(self, seconds: float) -> None:
        self._switch.take(self._key, self._out, seconds)


def worlds(
    size: int, *, interfaces: int = 1, timeout: float = 20.0, layout: Layout | None = None
) -> list[World]:
    """Return ``size`` connected worlds in this process, one per thread.

    ``layout``: their hosts; None: each has a host of its own.
    """
    switch = Switchboard()
    return worlds_on(switch, size, interfaces=interfaces, timeout=timeout, layout=layout)


def worlds_on(
    switch: Switchboard,
    size: int,
    *,
    interfaces: int = 1,
    timeout: float = 20.0,
    layout: Layout | None = None,
) -> list[World]:
    """As `worlds`, on a switchboard that the caller keeps, for example to fail a rank."""
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
            layout=layout or Layout.even(size, 1),
        )
        for rank in range(size)
    ]


def _group_links(
    switch: Switchboard, rank: int, names: Sequence[str], group: Group
) -> tuple[Link, ...]:
    prefix = group_prefix(group)
    return tuple(_GroupLink(switch, f"{prefix}{name}", group, rank, name) for name in names)


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
