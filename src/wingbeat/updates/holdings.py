"""What lies in each slice that servers hold: parts of parameters, and who speaks for them here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.updates.update import Training
from wingbeat.errors import PeerError, UsageError
from wingbeat.servers.documents import Document
from wingbeat.servers.partition import Slice
from wingbeat.servers.values import decode, dtype_of, encode

Whole = dict[int, dict[str, Any]]
"""What the optimizer remembers, by the slot's index and the name; values of all elements."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a parameter that lies in a slice.

    Attributes:
        slot: the parameter's place in its bucket.
        group: of the optimizer's groups, that which has it.
        first: its first element in the parameter.
        offset: the same in the slice.
        length: its elements.
    """

    slot: Slot
    group: int
    first: int
    offset: int
    length: int

    def values(self) -> torch.Tensor:
        """Return the parameter's elements; shares its memory where that is laid out in order."""
        return self.slot.param.detach().reshape(-1)[self.first : self.first + self.length]


class Holding:
    """One slice.

    Attributes:
        slice: its place in a bucket, and its server.
        bucket: that.
        owner: the rank that tells the server what was changed here.
        parts: of parameters that the optimizer has.
        known: shape ``(len(slice),)``; the values that the server has, where this worker owns it.
    """

    known: torch.Tensor

    def __init__(self, each: Slice, bucket: Bucket, owner: int, parts: Sequence[Part]) -> None:
        self.slice, self.bucket, self.owner = each, bucket, owner
        self.parts = parts

    def has(self, used: frozenset[int]) -> bool:
        """Whether one of these parameters lies in it."""
        return any(part.slot.index in used for part in self.parts)

    def values(self) -> torch.Tensor:
        """Return the parameters as they are here; zeros where the optimizer has none."""
        values = torch.zeros_like(self.bucket.flat[self.slice.start : self.slice.stop])
        for part in self.parts:
            values[part.offset : part.offset + part.length].copy_(part.values())
        return values

    def changed(self) -> bool:
        """Whether parameters are others than the server has; takes note of them."""
        found = False
        for part in self.parts:
            known, now = self.known[part.offset : part.offset + part.length], part.values()
            # Bits, not numbers: a NaN is no other than before, and 0 is another than -0.
            if not torch.equal(_bits_of(known), _bits_of(now)):
                known.copy_(now)
                found = True
        return found

    def described(self, whole: Whole, each: dict[str, bool]) -> tuple[dict[str, Any], torch.Tensor]:
        """Return what a server is told of it: words, and the bytes of all arrays.

        Args:
            whole: what the optimizer remembers of these parameters.
            each: by name, whether there is a value for each element.

        Raises:
            UsageError: state of another shape than its parameter, or that cannot travel.
        """
        self.changed()
        state: list[Any] = []
        arrays = [self.known]
        for part in self.parts:
            memory = whole.get(part.slot.index)
            state.append(None if memory is None else {})
            for key, value in (memory or {}).items():
                state[-1][key] = _said(part, key, value, each, arrays)
        words = {
            "dtype": str(self.known.dtype).removeprefix("torch."),
            "numel": len(self.slice),
            "pieces": [[p.slot.index, p.group, p.offset, p.length] for p in self.parts],
            "state": state,
        }
        return words, torch.cat([array.view(torch.uint8) for array in arrays])


def _said(
    part: Part, key: str, value: Any, each: dict[str, bool], arrays: list[torch.Tensor]
) -> dict[str, Any]:
    """Say what is remembered of a part by one name; what has many values goes to the arrays."""
    param, name = part.slot.param, part.slot.name
    if isinstance(value, torch.Tensor) and each.get(key, value.shape == param.shape):
        if value.shape != param.shape:
            raise UsageError(
                f"optimizer state {key!r} of parameter {name!r} has shape {tuple(value.shape)}, "
                f"and must have the parameter's, {tuple(param.shape)}: load the state of the same "
                "model"
            )
        flat = value.detach().reshape(-1)[part.first : part.first + part.length].contiguous()
        arrays.append(flat)
        return {"each": str(flat.dtype).removeprefix("torch.")}
    try:
        return {"all": encode(value)}
    except TypeError as error:
        raise UsageError(
            f'optimizer state {key!r} of parameter {name!r}: {error}; use update="worker"'
        ) from None


