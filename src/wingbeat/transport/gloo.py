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
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import psutil

from wingbeat.observe.log import log

T = TypeVar("T")

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; not in Python
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A ``struct sock_filter`` of linux/filter.h: keep 0 bytes of the packet."""

_creating_device = threading.Lock()
"""Held while a device is created: its socket is found by comparing sockets before and after."""


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
        instructions = ctypes.create_string_buffer(_DROP_ALL)
        program = struct.pack("HP", 1, ctypes.addressof(instructions))
        try:
            for fd in self._sockets:
                with socket.socket(fileno=os.dup(fd)) as copy:
                    copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
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
        before = _listening()
        made = make()
        sockets = [fd for fd, _ in _listening() - before]
    if len(sockets) != count:
        log.warning(
            "a port of gloo stays open to other hosts: %d sockets started to listen, but gloo "
            "opened %d",
            len(sockets),
            count,
        )
        sockets = []
    return made, DeviceListener(sockets)


def _listening() -> set[tuple[int, tuple[str, int]]]:
    """Return descriptor and address of each TCP socket on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {(each.fd, each.laddr) for each in found if each.status == psutil.CONN_LISTEN}
