"""`DTensor` parameters and gradients by their local tensors: the part that this rank holds.

Ranks of a column hold the same part of each parameter, so all that is exchanged is local. Gradients
that users and optimizers see stay `DTensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.failures import first_failed, is_alive, published_failure
from wingbeat.transport.mesh import Replica
from wingbeat.transport.world import World


def is_placed(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`."""
    return getattr(tensor, "placements", None) is not None


def divides(placement: Any) -> bool:
    """Whether a placement gives ranks different parts of a tensor.

    FSDP2 over tensor parallelism divides by strided shards, which ``is_shard()`` does not count.
    """
    return bool(placement.is_shard()) or type(placement).__name__ == "_StridedShard"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a `DTensor` that this rank holds; any other tensor itself."""
    if not is_placed(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    # Of a collective that is under way.
    return part.wait() if hasattr(part, "wait") else part


def place(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a `DTensor` without a gradient over the local ``part``, placed as ``like``."""
    from torch.distributed.tensor import DTensor

    return DTensor(part, like._spec, requires_grad=False)  # type: ignore[attr-defined,no-any-return]


def whole_groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of ``fully_shard`` in a model, each once."""
    known: set[int] = set()
    for module in model.modules():
        for group in groups_of(module):
            if id(group) not in known:
                known.add(id(group))
                yield group


def groups_of(module: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that ``fully_shard`` gathers before a module's forward."""
    state = getattr(module, "_get_fsdp_state", None)
    return [] if state is None else list(state()._fsdp_param_groups)


def sharding_states(model: torch.nn.Module) -> list[Any]:
    """Return what ``fully_shard`` keeps for each module of a model that was given to it."""
    of = (getattr(module, "_get_fsdp_state", None) for module in model.modules())
    return [state() for state in of if state is not None]


def reduces_later(states: Iterable[Any]) -> bool:
    """Whether ``fully_shard`` has gradients to reduce in a callback at the end of this backward.

    ``states`` are those of `sharding_states`. Each root has a callback of its own.
    """
    return any(state._state_ctx.post_backward_final_callback_queued for state in states)


def shard_all(model: Any) -> None:
    """Put the sharded parameters of ``fully_shard`` back in place after a forward alone."""
    for group in whole_groups(model):
        group.reshard()


def sharded_tensors(groups: list[Any]) -> list[torch.Tensor]:
    """Return the sharded parameters of groups of ``fully_shard``."""
    return [param.sharded_param for group in groups for param in group.fsdp_params]


def gathered_ids(model: torch.nn.Module) -> set[int]:
    """Return the identities of the whole parameters that ``fully_shard`` puts into modules."""
    return {
        id(param._unsharded_param)
        for group in whole_groups(model)
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
    }


def parallel_parameter(model: torch.nn.Module) -> str:
    """Return the name of a tensor-parallel parameter; empty: there is none.

    It is placed on more ranks than those of its ``fully_shard``.
    """
    ranks = {
        id(param.sharded_param): param.mesh_info.mesh.size()
        for group in whole_groups(model)
        for param in group.fsdp_params
    }
    for name, param in torch.nn.Module.named_parameters(model):
        if is_placed(param) and param.device_mesh.size() > ranks.get(id(param), 1):  # type: ignore[attr-defined]
            return name
    return ""


class GatherHook:
    """Calls ``before`` with the parameters of a group before ``fully_shard`` gathers them.

    It does so before a forward, at a user's request or for a later module, and reads their memory
    without an operation on them. On an accelerator it reads them on streams of its own, which wait
    for the event that ``before`` returns.
    """

    def __init__(
        self, group: Any, before: Callable[[list[torch.Tensor]], torch.Event | None]
    ) -> None:
        self._group = group
        gather = type(group).unshard

        def unshard(*args: Any, **kwargs: Any) -> Any:
            updated = before(sharded_tensors([group]))
            group.comm_ctx.wait_all_gather_streams_on_event(updated)
            return gather(group, *args, **kwargs)

        group.unshard = unshard

    def remove(self) -> None:
        """Remove the hook."""
        del self._group.unshard


class InsideFailureHook:
    """Makes errors of the collectives of ``fully_shard`` name the lost rank of the replica.

    The error is a `PeerError` then. Errors that no lost rank explains stay as they are.
    """

    _METHODS = ("unshard", "wait_for_unshard", "post_backward")

    def __init__(self, group: Any, world: World) -> None:
        self._group, self._before = group, dict(vars(group))
        for name in self._METHODS:
            setattr(group, name, self._watched(getattr(group, name), world))

    @staticmethod
    def _watched(call: Callable[..., Any], world: World) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                lost = lost_inside(world)
                if lost:
                    raise PeerError(f"{world.me}: {lost}") from error
                raise

        return watched

    def remove(self) -> None:
        """Remove the hook."""
        for name in self._METHODS:
            if name in self._before:
                setattr(self._group, name, self._before[name])
            else:
                delattr(self._group, name)


def lost_inside(world: World) -> str:
    """Return how another rank of this worker's replica has ended; empty if all are alive."""
    inside, own = world.inside, world.ranks[world.rank]
    assert inside is not None, "replicas are parts of a mesh"
    others = [rank for rank in inside.ranks if rank != own]
    whole = inside.name(inside.number)
    failed = first_failed(world.store, others)
    if failed is not None:
        return f"rank {failed[0]} of the same {whole} failed with {failed[1]}"
    for rank in others:
        text = published_failure(world.store, rank)
        if text:
            return f"rank {rank} of the same {whole} failed with {text}"
    lost = next((rank for rank in others if not is_alive(world.store, rank)), None)
    if lost is None:
        return ""
    return f"rank {lost} of the same {whole} has ended, or does not answer"


