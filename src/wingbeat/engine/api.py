"""`distribute` and `release`: the one line that a training script changes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from wingbeat.collectives import Collectives
from wingbeat.engine.advice import advise, facts_of
from wingbeat.engine.engine import Engine
from wingbeat.engine.gradients.bucket import broadcast_now, dtype_name, strides_of
from wingbeat.engine.gradients.bucketing import ignored
from wingbeat.engine.gradients.compression import check_momentum
from wingbeat.engine.gradients.placed import local, shard_all
from wingbeat.engine.gradients.sparse import check_sparse, sparse_parameters
from wingbeat.engine.join_context import joined
from wingbeat.engine.model_checks import (
    averages_inside,
    check_accelerated_replica,
    check_complex,
    check_placed,
    check_strategy_in_replicas,
    refuse_wrapped,
)
from wingbeat.engine.upgrade import (
    DeferringOptimizer,
    DistributedModel,
    DistributedOptimizer,
    downgrade,
    engine_of,
    upgrade,
)
from wingbeat.errors import MismatchError, UsageError, WingbeatError
from wingbeat.observe.log import log
from wingbeat.observe.meter import Meter
from wingbeat.observe.reporter import (
    Reporter,
    SupervisorProcess,
    enabled,
    job_name,
    places,
)
from wingbeat.parts.plan import Chosen
from wingbeat.parts.schedule import Decoupled
from wingbeat.parts.strategy import Strategy
from wingbeat.traits import MEANS
from wingbeat.transport.mesh import column_of, describe, refuse_unequal, replicas_of
from wingbeat.transport.torch_store import is_append_only
from wingbeat.transport.world import World, current

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_INSIDE = ("optimizer", "_optimizer")
"""Attributes in which wrapper optimizers keep the wrapped one."""


def distribute(
    model: ModelT,
    optimizer: OptimizerT,
    strategy: Strategy | None = None,
    *,
    world: World | None = None,
    mesh: DeviceMesh | None = None,
    across: str | None = None,
) -> tuple[ModelT, OptimizerT]:
    """Distribute the training of ``model`` over all workers; the training loop does not change.

    Both objects are upgraded in place and returned. The model gains ``no_sync()``, ``join()`` and
    ``synchronize()``. The optimizer gains ``clip_grad_norm_(max_norm)`` and, if it is divided,
    ``shard_state_dict()`` and ``load_shards(parts)``. All workers copy the parameters and buffers
    of rank 0.

    With a mesh, the ranks that differ only in the dimension ``across`` exchange with each other;
    its other dimensions are the user's, for FSDP2 (``fully_shard(model, mesh=mesh["dp_shard"])``)
    or tensor parallelism (``parallelize_module``). Each rank exchanges the part of the model that
    it holds.

    Args:
        model: any module; parameters that require no gradient are not changed.
        optimizer: any ``torch.optim`` optimizer over parameters of ``model``.
        strategy: ``wingbeat.AllReduce()``, ``wingbeat.DeAR()``...; default: ``wingbeat.Auto()``,
            which tries a few exact ones in the first iterations and keeps the fastest. With a mesh,
            or LBFGS, which it cannot try: ``wingbeat.AllReduce()``.
        world: the workers; default: those of `wingbeat.init`.
        mesh: a mesh of all ranks of torch's default group, which are those of the job, or of this
            replica (``WINGBEAT_REPLICA``); default: each rank holds the whole model.
        across: the name of the mesh's dimension across replicas; default: its first.

    Raises:
        UsageError: `init` was not called, an object is already distributed, the optimizer has
            parameters that are not in the model, the optimizer cannot be divided
            (``shard_optimizer``), an environment variable of `wingbeat top` is invalid, the mesh is
            not of all ranks, or the strategy or the placement of a parameter is impossible with it.
        MismatchError: the ranks' models or meshes differ; raised on every rank, with the first
            difference.
    """
    given, optimizer = optimizer, cast(OptimizerT, unwrapped(optimizer))
    if strategy is None:
        strategy = default_strategy(optimizer, meshed=mesh is not None)
    if mesh is None and across is not None:
        raise UsageError(f"distribute(across={across!r}): it names a dimension of mesh=, not given")
    _check(model, optimizer, strategy, meshed=mesh is not None)
    _refuse_scaler_around(given, optimizer)
    world = whole = world or current()
    check_monitor_variables(whole)
    check_momentum(strategy, optimizer)
    check_complex(model, strategy)
    check_sparse(model, strategy)
    strategy.exchange.check_model(model)
    _check_returned(world, strategy)
    alike = world.size > 1 and not world.returned
    if mesh is not None and world.returned and world.torch_job is None:
        raise UsageError(
            f"distribute(mesh=...) on rank {world.rank}, which was started again while the others "
            "continue: torch's default group accepts no restarted rank; start all workers again, "
            "or each replica as a torch job of its own (WINGBEAT_REPLICA)"
        )
    if mesh is not None and world.returned and MEANS not in strategy.exchange.has:
        raise UsageError(
            f"distribute(mesh=...) on rank {world.rank}, whose replica was started again while the "
            f"others continue, which {strategy!r} cannot let in: train with wingbeat.Ripples(), "
            "LocalSGD() or DiLoCo(), or start all replicas again"
        )
    told = None if mesh is None else describe(mesh, across)
    if alike:
        _check_same_model(model, optimizer, world, strategy, told)
    if mesh is not None and not averages_inside(
        model, strategy, replicas_of(whole, mesh, across).shape[1]
    ):
        world = column_of(whole, mesh, across)
        check_strategy_in_replicas(strategy, world)
        check_placed(model, world)
        check_accelerated_replica(model, world)
    if world.size > 1:
        # Several models of one process launch their buckets in different orders.
        world = strategy.exchange.open_world(world)
    collectives = Collectives(world, strategy.topology)
    if alike and world.size > 1:
        left_out, named = ignored(model), [*model.named_parameters(), *model.named_buffers()]
        with torch.no_grad():
            tensors = [local(tensor.detach()) for name, tensor in named if name not in left_out]
            broadcast_now(tensors, collectives, root=0)
    engine = Engine(model, optimizer, strategy, collectives, type(optimizer).step)
    upgrade(model, DistributedModel, engine)
    defers = engine.update.defers or engine.recovery is not None
    upgrade(optimizer, DeferringOptimizer if defers else DistributedOptimizer, engine)
    claim_parameters(engine, engine.trained)
    engine.meter.strategy = repr(strategy)
    if world.leads and not world.threads and not world.returned:
        _warn(
            whole,
            advise(strategy, facts_of(world, strategy, engine.bucketing.device, meshed=bool(told))),
        )
    report(whole, engine.meter)
    return model, given


_warned: weakref.WeakKeyDictionary[World, set[str]] = weakref.WeakKeyDictionary()
"""Warnings of each job: several models may give the same."""


def _warn(world: World, lines: list[str]) -> None:
    """Log the lines that this job has not logged."""
    before = _warned.setdefault(world, set())
    for line in lines:
        if line not in before:
            before.add(line)
            log.warning("%s", line)


def default_strategy(optimizer: torch.optim.Optimizer, *, meshed: bool) -> Strategy:
    """Return ``Auto()``, or ``AllReduce()`` where schedules cannot change in training."""
    if meshed or isinstance(optimizer, torch.optim.LBFGS):
        return Strategy().called("AllReduce()")
    return Strategy(plan=Chosen(), schedule=Decoupled()).called("Auto()")


def _check_returned(world: World, strategy: Strategy) -> None:
    if world.returned and not strategy.exchange.readmits:
        raise UsageError(
            f"rank {world.rank} was started again while the others continue, which {strategy!r} "
            "cannot let in: train with wingbeat.Canary(), Ripples(), LocalSGD() or DiLoCo(), or "
            "start all workers again"
        )


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a forwarding wrapper, such as Accelerate's."""
    seen: list[Any] = []
    while isinstance(optimizer, torch.optim.Optimizer) and "param_groups" not in vars(optimizer):
        inner = next((vars(optimizer)[k] for k in _INSIDE if k in vars(optimizer)), None)
        if inner is None or any(inner is one for one in seen):
            break
        seen.append(optimizer)
        optimizer = inner
    return optimizer


