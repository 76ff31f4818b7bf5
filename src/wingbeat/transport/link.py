"""Links, which carry tensors between ranks over one network interface; channels; links of groups.

The members of a group connect in the thread that runs its collectives, so opening a group does not
block, and members may open groups in different orders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from wingbeat.errors import UsageError
from wingbeat.transport.failures import FailureAttribution
from wingbeat.types import Group

if TYPE_CHECKING:
    import torch


class Pending(Protocol):
    """A transfer in progress."""

    def wait(self, seconds: float) -> None:
        """Block until it is done; a `RuntimeError` if the peer is lost or ``seconds`` pass."""


class Link(Protocol):
    """Connections to all peers over one network interface.

    Tensors are contiguous and one-dimensional. Messages between two ranks with the same tag match
    in order. ``send`` may read the tensor, and ``recv`` may write to it, until ``wait`` returns.
    """

    @property
    def name(self) -> str:
        """Name of the interface, for messages and traces."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending ``tensor`` to rank ``peer``."""

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving into ``tensor`` from rank ``peer``."""

    def abort_waits(self, peer: int) -> None:
        """End all waits on this link, in any thread; ``peer`` is a rank that is awaited."""

    def close(self) -> None:
        """Close every connection, so that transfers fail on both ends. Idempotent.

        Release this end's pending transfers first: a library may keep their tensors.
        """


TAG_BITS = 31
"""Bits of a tag in ``torch.distributed``: a positive C ``int``."""

CHANNEL_BITS = 8
BITS_BELOW = TAG_BITS - CHANNEL_BITS
"""Bits available for the tags inside a channel."""

UNUSED_TAG = (1 << BITS_BELOW) - 1
"""A tag that no message has."""

MAX_CHANNELS = (1 << CHANNEL_BITS) - 1
"""Maximum open channels, in addition to channel 0 of the world."""


class ChannelLink:
    """A link restricted to one channel.

    Two models in one process launch their buckets independently, in an order that may differ
    between workers. Each model has a channel: a part of every tag, with its own threads and
    counters. Messages of two models therefore never match.
    """

    def __init__(self, link: Link, channel: int) -> None:
        self.link, self.channel, self.name = link, channel, link.name
        self._offset = channel << BITS_BELOW

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending ``tensor`` to rank ``peer`` in this channel."""
        return self.link.send(tensor, peer, self._offset + tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving from rank ``peer`` in this channel."""
        return self.link.recv(tensor, peer, self._offset + tag)

    def abort_waits(self, peer: int) -> None:
        """End all waits on the link, in all channels."""
        self.link.abort_waits(peer)

    def close(self) -> None:
        """Close the link for all channels: after a failure none of them can continue."""
        self.link.close()


def lowest_free(taken: Iterable[int]) -> int:
    """Return the lowest channel number from 1 that is not taken; a `UsageError` if all are in use.

    >>> lowest_free([1, 2, 4])
    3
    """
    used = set(taken)
    for channel in range(1, MAX_CHANNELS + 1):
        if channel not in used:
            return channel
    raise UsageError(
        f"more than {MAX_CHANNELS} channels are open: each distributed model needs one, and one "
        "more if it has buffers; call wingbeat.release(model, optimizer) on models that are done"
    )


class GroupSetupError(RuntimeError):
    """The members of a group did not connect; ``peer`` is the rank that was missing."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


def group_prefix(group: Group) -> str:
    """Return the prefix of all keys of a group in the store."""
    return f"group/{group.epoch}/{'-'.join(map(str, group.ranks))}/"


def member_waiting_for(rank: int, group: Group, attribution: FailureAttribution) -> int | None:
    """Return a member that failed while it waited for ``rank``, or None."""
    others = (member for member in group.ranks if member != rank)
    return next((member for member in others if attribution.awaited_by(member) == rank), None)


def aborted_text(group: Group, rank: int, who: int, attribution: FailureAttribution) -> str:
    """Return the error text of ``rank`` for a group that rank ``who`` aborted."""
    awaited, operation = attribution.awaited_by(who), attribution.operation(who)
    why = ""
    if awaited is not None:
        peer = "this rank" if awaited == rank else f"rank {awaited}"
        why = f", as it waited for {peer}" + (f" in {operation}" if operation else "")
    return (
        f"rank {who} has aborted {group}{why}: open a group of a later epoch to continue "
        "without the failed member"
    )


def check_not_aborted(group: Group, rank: int, attribution: FailureAttribution) -> None:
    """Raise a `GroupSetupError` if a member has aborted this group."""
    who = attribution.aborted_by()
    if who is not None and who != rank and who in group.ranks:
        missed_by = member_waiting_for(rank, group, attribution)
        who = who if missed_by is None else missed_by
        raise GroupSetupError(who, aborted_text(group, rank, who, attribution))


class LazyLink:
    """A group's link over one interface; ``connect`` creates it on first use.

    Closing it sets ``cancelled``, to cancel a connection setup in progress.
    """

    def __init__(
        self, name: str, connect: Callable[[], Link], cancelled: threading.Event | None = None
    ) -> None:
        self._cancelled = cancelled or threading.Event()
        self.name = name
        self._connect = connect
        self._link: Link | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def connected(self) -> bool:
        """Whether the members are connected."""
        return self._link is not None

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending to member ``peer``. The first call connects all members."""
        return self._connected().send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving from member ``peer``. The first call connects all members."""
        return self._connected().recv(tensor, peer, tag)

    def abort_waits(self, peer: int) -> None:
        """End all waits on the link."""
        if self._link is not None:
            self._link.abort_waits(peer)

    def _connected(self) -> Link:
        """Return the link. Only one thread calls this; another one may close it meanwhile."""
        if self._link is None:
            self._check_open()
            link = self._connect()
            with self._lock:
                self._link = link
        try:
            self._check_open()
        except RuntimeError:
            self._link.close()  # it connected after close() was called
            raise
        return self._link

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the link is closed")

    def close(self) -> None:
        """Close the connections, if any, and cancel a connection setup."""
        self._cancelled.set()
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()
