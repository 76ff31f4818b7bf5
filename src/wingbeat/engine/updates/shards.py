"""This worker's part of each parameter, and the optimizer's state of it.

A worker reduces one block of each bucket, and has whole gradients only there. It updates the parts
of parameters in its blocks. Each part has a stand-in, a flat tensor that the optimizer receives as
a parameter. When the buckets change, the parts change too, and the optimizer's state moves between
the workers.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.updates.json_values import decode, dtype_of, encode
from wingbeat.engine.updates.stepper import State, Stepper
from wingbeat.errors import PeerError, UsageError
from wingbeat.types import Span

OPTIMIZER_STATE = "optimizer state (shard_optimizer: every rank must ask for it)"
"""The label of exchanges of state."""

StateKinds = dict[str, dict[str, Any]]
"""A parameter's state by name, in JSON: ``{"each": dtype}`` for one value per element,
``{"all": value}`` for one value per parameter.
"""


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

    def __init__(
        self, bucket: Bucket, own: Span, stepper: Stepper, whole_tensors: bool = False
    ) -> None:
        self.length = bucket.flat.numel()
        self.device = bucket.flat.device
        self.slots: list[tuple[Slot, Span]] = []
        self.pieces: list[Piece] = []
        start = 0
        for slot in bucket.slots:
            whole = Span(start, start + slot.param.numel())
            start = whole.stop
            self.slots.append((slot, whole))
            mine = Span(max(whole.start, own.start), min(whole.stop, own.stop))
            if mine and stepper.owns(slot.param):
                span = Span(mine.start - whole.start, mine.stop - whole.start)
                self.pieces.append(Piece(slot, span, mine, whole_tensors))

    @property
    def members(self) -> list[int]:
        """The slots' indices, in order."""
        return [slot.index for slot, _ in self.slots]


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
    def built(self) -> bool:
        """Whether there has been a plan."""
        return bool(self._layouts)

    @property
    def pieces(self) -> list[Piece]:
        """All pieces of this worker."""
        return [piece for layout in self._layouts for piece in layout.pieces]

    def has_each(self, piece: Piece, key: str) -> bool:
        """Whether the state of this name has one value per element of the piece."""
        value = self.state[piece.stand_in][key]
        return isinstance(value, torch.Tensor) and self._is_each(
            key, value.shape, piece.stand_in.shape
        )

    def build(self, buckets: Sequence[Bucket]) -> None:
        """Determine the pieces of the first plan."""
        self._layouts = self._lay_out(buckets)

    # -- whole state in and out -----------------------------------------------------------

    def take_over(self) -> None:
        """Keep this worker's part of the whole state that the optimizer has loaded."""
        whole: State = self._optimizer.__dict__["state"]
        taken = {slot.param: whole.pop(slot.param, None) for slot in self._slots}
        self.state = defaultdict(dict)
        for piece in self.pieces:
            found = taken[piece.slot.param]
            if found is not None:
                self.state[piece.stand_in] = {
                    key: self._cut(piece, key, value) for key, value in found.items()
                }

    def _cut(self, piece: Piece, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = piece.slot.param.shape
        if not self._is_each(key, value.shape, shape):
            return value.clone()
        if value.shape != shape:
            raise UsageError(
                f"optimizer state {key!r} of parameter {piece.slot.name!r} has shape "
                f"{tuple(value.shape)}, and must have the parameter's, {tuple(shape)}: load the "
                "state of the same model"
            )
        return value.detach().reshape(-1)[piece.span.start : piece.span.stop].clone()

    def _is_each(self, key: str, shape: torch.Size, own: torch.Size) -> bool:
        return self._each.get(key, shape == own)

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
        for slot, key, value in self._travelling(self._layouts, known):
            whole = torch.empty_like(slot.param, dtype=value.dtype).detach()
            whole.copy_(value.view(slot.param.shape))
            gathered.setdefault(slot.param, {})[key] = whole
        parts = {
            slot.param: self._filled(slot, known[slot.index], gathered.get(slot.param, {}))
            for slot in self._slots
            if slot.index in known
        }
        return defaultdict(dict, parts)

    def _filled(self, slot: Slot, kinds: StateKinds, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return one parameter's state in the optimizer's own order."""
        device = slot.param.device
        return {
            key: tensors[key] if "each" in kind else decode(kind["all"], device)
            for key, kind in kinds.items()
        }

    # -- moving ---------------------------------------------------------------------------

    def rebuild(self, buckets: Sequence[Bucket]) -> None:
        """Change to the pieces of the next plan; every worker must do so at the same time.

        State moves to its new owners one tensor or parameter at a time, which limits memory.
        """
        layouts = self._lay_out(buckets)
        if [a.members for a in layouts] == [a.members for a in self._layouts]:
            return
        self.state = self._move(layouts)
        self._layouts = layouts

    def _move(self, layouts: list[Layout]) -> State:
        """Return the state of the pieces of these layouts; drop that of the former ones."""
        known = self._exchange_kinds()
        next_state: State = defaultdict(dict)
        by_slot = {piece.slot.index: piece for layout in layouts for piece in layout.pieces}
        tensors: dict[int, dict[str, Any]] = {}
        for layout in self._layouts:
            for slot, key, value in self._travelling([layout], known):
                piece = by_slot.get(slot.index)
                if piece is not None:
                    part = value[piece.span.start : piece.span.stop].clone()
                    tensors.setdefault(slot.index, {})[key] = part
            for piece in layout.pieces:
                self.state.pop(piece.stand_in, None)
        for index, piece in by_slot.items():
            if index in known:
                next_state[piece.stand_in] = self._filled(
                    piece.slot, known[index], tensors.get(index, {})
                )
        return next_state

    def _lay_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        return [
            Layout(bucket, self._collectives.owned(bucket.flat.numel()), self._stepper)
            for bucket in buckets
        ]

    def _travelling(
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
                buffer = self._gathered(layout, key, dtype_of(dtype))
                for slot, place in layout.slots:
                    if known.get(slot.index, {}).get(key, {}).get("each") == dtype:
                        yield slot, key, buffer[place.start : place.stop]

    def _gathered(self, layout: Layout, key: str, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros(layout.length, dtype=dtype, device=layout.device)
        for piece in layout.pieces:
            value = self.state.get(piece.stand_in, {}).get(key)
            if isinstance(value, torch.Tensor) and value.dtype is dtype:
                buffer[piece.place.start : piece.place.stop].copy_(value.view(-1))
        self._collectives.all_gather(buffer, label="optimizer state").wait()
        return buffer

    # -- which worker has which state -----------------------------------------------------

    def _exchange_kinds(self) -> dict[int, StateKinds]:
        """Exchange the kinds of all workers' state, by slot."""
        mine: list[tuple[str, int]] = []
        for piece in self.pieces:
            if piece.stand_in in self.state:
                mine.append((json.dumps(self._kinds(piece)), piece.slot.index))
        # Many parameters have the same kinds of state, which are sent once.
        packed = [
            [json.loads(text), [index for _, index in group]]
            for text, group in itertools.groupby(sorted(mine), key=lambda pair: pair[0])
        ]
        world = self._collectives.world
        merged: dict[int, StateKinds] = {}
        for rank, answer in enumerate(world.exchange(OPTIMIZER_STATE, packed)):
            for index, kinds in _checked(answer, len(self._slots), world.rank, rank):
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
                kinds[key] = {"each": str(value.dtype).removeprefix("torch.")}
                continue
            try:
                kinds[key] = {"all": encode(value)}
            except TypeError as err:
                raise UsageError(
                    f"optimizer state {key!r} of parameter {piece.slot.name!r}: {err}; "
                    "leave shard_optimizer out"
                ) from None
        return kinds


def _checked(answer: Any, slots: int, rank: int, peer: int) -> Iterator[tuple[int, StateKinds]]:
    try:
        for kinds, indices in answer:
            for kind in kinds.values():
                if kind.keys() == {"each"}:
                    dtype_of(kind["each"])
                elif kind.keys() == {"all"}:
                    decode(kind["all"], torch.device("cpu"))
                else:
                    raise ValueError
            for index in indices:
                if not isinstance(index, int) or not 0 <= index < slots:
                    raise ValueError
                yield index, kinds
    except (AttributeError, KeyError, TypeError, ValueError):
        raise PeerError(
            f"rank {rank}: rank {peer} sent a malformed optimizer state: {str(answer)[:80]}"
        ) from None
