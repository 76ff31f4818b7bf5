"""DeAR: reduce-scatter under backward (BackPipe), all-gather under the next forward (FeedPipe).

Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", 2023, section III-B. Unlike the authors' code, all-gathers are queued all at once,
in the order in which execution needs the parameters, so that the links are never idle while
one is left; and an update that is due is applied before anybody can see stale parameters.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from wingbeat.collectives import Handle
from wingbeat.errors import UsageError
from wingbeat.observe.events import stream
from wingbeat.sync import scaler
from wingbeat.sync.bucket import Bucket, Prior, Slot
from wingbeat.sync.engine import Engine
from wingbeat.sync.partial import GroupSnapshot
from wingbeat.types import Span

PROVING_STEPS = 2
"""Steps in which an optimizer has to show that it leaves gradients as they are."""


class Phase(enum.Enum):
    """Where the gradients of the last backward are."""

    IDLE = enum.auto()
    REDUCED = enum.auto()
    """Each worker has (or will have) the sum of its own blocks; ``step`` has not been called."""
    WHOLE = enum.auto()
    """Somebody wanted to see them, so that they have been gathered already."""
    LOST = enum.auto()
    """They were added to gradients that a sharded step had used up, and count for nothing."""


class DearEngine(Engine):
    """Splits each all-reduce in two, and each optimizer step by bucket."""

    phase = Phase.IDLE
    _steps = 0
    _writes_gradients = False

    def launch(self, bucket: Bucket) -> None:
        """BackPipe: start the bucket's reduce-scatter."""
        bucket.wire = self.wiring.launching(bucket)
        self.start_scatter(bucket)

    def start_scatter(self, bucket: Bucket) -> None:
        """Sum the bucket's blocks on their owners."""
        bucket.handle = self.collectives.reduce_scatter(
            bucket.flat, bucket=bucket.index, wire=bucket.wire
        )

    def store(self, slot: Slot) -> None:
        """Hide the gradient: what the buffer holds until the all-gather is no gradient."""
        if slot.used:
            slot.param.grad = None
            slot.prior = Prior.KEPT

    def before_backward(self) -> None:
        """Finish the last step, and gather gradients that this backward adds to."""
        self.flush()
        if self.phase is Phase.REDUCED:
            self._gather()
        self.phase = Phase.IDLE

    def finish_backward(self) -> None:
        """Do not wait: reduce-scatters may go on while the optimizer's step is called."""
        self.phase = Phase.REDUCED

    def discard(self) -> None:
        """Let the links finish; the sums are not used."""
        if self.phase is Phase.REDUCED:
            super().discard()
        self.phase = Phase.IDLE

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """FeedPipe: queue every all-gather, first needed first, and return at once.

        Raises:
            UsageError: there is a closure; it would need the updated parameters at once.
        """
        self.refuse(closure)
        self.recover()
        if self.phase is not Phase.REDUCED or self.partial.hooked:
            # The user's hooks are to see whole gradients before, and new parameters after.
            self.settle()
            self.phase = Phase.IDLE
            return super().step()
        self.phase = Phase.IDLE
        self._steps += 1
        snapshot = self.partial.snapshot()
        for bucket in self.forward_buckets:
            self._start_gather(bucket)
            bucket.snapshot = snapshot
        self.step_outside(snapshot)
        return None

    def step_outside(self, snapshot: GroupSnapshot) -> None:
        """Update at once what is in no bucket but has got a gradient from somewhere."""
        others = [p for p in self.outside if p.grad is not None]
        if others:
            self.partial.step(others, snapshot)

    def refuse(self, closure: Callable[[], Any] | None) -> None:
        """Say that a step cannot evaluate the loss again.

        Raises:
            UsageError: there is a closure.
        """
        if closure is not None:
            raise UsageError(
                "DeAR applies updates during the next forward, so optimizer.step(closure) cannot "
                "work; call step() without a closure, or use wingbeat.AllReduce()"
            )

    @functools.cached_property
    def outside(self) -> list[torch.Tensor]:
        """The optimizer's parameters that are in no bucket, because they are frozen."""
        slotted = {slot.param for slot in self.slots}
        return [p for p in self.partial.params() if p not in slotted]

    def before_module(self, buckets: Sequence[Bucket]) -> None:
        """Bring the parameters up to date that the module is about to read."""
        for bucket in buckets:
            if bucket.snapshot is not None:
                self._apply(bucket)

    def flush(self) -> None:
        """Apply every update that is due."""
        super().flush()
        for bucket in self.forward_buckets:
            if bucket.snapshot is not None:
                self._apply(bucket)

    def settle(self) -> None:
        """Make parameters current and gradients whole, and show the gradients in ``p.grad``."""
        super().settle()
        self.settle_gradients()
        self._show_gradients()

    def settle_gradients(self) -> None:
        """Gather what is only reduced, and show it in ``p.grad``."""
        if self.phase is Phase.REDUCED:
            self._gather()
            self.phase = Phase.WHOLE
            self._show_gradients()

    def _show_gradients(self) -> None:
        for slot in self.slots:
            if slot.prior is Prior.KEPT and slot.param.grad is None:
                slot.bucket.settle()
                slot.param.grad = slot.view
                slot.prior = Prior.NONE

    def _start_gather(self, bucket: Bucket) -> None:
        bucket.handle = self.collectives.all_gather(
            bucket.flat, bucket=bucket.index, after=bucket.handle, wire=bucket.wire
        )

    def _gather(self) -> None:
        """Make all gradients whole now, because somebody looks at them before ``step``."""
        for bucket in self.forward_buckets:
            self._start_gather(bucket)
        with self.exposed():
            for bucket in self.forward_buckets:
                bucket.settle()
        for bucket in self.buckets:
            self._whole_slots(bucket)

    def _whole_slots(self, bucket: Bucket) -> list[Slot]:
        """Return the slots with a gradient, now that the bucket is whole, and keep it for them."""
        slots = bucket.contributed()
        if bucket.kept:
            for slot in slots:
                slot.prior = Prior.KEPT
        return slots

    @torch.no_grad()
    def _apply(self, bucket: Bucket) -> None:
        snapshot, bucket.snapshot = bucket.snapshot, None
        assert snapshot is not None
        handle: Handle | None = bucket.handle
        if handle is not None:
            with self.exposed(bucket.index):
                self._wait_for(handle)
        begin = time.monotonic_ns()
        slots = [s for s in self._whole_slots(bucket) if self.partial.owns(s.param)]
        # Gradients made since step() belong to the next one, as do zeros asked for meanwhile.
        later = [slot.param.grad for slot in slots]
        for slot in slots:
            slot.param.grad = slot.view
        version = bucket.flat._version
        try:
            self.partial.step([slot.param for slot in slots], snapshot)
        finally:
            self._writes_gradients |= bucket.flat._version != version
            for slot, grad in zip(slots, later, strict=True):
                slot.param.grad = grad
        if stream.on:
            stream.record("update", begin, time.monotonic_ns(), bucket=bucket.index)

    def _wait_for(self, handle: Handle) -> None:
        """Wait until the optimizer may use what an all-gather has brought.

        It may be read while the rest of the buffer is still being sent on to others, but some
        optimizers write to gradients (SGD with ``nesterov`` and ``foreach``). In the first two
        steps it shows whether this one does.
        """
        if self._writes_gradients or self._steps <= PROVING_STEPS:
            handle.wait()
        else:
            handle.wait_received()

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm over all workers' reduced blocks: one small exchange, no gather."""
        self.last_clip = (max_norm, norm_type)
        self.recover()
        if self.phase is not Phase.REDUCED:
            self.settle()
            return super().clip_grad_norm_(max_norm, norm_type)
        owned = self._reduced_parts()
        total = self._global_norm(owned, norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for part in owned:
            part.mul_(scale.to(part.device, part.dtype))
        return total

    def scaler_groups(self) -> list[dict[str, Any]] | None:
        """Show a GradScaler this worker's reduced blocks; None where it needs whole gradients."""
        self.recover()
        if self.phase is not Phase.REDUCED or self.shadowed:
            return None
        device = self.buckets[0].flat.device
        return scaler.groups_of(self._reduced_parts(), self.collectives, device)

    def _reduced_parts(self) -> list[torch.Tensor]:
        """Wait for all reduce-scatters; return what this worker has of the gradients."""
        with self.exposed():
            for bucket in self.buckets:
                if bucket.handle is not None:
                    bucket.handle.wait()
        return [part for bucket in self.buckets for part in self._owned_parts(bucket)]

    def _owned_parts(self, bucket: Bucket) -> Iterator[torch.Tensor]:
        """Yield this worker's reduced block of the bucket, cut to the optimizer's parameters."""
        mine = self.collectives.owned(bucket.flat.numel())
        for span in self._optimized_spans(bucket):
            start, stop = max(span.start, mine.start), min(span.stop, mine.stop)
            if start < stop:
                yield bucket.flat[start:stop]

    def _optimized_spans(self, bucket: Bucket) -> Iterator[Span]:
        start = end = 0
        for slot in bucket.slots:
            size = slot.param.numel()
            if not self.partial.owns(slot.param):
                if end > start:
                    yield Span(start, end)
                start = end + size
            end += size
        if end > start:
            yield Span(start, end)

    def _global_norm(self, parts: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        size, rank = self.world.size, self.world.rank
        device = parts[0].device if parts else self.buckets[0].flat.device
        each = torch.zeros(size, dtype=torch.float64, device=device)
        # Half precision cannot hold the sum of many squares.
        norms = [
            torch.linalg.vector_norm(
                p, norm_type, dtype=torch.promote_types(p.dtype, torch.float32)
            ).double()
            for p in parts
        ]
        if norms:
            each[rank] = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        self.collectives.all_gather(each).wait()
        total: torch.Tensor = torch.linalg.vector_norm(each, norm_type)
        double = any(bucket.flat.dtype is torch.float64 for bucket in self.buckets)
        return total if double else total.float()
