"""Hands whole collectives to a native group, behind the same handle as those made of Steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat.errors import PeerError
from wingbeat.transport.gloo import first_line
from wingbeat.transport.world import World

if TYPE_CHECKING:
    import torch


class NativeJob:
    """A collective that the library runs by itself, in the order of submission."""

    def __init__(self, work: Any, what: str, rank: int) -> None:
        self._work = work
        self._what = what
        self._rank = rank

    def wait(self) -> None:
        """Make what follows see the result; on a GPU this orders streams, not the host.

        Raises:
            PeerError: the library reported a failure.
        """
        try:
            self._work.wait()
        except RuntimeError as err:
            raise PeerError(
                f"rank {self._rank}: {self._what.replace('_', '-')} failed: {first_line(err)}"
            ) from None

    def wait_received(self) -> None:
        """As `wait`: the library does not tell the two apart."""
        self.wait()


def start(world: World, what: str, buffer: torch.Tensor) -> NativeJob:
    """Start ``what`` in place on ``buffer``, whose length is a multiple of the world's size."""
    name, _, root = what.partition(":")
    group = world.native
    if name == "broadcast":
        return NativeJob(group.broadcast(buffer, int(root)), name, world.rank)
    return NativeJob(getattr(group, name)(buffer), name, world.rank)
