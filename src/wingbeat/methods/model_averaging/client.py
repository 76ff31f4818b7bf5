"""A worker's client of the group generator."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.generator import (
    ID_LIMIT,
    MESSAGES,
    Added,
    Done,
    Fetched,
    FetchState,
    Keepalive,
    Lost,
    Member,
    ProtocolError,
    Reason,
    Refused,
    Removed,
    Request,
    Run,
    RunMessage,
    SendState,
    Synchronize,
)
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.static_client import (
    ABANDONED,
    SYNC_CALL,
    Arrival,
    GeneratorIsBack,
    Reducer,
    StaticClient,
    Status,
    StatusTable,
    isolation_text,
)
from wingbeat.observe.events import AVERAGES, stream
from wingbeat.observe.log import log_event
from wingbeat.schema import MalformedMessage
from wingbeat.transport.detector import Failed, FailureDetector
from wingbeat.transport.failures import WaitLog
from wingbeat.transport.messages.frames import Message
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.types import Layout

if TYPE_CHECKING:
    from wingbeat.methods.model_averaging.succession import GeneratorSearch

_log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Seconds for workers to connect to a generator that replaces another one."""

_CHECK_S = 0.25  # between checks of the generator while one of its messages is awaited
_KEEPALIVE_S = 1.0  # between keepalive messages, whose loss shows that the generator is dead
_SEARCH_S = 0.02  # between checks of the connection to the next generator

_REASONS = {
    Reason.LATE: "took too long for a step, or for an average",
    Reason.SILENT: "has given no sign for long",
    Reason.LEFT: "has left",
    Reason.DIED: "has ended",
    Reason.FINISHED: "has left after a mean that no other worker has",
}

State = TypeVar("State")


class GeneratorLost(Exception):
    """The generator has died, left or is unreachable; the text states how."""


def violation(me: str, error: MalformedMessage) -> PeerError:
    """Return the error of a malformed or unexpected message of the generator."""
    return PeerError(f"{me}: the group generator violated the protocol: {error}")


class GeneratorConnection:
    """Messages to and from the generator. Not thread-safe.

    Attributes:
        received: messages that were received and not handled, oldest first.
        watch: called while it waits; may raise.
    """

    def __init__(self, mailbox: Mailbox, me: str, generator: int, timeout: float) -> None:
        self._mailbox, self._me, self._generator = mailbox, me, generator
        self._timeout, self._sent_at = timeout, 0.0
        self._detector = FailureDetector(mailbox)
        self._failed: Failed | None = None
        self.received: deque[Any] = deque()
        self.watch: Callable[[], None] = lambda: None

    @property
    def lost(self) -> bool:
        """Whether the generator has failed; permanent."""
        self._failed = self._failed or self._detector.failed().get(self._generator)
        return self._failed is not None

    def send(self, message: Any) -> None:
        """Send a message; raise GeneratorLost if the generator cannot receive it."""
        kind, ids, _ = MESSAGES.pack(message)
        try:
            self._mailbox.post(self._generator, kind, ids=ids, urgency=0)
        except PeerError as error:
            raise GeneratorLost(str(error)) from None

    def receive(self, deadline: float) -> Any:
        """Wait for the next message.

        Raises GeneratorLost if the generator is lost. Raises PeerError if the deadline has passed,
        or the message is malformed.
        """
        while not self.received:
            lost = self.lost  # read before its last messages
            self.poll(0.0 if lost else _CHECK_S)
            if self.received:
                break
            if lost and self._failed:
                raise GeneratorLost(f"it {self._failed.text}")
            if time.monotonic() >= deadline:
                raise PeerError(
                    f"{self._me}: no group came from the group generator within "
                    f"{self._timeout:g} s; check that the others still train"
                )
            self.keep_alive()
            self.watch()
        return self.received.popleft()

    def poll(self, seconds: float = 0.0) -> None:
        """Append all messages that have arrived to `received`; wait for the first of them."""
        message = self._mailbox.next(seconds) if seconds else self._mailbox.poll()
        while message is not None:
            self.received.append(self._parse(message))
            message = self._mailbox.poll()

    def _parse(self, message: Message) -> Any:
        try:
            # The generator's number is that of the workers.
            return MESSAGES.parse(message, workers=self._generator)
        except MalformedMessage as error:
            raise violation(self._me, error) from None

    def keep_alive(self) -> None:
        """Send a keepalive message if the last one is old enough."""
        now = time.monotonic()
        if now - self._sent_at >= _KEEPALIVE_S:
            self._sent_at = now
            with contextlib.suppress(GeneratorLost):
                self.send(Keepalive())