def _refuse_scaler_around(given: Any, inner: Any) -> None:
    """Refuse a wrapper with a gradient scaler (Accelerate): it calls the optimizer's old step."""
    if given is not inner and vars(given).get("scaler") is not None:
        raise UsageError(
            f"distribute(optimizer={type(given).__name__}): its gradient scaler would continue "
            f"with the step that {type(inner).__name__} has now: distribute first and wrap then, "
            "or use wingbeat.integrations.accelerate.prepare()"
        )


def no_sync(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Equivalent of ``model.no_sync()``, also if the model defines that attribute."""
    return _engine_of(model, "no_sync").no_sync()


def join(
    model: torch.nn.Module,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """Equivalent of ``model.join()``, also if the model defines that attribute."""
    options = divide_by_initial_world_size, enable, throw_on_early_termination
    return joined(_engine_of(model, "join"), *options)


def synchronize(model: torch.nn.Module) -> None:
    """Complete pending operations, and make the models of all workers equal.

    Call it on all ranks, before evaluation and saving. Under `Ripples`, `ADPSGD`, `LocalSGD` and
    `DiLoCo`, whose models differ, parameters and floating-point buffers become the mean over all
    workers, and training continues from it. Under `Canary` all workers apply the remaining rounds.
    Other strategies have equal models after each step; pending updates are applied.

    ``model.synchronize()`` is equivalent, unless the model defines an attribute of that name. A
    `PeerError` names a worker that did not call it in time.
    """
    _engine_of(model, "synchronize").level()


def steps_made(model: torch.nn.Module) -> int:
    """Return the number of calls of ``optimizer.step()`` since `distribute`.

    Steps that all workers have dropped after a failure (``min_replicas=``) count. A process that
    has rejoined the job counts from the number of the worker whose state it has copied, under
    `Canary` from 0. A loop over steps begins there.
    """
    return _engine_of(model, "steps_made").update.steps


def count_tokens(model: torch.nn.Module, tokens: int) -> None:
    """Count tokens, or samples, that this worker has processed, which weight it in averages.

    For ``DiLoCo(weights="tokens")`` and ``"decoupled"``: call it before each ``optimizer.step()``
    with the number of this rank's batch. The ranks of a replica are summed.

    Raises:
        UsageError: ``tokens`` is no whole number from 0 on, or the strategy weights no tokens.
    """
    _engine_of(model, "count_tokens").update.count_tokens(tokens)


def _engine_of(model: Any, what: str) -> Engine:
    engine = engine_of(model) if isinstance(model, torch.nn.Module) else None
    if engine is None:
        raise UsageError(
            f"wingbeat.{what}({type(model).__name__}): pass a model that distribute() has returned"
        )
    return engine


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Equivalent of ``optimizer.clip_grad_norm_(max_norm)``, a method unknown to type checkers.

    Returns the norm before clipping, a scalar, equal on every worker.

    Raises:
        UsageError: the optimizer was not distributed, or a number is out of range.
    """
    own = unwrapped(optimizer)
    if not isinstance(own, DistributedOptimizer):
        raise UsageError(
            f"wingbeat.clip_grad_norm_({type(optimizer).__name__}): pass an optimizer that "
            "distribute() has returned"
        )
    return own.clip_grad_norm_(max_norm, norm_type)


def release(model: ModelT, optimizer: OptimizerT) -> tuple[ModelT, OptimizerT]:
    """Undo `distribute`: complete pending work, and return plain objects without hooks.

    A `UsageError` if they were not distributed together.
    """
    engine = engine_of(model)
    if engine is None or engine is not engine_of(unwrapped(optimizer)):
        raise UsageError("release(): this model and optimizer were not distributed together")
    engine.detach()
    _make_plain(engine)
    return model, optimizer


def abandon(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Like `release`, but after an error: wait for no peer, and raise no error.

    Operations that can complete do so. Diverged models stay as they are, and objects that are not
    distributed are not changed.
    """
    engine = engine_of(model)
    if engine is None or engine is not engine_of(unwrapped(optimizer)):
        return
    with contextlib.suppress(WingbeatError):  # an earlier error has been raised
        engine.detach(meet=False)
    engine.remove_hooks()
    _make_plain(engine)


def _make_plain(engine: Engine) -> None:
    engine.close()
    free_parameters(engine)
    downgrade(engine.model)
    downgrade(engine.optimizer)


def begin_step(model: torch.nn.Module) -> None:
    """Prepare for a step of several forwards and backwards, as a forward of the model does.

    Each backward then synchronises gradients unless it runs inside `no_sync`.
    """
    _engine_of(model, "begin_step").begin_step()


def _check(model: Any, optimizer: Any, strategy: Any, *, meshed: bool) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"distribute(model={type(model).__name__}): pass a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"distribute(optimizer={type(optimizer).__name__}): pass a torch.optim.Optimizer"
        )
    if not isinstance(strategy, Strategy):
        shown = getattr(strategy, "__name__", repr(strategy))  # such as a preset that is not called
        raise UsageError(f"distribute(strategy={shown}): pass an instance, such as wingbeat.DeAR()")
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
    if meshed:
        shard_all(model)
    refuse_wrapped(model, meshed=meshed)
    _check_parameters(model, optimizer)
    refuse_claimed(model)


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
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    strategy: Strategy,
    mesh: dict[str, Any] | None,
) -> None:
    left_out, sparse = ignored(model), sparse_parameters(model)
    tensors = [
        *((name, t, bool(t.requires_grad)) for name, t in model.named_parameters()),
        *((name, t, False) for name, t in model.named_buffers()),
    ]
    mine = []
    for name, tensor, trained in tensors:
        if name not in left_out:
            # Parts of a parameter may have other strides than the whole one, but the same on all.
            strides = strides_of(local(tensor)) if trained else None
            laid_out = strides and list(strides)
            shape, dtype = list(tensor.shape), dtype_name(tensor.dtype)
            placed = list(map(repr, getattr(tensor, "placements", ())))
            mine.append([name, shape, dtype, trained, laid_out, name in sparse, placed])
    own = {
        "mesh": mesh,
        "strategy": repr(strategy),
        "optimizer": _family(optimizer),
        "tensors": mine,
    }
    answers = world.exchange("model", own)
    for rank, answer in enumerate(answers):
        _compare(answers[0], answer, rank)


def _family(optimizer: torch.optim.Optimizer) -> str:
    """Name the first base class from torch, else the direct subclass of `Optimizer`."""
    bases = [kind for kind in type(optimizer).__mro__ if issubclass(kind, torch.optim.Optimizer)]
    of_torch = [kind for kind in bases[:-1] if kind.__module__.startswith("torch.")]
    found = (of_torch or bases[:-1][-1:] or [type(optimizer)])[0]
    return f"{found.__module__}.{found.__qualname__}"


def _compare(first: Any, other: Any, rank: int) -> None:
    refuse_unequal(first["mesh"], other["mesh"], rank)
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
    mine, theirs = first["tensors"], other["tensors"]
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            raise MismatchError(
                f"parameter {a[0]!r} differs: rank 0 has {_describe(a)}, rank {rank} has "
                f"{_describe(b)}; all ranks must build the same model"
            )
    if len(mine) != len(theirs):
        extra = max(mine, theirs, key=len)[min(len(mine), len(theirs))]
        raise MismatchError(
            f"parameter {extra[0]!r} is missing: rank 0 has {len(mine)} parameters and buffers, "
            f"rank {rank} has {len(theirs)}; all ranks must build the same model"
        )


def _describe(entry: Any) -> str:
    name, shape, dtype, trained, strides, sparse, placed = entry
    kind = " (sparse gradients)" if sparse else ""
    layout = f" with strides {tuple(strides)}" if strides else ""
    layout += f" placed as {', '.join(placed)}" if placed else ""
    return f"{name!r} {dtype} {tuple(shape)}{layout}{kind if trained else ' (not trained)'}"


# -- which engine synchronises a parameter ------------------------------------------------

_engine_by_parameter: Any = WeakIdKeyDictionary()
"""Weak references to engines, by parameter: a second engine would average gradients twice."""


def claim_parameters(engine: Any, params: Iterable[torch.Tensor]) -> None:
    """Register the engine as the owner of ``params`` for its lifetime."""
    for param in params:
        _engine_by_parameter[param] = weakref.ref(engine)


def free_parameters(engine: Any) -> None:
    """Unregister the engine's parameters."""
    for param in engine.trained:
        _engine_by_parameter.pop(param, None)


def refuse_claimed(model: torch.nn.Module) -> None:
    """Raise a `UsageError` if another engine synchronises a parameter of ``model``."""
    for name, param in model.named_parameters():
        ref = _engine_by_parameter.get(param)
        engine = None if ref is None else ref()
        if engine is not None:
            other = type(engine.model).__name__.removeprefix("Distributed")
            raise UsageError(
                f"distribute(): parameter {name!r} of {type(model).__name__} is distributed "
                f"already, as a part of {other}: distribute one module that contains both "
                "(torch.nn.ModuleDict, for example), with one optimizer, or release() the "
                "other first"
            )


# -- reports for `wingbeat top` -----------------------------------------------------------

_reporters: weakref.WeakKeyDictionary[World, Reporter | None] = weakref.WeakKeyDictionary()
_reporters_lock = threading.Lock()


def check_monitor_variables(world: World) -> None:
    """Check the environment variables of `wingbeat top` before anything is changed."""
    if not world.threads and enabled() and world.rank == 0:
        places()


def report(world: World, meter: Meter) -> None:
    """Report a model's meter until its world is closed; training continues if that fails."""
    if world.threads or not enabled():
        return
    with _reporters_lock:
        if world not in _reporters:
            _reporters[world] = _start_reporter(world)
    reporter = _reporters[world]
    if reporter is not None:
        reporter.add(meter)


def _start_reporter(world: World) -> Reporter | None:
    where = places() if world.rank == 0 else None
    store = world.store
    if is_append_only(store):
        if world.rank == 0:
            log.info("`wingbeat top` cannot show this job: its store is a file, that would grow")
        return None
    supervisor = None
    if where is not None:
        try:
            supervisor = SupervisorProcess(job_name(), where, log.info)
        except OSError as error:  # out of memory or processes
            log.info("`wingbeat top` cannot show this job: %s", error)
    names = [link.name for link in world.links]
    try:
        reporter = Reporter(world.rank, world.size, names, store, supervisor).start()
    except RuntimeError as error:  # too many threads
        log.info("`wingbeat top` cannot show rank %d: %s", world.rank, error)
        if supervisor is not None:
            supervisor.close()
        return None
    world.on_close(reporter.close)
    return reporter
