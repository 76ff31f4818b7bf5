"""The state of a hook between iterations, with its thread and process group."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wingbeat.codecs.codec import Dense
from wingbeat.codecs.coding import Region, regions
from wingbeat.codecs.feedback import Part, Residuals
from wingbeat.codecs.topk import TopKCodec, warmed_up
from wingbeat.compression import Coded, Compression, LowRank, Sketch, parse, unmatched_patterns
from wingbeat.errors import UsageError
from wingbeat.integrations.ddp.exchange import HookBucket, HookExchange
from wingbeat.integrations.ddp.executor import Executor, HookJob
from wingbeat.transport.nccl import NcclGroup
from wingbeat.types import Span


class HookState:
    """Base of all hooks' states. Every rank constructs it at the same point."""

    def __init__(
        self, model: nn.Module, *, velocity: bool, process_group: Any, timeout: float | None
    ) -> None:
        kind = type(self).__name__
        _check_timeout(timeout, kind)
        params = _trained(model, kind)
        group = _own_group(model, process_group, next(iter(params)).device, timeout, kind)
        self._group = group
        self._handle: Any = group.handle
        self._names = params
        self._ddp = weakref.ref(model) if isinstance(model, DistributedDataParallel) else None
        self._residuals = Residuals(
            {name: param.shape for param, name in params.items()},
            rank=group.rank,
            world_size=group.size,
            velocity=velocity,
        )
        self._steps = 0
        self._executor = Executor(group.rank)
        self._finalizer = weakref.finalize(self, self._executor.close)

    @property
    def error(self) -> Exception | None:
        """The first failure with its original class; DDP raises a RuntimeError with its text."""
        return self._executor.error

    # -- for the hooks ------------------------------------------------------------------------

    def submit(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Exchange one of DDP's buckets; return a future of its buffer with the average.

        With one worker nothing is encoded and the gradients stay unchanged.

        Raises:
            UsageError: the state is closed or of another model, or the gradients cannot be encoded.
                Later errors reach DDP through the future.
        """
        buffer = bucket.buffer()
        work = self._bucket(bucket, buffer)
        last = bucket.is_last()
        job = HookJob(self._exchange(work), work.where, buffer)
        if self._group.size == 1:
            job.done.set_result(buffer)
        else:
            self._executor.submit(job)
        if last:
            self._steps += 1
        return job.future()

    def _exchange(self, bucket: HookBucket) -> HookExchange:
        raise NotImplementedError

    def _bucket(self, bucket: Any, buffer: Tensor) -> HookBucket:
        self._refuse_misuse()
        index = bucket.index()
        names, shapes = [], []
        for position, param in enumerate(bucket.parameters()):
            name = self._names.get(param)
            if name is None:
                raise UsageError(
                    f"{type(self).__name__}: parameter {position} of bucket {index}, of shape "
                    f"{tuple(param.shape)}, is not one of the model it was made for, which has "
                    f"{self._shown()}; make a state for each model, after its parameters are made"
                )
            names.append(name)
            shapes.append(param.shape)
        where = (
            f"bucket {index} ({names[0]} ...)" if len(names) > 1 else f"bucket {index} ({names[0]})"
        )
        if buffer.layout != torch.strided or not buffer.is_floating_point():
            raise UsageError(
                f"{type(self).__name__}: {where} has gradients of {buffer.dtype}, "
                f"{str(buffer.layout).removeprefix('torch.')}; allowed: dense ones of a float "
                "dtype, so use nn.Embedding(sparse=False)"
            )
        made = HookBucket(where, buffer, names, shapes, self._keep_unused)
        assert sum(made.numels) == buffer.numel(), f"{where} has {buffer.numel()} elements"
        return made

    def _refuse_misuse(self) -> None:
        kind = type(self).__name__
        if self._executor.closed:
            raise UsageError(f"{kind}: close() was called; make a new state for this model")
        ddp: Any = self._ddp() if self._ddp is not None else None
        if ddp is not None and ddp._join_config.enable:
            raise UsageError(
                f"{kind}: model.join() takes the place of absent workers in DDP's own collectives "
                "only; give every worker the same number of batches"
            )

    @property
    def _keep_unused(self) -> bool:
        """Whether parameters may lack a gradient; True if there is no DDP to query."""
        ddp: Any = self._ddp() if self._ddp is not None else None
        return ddp is None or bool(ddp.find_unused_parameters)

    def _shown(self) -> str:
        names = list(self._names.values())
        return f"{names[0]!r}" if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> Part:
        """Return this worker's residuals by parameter name; they differ between ranks.

        Call it between iterations. It does not communicate, and loads with
        ``torch.load(weights_only=True)``.
        """
        return {**self._residuals.state_dict(), "step": self._steps}

    def load_state_dict(self, state: Part) -> None:
        """Load one worker's `state_dict` of a run with the same number of workers.

        If all ranks load rank 0's, the other ranks start with zero residuals.

        Raises:
            UsageError: the state is damaged, or of another model or number of workers; nothing has
                changed then.
        """
        steps = _steps_of([state], "load_state_dict(state)")
        self._residuals.load_state_dict(state)
        self._steps = steps

    def load_state_dicts(self, states: Sequence[Part]) -> None:
        """Load all workers' `state_dict` of a run with any number of workers.

        The sum of all workers' residuals is preserved.

        Raises:
            UsageError: a part is missing, duplicate, damaged, or of another model or iteration;
                nothing has changed then.
        """
        steps = _steps_of(states, "load_state_dicts(states)")
        self._residuals.load_state_dicts(states)
        self._steps = steps

    def close(self) -> None:
        """Stop the thread and destroy its process group; safe to call twice.

        The thread also stops when the state is garbage-collected or the program exits.
        """
        self._finalizer()
        handle, self._handle = self._handle, None
        if handle is None or self._executor.alive or not dist.is_initialized():
            return
        if handle in dist.distributed_c10d._world.pg_map:  # else destroyed with all groups
            dist.destroy_process_group(handle)


class CodedState(HookState):
    """A hook's state with a validated encoding, ``wire``."""

    def __init__(self, model: nn.Module, wire: Coded, *, process_group: Any, timeout: Any) -> None:
        _check_groups(type(self).__name__, wire, model)
        self.wire = wire
        self._momentum = float(getattr(wire, "momentum", 0.0))
        velocity = self._momentum > 0
        super().__init__(model, velocity=velocity, process_group=process_group, timeout=timeout)

    @property
    def coding(self) -> bool:
        """Whether the next iteration is encoded, according to the encoding's share of training."""
        ends = self.wire.ends_after
        return ends is None or self._steps < ends

    def _exchange(self, bucket: HookBucket) -> HookExchange:
        found = [Region(Span(0, bucket.buffer.numel()), Dense())]
        if self.coding:
            lying = list(zip(bucket.names, bucket.shapes, strict=True))
            found = list(regions(self.wire, lying, self._steps))
        return HookExchange(
            bucket,
            self._group,
            self._residuals,
            found,
            gathered=self.wire.gathers,
            momentum=self._momentum > 0,
        )


class SketchState(CodedState):
    """State of `sketch_hook`: every value is sent as a code of ``bits`` bits, twice.

    Every rank constructs one at the same point of its program; it creates a process group.

    Args:
        model: the model, or the DistributedDataParallel around it. With the latter, the work for
            ``find_unused_parameters=True`` is skipped if that is off.
        bits: bits per value, 1 to 8.
        wire: all settings, in place of ``bits``: a `wingbeat.Sketch` or `wingbeat.LowRank`, or its
            text, such as ``"lowrank@4:bits=8:split=count"``. Hooks run no trial, so
            ``auto_disable`` has no effect.
        process_group: the group of DistributedDataParallel; default: the default group. If it has
            only some of the ranks, every other rank must construct a state in a group of its own
            too, so that torch's numbering of groups is equal on all ranks.
        timeout: seconds until a collective fails; None: torch's default.

    Raises:
        UsageError: a value is out of range, ``torch.distributed`` is not initialised, the model has
            no trained parameters, or a group of the encoding matches none of them.
    """

    def __init__(
        self,
        model: nn.Module,
        bits: int = 8,
        *,
        wire: Compression | None = None,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> None:
        if type(bits) is not int or not 1 <= bits <= 8:
            raise UsageError(f"SketchState(bits={bits!r}): allowed are whole numbers from 1 to 8")
        sketched = _sketched(wire, bits)
        self.bits = sketched.bits
        super().__init__(model, sketched, process_group=process_group, timeout=timeout)


class TopKState(HookState):
    """State of `topk_hook`: only the largest values of each bucket are sent, with their indices.

    Every rank constructs one at the same point of its program; it creates a process group.

    Args:
        model: the model, or the DistributedDataParallel around it. With the latter, the work for
            ``find_unused_parameters=True`` is skipped if that is off.
        density: fraction of the values that is sent, more than 0 and up to 1.
        warmup: iterations in which the density falls exponentially from 0.25 to ``density`` (Deep
            Gradient Compression, section 3.3).
        momentum: momentum correction (section 3.2): the momentum of a value is accumulated here and
            cleared when the value is sent. The optimizer must then have none. 0: leave momentum to
            the optimizer.
        process_group: the group of DistributedDataParallel; default: the default group. If it has
            only some of the ranks, every other rank must construct a state in a group of its own
            too, so that torch's numbering of groups is equal on all ranks.
        timeout: seconds until a collective fails; None: torch's default.

    Raises:
        UsageError: a value is out of range, ``torch.distributed`` is not initialised, or the model
            has no trained parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        density: float = 0.001,
        *,
        warmup: int = 0,
        momentum: float = 0.0,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> None:
        if not _number(density) or not 0.0 < density <= 1.0:
            raise UsageError(
                f"TopKState(density={density!r}): allowed are numbers above 0 and up to 1"
            )
        if type(warmup) is not int or warmup < 0:
            raise UsageError(f"TopKState(warmup={warmup!r}): allowed are iterations, 0 or more")
        if not _number(momentum) or not 0.0 <= momentum < 1.0:
            raise UsageError(
                f"TopKState(momentum={momentum!r}): allowed are numbers from 0 up to, not "
                "including, 1"
            )
        self.density = float(density)
        self.warmup = warmup
        self.momentum = float(momentum)
        super().__init__(model, velocity=momentum > 0, process_group=process_group, timeout=timeout)

    @property
    def density_now(self) -> float:
        """The density of the next iteration, which changes during the warm-up."""
        return warmed_up(self.density, self.warmup, self._steps)

    def _exchange(self, bucket: HookBucket) -> HookExchange:
        codec = TopKCodec(self.density_now, self.momentum)
        whole = Region(Span(0, bucket.buffer.numel()), codec)
        return HookExchange(
            bucket,
            self._group,
            self._residuals,
            [whole],
            gathered=True,
            momentum=self.momentum > 0,
        )


def _check_groups(kind: str, wire: Coded, model: nn.Module) -> None:
    """Raise UsageError if a group of the encoding matches no trained parameter."""
    names = _trained(model, kind).values()
    for pattern in unmatched_patterns(wire, names):
        raise UsageError(
            f"{kind}(wire=...): {pattern!r} matches no trained parameter; their names are "
            f"{', '.join(list(names)[:3])} ...: correct the pattern, or leave it out"
        )


def _sketched(wire: Compression | None, bits: int) -> Sketch | LowRank:
    if wire is None:
        return Sketch(bits=bits)
    found = parse(wire)
    if not isinstance(found, Sketch | LowRank) or bits != Sketch.bits:
        raise UsageError(
            f"SketchState(bits={bits!r}, wire={wire!r}): allowed are bits alone, or as wire a "
            "wingbeat.Sketch or wingbeat.LowRank, or its text"
        )
    return found


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_timeout(timeout: float | None, kind: str) -> None:
    if timeout is None:
        return
    if not _number(timeout) or not math.isfinite(timeout) or timeout <= 0:
        raise UsageError(f"{kind}(timeout={timeout!r}): allowed are seconds above 0, or None")


def _trained(model: nn.Module, kind: str) -> dict[nn.Parameter, str]:
    """The trained parameters by their names without DDP's prefix."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{kind}({type(model).__name__}): the first argument must be the model")
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {param: name for name, param in inner.named_parameters() if param.requires_grad}
    if not found:
        raise UsageError(f"{kind}(model): {type(inner).__name__} has no parameter to train")
    return found


def _own_group(
    model: nn.Module, given: Any, device: torch.device, timeout: float | None, kind: str
) -> NcclGroup:
    """Make a group with the ranks of ``given``, so that other collectives cannot interleave."""
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            f"{kind}: torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first"
        )
    if given is None and isinstance(model, DistributedDataParallel):
        given = model.process_group
    ranks = dist.get_process_group_ranks(given if given is not None else dist.group.WORLD)
    everyone = len(ranks) == dist.get_world_size()
    handle = dist.new_group(
        ranks,
        timeout=None if timeout is None else timedelta(seconds=timeout),
        backend={"cpu": "gloo", "cuda": "nccl"}.get(device.type),
        # Workers outside the group create another one, so this must not wait for them. torch then
        # names the group by its ranks and a count of groups, which must be equal on all ranks.
        use_local_synchronization=not everyone,
    )
    return NcclGroup(handle, dist.get_rank(handle), len(ranks))


def _steps_of(states: Any, where: str) -> int:
    """The number of iterations of the parts; `Residuals` makes the other checks."""
    if not isinstance(states, (list, tuple)) or not all(isinstance(s, dict) for s in states):
        return 0
    found = [state.get("step", 0) for state in states]
    for steps in found:
        if type(steps) is not int or steps < 0:
            raise UsageError(f"{where}: step is {steps!r}; it must be 0 or more, so save it anew")
        if steps != found[0]:
            raise UsageError(
                f"{where}: one part was saved after {found[0]} steps and another after {steps}; "
                "pass the parts of one moment"
            )
    return found[0] if found else 0
