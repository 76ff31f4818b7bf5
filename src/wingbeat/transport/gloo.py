"""Links over gloo: one process group for each network interface, and its listening sockets.

gloo never closes an idle incoming connection, aborts the process if it has no descriptor for
another one, and cannot stop listening. Once all peers are connected, a socket filter therefore
drops every packet to the listening socket, so the kernel drops each connection attempt before gloo
sees it. Existing connections have their own sockets and are not affected. Removing the filter lets
the members of another group connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.observe.log import log
from wingbeat.transport import descriptors
from wingbeat.transport.failures import FailureAttribution
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.link import (
    UNUSED_TAG,
    GroupSetupError,
    LazyLink,
    Link,
    Pending,
    check_not_aborted,
    group_prefix,
)
from wingbeat.transport.text import first_line
from wingbeat.transport.torch_store import Authenticator, PollingStore, TorchStore, read_key
from wingbeat.types import Group

T = TypeVar("T")

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h; not in Python
_BPF_RET_K = 0x06  # linux/filter.h: bytes of the packet to keep; 0 drops it

_libc = ctypes.CDLL(None, use_errno=True)
_creating_device = threading.Lock()
"""Held while a device is created: its socket is found by comparing descriptors before and after."""


class _Instruction(ctypes.Structure):
    """``struct sock_filter``."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction)))


_DROP_ALL = _Program(1, ctypes.pointer(_Instruction(_BPF_RET_K, 0, 0, 0)))


class DeviceListener:
    """The listening sockets of a gloo device, owned by gloo; empty if unknown."""

    def __init__(self, sockets: Sequence[int]) -> None:
        self._sockets = sockets
        self._blocked = False

    @property
    def known(self) -> bool:
        """Whether there are sockets to block."""
        return bool(self._sockets)

    def block(self) -> None:
        """Drop all connection attempts from now on."""
        try:
            for fd in self._sockets:
                _setsockopt(fd, _SO_ATTACH_FILTER, _DROP_ALL)
            self._blocked = True
        except OSError as err:
            log.warning(
                "a port of gloo stays open to other hosts: cannot attach a socket filter: %s",
                err,
            )

    def unblock(self) -> None:
        """Accept connections again."""
        if self._blocked:
            for fd in self._sockets:
                _setsockopt(fd, _SO_DETACH_FILTER, ctypes.c_int(0))
            self._blocked = False


def open_device(address: str) -> tuple[dist.ProcessGroupGloo.Device, DeviceListener]:
    """Create a gloo device that listens on an address of this host.

    Lazy connections are off regardless of TORCH_GLOO_LAZY_INIT: all peers connect at once, so the
    device need not listen later.
    """
    return watch_listeners(
        lambda: dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    )


def watch_listeners(make: Callable[[], T], count: int = 1) -> tuple[T, DeviceListener]:
    """Return the result of ``make`` and the ``count`` sockets that started to listen in it.

    If another thread started to listen meanwhile, the sockets cannot be distinguished. Then the
    `DeviceListener` has none, and a warning is logged.
    """
    with _creating_device:
        before = _open_sockets()
        made = make()
        new = _open_sockets() - before
    sockets = [fd for fd, _ in new if _is_listening(fd)]
    if len(sockets) != count:
        log.warning(
            "a port of gloo stays open to other hosts: %d sockets started to listen, but gloo "
            "opened %d",
            len(sockets),
            count,
        )
        sockets = []
    return made, DeviceListener(sockets)


def _open_sockets() -> set[tuple[int, int]]:
    """Return descriptor and inode of every socket of this process."""
    found = set()
    for name in os.listdir(descriptors.FD_DIRECTORY):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed meanwhile, as the directory itself
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add((int(name), status.st_ino))
    return found


def _is_listening(fd: int) -> bool:
    """Whether a socket listens. A Python socket object would change the blocking mode of ``fd``."""
    value, size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    asked = _libc.getsockopt(
        fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size)
    )
    return asked == 0 and value.value == 1


def _setsockopt(fd: int, option: int, value: ctypes.Structure | ctypes.c_int) -> None:
    size = ctypes.sizeof(value)
    if _libc.setsockopt(fd, socket.SOL_SOCKET, option, ctypes.byref(value), size) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_MIN_WAIT_S = 0.001
"""The shortest timeout of gloo, in seconds."""


