"""Checks that a model and its optimizer can be distributed, and have not changed since."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from wingbeat.compression import Sketch
from wingbeat.engine.gradients.bucket import dtype_name
from wingbeat.engine.gradients.placed import divides, gathered_ids, is_placed, parallel_parameter
from wingbeat.engine.gradients.sparse import sparse_parameters
from wingbeat.errors import UsageError
from wingbeat.parts.strategy import Strategy
from wingbeat.traits import KEPT
from wingbeat.transport.world import World

# -- wrappers -----------------------------------------------------------------------------

_AROUND = (
    "this model is distributed by wingbeat, and with DistributedDataParallel around it gradients "
    "would be averaged twice: use one of them; a trainer that wraps models by itself has to be "
    "kept from it"
)
_SHARDED = (
    "pass the model without it; wingbeat.DeAR(shard_optimizer=True) divides the optimizer's state "
    "among the workers"
)
_IN_REPLICA = (
    "pass distribute() the mesh of all ranks as mesh=, of which that is one dimension and another "
    "is across replicas"
)
_TWICE = "pass the model without it, as gradients would be averaged twice"

_WRAPPERS = {
    "FSDPModule": ("fully_shard()", "sharded", f"{_IN_REPLICA}, or {_SHARDED}"),
    "FullyShardedDataParallel": ("FullyShardedDataParallel", "sharded", _SHARDED),
    "ReplicateModule": ("replicate()", "replicated", _TWICE),
    "DDP": ("replicate()", "replicated", _TWICE),
}
"""By the name of a class that torch.distributed adds to a module, and may not be loaded: the API
that adds it, its effect on parameters, and the remedy.
"""

_PLACED = (
    "parallelize_module() or distribute_tensor()",
    "placed",
    f"{_IN_REPLICA}; without it each worker needs all of every parameter",
)
"""The same for a DTensor in any other module."""


def _wrapper_of(module: torch.nn.Module) -> tuple[str, str, str] | None:
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.distributed."):
            return _WRAPPERS[kind.__name__]
    return None


def refuse_wrapped(model: torch.nn.Module, *, meshed: bool = False) -> None:
    """Raise a `UsageError` that names a parameter or module that torch distributes.

    ``meshed``: a mesh is given, so `check_placed` checks what only parts of it hold.
    """
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, torch.nn.DataParallel)):
            what = f"module {name!r} of the model" if name else "the model"
            kind = type(module).__name__
            raise UsageError(
                f"distribute(): {what} is wrapped in {kind}, so gradients would be averaged twice: "
                f"pass the bare module ({kind}(...).module), and an optimizer of its parameters"
            )
    by = {
        id(p): found for m in model.modules() if (found := _wrapper_of(m)) for p in m.parameters()
    }
    named: list[tuple[str, str, Any]] = [("parameter", *each) for each in model.named_parameters()]
    named += [("buffer", *each) for each in model.named_buffers()]
    for kind, name, tensor in named:
        placements = getattr(tensor, "placements", None)  # a DTensor's
        if placements is None and id(tensor) not in by:
            continue
        if meshed and (placements is not None or by[id(tensor)] is _WRAPPERS["FSDPModule"]):
            continue
        what, how, instead = by.get(id(tensor), _PLACED)
        if placements is not None:
            where = ", ".join(map(repr, placements))
            how += f" as {where} on a mesh of shape {tuple(tensor.device_mesh.shape)}"
        raise UsageError(f"distribute(): {kind} {name!r} is {how} by {what}: {instead}")


def refusal_in_replicas(strategy: Strategy, device: str) -> str:
    """Return why a strategy cannot exchange between replicas of several ranks, and what can.

    Empty: it can. ``device`` is the kind of the mesh's devices; on others than the CPU, strategies
    are refused that have no tested order with the streams of ``fully_shard``.
    """
    codec = strategy.codec
    codecs = [] if codec is None else [codec, *(each for _, each in codec.of_groups() if each)]
    if strategy.plan.choosing() is not None:
        return "each column of the mesh would choose a schedule of its own; use DeAR()"
    if device != "cpu" and not strategy.exchange.collective:
        return (
            "it does not sum gradients by collectives, and its order with the streams of "
            f"fully_shard() is not tested on {device!r} devices; use AllReduce() or DeAR(), or a "
            "mesh of the CPU"
        )
    if device != "cpu" and not all(isinstance(each, Sketch) for each in codecs):
        return (
            f"its codec has no tested order of streams on {device!r} devices; use "
            'compression="bf16" or compression="sketch", or a mesh of the CPU'
        )
    if strategy.update_part.shards:
        return "fully_shard() divides the optimizer's state already; leave shard_optimizer out"
    if getattr(strategy.plan, "file", ""):
        return (
            "it keeps its plan in a file, and each column of the mesh has a plan of its own; leave "
            "the file out"
        )
    return strategy.exchange.refusal_in_replicas(strategy)


def check_strategy_in_replicas(strategy: Strategy, world: World) -> None:
    """Raise a `UsageError` for a strategy that cannot exchange between replicas of several ranks.

    ``world`` is the column of this rank.
    """
    replica = world.replica
    why = "" if replica is None else refusal_in_replicas(strategy, replica.device)
    if replica is not None and why:
        raise UsageError(
            f"distribute(mesh=...): {strategy!r} is not possible for replicas of {replica.size} "
            f"ranks: {why}"
        )


def check_accelerated_replica(model: torch.nn.Module, world: World) -> None:
    """Raise a `UsageError` for a tensor parallel model on accelerators.

    ``world`` is the column of this rank.
    """
    replica = world.replica
    if replica is None or replica.device == "cpu":
        return
    parallel = parallel_parameter(model)
    if parallel:
        raise UsageError(
            f"distribute(mesh=...) with a mesh of {replica.device!r} devices: parameter "
            f"{parallel!r} is tensor parallel, and its order of streams is not tested: divide the "
            "model by fully_shard() alone, or use a mesh of the CPU"
        )


def averages_inside(model: torch.nn.Module, strategy: Strategy, size: int) -> bool:
    """Whether the ``size`` ranks of a replica hold the whole model each, and can be workers.

    Collectives of all ranks then average inside a replica and across, on two levels where it is
    faster. Columns are not connected.
    """
    if size == 1 or not strategy.exchange.collective:
        return False
    return not any(map(is_placed, model.parameters()))


def check_placed(model: torch.nn.Module, world: World) -> None:
    """Raise a `UsageError` for a parameter that a replica does not hold as a mesh allows.

    ``world`` is the column of this rank.
    """
    replica = world.inside
    assert replica is not None, "a column knows its replica"
    several = bool(replica.groups)
    for name, tensor in model.named_buffers():
        if is_placed(tensor):
            raise UsageError(
                f"distribute(mesh=...): buffer {name!r} is a DTensor: register its local tensor, "
                "or keep it out of the module"
            )
    divided = False
    named: Iterable[tuple[str, Any]] = model.named_parameters()
    for name, param in named:
        placements = getattr(param, "placements", ())
        ranks = replica.mesh_ranks(param.device_mesh).flatten().tolist() if placements else []
        others = sorted({*ranks}.difference(replica.ranks))
        if others:
            raise UsageError(
                f"distribute(mesh=...): parameter {name!r} is placed on ranks "
                f"{', '.join(map(str, sorted(ranks)))}, and rank {others[0]} is in another replica "
                f"than rank {world.ranks[world.rank]}: give fully_shard() or parallelize_module() "
                "only the dimensions inside a replica, such as mesh['dp_shard']"
            )
        if not all(divides(each) or each.is_replicate() for each in placements):
            raise UsageError(
                f"distribute(mesh=...): parameter {name!r} is placed as "
                f"{', '.join(map(repr, placements))}: a parameter must be sharded or replicated"
            )
        divided = divided or len(ranks) > 1
    if several and (sparse := [*sparse_parameters(model)]):
        raise UsageError(
            f"distribute(mesh=...): {len(sparse)} parameters have sparse gradients, which nothing "
            "averages inside a replica: use sparse=False"
        )
    if several and not divided:
        raise UsageError(
            f"distribute(mesh=...): no parameter is divided over {', '.join(replica.names)}, so "
            f"nothing averages gradients among the {replica.size} ranks of a replica: apply "
            "fully_shard() or parallelize_module() over these dimensions first"
        )


def refuse_wrapper_around(model: torch.nn.Module, *, meshed: bool = False) -> None:
    """Raise a `UsageError` in a forward if torch distributes the ``model`` too."""
    found = _wrapper_of(model)
    if found is not None and not (meshed and found is _WRAPPERS["FSDPModule"]):
        raise UsageError(
            f"this model is distributed by wingbeat, and {found[0]} was applied to it since: "
            "use one of them"
        )
    outer = DistributedDataParallel._active_ddp_module
    if outer is not None and any(module is model for module in outer.modules()):
        raise UsageError(_AROUND)


def refuse_ddp_wrapping() -> NoReturn:
    """Raise a `UsageError` on attribute reads by DDP's constructor, else an `AttributeError`."""
    reader = sys._getframe(2)
    if reader.f_code is DistributedDataParallel.__init__.__code__:
        raise UsageError(_AROUND)
    raise AttributeError("_ddp_params_and_buffers_to_ignore")


