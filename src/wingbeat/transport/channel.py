"""Channels: several users of one link whose messages can never be taken for each other's.

Two models in one process launch their buckets independently of each other; which comes first may
differ from worker to worker. So each has a channel of its own: a part of every message's tag, and
threads and counters that no other channel shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    import torch

    from wingbeat.transport.link import Link, Pending

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
