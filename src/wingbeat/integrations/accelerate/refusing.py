"""Rejects the setups of an Accelerator that wingbeat does not support, before anything changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.transport.world import World

_PARALLEL = ("tp_enabled", "cp_enabled", "sp_enabled", "dp_shard_enabled")


def refuse_setup(accelerator: Any, world: World) -> None:
    """Raise UsageError unless an Accelerator uses data parallelism in supported precision."""
    kind = accelerator.distributed_type.value
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
                f"prepare(accelerator): its parallelism_config has {name}; wingbeat averages whole "
                "models: leave parallelism_config out"
            )
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


def warn_of_one(world: World, env: Mapping[str, str] = os.environ) -> None:
    """Warn if Accelerate's launcher has started one process in place of several.

    On CPUs it starts one process for any ``--num_processes`` and leaves the rest to mpirun.
    """
    on_cpus = env.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    if world.size == 1 and on_cpus and "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        log.warning(
            "accelerate launch --cpu starts one process, whatever --num_processes says: this is a "
            "world of one worker; for more, start with torchrun --nproc-per-node=N"
        )


def refuse_ddp_options(accelerator: Any, models: list[nn.Module]) -> None:
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
