"""Communication hooks for PyTorch's DistributedDataParallel: compression with error feedback.

::

    model = DistributedDataParallel(model)
    state = SketchState(model, bits=8)
    model.register_comm_hook(state, sketch_hook)

A hook adds the compression error to the next gradient (Canary, section 4.3; Deep Gradient
Compression, section 3). These residuals are kept by parameter name, so they survive the rebuilding
of DDP's buckets. Save them in checkpoints with ``state.state_dict()``.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types.
import contextlib
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wingbeat.codecs import Coding
from wingbeat.codecs.codec import Dense
from wingbeat.codecs.coding import Region, regions
from wingbeat.codecs.feedback import Part, Residuals
from wingbeat.codecs.topk import warmed_up
from wingbeat.collectives import Encoded
from wingbeat.collectives.encoded import GatheredSum
from wingbeat.collectives.nccl import BlockSum, GroupRows
from wingbeat.compression import (
    Coded,
    Compression,
    LowRank,
    Sketch,
    TopK,
    codec_of,
    parse,
    unmatched_patterns,
)
from wingbeat.errors import UsageError, WingbeatError
from wingbeat.transport.nccl import NcclGroup
from wingbeat.types import Span

__all__ = ["SketchState", "TopKState", "WireState", "sketch_hook", "topk_hook", "wire_hook"]

_ALIGN = 16
"""Blocks are cut at multiples of this number of elements, for the speed of kernels."""

_CLOSE_S = 2.0
"""Seconds that closing waits for a running collective."""

Between = Callable[[], None]
"""Work of a worker while a collective runs."""


# -- the exchange of one bucket: an encoded sum, by blocks or gathered ----------------------------


@dataclass(frozen=True)
class HookBucket:
    """One of DDP's buckets in one iteration.

    ``where`` names it in messages. ``buffer`` holds flat gradients of any float dtype, and the
    average replaces them. ``keep_unused``: DDP may drop the average of parameters that no worker
    used.
    """

    where: str
    buffer: Tensor
    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    keep_unused: bool

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    def parameters_in(self, span: Span) -> list[slice]:
        """Return the part of ``span`` that belongs to each parameter, as slices of the buffer."""
        parts, begin = [], 0
        for numel in self.numels:
            low, high = max(span.start, begin), min(span.stop, begin + numel)
            if low < high:
                parts.append(slice(low, high))
            begin += numel
        return parts


@dataclass(eq=False)
class HookExchange:
    """An encoded sum of one bucket; call `prepare`, then `run`, once each.

    One residual covers both encodings of a sum by blocks: in other workers' blocks the error of
    what this worker sent to their owners, in its own block the error of the average that it sent to
    all. ``group`` belongs to this exchange alone. If ``gathered``, all workers receive all
    payloads; otherwise each worker averages a block. With ``momentum`` the residuals include a
    velocity.
    """

    bucket: HookBucket
    group: NcclGroup
    residuals: Residuals
    regions: Sequence[Region]
    gathered: bool
    momentum: bool = False

    def prepare(self) -> None:
        """Do the work that does not communicate."""
        bucket, rank, size = self.bucket, self.group.rank, self.group.size
        # This worker's share of the average; in place if the dtype allows.
        self._values = bucket.buffer.to(torch.float32).mul_(1.0 / size)
        residual = self._memory(self.residuals.flat_for)
        coding = Coding(self.regions)
        if bucket.keep_unused:
            coding = _KeepingUnused(self.regions, bucket)
        wire = Encoded(coding, residual)
        self._sum: BlockSum | GatheredSum
        if self.gathered:
            velocity = self._memory(self.residuals.velocity_for) if self.momentum else None
            self._sum = GatheredSum(self._values, wire, rank, size, bucket.where, velocity)
        else:
            blocks = _aligned_blocks(self._values.numel(), size)
            self._sum = BlockSum(self._values, wire, blocks, rank, bucket.where)
        self._sum.encode()

    def run(self, between: Between) -> Tensor:
        """Communicate, and return the bucket's buffer with the average.

        Raises:
            PeerError: a worker is lost, or sent a malformed payload.
        """
        rows = GroupRows(self.group, self.bucket.where, between)
        self._sum.exchange(rows)
        if self._values is not self.bucket.buffer:
            self.bucket.buffer.copy_(self._values)
        return self.bucket.buffer

    def _memory(self, kept: Callable[..., Tensor]) -> Tensor:
        bucket = self.bucket
        return kept(bucket.names, bucket.numels, bucket.buffer.numel(), bucket.buffer.device)


class _KeepingUnused(Coding):
    """A `Coding` that keeps the residuals of parameters without a gradient.

    DDP drops the average of a parameter that no worker used (``find_unused_parameters``), so values
    sent for it would be lost.
    """

    def __init__(self, regions: Sequence[Region], bucket: HookBucket) -> None:
        super().__init__(regions)
        self._bucket = bucket

    def encode(
        self,
        buffer: Tensor,
        span: Span,
        payload: Tensor,
        residual: Tensor | None = None,
        velocity: Tensor | None = None,
    ) -> None:
        parts = self._bucket.parameters_in(span)
        used = torch.stack([buffer[part].any() for part in parts]).tolist() if parts else []
        kept = [
            (memory[part], memory[part].clone())
            for memory in (residual, velocity)
            for part, any_used in zip(parts, used, strict=True)
            if memory is not None and not any_used
        ]
        for place, _ in kept:
            place.zero_()
        super().encode(buffer, span, payload, residual, velocity)
        for place, before in kept:
            place += before


def _aligned_blocks(numel: int, size: int) -> list[Span]:
    """Return a block for each of ``size`` workers; the last ones may be empty."""
    block = -(-numel // (size * _ALIGN)) * _ALIGN
    return [Span(min(numel, p * block), min(numel, (p + 1) * block)) for p in range(size)]


# -- the thread that issues a state's collectives -------------------------------------------------


@dataclass(eq=False)
class HookJob:
    """A bucket to exchange.

    ``ready`` is the GPU event after which the buffer is valid. ``done`` completes with the buffer
    or an error. ``prepared`` and ``error`` are the state of the work without communication.
    """

    exchange: HookExchange
    where: str
    buffer: Tensor
    ready: Any = None
    done: Any = None
    prepared: bool = False
    error: Exception | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.device = self.buffer.device
        devices: list[int | str | torch.device] = []
        if self.device.type == "cuda":
            devices.append(self.device)
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(self.device))
        self.done = torch.futures.Future(devices=devices)

    def future(self) -> torch.futures.Future[Tensor]:
        """Return DDP's future, which propagates an error as an exception."""
        then: torch.futures.Future[Tensor] = self.done.then(_value_or_raise)
        return then


