"""Uneven numbers of batches: a worker that has run out shadows the others, as DDP's Join."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.sync.buffers import broadcast_now
from wingbeat.sync.dear import Phase
from wingbeat.sync.partial import State
from wingbeat.sync.sharded import ShardedEngine

if TYPE_CHECKING:
    from wingbeat.sync.engine import Engine


@contextlib.contextmanager
def joined(engine: Engine) -> Iterator[None]:
    """Keep the others company after leaving the context early."""
    if engine.world.size == 1:
        yield
        return
    last = list(range(engine.world.size))

    def announce_batch() -> None:
        if isinstance(engine, ShardedEngine) and engine.phase is not Phase.IDLE:
            raise UsageError(
                "join() with shard_optimizer: gradients are left from the backward before; call "
                "step() or zero_grad() before the next forward, or accumulate under no_sync()"
            )
        last[:] = _announce(engine, True)

    engine.before_synced_forward = announce_batch
    try:
        yield
    finally:
        engine.before_synced_forward = None
    if isinstance(engine, ShardedEngine):
        engine.zero_grad(True)  # as the others do before their next forward
    while active := _announce(engine, False):
        last = active
        engine.buffer_sync.ask(engine.buffer_root)
        engine.shadow_backward()
        _shadow_step(engine)
        engine.zero_grad(True)
        for slot in engine.slots:
            slot.param.grad = None
    engine.buffer_root = 0
    if len(last) < engine.world.size:
        _follow(engine, last[0])


def _shadow_step(engine: Engine) -> None:
    if isinstance(engine, ShardedEngine):
        engine.follow()
        return
    if engine.last_clip is not None:
        engine.clip_grad_norm_(*engine.last_clip)
    engine.step()


def _announce(engine: Engine, active: bool) -> list[int]:
    """Tell whether this worker has a batch; return the ranks that have one."""
    flags = torch.zeros(engine.world.size)
    flags[engine.world.rank] = float(active)
    engine.collectives.all_gather(flags, label="batches left").wait()
    ranks = [rank for rank, flag in enumerate(flags.tolist()) if flag]
    # Buffers come from a worker that still trains.
    engine.buffer_root = ranks[0] if ranks else 0
    return ranks


def _follow(engine: Engine, root: int) -> None:
    """Take over parameters, buffers and the optimizer's state from rank ``root``."""
    engine.settle()
    collectives = engine.collectives
    # Steps made without batches do not count.
    engine.steps_made.count = _steps_of(engine, root)
    with torch.no_grad():
        tensors = [slot.param for slot in engine.slots] + list(engine.model.buffers())
        broadcast_now(tensors, collectives, root)
    broadcast_now(_state_like(engine, root), collectives, root)


def _steps_of(engine: Engine, root: int) -> int:
    steps = engine.world.exchange("steps", engine.steps_made.count)[root]
    if type(steps) is not int or steps < 0:
        raise PeerError(f"rank {engine.world.rank}: rank {root} sent malformed steps: {steps!r}")
    return steps


def _state_like(engine: Engine, root: int) -> list[torch.Tensor]:
    """Return the optimizer state's tensors in an agreed order, made where they are missing."""
    state: State = engine.optimizer.__dict__["state"]
    params = engine.partial.params()
    mine = [
        [i, key, str(value.dtype).removeprefix("torch."), list(value.shape)]
        for i, param in enumerate(params)
        for key, value in sorted(state.get(param, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    out = []
    for entry in engine.world.exchange("optimizer state", mine)[root]:
        i, key, dtype, shape = _checked(entry, len(params), engine.world.rank, root)
        here: dict[str, Any] = state[params[i]]
        value = here.get(key)
        if not isinstance(value, torch.Tensor) or list(value.shape) != shape:
            device = params[i].device if shape else "cpu"
            here[key] = value = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        out.append(value)
    return out


def _checked(entry: Any, count: int, rank: int, root: int) -> tuple[int, str, str, list[int]]:
    try:
        i, key, dtype, shape = entry
        ok = (
            0 <= int(i) < count
            and isinstance(getattr(torch, dtype), torch.dtype)
            and all(int(n) >= 0 for n in shape)
        )
    except (TypeError, ValueError, AttributeError):
        ok = False
    if not ok:
        raise PeerError(f"rank {rank}: rank {root} sent a malformed optimizer state: {entry!r}")
    return int(i), str(key), str(dtype), [int(n) for n in shape]
