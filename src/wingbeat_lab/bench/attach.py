"""Set up a row inside a worker: wrap the model, create its optimizer, and undo both later."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wingbeat.engine.api import abandon, distribute, release
from wingbeat.engine.upgrade import engine_of
from wingbeat.methods.bounded_staleness.build import bounded_exchange
from wingbeat_lab.bench import ddp, tracing
from wingbeat_lab.bench.attached import Attached
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.tracing import CommHook

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def attach(
    contender: Contender, model: nn.Module, make_optimizer: MakeOptimizer, *, recorded: bool = False
) -> Attached:
    """Wrap ``model`` for ``contender``; the default process group must exist.

    ``make_optimizer`` is called with the final parameters. ``recorded`` also records DDP's
    collectives on the event stream, which needs a Python hook. UsageError if wingbeat refuses the
    model.
    """
    if contender.strategy is not None:
        return _attach_strategy(contender, model, make_optimizer)
    if contender.name == "single":
        return Attached(model, make_optimizer(model.parameters()), _nothing, _nothing)
    if contender.name == "fsdp":
        return _attach_fsdp(model, make_optimizer)
    # PowerSGD's hook blocks gloo's two worker threads: two buckets at once would deadlock.
    # All gradients go into one bucket.
    mb = contender.options.get("mb", ddp.ONE_BUCKET_MB)
    wrapped = ddp.wrap(model, mb=mb, scale=contender.scale)
    _register_hook(contender, wrapped, recorded=recorded)
    return Attached(wrapped, make_optimizer(wrapped.parameters()), _nothing, _nothing)


def _nothing() -> None:
    """DDP and plain models defer no work, and need no explicit shutdown."""


def _attach_strategy(
    contender: Contender, model: nn.Module, make_optimizer: MakeOptimizer
) -> Attached:
    assert contender.strategy is not None
    optimizer = make_optimizer(model.parameters())
    model, optimizer = distribute(model, optimizer, contender.strategy)

    def detach() -> None:
        release(model, optimizer)

    synchronize: Callable[[], None] = getattr(model, "synchronize")  # noqa: B009 - `distribute` adds it
    engine = engine_of(model)
    assert engine is not None
    bounded = bounded_exchange(model)
    made = Attached(model, optimizer, detach, synchronize, engine.compression, engine.control)
    if bounded is not None:
        made.applied, made.fired = lambda: bounded.applied, lambda: bounded.fired
    return made


def _attach_fsdp(model: nn.Module, make_optimizer: MakeOptimizer) -> Attached:
    """Shard each child that has parameters and then the root, as in FSDP's guide."""
    from torch.distributed.device_mesh import init_device_mesh

    fsdp: Any = importlib.import_module("torch.distributed.fsdp")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        if any(True for _ in child.parameters()):
            fsdp.fully_shard(child, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return Attached(model, make_optimizer(model.parameters()), _nothing, _nothing)


def _register_hook(contender: Contender, model: DistributedDataParallel, *, recorded: bool) -> None:
    """Register the contender's hook with DDP; plain DDP has one only for recording."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state: Any = None
    hook: CommHook | None = None
    if contender.name == "ddp+fp16":
        hook = default_hooks.fp16_compress_hook
    elif contender.name == "ddp+bf16":
        hook = default_hooks.bf16_compress_hook
    elif contender.name == "ddp+powersgd":
        hook = powerSGD_hook.powerSGD_hook
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=contender.options["rank"],
            start_powerSGD_iter=2,
        )
    if recorded:
        hook = tracing.recording(hook or default_hooks.allreduce_hook)
    if hook is not None:
        model.register_comm_hook(state, hook)


def step(made: Attached, next_loss: Callable[[nn.Module], torch.Tensor]) -> float:
    """Run one iteration as a user would write it; return the loss."""
    made.optimizer.zero_grad()
    loss = next_loss(made.model)
    torch.autograd.backward(loss)
    made.optimizer.step()
    return float(loss.detach())


@contextlib.contextmanager
def attached(
    contender: Contender, model: nn.Module, make_optimizer: MakeOptimizer, *, recorded: bool = False
) -> Iterator[Attached]:
    """``attach`` for the length of a ``with`` block."""
    made = attach(contender, model, make_optimizer, recorded=recorded)
    try:
        yield made
    except BaseException:  # report the original failure, not its consequences
        abandon(made.model, made.optimizer)
        raise
    made.detach()


def optimizer_maker(name: str, *, paced: bool) -> MakeOptimizer:
    """Return the factory of the optimizer called ``name`` (``sgd`` or ``adamw``).

    A paced model's loss falls at a constant rate; a small learning rate allows any length.
    """
    settings: dict[str, Any]
    if name == "adamw":
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-4 if paced else 2e-3)
    settings = {"lr": 1e-3 if paced else 0.05, "momentum": 0.9, "weight_decay": 1e-4}
    return lambda parameters: torch.optim.SGD(parameters, **settings)
