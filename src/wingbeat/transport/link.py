"""The one interface between collectives and whatever carries the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

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
