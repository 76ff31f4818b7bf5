"""Set up a row inside a worker: wrap the model, create its optimizer, and undo both later."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wingbeat.engine.api import abandon, distribute, release
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.upgrade import engine_of
from wingbeat.methods.bounded_staleness.build import bounded_exchange
from wingbeat.planning.control import Control, Decisions
from wingbeat_lab.bench import tracing
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.tracing import CommHook


@dataclass
class Attached:
    """A model ready to train.

    Attributes:
        detach: undoes everything, so that the next row starts from a clean process.
        settle: finishes work that was deferred into the next iteration.
        compression: the row's codec and whether it is on; None for rows that are not wingbeat's.
        control: decisions made during training; None if there are none.
        applied: how many iterations' worth of all workers' gradients are in the parameters; None
            where workers are in lockstep and all are.
        fired: how often the staleness bound has acted on this worker, by action; None without one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    detach: Callable[[], None]
    settle: Callable[[], None]
    compression: Compression | None = None
    control: Control | None = None
    applied: Callable[[], float] | None = None
    fired: Callable[[], dict[str, int]] | None = None

    def deciding(self) -> bool:
        """Whether the row still tunes itself and cannot be timed yet."""
        return self.control is not None and self.control.deciding()

    def decisions(self) -> Decisions | None:
        """The decisions, once they are made; None if there are none."""
        return None if self.control is None else self.control.decisions()

    def keep(self, known: Decisions) -> None:
        """Apply the decisions of an earlier training of the same row; on all workers at once."""
        assert self.control is not None, "a row that decides has a control"
        self.control.keep(known)

    @property
    def merge(self) -> dict[str, Any] | None:
        """What the row's plan of merged gradients reports; None without one."""
        merging = None if self.control is None else self.control.merging
        return None if merging is None else merging.report()

    @property
    def coded(self) -> bool | None:
        """Whether gradients are encoded; None if the row has no codec."""
        if self.compression is None or self.compression.coded is None:
            return None
        return self.compression.on


DEFAULT_MB = 25.0
"""DDP's default bucket size. Only with this default is its first bucket smaller, 1 MB."""

ONE_BUCKET_MB = 1_000_000.0
"""Larger than any model: all gradients are in one bucket."""


class ScaledDDP(DistributedDataParallel):
    """Default DDP with both of its bucket sizes multiplied by ``scale``.

    The size of the first bucket is no argument of DDP, so it is set where DDP reads it.
    """

    def __init__(self, model: nn.Module, scale: float) -> None:
        self._scale = scale
        super().__init__(model)

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> Any:
        dist: Any = torch.distributed  # the only access to this value is by a private name
        first = int(dist._DEFAULT_FIRST_BUCKET_BYTES * self._scale)
        self.bucket_bytes_cap = int(self.bucket_bytes_cap * self._scale)
        config = getattr(self, "_bucket_config", None)  # from about torch 2.12 on
        if config is not None:
            self._bucket_config = dataclasses.replace(
                config, bucket_bytes_cap=self.bucket_bytes_cap, first_bucket_bytes_cap=first
            )
        untyped: Any = super()
        usual = dist._DEFAULT_FIRST_BUCKET_BYTES
        dist._DEFAULT_FIRST_BUCKET_BYTES = first
        try:
            return untyped._ddp_init_helper(*args, **kwargs)
        finally:
            dist._DEFAULT_FIRST_BUCKET_BYTES = usual


def wrap(model: nn.Module, *, mb: float, scale: float) -> DistributedDataParallel:
    """DDP with buckets of ``mb`` MB (2**20 bytes), times ``scale``."""
    if mb != DEFAULT_MB:
        return DistributedDataParallel(model, bucket_cap_mb=mb * scale)
    return DistributedDataParallel(model) if scale == 1.0 else ScaledDDP(model, scale)


def buckets(model: DistributedDataParallel) -> list[int]:
    """Bytes of each bucket, in DDP's order; those of the rebuilt buckets if they exist."""
    untyped: Any = model
    data = untyped._get_ddp_logging_data()
    text = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", ""))
    return [int(part) for part in text.replace(" ", "").split(",") if part]


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
    mb = contender.options.get("mb", ONE_BUCKET_MB)
    wrapped = wrap(model, mb=mb, scale=contender.scale)
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
