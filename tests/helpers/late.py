"""A link that reads the sender's memory as late as a link may: when the receiver takes it."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from wingbeat.transport import loopback
from wingbeat.transport.world import World

Key = tuple[str, int, int, int]


class Board:
    """Messages that have been announced and not yet read, and how many bytes were."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.mail: defaultdict[Key, deque[Sent]] = defaultdict(deque)
        self.nbytes: defaultdict[int, int] = defaultdict(int)
        self.closed: set[int] = set()

    def wait(self, done: Callable[[], bool], key: Key, seconds: float) -> None:
        """Wait until ``done``, as long as neither end of ``key`` is closed."""
        if not self.changed.wait_for(lambda: done() or self.closed.intersection(key[1:3]), seconds):
            raise RuntimeError("timed out")
        if not done():
            raise RuntimeError("connection closed by peer")


class Sent:
    def __init__(self, board: Board, key: Key, tensor: torch.Tensor) -> None:
        self._board, self._key = board, key
        self.tensor = tensor
        self.read = False

    def wait(self, seconds: float) -> None:
        with self._board.changed:
            self._board.wait(lambda: self.read, self._key, seconds)


class Received:
    def __init__(self, board: Board, key: Key, out: torch.Tensor) -> None:
        self._board, self._key, self._out = board, key, out

    def wait(self, seconds: float) -> None:
        board = self._board
        with board.changed:
            mail = board.mail[self._key]
            board.wait(lambda: bool(mail), self._key, seconds)
            sent = mail.popleft()
            assert sent.tensor.dtype == self._out.dtype
            assert sent.tensor.shape == self._out.shape
            self._out.copy_(sent.tensor)
            sent.read = True
            board.nbytes[self._key[1]] += sent.tensor.nbytes
            board.changed.notify_all()


class LateLink:
    """One rank's end of the board."""

    def __init__(self, board: Board, rank: int, name: str) -> None:
        self._board, self._rank, self.name = board, rank, name

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Sent:
        key = (self.name, self._rank, peer, tag)
        sent = Sent(self._board, key, tensor)
        with self._board.changed:
            self._board.mail[key].append(sent)
            self._board.changed.notify_all()
        return sent

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Received:
        return Received(self._board, (self.name, peer, self._rank, tag), tensor)

    def abort_waits(self) -> None:
        self.close()

    def close(self) -> None:
        with self._board.changed:
            self._board.closed.add(self._rank)
            self._board.changed.notify_all()


def worlds(size: int, *, interfaces: int = 1) -> tuple[list[World], Board]:
    """As `loopback.worlds`, over late links; and their board."""
    members = loopback.worlds(size, interfaces=interfaces)
    board = Board()
    for world in members:
        world.links = tuple(LateLink(board, world.rank, link.name) for link in world.links)
    return members, board


@contextmanager
def open_worlds(size: int, interfaces: int = 1) -> Iterator[tuple[list[World], Board]]:
    """The same, closed in the end."""
    members, board = worlds(size, interfaces=interfaces)
    try:
        yield members, board
    finally:
        for world in members:
            world.close()
