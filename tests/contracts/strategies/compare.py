"""What a scenario left behind, and how two such results differ."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .sides import Side


@dataclass(frozen=True)
class Result:
    """Everything a run is judged by, as detached copies."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, Tensor]
    notes: list[tuple[str, Tensor]]


def collect(side: Side) -> Result:
    """Read the result of what ``side`` has trained."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for index, (model, optimizer) in enumerate(side.trained):
        module = side.bare(model)
        values = {k: v.detach().clone() for k, v in module.state_dict().items()}
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name, value in values.items():
            target = parameters if name in names else buffers
            target[f"model {index}: {name}"] = value
        state |= {f"optimizer {index}: {k}": v for k, v in state_tensors(optimizer).items()}
    return Result(parameters, buffers, state, list(side.notes))


def state_tensors(optimizer: Any) -> dict[str, Tensor]:
    """The optimizer's state as named tensors, by the parameter's place in its groups."""
    found: dict[str, Tensor] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if value is not None:
                found[f"parameter {index}: {key}"] = torch.as_tensor(value).detach().clone()
    return found


def difference(got: Tensor, want: Tensor, floor: float) -> float:
    """The largest absolute difference over the largest magnitude of ``want``."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    a, b = got.to(torch.float64), want.to(torch.float64)
    if torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(
        a.isfinite(), b.isfinite()
    ):
        return 0.0
    if not (a.isfinite().all() and b.isfinite().all()):
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=floor))


def compare_tensors(
    kind: str, got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, floor: float
) -> list[str]:
    """One line for every tensor that is missing, unexpected or too different."""
    lines = [f"{kind}: {name!r} is missing" for name in want if name not in got]
    lines += [f"{kind}: {name!r} is unexpected" for name in got if name not in want]
    for name in want.keys() & got.keys():
        found = difference(got[name], want[name], floor)
        if found > tolerance:
            a, b = got[name], want[name]
            shape = f"{tuple(a.shape)} {a.dtype}"
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                shape += f", expected {tuple(b.shape)} {b.dtype}"
            lines.append(f"{kind}: {name!r} ({shape}) differs by {found:.2e} > {tolerance:.0e}")
    return sorted(lines)


def compare_notes(
    got: list[tuple[str, Tensor]], want: list[tuple[str, Tensor]], tolerance: float, floor: float
) -> list[str]:
    """The first noted value that differs, and what was noted in another order."""
    if [name for name, _ in got] != [name for name, _ in want]:
        return [f"notes: {[n for n, _ in got]} expected {[n for n, _ in want]}"]
    for index, ((name, a), (_, b)) in enumerate(zip(got, want, strict=True)):
        found = difference(a, b, floor)
        if found > tolerance:
            return [f"note {index} ({name}) differs by {found:.2e}: {a} expected {b}"[:400]]
    return []


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A hash of every tensor's bits."""
    return {
        name: hashlib.sha1(
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, value in tensors.items()
    }


def assert_same_on_every_rank(tensors: dict[str, Tensor], what: str) -> None:
    """Fail, naming the tensors, unless all ranks hold the same bits."""
    mine = digests(tensors)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        odd = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        assert not odd, f"{what}: rank {dist.get_rank()} and rank {rank} differ in {odd}"
