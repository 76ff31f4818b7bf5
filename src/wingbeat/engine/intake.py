"""Backward: gradients into buckets as they come, buckets onto the links in the plan's order.

Buckets are launched strictly in the plan's order, on every worker, so no negotiation is needed
(DeAR, section III-B). All of this runs in the threads that run autograd.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.engine.attach import in_backward, on_backward_end
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.convert import check_kind
from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from wingbeat.control.control import Control
    from wingbeat.control.merging import LayerMerging
    from wingbeat.control.passes import Passes
    from wingbeat.engine.buffers import BufferSync
    from wingbeat.engine.gradients.bucketing import Bucketing
    from wingbeat.engine.gradients.compression import Compression
    from wingbeat.engine.gradients.sparse import SparseGradients
    from wingbeat.engine.gradients.steps import Steps
    from wingbeat.engine.gradients.views import Views
    from wingbeat.observe.meter import Meter
    from wingbeat.sync.bundling import Bundling


class Intake:
    """Takes one model's gradients in; a schedule says what becomes of complete buckets."""

    bucketing: Bucketing
    compression: Compression
    buffer_sync: BufferSync
    control: Control | None
    meter: Meter
    views: Views
    steps_made: Steps
    sparse: SparseGradients
    bundling: Bundling | None

    def __init__(self, scale: float) -> None:
        self.sync = True
        self.lock = threading.RLock()
        self.buffer_root = 0
        self.scale = scale
        self._decided: bool | None = None
        self._in_backward = False
        self._backward: weakref.ref[Any] | None = None
        self._skipping = False
        self._shadowing = False
        self._next = 0

    @property
    def slots(self) -> list[Slot]:
        """One for each trained parameter with a dense gradient."""
        return self.bucketing.slots

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """All trained parameters, those with sparse gradients last."""
        return [*(slot.param for slot in self.slots), *self.sparse.params]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the plan in force, first ready first."""
        return self.bucketing.buckets

    @property
    def forward_buckets(self) -> list[Bucket]:
        """The buckets of the plan in force, first needed first."""
        return self.bucketing.forward_buckets

    @property
    def amid_backward(self) -> bool:
        """Whether a backward is running, in whatever thread, that gradients are taken from."""
        return self._in_backward and self._backward is not None and self._backward() is not None

    @property
    def cut_short(self) -> bool:
        """Whether an exception has ended the backward that gradients are taken from."""
        return self._in_backward and not self.amid_backward

    @property
    def merging(self) -> LayerMerging | None:
        """What plans which layers are merged; None where nothing is planned."""
        return None if self.control is None else self.control.merging

    @property
    def passes(self) -> Passes | None:
        """What times backward, to plan by it; None where nothing is planned."""
        by = self.merging or self.bundling
        return None if by is None else by.passes

    # -- what becomes of it --------------------------------------------------------------

    def before_backward(self) -> None:
        """Called before the first gradient of a backward is taken in."""
        raise NotImplementedError

    def launch(self, bucket: Bucket) -> None:
        """Send a bucket, whose gradients are complete, on its way."""
        raise NotImplementedError

    def finish_backward(self) -> None:
        """Called when every bucket of a backward has been launched."""
        raise NotImplementedError

    def discard(self) -> None:
        """Called when the gradients of the last backward are not wanted."""
        raise NotImplementedError

    # -- backward -------------------------------------------------------------------------

    def on_grad(self, index: int) -> None:
        """Take in one gradient; called by autograd as soon as it has been accumulated.

        With parameters on several devices several threads of autograd come here.

        Raises:
            UsageError: a gradient that cannot be taken in: after an exception, twice, sparse, or
                with a graph of its own.
        """
        with self.lock:
            if not self._takes_in(self.slots[index].name):
                return
            passes = self.passes
            if passes is None:
                self._take_in(index)
                return
            passes.enter(index)
            self._take_in(index)
            passes.leave()

    def on_sparse_grad(self, index: int) -> None:
        """Take notice of a sparse gradient, which is exchanged when its backward ends.

        Raises:
            UsageError: it cannot be exchanged, or an exception has cut the backward before short.
        """
        with self.lock:
            if self._takes_in(self.sparse.names[index]):
                self.sparse.check(index)

    def _takes_in(self, name: str) -> bool:
        """Open a backward at its first gradient; return whether its gradients are taken in."""
        if not self._in_backward:
            if not (self.sync if self._decided is None else self._decided):
                self._skip_backward()
                return False
            self._refuse_graph()
            self._begin_backward()
        elif self.cut_short:
            raise UsageError(
                f"parameter {name!r} got a gradient, but an exception has cut the backward before "
                "this one short; call optimizer.zero_grad() after it"
            )
        return True

    def _refuse_graph(self) -> None:
        """Refuse a backward whose gradients are to be differentiated: means over workers are not.

        Raises:
            UsageError: this is one.
        """
        if torch.is_grad_enabled():
            self._decided = None
            for param in self.trained:
                param.grad = None
            raise UsageError(
                "backward(create_graph=True): gradients that are exchanged have no graph, so a "
                "penalty on p.grad would have no effect; use torch.autograd.grad(loss, "
                "model.parameters(), create_graph=True) and call backward() on the loss with the "
                "penalty"
            )

    def _take_in(self, index: int) -> None:
        slot = self.bucketing.slots[index]
        grad = slot.param.grad
        if slot.ready:
            raise UsageError(
                f"parameter {slot.name!r} got its gradient twice in one backward, as in two "
                "reentrant checkpoints that share it; use checkpoint(..., use_reentrant=False)"
            )
        if grad is not None and grad.layout is not torch.strided:
            raise UsageError(
                f"parameter {slot.name!r} has a sparse gradient, which has no place in a bucket: "
                "sparse gradients are those of torch.nn.Embedding and EmbeddingBag, made with "
                "sparse=True before distribute(); use one of these, or sparse=False"
            )
        self.bucketing.ready(index)
        self._take(slot)
        bucket = slot.bucket
        bucket.missing -= 1
        if bucket.missing == 0:
            self._launch_complete()

    def _skip_backward(self) -> None:
        """Leave a backward alone, which ends what the forward before it has decided."""
        if self._decided is not None and not self._skipping:
            self._skipping = True
            self.meter.enter("backward")
            on_backward_end(self)

    def _open_backward(self) -> None:
        self._next = 0
        self.before_backward()
        self.bucketing.hear()
        self.compression.count_step()
        if self.control is not None:
            self.control.boundary()
        if self.bucketing.stale:
            self.rebucket()
        for bucket in self.buckets:
            bucket.settle()  # what is still being sent refers to the buffer too
            if bucket.is_kept():
                bucket.renew()
                self.views.renewed(bucket)
            bucket.reopen()

    def _begin_backward(self) -> None:
        decided, self._decided = self._decided, None
        self.views.begin()  # where it refuses, what the forward has decided is used up
        self._decided = decided
        self._open_backward()
        self._in_backward = True
        self._backward = on_backward_end(self)
        if self.passes is not None:
            self.passes.begin()

    def rebucket(self) -> None:
        """Change to the next plan; every worker does so before the same backward."""
        self.compression.settle()
        self.bucketing.rebuild()

    def _take(self, slot: Slot) -> None:
        bucket, param, view = slot.bucket, slot.param, slot.view
        if bucket.handle is not None:
            bucket.settle()
        if param.dtype is not view.dtype or param.shape != view.shape:
            check_kind(slot.name, param, view)
        slot.used = slot.fill(self.scale)
        slot.ready = True
        self.views.taken(slot)

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            steps = None if self._shadowing else self.steps_made.count
            bucket.write_tail(steps, self.steps_made.rank)
            self.launch(bucket)

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            for slot in bucket.slots:
                if not slot.ready:
                    self._take(slot)
            bucket.missing = 0
        self._launch_complete()

    def end_backward(self) -> None:
        """Launch buckets that miss unused parameters, and close this backward."""
        with self.lock:
            self._end_backward()

    def _end_backward(self) -> None:
        self._decided = None
        self._skipping = False
        if not self._in_backward:
            self.meter.enter("other")
            return
        if self.passes is not None:
            self.passes.end()
        self._launch_all()
        # Another model of this backward may have launched nothing yet that others wait for.
        if not in_backward():
            self.sparse.send()
            self.close_backward()
        elif self.sparse:
            on_backward_end(self, "send_sparse")
        else:
            on_backward_end(self, "close_backward")

    def send_sparse(self) -> None:
        """Send what is of sparse gradients; another model may still have to, before any waits."""
        with self.lock:
            self.sparse.send()
        on_backward_end(self, "close_backward")

    def close_backward(self) -> None:
        """Bring the gradients where they are to be; all that is launched has been launched."""
        with self.lock:
            passes = self.passes
            if passes is None:
                self.finish_backward()
                return
            passes.launched(self.buckets[-1].handle)
            self.finish_backward()
            passes.waited()

    def _launch_all(self) -> None:
        """Launch whatever every worker launches once in a backward, however it ended."""
        self._launch_rest()
        self._in_backward = False
        self.sparse.start(self.scale, shadowing=self._shadowing)
        self.buffer_sync.start(self.buffer_root)
        if self.control is not None:
            self.control.exchange()
        self.bucketing.tell()

    def recover(self) -> None:
        """After a backward that an exception cut short: keep in step with the other workers.

        Every worker launches each bucket exactly once per backward, wherever it was cut short,
        so that their next collectives still match. The gradients are dropped. Called while the
        backward goes on, by a hook, a part that is computed again, or another thread, it does
        nothing.
        """
        if self.cut_short:
            if self.passes is not None:
                self.passes.abandon()
            try:
                self._launch_all()
                self.sparse.send()
                self.finish_backward()  # the others do not know: for them it ends like any other
                self.discard()
            finally:
                for param in self.trained:
                    param.grad = None

    def shadow_backward(self) -> None:
        """Take part in one backward of the others with gradients of zero."""
        self._open_backward()
        self.zero_grad(True)
        for param in self.trained:
            param.grad = None
        self._in_backward = self._shadowing = True
        try:
            self.end_backward()
        finally:
            self._shadowing = False

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients, also those that only exist in the buckets."""
        self.recover()
        self.discard()
        self.views.zeroed(set_to_none)
        # Nothing here reads a parameter, so those whose update is due need not be asked.
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                grad = slot.param.grad
                if grad is not None and grad is slot.pending:
                    zeros = not set_to_none and slot.used
                    slot.param.grad = torch.zeros_like(slot.param) if zeros else None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this worker only, until a backward outside of this context."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before
