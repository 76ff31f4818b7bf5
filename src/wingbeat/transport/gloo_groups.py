"""Links for groups over gloo: their members meet in the store, nobody else is asked.

A gloo group fails as a whole, and single transfers in it cannot be called off. So each group of
workers has one of its own, which is closed when the group fails or ends: what was under way in it
is over, and reaches no other group.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport import descriptors
from wingbeat.transport.failures import Blame
from wingbeat.transport.gloo import GlooLink, Listener, open_device
from wingbeat.transport.group_links import MeetingLink, NotMet, refuse_given_up, room_of
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.link import Link, Pending
from wingbeat.transport.text import first_line
from wingbeat.transport.torch_store import Seal, SharedStore, TorchStore, read
from wingbeat.types import Group

_SOONEST_S, _LATER_S, _LATEST_S = 0.0001, 0.01, 0.1
"""Seconds between two looks into the store: at first, after some waiting, and after long."""

_LONG_S = 1.0
"""Seconds after which a member looks seldom: many groups may wait at once."""

_ASK_S = 0.1
"""Seconds after which whoever waits for a member looks whether it will still come."""

_CONNECTING_S = 30.0
"""Seconds in which members who have all come are connected. That takes moments, but gloo was seen
to let both ends of a connection wait for the other one's first byte without end."""

_IDLE_DEVICES = 8
"""Per interface; each is a thread and a socket."""

_GREETING_TAG = (1 << 31) - 1
"""Of the message by which each member knows that the others are connected."""


_NEVER_SENT_TAG = _GREETING_TAG - 1
_AT_ONCE_S = 0.001
"""The shortest that gloo can wait, in seconds."""


_Device: TypeAlias = tuple[dist.ProcessGroupGloo.Device, Listener]


class GlooGroups:
    """Makes links for the groups of one worker.

    Args:
        store: where the members meet. All look into it by turns, as a wait in it would lock it for
            all other groups of this process.
        rank: this worker, of ``size``.
        size: number of workers in the world.
        interfaces: those that the world uses here.
        seal: of what workers tell each other in the store; what gloo puts there has none.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        interfaces: Sequence[Interface],
        seal: Seal | None = None,
    ) -> None:
        self._worlds_store, self._seal = store, seal
        self._rank, self._size = rank, size
        self._interfaces = interfaces
        self._starting = threading.Lock()
        self._store: dist.Store | None = None
        self._devices = [_Devices(interface) for interface in interfaces]
        self._closed = False

    def links(self, group: Group, timeout: float) -> tuple[Link, ...]:
        """Return the group's links, one per interface, which are made on first use.

        ``timeout`` is for how many seconds the members wait for each other.
        """
        return tuple(
            self._link(interface.name, group, index, timeout)
            for index, interface in enumerate(self._interfaces)
        )

    def _link(self, name: str, group: Group, index: int, timeout: float) -> MeetingLink:
        off = threading.Event()
        return MeetingLink(name, functools.partial(self._meet, group, index, timeout, off), off)

    def store(self) -> TorchStore:
        """Return the groups' way to the store. What others ask it, and wait for, locks it."""
        try:
            return SharedStore(self._start(), self._seal)
        except RuntimeError:  # the groups' own links will say so
            return TorchStore(self._worlds_store, self._seal)

    def close(self) -> None:
        """Stop listening and close the connection to the store."""
        with self._starting:
            self._closed = True
            self._store = None
        for devices in self._devices:
            devices.close()

    def _start(self) -> dist.Store:
        """Return a connection to the store that nobody else waits in."""
        with self._starting:
            if self._closed:
                raise RuntimeError("wingbeat.shutdown() was called")
            if self._store is None:
                self._store = self._worlds_store.clone()
            return self._store

    def _meet(self, group: Group, index: int, timeout: float, off: threading.Event) -> Link:
        """Connect to all members over one interface.

        Raises:
            NotMet: somebody did not come, or has given the group up.
        """
        try:
            store, devices = self._start(), self._devices[index]
        except RuntimeError as err:
            raise NotMet(self._rank, f"{group}: this rank is not connected: {err}") from None
        shared = SharedStore(store, self._seal)
        meeting = _Meeting(group, self._rank, self._size, shared, timeout, off)
        room = f"{room_of(group)}link{index}/"
        board = _Board(store, room, self._rank, group.ranks, meeting.wait_until)
        mine, size = group.ranks.index(self._rank), len(group.ranks)
        try:
            descriptors.require(
                descriptors.GLOO_DEVICE + size - 1, f"rank {self._rank}: connecting {group}"
            )
            board.set(f"here/{mine}", "")
            board.wait([f"here/{member}" for member in range(size)])
            connecting_s = min(timeout, _CONNECTING_S)
            link = _GroupLink(devices, board, mine, size, connecting_s)
            _greet(link, mine, group, connecting_s)
        except (RendezvousError, UsageError) as err:
            raise NotMet(self._rank, f"{group}: {err}") from None
        finally:
            board.clear()
        return link


