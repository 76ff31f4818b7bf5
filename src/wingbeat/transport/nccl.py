"""Collectives that a library brings itself: NCCL for tensors on GPUs.

NCCL schedules its own chunks over all network cards, in streams of its own, so it is given
whole collectives rather than hops. Waiting orders streams; the host is never blocked.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport.text import first_line


class NativeGroup:
    """In-place collectives of one ``torch.distributed`` group.

    Buffers are flat and a multiple of ``size`` long; rank ``r`` owns the r-th of the equal blocks.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.handle = group
        self.rank = rank
        self.size = size

    def reduce_scatter(self, buffer: torch.Tensor) -> dist.Work:
        """Sum into this rank's block."""
        return dist.reduce_scatter_tensor(
            self._mine(buffer), buffer, group=self.handle, async_op=True
        )

    def all_gather(self, buffer: torch.Tensor) -> dist.Work:
        """Spread this rank's block."""
        return dist.all_gather_into_tensor(
            buffer, self._mine(buffer), group=self.handle, async_op=True
        )

    def all_reduce(self, buffer: torch.Tensor) -> dist.Work:
        """Sum everywhere."""
        return dist.all_reduce(buffer, group=self.handle, async_op=True)

    def all_to_all(self, into: torch.Tensor, buffer: torch.Tensor) -> dist.Work:
        """Send the r-th block of ``buffer`` to rank r; ``into`` gets one block of each rank."""
        return dist.all_to_all_single(into, buffer, group=self.handle, async_op=True)

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work:
        """Copy from rank ``root``."""
        return dist.broadcast(buffer, root, group=self.handle, async_op=True)

    def _mine(self, buffer: torch.Tensor) -> torch.Tensor:
        block = buffer.numel() // self.size
        return buffer[self.rank * block : (self.rank + 1) * block]


def nccl_group(rank: int, size: int, traffic_class: int | None = None) -> NativeGroup:
    """Make an NCCL group of all ranks; every rank must call it.

    Args:
        rank: this worker's number.
        size: how many there are.
        traffic_class: the TOS byte of what it sends, on InfiniBand and RoCE, where the network
            tells classes apart by it; None: whatever NCCL is set to.

    Raises:
        RendezvousError: this build of torch has no NCCL, or the ranks did not meet.
        UsageError: this build of torch cannot set traffic classes.
    """
    try:
        options = None if traffic_class is None else _options(traffic_class)
        return NativeGroup(dist.new_group(backend="nccl", pg_options=options), rank, size)
    except RuntimeError as err:
        raise RendezvousError(
            f"rank {rank}: no NCCL group of {size} ranks: {first_line(err)}; "
            "check that each rank has a GPU of its own (torch.cuda.set_device(LOCAL_RANK))"
        ) from None


def _options(traffic_class: int) -> Any:
    made = getattr(dist, "ProcessGroupNCCL", None)
    options = None if made is None else made.Options()
    if options is not None and not hasattr(options.config, "traffic_class"):
        raise UsageError(
            f"classes of flows on GPUs need torch 2.8 or later, and this is {torch.__version__}: "
            "use classes=1"
        )
    if options is not None:
        options.config.traffic_class = traffic_class
    return options
