"""Error feedback: the residuals of lossy codecs, by parameter name.

The encoding error is added to the next gradient (Canary, section 4.3; Deep Gradient Compression,
section 3). Residuals are stored by parameter name, independent of buckets and of the owners of
blocks. So buckets may be rebuilt, and runs may resume with another number of workers.

Residuals have the unit of the encoded values. For gradients divided by the number of workers, the
sum of residuals over all workers is the error of the average.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from wingbeat.errors import UsageError
from wingbeat.schema import excerpt

FORMAT = "wingbeat residuals, version 1"

MOST_WORKERS = 1 << 20
"""Of a saved run: a larger number in a file is damage, and would be counted up to."""

MOST_STEPS = 1 << 53
"""Likewise; what depends on steps is computed as float64."""

Part = dict[str, Any]
"""The state dict of one worker."""


class _Memory:
    """One float32 value per element of each parameter, as views of flat buffers."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        self._values: dict[str, Tensor] = {}
        self._together: dict[str, tuple[str, ...]] = {}

    def arrange(self, names: Sequence[str], length: int, device: torch.device) -> Tensor:
        """Move the values of ``names`` into one flat buffer, unless they are already in one."""
        ends = [0]
        for name in names:
            ends.append(ends[-1] + self._shapes[name].numel())
        assert len(set(names)) == len(names), f"a parameter occurs twice in {list(names)}"
        assert ends[-1] <= length, f"{ends[-1]} elements do not fit into {length}"
        held = self._flat_of(names, ends, length, device)
        if held is not None:
            return held
        flat = torch.zeros(length, dtype=torch.float32, device=device)
        for name, start, end in zip(names, ends, ends[1:], strict=False):
            view = flat[start:end]
            if name in self._values:
                view.copy_(self._values[name])
            self._values[name] = view
            self._together[name] = tuple(names)
        return flat

    def _flat_of(
        self, names: Sequence[str], ends: list[int], length: int, device: torch.device
    ) -> Tensor | None:
        """Return the buffer that holds exactly these parameters in this order, if there is one."""
        first = self._values.get(names[0]) if names else None
        flat = None if first is None else first._base
        if names and self._together.get(names[0]) != tuple(names):
            return None  # the buffer may hold other parameters too
        if flat is None or flat.numel() != length or flat.device.type != device.type:
            return None
        if device.index not in (None, flat.device.index):
            return None
        for name, start in zip(names, ends, strict=False):
            value = self._values.get(name)
            if value is None or value._base is not flat or value.storage_offset() != start:
                return None
        return flat

    def export(self) -> dict[str, Tensor]:
        """Return copies in the parameters' shapes; zeros for parameters without values."""
        return {
            name: self._values[name].clone().view(shape)
            if name in self._values
            else torch.zeros(shape, dtype=torch.float32, device="cpu")
            for name, shape in self._shapes.items()
        }

    def take(self, name: str) -> Tensor | None:
        """Remove and return one parameter's values, flat; None if there are none."""
        self._together.pop(name, None)
        return self._values.pop(name, None)

    @property
    def empty(self) -> bool:
        """Whether no parameter has values."""
        return not self._values

    def put(self, name: str, value: Tensor | None) -> None:
        """Overwrite one parameter's values in place; None means zeros."""
        held = self._values.get(name)
        if held is not None:
            held.zero_() if value is None else held.copy_(value)
        elif value is not None:
            empty = torch.empty(value.numel(), dtype=torch.float32, device="cpu")
            self._values[name] = empty.copy_(value)