# -- parameters that were replaced or added -----------------------------------------------

_AGAIN = "call wingbeat.release(model, optimizer), change them, and distribute() again"


class ParameterCheck:
    """Detects replaced or added parameters, whose gradients are not exchanged.

    No hook reports a replaced parameter or module, so a check compares identities, which takes 50
    microseconds for 160 modules. The model is searched only if one has changed.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        known = [*torch.nn.Module.parameters(model), *self._updated()]
        self._known = {id(param): param for param in known}
        self._remember()

    def _updated(self) -> chain[torch.Tensor]:
        groups: list[dict[str, Any]] = self._optimizer.__dict__["param_groups"]
        return chain.from_iterable(group["params"] for group in groups)

    def _held(self) -> chain[Any]:
        """Return the parameters and modules that the model's modules hold."""
        return chain.from_iterable(map(dict.values, self._places))

    def _remember(self) -> None:
        # A compiled module creates its attributes at each access, and its modules cannot be
        # replaced.
        modules = (m for m in self._model.modules() if not isinstance(m, torch.jit.ScriptModule))
        self._places: list[dict[str, Any]] = [
            places for m in modules for places in (m._parameters, m._modules)
        ]
        self._kept = list(self._held())  # kept alive, so that no other object gets its identity
        self._seen = list(map(id, self._kept))

    def check(self) -> None:
        """Raise a `UsageError` unless all trained parameters are those of `distribute`."""
        if list(map(id, self._held())) != self._seen:
            gathered = gathered_ids(self._model)  # by a forward without backward
            for name, param in torch.nn.Module.named_parameters(self._model):
                known = id(param) in self._known or id(param) in gathered
                if param.requires_grad and not known:
                    raise UsageError(
                        f"parameter {name!r}, of shape {tuple(param.shape)}, is none that the "
                        "model had at distribute(), so nothing would exchange its gradients: "
                        f"{_AGAIN}"
                    )
            self._remember()  # moved, as by a parametrization, or removed
        if not self._known.keys() >= set(map(id, self._updated())):
            self._refuse_group()

    def _refuse_group(self) -> None:
        for number, group in enumerate(self._optimizer.__dict__["param_groups"]):
            for place, param in enumerate(group["params"]):
                if id(param) not in self._known:
                    raise UsageError(
                        "the optimizer's param groups hold other parameters than at distribute(): "
                        f"parameter {place} of group {number}, of shape {tuple(param.shape)}, is "
                        f"new, and nothing would exchange its gradients: {_AGAIN}"
                    )


