"""This worker's part of each parameter, and what the optimizer remembers of it.

A worker reduces one block of each bucket, so it knows the whole gradient there and nowhere else.
The parts of parameters that lie in its blocks are what it updates; each has a stand-in, a flat
tensor that the optimizer takes for a parameter. When the buckets change, so do the parts, and
the optimizer's state moves between the workers.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.updates.stepper import State, Stepper
from wingbeat.errors import PeerError, UsageError
from wingbeat.servers.values import decode, dtype_of, encode
from wingbeat.types import Span

Memory = dict[str, dict[str, Any]]
"""What is remembered of one parameter, by name: ``{"each": dtype}`` where there is a value for
each element, ``{"all": value}``, in JSON, where one value is for the whole parameter."""


class DividedState(Mapping[Any, Any]):
    """Stands for an optimizer's state that lies elsewhere: not empty, not readable.

    Args:
        count: of its parts.
        why: where it lies, and how to have it.
    """

    def __init__(self, count: int, why: str) -> None:
        self._count, self._why = count, why

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, _key: Any) -> NoReturn:
        raise UsageError(f"optimizer.state with {self._why}")

    def __iter__(self) -> Iterator[Any]:
        return self[None]

    def __setitem__(self, key: Any, _value: Any) -> None:
        self[key]

    def __delitem__(self, key: Any) -> None:
        self[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


class Piece:
    """A part of one parameter that this worker updates.

    Attributes:
        slot: the parameter's place in a bucket.
        span: which elements of the parameter, flattened.
        place: where they lie in the bucket's buffer.
        stand_in: shape ``(len(span),)``; what the optimizer updates. It shares the parameter's
            memory where that is laid out in order, and has its own otherwise. Where parameters are
            owned as wholes it has the parameter's shape, and always its memory.
    """

    __slots__ = ("place", "slot", "span", "stand_in", "whole")

    def __init__(self, slot: Slot, span: Span, place: Span, whole: bool = False) -> None:
        self.slot = slot
        self.whole = whole
        self.span = span
        self.place = place
        self.stand_in = torch.nn.Parameter(self._values(), slot.param.requires_grad)

    def refresh(self) -> None:
        """Take the parameter's values, which somebody may have changed or moved elsewhere."""
        self.stand_in.data = self._values()

    def _values(self) -> torch.Tensor:
        whole = self.slot.param.detach()
        if self.whole:
            return whole
        part = slice(self.span.start, self.span.stop)
        return whole.view(-1)[part] if whole.is_contiguous() else whole.reshape(-1)[part].clone()