class _Devices:
    """What gloo listens with on one interface: for each open group a device of its own.

    A member that comes after this one has given the meeting up must find nobody listening: gloo
    would tell a connection that is no more, which ends the process. So a device of a meeting that
    failed is never used again. The others are, as one takes 10 ms to end. A device listens only
    while a group meets on it.
    """

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self._changing = threading.Lock()
        self._idle: list[_Device] = []
        self._closed = False

    def take(self) -> _Device:
        """Return one that no open group has, and that listens."""
        with self._changing:
            if self._idle:
                device, listener = self._idle.pop()
                listener.unblock()
                return device, listener
        return open_device(self.interface.address)

    def give(self, device: _Device) -> None:
        """Take back one on which a whole group had met."""
        with self._changing:
            if not self._closed and len(self._idle) < _IDLE_DEVICES:
                self._idle.append(device)

    def close(self) -> None:
        """Keep none any more."""
        with self._changing:
            self._closed = True
            self._idle.clear()


class _GroupLink(GlooLink):
    """A group's link, on a device that it has for itself until it is closed."""

    def __init__(
        self, devices: _Devices, board: _Board, mine: int, size: int, timeout: float
    ) -> None:
        device = devices.take()
        try:
            super().__init__(board, mine, size, devices.interface, timeout, device)
            self._devices, self._own = devices, [device]
            self._anybody = (mine + 1) % size
        finally:
            del device

    def retire(self) -> None:
        """Close, as the members have not met; the device ends with that."""
        self._own.clear()
        self.close()

    def close(self) -> None:
        """Close the sockets; once that is done another group may have the device.

        Other threads may wait for transfers, which gloo ends when one of them has timed out.
        """
        with contextlib.suppress(RuntimeError):
            self.recv(torch.zeros(1), self._anybody, _NEVER_SENT_TAG).wait(_AT_ONCE_S)
        super().close()
        with contextlib.suppress(IndexError):  # whoever closes it first gives it back
            self._devices.give(self._own.pop())


class _Meeting:
    """How long a member waits for the others, and what it says if they do not come."""

    def __init__(
        self,
        group: Group,
        rank: int,
        size: int,
        store: TorchStore,
        timeout: float,
        off: threading.Event,
    ) -> None:
        self._off = off
        self._group, self._rank, self._timeout = group, rank, timeout
        self._blame = Blame(store, rank, size, timeout, room_of(group))
        self._deadline = time.monotonic() + timeout
        refuse_given_up(group, rank, self._blame)

    def wait_until(self, done: Callable[[], bool], peer: int) -> None:
        """Wait for what ``peer`` is to do.

        Raises:
            NotMet: it did not within the timeout, it has left, or somebody has given up.
        """
        begin = time.monotonic()
        pause, ask = _SOONEST_S, begin + _ASK_S
        while not done():
            now = time.monotonic()
            if now >= ask:
                refuse_given_up(self._group, self._rank, self._blame)
                ask = now + _ASK_S
                if self._blame.left(peer):
                    raise NotMet(peer, f"rank {peer} has left before it came to {self._group}")
            if now >= self._deadline:
                raise NotMet(
                    peer,
                    f"rank {peer} did not come to {self._group} within {self._timeout:g} s: every "
                    "member opens the group and makes the same calls in it",
                )
            if self._off.wait(pause):
                raise NotMet(self._rank, f"{self._group} was closed here before all had come")
            pause = min(2 * pause, _LATER_S if now < begin + _LONG_S else _LATEST_S)