# -- dtypes, devices and layouts ----------------------------------------------------------


def refuse_conversion(params: Iterable[torch.Tensor], fn: Callable[[torch.Tensor], Any]) -> None:
    """Raise a `UsageError` if ``fn`` (of `Module._apply`) changes dtype or device of ``params``."""
    kinds = {(p.dtype, p.device) for p in params}
    for dtype, device in kinds:
        made = fn(torch.empty(0, dtype=dtype, device=device))
        if isinstance(made, torch.Tensor) and (made.dtype, made.device) != (dtype, device):
            raise UsageError(
                f"parameters of this model are {dtype_name(dtype)} on {device}, and cannot become "
                f"{dtype_name(made.dtype)} on {made.device} after distribute(): convert or move "
                "the model first, then make the optimizer, then call distribute()"
            )


def refuse_new_layout(
    params: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    fn: Callable[[torch.Tensor], Any],
) -> None:
    """Raise a `UsageError` if ``fn`` changes strides of ``params`` under a fused optimizer.

    Fused optimizers read memory in order, and gradients keep their layout.
    """
    if not any(group.get("fused") for group in optimizer.__dict__["param_groups"]):
        return
    for dimensions in sorted({p.dim() for p in params}):
        sample = torch.empty((2,) * dimensions, device="cpu")
        made = fn(sample)
        if isinstance(made, torch.Tensor) and made.stride() != sample.stride():
            raise UsageError(
                f"{type(optimizer).__name__}(fused=True): parameters with {dimensions} dimensions "
                "cannot get another memory format after distribute(): convert the model first, "
                "then call distribute()"
            )


