"""`prepare`: ``Accelerator.prepare`` with `wingbeat.distribute` in place of DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wingbeat.engine.api import distribute, unwrapped
from wingbeat.engine.engine import Engine
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.integrations.accelerate import names
from wingbeat.integrations.accelerate.accelerator import upgrade_accelerator
from wingbeat.integrations.accelerate.refusing import (
    refuse_ddp_options,
    refuse_setup,
    warn_of_one,
)
from wingbeat.parts.strategy import Strategy
from wingbeat.transport import init
from wingbeat.transport.world import World, current


def prepare(
    accelerator: Any,
    *objects: Any,
    strategy: Strategy | None = None,
    device_placement: Sequence[bool | None] | None = None,
) -> Any:
    """Prepare objects for training, as ``accelerator.prepare``, with wingbeat in place of DDP.

    The accelerator and the models are changed in place. ``clip_grad_norm_`` clips without gathering
    gradients. ``no_sync`` and ``accumulate`` support models with methods of these names.
    ``save_state`` and ``load_state`` include each worker's residuals, and models that differ are
    synchronized before saving. ``join_uneven_inputs`` uses wingbeat's `join`. `wingbeat.init` is
    called if it was not called before.

    Args:
        accelerator: an ``accelerate.Accelerator`` for plain data parallelism.
        objects: models with their optimizers, loaders and schedulers, in any order. A model without
            trained parameters needs no optimizer. wingbeat distributes the first of several
            optimizers of one model; the others stay unchanged.
        strategy: default: ``wingbeat.DeAR()``.
        device_placement: for each of ``objects``, as for ``accelerator.prepare``.

    Returns:
        The prepared objects in the same order; a single object without a tuple.

    Raises:
        UsageError: Accelerate is missing or too old; the accelerator uses another parallelism, or
            has options that would have no effect; a model and an optimizer do not match; or
            `wingbeat.distribute` rejects the model, the optimizer or the strategy.
        MismatchError: the ranks' models differ.
    """
    library = names.accelerate()
    if not isinstance(accelerator, library.Accelerator):
        raise UsageError(
            f"prepare({type(accelerator).__name__}): the first argument must be an "
            "accelerate.Accelerator"
        )
    names.check(accelerator)
    world = _world()
    placement = list(device_placement or [None] * len(objects))
    if len(placement) != len(objects):
        raise UsageError(
            f"prepare(device_placement=...): {len(placement)} values for {len(objects)} objects; "
            "give one for each"
        )
    models = [each for each in objects if isinstance(each, nn.Module)]
    refuse_setup(accelerator, world)
    warn_of_one(world)
    refuse_ddp_options(accelerator, models)
    pairs = _pairs(models, [each for each in objects if isinstance(each, torch.optim.Optimizer)])
    if strategy is None:
        from wingbeat.strategies import DeAR

        strategy = DeAR()
    made = {
        id(each): _prepared_model(accelerator, each, pairs.get(id(each)), strategy, place, world)
        for each, place in zip(objects, placement, strict=True)
        if isinstance(each, nn.Module)
    }
    upgrade_accelerator(accelerator, [(made[key], unwrapped(o)) for key, o in pairs.items()])
    return _with_others(accelerator, objects, placement, made)


def _world() -> World:
    try:
        return current()
    except UsageError:
        return init()


def _prepared_model(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    strategy: Strategy,
    place: bool | None,
    world: World,
) -> nn.Module:
    """Move and distribute one model; Accelerate handles device and autocast without DDP."""
    engine = None if optimizer is None else engine_of(unwrapped(optimizer))
    if engine is not None:  # a model that is prepared again stays distributed
        _check_again(model, engine, strategy)
        model, optimizer = engine.model, None
    ready: nn.Module = accelerator.prepare_model(
        model, device_placement=place, evaluation_mode=True
    )
    if optimizer is not None:
        distribute(ready, optimizer, strategy, world=world)
    return ready


def _check_again(model: nn.Module, engine: Engine, strategy: Strategy) -> None:
    compiled = getattr(engine.model, "_orig_mod", None)
    if model not in (engine.model, compiled) or engine.meter.strategy != repr(strategy):
        raise UsageError(
            f"prepare(): the optimizer of {type(model).__name__} is distributed already, with "
            f"another model or as {engine.meter.strategy}: call wingbeat.release(model, optimizer) "
            "first"
        )


def _with_others(
    accelerator: Any, objects: Sequence[Any], placement: Sequence[Any], made: dict[int, nn.Module]
) -> Any:
    """Let Accelerate prepare all other objects; return all in the order of ``objects``."""
    places = [at for at, each in enumerate(objects) if id(each) not in made]
    found: list[Any] = [made.get(id(each)) for each in objects]
    if places:
        others = accelerator.prepare(
            *(objects[at] for at in places), device_placement=[placement[at] for at in places]
        )
        for at, each in zip(places, others if len(places) > 1 else [others], strict=True):
            found[at] = each
    return tuple(found) if len(found) != 1 else found[0]


# -- which optimizer trains which model ---------------------------------------------------


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
                "one module (torch.nn.ModuleDict, say), or give each an optimizer of its own"
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


def _params(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in vars(optimizer)["param_groups"] for param in group["params"]]


def _check_scaler(optimizer: Any, inner: Any) -> None:
    if getattr(optimizer, "scaler", None) is not None and engine_of(inner) is None:
        raise UsageError(
            f"prepare(): {type(inner).__name__} was prepared before, and its gradient scaler would "
            "go on with the step that it had then: pass the bare optimizer"
        )