class Residuals:
    """One float32 residual for each trained parameter of this worker, and optionally a velocity.

    ``shapes`` are those of the trained parameters, by name. A ``velocity`` is for momentum
    correction (Deep Gradient Compression, section 3.2). Memory is allocated on first use.
    ``worker`` is what ``rank`` counts, as used in error messages.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        *,
        rank: int,
        world_size: int,
        velocity: bool = False,
        worker: str = "rank",
    ) -> None:
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self.rank = rank
        self.world_size = world_size
        self.worker = worker
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self._kinds = {"residuals": _Memory(self._shapes)}
        if velocity:
            self._kinds["velocity"] = _Memory(self._shapes)

    def flat_for(
        self, names: Sequence[str], numels: Sequence[int], length: int, device: torch.device
    ) -> Tensor:
        """Return a bucket's residual, float32 ``(length,)``: those of ``names``, then zeros.

        The values move into the returned buffer, and previous buffers become invalid. Repeated
        calls with the same arguments return the same buffer. ``numels``, the elements of each
        parameter, is only checked.
        """
        return self._arrange("residuals", names, numels, length, device)

    def velocity_for(
        self, names: Sequence[str], numels: Sequence[int], length: int, device: torch.device
    ) -> Tensor:
        """Return a bucket's velocity, as `flat_for` returns its residual."""
        return self._arrange("velocity", names, numels, length, device)

    def _arrange(
        self, kind: str, names: Sequence[str], numels: Sequence[int], length: int, device: Any
    ) -> Tensor:
        known = [self._shapes[name].numel() for name in names]
        assert known == list(numels), f"{list(names)} have {known} elements, not {list(numels)}"
        return self._kinds[kind].arrange(names, length, torch.device(device))

    def take(self, name: str) -> Tensor | None:
        """Remove and return one parameter's residual, flat; None if it has none."""
        return self._kinds["residuals"].take(name)

    @property
    def empty(self) -> bool:
        """Whether no parameter has a residual."""
        return self._kinds["residuals"].empty

    def clear(self) -> None:
        """Set all residuals to zero, in place."""
        self._take([])

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> Part:
        """Return copies of this worker's residuals, each in its parameter's shape.

        ``{"format", "rank", "world_size", "residuals": {name: tensor}}``, and ``"velocity"`` in
        the same form if enabled. It can be loaded with ``torch.load(weights_only=True)``.
        """
        values = {kind: memory.export() for kind, memory in self._kinds.items()}
        return {"format": FORMAT, "rank": self.rank, "world_size": self.world_size, **values}

    def load_state_dict(self, state: Part) -> None:
        """Load one worker's part of a run with the same number of workers.

        If the part is another rank's, as when all workers load rank 0's checkpoint, the residuals
        become zero. A `UsageError` if the part is damaged, or of another model or number of
        workers. The residuals are unchanged.
        """
        self.check(state, "load_state_dict(state)")
        if state["world_size"] != self.world_size:
            raise UsageError(
                f"load_state_dict(state): the part is of a run with {state['world_size']} workers "
                f"and this one has {self.world_size}; pass the parts of all its workers to "
                "load_state_dicts()"
            )
        self._take([state] if state["rank"] == self.rank else [])

    def load_state_dicts(self, states: Sequence[Part]) -> None:
        """Load this worker's share of the residuals of all workers of an earlier run.

        ``states`` has the result of `state_dict` on every worker of that run, in any order. Of M
        workers, rank r loads the sum of the parts of ranks r, r + M, r + 2M ... The sum over all
        workers is preserved up to the rounding of float32. A `UsageError` if a part is missing,
        occurs twice, is damaged, or is of another model or run; the residuals are unchanged.
        """
        if not isinstance(states, (list, tuple)) or not states:
            raise UsageError(
                f"load_state_dicts({type(states).__name__}): pass a list of what state_dict() "
                "returned on every worker"
            )
        for position, state in enumerate(states):
            self.check(state, f"load_state_dicts(states): states[{position}]")
        check_complete(states, self.worker)
        ordered = sorted(states, key=lambda state: int(state["rank"]))
        self._take(ordered[self.rank :: self.world_size])

    def _take(self, parts: Sequence[Part]) -> None:
        for kind, memory in self._kinds.items():
            for name in self._shapes:
                # Without momentum the velocity is zero.
                values = [part[kind][name] for part in parts if kind in part]
                memory.put(name, _sum(values) if values else None)

    def check(self, state: Any, where: str) -> None:
        """Raise a `UsageError` that begins with ``where`` unless ``state`` fits this model."""
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise UsageError(f"{where}: not made by state_dict() of this kind; expected {FORMAT!r}")
        rank, size = state.get("rank"), state.get("world_size")
        if type(rank) is not int or type(size) is not int or not 0 <= rank < size <= MOST_WORKERS:
            raise UsageError(
                f"{where}: rank {excerpt(rank)} of world_size {excerpt(size)}; the rank must be a "
                f"number from 0 to world_size - 1, and that at most {MOST_WORKERS}"
            )
        if "velocity" in state and "velocity" not in self._kinds:
            raise UsageError(
                f"{where}: {self.worker} {rank}'s part has a velocity and this run has no momentum "
                "correction; set the same momentum as in the run that was saved"
            )
        for kind in ("residuals", *(["velocity"] if "velocity" in state else [])):
            part = f"{where}: {kind} of {self.worker} {rank}'s part"
            values = state.get(kind)
            if not isinstance(values, dict):
                raise UsageError(f"{part}: {type(values).__name__}; expected a dict of tensors")
            _refuse_other_names(self._shapes, values, part)
            check_tensors(values, self._shapes, part)


