"""Whole parameters of this worker, for optimizers that look at more than one element at a time.

Buckets are cut between tensors, not into equal blocks: who reduces a block has the whole gradient
of each tensor in it, and makes its whole update. Tensors are given to workers by what their updates
cost, the same way on all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.updates import balance, nested
from wingbeat.engine.updates.shards import Layout, Piece, Shards
from wingbeat.engine.updates.stepper import State
from wingbeat.errors import PeerError, UsageError

Memories = dict[int, tuple[int, Any]]
"""By slot: the worker that has its state, and what the state is, as `nested.describe` says."""


class OwnedTensors(Shards):
    """All parameters that this worker owns, and their optimizer state, each as a whole."""

    _owners: dict[int, int]

    def _laid_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        """Cut the buckets, and find the parameters that are this worker's."""
        world = self._collectives.world
        loads = [0] * world.size
        self._owners = {}
        for bucket in buckets:
            owned = [self._stepper.owns(slot.param) for slot in bucket.slots]
            costs = [
                balance.work(slot.param.shape) if mine else 0
                for slot, mine in zip(bucket.slots, owned, strict=True)
            ]
            counts = balance.divide(costs, loads)
            lengths = [slot.elements for slot in bucket.slots]
            bucket.blocks = balance.blocks(lengths, counts, bucket.flat.numel())
            ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
            self._owners |= {s.index: r for s, r in zip(bucket.slots, ranks, strict=True)}
        return [Layout(bucket, bucket.owned(world.rank), self._stepper, True) for bucket in buckets]

    def _cut(self, _piece: Piece, _key: str, value: Any) -> Any:
        return value

    # -- whole state in and out, and moving ------------------------------------------------

    def _gather(self) -> State:
        parts: State = defaultdict(dict)
        memories = self._remembered()
        for index in sorted(memories):
            parts[self._slots[index].param] = self._sent(index, *memories[index])
        return parts

    def _move(self, layouts: list[Layout]) -> State:
        mine = {piece.slot.index: piece for piece in self.pieces}
        next_state: State = defaultdict(dict)
        by_slot = {piece.slot.index: piece for layout in layouts for piece in layout.pieces}
        memories = self._remembered()
        for index in sorted(memories):
            before, described = memories[index]
            if before != self._owners[index]:
                state = self._sent(index, before, described)
            elif index in mine:
                state = self.state[mine[index].stand_in]
            if index in by_slot:
                next_state[by_slot[index].stand_in] = state
        return next_state

    def _sent(self, index: int, owner: int, described: Any) -> dict[str, Any]:
        """Have one worker's state of a parameter sent to all; return it in new tensors."""
        world, param = self._collectives.world, self._slots[index].param
        length = -(-nested.room(described) // world.size) * world.size
        buffer = torch.zeros(length, dtype=torch.uint8, device=param.device)
        tensors = nested.cut(described, buffer)
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
            for tensor, on_host in zip(tensors, nested.on_host(described), strict=True)
        ]
        made: dict[str, Any] = nested.rebuild(described, iter(new))
        return made

    def _remembered(self) -> Memories:
        """Tell all workers what this one remembers, and hear what they do."""
        mine = [
            [piece.slot.index, self._described(piece.slot, self.state[piece.stand_in])]
            for piece in self.pieces
            if piece.stand_in in self.state
        ]
        world = self._collectives.world
        what = "optimizer state (shard_optimizer: every rank must ask for it)"
        merged: Memories = {}
        for rank, answer in enumerate(world.exchange(what, mine)):
            for index, described in _checked(answer, len(self._slots), world.rank, rank):
                if index in merged:
                    raise PeerError(
                        f"rank {world.rank}: rank {rank} sent an optimizer state of parameter "
                        f"{self._slots[index].name!r}, which rank {merged[index][0]} has"
                    )
                merged[index] = rank, described
        return merged

    def _described(self, slot: Slot, state: dict[str, Any]) -> Any:
        try:
            return nested.describe(state, [])
        except TypeError as err:
            raise UsageError(
                f"optimizer state of parameter {slot.name!r}: {err}; leave shard_optimizer out"
            ) from None


def _checked(answer: Any, slots: int, rank: int, peer: int) -> Iterator[tuple[int, Any]]:
    """Yield what a worker has sent, slot by slot, if it makes sense."""
    try:
        for index, described in answer:
            if type(index) is not int or not 0 <= index < slots or list(described) != ["dict"]:
                raise ValueError
            nested.check(described)
            yield index, described
    except (TypeError, ValueError):
        raise PeerError(
            f"rank {rank}: rank {peer} sent a malformed optimizer state: {str(answer)[:80]}"
        ) from None
