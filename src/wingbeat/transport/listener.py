"""The sockets that gloo listens with, and how they are shut to strangers.

gloo never closes a connection that sends nothing, aborts the process when it has no descriptor for
another one, and cannot stop listening. So once all peers are connected, a socket filter is attached
that drops every packet: the kernel then drops each attempt to connect, and gloo sees none of them.
Connections that exist go on, as each has a socket of its own. Detached, the filter lets the members
of another group connect.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from wingbeat.observe.log import log
from wingbeat.transport import descriptors

T = TypeVar("T")

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h; Python has no names for them
_BPF_RET_K = 0x06  # linux/filter.h: keep so many bytes of the packet; with 0 it is dropped

_libc = ctypes.CDLL(None, use_errno=True)
_creating = threading.Lock()
"""Held while a device is made, whose socket is found by comparing descriptors before and after."""


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


class Listener:
    """The listening sockets of a gloo device. Used only while the device exists.

    Args:
        sockets: their descriptors, which stay gloo's; none if they are not known.
    """

    def __init__(self, sockets: Sequence[int]) -> None:
        self._sockets = sockets
        self._blocked = False

    @property
    def known(self) -> bool:
        """Whether there is something to block."""
        return bool(self._sockets)

    def block(self) -> None:
        """Drop all attempts to connect from now on."""
        try:
            for fd in self._sockets:
                _set(fd, _SO_ATTACH_FILTER, _DROP_ALL)
            self._blocked = True
        except OSError as err:
            log.warning(
                "a port of gloo stays open to strangers, as no socket filter can be attached: %s",
                err,
            )

    def unblock(self) -> None:
        """Let peers connect again."""
        if self._blocked:
            for fd in self._sockets:
                _set(fd, _SO_DETACH_FILTER, ctypes.c_int(0))
            self._blocked = False


def open_device(address: str) -> tuple[dist.ProcessGroupGloo.Device, Listener]:
    """Make a gloo device that listens on an address of this host.

    Lazy connections are off whatever TORCH_GLOO_LAZY_INIT says: all connect at once, so that it
    need not listen later.
    """
    return listening(lambda: dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False))


def listening(make: Callable[[], T], count: int = 1) -> tuple[T, Listener]:
    """Return what ``make`` returns, and the ``count`` sockets that it has begun to listen with.

    If another thread has begun to listen meanwhile, nobody can tell whose socket is whose: then
    the `Listener` has none, and a warning says that the port stays open.
    """
    with _creating:
        before = _open_sockets()
        made = make()
        new = _open_sockets() - before
    sockets = [fd for fd, _ in new if _listens(fd)]
    if len(sockets) != count:
        log.warning(
            "a port of gloo stays open to strangers: %d sockets listen that did not before, of "
            "which %d are gloo's",
            len(sockets),
            count,
        )
        sockets = []
    return made, Listener(sockets)


def _open_sockets() -> set[tuple[int, int]]:
    """Return descriptor and inode of every socket of this process."""
    found = set()
    for name in os.listdir(descriptors.DIRECTORY):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed meanwhile, as that of the directory is
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add((int(name), status.st_ino))
    return found


def _listens(fd: int) -> bool:
    """Whether a socket listens. Python's own sockets would change whether ``fd`` blocks."""
    value, size = ctypes.c_int(), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    asked = _libc.getsockopt(
        fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size)
    )
    return asked == 0 and value.value == 1


def _set(fd: int, option: int, value: ctypes.Structure | ctypes.c_int) -> None:
    size = ctypes.sizeof(value)
    if _libc.setsockopt(fd, socket.SOL_SOCKET, option, ctypes.byref(value), size) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
