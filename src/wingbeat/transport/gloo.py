"""Links over gloo: one process group for each network interface, and its listening sockets."""

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
from wingbeat.transport.group_links import NotMet
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.link import BITS_BELOW, Link
from wingbeat.transport.text import first_line

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


_NEVER_SENT_TAG = (1 << BITS_BELOW) - 1
_AT_ONCE_S = 0.001
"""The shortest that gloo can wait, in seconds."""


class GlooLink:
    """All peers over one interface, each by a TCP connection of its own.

    ``device`` is what gloo listens with, where the caller has one. It listens until all peers are
    connected.

    Raises:
        RendezvousError: a peer could not be reached; names rank, address, interface and wait.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        interface: Interface,
        timeout: float,
        device: tuple[dist.ProcessGroupGloo.Device, Listener] | None = None,
    ) -> None:
        self._name = interface.name
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        begin = time.monotonic()
        try:
            if device is None:
                device = open_device(interface.address)
            else:
                options._threads = 0  # those are for gloo's own collectives
            options._devices = [device[0]]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
            device[1].block()  # gloo has waited until this rank is connected to each other one
        except NotMet:  # raised by the store of a group's members
            raise
        except RuntimeError as err:
            raise RendezvousError(
                f"rank {rank} at {interface.address} on interface {interface.name} did not reach "
                f"all {size} ranks after {time.monotonic() - begin:.1f} s: {first_line(err)}; "
                "check that every host can reach this address, or name other interfaces"
            ) from None
        finally:
            # An error keeps this frame, which must not keep gloo listening.
            del device, options

    @property
    def name(self) -> str:
        """The interface's name."""
        return self._name

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> GlooPending:
        """Start sending; the tensor must stay unchanged until the wait returns."""
        return GlooPending(self._open_group().send([tensor], peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> GlooPending:
        """Start receiving; announcing it early lets the peer send without asking."""
        return GlooPending(self._open_group().recv([tensor], peer, tag))

    def _open_group(self) -> dist.ProcessGroupGloo:
        """Return the group, which several channels share.

        Raises:
            RuntimeError: one of them has lost a peer and closed it.
        """
        group: dist.ProcessGroupGloo | None = getattr(self, "_group", None)
        if group is None:
            raise RuntimeError("the link is closed")
        return group

    def close(self) -> None:
        """Close the sockets. Gloo does so when its group is destroyed."""
        self.__dict__.pop("_group", None)  # two threads may close it at once


class GlooPending:
    """A gloo transfer under way."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, seconds: float) -> None:
        """Block until it is done, without holding the interpreter's lock.

        Raises:
            RuntimeError: the connection broke or ``seconds`` passed.
        """
        self._work.wait(_timedelta(seconds))


def abort(link: Link, peer: int) -> None:
    """End all waits on a link, in whatever thread: gloo ends them when one has timed out."""
    with contextlib.suppress(RuntimeError):
        link.recv(torch.zeros(1), peer, _NEVER_SENT_TAG).wait(_AT_ONCE_S)


@lru_cache(maxsize=8)
def _timedelta(seconds: float) -> timedelta:
    """Made once for each deadline, and not for each message."""
    return timedelta(seconds=seconds)
