"""Uneven numbers of batches: a worker without batches shadows the others, as under DDP's Join."""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.collectives import Rows
from wingbeat.engine.gradients.bucket import broadcast_now, dtype_name
from wingbeat.engine.hooks import ModuleHook, in_backward, in_transform
from wingbeat.engine.updates.json_values import dtype_of
from wingbeat.engine.updates.stepper import State, recording
from wingbeat.errors import PeerError, UnevenBatchesError, UsageError
from wingbeat.schedules.events import Phase
from wingbeat.traits import MEANS
from wingbeat.transport import graceful_shutdown

if TYPE_CHECKING:
    from wingbeat.engine.engine import Engine


class _Batch(enum.IntEnum):
    """The announcement at the beginning of each batch."""

    NONE = 0
    LOCAL = 1
    """Under ``no_sync``, without an exchange."""
    SYNCED = 2


class _JoinContext:
    """The workers of one ``join`` context, and which of them have batches left."""

    def __init__(self, engine: Engine, divide_by_all: bool, throw: bool) -> None:
        self.engine = engine
        self.divide_by_all = divide_by_all
        self.throw = throw
        self.active = list(range(engine.world.size))

    def begin_batch(self) -> None:
        """Announce a batch before a forward whose gradients will be averaged."""
        engine = self.engine
        if in_transform() and engine.buffer_sync.channel is not None:
            raise UsageError(
                "join() with a transform of torch.func over a model with buffers: these cannot be "
                "exchanged inside of it, and workers without batches wait for them; give each "
                "worker as many batches, without join()"
            )
        if engine.update.agrees and engine.phase is not Phase.IDLE:
            raise UsageError(
                f"join() with {engine.update.option}: gradients are left from the backward before; "
                "call step() or zero_grad() before the next forward, or accumulate under no_sync()"
            )
        if not engine.update.agrees:
            # Workers without batches gather after each backward, so this precedes the announcement.
            engine.settle_gradients()
        self._begin(_Batch.SYNCED)
        if not self.divide_by_all:
            engine.scale = 1.0 / len(self.active)

    def begin_local_batch(self, _model: torch.nn.Module, _args: Any) -> None:
        """Announce a batch before any forward, including those under ``no_sync``."""
        if recording():
            return
        if torch.is_grad_enabled() and not self.engine.sync and not in_backward():
            self.engine.recover()
            self._begin(_Batch.LOCAL)

    def _begin(self, batch: _Batch) -> None:
        self.announce(batch)
        left = [r for r in range(self.engine.world.size) if r not in self.active]
        if self.throw and left:
            raise UnevenBatchesError(
                f"Detected at least one rank that exhausted inputs. Rank(s) {_list(left)} did, "
                f"and rank {self.engine.world.rank} has more: join(throw_on_early_termination="
                "True) ends training on all"
            )

    def announce(self, batch: _Batch = _Batch.NONE) -> _Batch:
        """Announce this worker's batch; return the maximum over all workers."""
        engine = self.engine
        engine.between_steps()
        rows = Rows(engine.collectives, [float(batch)], "batches left").wait().view(-1).tolist()
        for rank, flag in enumerate(rows):
            if flag not in list(_Batch):
                raise PeerError(
                    f"rank {engine.world.rank}: rank {rank} sent {flag!r} in place of "
                    "the kind of its batch, 0 to 2; all workers have to run the same wingbeat"
                )
        active = [rank for rank, flag in enumerate(rows) if flag]
        self.active = active or self.active
        # The root of buffers must still train; DDP chooses the last such rank, too.
        engine.buffer_root = active[-1] if active else 0
        return _Batch(int(max(rows)))

    def shadow(self) -> None:
        """Take part in exchanges while any worker has batches; may raise `UnevenBatchesError`."""
        engine = self.engine
        while batch := self.announce():
            if self.throw:
                raise UnevenBatchesError(
                    f"Rank {engine.world.rank} exhausted all inputs, and rank(s) "
                    f"{_list(self.active)} did not: join(throw_on_early_termination=True) ends "
                    "training on all"
                )
            if batch is _Batch.SYNCED:
                engine.buffer_sync.request(engine.buffer_root)
                engine.shadow_backward()
                engine.update.shadow_step(engine)
                engine.meter.stepped()
                graceful_shutdown.count_step()
                engine.zero_grad(True)
                for param in engine.trained:
                    param.grad = None
        if len(self.active) < engine.world.size:
            _copy_state(engine, self.active[-1])


