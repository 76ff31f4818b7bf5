"""This worker's part of each parameter, and the optimizer's state of it.

A worker reduces one block of each bucket, and has whole gradients only there. It updates the parts
of parameters in its blocks. Each part has a stand-in, a tensor that the optimizer receives as a
parameter. When the buckets change, the parts change too, and the optimizer's state moves between
the workers.

Blocks are equal where updates are elementwise. Otherwise buckets are cut between parameters, whose
owners have their whole gradients and compute their whole updates.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucket import Bucket, Slot, broadcast_now, dtype_name
from wingbeat.engine.updates.json_values import (
    check_description,
    decode,
    describe,
    dtype_of,
    empty_tensors,
    encode,
    rebuild,
)
from wingbeat.engine.updates.stepper import State, Stepper
from wingbeat.errors import PeerError, UsageError
from wingbeat.types import Span

OPTIMIZER_STATE = "optimizer state (shard_optimizer: every rank must ask for it)"
"""The label of exchanges of state."""

StateKinds = dict[str, dict[str, Any]]
"""A parameter's state by name, in JSON: ``{"each": dtype}`` for one value per element,
``{"all": value}`` for one value per parameter.
"""

Holders = dict[int, tuple[int, Any]]
"""By slot: the worker that holds its state, and the state's description."""


class Piece:
    """A part of one parameter that this worker updates.

    Attributes:
        slot: the parameter's place in a bucket.
        span: its elements in the flattened parameter.
        place: the same elements in the bucket's buffer.
        stand_in: shape ``(len(span),)``; updated by the optimizer. It shares the parameter's memory
            if that is contiguous. Where parameters are owned as wholes it has the parameter's
            shape, and always its memory.
    """

    __slots__ = ("place", "slot", "span", "stand_in", "whole")

    def __init__(self, slot: Slot, span: Span, place: Span, whole: bool = False) -> None:
        self.slot = slot
        self.whole = whole
        self.span = span
        self.place = place
        self.stand_in = torch.nn.Parameter(self._values(), slot.param.requires_grad)

    def refresh(self) -> None:
        """Read the parameter's values, which the user may have changed or reallocated."""
        self.stand_in.data = self._values()

    def _values(self) -> torch.Tensor:
        whole = self.slot.param.detach()
        if self.whole:
            return whole
        part = slice(self.span.start, self.span.stop)
        return whole.view(-1)[part] if whole.is_contiguous() else whole.reshape(-1)[part].clone()


def copy_parameter(slot: Slot, own: Piece | None) -> None:
    """Copy a parameter from its bucket, except for the part that was updated in place."""
    if not slot.param.is_contiguous():
        slot.param.copy_(slot.view)
        return
    whole, source = slot.param.detach().view(-1), slot.view.view(-1)
    if own is None:
        whole.copy_(source)
        return
    for part in (slice(0, own.span.start), slice(own.span.stop, None)):
        whole[part].copy_(source[part])


class Layout:
    """The parameters in a bucket's buffer, and this worker's pieces of them."""

    def __init__(self, bucket: Bucket, own: Span, whole_tensors: bool = False) -> None:
        self.length = bucket.flat.numel()
        self.device = bucket.flat.device
        self.slots: list[tuple[Slot, Span]] = []
        self.members = [slot.index for slot in bucket.slots]
        self.pieces: list[Piece] = []
        start = 0
        for slot in bucket.slots:
            whole = Span(start, start + slot.param.numel())
            start = whole.stop
            self.slots.append((slot, whole))
            mine = Span(max(whole.start, own.start), min(whole.stop, own.stop))
            if mine and slot.owned:
                span = Span(mine.start - whole.start, mine.stop - whole.start)
                self.pieces.append(Piece(slot, span, mine, whole_tensors))


