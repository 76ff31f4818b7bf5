"""Links, which carry tensors between ranks over one network interface; channels; keys of groups."""

from __future__ import annotations

from collections.abc import Iterable
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

    def abort_waits(self) -> None:
        """End all waits on this link, in any thread."""

    def close(self) -> None:
        """Close every connection, so that transfers fail on both ends. Idempotent."""


TAG_BITS = 31
"""Bits of a tag in its channel, whose number follows above them."""

MAX_CHANNELS = 255
"""Maximum open channels, in addition to channel 0 of the world."""


def channel_tag(channel: int, tag: int) -> int:
    """Return a tag of one channel of a link.

    Two models in one process launch their buckets independently, in an order that may differ
    between workers. Each model has a channel, with its own threads and counters, so messages of two
    models never match.
    """
    return channel << TAG_BITS | tag


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