class Client:
    """Takes part in the groups that the generator makes. Not thread-safe.

    When the generator is lost, all workers continue with the static schedule from its first step,
    or with groups of all workers if the rules require these, each as soon as it detects the loss.
    Members of a group wait for those that have not detected it yet.

    A wait fails after ``timeout`` seconds without a message from the generator. The generator sends
    messages while the awaited workers live; then a wait fails after `MAX_WAIT_FACTOR` times the
    timeout. ``table`` and ``is_running`` (whether a worker's process is known to run) are used
    without a generator. ``has_died`` returns whether a worker's process is known to have ended,
    other than normally. ``name`` returns the name of a worker in messages.

    Meanwhile ``search`` finds the next generator, which one of the workers starts; None: there is
    none. This worker connects to it in a thread, and follows it from its next step on.
    ``generation`` is the incarnation of the generator. ``record`` logs an event with its text.

    Attributes:
        mailbox: its connection to the generator, which the caller closes.
        on_generation: called with the incarnation of a generator before its first group.
        fallback: why groups are made without the generator; None if they are not.
        excluded: whether groups have continued without this worker since it last synchronized, or
            copied a peer's state.
        stale: whether it was silent for so long that it must copy a peer's state before it joins a
            group again. Until then steps end without an average.
        copies_state: whether an excluded worker always copies a peer's state before it joins a
            group again. Until then steps end without an average.
        on_lost: called with each worker that is lost.
        on_back: called with each worker that is active again.
        on_fetch: called with a worker that requests this one's state, and their connection id,
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
        table: StatusTable,
        is_running: Callable[[int], bool] = lambda _: False,
        name: Callable[[int], str] = "rank {}".format,
        *,
        search: GeneratorSearch | None = None,
        generation: int = 0,
        record: Callable[[str, str], None] | None = None,
        has_died: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.mailbox = mailbox
        self._connection = GeneratorConnection(mailbox, name(worker), generator, timeout)
        self._generator, self._search, self._generation = generator, search, generation
        self._renewed = 0  # the last argument of `on_generation`
        self.on_generation: Callable[[int], None] = lambda _: None
        self._worker, self._name, self._me = worker, name, name(worker)
        self._layout, self._rules, self._timeout = layout, rules, timeout
        self._table, self._is_running, self._has_died = table, is_running, has_died
        self._record = record or functools.partial(log_event, rank=worker)
        self._member = Member(worker, rules)
        self._synchronizes = self._joins = False
        self._requests = self._waiting_since = 0
        self._inactive: dict[int, Reason] = {}
        self._told_late: set[int] = set()
        self._missed = False  # whether others have synchronized without this worker
        self._left_behind = False  # whether they may have, without a generator
        self._fetching = False
        self._unserved: list[SendState] = []  # requests that arrived while it had no state to send
        self._members: tuple[int, ...] = ()  # of the last group
        self._static: StaticClient | None = None
        self.fallback: str | None = None
        self.excluded = self.stale = self.copies_state = False
        self.on_lost: Callable[[int], None] = lambda _: None
        self.on_back: Callable[[int], None] = lambda _: None
        self.on_fetch: Callable[[int, int], None] = lambda _worker, _connection: None

    @property
    def must_fetch(self) -> bool:
        """Whether this worker must copy a peer's state before it joins a group again."""
        lags = self.stale or (self.copies_state and self.excluded)
        return lags and self.fallback is None

    @property
    def lost_peers(self) -> set[int]:
        """The workers that this worker does not know to be active."""
        return set(self._inactive) if self._static is None else self._static.lost_peers

    def set_watch(self, watch: Callable[[], None]) -> None:
        """Call a function while this client waits, which may raise."""
        self._connection.watch = watch

    def step(self, reducer: Reducer) -> None:
        """Take part in groups until the next step may begin."""
        self._take_part(reducer, synchronize=False)

    def synchronize(self, reducer: Reducer) -> None:
        """Average with all active workers, once all of them have called this.

        The others may make steps before; their groups do not wait for this worker. Lost workers are
        left out. Afterwards all have the same parameters. Raises PeerError if the mean is of this
        worker alone, and others have another model, or are not known to have died; or if workers
        have left after a mean that they completed, and no other worker did.
        """
        if not self._take_part(reducer, synchronize=True):
            self._check_static_mean()
            return
        if finished := [w for w, reason in self._inactive.items() if reason == Reason.FINISHED]:
            raise PeerError(
                f"{self._me}: {', '.join(map(self._name, sorted(finished)))} completed the last "
                "mean of all models and left, and this worker could not complete it: its weights "
                "differ from theirs: use a checkpoint of theirs, or start the job again from one"
            )
        # Others have no other model if all have died or left, none after one without this worker.
        if len(self._members) <= 1 and (
            self._missed or self._left_behind or any(map(self._may_have_a_model, self._inactive))
        ):
            inactive = sorted(self._inactive.items())
            names = "; ".join(f"{self._name(w)} {_REASONS[reason]}" for w, reason in inactive)
            if self._missed:
                names += f"; the others have made theirs without {self._me}"
            elif self._left_behind:
                names += f"; the others have continued without {self._me}"
            raise PeerError(isolation_text(self._me, names))
        self._forget_what_was_missed()

    def _forget_what_was_missed(self) -> None:
        self.excluded = self.stale = self._missed = self._left_behind = False

    def _check_static_mean(self) -> None:
        """Raise PeerError if the mean is of this worker alone, and it has missed another one."""
        others = set(range(self._layout.workers)) - {self._worker}
        if not others <= self.lost_peers:
            self._missed = self._left_behind = False
        elif self._missed or self._left_behind:
            text = f"the others have made theirs without {self._me}"
            raise PeerError(isolation_text(self._me, text))

    def _may_have_a_model(self, worker: int) -> bool:
        if self._inactive[worker] is Reason.SILENT:
            return not self._has_died(worker)
        return self._inactive[worker] is Reason.LATE

    def leave(self, *, failed: bool = False) -> None:
        """Publish that this worker has left, if there is no generator that detects it."""
        if self._search is not None:
            self._search.stop()
        if self._static is not None:
            self._static.leave(failed=failed)

    def fetch_state(
        self, receive: Callable[[int, int, Callable[[], bool]], State | None], *, join: bool = False
    ) -> State:
        """Return the state of an active peer.

        ``receive(worker, connection, is_active)`` returns None if the worker was lost. With
        ``join`` this worker is active from now on, otherwise from its next request. If the
        generator is lost, the next one chooses the peer. Raises PeerError if no peer is active or
        has sent the state in time, or there is no next generator.
        """
        self._joins, self._fetching = join, True
        self._forget_what_was_missed()
        try:
            while True:
                try:
                    return self._fetch(receive, join)
                except GeneratorLost as error:
                    self._connect_again(str(error))
        finally:
            self._fetching = False

    def _fetch(
        self, receive: Callable[[int, int, Callable[[], bool]], State | None], join: bool
    ) -> State:
        lost = -1
        self._renew()
        while True:
            self._connection.send(FetchState(lost, join))
            sender, connection = self._await_sender()
            state = receive(sender, connection, functools.partial(self._is_active, sender))
            if state is not None:
                with contextlib.suppress(GeneratorLost):
                    self._connection.send(Fetched())
                return state
            lost = sender

    def _await_sender(self) -> tuple[int, int]:
        wait = WaitLog(self._me, "the end of its step, to copy a state", time.monotonic)
        deadline = wait.begun + self._timeout
        while True:
            message = self._connection.receive(deadline)
            if isinstance(message, Keepalive) and message.awaited >= 0:
                # It computes, and can send its state only after its step.
                wait.check(self._name(message.awaited), self._timeout)
                deadline = time.monotonic() + self._timeout
            if not isinstance(message, SendState) or message.receiver != self._worker:
                self._handle_between_steps(message)
            elif message.sender == message.receiver:
                raise PeerError(
                    f"{self._me}: cannot find a peer to copy training state from: no "
                    "other worker is active: start from a checkpoint"
                )
            else:
                return message.sender, message.connection

    def _is_active(self, worker: int) -> bool:
        self._handle_received()
        return worker not in self._inactive and not self._connection.lost

    # -- messages -------------------------------------------------------------------------

    def _handle_received(self) -> None:
        self._connection.poll()
        while self._connection.received:
            self._handle_between_steps(self._connection.received.popleft())

    def _handle_between_steps(self, message: Any) -> bool:
        """Handle a message that may arrive at any time; return whether it was one."""
        match message:
            case Removed(self._worker, _, reason):
                self._note_exclusion(reason)
            case Removed(worker, _, reason, missed):
                self._missed = missed
                self._note_removed(worker, reason)
            case Added(worker):
                self._note_active(worker)
            case SendState(self._worker) if self._fetching:
                self._unserved.append(message)
            case SendState(self._worker, receiver, connection):
                self.on_fetch(receiver, connection)
            case Keepalive():
                pass
            case _:
                return False
        return True

    def _note_active(self, worker: int) -> None:
        if self._inactive.pop(worker, None) is not None:
            self.on_back(worker)
            stream.happened("joined", (worker,))

    def _note_removed(self, worker: int, reason: Reason) -> None:
        before, self._inactive[worker] = self._inactive.get(worker), reason
        if reason != Reason.LATE and before in (None, Reason.LATE):
            self.on_lost(worker)
        elif reason == Reason.LATE and before is None and worker not in self._told_late:
            if self._rules.quorum is not None:  # a slow worker may be late in each round
                self._told_late.add(worker)
            _log.info(
                "%s: %s took too long for a step, or for an average: groups continue "
                "without it until its next step; wingbeat.synchronize() waits for it",
                self._me,
                self._name(worker),
            )
        if before is None:
            stream.happened("left", (worker,))

    def _note_exclusion(self, reason: Reason) -> None:
        """Record that groups have continued without this worker; fail if it must copy a state."""
        self.excluded = True
        self.stale |= reason == Reason.SILENT
        if self._joins:
            raise PeerError(
                f"{self._me}: groups continued without this worker before it had a peer's "
                "state; start it again, or give it more time: wingbeat.init(timeout=...)"
            )

    def _handle(self, message: Any, reducer: Reducer) -> None:
        """Handle a message while this worker waits for a group."""
        if isinstance(message, RunMessage):
            reducer.close(message.close)
            if self._member.start(message.run):
                self._run(message, reducer)
        elif isinstance(message, Refused):
            text = bytes(message.reason[:200]).decode(errors="replace")
            raise ProtocolError(f"a refusal: {text}")
        elif not self._handle_between_steps(message):
            raise ProtocolError(f"{type(message).__name__} was sent by the generator")
        elif isinstance(message, Removed) and message[:2] == (self._worker, self._requests):
            # All groups of this worker continue without it. A request makes it active again, unless
            # the generator has sent this before it had received the last request.
            self._member = Member(self._worker, self._rules)
            if self._synchronizes or not (self.copies_state or self.stale):
                self._request()

    # -- groups ---------------------------------------------------------------------------

    def _take_part(self, reducer: Reducer, *, synchronize: bool) -> bool:
        """Average with the groups of a step, or with all; return whether a generator made them."""
        newer = 0
        while not self._follow_generator(reducer, synchronize=synchronize, newer=newer):
            static = self._static
            assert static is not None, "without a generator groups follow the schedule"
            try:
                static.synchronize(reducer) if synchronize else static.step(reducer)
            except GeneratorIsBack:
                newer = self._generation + 1
                continue
            return False
        return True

    def _follow_generator(self, reducer: Reducer, *, synchronize: bool, newer: int) -> bool:
        """Request a group and average; return False without a generator and without an average.

        ``newer`` is an incarnation of the generator that others have already, or 0.
        """
        if self._static is not None and not self._return(reducer, newer):
            return False
        self._renew()
        self._synchronizes = synchronize
        try:
            self._request()
            while self._unserved:
                self.on_fetch(*self._unserved.pop(0)[1:])
            self._average_while_waiting(reducer)
        except GeneratorLost as error:
            self._fall_back(str(error), reducer)
            return not self._member.waiting
        return True

    def _request(self) -> None:
        self._member.request(synchronize=self._synchronizes)
        self._requests = (self._requests + 1) % ID_LIMIT
        self._waiting_since = time.monotonic_ns()
        stream.happened("request")
        if self._synchronizes:
            self._connection.send(Synchronize())
        else:
            self._connection.send(Request(self.copies_state))

    def _average_while_waiting(self, reducer: Reducer) -> None:
        what = SYNC_CALL if self._synchronizes else "the end of its step"
        wait = WaitLog(self._me, what, time.monotonic)
        deadline = wait.begun + self._timeout
        while self._member.waiting:
            try:
                message = self._connection.receive(deadline)
            except PeerError as error:
                raise (self._below_quorum() or error) from None
            # The others may have long steps, so each message extends the deadline.
            deadline = time.monotonic() + self._timeout
            if isinstance(message, Keepalive) and message.awaited >= 0:
                wait.check(self._name(message.awaited), self._timeout)
            try:
                self._handle(message, reducer)
            except ProtocolError as error:
                raise violation(self._me, error) from None

    def _below_quorum(self) -> PeerError | None:
        """Return the error of a wait for a quorum that too few workers are alive for."""
        quorum, active = self._rules.quorum, self._layout.workers - len(self._inactive)
        if self._synchronizes or quorum is None or active >= quorum:
            return None
        names = "; ".join(
            f"{self._name(w)} {_REASONS[reason]}" for w, reason in sorted(self._inactive.items())
        )
        return PeerError(
            f"{self._me}: {active} of the quorum of {quorum} workers came within "
            f"{self._timeout:g} s: {names}; start them again, or choose a smaller quorum"
        )

    def _run(self, message: RunMessage, reducer: Reducer) -> None:
        run, lost = message.run, None
        self._members = run.members
        for member in run.members:  # without a generator it may have counted as lost
            self._note_active(member)
        stream.record(
            "group_wait", self._waiting_since, time.monotonic_ns(), lane=AVERAGES, group=run.members
        )
        if len(run.members) > 1:
            lost = reducer.average(run, message.connection, functools.partial(self._arrival, run))
            self._waiting_since = time.monotonic_ns()
        if lost == ABANDONED:
            if self._connection.lost:
                raise GeneratorLost("it died before it had told all members of a group")
            return  # The generator has sent that the group runs again.
        if lost is not None:
            # The group runs again without that member.
            self._connection.send(Lost(run.number, run.epoch, lost))
            return
        self._joins = False
        if self.copies_state:  # an excluded worker would not join a group
            self.excluded = False
        self._member.finish()
        self._connection.send(Done(run.number, run.epoch))

    def _arrival(self, run: Run) -> Arrival:
        self._connection.poll()
        if any(self._supersedes(message, run) for message in self._connection.received):
            return Arrival.IMPOSSIBLE
        self._connection.keep_alive()
        if not self._connection.lost:
            return Arrival.POSSIBLE
        # A worker that falls back abandons its group.
        others = set(run.members) - {self._worker}
        lasts = self._table.fallbacks(others, self._generation).values()
        return Arrival.IMPOSSIBLE if any(last < run.number for last in lasts) else Arrival.DEPARTED

    def _supersedes(self, message: Any, run: Run) -> bool:
        """Whether a message starts a new epoch of ``run``, or removes this worker."""
        if isinstance(message, RunMessage):
            return message.number == run.number and message.epoch > run.epoch
        return isinstance(message, Removed) and message[:2] == (self._worker, self._requests)

    def _fall_back(self, why: str, reducer: Reducer) -> None:
        self.fallback = why
        reducer.close()
        self._handle_received()
        self._table.mark_fallback(self._worker, self._member.last, self._generation)
        # A late worker detects the end of the generator too. Only with an outer optimizer it needs
        # a generator first, to copy a state.
        lost = [w for w, r in self._inactive.items() if self.copies_state or r != Reason.LATE]
        for worker in lost:
            # The other workers may not have detected the loss.
            left = self._inactive[worker] in (Reason.LEFT, Reason.FINISHED)
            self._table.mark_lost(worker, left=left)
        self._make_static(lost)
        if self._search is not None:
            self._search.begin(self._generation)
        how = "contain all workers" if self._rules.whole else "follow the static schedule"
        until = "from now on"
        if self._search is not None:
            until = "until a worker has started another one"
        self._record(
            "generator-lost",
            f"{self._me}: the group generator is gone ({why}); groups {how} {until}",
        )

    def _make_static(self, lost: Collection[int]) -> None:
        self._static = StaticClient(
            self._worker, self._layout, self._timeout, self._table,
            everyone=self._rules.whole, lost=lost, is_running=self._is_running,
            name=self._name, generation=None if self._search is None else self._generation,
        )  # fmt: skip
        self._static.on_lost, self._static.watch = self.on_lost, self._connection.watch

    def _renew(self) -> None:
        if self._renewed != self._generation:
            self._renewed = self._generation
            self.on_generation(self._generation)

    # -- the next generator ---------------------------------------------------------------

    def _return(self, reducer: Reducer, newer: int) -> bool:
        """Follow the next generator, if there is one; return whether this worker does.

        If others have it already, this worker waits for its own connection.
        """
        search, static = self._search, self._static
        if search is None or static is None:
            return False
        deadline = time.monotonic() + CONNECT_S
        found = search.take()
        while found is None and search.runs and time.monotonic() < deadline:
            started = search.number % 2 == 0 and search.number // 2 > static.newer
            if not started and search.number // 2 >= newer:
                break
            self._connection.watch()
            time.sleep(_SEARCH_S)
            found = search.take()
        if found is not None:
            self._adopt_generator(found, search.number // 2, reducer)
            return True
        if search.number % 2 and search.number // 2 > self._generation:
            # It has ended before this worker was connected; the others begin again too.
            self._generation = search.number // 2
            reducer.close()
            self._make_static(static.lost_peers)
            self._renew()
        else:
            static.newer = max(static.newer, search.number // 2, newer)
        return False

    def _adopt_generator(self, mailbox: Mailbox, generation: int, reducer: Reducer) -> None:
        static, former = self._static, self.mailbox
        assert static is not None
        # The next generator knows of no synchronization before it.
        self._left_behind |= self._missed or static.has_missed()
        static.found_generator(generation)
        reducer.close()
        former.abandon()
        self._use(mailbox, generation)
        # Of those that were lost without a generator, some may live, or have finished.
        known = {w: r for w, r in self._inactive.items() if r in (Reason.DIED, Reason.LEFT)}
        known |= dict.fromkeys(filter(self._table.has_left, static.lost_peers), Reason.LEFT)
        self._inactive = {w: known.get(w, Reason.SILENT) for w in static.lost_peers}
        # The others may have synchronized since they have continued without this worker.
        self._left_behind |= self._inactive.pop(self._worker, None) is not None
        self._static, self.fallback = None, None
        self._record(
            "generator-started",
            f"{self._me}: another group generator was started: groups are its own again, and "
            "workers can rejoin",
        )

    def _use(self, mailbox: Mailbox, generation: int) -> None:
        watch = self._connection.watch
        self.mailbox, self._generation = mailbox, generation
        self._connection = GeneratorConnection(mailbox, self._me, self._generator, self._timeout)
        self._connection.watch = watch
        self._member, self._requests = Member(self._worker, self._rules), 0
        self._unserved.clear()

    def _connect_again(self, why: str) -> None:
        """Connect to the next generator as a process that was started again does."""
        unreachable = (
            f"{self._me}: cannot find a peer to copy training state from: the group generator is "
            f"unreachable: {why}"
        )
        if self._search is None:
            raise PeerError(unreachable)
        # The others must not wait for a worker without a state. First the end of the generator,
        # because a worker that has ended logs nothing.
        self._table.end_generator(self._generation)
        self._table.mark_lost(self._worker)
        self._record(
            "generator-lost",
            f"{self._me}: the group generator is gone ({why}) while this worker copies a state; it "
            "copies one when a worker has started another generator",
        )
        self._search.begin(self._generation)
        deadline = time.monotonic() + self._timeout
        while (found := self._search.take()) is None:
            if time.monotonic() >= deadline:
                self._search.stop()
                raise PeerError(
                    f"{unreachable}, and there was no other one for {self._timeout:g} s: start "
                    "this worker again"
                )
            self._connection.watch()
            time.sleep(_SEARCH_S)
        self.mailbox.abandon()
        self._use(found, self._search.number // 2)
        self._inactive = {}  # the generator sends those that are
        self._table.publish(self._worker, Status(self._generation))