@contextlib.contextmanager
def joined(
    engine: Engine, divide_by_all: bool = True, enable: bool = True, throw: bool = False
) -> Iterator[None]:
    """Shadow the others after leaving the context; see `DistributedModel.join`.

    Raises a `UsageError` if the strategy does not support it.
    """
    if engine.world.size == 1 or not enable:
        yield
        return
    replica = engine.world.replica
    if replica is not None:
        raise UsageError(
            f"join() with replicas of {replica.size} ranks: those without batches would not gather "
            "parameters with the others; give each worker as many batches"
        )
    if MEANS in engine.strategy.exchange.has:
        if throw:
            raise UsageError(
                "join(throw_on_early_termination=True) where models are averaged: the other "
                "workers do not notice that a worker has run out of batches; leave it out"
            )
        yield
        engine.level()  # the others continue without this worker, and finish later
        return
    if not engine.strategy.exchange.lockstep:
        raise UsageError(
            "join() under bounded staleness (Canary): workers may have different numbers of "
            "batches as it is; leave it out, and call model.synchronize() on all when each has "
            "trained"
        )
    if engine.recovery is not None:
        raise UsageError(
            "join() with min_replicas=: give each worker as many batches; one that ends before the "
            "others is left out"
        )
    if getattr(_entered, "inside", False):
        raise UsageError(
            "join() inside of another model's join(): a worker without batches repeats one model's "
            "exchanges at a time; distribute one module that contains both, or give each worker as "
            "many batches"
        )
    context, scale = _JoinContext(engine, divide_by_all, throw), engine.scale
    hook = ModuleHook(weakref.ref(context), "begin_local_batch")
    handle = engine.model.register_forward_pre_hook(hook, prepend=True)
    engine.before_synced_forward = context.begin_batch
    _entered.inside = True
    try:
        yield
    finally:
        _entered.inside = False
        engine.before_synced_forward = None
        engine.scale = scale
        handle.remove()
    if engine.update.agrees:
        engine.zero_grad(True)  # as the others do before their next forward
    context.shadow()


_entered = threading.local()
"""Whether this thread is inside of a ``join`` context: ``inside``."""


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _copy_state(engine: Engine, root: int) -> None:
    engine.settle()
    collectives, rank = engine.collectives, engine.world.rank
    steps = engine.world.exchange("steps", engine.steps_made.count)[root]
    if type(steps) is not int or steps < 0:
        raise PeerError(f"rank {rank}: rank {root} sent malformed steps: {steps!r}")
    engine.steps_made.count = steps  # those made without batches do not count
    with torch.no_grad():
        tensors = [*engine.trained, *engine.model.buffers()]
        broadcast_now(tensors, collectives, root)
    broadcast_now(_state_like(engine, root), collectives, root)
    engine.compression.follow(root)


def _state_like(engine: Engine, root: int) -> list[torch.Tensor]:
    """Return the state's tensors in the root's order, creating missing ones."""
    state: State = engine.optimizer.__dict__["state"]
    params = engine.stepper.params()
    mine = [
        [i, key, dtype_name(value.dtype), list(value.shape)]
        for i, param in enumerate(params)
        for key, value in sorted(state.get(param, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    out = []
    for entry in engine.world.exchange("optimizer state", mine)[root]:
        try:
            i, key, dtype, shape = entry
            i, key, shape, kind = int(i), str(key), [int(n) for n in shape], dtype_of(dtype)
            if not 0 <= i < len(params) or any(n < 0 for n in shape):
                raise ValueError
        except (TypeError, ValueError):
            raise PeerError(
                f"rank {engine.world.rank}: rank {root} sent a malformed optimizer state: {entry!r}"
            ) from None
        here: dict[str, Any] = state[params[i]]
        value = here.get(key)
        if not isinstance(value, torch.Tensor) or list(value.shape) != shape:
            device = params[i].device if shape else "cpu"
            here[key] = value = torch.zeros(shape, dtype=kind, device=device)
        out.append(value)
    return out
