"""NCCL groups for tensors on GPUs.

NCCL schedules its own chunks over all NICs on its own streams, so it runs whole collectives. A wait
orders streams and never blocks the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport.text import first_line


class NcclGroup:
    """In-place collectives of one ``torch.distributed`` group.

    Buffers are flat and their length is a multiple of ``size``; rank ``r`` owns the r-th of the
    equal blocks.
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
        """Send this rank's block to all ranks."""
        return dist.all_gather_into_tensor(
            buffer, self._mine(buffer), group=self.handle, async_op=True
        )

    def all_reduce(self, buffer: torch.Tensor) -> dist.Work:
        """Sum on all ranks."""
        return dist.all_reduce(buffer, group=self.handle, async_op=True)

    def all_to_all(self, into: torch.Tensor, buffer: torch.Tensor) -> dist.Work:
        """Send the r-th block of ``buffer`` to rank r; ``into`` receives one block of each rank."""
        return dist.all_to_all_single(into, buffer, group=self.handle, async_op=True)

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work:
        """Copy from rank ``root``."""
        return dist.broadcast(buffer, group_src=root, group=self.handle, async_op=True)

    def _mine(self, buffer: torch.Tensor) -> torch.Tensor:
        block = buffer.numel() // self.size
        return buffer[self.rank * block : (self.rank + 1) * block]


def nccl_group(
    rank: int, size: int, traffic_class: int | None = None, members: Sequence[int] = ()
) -> NcclGroup:
    """Create an NCCL group of all ranks, or of ``members``. Each of them must call it.

    ``traffic_class`` is the TOS byte of its traffic on InfiniBand and RoCE; None: NCCL's setting. A
    `RendezvousError` if this build of torch has no NCCL, or the ranks did not connect; a
    `UsageError` if it cannot set traffic classes.
    """
    try:
        options = None if traffic_class is None else _options(traffic_class)
        made = dist.new_group(
            list(members) or None,
            backend="nccl",
            pg_options=options,
            use_local_synchronization=bool(members),
        )
        return NcclGroup(made, rank, size)
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
            f"traffic classes on GPUs need torch 2.8 or later, and this is {torch.__version__}: "
            "use classes=1"
        )
    if options is not None:
        options.config.traffic_class = traffic_class
    return options
