"""Memory for chunks on their way, used again and again."""

from __future__ import annotations

from collections import defaultdict

import torch

MAX_FREE_BYTES = 256 << 20
"""How much memory is kept for later while nobody uses it. Five collectives overlap at most, so
this is enough for buckets of 100 MB that travel in half the bytes."""


class Scratch:
    """Flat CPU tensors to take and give back; for one thread.

    Sizes are rounded up to powers of two, so that any two chunks of about one size share memory
    and taking costs no search.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self._free_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of ``numel`` elements with any content."""
        capacity = 1 << max(0, numel - 1).bit_length()
        free = self._free[dtype, capacity]
        if not free:
            return torch.empty(capacity, dtype=dtype)[:numel]
        given = free.pop()
        whole = given._base
        assert whole is not None
        self._free_bytes -= whole.nbytes
        return given if given.numel() == numel else whole[:numel]

    def give(self, tensor: torch.Tensor) -> None:
        """Take back a tensor that `take` returned and that nobody reads or writes any more."""
        whole = tensor._base
        assert whole is not None, "not from take()"
        if self._free_bytes + whole.nbytes <= MAX_FREE_BYTES:
            # As it was given: what is taken next is mostly as long.
            self._free[whole.dtype, whole.numel()].append(tensor)
            self._free_bytes += whole.nbytes
