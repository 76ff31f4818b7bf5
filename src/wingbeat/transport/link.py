"""Links carry tensors between ranks over one network interface; channels divide them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    import torch


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, seconds: float) -> None:
        """Block until it is done.

        Raises:
            RuntimeError: the peer is gone, or ``seconds`` have passed.
        """


class Link(Protocol):
    """All the peers as reached over one network interface.

    Tensors are contiguous and one-dimensional. Messages between two ranks with the same tag
    match in order. ``send`` may read the tensor, and ``recv`` write to it, until ``wait`` returns.
    """

    @property
    def name(self) -> str:
        """Name of the interface, for messages and pictures."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending ``tensor`` to rank ``peer``."""

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving into ``tensor`` from rank ``peer``."""

    def close(self) -> None:
        """Close every connection: the peers' transfers fail, and new ones here.

        Let go of this end's own pending transfers first: a library may keep what they refer to.
        May be called again.
        """


TAG_BITS = 31
"""What ``torch.distributed`` lets a tag have: a positive C ``int``."""

CHANNEL_BITS = 8
BITS_BELOW = TAG_BITS - CHANNEL_BITS
"""Bits that a channel's own tags may use."""

MAX_CHANNELS = (1 << CHANNEL_BITS) - 1
"""Channels at once, besides channel 0, which is the world's own."""


class ChannelLink:
    """A link as one channel sees it."""

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
        """Close the link for all its channels: after a failure none of them can go on."""
        self._link.close()


def lowest_free(taken: Iterable[int]) -> int:
    """Return the lowest channel from 1 on that nobody uses.

    Raises:
        UsageError: there is none left.

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