def take_parameter(slot: Slot, own: Piece | None) -> None:
    """Copy a parameter from its bucket, except for what was updated in place here."""
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
    """Where parameters lie in a bucket's buffer, and what of it is this worker's."""

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
        steps: how many steps have been made, also before a restart.
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
        """Return the pieces that lie in a bucket of the plan in force."""
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
        """Whether the state of this name has a value for each element of the piece."""
        value = self.state[piece.stand_in][key]
        return isinstance(value, torch.Tensor) and self._is_each(
            key, value.shape, piece.stand_in.shape
        )

    def build(self, buckets: Sequence[Bucket]) -> None:
        """Find the pieces of the first plan."""
        self._layouts = self._laid_out(buckets)

    # -- whole state in and out -----------------------------------------------------------

    def take_over(self) -> None:
        """Cut the state that the optimizer holds whole, as after loading, and forget the rest.

        Raises:
            UsageError: a tensor in it has another shape than its parameter.
        """
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
        """Gather what all workers remember; every worker must call this.

        Returns:
            The state by parameter, in the optimizer's order and in new tensors, as the
            unsharded optimizer would have it.

        Raises:
            PeerError: another worker sent something that is no description of its state.
        """
        parts = self._gather()
        others: State = self._optimizer.__dict__["state"]
        known = {**others, **parts}
        order = [p for p in self._stepper.params() if p in known]
        return defaultdict(dict, {key: known[key] for key in [*order, *others]})

    def _gather(self) -> State:
        memories = self._agree()
        gathered: dict[torch.Tensor, dict[str, Any]] = {}
        for slot, key, value in self._travelling(self._layouts, memories):
            whole = torch.empty_like(slot.param, dtype=value.dtype).detach()
            whole.copy_(value.view(slot.param.shape))
            gathered.setdefault(slot.param, {})[key] = whole
        parts = {
            slot.param: self._filled(slot, memories[slot.index], gathered.get(slot.param, {}))
            for slot in self._slots
            if slot.index in memories
        }
        return defaultdict(dict, parts)

    def _filled(self, slot: Slot, memory: Memory, tensors: dict[str, Any]) -> dict[str, Any]:
        """One parameter's state in the optimizer's own order."""
        device = slot.param.device
        return {
            key: tensors[key] if "each" in kind else decode(kind["all"], device)
            for key, kind in memory.items()
        }

    # -- moving ---------------------------------------------------------------------------

    def rebuild(self, buckets: Sequence[Bucket]) -> None:
        """Change to the pieces of the next plan; every worker must do so at the same time.

        State is gathered from those who had it and taken by those who have it next, one tensor or
        parameter at a time, so that no worker holds much more than its part.

        Raises:
            PeerError: another worker sent something that is no description of its state.
        """
        layouts = self._laid_out(buckets)
        if [a.members for a in layouts] == [a.members for a in self._layouts]:
            return
        self.state = self._move(layouts)
        self._layouts = layouts

    def _move(self, layouts: list[Layout]) -> State:
        """Return the state of the pieces of these layouts; the former ones' is given up."""
        memories = self._agree()
        next_state: State = defaultdict(dict)
        by_slot = {piece.slot.index: piece for layout in layouts for piece in layout.pieces}
        tensors: dict[int, dict[str, Any]] = {}
        for layout in self._layouts:
            for slot, key, value in self._travelling([layout], memories):
                piece = by_slot.get(slot.index)
                if piece is not None:
                    part = value[piece.span.start : piece.span.stop].clone()
                    tensors.setdefault(slot.index, {})[key] = part
            for piece in layout.pieces:
                self.state.pop(piece.stand_in, None)
        for index, piece in by_slot.items():
            if index in memories:
                next_state[piece.stand_in] = self._filled(
                    piece.slot, memories[index], tensors.get(index, {})
                )
        return next_state

    def _laid_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        return [
            Layout(bucket, self._collectives.owned(bucket.flat.numel()), self._stepper)
            for bucket in buckets
        ]

    def _travelling(
        self, layouts: Iterable[Layout], memories: dict[int, Memory]
    ) -> Iterator[tuple[Slot, str, torch.Tensor]]:
        """Gather the state bucket by bucket; yield each parameter's, flat, in a passing buffer."""
        for layout in layouts:
            kinds = {
                (key, kind["each"]): None
                for index in layout.members
                for key, kind in memories.get(index, {}).items()
                if "each" in kind
            }
            for key, dtype in kinds:
                buffer = self._gathered(layout, key, dtype_of(dtype))
                for slot, place in layout.slots:
                    if memories.get(slot.index, {}).get(key, {}).get("each") == dtype:
                        yield slot, key, buffer[place.start : place.stop]

    def _gathered(self, layout: Layout, key: str, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros(layout.length, dtype=dtype, device=layout.device)
        for piece in layout.pieces:
            value = self.state.get(piece.stand_in, {}).get(key)
            if isinstance(value, torch.Tensor) and value.dtype is dtype:
                buffer[piece.place.start : piece.place.stop].copy_(value.view(-1))
        self._collectives.all_gather(buffer, label="optimizer state").wait()
        return buffer

    # -- who remembers what ---------------------------------------------------------------

    def _agree(self) -> dict[int, Memory]:
        """Tell all workers what is remembered of which slot.

        A worker that holds nothing of a parameter cannot know: nobody else may have had a
        gradient for it, and its state may have been loaded.
        """
        mine: list[tuple[str, int]] = []
        for piece in self.pieces:
            if piece.stand_in in self.state:
                mine.append((json.dumps(self._memory(piece)), piece.slot.index))
        # Many parameters are remembered alike: each kind is sent once.
        packed = [
            [json.loads(text), [index for _, index in group]]
            for text, group in itertools.groupby(sorted(mine), key=lambda pair: pair[0])
        ]
        world = self._collectives.world
        merged: dict[int, Memory] = {}
        what = "optimizer state (shard_optimizer: every rank must ask for it)"
        for rank, answer in enumerate(world.exchange(what, packed)):
            for index, memory in _checked(answer, len(self._slots), world.rank, rank):
                known = merged.setdefault(index, memory)
                if json.dumps(known) != json.dumps(memory):
                    raise PeerError(
                        f"rank {world.rank}: rank {rank} has another optimizer state of "
                        f"parameter {self._slots[index].name!r} than the ranks before it"
                    )
        return merged

    def _memory(self, piece: Piece) -> Memory:
        memory: Memory = {}
        for key, value in self.state[piece.stand_in].items():
            if self.has_each(piece, key):
                memory[key] = {"each": str(value.dtype).removeprefix("torch.")}
                continue
            try:
                memory[key] = {"all": encode(value)}
            except TypeError as err:
                raise UsageError(
                    f"optimizer state {key!r} of parameter {piece.slot.name!r}: {err}; "
                    "leave shard_optimizer out"
                ) from None
        return memory


def _checked(answer: Any, slots: int, rank: int, peer: int) -> Iterator[tuple[int, Memory]]:
    """Yield what a worker has sent, slot by slot, if it makes sense."""
    try:
        for memory, indices in answer:
            for kind in memory.values():
                if kind.keys() == {"each"}:
                    dtype_of(kind["each"])
                elif kind.keys() == {"all"}:
                    decode(kind["all"], torch.device("cpu"))
                else:
                    raise ValueError
            for index in indices:
                if not isinstance(index, int) or not 0 <= index < slots:
                    raise ValueError
                yield index, memory
    except (AttributeError, KeyError, TypeError, ValueError):
        raise PeerError(
            f"rank {rank}: rank {peer} sent a malformed optimizer state: {str(answer)[:80]}"
        ) from None
