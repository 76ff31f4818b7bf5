"""A worker's way to the group generator, and what it does when that is dead."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from wingbeat.errors import PeerError
from wingbeat.groups.generator import Run, Unexpected
from wingbeat.groups.layout import Layout
from wingbeat.groups.member import Member
from wingbeat.groups.protocol import WRAPS, Kind, Malformed, Told, told_of
from wingbeat.groups.rules import Rules
from wingbeat.groups.static import group_of
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.mailbox import Mailbox

_log = logging.getLogger(__name__)

STATIC = -1
"""The initiator of groups of the static schedule, whose numbers are its steps."""

_LOOK_S = 1.0
"""Seconds between two looks at whether the generator lives, while a group is waited for."""

GIVEN_UP = -1
"""In place of a member that was lost: not all members have come, and the generator is dead."""

STATIC_MEETINGS = 1 << 31
"""Meetings of the static schedule are numbered from here on: no generator gets so far."""


class Averages(Protocol):
    """What averages parameters with a group's."""

    def average(self, run: Run, meeting: int, alive: Callable[[], bool]) -> int | None:
        """Average the parameters of a group of two and more.

        Args:
            run: the group.
            meeting: its number; connections of a meeting of this number are kept from before.
            alive: whether members that have not come may still do: if the generator died before it
                had told all, those who were told wait in vain, and `GIVEN_UP` is to be returned.

        Returns:
            A member that was lost, or None.
        """
        ...

    def close(self, meetings: Iterable[int] | None = None) -> None:
        """Keep the connections of these meetings no longer; of any if None."""


class Client:
    """Finds with whom to average after each step; for one thread.

    When the generator is dead, all workers go on by the static schedule, from its first step: each
    as soon as it finds out. Whoever is then in a group waits for those who have not found out yet.

    Args:
        mailbox: joins this worker to the generator.
        worker: its rank.
        generator: the number of the generator's mailbox.
        layout: which worker is on which host.
        rules: the generator's.
        timeout: seconds that a group may be waited for.

    Attributes:
        fallen: why the static schedule is used, None if it is not.
        absent: the workers that take no part, as far as this one has heard.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        worker: int,
        generator: int,
        layout: Layout,
        rules: Rules,
        timeout: float,
    ) -> None:
        self._mailbox, self._worker, self._generator = mailbox, worker, generator
        self._layout, self._rules, self._timeout = layout, rules, timeout
        self._member = Member(worker, rules)
        self._steps = 0
        self._asked = 0
        self._probed = 0.0
        self.fallen: str | None = None
        self.absent: set[int] = set()

    def step(self, averages: Averages) -> None:
        """Take part in averages until the next step may begin.

        Raises:
            PeerError: no group came in time, or the generator has sent what it never sends.
        """
        if self.fallen is None:
            try:
                self._ask(averages)
                return
            except _Dead as error:
                self.fallen = str(error)
                averages.close()
                _log.warning(
                    "rank %d: the group generator is gone (%s); groups follow the static schedule "
                    "from now on",
                    self._worker,
                    error,
                )
        self._follow(averages)

    def _ask(self, averages: Averages) -> None:
        self._request()
        deadline = time.monotonic() + self._timeout
        while self._member.waiting:
            message = self._next(deadline)
            try:
                self._hear(message, averages)
            except (Malformed, Unexpected) as error:
                raise PeerError(
                    f"rank {self._worker}: the group generator sent what it never sends: {error}"
                ) from None

    def _hear(self, message: Message, averages: Averages) -> None:
        ids = message.ids
        match message.kind:
            case Kind.RUN:
                told = told_of(ids, message.payload, self._layout.workers)
                averages.close(told.close)
                if self._member.hear(told.run):
                    self._run(told, averages)
            case Kind.OUT if ids[0] == self._worker:
                # Nobody waits for this worker any more, whatever it is in. It comes back when it
                # asks; it may have done so since, which was not heard yet.
                if ids[1] == self._asked:
                    self._member = Member(self._worker, self._rules)
                    self._request()
            case Kind.OUT:
                self.absent.add(ids[0])
            case Kind.IN:
                self.absent.discard(ids[0])
            case Kind.REFUSED:
                raise Unexpected(
                    f"a refusal: {bytes(message.payload[:200]).decode(errors='replace')}"
                )
            case Kind.ALIVE:
                pass
            case _:
                raise Malformed(f"a message of kind {message.kind}")

    def _request(self) -> None:
        self._member.ask()
        self._asked = (self._asked + 1) % WRAPS
        self._post(Kind.ASK)

    def _run(self, told: Told, averages: Averages) -> None:
        run, lost = told.run, None
        if len(run.members) > 1:
            lost = averages.average(run, told.meeting, self._alive)
        if lost == GIVEN_UP:
            raise _Dead("it died before it had told all members of a group")
        if lost is not None:
            # The group runs again without it, if others have not said so already.
            self._post(Kind.LOST, run.number, run.epoch, lost)
            return
        self._member.done()
        self._post(Kind.DONE, run.number, run.epoch)

    def _follow(self, averages: Averages) -> None:
        """Take part in this worker's next group of the static schedule."""
        members = set(group_of(self._layout, self._worker, self._steps)) - self.absent
        epoch = 0
        while len(members | {self._worker}) > 1:
            group = tuple(sorted(members | {self._worker}))
            meeting = STATIC_MEETINGS + self._steps
            run = Run(self._steps, epoch, group, STATIC)
            lost = averages.average(run, meeting, lambda: True)
            averages.close([meeting])
            if lost is None or lost == self._worker:
                break
            self.absent.add(lost)
            members.discard(lost)
            epoch += 1
        self._steps += 1

    def _next(self, deadline: float) -> Message:
        """Wait for the generator's next message.

        Raises:
            _Dead: it is gone.
            PeerError: none came in time.
        """
        while True:
            try:
                return self._mailbox.receive(_LOOK_S, of=[self._generator])
            except PeerError as error:
                if self._gone():
                    raise _Dead(str(error)) from None
            if time.monotonic() >= deadline:
                raise PeerError(
                    f"rank {self._worker}: no group came from the group generator within "
                    f"{self._timeout:g} s"
                )
            self._post(Kind.ALIVE)  # which has to arrive

    def _post(self, kind: Kind, *ids: int) -> None:
        try:
            padded = (*ids, 0, 0, 0, 0)[:4]
            self._mailbox.post(self._generator, kind, ids=padded, urgency=0)
        except PeerError as error:
            raise _Dead(str(error)) from None

    def _alive(self) -> bool:
        """Whether the generator lives, as far as is known; a sign of it is asked for at times."""
        now = time.monotonic()
        if now - self._probed >= _LOOK_S:
            self._probed = now
            with contextlib.suppress(_Dead):
                self._post(Kind.ALIVE)
        return not self._gone()

    def _gone(self) -> bool:
        return self._generator in self._mailbox.left or self._generator in self._mailbox.lost


class _Dead(Exception):
    """The generator is."""
