"""Accelerate with wingbeat in place of DDP: `prepare` replaces ``accelerator.prepare``.

::

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = prepare(
        accelerator, model, optimizer, loader, scheduler, strategy=wingbeat.DeAR()
    )

The training loop stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from wingbeat.compression import Compression
from wingbeat.engine.api import distribute, join, no_sync, synchronize, unwrapped
from wingbeat.engine.gradients.placed import parallel_parameter
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.integrations import check_names, library
from wingbeat.integrations.checkpoint import (
    load_residuals,
    read_parts,
    save_residuals,
    write_part,
)
from wingbeat.integrations.ddp import WireState, wire_hook
from wingbeat.observe.log import log
from wingbeat.strategies import DeAR, Strategy
from wingbeat.transport import init
from wingbeat.transport.world import World, current

__all__ = ["prepare", "register_comm_hook"]

LEAST = "1.5.0"
"""The first supported version; constraints.txt has the tested one."""

NAMES = (
    "_dataloaders",  # private: the prepared loaders, for ``join_uneven_inputs``
    *("clip_grad_norm_", "free_memory", "gradient_state", "join_uneven_inputs", "load_state"),
    *("no_sync", "prepare", "prepare_model", "save_state", "trigger_sync_in_backward"),
    "unscale_gradients",
)
"""Names of an Accelerator that are overridden or used."""

_PAIRS = "_wingbeat_pairs"
_PARALLEL = ("tp_enabled", "cp_enabled", "sp_enabled")
_PARAMETERS = nn.Module.parameters.__code__

Pair = tuple[nn.Module, torch.optim.Optimizer]


def prepare(
    accelerator: Any,
    *objects: Any,
    strategy: Strategy | None = None,
    device_placement: Sequence[bool | None] | None = None,
    mesh: DeviceMesh | None = None,
    across: str | None = None,
) -> Any:
    """Prepare objects for training, as ``accelerator.prepare``, with wingbeat in place of DDP.

    The accelerator and the models are changed in place. ``clip_grad_norm_`` clips without gathering
    gradients. ``no_sync`` and ``accumulate`` support models with methods of these names.
    ``save_state`` and ``load_state`` include each worker's residuals, and models that differ are
    synchronized before saving. ``join_uneven_inputs`` uses wingbeat's `join`. `wingbeat.init` is
    called if it was not called before.

    Args:
        accelerator: an ``accelerate.Accelerator`` for data parallelism.
        objects: models with their optimizers, loaders and schedulers, in any order. A model without
            trained parameters needs no optimizer. wingbeat distributes the first of several
            optimizers of one model; the others stay unchanged.
        strategy: default: ``wingbeat.DeAR()``.
        device_placement: for each of ``objects``, as for ``accelerator.prepare``.
        mesh, across: as for `wingbeat.distribute`, for models that you have sharded yourself. A
            loader is then accepted under ``fully_shard`` only: Accelerate gives each process other
            batches, and ranks along a tensor-parallel dimension must read the same.

    Returns:
        The prepared objects in the same order; a single object without a tuple.

    Raises:
        UsageError: Accelerate is missing or too old; the accelerator uses another parallelism, or
            has options that would have no effect; a model and an optimizer do not match; or
            `wingbeat.distribute` rejects the model, the optimizer or the strategy.
        MismatchError: the ranks' models differ.
    """
    accelerate = library("accelerate", LEAST)
    if not isinstance(accelerator, accelerate.Accelerator):
        raise UsageError(
            f"prepare({type(accelerator).__name__}): the first argument must be an "
            "accelerate.Accelerator"
        )
    check_names(f"accelerate {accelerate.__version__}", {accelerator: NAMES})
    try:
        world = current()
    except UsageError:
        world = init()
    placement = list(device_placement or [None] * len(objects))
    if len(placement) != len(objects):
        raise UsageError(
            f"prepare(device_placement=...): {len(placement)} values for {len(objects)} objects; "
            "give one for each"
        )
    models = [each for each in objects if isinstance(each, nn.Module)]
    _refuse_setup(accelerator, world)
    _refuse_loaders(objects, models)
    warn_of_one(world)
    _refuse_ddp_options(accelerator, models)
    pairs = _pairs(models, [each for each in objects if isinstance(each, torch.optim.Optimizer)])
    strategy = DeAR() if strategy is None else strategy
    where = {"mesh": mesh, "across": across}
    made: dict[int, Any] = {}
    for each, place in zip(objects, placement, strict=True):
        if isinstance(each, nn.Module):
            optimizer = pairs.get(id(each))
            made[id(each)] = _prepared_model(
                accelerator, each, optimizer, strategy, place, world, where
            )
    _upgrade(accelerator, [(made[key], unwrapped(o)) for key, o in pairs.items()])
    found: list[Any] = [made.get(id(each)) for each in objects]
    places = [at for at, each in enumerate(objects) if id(each) not in made]
    if places:
        others = accelerator.prepare(
            *(objects[at] for at in places), device_placement=[placement[at] for at in places]
        )
        for at, each in zip(places, others if len(places) > 1 else [others], strict=True):
            found[at] = each
    return tuple(found) if len(found) != 1 else found[0]


def _prepared_model(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    strategy: Strategy,
    place: bool | None,
    world: World,
    where: Mapping[str, Any],
) -> nn.Module:
    """Move and distribute one model; Accelerate handles device and autocast without DDP."""
    engine = None if optimizer is None else engine_of(unwrapped(optimizer))
    if engine is not None:  # a model that is prepared again stays distributed
        compiled = getattr(engine.model, "_orig_mod", None)
        if model not in (engine.model, compiled) or engine.meter.strategy != repr(strategy):
            raise UsageError(
                f"prepare(): the optimizer of {type(model).__name__} is distributed already, with "
                f"another model or as {engine.meter.strategy}: call "
                "wingbeat.release(model, optimizer) first"
            )
        model, optimizer = engine.model, None
    ready: nn.Module = accelerator.prepare_model(
        model, device_placement=place, evaluation_mode=True
    )
    if optimizer is not None:
        distribute(ready, optimizer, strategy, world=world, **where)
    return ready


def _pairs(models: list[nn.Module], optimizers: list[Any]) -> dict[int, Any]:
    """Return each trained model's first optimizer, by the model's id."""
    owner: dict[torch.Tensor, nn.Module] = {}
    for model in models:
        for _, param in nn.Module.named_parameters(model):
            owner.setdefault(param, model)
    found: dict[int, Any] = {}
    for optimizer in optimizers:
        inner = unwrapped(optimizer)
        owners = {id(owner[p]): owner[p] for p in _params(inner) if p in owner}
        kind = type(inner).__name__
        if len(owners) != 1:
            what = (
                "of none of the models given with it: pass its model in the same call"
                if not owners
                else f"of {' and '.join(type(m).__name__ for m in owners.values())}: put them into "
                "one module (such as torch.nn.ModuleDict), or give each an optimizer of its own"
            )
            raise UsageError(f"prepare(): {kind} has parameters {what}")
        _check_scaler(optimizer, inner)
        found.setdefault(next(iter(owners)), optimizer)
    for model in models:
        trained = any(p.requires_grad for _, p in nn.Module.named_parameters(model))
        if trained and id(model) not in found:
            raise UsageError(
                f"prepare(): {type(model).__name__} has parameters to train and no optimizer here: "
                "pass its optimizer in the same call, or freeze it (requires_grad_(False))"
            )
    return found


def _check_scaler(optimizer: Any, inner: Any) -> None:
    if getattr(optimizer, "scaler", None) is not None and engine_of(inner) is None:
        raise UsageError(
            f"prepare(): {type(inner).__name__} was prepared before, and its gradient scaler would "
            "continue with the step that it had then: pass the bare optimizer"
        )


def _params(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in vars(optimizer)["param_groups"] for param in group["params"]]


# -- setups that are refused before anything changes ----------------------------------------------


def _refuse_setup(accelerator: Any, world: World) -> None:
    """Raise UsageError unless an Accelerator uses data parallelism in supported precision."""
    kind = accelerator.distributed_type.value
    # On CPUs Accelerate ignores its plugin silently.
    if kind == "FSDP" or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        refuse_fsdp("prepare(accelerator)")
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UsageError(
            f"prepare(accelerator): it is set up for {kind}, which divides models in a way of its "
            "own; allowed are MULTI_GPU, MULTI_CPU and the like: leave out its plugin, or use "
            "accelerator.prepare()"
        )
    config = getattr(accelerator, "parallelism_config", None)
    for name in _PARALLEL:
        if getattr(config, name, False):
            raise UsageError(
                f"prepare(accelerator): its parallelism_config has {name}; allowed is "
                "dp_replicate_size"
            )
    if getattr(config, "dp_shard_enabled", False):
        refuse_fsdp("prepare(accelerator): parallelism_config with dp_shard_size")
    if accelerator.mixed_precision == "fp8":
        raise UsageError(
            "prepare(accelerator): mixed_precision='fp8' exchanges layers after the optimizer was "
            "made; allowed are 'no', 'bf16' and 'fp16'"
        )
    if world.size != accelerator.num_processes:
        raise UsageError(
            f"prepare(accelerator): it has {accelerator.num_processes} processes and wingbeat "
            f"{world.size} workers: start them all by torchrun or accelerate launch"
        )


def refuse_fsdp(what: str) -> NoReturn:
    """Raise UsageError for Accelerate's own FSDP."""
    raise UsageError(
        f"{what}: Accelerate's FSDP shards models by its own plugin, which was not tested with "
        "wingbeat: shard the model by fully_shard() and call "
        "wingbeat.integrations.accelerate.prepare(..., mesh=mesh), or use PyTorch's own HSDP "
        "without wingbeat"
    )


