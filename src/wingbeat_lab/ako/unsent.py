"""A worker's unsent gradients under partial gradient exchange, by parameter name.

With partial gradient exchange (Ako; Watcharapichat et al., SoCC 2016) a worker applies its own
whole gradient immediately, and sends a part of its accumulated gradients. So the unsent gradients
are contained in this worker's weights, and missing on all others. When the weights are replaced,
for example because all workers load one checkpoint, they are missing here too, or on no worker.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.compression import Compression, arrangement
from wingbeat.engine.gradients.placed import local
from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.world import World

NONE, SHARE = -1, -2
"""Values instead of a rank: no part was loaded, or this worker's share of all parts."""


class LoadedAs(enum.Enum):
    """Relation of loaded unsent gradients to the workers' weights."""

    KEEP = enum.auto()
    """Each worker has its own weights: the gradients are missing on the others."""
    OWE = enum.auto()
    """All have the same weights, without the gradients: they are missing on this worker too."""
    DROP = enum.auto()
    """All have weights that contain the gradients."""


class UnsentGradients(Compression):
    """Accumulates gradients until they are sent, in float32, in the scale of averaged gradients."""

    def __init__(self, wire: Any, slots: Sequence[Slot], collectives: Collectives) -> None:
        super().__init__(wire, slots, collectives)
        self._unsent = self.residuals = self.new_residuals(slots)
        self._slots = slots
        self._owed: set[str] = set()
        self._source: int | None = None

    @property
    def turn(self) -> int:
        """The number of this iteration, from 0, which selects the partition to send."""
        return max(0, self._step)

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's unsent gradients: float32, as long as its buffer, zeros at the end."""
        return self._unsent.flat_for(*arrangement(bucket))

    def add(self, bucket: Bucket, unsent: torch.Tensor) -> list[Slot]:
        """Accumulate the bucket's gradients in ``unsent``; return slots with non-finite ones.

        Unsent gradients that this worker's weights lack are added to the gradients. Non-finite
        gradients are not accumulated, because they would remain forever.
        """
        own, unsent = bucket.flat[: bucket.numel], unsent[: bucket.numel]
        if not self._owed and _finite(own):
            unsent.add_(own)
            return []
        lost, start = [], 0
        for slot in bucket.slots:
            span = slice(start, start + slot.shape.numel())
            start = span.stop
            gradient = own[span]
            if not _finite(gradient):
                lost.append(slot)
                continue
            before = unsent[span].clone() if slot.name in self._owed else None
            self._owed.discard(slot.name)
            unsent[span].add_(gradient)
            if before is not None:
                gradient.add_(before)
        return lost

    # -- replaced weights -----------------------------------------------------------------

    def follow(self, root: int) -> None:
        """Follow rank ``root``'s weights, which lack the unsent gradients of all other workers."""
        is_root = self._collectives.world.rank == root
        self._apply(LoadedAs.DROP if is_root else LoadedAs.OWE)

    def _apply(self, loaded: LoadedAs) -> None:
        self._owed = {slot.name for slot in self._slots} if loaded is LoadedAs.OWE else set()
        if loaded is LoadedAs.DROP:
            self._unsent.clear()

    def count_step(self) -> None:
        """Count an iteration; after a load, first agree on what was loaded."""
        if self._source is not None:
            world = self._collectives.world
            mine = [self._source, self._step, _digest(self._slots)]
            self._source = None
            answers = world.exchange("partial gradients that were loaded", mine)
            self._apply(judge(_checked(answers, world), world.rank))
        super().count_step()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load this worker's state; on all workers, or on none.

        The next backward decides whether the others lack it, because weights may be loaded later.
        """
        super().load_state_dict(state)
        world = self._collectives.world
        same = state is not None and state.get("world_size") == world.size
        self._source = int(state["rank"]) if state is not None and same else NONE

    def load_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Load this worker's share of the unsent gradients of all workers of an earlier run.

        Either all workers have the weights of that run's rank 0, or as many workers have their own
        weights.
        """
        super().load_parts(parts)
        world = self._collectives.world
        own = next((part for part in parts if part["rank"] == world.rank), None)
        if own is not None and own["world_size"] == world.size:
            self._source = world.rank
            return
        # Rank 0's weights contain its own gradients.
        zeros = {slot.name: torch.zeros_like(slot.view, device="cpu") for slot in self._slots}
        self._unsent.load_state_dicts(
            [part if part["rank"] else {**part, "residuals": zeros} for part in parts]
        )
        self._source = SHARE


def judge(loaded: Sequence[tuple[int, int, int]], rank: int) -> LoadedAs:
    """Determine the relation of loaded unsent gradients to ``rank``'s weights.

    ``loaded`` has for each rank the rank of the loaded part (or `NONE` or `SHARE`), its step, and a
    digest of the weights, so all workers reach the same result. Raises a `UsageError` for parts of
    different moments, or of a changed number of workers with weights that differ.
    """
    sources = [source for source, _, _ in loaded]
    steps = {step for _, step, _ in loaded}
    same_weights = len({digest for _, _, digest in loaded}) == 1
    if len(steps) > 1:
        raise UsageError(
            f"the workers have loaded partial gradients of different steps ({sorted(steps)}): load "
            "the states of one moment on all ranks, or on none"
        )
    if SHARE in sources:
        if not same_weights or set(sources) != {SHARE}:
            raise UsageError(
                "load_residuals(parts) of another number of workers, with weights that differ "
                "between workers: load the model of that run's rank 0 on all ranks, and its parts"
            )
        return LoadedAs.OWE
    if sources != list(range(len(loaded))):
        return LoadedAs.DROP  # all have loaded one worker's state
    if not same_weights:
        return LoadedAs.KEEP
    # distribute() gives all workers rank 0's weights.
    return LoadedAs.DROP if rank == 0 else LoadedAs.OWE


def _checked(answers: Sequence[Any], world: World) -> list[tuple[int, int, int]]:
    for other, answer in enumerate(answers):
        if not isinstance(answer, list) or [type(n) for n in answer] != [int, int, int]:
            raise PeerError(
                f"{world.me}: {world.name(other)} sent a malformed report of a load: {answer!r}"
            )
    return [(source, step, digest) for source, step, digest in answers]


def _digest(slots: Sequence[Slot]) -> int:
    found = 0
    for slot in slots:
        values = local(slot.param.detach()).reshape(-1).view(torch.uint8)
        found = zlib.crc32(values.numpy().tobytes(), found)
    return found


def _finite(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(values))