def _value_or_raise(done: torch.futures.Future[Any]) -> Any:
    value = done.value()
    if isinstance(value, Exception):
        raise value
    return value


class Executor:
    """Runs jobs in FIFO order on a thread, and on a GPU on a stream, of its own.

    DDP calls a hook in the same order of buckets on every worker. If a hook issued the second
    collective of a bucket when the first completes, the order would depend on timing, and workers
    with different orders would deadlock. Here a bucket begins when the previous one is done; only
    its encoding, which does not communicate, runs ahead. After ``error``, the first failure, all
    jobs fail: the workers' order of collectives is lost.
    """

    def __init__(self, rank: int) -> None:
        self.error: Exception | None = None
        self.closed = False
        self._rank = rank
        self._jobs: queue.SimpleQueue[HookJob | None] = queue.SimpleQueue()
        self._ahead: list[HookJob | None] = []
        self._streams: dict[torch.device, Any] = {}
        # A daemon thread, so that a blocked collective cannot keep the program from exiting.
        self._thread = threading.Thread(target=self._loop, name="wingbeat-ddp-hook", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def submit(self, job: HookJob) -> None:
        """Queue ``job``."""
        assert not self.closed, "closed"
        self._jobs.put(job)

    def close(self) -> None:
        """Stop the thread after the running jobs, with a timeout. Safe to call twice."""
        if not self.closed:
            self.closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:  # else called by garbage collection
            self._thread.join(_CLOSE_S)

    def _loop(self) -> None:
        with torch.no_grad():
            while self._run_next():
                pass

    def _run_next(self) -> bool:
        """Run the next job; False at the end. A separate frame, so that no job is kept alive."""
        job = self._ahead.pop() if self._ahead else self._jobs.get()
        if job is None:
            return False
        with self._stream(job):
            try:
                if self.error is not None:
                    raise self.error
                self._prepare(job)
                if job.error is not None:
                    raise job.error
                result: Any = job.exchange.run(self._prepare_next)
            except WingbeatError as err:
                result = self.error = err
            except Exception as err:
                text = f"rank {self._rank}: {job.where}: {type(err).__name__}: {err}"
                result = self.error = WingbeatError(text)
            job.done.set_result(result)
        return True

    def _prepare(self, job: HookJob) -> None:
        if job.prepared:
            return
        job.prepared = True
        try:
            if job.ready is not None:
                stream = torch.cuda.current_stream(job.device)
                stream.wait_event(job.ready)
                job.buffer.record_stream(stream)
            job.exchange.prepare()
        except Exception as err:
            job.error = err

    def _prepare_next(self) -> None:
        """Encode only the next bucket during communication, because payloads need memory."""
        if self._ahead:
            return
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return
        self._ahead.append(job)
        if job is not None:
            with self._stream(job):
                self._prepare(job)

    @contextlib.contextmanager
    def _stream(self, job: HookJob) -> Iterator[None]:
        if job.device.type != "cuda":
            yield
            return
        if job.device not in self._streams:
            self._streams[job.device] = torch.cuda.Stream(job.device)
        with torch.cuda.stream(self._streams[job.device]):
            yield


# -- the state of a hook between iterations -------------------------------------------------------


class HookState:
    """Base of all hooks' states, with an encoding, ``wire``. Every rank makes it at one point.

    Raises UsageError for the wrong arguments that the subclasses name.
    """

    def __init__(
        self, model: nn.Module, wire: Coded, *, process_group: Any, timeout: float | None
    ) -> None:
        kind = type(self).__name__
        if timeout is not None and not (_is_number(timeout) and 0 < timeout < math.inf):
            raise UsageError(f"{kind}(timeout={timeout!r}): allowed are seconds above 0, or None")
        self._names = _trained(model, kind)
        for pattern in unmatched_patterns(wire, self._names.values()):
            raise UsageError(
                f"{kind}(wire=...): {pattern!r} matches no trained parameter; their names are "
                f"{', '.join(list(self._names.values())[:3])} ...: correct the pattern, or leave "
                "it out"
            )
        self.wire = wire
        self._velocity = float(getattr(wire, "momentum", 0.0)) > 0
        device = next(iter(self._names)).device
        self._group = _own_group(model, process_group, device, timeout, kind)
        self._handle: Any = self._group.handle
        self._ddp = weakref.ref(model) if isinstance(model, DistributedDataParallel) else None
        self._residuals = Residuals(
            {name: param.shape for param, name in self._names.items()},
            rank=self._group.rank,
            world_size=self._group.size,
            velocity=self._velocity,
        )
        self._steps = 0
        self._executor = Executor(self._group.rank)
        self._finalizer = weakref.finalize(self, self._executor.close)

    @property
    def error(self) -> Exception | None:
        """The first failure with its original class; DDP raises a RuntimeError with its text."""
        return self._executor.error

    @property
    def coding(self) -> bool:
        """Whether the next iteration is encoded, according to the encoding's share of training."""
        ends = self.wire.ends_after
        return ends is None or self._steps < ends

    def submit(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Exchange one of DDP's buckets; return a future of its buffer with the average.

        With one worker nothing is encoded and the gradients stay unchanged.

        Raises:
            UsageError: the state is closed or of another model, or the gradients cannot be encoded.
                Later errors reach DDP through the future.
        """
        work = self._bucket(bucket)
        found = [Region(Span(0, work.buffer.numel()), Dense())]
        if self.coding:
            found = list(
                regions(self.wire, list(zip(work.names, work.shapes, strict=True)), self._steps)
            )
        exchange = HookExchange(
            work, self._group, self._residuals, found, self.wire.gathers, self._velocity
        )
        job = HookJob(exchange, work.where, work.buffer)
        if self._group.size == 1:
            job.done.set_result(work.buffer)
        else:
            self._executor.submit(job)
        if bucket.is_last():
            self._steps += 1
        return job.future()

    def _bucket(self, bucket: Any) -> HookBucket:
        kind, index, buffer = type(self).__name__, bucket.index(), bucket.buffer()
        ddp: Any = self._ddp() if self._ddp is not None else None
        if self._executor.closed:
            raise UsageError(f"{kind}: close() was called; make a new state for this model")
        if ddp is not None and ddp._join_config.enable:
            raise UsageError(
                f"{kind}: model.join() takes the place of absent workers in DDP's own collectives "
                "only; give every worker the same number of batches"
            )
        params, names = bucket.parameters(), []
        for position, param in enumerate(params):
            if param not in self._names:
                own = list(self._names.values())
                shown = f"{own[0]!r}" if len(own) == 1 else f"{own[0]!r} to {own[-1]!r}"
                raise UsageError(
                    f"{kind}: parameter {position} of bucket {index}, of shape "
                    f"{tuple(param.shape)}, is not one of the model it was made for, which has "
                    f"{shown}; make a state for each model, after its parameters are made"
                )
            names.append(self._names[param])
        where = f"bucket {index} ({names[0]}{' ...' * (len(names) > 1)})"
        if buffer.layout != torch.strided or not buffer.is_floating_point():
            raise UsageError(
                f"{kind}: {where} has gradients of {buffer.dtype}, "
                f"{str(buffer.layout).removeprefix('torch.')}; allowed: dense ones of a float "
                "dtype, so use nn.Embedding(sparse=False)"
            )
        keep_unused = ddp is None or bool(ddp.find_unused_parameters)
        made = HookBucket(where, buffer, names, [p.shape for p in params], keep_unused)
        assert sum(made.numels) == buffer.numel(), f"{where} has {buffer.numel()} elements"
        return made

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


class SketchState(HookState):
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
        found = Sketch(bits=bits) if wire is None else parse(wire)
        if not isinstance(found, Sketch | LowRank) or (wire is not None and bits != Sketch.bits):
            raise UsageError(
                f"SketchState(bits={bits!r}, wire={wire!r}): allowed are bits alone, or as wire a "
                "wingbeat.Sketch or wingbeat.LowRank, or its text"
            )
        self.bits = found.bits
        super().__init__(model, found, process_group=process_group, timeout=timeout)


class TopKState(HookState):
    """State of `topk_hook`: only the largest values of each bucket are sent, with their indices.

    Every rank constructs one at the same point of its program; it creates a process group.

    Args:
        model: as for `SketchState`.
        density: fraction of the values that is sent, more than 0 and up to 1.
        warmup: iterations in which the density falls exponentially from 0.25 to ``density`` (Deep
            Gradient Compression, section 3.3).
        momentum: momentum correction (section 3.2): the momentum of a value is accumulated here and
            cleared when the value is sent. The optimizer must then have none. 0: leave momentum to
            the optimizer.
        process_group, timeout: as for `SketchState`.

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
        wire = TopK(density=density, warmup=warmup, momentum=momentum, auto_disable=False)
        self.density, self.warmup, self.momentum = float(density), warmup, float(momentum)
        super().__init__(model, wire, process_group=process_group, timeout=timeout)

    @property
    def density_now(self) -> float:
        """The density of the next iteration, which changes during the warm-up."""
        return warmed_up(self.density, self.warmup, self._steps)


class WireState(HookState):
    """State of `wire_hook`: gradients are sent with any of the strategies' codecs.

    Every rank constructs one at the same point of its program; it creates a process group.

    Args:
        model: as for `SketchState`.
        wire: a `wingbeat.Sketch`, `wingbeat.TopK` or `wingbeat.LowRank`, or its text, such as
            ``"topk@0.01:bits=4"``; or ``"fp16"``, scaled so that no value overflows. Hooks run no
            trial, so ``auto_disable`` has no effect.
        process_group, timeout: as for `SketchState`.

    Raises:
        UsageError: the encoding is none of these, ``torch.distributed`` is not initialised, the
            model has no trained parameters, or a group of the encoding matches none of them.
    """

    def __init__(
        self,
        model: nn.Module,
        wire: Compression,
        *,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> None:
        found = codec_of(parse(wire))
        if found is None:
            raise UsageError(
                f"WireState(wire={wire!r}): allowed are sketch, topk, lowrank and fp16; for bf16 "
                "torch has a hook, torch.distributed.algorithms.ddp_comm_hooks.default_hooks."
                "bf16_compress_hook"
            )
        # A trial would delay the warm-up, and hooks run no trial.
        coded = found.without_trial()
        super().__init__(model, coded, process_group=process_group, timeout=timeout)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
    handle = dist.new_group(
        ranks,
        timeout=None if timeout is None else timedelta(seconds=timeout),
        backend={"cpu": "gloo", "cuda": "nccl"}.get(device.type),
        # Workers outside the group create another one, so this must not wait for them. torch then
        # names the group by its ranks and a count of groups, which must be equal on all ranks.
        use_local_synchronization=len(ranks) != dist.get_world_size(),
    )
    return NcclGroup(handle, dist.get_rank(handle), len(ranks))


def _steps_of(states: Any, where: str) -> int:
    """The number of iterations of the parts; `Residuals` makes the other checks."""
    if not isinstance(states, (list, tuple)) or not all(isinstance(s, dict) for s in states):
        return 0
    found = [state.get("step", 0) for state in states]
    for steps in found:
        if type(steps) is not int or steps < 0:
            raise UsageError(f"{where}: step is {steps!r}; it must be 0 or more, so save it again")
        if steps != found[0]:
            raise UsageError(
                f"{where}: one part was saved after {found[0]} steps and another after {steps}; "
                "pass the parts of one moment"
            )
    return found[0] if found else 0


# -- the hooks for ``model.register_comm_hook`` ---------------------------------------------------


def sketch_hook(state: SketchState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over all workers with sketches of a few bits per value.

    Every worker owns a block of the bucket: it adds the others' sketches to its own in rank order,
    in float32, and sends a sketch of the average to all workers (Canary, section 4.3.1).

    Raises:
        UsageError: ``state`` is not a `SketchState`, or is of another model.
    """
    return _checked(state, SketchState, "sketch_hook").submit(bucket)


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the largest of a bucket's gradients over all workers.

    Every worker sends its largest values to all workers (Deep Gradient Compression, section 3).

    Raises:
        UsageError: ``state`` is not a `TopKState`, or is of another model.
    """
    return _checked(state, TopKState, "topk_hook").submit(bucket)


def wire_hook(state: WireState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over all workers with the codec of the state.

    With ``topk`` all workers receive all payloads, as with `topk_hook`; otherwise each worker
    averages a block and sends it to all, as with `sketch_hook`.

    Raises:
        UsageError: ``state`` is not a `WireState`, or is of another model.
    """
    return _checked(state, WireState, "wire_hook").submit(bucket)


def _checked(state: Any, kind: type[HookState], hook: str) -> HookState:
    if not isinstance(state, kind):
        raise UsageError(
            f"{hook}: the state is of type {type(state).__name__}; make a {kind.__name__}(model) "
            f"and pass it to model.register_comm_hook(state, {hook})"
        )
    return state