class Shards:
    """All of this worker's pieces and their optimizer state.

    Attributes:
        state: by stand-in, as an optimizer holds it; 1 / P of the whole on each of P workers.
        steps: number of steps, including those before a restart.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stepper: Stepper,
        collectives: Collectives,
        slots: Sequence[Slot],
        each: dict[str, bool],
    ) -> None:
        self.state: State = defaultdict(dict)
        self.steps = 0
        self._optimizer = optimizer
        self._stepper = stepper
        self._collectives = collectives
        self._slots = slots
        self._each = each
        self._layouts: list[Layout] = []

    def pieces_in(self, bucket: Bucket) -> list[Piece]:
        """Return the pieces in a bucket of the current plan."""
        return self._layouts[bucket.index].pieces

    @property
    def pieces(self) -> list[Piece]:
        """All pieces of this worker."""
        return [piece for layout in self._layouts for piece in layout.pieces]

    def has_each(self, piece: Piece, key: str) -> bool:
        """Whether the state of this name has one value per element of the piece."""
        value, shape = self.state[piece.stand_in][key], piece.stand_in.shape
        return isinstance(value, torch.Tensor) and self._each.get(key, value.shape == shape)

    def rebuild(self, buckets: Sequence[Bucket]) -> None:
        """Change to the pieces of the next plan; every worker must do so at the same time.

        State moves to its new owners one tensor or parameter at a time, which limits memory.
        """
        layouts, before = self._lay_out(buckets), self._layouts
        if not before:
            self._layouts = layouts
            self.load_from_optimizer()
        elif [a.members for a in layouts] != [a.members for a in before]:
            self.state = self._move(layouts)
            self._layouts = layouts

    def _lay_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        return [Layout(bucket, self._collectives.owned(bucket.flat.numel())) for bucket in buckets]

    # -- whole state in and out -----------------------------------------------------------

    def load_from_optimizer(self) -> None:
        """Keep this worker's part of the whole state that the optimizer has loaded."""
        whole: State = self._optimizer.__dict__["state"]
        loaded = {slot.param: whole.pop(slot.param, None) for slot in self._slots}
        self.state = defaultdict(dict)
        for piece in self.pieces:
            found = loaded[piece.slot.param]
            if found is not None:
                self.state[piece.stand_in] = {
                    key: self._cut(piece, key, value) for key, value in found.items()
                }

    def _cut(self, piece: Piece, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = piece.slot.param.shape
        if not self._each.get(key, value.shape == shape):
            return value.clone()
        if value.shape != shape:
            raise UsageError(
                f"optimizer state {key!r} of parameter {piece.slot.name!r} has shape "
                f"{tuple(value.shape)}, and must have the parameter's, {tuple(shape)}: load the "
                "state of the same model"
            )
        return value.detach().reshape(-1)[piece.span.start : piece.span.stop].clone()

    def whole(self) -> State:
        """Gather the whole state by parameter, in new tensors; every worker must call this."""
        parts = self._gather()
        others: State = self._optimizer.__dict__["state"]
        known = {**others, **parts}
        order = [p for p in self._stepper.params() if p in known]
        return defaultdict(dict, {key: known[key] for key in [*order, *others]})

    def _gather(self) -> State:
        known = self._exchange_kinds()
        gathered: dict[torch.Tensor, dict[str, Any]] = {}
        for slot, key, value in self._gather_each(self._layouts, known):
            whole = torch.empty_like(slot.param, dtype=value.dtype).detach()
            whole.copy_(value.view(slot.param.shape))
            gathered.setdefault(slot.param, {})[key] = whole
        parts = {
            slot.param: _complete(slot, known[slot.index], gathered.get(slot.param, {}))
            for slot in self._slots
            if slot.index in known
        }
        return defaultdict(dict, parts)

    def _move(self, layouts: list[Layout]) -> State:
        """Return the state of the pieces of these layouts; drop that of the former ones."""
        known = self._exchange_kinds()
        by_slot = {piece.slot.index: piece for layout in layouts for piece in layout.pieces}
        tensors: dict[int, dict[str, Any]] = {}
        for layout in self._layouts:
            for slot, key, value in self._gather_each([layout], known):
                piece = by_slot.get(slot.index)
                if piece is not None:
                    part = value[piece.span.start : piece.span.stop].clone()
                    tensors.setdefault(slot.index, {})[key] = part
            for piece in layout.pieces:
                self.state.pop(piece.stand_in, None)
        moved = {
            piece.stand_in: _complete(piece.slot, known[index], tensors.get(index, {}))
            for index, piece in by_slot.items()
            if index in known
        }
        return defaultdict(dict, moved)

    def _gather_each(
        self, layouts: Iterable[Layout], known: dict[int, StateKinds]
    ) -> Iterator[tuple[Slot, str, torch.Tensor]]:
        """Gather the state by bucket; yield each parameter's, flat, in a temporary buffer."""
        for layout in layouts:
            kinds = {
                (key, kind["each"]): None
                for index in layout.members
                for key, kind in known.get(index, {}).items()
                if "each" in kind
            }
            for key, dtype in kinds:
                buffer = self._gather_bucket(layout, key, dtype_of(dtype))
                for slot, place in layout.slots:
                    if known.get(slot.index, {}).get(key, {}).get("each") == dtype:
                        yield slot, key, buffer[place.start : place.stop]

    def _gather_bucket(self, layout: Layout, key: str, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros(layout.length, dtype=dtype, device=layout.device)
        for piece in layout.pieces:
            value = self.state.get(piece.stand_in, {}).get(key)
            if isinstance(value, torch.Tensor) and value.dtype is dtype:
                buffer[piece.place.start : piece.place.stop].copy_(value.view(-1))
        self._collectives.all_gather(buffer, label="optimizer state").wait()
        return buffer

    def _exchange_kinds(self) -> dict[int, StateKinds]:
        """Exchange the kinds of all workers' state, by slot."""
        mine = sorted(
            (json.dumps(self._kinds(piece)), piece.slot.index)
            for piece in self.pieces
            if piece.stand_in in self.state
        )
        # Many parameters have the same kinds of state, which are sent once.
        packed = [
            [json.loads(text), [index for _, index in group]]
            for text, group in itertools.groupby(mine, key=lambda pair: pair[0])
        ]
        world = self._collectives.world
        merged: dict[int, StateKinds] = {}
        for rank, answer in enumerate(world.exchange(OPTIMIZER_STATE, packed)):
            for index, kinds in self._checked(answer, rank):
                known = merged.setdefault(index, kinds)
                if json.dumps(known) != json.dumps(kinds):
                    raise PeerError(
                        f"rank {world.rank}: rank {rank} has another optimizer state of "
                        f"parameter {self._slots[index].name!r} than the ranks before it"
                    )
        return merged

    def _kinds(self, piece: Piece) -> StateKinds:
        kinds: StateKinds = {}
        for key, value in self.state[piece.stand_in].items():
            if self.has_each(piece, key):
                kinds[key] = {"each": dtype_name(value.dtype)}
                continue
            try:
                kinds[key] = {"all": encode(value)}
            except TypeError as err:
                raise UsageError(
                    f"optimizer state {key!r} of parameter {piece.slot.name!r}: {err}; "
                    "leave shard_optimizer out"
                ) from None
        return kinds

    def _checked(self, answer: Any, peer: int) -> Iterator[tuple[int, Any]]:
        """Yield the entries of a peer's answer; raise a `PeerError` for a malformed one."""
        try:
            yield from self._parse(answer)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise PeerError(
                f"rank {self._collectives.world.rank}: rank {peer} sent a malformed optimizer "
                f"state: {str(answer)[:80]}"
            ) from None

    def _parse(self, answer: Any) -> Iterator[tuple[int, Any]]:
        for kinds, indices in answer:
            for kind in kinds.values():
                if kind.keys() == {"each"}:
                    dtype_of(kind["each"])
                elif kind.keys() == {"all"}:
                    decode(kind["all"], torch.device("cpu"))
                else:
                    raise ValueError
            for index in indices:
                if not isinstance(index, int) or not 0 <= index < len(self._slots):
                    raise ValueError
                yield index, kinds


def _complete(slot: Slot, kinds: StateKinds, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return one parameter's state in the optimizer's own order."""
    device = slot.param.device
    return {
        key: tensors[key] if "each" in kind else decode(kind["all"], device)
        for key, kind in kinds.items()
    }


class TensorShards(Shards):
    """The whole parameters that this worker owns, and their optimizer state.

    Parameters are assigned by the cost of their updates, in the same way on all workers.
    """

    _owners: dict[int, int]

    def _lay_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        world = self._collectives.world
        loads = [0] * world.size
        self._owners = {}
        for bucket in buckets:
            costs = [update_cost(slot.param.shape) if slot.owned else 0 for slot in bucket.slots]
            counts = partition(costs, loads)
            lengths = [slot.elements for slot in bucket.slots]
            bucket.blocks = spans_of(lengths, counts, bucket.flat.numel())
            ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
            self._owners |= {s.index: r for s, r in zip(bucket.slots, ranks, strict=True)}
        return [Layout(bucket, bucket.owned(world.rank), True) for bucket in buckets]

    def _cut(self, _piece: Piece, _key: str, value: Any) -> Any:
        return value

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
        tensors = list(empty_tensors(description, self._slots[index].param.device))
        if owner == self._collectives.world.rank:
            [state] = [self.state[p.stand_in] for p in self.pieces if p.slot.index == index]
            own: list[torch.Tensor] = []
            describe(state, own)
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value)
        broadcast_now(tensors, self._collectives, owner, label="optimizer state")
        made: dict[str, Any] = rebuild(description, iter(tensors))
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
            for index, description in self._checked(answer, rank):
                if index in merged:
                    raise PeerError(
                        f"rank {world.rank}: rank {rank} sent an optimizer state of parameter "
                        f"{self._slots[index].name!r}, which rank {merged[index][0]} has"
                    )
                merged[index] = rank, description
        return merged

    def _describe(self, slot: Slot, state: dict[str, Any]) -> Any:
        try:
            return describe(state, [])
        except TypeError as err:
            raise UsageError(
                f"optimizer state of parameter {slot.name!r}: {err}; leave shard_optimizer out"
            ) from None

    def _parse(self, answer: Any) -> Iterator[tuple[int, Any]]:
        for index, description in answer:
            in_range = type(index) is int and 0 <= index < len(self._slots)
            if not in_range or list(description) != ["dict"]:
                raise ValueError
            check_description(description)
            yield index, description


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
