"""Shards of whole parameters, for optimizers whose updates depend on more than one element.

Buckets are cut between tensors, not into equal blocks: the worker that reduces a block has the
whole gradient of each tensor in it, and computes its whole update. Tensors are assigned to workers
by the cost of their updates, in the same way on all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.updates import nested
from wingbeat.engine.updates.shards import OPTIMIZER_STATE, Layout, Piece, Shards
from wingbeat.engine.updates.stepper import State
from wingbeat.errors import PeerError, UsageError
from wingbeat.types import Span

Holders = dict[int, tuple[int, Any]]
"""By slot: the worker that holds its state, and the state's description (`nested.describe`)."""


class TensorShards(Shards):
    """The whole parameters that this worker owns, and their optimizer state."""

    _owners: dict[int, int]

    def _lay_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        """Cut the buckets, and determine this worker's parameters."""
        world = self._collectives.world
        loads = [0] * world.size
        self._owners = {}
        for bucket in buckets:
            owned = [self._stepper.owns(slot.param) for slot in bucket.slots]
            costs = [
                update_cost(slot.param.shape) if mine else 0
                for slot, mine in zip(bucket.slots, owned, strict=True)
            ]
            counts = partition(costs, loads)
            lengths = [slot.elements for slot in bucket.slots]
            bucket.blocks = spans_of(lengths, counts, bucket.flat.numel())
            ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
            self._owners |= {s.index: r for s, r in zip(bucket.slots, ranks, strict=True)}
        return [Layout(bucket, bucket.owned(world.rank), self._stepper, True) for bucket in buckets]

    def _cut(self, _piece: Piece, _key: str, value: Any) -> Any:
        return value

    # -- gathering and moving state --------------------------------------------------------

    def _gather(self) -> State:
        parts: State = defaultdict(dict)
        holders = self._find_holders()
        for index in sorted(holders):
            parts[self._slots[index].param] = self._broadcast(index, *holders[index])
        return parts

    def _move(self, layouts: list[Layout]) -> State:
        mine = {piece.slot.index: piece for piece in self.pieces}
        next_state: State = defaultdict(dict)
        by_slot = {piece.slot.index: piece for layout in layouts for piece in layout.pieces}
        holders = self._find_holders()
        for index in sorted(holders):
            before, description = holders[index]
            if before != self._owners[index]:
                state = self._broadcast(index, before, description)
            elif index in mine:
                state = self.state[mine[index].stand_in]
            if index in by_slot:
                next_state[by_slot[index].stand_in] = state
        return next_state

    def _broadcast(self, index: int, owner: int, description: Any) -> dict[str, Any]:
        """Broadcast one worker's state of a parameter; return it in new tensors."""
        world, param = self._collectives.world, self._slots[index].param
        length = -(-nested.nbytes(description) // world.size) * world.size
        buffer = torch.zeros(length, dtype=torch.uint8, device=param.device)
        tensors = nested.views(description, buffer)
        if owner == world.rank:
            [state] = [self.state[p.stand_in] for p in self.pieces if p.slot.index == index]
            own: list[torch.Tensor] = []
            nested.describe(state, own)
            for place, tensor in zip(tensors, own, strict=True):
                place.copy_(tensor)
        if length:
            self._collectives.broadcast(buffer, owner, label="optimizer state").wait()
        new = [
            tensor.cpu() if on_host and tensor.device.type != "cpu" else tensor.clone()
            for tensor, on_host in zip(tensors, nested.on_host(description), strict=True)
        ]
        made: dict[str, Any] = nested.rebuild(description, iter(new))
        return made

    def _find_holders(self) -> Holders:
        """Exchange descriptions of all workers' state."""
        mine = [
            [piece.slot.index, self._describe(piece.slot, self.state[piece.stand_in])]
            for piece in self.pieces
            if piece.stand_in in self.state
        ]
        world = self._collectives.world
        merged: Holders = {}
        for rank, answer in enumerate(world.exchange(OPTIMIZER_STATE, mine)):
            for index, description in _checked(answer, len(self._slots), world.rank, rank):
                if index in merged:
                    raise PeerError(
                        f"rank {world.rank}: rank {rank} sent an optimizer state of parameter "
                        f"{self._slots[index].name!r}, which rank {merged[index][0]} has"
                    )
                merged[index] = rank, description
        return merged

    def _describe(self, slot: Slot, state: dict[str, Any]) -> Any:
        try:
            return nested.describe(state, [])
        except TypeError as err:
            raise UsageError(
                f"optimizer state of parameter {slot.name!r}: {err}; leave shard_optimizer out"
            ) from None


def _checked(answer: Any, slots: int, rank: int, peer: int) -> Iterator[tuple[int, Any]]:
    try:
        for index, description in answer:
            if type(index) is not int or not 0 <= index < slots or list(description) != ["dict"]:
                raise ValueError
            nested.check(description)
            yield index, description
    except (TypeError, ValueError):
        raise PeerError(
            f"rank {rank}: rank {peer} sent a malformed optimizer state: {str(answer)[:80]}"
        ) from None


# -- assigning tensors to workers ---------------------------------------------------------


def update_cost(shape: Sequence[int]) -> int:
    """Return the relative cost of the update of a tensor.

    Updates of whole matrices multiply them: Muon's orthogonalisation has factors as long as the
    matrix's shorter side; further dimensions count as columns. A vector costs its elements.

    >>> update_cost((512, 64)), update_cost((64, 512)), update_cost((8, 4, 2))
    (2097152, 2097152, 512)
    >>> update_cost((512,)), update_cost(())
    (512, 1)
    """
    elements = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    return elements * min(rows, elements // max(1, rows))


def partition(costs: Sequence[int], loads: list[int]) -> list[int]:
    """Assign consecutive tensors to workers so that the largest load is minimal.

    Returns each worker's number of tensors, and adds the assigned costs to ``loads``.

    >>> loads = [0, 0]
    >>> partition([4, 4, 1, 1], loads), partition([3], loads), loads
    ([1, 3], [1, 0], [7, 6])
    """
    low, high = 0, max(loads) + sum(costs)
    while low < high:  # the least limit within which the workers can take all tensors
        middle = (low + high) // 2
        if sum(_fill(costs, loads, middle)) == len(costs):
            high = middle
        else:
            low = middle + 1
    counts = _fill(costs, loads, low)
    start = 0
    for worker, count in enumerate(counts):
        loads[worker] += sum(costs[start : start + count])
        start += count
    return counts


def _fill(costs: Sequence[int], loads: Sequence[int], limit: int) -> list[int]:
    counts, start = [], 0
    for load in loads:
        stop = start
        while stop < len(costs) and load + costs[stop] <= limit:
            load += costs[stop]
            stop += 1
        counts.append(stop - start)
        start = stop
    return counts


def spans_of(lengths: Sequence[int], counts: Sequence[int], length: int) -> tuple[Span, ...]:
    """Return each worker's span of a buffer of consecutive tensors, in elements.

    ``counts`` has each worker's number of tensors. The last span includes the rest of the buffer.

    >>> spans_of([5, 3, 2], [1, 0, 2], 12)
    (Span(start=0, stop=5), Span(start=5, stop=5), Span(start=5, stop=12))
    """
    out, start, first = [], 0, 0
    for count in counts:
        stop = start + sum(lengths[first : first + count])
        out.append(Span(start, stop))
        start, first = stop, first + count
    out[-1] = Span(out[-1].start, length)
    return tuple(out)