def sum_partial(param: torch.Tensor) -> None:
    """Sum a gradient of which each rank has a term, as of a norm's weight under tensor parallelism.

    ``fully_shard`` does so itself.
    """
    grad: Any = param.grad
    if is_placed(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
        param.grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]


# -- reductions over a replica ------------------------------------------------------------


def copies(param: torch.Tensor, replica: Replica) -> int:
    """Return how many ranks of the replica hold each element of a parameter."""
    shards = 1
    if is_placed(param):
        placed: Any = param
        sizes = zip(placed.placements, placed.device_mesh.mesh.shape, strict=True)
        shards = math.prod(size for placement, size in sizes if divides(placement))
    return replica.size // shards


def clip(
    params: Sequence[torch.Tensor], replica: Replica, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients to a global norm over the replica of at most ``max_norm``; return the norm.

    All ranks of the replica must call it.
    """
    having = [param for param in params if param.grad is not None]
    grads = [local(param.grad) for param in having]  # type: ignore[arg-type]
    device = grads[0].device if grads else torch.device(replica.device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for param, grad in zip(having, grads, strict=True):
        if grad.numel():
            wide = torch.promote_types(grad.dtype, torch.float32)
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=wide).double()
            if norm_type == float("inf"):
                total = torch.maximum(total, norm)
            else:
                total += norm.pow(norm_type) / copies(param, replica)
    if norm_type == float("inf"):
        total = replica.max(total)
    else:
        total = replica.sum(total).pow(1 / norm_type)
    if not any(grad.dtype is torch.float64 for grad in grads):
        total = total.float()
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


class CopiesCheck:
    """Checks that ranks which hold the same parameter have the same gradient for it.

    They have under tensor parallelism, whose ranks read the same batches. Gradients of different
    batches would have to be averaged inside the replica, which nothing does for them.
    """

    BACKWARDS = 2
    """Backwards to check with a gradient that is finite and not zero on all ranks: a mesh is used
    wrongly from the first step on.
    """

    MOST_BACKWARDS = 100

    _RELATIVE = 1e-3

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], replica: Replica) -> None:
        self._replica = replica
        self._names: dict[str, list[int]] = {dim: [] for dim in replica.names}
        self._named = [name for name, _ in named]
        for index, (_, param) in enumerate(named):
            for dim in replica.names:
                if not _is_sharded_over(param, dim, replica):
                    self._names[dim].append(index)
        device = local(named[0][1]).device if named else torch.device("cpu")
        self._norms = torch.zeros(len(named), dtype=torch.float64, device=device)
        whole = sorted({index for each in self._names.values() for index in each})
        self._left = torch.zeros(len(named), dtype=torch.float64, device="cpu")
        self._left[whole] = self.BACKWARDS
        self._backwards = self.MOST_BACKWARDS if whole else 0

    @property
    def on(self) -> bool:
        """Whether the running backward is checked."""
        return self._backwards > 0

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Add this rank's gradient of a parameter."""
        wide = torch.promote_types(grad.dtype, torch.float32)
        self._norms[index] = torch.linalg.vector_norm(grad, dtype=wide) if grad.numel() else 0.0

    def end(self) -> None:
        """Compare at the end of a backward; a `UsageError` names the first that differs."""
        self._backwards -= 1
        # Infinite in all of them while a GradScaler searches its scale.
        norms, replica = self._norms.nan_to_num(0.0, 0.0, 0.0), self._replica
        self._norms = torch.zeros_like(norms)
        for dim, indices in self._names.items():
            if not indices:
                continue
            own = norms[indices]
            both = replica.max(torch.cat([own, -own]), dim).cpu()
            most, least = both[: len(indices)], -both[len(indices) :]
            wrong = (most - least > self._RELATIVE * most).nonzero()
            if len(wrong):
                place = int(wrong[0])
                raise UsageError(
                    f"parameter {self._named[indices[place]]!r} is whole on each of the "
                    f"ranks along {dim!r} of the mesh, and their gradients differ, with norms from "
                    f"{float(least[place]):g} to {float(most[place]):g}: nothing averages them; "
                    "shard it by fully_shard(), give these ranks the same batches, or make the "
                    "dimension a part of the one across replicas"
                )
        # All ranks of the replica must end at the same time.
        missing = replica.max((norms == 0).double()).cpu()
        self._left -= 1 - missing
        if not (self._left > 0).any():
            self._backwards = 0


def _is_sharded_over(param: torch.Tensor, dim: str, replica: Replica) -> bool:
    """Whether ranks along a dimension inside hold different parts of a parameter."""
    if not is_placed(param):
        return False
    placed: Any = param
    group = set(replica.group_ranks(dim))
    mesh = replica.mesh_ranks(placed.device_mesh)
    for axis, placement in enumerate(placed.placements):
        if divides(placement):
            rows = mesh.movedim(axis, -1).reshape(-1, mesh.shape[axis]).tolist()
            if any(len(group.intersection(row)) > 1 for row in rows):
                return True
    return False
