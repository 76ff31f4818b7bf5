"""`distribute` and `release`: the one line that a training script changes."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.nn.parameter import is_lazy

from wingbeat.collectives import Collectives
from wingbeat.engine import claims
from wingbeat.engine.buffers import broadcast_now
from wingbeat.engine.deferring import DeferringOptimizer
from wingbeat.engine.engine import Engine
from wingbeat.engine.gradients.bucket import strides_of
from wingbeat.engine.gradients.bucketing import ignored, spec_of
from wingbeat.engine.gradients.complexes import check_complex
from wingbeat.engine.gradients.compression import check_momentum
from wingbeat.engine.gradients.sparse import check_sparse, sparse_parameters
from wingbeat.engine.joining import joined
from wingbeat.engine.upgrade import (
    DistributedModel,
    DistributedOptimizer,
    downgrade,
    engine_of,
    upgrade,
)
from wingbeat.engine.watching import check_wishes, watch
from wingbeat.engine.wrapped import refuse_inside
from wingbeat.errors import MismatchError, UsageError, WingbeatError
from wingbeat.exchanges.stale import StaleExchange
from wingbeat.sync import averaged
from wingbeat.transport.world import World, current
from wingbeat.types import Choices

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_INSIDE = ("optimizer", "_optimizer")
"""Where wrappers keep the optimizer that does the work."""


class HasChoices(Protocol):
    """A strategy: anything that answers the design's questions."""

    def choices(self) -> Choices:
        """Return the answers."""


def distribute(
    model: ModelT,
    optimizer: OptimizerT,
    strategy: HasChoices,
    *,
    world: World | None = None,
) -> tuple[ModelT, OptimizerT]:
    """Train ``model`` with all the workers; the training loop stays as it is.

    Both objects are upgraded in place and returned. The model gains ``no_sync()``, ``join()``
    and ``flush()``, the optimizer ``clip_grad_norm_(max_norm)``, and ``shard_state_dict()`` and
    ``load_shards(parts)`` for an optimizer that is divided. Parameters and buffers of rank 0 are
    taken over by all.

    Args:
        model: any module; parameters that require no gradient are left alone.
        optimizer: any ``torch.optim`` optimizer over parameters of ``model``.
        strategy: ``wingbeat.AllReduce()``, ``wingbeat.DeAR()``...
        world: the workers; default: those of `wingbeat.init`.

    Raises:
        UsageError: no `init` before, something is already distributed, the optimizer has
            parameters that the model has not, or it cannot be divided (``shard_optimizer``); or
            the environment says something that cannot be of how the job is watched.
        MismatchError: the ranks' models differ; on every rank, naming the first parameter.
    """
    inner = unwrapped(optimizer)
    _check(model, inner, strategy)
    _refuse_kept_step(optimizer, inner)
    world = whole = world or current()
    check_wishes(whole)
    choices = strategy.choices()
    given, optimizer = optimizer, cast(OptimizerT, inner)
    check_momentum(choices, optimizer)
    check_complex(model, choices, repr(strategy))
    check_sparse(model, choices, repr(strategy))
    averaged.check(model, choices.averaging)
    _check_returned(world, choices, strategy)
    if world.size > 1:
        if not world.returned:
            _check_same_model(model, optimizer, world, strategy)
        # Several models of one process launch their buckets in any order.
        world = world.open_channel()
    collectives = Collectives(world, choices.topology)
    if world.size > 1 and not world.returned:
        _take_over_rank_zeros(model, collectives)
    engine = Engine(model, optimizer, choices, collectives, type(optimizer).step)
    upgrade(model, DistributedModel, engine)
    upgrade(optimizer, DeferringOptimizer if engine.update.defers else DistributedOptimizer, engine)
    claims.claim(engine, engine.trained)
    engine.meter.strategy = repr(strategy)
    watch(whole, engine.meter)
    return model, given


def _check_returned(world: World, choices: Choices, strategy: HasChoices) -> None:
    if world.returned and not choices.returns:
        raise UsageError(
            f"rank {world.rank} was started again while the others go on, which {strategy!r} "
            "cannot let in: train with wingbeat.Canary(), Ripples(), LocalSGD() or DiLoCo(), or "
            "start all workers again"
        )


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper that only passes calls on, as Accelerate's does."""
    seen: list[Any] = []
    while isinstance(optimizer, torch.optim.Optimizer) and "param_groups" not in vars(optimizer):
        inner = next((vars(optimizer)[k] for k in _INSIDE if k in vars(optimizer)), None)
        if inner is None or any(inner is one for one in seen):
            break
        seen.append(optimizer)
        optimizer = inner
    return optimizer


