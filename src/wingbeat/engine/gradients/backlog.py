"""What the other workers have not been sent yet of a worker's gradients, by parameter name.

With partial gradient exchange (Ako; Watcharapichat et al., SoCC 2016) a worker applies its own
gradient whole and at once, and sends a part of what it has gathered of its own. So what is kept is
lacking on all other workers, and not here: it belongs to this worker's weights. Where weights are
exchanged for others, as when all load one checkpoint, it is lacking here too, or nowhere.
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
from wingbeat.errors import PeerError, UsageError

NONE, SHARE = -1, -2
"""In place of the rank whose part a worker has loaded: none, or its share of all parts."""


class Verdict(enum.Enum):
    """What loaded gradients are to the weights that the workers have."""

    KEEP = enum.auto()
    """Each worker has its own weights: the others lack it."""
    OWE = enum.auto()
    """All have the same weights, which lack it: this worker too."""
    DROP = enum.auto()
    """All have these weights, in which it is."""


class Backlog(Compression):
    """Keeps what is still to be sent, in float32, in the unit in which gradients are averaged.

    Args:
        wire: the name of a dtype, or empty for the gradients' own.
        slots: the trained parameters.
        collectives: of two workers or more.
    """

    def __init__(self, wire: Any, slots: Sequence[Slot], collectives: Collectives) -> None:
        super().__init__(wire, slots, collectives)
        self._kept = self.residuals = self.new_residuals(slots)
        self._slots = slots
        self._owed: set[str] = set()
        self._source: int | None = None

    @property
    def turn(self) -> int:
        """The number of this iteration, from 0, which says whose turn it is to be sent."""
        return max(0, self._step)

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Return what is kept of a bucket: float32, as long as its buffer, zeros at the end."""
        return self._kept.flat_for(*arrangement(bucket))

    def add(self, bucket: Bucket, kept: torch.Tensor) -> list[Slot]:
        """Add the bucket's own gradients to what is ``kept`` of it, before any of it is sent.

        What this worker owes to itself is added to the gradients. Gradients that are not finite
        are not kept, which would never end.

        Returns:
            Parameters whose gradients are not finite.
        """
        own, kept = bucket.flat[: bucket.numel], kept[: bucket.numel]
        if not self._owed and _finite(own):
            kept.add_(own)
            return []
        lost, start = [], 0
        for slot in bucket.slots:
            span = slice(start, start + slot.param.numel())
            start = span.stop
            gradient = own[span]
            if not _finite(gradient):
                lost.append(slot)
                continue
            before = kept[span].clone() if slot.name in self._owed else None
            self._owed.discard(slot.name)
            kept[span].add_(gradient)
            if before is not None:
                gradient.add_(before)
        return lost

    # -- other weights --------------------------------------------------------------------

    def follow(self, root: int) -> None:
        """All workers have taken over the weights of rank ``root``: they have all of its gradients.

        What is left of the others' is lacking everywhere.
        """
        root_here = self._collectives.world.rank == root
        self._apply(Verdict.DROP if root_here else Verdict.OWE)

    def _apply(self, verdict: Verdict) -> None:
        self._owed = {slot.name for slot in self._slots} if verdict is Verdict.OWE else set()
        if verdict is Verdict.DROP:
            self._kept.clear()

    def count_step(self) -> None:
        """Count an iteration; after a load first agree on what was loaded.

        Raises:
            RendezvousError: another worker has loaded nothing.
            UsageError: what they have loaded does not go together.
        """
        if self._source is not None:
            world = self._collectives.world
            said = [self._source, self._step, _digest(self._slots)]
            self._source = None
            answers = world.exchange("partial gradients that were loaded", said)
            self._apply(judge(_checked(answers, world.rank), world.rank))
        super().count_step()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over this worker's part of a run; on every worker, or on none.

        Whether others lack it is agreed on in the next backward, when weights are loaded too.

        Raises:
            UsageError: the part is damaged or of another model.
        """
        super().load_state_dict(state)
        world = self._collectives.world
        same = state is not None and state.get("world_size") == world.size
        self._source = int(state["rank"]) if state is not None and same else NONE

    def load_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Take over this worker's share of what an earlier run's workers had still to send.

        All have to have the weights of that run's rank 0, or each its own of as many workers.

        Raises:
            UsageError: a part is missing, damaged or of another model.
        """
        super().load_parts(parts)
        world = self._collectives.world
        own = next((part for part in parts if part["rank"] == world.rank), None)
        if own is not None and own["world_size"] == world.size:
            self._source = world.rank
            return
        # Rank 0's are in its weights.
        zeros = {slot.name: torch.zeros_like(slot.param, device="cpu") for slot in self._slots}
        self._kept.load_state_dicts(
            [part if part["rank"] else {**part, "residuals": zeros} for part in parts]
        )
        self._source = SHARE


def judge(said: Sequence[tuple[int, int, int]], rank: int) -> Verdict:
    """Decide what becomes of what was loaded; all workers decide by the same answers.

    Args:
        said: by rank: whose part was loaded, or `NONE` or `SHARE`; its step; a digest of weights.
        rank: of the worker that it is decided for.

    Raises:
        UsageError: parts of different moments, or of a changed number of workers with weights
            that differ.
    """
    sources = [source for source, _, _ in said]
    steps = {step for _, step, _ in said}
    alike = len({digest for _, _, digest in said}) == 1
    if len(steps) > 1:
        raise UsageError(
            f"the workers have loaded partial gradients of different steps ({sorted(steps)}): load "
            "the states of one moment on all ranks, or on none"
        )
    if SHARE in sources:
        if not alike or set(sources) != {SHARE}:
            raise UsageError(
                "load_residuals(parts) of another number of workers, with weights that differ "
                "between workers: load the model of that run's rank 0 on all ranks, and its parts"
            )
        return Verdict.OWE
    if sources != list(range(len(said))):
        return Verdict.DROP  # all have loaded one worker's state
    if not alike:
        return Verdict.KEEP
    return Verdict.DROP if rank == 0 else Verdict.OWE  # as distribute() gives all rank 0's weights


def _checked(answers: Sequence[Any], rank: int) -> list[tuple[int, int, int]]:
    for other, answer in enumerate(answers):
        if not isinstance(answer, list) or [type(n) for n in answer] != [int, int, int]:
            raise PeerError(f"rank {rank}: rank {other} sent malformed news of a load: {answer!r}")
    return [(source, step, digest) for source, step, digest in answers]


def _digest(slots: Sequence[Slot]) -> int:
    """Return a number that tells these weights from others."""
    found = 0
    for slot in slots:
        values = slot.param.detach().reshape(-1).view(torch.uint8)
        found = zlib.crc32(values.numpy().tobytes(), found)
    return found


def _finite(values: torch.Tensor) -> bool:
    if not values.numel():
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(values))