class GlooLink:
    """One TCP connection to each peer over one interface.

    The caller owns ``device``, a gloo device that listens until all peers are connected. A
    `RendezvousError` names the rank, address, interface and duration if a peer could not be
    reached.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        interface: Interface,
        timeout: float,
        device: tuple[dist.ProcessGroupGloo.Device, DeviceListener] | None = None,
    ) -> None:
        self.name = interface.name
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        begin = time.monotonic()
        try:
            if device is None:
                device = open_device(interface.address)
            else:
                options._threads = 0  # only gloo's own collectives use them
            options._devices = [device[0]]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
            device[1].block()  # this rank is now connected to all others
        except GroupSetupError:  # raised by the store of a group
            raise
        except RuntimeError as err:
            raise RendezvousError(
                f"rank {rank} at {interface.address} on interface {interface.name} did not reach "
                f"all {size} ranks after {time.monotonic() - begin:.1f} s: {first_line(err)}; "
                "check that every host can reach this address, or name other interfaces"
            ) from None
        finally:
            # An exception keeps this frame alive, and the frame's variables would keep gloo
            # listening.
            del device, options

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> GlooPending:
        """As `Link.send`."""
        return GlooPending(self._open_group().send([tensor], peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> GlooPending:
        """As `Link.recv`. If posted early, the peer can send without a round trip."""
        return GlooPending(self._open_group().recv([tensor], peer, tag))

    def abort_waits(self, peer: int, tag: int = UNUSED_TAG) -> None:
        """End all waits on this link, in any thread: gloo ends them when one of them times out.

        ``tag`` is one that no message has.
        """
        with contextlib.suppress(RuntimeError):
            self.recv(torch.zeros(1), peer, tag).wait(_MIN_WAIT_S)

    def _open_group(self) -> dist.ProcessGroupGloo:
        """Return the group, or raise a `RuntimeError` if another channel has closed it."""
        group: dist.ProcessGroupGloo | None = getattr(self, "_group", None)
        if group is None:
            raise RuntimeError("the link is closed")
        return group

    def close(self) -> None:
        """Close the sockets. gloo does so when its group is destroyed."""
        self.__dict__.pop("_group", None)  # two threads may close it at the same time


class GlooPending:
    """A gloo transfer in progress."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, seconds: float) -> None:
        """Block without the GIL; a `RuntimeError` if the connection broke or ``seconds`` passed."""
        self._work.wait(_timedelta(seconds))


@lru_cache(maxsize=8)
def _timedelta(seconds: float) -> timedelta:
    """Cached: one object per timeout rather than per message."""
    return timedelta(seconds=seconds)


_MIN_POLL_S, _MID_POLL_S, _MAX_POLL_S = 0.0001, 0.01, 0.1
"""Seconds between two reads of the store: first, after some time, and after a long time."""

_SLOW_POLL_AFTER_S = 1.0
"""Seconds after which a member polls slowly, as many groups may wait at the same time."""

_CHECK_INTERVAL_S = 0.1
"""Seconds between two checks whether an awaited member can still join."""

_CONNECT_TIMEOUT_S = 30.0
"""Seconds to connect present members: normally milliseconds, but gloo sometimes blocks forever."""

_MAX_IDLE_DEVICES = 8
"""Maximum for each interface. Each device is a thread and a socket."""

_BARRIER_TAG = (1 << 31) - 1
"""Tag of the barrier after connection setup."""


_Device: TypeAlias = tuple[dist.ProcessGroupGloo.Device, DeviceListener]


