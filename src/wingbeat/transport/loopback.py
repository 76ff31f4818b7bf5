"""An in-memory transport: ranks are threads of one process. For tests."""

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

from wingbeat.transport.group_links import MeetingLink, room_of
from wingbeat.transport.link import Link
from wingbeat.transport.world import World
from wingbeat.types import Group

T = TypeVar("T")


class Switchboard:
    """Holds the messages between all ranks; ``fail(rank)`` makes a rank vanish."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._mail: dict[tuple[str, int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._dead: set[int] = set()
        self._values: dict[str, str] = {}
        self._rooms: dict[str, _Room] = {}

    def fail(self, rank: int) -> None:
        """Make every transfer with ``rank`` fail from now on, as a closed socket would."""
        with self.changed:
            self._dead.add(rank)
            self.changed.notify_all()
            rooms = [key for key, room in self._rooms.items() if rank in room.ranks]
        for key in rooms:
            self.leave(key, rank)

    def enter(self, key: str, ranks: tuple[int, ...]) -> Switchboard:
        """Return the switchboard of a group's members, numbered from 0 on; it ends with them."""
        with self.changed:
            room = self._rooms.get(key)
            if room is None:
                room = self._rooms[key] = _Room(Switchboard(), ranks)
            dead = self._dead.intersection(ranks)
        for rank in dead:
            self.leave(key, rank)
        return room.board

    def leave(self, key: str, rank: int) -> None:
        """Make every transfer with ``rank`` fail in the group of that ``key``."""
        with self.changed:
            room = self._rooms.get(key)
            if room is None:
                return
            room.gone.add(rank)
            if len(room.gone) == len(room.ranks):
                del self._rooms[key]
        room.board.fail(room.ranks.index(rank))

    def post(self, key: tuple[str, int, int, int], tensor: torch.Tensor) -> None:
        """Leave a copy of the tensor under (link, source, destination, tag)."""
        with self.changed:
            if self._dead.intersection(key[1:3]):
                raise RuntimeError("connection closed by peer")
            self._mail[key].append(tensor.clone())
            self.changed.notify_all()

    def take(self, key: tuple[str, int, int, int], out: torch.Tensor, seconds: float) -> None:
        """Copy the oldest message under ``key`` into ``out``; wait for it if need be."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not self._mail[key]:
                if self._dead.intersection(key[1:3]):
                    raise RuntimeError("connection closed by peer")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RuntimeError(f"timed out after {seconds:g} s")
                self.changed.wait(left)
            out.copy_(self._mail[key].popleft())

    def set(self, key: str, value: str) -> None:
        """Store interface: publish ``value`` under ``key``."""
        with self.changed:
            self._values[key] = value
            self.changed.notify_all()

    def get(self, key: str, seconds: float) -> str:
        """Store interface: wait for ``key``.

        Raises:
            TimeoutError: nobody published it within ``seconds``.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: key in self._values, seconds):
                raise TimeoutError(key)
            return self._values[key]

    def claim(self, key: str, value: str) -> str:
        """Store interface: publish ``value`` unless somebody has; return what is published."""
        with self.changed:
            found = self._values.setdefault(key, value)
            self.changed.notify_all()
            return found

    def has(self, key: str) -> bool:
        """Store interface: whether somebody has published ``key``."""
        with self.changed:
            return key in self._values


@dataclass
class _Room:
    """Where the members of a group are, and who of them is there no more."""

    board: Switchboard
    ranks: tuple[int, ...]
    gone: set[int] = field(default_factory=set)


class LoopbackLink:
    """One rank's end of the switchboard, under one interface's name."""

    def __init__(self, board: Switchboard, rank: int, name: str) -> None:
        self._board, self._rank, self._name = board, rank, name

    @property
    def name(self) -> str:
        """Name of the pretended interface."""
        return self._name

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Done:
        """Deliver a copy at once."""
        self._board.post((self._name, self._rank, peer, tag), tensor)
        return _Done()

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> _Later:
        """Take the message when waited for."""
        return _Later(self._board, (self._name, peer, self._rank, tag), tensor)

    def close(self) -> None:
        """Vanish for the others."""
        self._board.fail(self._rank)


class _GroupLink(LoopbackLink):
    """One member's end of its group's switchboard."""

    def __init__(self, board: Switchboard, key: str, group: Group, rank: int, name: str) -> None:
        super().__init__(board.enter(key, group.ranks), group.ranks.index(rank), name)
        self._all, self._key, self._member = board, key, rank

    def close(self) -> None:
        """Vanish for the other members."""
        self._all.leave(self._key, self._member)


class _Done:
    def wait(self, seconds: float) -> None:
        """Nothing to wait for."""


class _Later:
    def __init__(
        self, board: Switchboard, key: tuple[str, int, int, int], out: torch.Tensor
    ) -> None:
        self._board, self._key, self._out = board, key, out

    def wait(self, seconds: float) -> None:
        self._board.take(self._key, self._out, seconds)


def worlds(size: int, *, interfaces: int = 1, timeout: float = 20.0) -> list[World]:
    """Make ``size`` connected worlds in this process, each for one thread."""
    return worlds_on(Switchboard(), size, interfaces=interfaces, timeout=timeout)


def worlds_on(
    board: Switchboard, size: int, *, interfaces: int = 1, timeout: float = 20.0
) -> list[World]:
    """As `worlds`, on a switchboard that the caller keeps, for example to fail a rank."""
    names = [f"lo{i}" for i in range(interfaces)]
    return [
        World(
            rank=rank,
            size=size,
            links=tuple(LoopbackLink(board, rank, name) for name in names),
            speeds=(1.0,) * interfaces,
            timeout=timeout,
            store=board,
            make_links=functools.partial(_group_links, board, rank, names),
            threads=True,
        )
        for rank in range(size)
    ]


def _group_links(
    board: Switchboard, rank: int, names: Sequence[str], group: Group, _: float
) -> tuple[Link, ...]:
    def meet(name: str) -> Link:
        return _GroupLink(board, f"{room_of(group)}{name}", group, rank, name)

    return tuple(MeetingLink(name, functools.partial(meet, name)) for name in names)


def run(members: list[World], body: Callable[[World], T]) -> list[T]:
    """Run ``body`` once per world, each in its own thread; return the results by rank.

    Raises:
        Exception: what ``body`` raised on the lowest rank that it failed on.
    """
    futures: list[Future[T]] = [Future() for _ in members]

    def work(world: World, future: Future[T]) -> None:
        try:
            future.set_result(body(world))
        except BaseException as err:
            future.set_exception(err)

    for pair in zip(members, futures, strict=True):
        # Daemons: a thread that hangs is left to itself when the caller is interrupted.
        threading.Thread(target=work, args=pair, daemon=True).start()
    wait(futures)
    return [future.result() for future in futures]