def check_tensors(
    values: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], where: str
) -> None:
    """Raise a `UsageError` that begins with ``where`` unless ``values`` has finite float tensors.

    There must be one of the given shape for each name in ``shapes``.
    """
    for name, shape in shapes.items():
        value = values[name]
        if not is_plain(value) or not value.is_floating_point():
            raise UsageError(f"{where}: parameter {name!r} has no tensor of floats; save it again")
        if value.shape != shape:
            raise UsageError(
                f"{where}: parameter {name!r} has shape {tuple(value.shape)} there and "
                f"{tuple(shape)} here; load parts of the same model"
            )
        # As float32, in which it is kept: a larger value of float64 would become infinite.
        if not bool(torch.isfinite(value.to(torch.float32)).all()):
            raise UsageError(
                f"{where}: parameter {name!r} has values that are not finite; use an earlier "
                "checkpoint"
            )


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor with strides and memory; a file may have others."""
    return (
        isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"
    )


def _refuse_other_names(mine: Iterable[str], theirs: Mapping[Any, Any], where: str) -> None:
    known = set(mine)
    for name in theirs:
        if name not in known:
            raise UsageError(
                f"{where}: parameter {excerpt(name)} is not trained by this model; load parts of "
                "the same model"
            )
    for name in mine:
        if name not in theirs:
            raise UsageError(
                f"{where}: parameter {name!r} is missing; load parts of the same model"
            )


def check_complete(states: Sequence[Part], worker: str) -> None:
    """Raise a `UsageError` unless ``states`` has one part of each worker of one run.

    ``worker`` is what their ranks count.
    """
    size = states[0]["world_size"]
    seen: set[int] = set()
    for state in states:
        rank = state["rank"]
        if state["world_size"] != size:
            raise UsageError(
                f"load_state_dicts(states): {worker} {states[0]['rank']}'s part is of a run with "
                f"{size} workers, {worker} {rank}'s of one with {state['world_size']}; pass the "
                "parts of one run"
            )
        if rank in seen:
            raise UsageError(
                f"load_state_dicts(states): the part of {worker} {rank} occurs twice; pass each "
                "worker's part once"
            )
        seen.add(rank)
    missing = sorted(set(range(size)) - seen)
    if missing:
        raise UsageError(
            f"load_state_dicts(states): the part of {worker} {missing[0]} is missing; a run with "
            f"{size} workers has parts of {worker}s 0 to {size - 1}"
        )
    kinds = {rank: "velocity" in state for rank, state in ((s["rank"], s) for s in states)}
    if len(set(kinds.values())) > 1:
        without = min(rank for rank, has in kinds.items() if not has)
        raise UsageError(
            f"load_state_dicts(states): {worker} {without}'s part has no velocity and others "
            "have one; pass the parts of one run"
        )


def _sum(values: Sequence[Tensor]) -> Tensor:
    """Return the flat float32 sum on the device of the first value."""
    total = values[0].detach().to(torch.float32).reshape(-1).clone()
    for value in values[1:]:
        total += value.detach().reshape(-1).to(total.device)
    return total