def refuse_fused_layouts(optimizer: torch.optim.Optimizer) -> None:
    """Raise a `UsageError` for fused optimizers if gradients are contiguous, parameters not."""
    for group in optimizer.__dict__["param_groups"]:
        if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__}(fused=True) with parameters that are not contiguous "
                "(channels_last) is not possible with this compression: use foreach=True"
            )


def refuse_unfrozen(model: torch.nn.Module, frozen: Iterable[torch.nn.Parameter]) -> None:
    """Raise a `UsageError` if a parameter that was frozen now requires a gradient."""
    for param in frozen:
        if param.requires_grad:
            name = next(n for n, p in model.named_parameters() if p is param)
            raise UsageError(
                f"parameter {name!r} needs a gradient, but was frozen when distribute() was "
                "called, so the workers would drift apart: call wingbeat.release(model, "
                "optimizer), and distribute() again after requires_grad_()"
            )


def refuse_assignment(prefix: str, metadata: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if loading would replace the parameters of the model at ``prefix``."""
    if metadata.get("assign_to_params_buffers"):
        raise UsageError(
            f"load_state_dict(assign=True) of {prefix or 'the model'!r} would exchange the "
            "parameters that the optimizer and the buckets have: call it before distribute(), "
            "or leave assign out"
        )


def check_complex(model: torch.nn.Module, strategy: Strategy) -> None:
    """Raise a `UsageError` for complex parameters if ``strategy`` does more than add gradients."""
    exchange = strategy.exchange
    if KEPT in exchange.has and not strategy.update_part.divides:
        what = "with parameter servers"
    elif not exchange.collective or strategy.update_part.divides:
        what = "where each worker has gradients or parameters of its own, or a part of them"
    elif strategy.codec is not None:
        what = f"with compression={str(strategy.wire)!r}"
    else:
        return
    found = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if found is not None:
        raise UsageError(
            f"parameter {found!r} is complex, which is not possible {what} ({strategy}): use "
            'wingbeat.AllReduce() or wingbeat.DeAR(), with or without compression="bf16"'
        )


def refuse_loading(engine: Any, what: str) -> None:
    """Raise a `UsageError` if a restarted worker has copied its state, and not used it yet.

    This includes residuals: the peers may have received theirs before this worker was lost.
    """
    if engine.copied:
        raise UsageError(
            f"{what} on rank {engine.world.rank}, which was started again while the "
            "others continue: distribute() has given it their model, the optimizer's state and "
            "the number of steps, and an older state would undo that on this rank alone; load "
            "before distribute(), or not where wingbeat.init().returned is true"
        )
