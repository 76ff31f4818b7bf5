"""Updates on servers: gradients go there, parameters come back, and no worker has any state.

Geryon (Wang et al., 2020), section II-A. What starts when is the schedule's
(`wingbeat.schedules.served_updates`).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.views import ShownGradients, clone_displaced
from wingbeat.engine.updates.divided import SCALER, DividedUpdate
from wingbeat.engine.updates.stepper import State
from wingbeat.engine.updates.update import Closure, Training
from wingbeat.observe.events import stream
from wingbeat.schedules.events import (
    Defer,
    Forget,
    Hand,
    Phase,
    Schedule,
    Update,
    UpdateCommand,
    UpdateServers,
)
from wingbeat.schedules.intents import Answer
from wingbeat.servers.documents import Document
from wingbeat.servers.notes import bits_of
from wingbeat.servers.partition import Slice
from wingbeat.servers.values import encode
from wingbeat.updates.described import OPTION, settings_of
from wingbeat.updates.holdings import Holding, Holdings, Whole


class Remote(Protocol):
    """The servers' side: `wingbeat.exchanges.remote.RemoteOptimizer`.

    Attributes:
        updates: how many updates the servers were told to make.
        landing: by bucket, where its parameters are to be put, unless into its buffer.
        unused: the parameters, by the index of their slots, whose sums will not be used.
    """

    updates: int
    landing: dict[int, torch.Tensor]
    unused: frozenset[int]

    @property
    def plan(self) -> int:
        """The number of the plan in force."""

    def slices(self) -> list[Slice]:
        """Return all slices of the plan in force."""

    def hold(self, each: Slice, words: dict[str, Any], data: torch.Tensor) -> None:
        """Give a server parameters of a slice, and the optimizer's state."""

    def final(self, each: Slice, gradients: torch.Tensor) -> None:
        """Give a server gradients of a slice to be used in place of the sum."""

    def ready(self) -> None:
        """Tell the servers that this worker has held all that it is to."""

    def step(self, words: bytes, *, summed: bool, unasked: bool) -> None:
        """Tell the servers to make the update that `updates` counts already."""

    def collect(self, plan: int, slices: Sequence[Slice]) -> Iterable[tuple[Slice, Document]]:
        """Ask for the optimizer's state of some slices, and wait for it."""


