"""Performs the commands of a schedule, in the training thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from wingbeat.collectives import Collectives, Handle
from wingbeat.engine.gradients.bucket import Bucket, StepCounter
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.views import ShownGradients
from wingbeat.engine.updates.update import Closure, Update
from wingbeat.errors import PeerError
from wingbeat.exchanges.collective import Exchange
from wingbeat.observe.events import stream
from wingbeat.observe.meter import Meter
from wingbeat.planning.backward import BackwardProfiler
from wingbeat.schedules.events import (
    Announce,
    Await,
    Event,
    Schedule,
    Show,
    Start,
    Step,
    Wait,
)
from wingbeat.schedules.intents import Answer, Intent


class IntentExchange:
    """A small all-gather of each worker's next action, and of one bit per slot.

    It uses host memory even for gradients on a GPU, because the host decides by the result which
    operations to queue.
    """

    def __init__(self, collectives: Collectives, slots: int) -> None:
        self._collectives = collectives
        self._width = 1 + -(-slots // 8)
        self._rows = torch.zeros(0, dtype=torch.uint8, device="cpu")
        self._handle: Handle | None = None

    def announce(self, intent: Intent, used: Iterable[int]) -> None:
        """Send this worker's next action, and the slots that it has gradients for."""
        row = bytearray(self._width)
        row[0] = intent
        for index in used:
            row[1 + index // 8] |= 1 << index % 8
        world = self._collectives.world
        self._rows = torch.zeros(world.size, self._width, dtype=torch.uint8, device="cpu")
        self._rows[world.rank] = torch.frombuffer(row, dtype=torch.uint8)
        self._handle = self._collectives.all_gather(self._rows.view(-1), label="intents")

    def await_all(self) -> Answer:
        """Wait for all workers' announcements; raise a `PeerError` for an invalid one."""
        assert self._handle is not None
        self._handle.wait()
        self._handle = None
        world = self._collectives.world
        heads = self._rows[:, 0].tolist()
        for rank, head in enumerate(heads):
            if head not in list(Intent):
                raise PeerError(
                    f"rank {world.ranks[rank]} sent {head} in place of an intent, 1 to 7"
                )
        union = 0
        for row in self._rows[:, 1:].tolist():
            union |= int.from_bytes(row, "little")
        used = frozenset(i for i, bit in enumerate(reversed(f"{union:b}")) if bit == "1")
        return Answer(tuple(Intent(head) for head in heads), used)


class LayerMeasurements(Protocol):
    """Measurements of layers in the first iterations, by which they are bundled again."""

    passes: BackwardProfiler

    def measure_widths(self, bucket: Bucket) -> None:
        """Measure the widths of a bucket's gradients."""


class Recovery(Protocol):
    """Continues without failed workers, see `wingbeat.methods.elastic.build`."""

    @property
    def progress(self) -> Any:
        """How far this worker has come, and whether the present step is dropped."""

    @property
    def wanted(self) -> bool:
        """Whether this worker knows of a process that asks to join."""

    def attach(self, engine: Any) -> None:
        """Recover this engine; copy the weights if this process was started again."""

    def guard(self, operation: Callable[[], object], *, in_step: bool = True) -> None:
        """Perform an operation with other workers, and recover if it fails."""

    def stepped(self, engine: Any, *, applied: bool) -> None:
        """Record a step; ``applied`` is whether it was not dropped."""

    def level(self) -> None:
        """Wait until all workers come here, with equal weights."""

    def close(self) -> None:
        """Leave the other workers."""


@dataclass
class Runtime:
    """Passes each command to the part that performs it, before the schedule yields the next.

    Attributes:
        checked: whether step counts have been compared in the current iteration.
        meter: measures the time that the training thread is blocked.
        profiler: measures layers to bundle them again; None where buckets do not change so.
        recovery: continues without failed workers; None where training ends.
    """

    schedule: Schedule
    exchange: Exchange
    bucketing: Bucketing
    views: ShownGradients
    update: Update
    intents: IntentExchange
    steps: StepCounter
    checked: bool = False
    meter: Meter = field(default_factory=lambda: Meter(""))
    profiler: LayerMeasurements | None = None
    recovery: Recovery | None = None

    def dispatch(self, event: Event, closure: Closure = None) -> Any:
        """Perform the schedule's commands for ``event``; return the result of a whole step."""
        commands = self.schedule.react(event)
        returned = answer = None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration:
                return returned
            answer = None
            match command:
                case Start(operation, number, chained):
                    self.exchange.start(operation, self.bucketing.buckets[number], chained)
                case Wait():
                    self._wait(command)
                case Show():
                    self.views.show()
                case Announce(intent, used):
                    self.intents.announce(intent, used)
                case Await():
                    answer = self._await()
                case _:
                    result = self.update.perform(command, closure)
                    if isinstance(command, Step):
                        returned = result

    def _await(self) -> Answer:
        begin = time.monotonic_ns()
        try:
            return self.intents.await_all()
        finally:
            self._record_wait(begin)

    def _wait(self, command: Wait) -> None:
        bucket = self.bucketing.buckets[command.bucket]
        read_only = command.read_only or self.update.preserves_gradients(bucket)
        begin = time.monotonic_ns()
        try:
            if bucket.handle is not None and read_only:
                bucket.handle.wait_received()
            else:
                bucket.settle()
        finally:
            self._record_wait(begin, bucket.index)
        if command.whole and not self.checked:
            # On a GPU the host would wait for the flags.
            if bucket.flat.device.type == "cpu":
                self.steps.check(bucket.counts.tolist())
            self.checked = True

    def waited(self, ns: int) -> None:
        """Record nanoseconds that the training thread was blocked in a step."""
        self.meter.waited_ns += ns

    def _record_wait(self, begin: int, bucket: int = -1) -> None:
        end = time.monotonic_ns()
        self.meter.waited_ns += end - begin
        if stream.on:
            stream.record("wait", begin, end, bucket=bucket)
