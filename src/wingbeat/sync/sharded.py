"""DeAR with a divided optimizer: the all-gather carries parameters instead of gradients.

After the reduce-scatter of DeAR's BackPipe (section III-B) each worker has the whole gradient of
its own blocks. Here it updates the parameters there and nowhere else, as ZeRO does, and FeedPipe
gathers the new ones: the same bytes, with 1 / P of the optimizer's state and arithmetic.

The update runs in `step`, because a parameter must be new before it is gathered. The forward would
wait as long: the bucket that is reduced last is the one that it needs first.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from wingbeat.errors import MismatchError, PeerError, UsageError
from wingbeat.gradients.bucket import Bucket, Slot
from wingbeat.gradients.convert import refuse_overlapping
from wingbeat.observe.events import stream
from wingbeat.schedules import Dear
from wingbeat.schedules.dear import Phase
from wingbeat.schedules.events import BackwardBegins, BackwardEnds, BucketReady
from wingbeat.sync import follow
from wingbeat.sync.dear import DearEngine
from wingbeat.sync.pending import PendingGradient
from wingbeat.updates import elementwise
from wingbeat.updates.agreement import Answer, Intent, Rounds
from wingbeat.updates.ambient import Ambient
from wingbeat.updates.shards import DividedState, Piece, Shards, take_parameter
from wingbeat.updates.stepper import GroupSnapshot


class ShardedEngine(DearEngine):
    """Updates this worker's blocks in ``step()`` and gathers the parameters under forward.

    A step uses the gradients up: the buffers hold parameters afterwards. Before anybody gathers
    either, a `Rounds` tells what all are about to do; so nothing is gathered at once.

    Attributes:
        shards: this worker's part of the parameters and of the optimizer's state.
        steps: how many steps have been made, also before a restart.
    """

    schedule: Dear

    def _start(self) -> None:
        each = elementwise.prove(self.optimizer, type(self.optimizer).step)
        self._check_same_groups()
        super()._start()
        self.schedule.at_once = False
        self.steps = 0
        self.shards = Shards(self.optimizer, self.partial, self.collectives, self.slots, each)
        self.shards.build(self.buckets)
        self.shards.take_over()
        self._rounds = Rounds(self.collectives, len(self.slots))
        self._spent: list[Slot] = []
        self._fresh: dict[int, list[Slot]] = {}
        self._has_whole_state = False
        # Blocks of one parameter are updated in step() and the others later: leave none behind.
        self.world.on_close(functools.partial(_flush, weakref.ref(self)))

    def _check_same_groups(self) -> None:
        names = {slot.param: slot.name for slot in self.slots}
        groups = [
            [names[p] for p in group["params"] if p in names]
            for group in self.optimizer.param_groups
        ]
        mine = [type(self.optimizer).__name__, groups]
        for rank, answer in enumerate(self.world.exchange("optimizer", mine)):
            if answer != mine:
                raise MismatchError(
                    f"rank {rank} has another optimizer than rank {self.world.rank}, or other "
                    "param groups; with shard_optimizer all ranks must build the same"
                )

    def can_step_in_parts(self) -> bool:
        """Whether parameters can be updated apart: an optimizer that cannot was refused.

        Raises:
            UsageError: two parameters share memory.
        """
        refuse_overlapping({slot.name: slot.param for slot in self.slots})
        return True

    def launch(self, bucket: Bucket) -> None:
        """BackPipe, with the own block's residual: nothing encodes it a second time."""
        bucket.wire = self.wiring.launching(bucket)
        self.wiring.add_own_residual(bucket, self.collectives.owned(bucket.flat.numel()))
        self.tell(BucketReady(bucket.index))

    # -- what all do next -----------------------------------------------------------------

    def _agree(self, intent: Intent, meanwhile: Callable[[], None] | None = None) -> Answer:
        """Tell all workers what this one does; first let those see gradients who want to.

        Raises:
            UsageError: the workers do not do the same.
        """
        while True:
            self._rounds.start(intent, self._used(intent))
            if meanwhile is not None:
                meanwhile()
            with self.exposed():
                answer = self._rounds.finish()
            if not answer.wants_whole:
                answer.check()
                return answer
            super().settle_gradients()
            if intent in (Intent.LOOK, Intent.CLIP, Intent.SCALE):
                return answer
            meanwhile = None

    def _used(self, intent: Intent) -> Iterable[int]:
        """Return the slots that this worker has gradients for, where that matters."""
        if intent is not Intent.STEP:
            return ()
        if self.phase is Phase.REDUCED:
            return [slot.index for slot in self.slots if slot.used]
        return [slot.index for slot in self.slots if slot.param.grad is not None]

    def before_backward(self) -> None:
        """Finish the last step, and gather gradients that this backward adds to."""
        self.flush()
        if self.phase is not Phase.IDLE:
            self._agree(Intent.ADD)
        self.tell(BackwardBegins())

    def finish_backward(self) -> None:
        """Do not wait; but what was added to used up gradients cannot be used any more."""
        self.tell(BackwardEnds())
        for slot in self.slots:
            slot.param.grad = slot.pending
        if self._spent:
            self.schedule.phase = Phase.LOST
            for slot in self.slots:
                slot.param.grad = None
        elif self._others and not self._shadowing:
            self.settle_gradients()  # another optimizer asks first whether there is one at all

    def discard(self) -> None:
        """Let the links finish; the sums are not used, on any worker."""
        if self.phase is not Phase.IDLE:
            self._agree(Intent.DROP)
            for bucket in self.buckets:
                bucket.settle()
            if self.phase is Phase.REDUCED:
                self._drop_pending()
        self.schedule.phase = Phase.IDLE

    def _drop_pending(self) -> None:
        """Have nobody take what is in the buffers for gradients, who has kept a pending one."""
        for slot in self.slots:
            shown = slot.pending is not None and slot.param.grad is slot.pending
            if shown:
                slot.param.grad = None  # which refers to it too
            if slot.pending is not None and slot.is_kept():
                slot.pending.drop()
                slot.pending = PendingGradient(slot, weakref.ref(self))
            if shown:
                slot.param.grad = slot.pending

    def recover(self) -> None:
        """After a backward that an exception cut short: keep in step with the other workers."""
        if self._cut_short:
            self._spent = []
        super().recover()

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients, also those that only exist in the buckets."""
        super().zero_grad(set_to_none)
        if not set_to_none:
            for slot in self._spent:
                if slot.param.grad is None:
                    slot.param.grad = torch.zeros_like(slot.param)
        self._spent = []

    def settle_gradients(self) -> None:
        """Gather what is only reduced, and show it in ``p.grad``; other ranks take part."""
        if self.phase is Phase.REDUCED:
            self._agree(Intent.LOOK)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm over all workers' reduced blocks, as without shards.

        Raises:
            UsageError: a step has used the gradients up.
        """
        self.recover()
        self._refuse_lost("clip_grad_norm_()")
        if self.phase is Phase.REDUCED:
            self._agree(Intent.CLIP)
        return super().clip_grad_norm_(max_norm, norm_type)

    def scaler_groups(self) -> list[dict[str, Any]] | None:
        """Show a GradScaler this worker's reduced blocks; None where gradients are whole."""
        self.recover()
        if self.phase is Phase.REDUCED:
            self._agree(Intent.SCALE)
        return super().scaler_groups()

    # -- the step -------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this worker's blocks, queue every all-gather, first needed first, and return.

        A ``closure`` is called once, before the step.

        Raises:
            UsageError: a step has used the gradients up.
        """
        loss = self.evaluate(closure)
        self.recover()
        self._refuse_lost("optimizer.step()")
        if self.phase is Phase.REDUCED and self._replaced():
            self.settle_gradients()
        self.partial.refuse_regrouped()
        self.partial.run_hooks("pre")
        if self.phase is not Phase.REDUCED:
            self.flush()
        snapshot = self.partial.snapshot()
        self.steps_made.count += 1
        done: set[int] = set()
        answer = self._agree(Intent.STEP, lambda: self._update_certain(snapshot, done))
        if answer.followed:
            follow.lead(self, answer)
        self.finish_step(answer, snapshot, done)
        self.step_outside(snapshot)
        if self.partial.hooked:
            self.flush()  # hooks are to see the new parameters
        self.partial.run_hooks("post")
        return loss

    def follow(self) -> None:
        """Do as the workers that still have batches, after a backward without any."""
        answer = self._agree(Intent.FOLLOW)
        if Intent.STEP in answer.doing:
            follow.step_along(self, answer)
        self.schedule.phase = Phase.IDLE

    def _refuse_lost(self, what: str) -> None:
        if self._spent:
            raise UsageError(
                f"{what}: with shard_optimizer a step uses the gradients up, and nothing can be "
                "added to them; call optimizer.zero_grad() between step() and backward(), and "
                "backward() before each step()"
            )

    def _update_certain(self, snapshot: GroupSnapshot, done: set[int]) -> None:
        """Update where this worker's own gradients tell that there is something to update.

        So that it goes on while other buckets, and the other workers' answers, are on their way.
        """
        if self.phase is Phase.REDUCED:
            for bucket in self.buckets:
                if all(piece.slot.used for piece in self.shards.pieces_in(bucket)):
                    self._update(bucket, None, snapshot)
                    done.add(bucket.index)

    @torch.no_grad()
    def finish_step(self, answer: Answer, snapshot: GroupSnapshot, done: set[int]) -> None:
        """Update the rest, and queue the all-gather of each bucket with something new."""
        self._ambient = Ambient(self.buckets[0].flat.device)
        for bucket in self.buckets:
            if bucket.index not in done:
                self._update(bucket, answer.used, snapshot)
        for bucket in self.forward_buckets:
            fresh = [slot for slot in bucket.slots if slot.index in answer.used]
            self._fresh[bucket.index] = [s for s in fresh if self.partial.owns(s.param)]
            if self._fresh[bucket.index]:
                self._start_gather_of_parameters(bucket)
                bucket.snapshot = snapshot
                self.stale.mark(slot.param for slot in self._fresh[bucket.index])
            for slot in bucket.slots:
                if slot.index in answer.used or slot.param.grad is slot.pending:
                    slot.param.grad = None
            self._spent += fresh
        self._drop_pending()
        self.steps += 1
        self.schedule.phase = Phase.IDLE

    @torch.no_grad()
    def _update(self, bucket: Bucket, used: frozenset[int] | None, snapshot: GroupSnapshot) -> None:
        """Run the optimizer on this worker's pieces of ``bucket``, where gradients are known."""
        if bucket.handle is not None:
            with self.exposed(bucket.index):
                bucket.handle.wait_received()
        begin = time.monotonic_ns()
        pairs = []
        for piece in self.shards.pieces_in(bucket):
            piece.refresh()
            grad = self._gradient(bucket, piece)
            if grad is not None and (used is None or piece.slot.index in used):
                piece.stand_in.grad = grad
                pairs.append((piece.slot.param, piece.stand_in))
        # The optimizer's own step reads its param groups, and that is no look at gradients.
        phase, self.schedule.phase = self.phase, Phase.IDLE
        try:
            if pairs:
                self.partial.step_on(pairs, snapshot, self.shards.state)
        finally:
            self.schedule.phase = phase
            for _, stand_in in pairs:
                stand_in.grad = None
        if stream.on:
            stream.record("update", begin, time.monotonic_ns(), bucket=bucket.index)

    def _gradient(self, bucket: Bucket, piece: Piece) -> torch.Tensor | None:
        if self.phase is Phase.REDUCED:
            return bucket.flat[piece.place.start : piece.place.stop]
        grad = piece.slot.param.grad
        return None if grad is None else grad.reshape(-1)[piece.span.start : piece.span.stop]

    def _start_gather_of_parameters(self, bucket: Bucket) -> None:
        """Put this worker's parameters in the place of its gradients, and send them to all.

        In their own dtype, whatever the wire of the gradients is: rounded parameters would not
        come back to what the optimizer made of them.
        """
        bucket.settle()
        for piece in self.shards.pieces_in(bucket):
            bucket.flat[piece.place.start : piece.place.stop].copy_(piece.stand_in)
        bucket.handle = self.collectives.all_gather(bucket.flat, bucket=bucket.index)

    def before_module(self, buckets: Sequence[Bucket]) -> None:
        """Take over what the module is about to read."""
        with self.lock:
            for bucket in buckets:
                if bucket.snapshot is not None:
                    self._apply(bucket)

    def _apply(self, bucket: Bucket) -> None:
        """Take over the bucket's new parameters."""
        with self._ambient.restored():
            if bucket.handle is not None:
                with self.exposed(bucket.index):
                    bucket.handle.wait_received()
            begin = time.monotonic_ns()
            self.stale.clear(slot.param for slot in bucket.slots)
            own = {piece.slot.index: piece for piece in self.shards.pieces_in(bucket)}
            for slot in self._fresh.pop(bucket.index):
                take_parameter(slot, own.get(slot.index))
            bucket.snapshot = None
        if stream.on:
            stream.record("update", begin, time.monotonic_ns(), bucket=bucket.index)

    # -- plans and state ------------------------------------------------------------------

    @torch.no_grad()
    def rebucket(self) -> None:
        """Change to the next plan, and move the optimizer's state to whom it belongs then."""
        super().rebucket()
        self.shards.rebuild(self.buckets)

    def after_load(self, *_args: Any) -> None:
        """After the optimizer has loaded a whole state dict: keep this worker's part."""
        super().after_load()
        self.shards.take_over()

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Let the optimizer hold the whole state inside; every worker must come here."""
        self.settle()
        inside = self.optimizer.__dict__
        kept, inside["state"] = inside["state"], self.shards.whole()
        self._has_whole_state = True
        try:
            yield
        finally:
            inside["state"] = kept
            self._has_whole_state = False

    def visible_state(self) -> Any:
        """Return the optimizer's state where it is whole, and else what refuses to be read."""
        state = super().visible_state()
        if self.partial.stepping or self._has_whole_state or not self.shards.state:
            return state
        return DividedState(len(self.shards.state))

    def detach(self) -> None:
        """Apply what is pending, remove every hook, and give the optimizer its state back."""
        super().detach()
        self.optimizer.__dict__["state"] = self.shards.whole()


def _flush(engine: weakref.ref[ShardedEngine]) -> None:
    alive = engine()
    if alive is not None:
        with contextlib.suppress(PeerError):  # told already to whoever waited
            alive.flush()
