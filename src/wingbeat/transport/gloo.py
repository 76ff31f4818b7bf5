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
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TypeVar

import torch
import torch.distributed as dist

from wingbeat.errors import RendezvousError
from wingbeat.observe.log import log
from wingbeat.transport import descriptors
from wingbeat.transport.group_links import GroupSetupError
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.link import BITS_BELOW, Link
from wingbeat.transport.text import first_line

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


_UNUSED_TAG = (1 << BITS_BELOW) - 1
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
        self._name = interface.name
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

    @property
    def name(self) -> str:
        """Name of the interface."""
        return self._name

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> GlooPending:
        """As `Link.send`."""
        return GlooPending(self._open_group().send([tensor], peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> GlooPending:
        """As `Link.recv`. If posted early, the peer can send without a round trip."""
        return GlooPending(self._open_group().recv([tensor], peer, tag))

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


def abort_waits(link: Link, peer: int) -> None:
    """End all waits on a link, in any thread: gloo ends them when one of them times out."""
    with contextlib.suppress(RuntimeError):
        link.recv(torch.zeros(1), peer, _UNUSED_TAG).wait(_MIN_WAIT_S)


@lru_cache(maxsize=8)
def _timedelta(seconds: float) -> timedelta:
    """Cached: one object per timeout rather than per message."""
    return timedelta(seconds=seconds)