def _refuse_loaders(objects: Sequence[Any], models: Sequence[nn.Module]) -> None:
    """Raise UsageError for a loader beside a tensor-parallel model."""
    if not any(isinstance(each, DataLoader) for each in objects):
        return
    for model in models:
        name = parallel_parameter(model)
        if name:
            raise UsageError(
                f"prepare({type(model).__name__}, loader): parameter {name!r} is divided by "
                "parallelize_module(), whose ranks must read the same batches, and Accelerate "
                "gives each process others: leave the loader out, and shard its data by a "
                "DistributedSampler with the coordinates of the mesh's other dimensions"
            )


def warn_of_one(world: World, env: Mapping[str, str] = os.environ) -> None:
    """Warn if Accelerate's launcher has started one process in place of several.

    On CPUs it starts one process for any ``--num_processes`` and leaves the rest to mpirun.
    """
    on_cpus = env.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    if world.size == 1 and on_cpus and "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        log.warning(
            "accelerate launch --cpu starts one process, for any --num_processes: this is a "
            "world of one worker; for more, start with torchrun --nproc-per-node=N"
        )


def _refuse_ddp_options(accelerator: Any, models: list[nn.Module]) -> None:
    """Raise UsageError for DDP options that affect training and would have no effect here."""
    handler = getattr(accelerator, "ddp_handler", None)
    if handler is None:
        return
    hook = getattr(handler, "comm_hook", None)
    chosen = getattr(hook, "value", hook) or "no"
    if chosen != "no":
        raise UsageError(
            f"DistributedDataParallelKwargs(comm_hook={chosen!r}): there is no DDP to hook "
            "into; give the strategy a compression, such as wingbeat.DeAR(compression='bf16')"
        )
    for model in models:
        buffer = next((name for name, _ in model.named_buffers()), None)
        if not handler.broadcast_buffers and buffer is not None:
            raise UsageError(
                f"broadcast_buffers=False: wingbeat takes over rank 0's buffers, and "
                f"{type(model).__name__} has {buffer!r}; leave it out, or name the buffers by "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
            )