class ServedUpdate(DividedUpdate):
    """Hands gradients and what was changed here to the servers, and takes parameters over.

    Each slice has an owner among the workers, who looks whether its parameters were changed here
    since they came, and sends gradients that somebody has looked at, which may be others by now.

    Args:
        training: what it works on.
        schedule: says when.
        views: of the gradients.
        remote: the servers.
        each: by names of the optimizer's state, whether there is a value for each element.
    """

    option: ClassVar[str] = OPTION
    state_is: ClassVar[str] = (
        f"{OPTION}: the servers have it; call optimizer.state_dict() for a copy of all of it, and "
        "optimizer.load_state_dict() to change it"
    )
    shards = None

    def __init__(
        self,
        training: Training,
        schedule: Schedule,
        views: ShownGradients,
        remote: Remote,
        each: dict[str, bool],
    ) -> None:
        super().__init__(training, schedule, views)
        self._remote = remote
        self._each = each
        self._holdings: Holdings | None = None
        self._summed = self._remembers = False

    # -- what the schedule says ------------------------------------------------------------

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Do one part of a step, or take over parameters."""
        buckets = self._training.bucketing.buckets
        match command:
            case Hand(answer):
                self._hand(answer)
            case UpdateServers(answer, unasked):
                self._update_servers(answer, unasked)
            case Defer(number, used):
                self._defer(buckets[number], used or frozenset())
            case Forget(spent):
                self._forget(spent)
            case Update(number):
                with stream.timed("update", bucket=number):
                    self._take_over(buckets[number])

    def _hand(self, answer: Answer) -> None:
        """Send what servers cannot know: parameters of here, and gradients that are not sums."""
        self._remote.updates += 1
        self._remembers = True
        self._summed = self._schedule.phase is Phase.REDUCED
        slots, owns = self._training.bucketing.slots, self._training.stepper.owns
        unused = frozenset(slot.index for slot in slots if owns(slot.param)) - answer.used
        self._remote.unused = unused if self._summed else frozenset()
        rank = self._training.collectives.world.rank
        if answer.follows(rank):
            return
        active = [r for r, _ in enumerate(answer.intents) if not answer.follows(r)]
        finals = [] if self._summed else self._finals(answer.used, active, rank)
        for holding in self._held.all:
            mine = holding.owner == rank
            # Whoever has run out of batches does not know what the others have changed.
            if mine and holding.changed():
                self._remote.hold(holding.slice, {}, holding.known)
            elif rank == answer.leader and answer.follows(holding.owner):
                self._remote.hold(holding.slice, {}, holding.values())
        for holding in finals:
            flat = holding.bucket.flat
            self._remote.final(holding.slice, flat[holding.slice.start : holding.slice.stop])

    def _finals(self, used: frozenset[int], active: list[int], rank: int) -> list[Holding]:
        """Put final gradients into the buffers; return the slices that this worker is to send."""
        buckets = self._training.bucketing.buckets
        for bucket in buckets:
            bucket.settle()
        clone_displaced(self._training.bucketing)
        for bucket in buckets:
            self._leave_kept(bucket)
            for slot in bucket.slots:
                grad = slot.param.grad
                if slot.index in used and grad is None:
                    slot.view.zero_()
                elif slot.index in used and grad is not None and not slot.holds(grad):
                    slot.view.copy_(grad)
        return [
            holding
            for holding in self._held.all
            if active[holding.slice.number % len(active)] == rank and holding.has(used)
        ]

    def _update_servers(self, answer: Answer, unasked: bool) -> None:
        rank = self._training.collectives.world.rank
        words: dict[str, Any] = {"digest": ""}
        if not answer.follows(rank):
            groups = settings_of(self._snapshot)
            words["digest"] = hashlib.sha1(json.dumps(groups).encode()).hexdigest()
            if rank == answer.leader:
                inside = self._training.optimizer.__dict__
                scaler = {key: encode(inside[key]) for key in SCALER if inside.get(key) is not None}
                words |= {"groups": groups, "used": bits_of(answer.used), "scaler": scaler}
        self._remote.step(json.dumps(words).encode(), summed=self._summed, unasked=unasked)

    def _forget(self, spent: frozenset[int] | None) -> None:
        super()._forget(spent)
        if spent is not None:
            for bucket in self._training.bucketing.buckets:
                self._leave_kept(bucket)

    def _leave_kept(self, bucket: Bucket) -> None:
        """Take other memory for the buffer if somebody still has gradients in it."""
        if bucket.is_referenced():
            bucket.reallocate()
            self._views.on_new_buffer(bucket)

    def _take_over(self, bucket: Bucket) -> None:
        """Take over the bucket's new parameters."""
        self._pending.remove(bucket)
        fresh = {slot.index for slot in self._fresh.pop(bucket.index)}
        landing = self._remote.landing.get(bucket.index, bucket.flat)
        offset = 0
        for slot in bucket.slots:
            end = offset + slot.param.numel()
            if slot.index in fresh:
                slot.param.detach().copy_(landing[offset:end].view(slot.param.shape))
            offset = end
        for holding in self._held.owned_in(bucket):
            holding.known.copy_(landing[holding.slice.start : holding.slice.stop])

    # -- plans and state ------------------------------------------------------------------

    @property
    def _held(self) -> Holdings:
        assert self._holdings is not None
        return self._holdings

    @torch.no_grad()
    def on_new_buckets(self) -> None:
        """Give the servers parameters and state of the slices that this worker owns."""
        old, world = self._holdings, self._training.collectives.world
        new = Holdings(
            self._remote.plan, self._remote.slices(), self._training, world.rank, world.size
        )
        if old is None:
            whole = self._taken()
        else:
            needed = old.overlapping(new.owned)
            whole = old.joined(self._remote.collect(old.plan, [h.slice for h in needed]))
        self._holdings = new
        for bucket in self._training.bucketing.buckets:
            if not all(self._training.stepper.owns(slot.param) for slot in bucket.slots):
                # Another optimizer's gradients stay in the buffer.
                self._remote.landing[bucket.index] = torch.zeros_like(bucket.flat)
        self._give(whole)

    @torch.no_grad()
    def on_load_state_dict(self) -> None:
        """The optimizer has loaded a whole state: give it to the servers."""
        self._give(self._taken())

    def _give(self, whole: Whole) -> None:
        self._remembers |= bool(whole)
        for holding in self._held.owned:
            words, data = holding.described(whole, self._each)
            self._remote.hold(holding.slice, words, data)
        self._remote.ready()

    def _taken(self) -> Whole:
        """Take from the optimizer what it remembers of the parameters that servers update."""
        state: State = self._training.optimizer.__dict__["state"]
        slots = self._training.bucketing.slots
        found = {slot.index: state.pop(slot.param, None) for slot in slots}
        return {index: each for index, each in found.items() if each}

    @torch.no_grad()
    def _whole(self) -> State:
        """Collect it from the servers; no other worker takes part."""
        held = self._held
        joined = held.joined(self._remote.collect(held.plan, [h.slice for h in held.all]))
        slots = self._training.bucketing.slots
        parts = {slot.param: joined[slot.index] for slot in slots if slot.index in joined}
        others: State = self._training.optimizer.__dict__["state"]
        known = {**others, **parts}
        order = [p for p in self._training.stepper.params() if p in known]
        return defaultdict(dict, {key: known[key] for key in [*order, *others]})

    def _parts(self) -> int:
        return len(self._held.all) if self._remembers else 0