class _Board(dist.Store):  # type: ignore[misc]
    """The store as gloo sees it while it connects a group; remembers what to clear away."""

    def __init__(
        self,
        store: dist.Store,
        room: str,
        rank: int,
        ranks: Sequence[int],
        wait_until: Callable[[Callable[[], bool], int], None],
    ) -> None:
        super().__init__()
        self._store, self._room, self._wait_until = store, room, wait_until
        self._rank, self._ranks = rank, ranks
        self._written: list[str] = []

    def clear(self) -> None:
        """Delete what this member has written. The others have read it, or will never come."""
        with contextlib.suppress(RuntimeError):  # the store may be gone
            for key in self._written:
                self._store.delete_key(self._room + key)
        self._written.clear()

    def set(self, key: str, value: str | bytes) -> None:
        """As `dist.Store.set`."""
        self._written.append(key)
        with self._answering():
            self._store.set(self._room + key, value)

    def get(self, key: str) -> bytes:
        """As `dist.Store.get`, without a lock on the store."""
        found: list[bytes] = []

        def look() -> bool:
            with self._answering():
                value = read(self._store, self._room + key)
            found.extend([] if value is None else [value])
            return value is not None

        self._wait_until(look, self._peer(key))
        return found[0]

    def check(self, keys: list[str]) -> bool:
        """As `dist.Store.check`."""
        with self._answering():
            return bool(self._store.check([self._room + key for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """As `dist.Store.wait`, until the meeting's own deadline."""
        for key in keys:
            self._wait_until(functools.partial(self.check, [key]), self._peer(key))

    def _peer(self, key: str) -> int:
        member = key.rpartition("/")[2]  # gloo's keys end with a member's number
        known = member.isdigit() and int(member) < len(self._ranks)
        return self._ranks[int(member) if known else 0]

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Say who is to blame if the store is gone: none of the members."""
        try:
            yield
        except RuntimeError as err:
            text = f"the store where the workers meet does not answer: {first_line(err)}"
            raise NotMet(self._rank, text) from None

    def has_extended_api(self) -> bool:
        """Return False: gloo then uses the methods above alone."""
        return False


def _greet(link: _GroupLink, mine: int, group: Group, timeout: float) -> None:
    """Hear from all members that they are connected, so that none leaves while another connects.

    Raises:
        NotMet: one was lost meanwhile.
    """
    others = [k for k in range(len(group.ranks)) if k != mine]
    pending: list[tuple[int, Pending]] = []
    peer, lost = mine, ""
    try:
        for peer in others:
            out, into = torch.zeros(2, 1, dtype=torch.uint8)
            pending.append((peer, link.recv(into, peer, _GREETING_TAG)))
            pending.append((peer, link.send(out, peer, _GREETING_TAG)))
        while pending:
            peer = pending[0][0]
            pending[0][1].wait(timeout)
            del pending[0]
    except RuntimeError as err:
        lost = first_line(err)
    if lost:
        # Not before: the error's frames hold a transfer, and gloo closes nothing while one is held.
        pending.clear()
        link.retire()
        who = group.ranks[peer]
        raise NotMet(who, f"rank {who} was lost while the members of {group} met: {lost}")