def _refuse_kept_step(given: Any, inner: Any) -> None:
    """Refuse a wrapper with a gradient scaler, as Accelerate's: it calls the step it was made with.

    Raises:
        UsageError: there is one.
    """
    if given is not inner and vars(given).get("scaler") is not None:
        raise UsageError(
            f"distribute(optimizer={type(given).__name__}): its gradient scaler would go on with "
            f"the step that {type(inner).__name__} has now: distribute first and wrap then, or use "
            "wingbeat.integrations.accelerate.prepare()"
        )


def _take_over_rank_zeros(model: torch.nn.Module, collectives: Collectives) -> None:
    left_out = ignored(model)
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        tensors = [tensor.detach() for name, tensor in named if name not in left_out]
        broadcast_now(tensors, collectives, root=0)


def no_sync(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """As ``model.no_sync()``, also for a model with an attribute of that name of its own.

    Raises:
        UsageError: the model is not distributed.
    """
    return _engine_of(model, "no_sync").no_sync()


def join(
    model: torch.nn.Module,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """As ``model.join()``, also for a model with an attribute of that name of its own.

    Raises:
        UsageError: the model is not distributed.
    """
    options = divide_by_initial_world_size, enable, throw_on_early_termination
    return joined(_engine_of(model, "join"), *options)


def bounded_exchange(model: torch.nn.Module) -> StaleExchange | None:
    """Return how a model's gradients are exchanged under bounded staleness; None if not so."""
    engine = engine_of(model)
    exchange = None if engine is None else engine.runtime.exchange
    return exchange if isinstance(exchange, StaleExchange) else None


def flush(model: torch.nn.Module) -> None:
    """As ``model.flush()``, also for a model with an attribute of that name of its own.

    Raises:
        UsageError: the model is not distributed.
    """
    _engine_of(model, "flush").level()


def consensus(model: torch.nn.Module) -> None:
    """Have all workers hold the same model; where each has one of its own, their mean.

    Before evaluation and saving, on all ranks: under `Ripples`, `ADPSGD`, `LocalSGD` and `DiLoCo`,
    whose models differ, parameters and floating-point buffers become the mean over all workers, and
    training goes on from it. Under other strategies the same as `flush`.

    Raises:
        UsageError: the model is not distributed.
        PeerError: a worker did not call it in time; names it.
    """
    _engine_of(model, "consensus").level()


def _engine_of(model: Any, what: str) -> Engine:
    engine = engine_of(model) if isinstance(model, torch.nn.Module) else None
    if engine is None:
        raise UsageError(
            f"wingbeat.{what}({type(model).__name__}): pass a model that distribute() has returned"
        )
    return engine


def release(model: ModelT, optimizer: OptimizerT) -> tuple[ModelT, OptimizerT]:
    """Undo `distribute`: finish pending work, and return plain objects without hooks.

    Raises:
        UsageError: they were not distributed together.
    """
    engine = engine_of(model)
    inner = unwrapped(optimizer)
    if engine is None or engine is not engine_of(inner):
        raise UsageError("release(): this model and optimizer were not distributed together")
    engine.detach()
    engine.close()
    claims.drop(engine)
    downgrade(model)
    downgrade(inner)
    return model, optimizer


def abandon(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As `release`, after an error: waits for no worker that may never come, and raises nothing.

    What is under way and can be finished is; workers whose models differ keep their own. Objects
    that are not distributed are left alone.
    """
    engine, inner = engine_of(model), unwrapped(optimizer)
    if engine is None or engine is not engine_of(inner):
        return
    with contextlib.suppress(WingbeatError):  # the error that is told already comes first
        engine.detach(meet=False)
    engine.remove_hooks()
    engine.close()
    claims.drop(engine)
    downgrade(model)
    downgrade(inner)


def begin_step(model: torch.nn.Module) -> None:
    """Get ready for a step of several forwards and backwards, as a forward of the model does.

    Unlike a forward it does not decide whether gradients are synchronised: each backward does, by
    whether it is inside of `no_sync`.

    Raises:
        UsageError: the model is not distributed.
    """
    _engine_of(model, "begin_step").enter_step()


def _check(model: Any, optimizer: Any, strategy: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"distribute(model={type(model).__name__}): pass a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"distribute(optimizer={type(optimizer).__name__}): pass a torch.optim.Optimizer"
        )
    if isinstance(strategy, type) or not hasattr(strategy, "choices"):
        raise UsageError(
            f"distribute(strategy={strategy!r}): pass an instance, such as wingbeat.DeAR()"
        )
    if engine_of(model) is not None or engine_of(optimizer) is not None:
        raise UsageError(
            "distribute() was called twice on the same model or optimizer: call "
            "wingbeat.release(model, optimizer) first"
        )
    if "param_groups" not in vars(optimizer):
        raise UsageError(
            f"distribute(optimizer={type(optimizer).__name__}): it is a wrapper without parameters "
            "of its own; pass the optimizer inside of it"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"distribute(model={type(model).__name__}): what torch.jit has compiled cannot be "
            "given other methods; put it inside of a plain torch.nn.Module, and pass that"
        )
    refuse_inside(model)
    _check_parameters(model, optimizer)
    claims.check(model)


def _check_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = dict(model.named_parameters())
    for name, tensor in (*known.items(), *model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise UsageError(
                f"{name!r} has no values yet ({'a lazy module' if is_lazy(tensor) else 'meta'}): "
                "run one forward, or model.to_empty() and load a state dict, then make the "
                "optimizer, then call distribute()"
            )
    if not any(param.requires_grad for param in known.values()):
        raise UsageError(
            f"model {type(model).__name__} has no parameter that requires a gradient: "
            "there is nothing to distribute"
        )
    members = set(known.values())
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in members:
                raise UsageError(
                    f"parameter {position} of the optimizer's group {number}, shape "
                    f"{tuple(param.shape)}, does not belong to the model: make the optimizer "
                    "from model.parameters()"
                )


def _check_same_model(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World, strategy: HasChoices
) -> None:
    """Compare every rank's parameters, buffers and kind of optimizer with rank 0's, on each."""
    left_out = ignored(model)
    tensors = [
        *((name, t, bool(t.requires_grad)) for name, t in model.named_parameters()),
        *((name, t, False) for name, t in model.named_buffers()),
    ]
    tensors = [entry for entry in tensors if entry[0] not in left_out]
    mine, sparse = [], sparse_parameters(model)
    for name, tensor, trained in tensors:
        spec = spec_of(name, tensor)
        strides = strides_of(tensor) if trained else None
        laid_out = strides and list(strides)
        mine.append([name, list(spec.shape), spec.dtype, trained, laid_out, name in sparse])
    own = {"strategy": repr(strategy), "optimizer": _family(optimizer), "tensors": mine}
    answers = world.exchange("model", own)
    for rank, answer in enumerate(answers):
        _compare(answers[0], answer, rank)


def _family(optimizer: torch.optim.Optimizer) -> str:
    """Name torch's class that this one is or was made from; else the one made from `Optimizer`.

    One rank may have a class that also logs what it does, say; not Adam where others have SGD.
    """
    line = [kind for kind in type(optimizer).__mro__ if issubclass(kind, torch.optim.Optimizer)][
        :-1
    ]
    torchs = [kind for kind in line if kind.__module__.startswith("torch.")]
    found = (torchs or line[-1:] or [type(optimizer)])[0]
    return f"{found.__module__}.{found.__qualname__}"


def _compare(first: Any, other: Any, rank: int) -> None:
    if first["strategy"] != other["strategy"]:
        raise MismatchError(
            f"rank 0 uses {first['strategy']}, rank {rank} uses {other['strategy']}; "
            "all ranks must use the same strategy"
        )
    if first["optimizer"] != other["optimizer"]:
        raise MismatchError(
            f"rank 0's optimizer is a {first['optimizer']}, rank {rank}'s a {other['optimizer']}; "
            "all ranks must build the same"
        )
    for a, b in zip(first["tensors"], other["tensors"], strict=False):
        if a != b:
            raise MismatchError(
                f"parameter {a[0]!r} differs: rank 0 has {_describe(a)}, rank {rank} has "
                f"{_describe(b)}; all ranks must build the same model"
            )
    if len(first["tensors"]) != len(other["tensors"]):
        longer = max(first["tensors"], other["tensors"], key=len)
        extra = longer[min(len(first["tensors"]), len(other["tensors"]))]
        raise MismatchError(
            f"parameter {extra[0]!r} is missing: rank 0 has {len(first['tensors'])} parameters "
            f"and buffers, rank {rank} has {len(other['tensors'])}; all ranks must build the "
            "same model"
        )


def _describe(entry: Any) -> str:
    name, shape, dtype, trained, strides, sparse = entry
    kind = " (sparse gradients)" if sparse else ""
    layout = f" with strides {tuple(strides)}" if strides else ""
    return f"{name!r} {dtype} {tuple(shape)}{layout}{kind if trained else ' (not trained)'}"
