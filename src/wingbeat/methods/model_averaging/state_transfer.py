"""The state of one worker, as bytes, to another that has come back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from wingbeat.errors import PeerError, WingbeatError
from wingbeat.transport.text import first_line
from wingbeat.types import Group

if TYPE_CHECKING:
    from wingbeat.transport.link import Link
    from wingbeat.transport.world import World

_PART = 16 << 20
"""Bytes that are sent at a time: each part has the whole timeout."""

_TAG = 0
_LOOK_S = 0.1
_NOTHING = -1
"""In place of a size: there is nothing to give."""


class Giving:
    """States that this worker sends to others, each in a thread: training goes on.

    Args:
        world: all workers.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: dict[threading.Thread, World] = {}

    def give(self, taker: int, meeting: int, blob: bytes | bytearray | None) -> None:
        """Begin to send ``blob`` to a worker that meets this one; None if there is nothing.

        Args:
            taker: its rank.
            meeting: the number of their meeting.
            blob: what it is to have.
        """
        self._under_way = {thread: w for thread, w in self._under_way.items() if thread.is_alive()}
        inner = self._world.open_group(Group((self._world.rank, taker), epoch=meeting))
        thread = threading.Thread(
            target=_give, args=(inner, blob), name="wingbeat-give", daemon=True
        )
        self._under_way[thread] = inner
        thread.start()

    def close(self) -> None:
        """End what is under way; who takes it takes another's."""
        for thread, inner in self._under_way.items():
            for link in inner.links:
                link.close()
            thread.join()
        self._under_way.clear()


def _give(inner: World, blob: bytes | bytearray | None) -> None:
    with contextlib.suppress(RuntimeError, WingbeatError), inner:  # the taker says so
        link, peer = inner.links[0], 1 - inner.rank
        _send(link, peer, torch.tensor([_NOTHING if blob is None else len(blob)]), inner.timeout)
        # The memory of bytes is nobody's to write to, which torch would warn of.
        for part in _parts(bytearray(blob or b"")):
            _send(link, peer, part, inner.timeout)
        _receive(link, peer, torch.zeros(1, dtype=torch.int64), inner.timeout)


def take(world: World, giver: int, meeting: int, most: int, lives: Callable[[], bool]) -> bytearray:
    """Return the state that ``giver`` sends.

    Args:
        world: all workers.
        giver: its rank.
        meeting: the number of their meeting.
        most: bytes that it may have.
        lives: whether the giver does, as far as is known.

    Raises:
        PeerError: it has nothing to give, or too much.
        Lost: it was lost.
    """
    inner = world.open_group(Group((world.rank, giver), epoch=meeting))
    taking = _Taking(inner, most)
    thread = threading.Thread(target=taking.run, name="wingbeat-take", daemon=True)
    thread.start()
    begun = time.monotonic()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if not lives():
            for link in inner.links:
                link.close()
            thread.join()
    inner.close()
    name = f"rank {world.rank}: rank {giver}"
    if taking.blob is None:
        raise Lost(f"{name} was lost {time.monotonic() - begun:.1f} s after it was asked for its "
                   f"state: {taking.why}")  # fmt: skip
    if taking.size == _NOTHING:
        raise PeerError(
            f"{name} offers no state to a worker that has come back; start all workers again from "
            "a checkpoint"
        )
    if not 0 <= taking.size <= most:
        raise PeerError(
            f"{name} sends a state of {taking.size} bytes: allowed are {most}; pass "
            "fetch(most=...) a larger number if the state is so large"
        )
    return taking.blob


class Lost(Exception):
    """Who gave its state was lost; says how."""


class _Taking:
    """Receives a state in a thread of its own.

    Attributes:
        size: what the giver has said.
        blob: all of it; None if it was lost.
        why: how.
    """

    def __init__(self, inner: World, most: int) -> None:
        self._inner, self._most = inner, most
        self.size = 0
        self.blob: bytearray | None = None
        self.why = ""

    def run(self) -> None:
        inner = self._inner
        link, peer, seconds = inner.links[0], 1 - inner.rank, inner.timeout
        try:
            size = torch.zeros(1, dtype=torch.int64)
            _receive(link, peer, size, seconds)
            self.size = int(size)
            blob = bytearray(self.size if 0 < self.size <= self._most else 0)
            for part in _parts(blob):
                _receive(link, peer, part, seconds)
            if len(blob) == max(0, self.size):
                _send(link, peer, size, seconds)
            self.blob = blob
        except (RuntimeError, MemoryError, WingbeatError) as error:
            self.why = first_line(error)


def _parts(blob: bytearray) -> Iterator[torch.Tensor]:
    if blob:
        yield from torch.frombuffer(blob, dtype=torch.uint8).split(_PART)


def _send(link: Link, peer: int, tensor: torch.Tensor, seconds: float) -> None:
    link.send(tensor, peer, _TAG).wait(seconds)


def _receive(link: Link, peer: int, tensor: torch.Tensor, seconds: float) -> None:
    link.recv(tensor, peer, _TAG).wait(seconds)
