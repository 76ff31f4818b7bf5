"""Performs what a schedule says, in the training thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.steps import Steps
from wingbeat.engine.gradients.views import Views
from wingbeat.engine.updates.agreement import Agreement
from wingbeat.engine.updates.update import Closure, Update
from wingbeat.exchanges.exchange import Exchange
from wingbeat.observe.events import stream
from wingbeat.observe.meter import Meter
from wingbeat.schedules.events import (
    Event,
    Hear,
    Say,
    Schedule,
    Show,
    Start,
    Step,
    UpdateCommand,
    Wait,
)
from wingbeat.schedules.intents import Answer


@dataclass
class Runtime:
    """Gives each command to the part that it is for, before the schedule is asked for the next.

    Attributes:
        checked: whether workers are known to be in step in the present iteration.
        meter: counts what is waited for.
    """

    schedule: Schedule
    exchange: Exchange
    bucketing: Bucketing
    views: Views
    update: Update
    agreement: Agreement
    steps: Steps
    checked: bool = False
    meter: Meter = field(default_factory=lambda: Meter(""))

    def tell(self, event: Event, closure: Closure = None) -> Any:
        """Do what the schedule has to say to ``event``; return what a step has returned, if any.

        Raises:
            PeerError: a worker failed, or was silent for too long.
            UsageError: the workers do not do the same.
        """
        dialogue = self.schedule.react(event)
        returned = answer = None
        while True:
            try:
                command = dialogue.send(answer)
            except StopIteration:
                return returned
            own = _OWN.get(type(command))
            if own is not None:
                answer = own(self, command)
            else:
                answer = None
                made = self.update.perform(cast("UpdateCommand", command), closure)
                if isinstance(command, Step):
                    returned = made

    def _start(self, command: Start) -> None:
        bucket = self.bucketing.buckets[command.bucket]
        self.exchange.start(command.operation, bucket, command.chained)

    def _show(self, _: Show) -> None:
        self.views.show()

    def _say(self, command: Say) -> None:
        self.agreement.say(command.intent, command.used)

    def _hear(self, _: Hear) -> Answer:
        begin = time.monotonic_ns()
        try:
            return self.agreement.hear()
        finally:
            self._waited(begin)

    def _wait(self, command: Wait) -> None:
        bucket = self.bucketing.buckets[command.bucket]
        begin = time.monotonic_ns()
        try:
            if bucket.handle is not None and (command.read_only or self.update.reads_only(bucket)):
                bucket.handle.wait_received()
            else:
                bucket.settle()
        finally:
            self._waited(begin, bucket.index)
        if command.whole and not self.checked:
            # On a GPU the host would wait for the flags.
            if bucket.flat.device.type == "cpu":
                self.steps.check(bucket.counts.tolist())
            self.checked = True

    def waited(self, ns: int) -> None:
        """Count what the training thread was blocked on others, inside of a step."""
        self.meter.waited_ns += ns

    def _waited(self, begin: int, bucket: int = -1) -> None:
        """Count what the training thread was blocked on, since ``begin`` (ns)."""
        end = time.monotonic_ns()
        self.meter.waited_ns += end - begin
        if stream.on:
            stream.record("wait", begin, end, bucket=bucket)


_OWN: dict[type, Callable[[Runtime, Any], Any]] = {
    Start: Runtime._start,
    Wait: Runtime._wait,
    Show: Runtime._show,
    Say: Runtime._say,
    Hear: Runtime._hear,
}
"""Who performs a command; the update does all others. A look here costs the same for each."""
