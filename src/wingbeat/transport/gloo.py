"""A link over gloo: one process group bound to one network interface."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from wingbeat.errors import RendezvousError
from wingbeat.transport.channel import BITS_BELOW
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.link import Link
from wingbeat.transport.listener import Listener, open_device
from wingbeat.transport.meeting import NotMet
from wingbeat.transport.text import first_line

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
