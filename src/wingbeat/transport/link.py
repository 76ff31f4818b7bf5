"""Links carry tensors between ranks over one network interface; channels divide them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    import torch


class Pending(Protocol):
    """A transfer in progress."""

    def wait(self, seconds: float) -> None:
        """Block until the transfer is done.

        Raises:
            RuntimeError: the peer is gone, or ``seconds`` have passed.
        """


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

    def close(self) -> None:
        """Close every connection. Transfers of the peers fail, and so do new transfers here.

        Release this end's pending transfers first: a library may keep what they refer to. May be
        called again.
        """


TAG_BITS = 31
"""Bits of a tag in ``torch.distributed``: a positive C ``int``."""

CHANNEL_BITS = 8
BITS_BELOW = TAG_BITS - CHANNEL_BITS
"""Bits available for the tags inside a channel."""

MAX_CHANNELS = (1 << CHANNEL_BITS) - 1
"""Channels open at once, besides channel 0 of the world."""


class ChannelLink:
    """A link as seen by one channel.

    Two models in one process launch their buckets independently, in an order that may differ
    between workers. Each model has a channel: a part of every tag, with its own threads and
    counters, so messages of two models never match.
    """

    def __init__(self, link: Link, channel: int) -> None:
        self._link = link
        self._offset = channel << BITS_BELOW

    @property
    def name(self) -> str:
        """The interface's name."""
        return self._link.name

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending ``tensor`` to rank ``peer`` in this channel."""
        return self._link.send(tensor, peer, self._offset + tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving from rank ``peer`` in this channel."""
        return self._link.recv(tensor, peer, self._offset + tag)

    def close(self) -> None:
        """Close the link for all channels: after a failure none of them can continue."""
        self._link.close()


def lowest_free(taken: Iterable[int]) -> int:
    """Return the lowest channel number from 1 on that is not in ``taken``.

    Raises:
        UsageError: all channels are in use.

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