class GlooGroups:
    """Creates the links of one worker's groups.

    Members find each other through ``store``, which is polled: a blocking wait would lock it for
    all other groups of this process. ``interfaces`` are those that the world uses on this host.
    ``authenticator`` signs the values that workers write; gloo's own values have no tag.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        interfaces: Sequence[Interface],
        authenticator: Authenticator | None = None,
    ) -> None:
        self._world_store, self._authenticator = store, authenticator
        self._rank, self._size = rank, size
        self._interfaces = interfaces
        self._starting = threading.Lock()
        self._store: dist.Store | None = None
        self._devices = [_DevicePool(interface) for interface in interfaces]
        self._closed = False

    def links(self, group: Group, timeout: float) -> tuple[Link, ...]:
        """Return one link per interface; they connect on first use within ``timeout`` seconds."""
        return tuple(
            self._link(interface.name, group, index, timeout)
            for index, interface in enumerate(self._interfaces)
        )

    def _link(self, name: str, group: Group, index: int, timeout: float) -> LazyLink:
        cancelled = threading.Event()
        return LazyLink(
            name, functools.partial(self._connect, group, index, timeout, cancelled), cancelled
        )

    def store(self) -> TorchStore:
        """Return the groups' own connection to the store, which other users do not block."""
        try:
            return PollingStore(self._start(), self._authenticator)
        except RuntimeError:  # the groups' links report the error
            return TorchStore(self._world_store, self._authenticator)

    def close(self) -> None:
        """Stop listening and close the connection to the store."""
        with self._starting:
            self._closed = True
            self._store = None
        for devices in self._devices:
            devices.close()

    def _start(self) -> dist.Store:
        """Return a connection to the store in which nothing blocks."""
        with self._starting:
            if self._closed:
                raise RuntimeError("wingbeat.shutdown() was called")
            if self._store is None:
                self._store = self._world_store.clone()
            return self._store

    def _connect(
        self, group: Group, index: int, timeout: float, cancelled: threading.Event
    ) -> Link:
        """Connect to all members over one interface, or raise a `GroupSetupError`."""
        try:
            store, devices = self._start(), self._devices[index]
        except RuntimeError as err:
            raise GroupSetupError(
                self._rank, f"{group}: this rank is not connected: {err}"
            ) from None
        shared = PollingStore(store, self._authenticator)
        setup = _SetupWait(group, self._rank, self._size, shared, timeout, cancelled)
        prefix = f"{group_prefix(group)}link{index}/"
        view = _GroupStore(store, prefix, self._rank, group.ranks, setup.wait_until)
        mine, size = group.ranks.index(self._rank), len(group.ranks)
        try:
            descriptors.require(
                descriptors.GLOO_DEVICE_DESCRIPTORS + size - 1,
                f"rank {self._rank}: connecting {group}",
            )
            view.set(f"here/{mine}", "")
            view.wait([f"here/{member}" for member in range(size)])
            connecting_s = min(timeout, _CONNECT_TIMEOUT_S)
            link = _GroupLink(devices, view, mine, size, connecting_s)
            _barrier(link, mine, group, connecting_s)
        except (RendezvousError, UsageError) as err:
            raise GroupSetupError(self._rank, f"{group}: {err}") from None
        finally:
            view.clear()
        return link


class _DevicePool:
    """The gloo devices of one interface, one per open group.

    A member that arrives after this one has aborted the setup must find no listener: gloo would
    report a connection that no longer exists and abort the process. The device of a failed setup is
    therefore never reused. Other devices are, as closing one takes 10 ms. A device listens only
    during a connection setup.
    """

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self._lock = threading.Lock()
        self._idle: list[_Device] = []
        self._closed = False

    def acquire(self) -> _Device:
        """Return a listening device that no open group uses."""
        with self._lock:
            if self._idle:
                device, listener = self._idle.pop()
                listener.unblock()
                return device, listener
        return open_device(self.interface.address)

    def release(self, device: _Device) -> None:
        """Return the device of a group that was connected."""
        with self._lock:
            if not self._closed and len(self._idle) < _MAX_IDLE_DEVICES:
                self._idle.append(device)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._idle.clear()


class _GroupLink(GlooLink):
    """A group's link on a device that it owns until it is closed."""

    def __init__(
        self, devices: _DevicePool, view: _GroupStore, mine: int, size: int, timeout: float
    ) -> None:
        device = devices.acquire()
        try:
            super().__init__(view, mine, size, devices.interface, timeout, device)
            self._devices, self._own = devices, [device]
            self._any_peer = (mine + 1) % size
        finally:
            del device

    def discard(self) -> None:
        """Close after a failed setup, without returning the device."""
        self._own.clear()
        self.close()

    def close(self) -> None:
        """Close the sockets, then return the device to the pool.

        Other threads may be waiting for transfers; gloo ends these when one wait times out.
        """
        self.abort_waits(self._any_peer, _BARRIER_TAG - 1)  # a tag that no message of a group has
        super().close()
        with contextlib.suppress(IndexError):  # another call has returned it
            self._devices.release(self._own.pop())