class Holdings:
    """All slices of one plan.

    Args:
        plan: its number.
        slices: by their numbers.
        training: whose buckets are cut.
        rank: this worker's.
        workers: how many there are; slices are theirs in turn.

    Attributes:
        all: the slices.
        owned: those that this worker speaks for.
    """

    def __init__(
        self, plan: int, slices: Sequence[Slice], training: Training, rank: int, workers: int
    ) -> None:
        self.plan = plan
        buckets = training.bucketing.buckets
        self.all = [
            Holding(
                each,
                buckets[each.bucket],
                each.number % workers,
                list(_parts_in(each, buckets[each.bucket], training)),
            )
            for each in slices
        ]
        self.owned = [holding for holding in self.all if holding.owner == rank]
        self._owned_in: dict[int, list[Holding]] = defaultdict(list)
        for holding in self.owned:
            holding.known = holding.values()
            self._owned_in[holding.slice.bucket].append(holding)

    def owned_in(self, bucket: Bucket) -> list[Holding]:
        """Return the slices of a bucket that this worker speaks for."""
        return self._owned_in.get(bucket.index, [])

    def overlapping(self, others: Iterable[Holding]) -> list[Holding]:
        """Return the slices that have elements of parameters in common with other plan's."""
        wanted: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for other in others:
            for part in other.parts:
                wanted[part.slot.index].append((part.first, part.first + part.length))
        return [
            holding
            for holding in self.all
            if any(
                start < part.first + part.length and part.first < stop
                for part in holding.parts
                for start, stop in wanted.get(part.slot.index, ())
            )
        ]

    def joined(self, documents: Iterable[tuple[Slice, Document]]) -> Whole:
        """Put together what servers remember; elements of slices that were not asked are zeros.

        Raises:
            PeerError: a server sent something that is no description of its state.
        """
        whole: Whole = {}
        arrays: dict[tuple[int, str], torch.Tensor] = {}
        for each, document in documents:
            try:
                self._join(self.all[each.number], document, whole, arrays)
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise PeerError(
                    f"server {each.server} sent a malformed state of slice {each.number}: {error}"
                ) from None
        slots = {part.slot.index: part.slot for holding in self.all for part in holding.parts}
        for (index, key), flat in arrays.items():
            # In the parameter's memory format, as the optimizer itself would have made it.
            value = torch.empty_like(slots[index].param, dtype=flat.dtype).detach()
            whole[index][key] = value.copy_(flat.view(value.shape))
        return whole

    def _join(
        self,
        holding: Holding,
        document: Document,
        whole: Whole,
        arrays: dict[tuple[int, str], torch.Tensor],
    ) -> None:
        at = 0
        for part, memory in zip(holding.parts, document.words["state"], strict=True):
            index = part.slot.index
            for key, kind in ({} if memory is None else memory).items():
                found = whole.setdefault(index, {})
                if "all" in kind:
                    found[key] = decode(kind["all"], torch.device("cpu"))
                    continue
                dtype = dtype_of(kind["each"])
                end = at + part.length * dtype.itemsize
                found.setdefault(key, None)  # in its place among the others
                flat = arrays.setdefault(
                    (index, key),
                    torch.zeros(part.slot.param.numel(), dtype=dtype, device="cpu"),
                )
                taken = torch.frombuffer(document.data[at:end], dtype=torch.uint8).view(dtype)
                flat[part.first : part.first + part.length] = taken
                at = end


def _parts_in(each: Slice, bucket: Bucket, training: Training) -> Iterable[Part]:
    """Yield the parts of the optimizer's parameters that lie in a slice."""
    stop = 0
    for slot in bucket.slots:
        start, stop = stop, stop + slot.param.numel()
        first, last = max(start, each.start), min(stop, each.stop)
        group = training.stepper.group_of(slot.param)
        if first < last and group is not None:
            yield Part(slot, group, first - start, first - each.start, last - first)


def _bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(_BITS[values.element_size()])
