"""Compares weights and optimizer state of workers that must be equal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wingbeat.engine.gradients.bucket import checksum
from wingbeat.engine.gradients.placed import local
from wingbeat.engine.updates.update import Training
from wingbeat.errors import PeerError, RendezvousError
from wingbeat.transport.store import again_text
from wingbeat.transport.text import first_line

_TOLERANCE = 1e-4
"""Relative to a tensor's norm. Different processors may round a step's results differently."""

_POLL_S = 0.2
"""Seconds between two checks whether an awaited worker still takes part."""


class ConsistencyCheck:
    """Compares parameters and optimizer state of present members by checksums, then by sums.

    All workers have applied the same rounds of the exchange (`BoundedStalenessExchange`) when they
    call it.
    """

    def __init__(self, training: Training, exchange: Any) -> None:
        self._training, self._rounds = training, exchange
        self._last, self._calls = -1, 0

    def different(self) -> str | None:
        """Return a tensor name that differs between workers, or None; all must call it."""
        mine = 0
        for _, tensors in self._held():
            for tensor in tensors:
                mine = checksum(local(tensor.detach()), mine)
        if len(set(self._exchange(mine).values())) == 1:
            return None
        first, *others = self._exchange(self._sums()).values()
        return next(
            (name for name in first if any(_far(first[name], o[name]) for o in others)), None
        )

    def of_frozen(self) -> int | None:
        """Return the first rank if frozen parameters differ between workers, else None."""
        frozen = self._training.bucketing.frozen
        mine = 0
        for _, param in frozen:
            mine = checksum(local(param.detach()), mine)
        found = self._exchange(mine) if frozen else {}
        return min(found) if len(set(found.values())) > 1 else None

    def _held(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        state = self._training.optimizer.state
        for slot in self._training.bucketing.slots:
            yield f"parameter {slot.name!r}", [slot.param]
            kept = sorted(state.get(slot.param, {}).items())
            tensors = [value for _, value in kept if isinstance(value, torch.Tensor)]
            yield f"the optimizer's state of parameter {slot.name!r}", tensors

    def _sums(self) -> dict[str, list[float]]:
        """Return sum and norm of each tensor, by name."""
        sums: dict[str, list[float]] = {}
        for name, tensors in self._held():
            sums[name] = []
            for tensor in tensors:
                plain = local(tensor.detach())
                plain = (torch.view_as_real(plain) if plain.is_complex() else plain).double()
                sums[name] += float(plain.sum()), float(plain.norm())
        return sums

    def _exchange(self, value: Any) -> dict[int, Any]:
        """Return the values of all members, by rank."""
        world, made = self._training.collectives.world, self._rounds.made
        # A restarted worker has lost the number of calls, but has the number of applied rounds.
        self._last, self._calls = made, self._calls + 1 if made == self._last else 0
        key = f"{self._rounds.room}/{made}/{self._calls}"
        try:
            world.store.set(f"{key}/{world.rank}", json.dumps(value))
            found = [(rank, self._awaited(f"{key}/{rank}", rank)) for rank in self._rounds.members]
        except RuntimeError as error:
            raise PeerError(
                f"{world.me}: the rendezvous store does not answer ({first_line(error)}), so "
                f"weights cannot be compared with the others': {again_text('model.synchronize()')}"
            ) from None
        return {rank: json.loads(text) for rank, text in found if text is not None}

    def _awaited(self, key: str, rank: int) -> str | None:
        """Return the value that a rank has set; None if it is no longer a member."""
        world = self._training.collectives.world
        deadline = time.monotonic() + world.timeout
        while True:
            try:
                return world.store.get(key, min(_POLL_S, world.timeout))
            except TimeoutError:
                if rank not in self._rounds.members:
                    return None
                if time.monotonic() > deadline:
                    raise RendezvousError(
                        f"{world.me}: {world.name(rank)} did not compare its weights within "
                        f"{world.timeout:g} s, as all do in model.synchronize(), and in the first "
                        "step after load_state_dict(): call these on all ranks"
                    ) from None


def _far(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether sums and norms of tensors differ by more than rounding errors.

    >>> _far([1.0, 2.0], [1.0001, 2.0]), _far([1.0, 2.0], [1.1, 2.0]), _far([1.0, 2.0], [])
    (False, True, True)
    """
    if len(some) != len(others):
        return True
    for place, (one, other) in enumerate(zip(some, others, strict=True)):
        norm = some[place | 1]
        if one != other and one == one and not abs(one - other) <= _TOLERANCE * norm:
            return True
    return False
