"""The port of torch's default group, which gloo opens.

gloo never closes an idle incoming connection, aborts the process if it has no descriptor for
another one, and cannot stop listening. Once all peers are connected, a socket filter therefore
drops every packet to the listening socket, so the kernel drops each connection attempt before gloo
sees it. Existing connections have their own sockets and are not affected.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from wingbeat.observe.log import log
from wingbeat.transport import descriptors

T = TypeVar("T")

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; not in Python
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

    @property
    def known(self) -> bool:
        """Whether there are sockets to block."""
        return bool(self._sockets)

    def block(self) -> None:
        """Drop all connection attempts from now on."""
        try:
            for fd in self._sockets:
                _setsockopt(fd, _SO_ATTACH_FILTER, _DROP_ALL)
        except OSError as err:
            log.warning(
                "a port of gloo stays open to other hosts: cannot attach a socket filter: %s",
                err,
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


def _setsockopt(fd: int, option: int, value: ctypes.Structure) -> None:
    size = ctypes.sizeof(value)
    if _libc.setsockopt(fd, socket.SOL_SOCKET, option, ctypes.byref(value), size) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