# -- the methods of an Accelerator that are overridden --------------------------------------------


class DistributedAccelerator:
    """Mixin for the class of an Accelerator that has prepared models with wingbeat.

    Calls that do not concern distributed models go to the Accelerator's own methods.
    """

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip as Accelerate does; a distributed model's gradients are not gathered.

        Returns the norm before clipping, a scalar that is equal on all workers.
        """
        parameters, optimizer = _optimizer_of(parameters, self._wingbeat_live())
        if optimizer is None or not norm_type > 0:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]
        self.unscale_gradients()  # type: ignore[attr-defined]
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As Accelerate's, also for a model with an attribute ``no_sync`` of its own."""
        context = super().no_sync if engine_of(model) is None else no_sync  # type: ignore[misc]
        with context(model):
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """As Accelerate's; raises UsageError for a distributed model."""
        if engine_of(model) is not None:
            raise UsageError(
                "trigger_sync_in_backward(): whether gradients are averaged is decided by the "
                "forward; run the last forward outside of no_sync()"
            )
        with library("accelerate", LEAST).Accelerator.trigger_sync_in_backward(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """As Accelerate's; for a distributed model by its ``join``, on CPUs too.

        Raises UsageError for several models of which one is distributed.
        """
        joinables = list(joinables)
        ours = [each for each in joinables if engine_of(each) is not None]
        if not ours:
            with super().join_uneven_inputs(joinables, even_batches):  # type: ignore[misc]
                yield
            return
        if len(joinables) > 1:
            raise UsageError(
                f"join_uneven_inputs(): {len(joinables)} models, of which a worker without batches "
                "could stand in for one only: distribute one module that contains all of them "
                "(such as torch.nn.ModuleDict)"
            )
        even = self.even_batches if even_batches is None else even_batches  # type: ignore[attr-defined]
        loaders = self._dataloaders  # type: ignore[attr-defined]
        with _even_batches(loaders, even_batches), join(ours[0], enable=not even):
            yield

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, with each worker's residuals; every worker calls it.

        Models that differ between workers (Ripples, LocalSGD, ...) are synchronized first.
        """
        pairs = self._wingbeat_live()
        for model, _ in pairs:
            _refuse_shards(model, "save_state()")
            synchronize(model)
        folder = super().save_state(output_dir, *args, **kwargs)  # type: ignore[misc]
        for number, (_, optimizer) in enumerate(pairs):
            save_residuals(optimizer, folder, number)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's, with each worker's residuals; every worker calls it.

        Raises UsageError if the files of residuals are not from the same run.
        """
        for model, _ in self._wingbeat_live():
            _refuse_shards(model, "load_state()")
        seen: list[str] = []
        hook = self.register_load_state_pre_hook(  # type: ignore[attr-defined]
            lambda _models, folder: seen.append(folder)
        )
        try:
            super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
        finally:
            hook.remove()
        for number, (_, optimizer) in enumerate(self._wingbeat_live()):
            load_residuals(optimizer, seen[0], number)

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's."""
        vars(self)[_PAIRS] = []
        return super().free_memory(*objects)  # type: ignore[misc]

    def _wingbeat_live(self) -> list[Pair]:
        """Return the distributed models that are still in use, in the order of preparation."""
        found = [(model(), optimizer()) for model, optimizer in vars(self)[_PAIRS]]
        return [
            (model, optimizer)
            for model, optimizer in found
            if model is not None and optimizer is not None and engine_of(model) is not None
        ]


def _refuse_shards(model: nn.Module, what: str) -> None:
    """Raise UsageError for shards, of which Accelerate would save those of rank 0."""
    engine = engine_of(model)
    if engine is not None and engine.world.replica is not None:
        raise UsageError(
            f"{what}: Accelerate saves rank 0's shards only of a model that it has not sharded: "
            "use wingbeat.integrations.checkpoint, or torch.distributed.checkpoint"
        )


def _upgrade(accelerator: Any, pairs: Sequence[Pair]) -> None:
    """Add the methods above to an Accelerator, for these models and their optimizers too."""
    kept = vars(accelerator).setdefault(_PAIRS, [])
    known = {id(model()) for model, _ in kept}
    kept += [(weakref.ref(m), weakref.ref(o)) for m, o in pairs if id(m) not in known]
    plain = type(accelerator)
    if not issubclass(plain, DistributedAccelerator):
        namespace = {"__doc__": plain.__doc__, "__qualname__": f"Distributed{plain.__name__}"}
        accelerator.__class__ = type(plain.__name__, (DistributedAccelerator, plain), namespace)


def _optimizer_of(parameters: Any, pairs: list[Pair]) -> tuple[Any, Any]:
    """Return the parameters, and the optimizer with exactly these; None if there is none.

    An unstarted ``model.parameters()`` is identified by its model, because starting the generator
    gathers gradients.
    """
    model = _unstarted(parameters)
    if model is not None and engine_of(model) is not None:
        given = [param for _, param in nn.Module.named_parameters(model)]
    else:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = parameters
    with torch._C.DisableTorchFunctionSubclass():
        wanted = {param for param in given if param.requires_grad}
        for _, optimizer in pairs:
            if wanted == {param for param in _params(optimizer) if param.requires_grad}:
                return parameters, optimizer
    return parameters, None


def _unstarted(parameters: Any) -> nn.Module | None:
    """Return the model of an unstarted ``model.parameters()`` generator."""
    if not inspect.isgenerator(parameters) or parameters.gi_code is not _PARAMETERS:
        return None
    if inspect.getgeneratorstate(parameters) != inspect.GEN_CREATED:
        return None
    found = inspect.getgeneratorlocals(parameters)
    model = found.get("self") if found.get("recurse") is True else None
    return model if isinstance(model, nn.Module) else None


@contextlib.contextmanager
def _even_batches(loaders: list[Any], even: bool | None) -> Iterator[None]:
    """Set ``even_batches`` of the loaders inside the block."""
    samplers = [loader.batch_sampler for loader in loaders if even is not None]
    before = [(s, s.even_batches) for s in samplers if hasattr(s, "even_batches")]
    for sampler, _ in before:
        sampler.even_batches = even
    try:
        yield
    finally:
        for sampler, was in before:
            sampler.even_batches = was


# -- wingbeat's hooks in Accelerate's DDP, which can name only torch's hooks ----------------------


def register_comm_hook(accelerator: Any, model: Any, wire: Compression) -> WireState:
    """Compress the gradients of a model that Accelerate has wrapped in DDP.

    ``accelerator.save_state`` then saves every worker's residuals too, and ``load_state`` loads
    them, also with another number of workers. Every rank calls this at the same point.

    Args:
        accelerator: the Accelerator that has prepared the model.
        model: the model that ``accelerator.prepare`` has returned.
        wire: the encoding, as for `wingbeat.integrations.ddp.WireState`.

    Returns:
        The hook's state.

    Raises:
        UsageError: Accelerate is missing or too old, the model is not in DDP, or a hook does not
            support the encoding.
    """
    title = f"accelerate {library('accelerate', LEAST).__version__}"
    check_names(title, {accelerator: NAMES})
    ddp = getattr(model, "_orig_mod", model)  # unwraps torch.compile, of Accelerate's dynamo plugin
    if not isinstance(ddp, DistributedDataParallel):
        raise UsageError(
            f"register_comm_hook({type(model).__name__}): the model must be the "
            "DistributedDataParallel that accelerator.prepare() returns with two processes or more"
        )
    state = WireState(ddp, wire)
    ddp.register_comm_hook(state, wire_hook)
    # The Accelerator keeps these functions, which must not keep DDP's buckets.
    bare, rank, size = ddp.module, dist.get_rank(), dist.get_world_size()

    def name(models: list[Any]) -> str:  # with the model's number in Accelerate's files
        return f"hook_{[getattr(each, 'module', each) for each in models].index(bare)}"

    def saving(models: list[Any], _weights: list[Any], folder: str) -> None:
        write_part(state.state_dict(), Path(folder), name(models), rank, size)

    def loading(models: list[Any], folder: str) -> None:
        parts = read_parts(Path(folder), name(models), rank, size)
        if len(parts) == 1:
            state.load_state_dict(parts[0])
        elif parts:
            state.load_state_dicts(parts)

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(loading)
    return state
