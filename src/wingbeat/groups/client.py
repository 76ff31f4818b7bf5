"""A worker's way to the group generator, and what it does when that is dead."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from wingbeat.errors import PeerError
from wingbeat.groups.averages import GIVEN_UP, Averages, Coming
from wingbeat.groups.board import Board
from wingbeat.groups.follower import CALL, Follower, alone_text
from wingbeat.groups.generator import Run, Unexpected
from wingbeat.groups.layout import Layout
from wingbeat.groups.line import Dead, Line
from wingbeat.groups.member import Member
from wingbeat.groups.protocol import WRAPS, Kind, Malformed, Told, Why, told_of, why_of
from wingbeat.groups.rules import Rules
from wingbeat.observe.events import AVERAGES, stream
from wingbeat.transport.liveness import LONGEST, Wait, stuck_text
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.mailbox import Mailbox

_log = logging.getLogger(__name__)

Blob = TypeVar("Blob")

_WHAT = {False: "the end of its step", True: CALL}
"""What is waited for; by whether this worker levels."""

_WHY = {
    Why.LATE: "took too long for a step, or for an average",
    Why.SILENT: "has given no sign for long",
    Why.LEFT: "has left",
    Why.ENDED: "has ended",
}


class Client:
    """Finds with whom to average after each step; for one thread.

    When the generator is dead, all workers go on by the static schedule, from its first step, or
    with everyone if these are the rules: each as soon as it finds out. Whoever is then in a group
    waits for those who have not found out yet.

    Args:
        mailbox: joins this worker to the generator.
        worker: its rank.
        generator: the number of the generator's mailbox.
        layout: which worker is on which host.
        rules: the generator's.
        timeout: seconds without a sign of the generator after which a wait ends. It gives signs
            while those live for whom this worker waits; then a wait ends after `LONGEST` times as
            many.
        board: what workers tell each other when the generator is dead.
        lives: whether the process of a worker runs, as far as is known; asked without a generator.

    Attributes:
        fallen: why groups come without the generator, None if they do not.
        left_out: whether others have gone on without this worker since it met all of them, or
            fetched the state of one.
        stale: whether it was silent for so long that it has to fetch the state of another before
            it is in a group again: a step ends without an average meanwhile.
        renews: whether this worker, if others have gone on without it, takes the state of one
            before it is in a group again: then a step ends without an average. Else it is in the
            next.
        lost: called with each worker that takes no part any more.
        back: called with each that takes part again.
        give: called with a worker that wants this one's state, and the number of their meeting,
            while this worker waits for a group.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        worker: int,
        generator: int,
        layout: Layout,
        rules: Rules,
        timeout: float,
        board: Board,
        lives: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._line, self._worker = Line(mailbox, worker, generator, timeout), worker
        self._layout, self._rules, self._timeout = layout, rules, timeout
        self._board, self._lives = board, lives
        self._member = Member(worker, rules)
        self._levels = self._joins = False
        self._asked = self._since = 0
        self._absent: dict[int, Why] = {}
        self._missed = False  # whether others have made a mean of all without this worker
        self._met: tuple[int, ...] = ()
        self._follower: Follower | None = None
        self.fallen: str | None = None
        self.left_out = self.stale = self.renews = False
        self.lost: Callable[[int], None] = lambda _: None
        self.back: Callable[[int], None] = lambda _: None
        self.give: Callable[[int, int], None] | None = None

    @property
    def absent(self) -> set[int]:
        """The workers that take no part, as far as this one has heard."""
        return set(self._absent) if self._follower is None else self._follower.absent

    def step(self, averages: Averages) -> None:
        """Take part in averages until the next step may begin.

        Raises:
            PeerError: no group came in time, or the generator has sent what it never sends.
        """
        if self._follower is None and self._asks(averages, level=False):
            return
        assert self._follower is not None
        self._follower.step(averages)

    def level(self, averages: Averages) -> None:
        """Average with all that take part, when all of them have called this.

        Others may have steps to make before; no group of theirs waits for this worker. Whoever is
        gone is left out. Afterwards all have the same parameters.

        Raises:
            PeerError: the generator has given no sign in time, or sent what it never sends; a
                worker lives and does not call this; or no other worker takes part, and one lives
                or has called this without this worker.
        """
        if self._follower is None and self._asks(averages, level=True):
            self._check_alone()
            self.left_out = self.stale = self._missed = False
            return
        assert self._follower is not None
        self._follower.level(averages)

    def fetch(
        self, take: Callable[[int, int, Callable[[], bool]], Blob | None], *, join: bool = False
    ) -> Blob:
        """Return the state of somebody who takes part.

        Args:
            take: takes it from a worker, at a meeting of that number; its last argument says
                whether that one lives, as far as is known. Returns None if it was lost.
            join: whether this worker takes part from now on, and not only when it asks.

        Raises:
            PeerError: nobody takes part, or gave it in time, or the generator is dead.
        """
        self._joins, self.left_out, self.stale, self._missed = join, False, False, False
        lost, deadline = -1, time.monotonic() + self._timeout
        try:
            while True:
                self._line.post(Kind.FETCH, lost + 1, int(join))
                giver, meeting = self._told_giver(deadline)
                blob = take(giver, meeting, lambda giver=giver: not self._heard_out(giver))  # type: ignore[misc]
                if blob is not None:
                    return blob
                lost = giver
        except Dead as error:
            raise PeerError(
                f"rank {self._worker}: nobody says who has the state of the others: {error}"
            ) from None

    def _told_giver(self, deadline: float) -> tuple[int, int]:
        while True:
            message = self._line.next(deadline)
            ids = message.ids
            if message.kind != Kind.STATE or ids[0] == self._worker != ids[1]:
                self._note(message)
            elif ids[0] == ids[1]:
                raise PeerError(
                    f"rank {self._worker}: nobody takes part whose state could be taken: start "
                    "from a checkpoint"
                )
            elif ids[1] == self._worker and ids[0] < self._layout.workers:
                return ids[0], ids[2]

    def _heard_out(self, worker: int) -> bool:
        """Whether ``worker`` takes no part any more, as far as the generator has said."""
        self._note_all()
        return worker in self._absent or self._line.dead

    def _note_all(self) -> None:
        """Hear all that the generator has said by now."""
        self._line.listen()
        while self._line.heard:
            self._note(self._line.heard.popleft())

    def _note(self, message: Message) -> None:
        """Hear what the generator says between two steps."""
        match message.kind:
            case Kind.OUT if message.ids[0] == self._worker:
                self._note_own(message.ids[2])
            case Kind.OUT | Kind.IN:
                self._note_other(message.kind, message.ids)
            case Kind.STATE if message.ids[0] == self._worker and self.give is not None:
                self.give(message.ids[1], message.ids[2])

    def _note_other(self, kind: int, ids: Sequence[int]) -> None:
        """Note that another worker takes part no more, and why; or that it does again."""
        worker, before = ids[0], self._absent.pop(ids[0], None)
        if kind == Kind.OUT:
            self._absent[worker] = why = why_of(ids[2])
            self._missed = bool(ids[3])
            if why != Why.LATE and before in (None, Why.LATE):
                self.lost(worker)
            elif why == Why.LATE and before is None:
                _log.info(
                    "rank %d: rank %d took too long for a step, or for an average: groups go on "
                    "without it until its next step; wingbeat.synchronize() waits for it",
                    self._worker,
                    worker,
                )
        elif before is not None:
            self.back(worker)
        if (before is None) == (kind == Kind.OUT):
            stream.happened("left" if kind == Kind.OUT else "joined", (worker,))

    def _note_own(self, why: int) -> None:
        """Note that others have gone on without this worker.

        Raises:
            PeerError: it copies their state.
        """
        self.left_out = True
        self.stale |= why == Why.SILENT
        if self._joins:
            raise PeerError(
                f"rank {self._worker}: the others went on without this worker before it had their "
                "state; start it again, or give it more time: wingbeat.init(timeout=...)"
            )

    def _check_alone(self) -> None:
        """Raise a `PeerError` if a mean over all was of this worker alone, and is not everyone's.

        It is if all others have died, or have left in good order, and made no such mean without
        this worker before.
        """
        over = {Why.ENDED, Why.LEFT}
        if len(self._met) > 1 or not (self._missed or set(self._absent.values()) - over):
            return
        names = "; ".join(f"rank {w} {_WHY[why]}" for w, why in sorted(self._absent.items()))
        missed = "; the others have made theirs without this rank" if self._missed else ""
        raise PeerError(alone_text(self._worker, names + missed))

    def leave(self, *, failed: bool = False) -> None:
        """Let nobody wait for this worker any more, if there is no generator who does.

        Args:
            failed: whether an exception ends this worker.
        """
        if self._follower is not None:
            self._follower.leave(failed=failed)

    def _asks(self, averages: Averages, *, level: bool) -> bool:
        """Take part in what the generator says; False if it is dead and there was no average."""
        self._levels = level
        try:
            self._ask(averages)
        except Dead as error:
            self._fall(str(error), averages)
            return not self._member.waiting
        return True

    def _fall(self, why: str, averages: Averages) -> None:
        """Do without the generator from now on."""
        self.fallen = why
        averages.close()
        everyone = self._rules.whole
        self._note_all()
        self._board.fall(self._worker, self._member.last)
        for worker, reason in self._absent.items():
            self._board.lose(worker, left=reason == Why.LEFT)  # Not all may have heard it.
        self._follower = Follower(
            self._worker, self._layout, self._timeout, self._board,
            everyone=everyone, absent=self._absent, lives=self._lives,
        )  # fmt: skip
        self._follower.lost = self.lost
        _log.warning(
            "rank %d: the group generator is gone (%s); groups %s from now on",
            self._worker,
            why,
            "are of everyone" if everyone else "follow the static schedule",
        )

    def _ask(self, averages: Averages) -> None:
        self._request()
        wait = Wait(f"rank {self._worker}", _WHAT[self._levels], time.monotonic)
        deadline = wait.begun + self._timeout
        while self._member.waiting:
            message = self._line.next(deadline)
            # Others may have many steps to make, or long ones: signs of the generator count.
            deadline = time.monotonic() + self._timeout
            if message.kind == Kind.ALIVE and message.ids[0]:
                self._look(wait, f"rank {message.ids[0] - 1}")
            try:
                self._hear(message, averages)
            except (Malformed, Unexpected) as error:
                raise PeerError(
                    f"rank {self._worker}: the group generator sent what it never sends: {error}"
                ) from None

    def _look(self, wait: Wait, peer: str) -> None:
        """Log a long wait for a worker that lives.

        Raises:
            PeerError: it lasts too long.
        """
        wait.look(peer)
        if wait.seconds() > LONGEST * self._timeout:
            me = f"rank {self._worker}"
            raise PeerError(stuck_text(me, peer, _WHAT[self._levels], self._timeout))

    def _hear(self, message: Message, averages: Averages) -> None:
        ids = message.ids
        match message.kind:
            case Kind.RUN:
                told = told_of(ids, message.payload, self._layout.workers)
                averages.close(told.close)
                if self._member.hear(told.run):
                    self._run(told, averages)
            case Kind.OUT if ids[0] == self._worker:
                self._note_own(ids[2])
                # Nobody waits for this worker any more, whatever it is in. It comes back when it
                # asks; it may have done so since, which was not heard yet.
                if ids[1] == self._asked:
                    self._member = Member(self._worker, self._rules)
                    if self._levels or not (self.renews or self.stale):
                        self._request()
            case Kind.OUT | Kind.IN:
                self._note_other(message.kind, ids)
            case Kind.STATE if ids[0] == self._worker and self.give is not None:
                self.give(ids[1], ids[2])
            case Kind.REFUSED:
                raise Unexpected(
                    f"a refusal: {bytes(message.payload[:200]).decode(errors='replace')}"
                )
            case Kind.ALIVE:
                pass
            case _:
                raise Malformed(f"a message of kind {message.kind}")

    def _request(self) -> None:
        self._member.ask(self._levels)
        self._asked = (self._asked + 1) % WRAPS
        self._since = time.monotonic_ns()
        stream.happened("request")
        if self._levels:
            self._line.post(Kind.LEVEL)
        else:
            self._line.post(Kind.ASK, int(self.renews))

    def _run(self, told: Told, averages: Averages) -> None:
        run, lost = told.run, None
        self._met = run.members
        stream.record(
            "group_wait", self._since, time.monotonic_ns(), lane=AVERAGES, group=run.members
        )
        if len(run.members) > 1:
            lost = averages.average(run, told.meeting, functools.partial(self._coming, run))
            self._since = time.monotonic_ns()
        if lost == GIVEN_UP and self._line.dead:
            raise Dead("it died before it had told all members of a group")
        if lost == GIVEN_UP:
            return  # It has said that the group runs again.
        if lost is not None:
            # The group runs again without it, if others have not said so already.
            self._line.post(Kind.LOST, run.number, run.epoch, lost)
            return
        self._joins = False
        if self.renews:  # else it was left out before, and would not be in a group
            self.left_out = False
        self._member.done()
        self._line.post(Kind.DONE, run.number, run.epoch)

    def _coming(self, run: Run) -> Coming:
        """Whether all members of a group that runs may still come, as far as is known."""
        self._line.listen()
        if any(self._is_later(run, message) for message in self._line.heard):
            return Coming.NEVER
        self._line.probe()
        if not self._line.dead:
            return Coming.MAYBE
        # Who has found that out has closed what it was in.
        lasts = self._board.fallen(set(run.members) - {self._worker}).values()
        return Coming.NEVER if any(last < run.number for last in lasts) else Coming.PAST

    def _is_later(self, run: Run, message: Message) -> bool:
        """Whether the generator says that the group runs again, without a member; or this one."""
        number, epoch = message.ids[:2]
        if message.kind == Kind.OUT:
            return number == self._worker and epoch == self._asked
        return message.kind == Kind.RUN and number == run.number and epoch > run.epoch
