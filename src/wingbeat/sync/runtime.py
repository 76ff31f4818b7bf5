"""Performs what a schedule says, in the training thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wingbeat.exchanges.exchange import Exchange
from wingbeat.gradients.bucket import Bucket
from wingbeat.gradients.bucketing import Bucketing
from wingbeat.gradients.steps import Steps
from wingbeat.gradients.views import Views
from wingbeat.observe.events import stream
from wingbeat.schedules.events import Command, Event, Hear, Say, Schedule, Show, Start, Wait
from wingbeat.schedules.intents import Answer
from wingbeat.updates.agreement import Agreement
from wingbeat.updates.update import Closure, Update


@dataclass
class Runtime:
    """Gives each command to the part that it is for, before the schedule is asked for the next.

    Attributes:
        checked: whether workers are known to be in step in the present iteration.
    """

    schedule: Schedule
    exchange: Exchange
    bucketing: Bucketing
    views: Views
    update: Update
    agreement: Agreement
    steps: Steps
    checked: bool = False

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
            answer = None
            match command:
                case Hear():
                    answer = self._hear()
                case Start() | Wait() | Show() | Say():
                    self._exchange(command)
                case _:
                    returned = self.update.perform(command, closure)

    def _exchange(self, command: Command) -> None:
        match command:
            case Start(operation, number, chained):
                self.exchange.start(operation, self.bucketing.buckets[number], chained)
            case Wait(number, whole, read_only):
                self._wait(self.bucketing.buckets[number], whole, read_only)
            case Show():
                self.views.show()
            case Say(intent, used):
                self.agreement.say(intent, used)

    def _hear(self) -> Answer:
        with stream.timed("wait"):
            return self.agreement.hear()

    def _wait(self, bucket: Bucket, whole: bool, read_only: bool) -> None:
        with stream.timed("wait", bucket=bucket.index):
            if bucket.handle is not None and (read_only or self.update.reads_only(bucket)):
                bucket.handle.wait_received()
            else:
                bucket.settle()
        if whole and not self.checked:
            # On a GPU the host would wait for the flags.
            if bucket.flat.device.type == "cpu" and not bucket.in_step():
                self.steps.disagree()
            self.checked = True