class _SetupWait:
    def __init__(
        self,
        group: Group,
        rank: int,
        size: int,
        store: TorchStore,
        timeout: float,
        cancelled: threading.Event,
    ) -> None:
        self._cancelled = cancelled
        self._group, self._rank, self._timeout = group, rank, timeout
        self._attribution = FailureAttribution(store, rank, size, timeout, group_prefix(group))
        self._deadline = time.monotonic() + timeout
        check_not_aborted(group, rank, self._attribution)

    def wait_until(self, done: Callable[[], bool], peer: int) -> None:
        """Wait for an action of ``peer``, or raise a `GroupSetupError`."""
        begin = time.monotonic()
        pause, ask = _MIN_POLL_S, begin + _CHECK_INTERVAL_S
        while not done():
            now = time.monotonic()
            if now >= ask:
                check_not_aborted(self._group, self._rank, self._attribution)
                ask = now + _CHECK_INTERVAL_S
                if self._attribution.has_exited(peer):
                    raise GroupSetupError(peer, f"rank {peer} left before it joined {self._group}")
            if now >= self._deadline:
                raise GroupSetupError(
                    peer,
                    f"rank {peer} did not join {self._group} within {self._timeout:g} s: every "
                    "member must open the group and make the same calls in it",
                )
            if self._cancelled.wait(pause):
                raise GroupSetupError(
                    self._rank, f"{self._group} was closed before all members had joined"
                )
            pause = min(2 * pause, _MID_POLL_S if now < begin + _SLOW_POLL_AFTER_S else _MAX_POLL_S)


class _GroupStore(dist.Store):  # type: ignore[misc]
    """The store that gloo uses during a connection setup; records the keys to delete."""

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        ranks: Sequence[int],
        wait_until: Callable[[Callable[[], bool], int], None],
    ) -> None:
        super().__init__()
        self._store, self._prefix, self._wait_until = store, prefix, wait_until
        self._rank, self._ranks = rank, ranks
        self._written: list[str] = []

    def clear(self) -> None:
        """Delete this member's keys. The others have read them or will never join."""
        with contextlib.suppress(RuntimeError):  # the store may be unavailable
            for key in self._written:
                self._store.delete_key(self._prefix + key)
        self._written.clear()

    def set(self, key: str, value: str | bytes) -> None:
        self._written.append(key)
        with self._store_errors():
            self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """As `dist.Store.get`, without locking the store."""
        found: list[bytes] = []

        def is_there() -> bool:
            with self._store_errors():
                value = read_key(self._store, self._prefix + key)
            found.extend([] if value is None else [value])
            return value is not None

        self._wait_until(is_there, self._peer(key))
        return found[0]

    def check(self, keys: list[str]) -> bool:
        with self._store_errors():
            return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """As `dist.Store.wait`, until the deadline of the setup."""
        for key in keys:
            self._wait_until(functools.partial(self.check, [key]), self._peer(key))

    def _peer(self, key: str) -> int:
        member = key.rpartition("/")[2]  # gloo's keys end with a member's index
        known = member.isdigit() and int(member) < len(self._ranks)
        return self._ranks[int(member) if known else 0]

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Convert a failure of the store into a `GroupSetupError` that names no other member."""
        try:
            yield
        except RuntimeError as err:
            text = f"the rendezvous store does not answer: {first_line(err)}"
            raise GroupSetupError(self._rank, text) from None

    def has_extended_api(self) -> bool:
        """Return False, so that gloo uses only the methods above."""
        return False


def _barrier(link: _GroupLink, mine: int, group: Group, timeout: float) -> None:
    """Wait until all members are connected, so that none leaves while another connects."""
    others = [k for k in range(len(group.ranks)) if k != mine]
    pending: list[tuple[int, Pending]] = []
    peer, lost = mine, ""
    try:
        for peer in others:
            out, into = torch.zeros(2, 1, dtype=torch.uint8)
            pending.append((peer, link.recv(into, peer, _BARRIER_TAG)))
            pending.append((peer, link.send(out, peer, _BARRIER_TAG)))
        while pending:
            peer = pending[0][0]
            pending[0][1].wait(timeout)
            del pending[0]
    except RuntimeError as err:
        lost = first_line(err)
    if lost:
        # Not in the handler: the exception's frames hold a transfer, and gloo closes nothing while
        # one is held.
        pending.clear()
        link.discard()
        who = group.ranks[peer]
        raise GroupSetupError(
            who, f"rank {who} was lost during the connection setup of {group}: {lost}"
        )
