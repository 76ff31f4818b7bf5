"""Sums of sparse tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from wingbeat.integrations.process_group.work import Background

if TYPE_CHECKING:
    from wingbeat.integrations.process_group.group import ProcessGroupWingbeat


class SparseSum(Background):
    """The sum of one coalesced sparse tensor of each rank; each receives those of all others."""

    def __init__(self, group: ProcessGroupWingbeat, tensor: torch.Tensor) -> None:
        super().__init__()
        self._group, self._tensor, self._total = group, tensor, tensor
        # Reserved now: messages of later operations may be sent before this thread has begun.
        self._tags = [group._collective_tag() for _ in range(3)]
        self.done()  # the other ranks need this rank's tensor

    def run(self) -> None:
        """As `Background.run`."""
        with torch.no_grad():
            counts = self._exchange(
                torch.tensor([self._tensor._nnz()], device="cpu"), [1] * self._group.size()
            )
            sizes = [int(count) for count in counts]
            indices, values = self._tensor.indices(), self._tensor.values()
            width, each = indices.shape[0], values[:1].numel()
            gathered = zip(
                self._exchange(indices.flatten(), [width * n for n in sizes]),
                self._exchange(values.flatten(), [each * n for n in sizes]),
                sizes,
                strict=True,
            )
            shape = self._tensor.shape
            parts = [
                torch.sparse_coo_tensor(
                    i.view(width, n), v.view(n, *values.shape[1:]), shape, device="cpu"
                )
                for i, v, n in gathered
            ]
            self._total = functools.reduce(operator.add, parts).coalesce()

    def _exchange(self, mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        received = [mine.new_empty(size) for size in sizes]
        received[self._group.rank()] = mine
        sends = [mine] * len(sizes)
        self._group._exchange("all-reduce", sends, received, self._tags.pop()).wait()
        return received

    def write(self, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the sum."""
        tensor.copy_(self._total)
