"""Carries what a worker under bounded staleness says, in a thread beside training.

What one worker says to another arrives in its order (`wingbeat.exchanges.lanes`). The machine
(`wingbeat.stale`) is used under one lock by two threads: this one, and training between and
within its iterations.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from wingbeat.errors import PeerError, UsageError
from wingbeat.exchanges.attendance import Attendance
from wingbeat.exchanges.departures import Departures
from wingbeat.exchanges.incoming import Incoming
from wingbeat.exchanges.lanes.lanes import Lanes
from wingbeat.exchanges.lanes.order import ProtocolError
from wingbeat.exchanges.outgoing import Outgoing
from wingbeat.exchanges.presence import Back, Gone, Presence
from wingbeat.observe.log import log
from wingbeat.stale.core import Combine
from wingbeat.stale.journal import Journal, Unwritten
from wingbeat.stale.letters import Malformed
from wingbeat.stale.messages import Message as Said
from wingbeat.stale.messages import Post, Round
from wingbeat.stale.pace import Pace
from wingbeat.stale.view import View
from wingbeat.stale.worker import Worker
from wingbeat.transport.failures import LOG_INTERVAL_S, MAX_WAIT_FACTOR, WaitLog
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.mailbox import CLOSE_TIMEOUT_S, Mailbox

_LOOK_S = 0.1
"""Seconds between two looks at who is gone."""

_STAY_S = 0.02
"""Seconds between two looks at whether the others have ended."""

_QUICK_S = 1.0
"""Seconds that the last words may take after a failure."""


class Replica(Protocol):
    """Parameters and an optimizer; used by the training thread alone."""

    def step(self, parts: Sequence[Round]) -> None:
        """Let the optimizer step on the sums of one round."""

    def put(self, payload: Any) -> None:
        """Take over parameters, and the optimizer's state, that were pulled."""

    def copied(self) -> bytes:
        """Return these for another worker."""


class Courier:
    """Joins a worker's machine to the others'.

    Attributes:
        undisturbed: whether no worker has been missed, and this one has had no other life.

    Args:
        machine: whose ``posts`` are carried. Payloads are bytes; None where there are none.
        mailbox: joins this worker to the others, whose numbers are their ranks; used by the
            thread that serves alone.
        workers: how many there are.
        replica: what rounds are applied to.
        me: what messages call this worker.
        name: what messages call the worker of a rank.
        timeout: seconds that training may have to wait.
        most: bytes that a payload may take.
        clock: seconds.
        lanes: to the other workers; made from the mailbox if None.
        attendance: to the roll, which says who is gone or back; each says so by itself if None.
        journal: where it is written down what this worker does, to be audited; None for nowhere.
        survives: whether training goes on without workers that are gone. If not it ends on all, so
            two halves of a network that fell apart do not both go on.
        departures: logs who is gone and who is back.
    """

    def __init__(
        self,
        machine: Worker,
        mailbox: Mailbox,
        workers: int,
        replica: Replica,
        *,
        me: str,
        name: Callable[[int], str] = "rank {}".format,
        timeout: float = 300.0,
        most: int = 1 << 36,
        clock: Callable[[], float] = time.monotonic,
        survives: bool = True,
        departures: Departures | None = None,
        lanes: Lanes | None = None,
        attendance: Attendance | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.machine, self._mailbox, self._replica = machine, mailbox, replica
        self._workers, self._most = workers, most
        self._me, self._name, self._timeout, self._clock = me, name, timeout, clock
        if lanes is None:
            lanes = Lanes(mailbox, machine.rank, workers, name=name, begin=timeout, clock=clock)
        self._lanes, self._attendance = lanes, attendance
        self._journal = Unwritten() if journal is None else journal
        self._presence = Presence(
            mailbox, lanes, machine, attendance, survives=survives, me=me, name=name,
            departures=departures or Departures(None, me, name=name), clock=clock,
        )  # fmt: skip
        self._changed = threading.Condition()
        self._interrupt = mailbox.interrupter()
        self._outgoing = Outgoing(machine, lanes)
        self._incoming: dict[int, Incoming] = {}
        self._error: PeerError | None = None
        self._ending = False
        self._count = 0  # of what has happened, so that nothing is missed between two looks
        self.undisturbed = machine.life == 0
        self._thread = threading.Thread(target=self._run, name="wingbeat-courier", daemon=True)

    # -- what training calls --------------------------------------------------------------

    def serve(self) -> None:
        """Begin to carry, in a thread of its own."""
        if self._attendance is not None:
            self._attendance.start(self._interrupt)
        self._thread.start()

    def computed(self, colayer: int, payloads: Sequence[bytes | bytearray | None]) -> bool:
        """Send a colayer's pieces; see `Worker.computed`.

        Raises:
            PeerError: nothing can be sent any more; says why.
        """
        with self._using():
            iteration = self.machine.at
            sent = self.machine.computed(colayer, payloads)
            if sent:
                self._journal.sent(iteration, colayer)
            return sent

    def begin(self, look: Callable[[], object] = lambda: None) -> int:
        """Apply what has come, wait until nobody is left behind, and enter the next iteration.

        Args:
            look: called again and again meanwhile.

        Returns:
            Its number.

        Raises:
            PeerError: it took too long, or cannot be; names who is waited for.
        """

        def entered() -> int | None:
            look()
            return self.advance()

        iteration: int = self._until(entered, "may not begin the next iteration")
        return iteration

    def finish(self) -> None:
        """End the iteration; see `Worker.finish`.

        Raises:
            PeerError: nothing can be sent any more; says why.
        """
        with self._using():
            self.machine.finish()
            self._journal.dropped(self.machine.dropped)

    def settle(self) -> None:
        """Wait until all workers have called this, and apply all: then replicas are equal.

        Training may go on afterwards.

        Raises:
            PeerError: it took too long; names who is waited for.
        """
        self.end()
        self.resume()

    def end(self, told_s: float = math.inf) -> None:
        """As `settle`, and train no more: whoever has `close`d after that is not missed.

        Args:
            told_s: seconds after which it is logged who is waited for.

        Raises:
            PeerError: as `settle`.
        """
        self.meet(lambda: False, told_s)

    def meet(self, over: Callable[[], bool], told_s: float = math.inf) -> bool:
        """As `end`, unless ``over`` says first that others, who had settled, go on.

        Args:
            over: asked again and again.
            told_s: as for `end`.

        Returns:
            Whether all have settled.

        Raises:
            PeerError: as `settle`.
        """
        with self._using():
            self.machine.end()

        def settled() -> bool | None:
            return self._settled() or (False if over() else None)

        if not self._until(settled, "may not end", told_s):
            return False
        if self._journal.kept:
            digest = None
            with contextlib.suppress(UsageError):  # if the model has not been forgotten meanwhile
                digest = hashlib.sha256(self._replica.copied()).hexdigest()
            self._journal.settled(self.machine.applied, digest)
        return True

    def await_decision(self, decided: Callable[[], Any], missing: Callable[[], list[int]]) -> Any:
        """Return what all have decided who had settled; meanwhile nothing is applied here.

        Args:
            decided: returns it, or None; asked again and again.
            missing: who has not said yet what it knows.

        Raises:
            PeerError: it took too long; names who is waited for.
        """

        def asked() -> Any:
            with self._using():
                pass
            return decided()

        return self._until(asked, "may not change its colayers", behind=missing)

    def gone(self) -> frozenset[int]:
        """Return the workers that are gone, also those that nobody needs where all have settled."""
        with self._using():
            return frozenset(self._presence.gone)

    def resume(self) -> None:
        """Go on after all have settled.

        Raises:
            PeerError: nothing can be sent any more; says why.
        """
        with self._using():
            self.machine.resume()

    def go_on(self, first: int) -> None:
        """Go on without having settled; see `Worker.go_on`.

        Raises:
            PeerError: nothing can be sent any more; says why.
        """
        with self._using():
            self._journal.went_on(self.machine.at)
            self.machine.go_on(first)

    def rebundle(self, pace: Pace, combine: Combine, view: View) -> None:
        """Go on with other colayers; see `Worker.rebundle`.

        Raises:
            PeerError: who has done so sooner has sent what none of this job does; names it.
        """
        with self._using():
            self.machine.rebundle(pace, combine, view)
            self._journal.rebundled(pace, self.machine.at)
            for source, incoming in list(self._incoming.items()):
                self._receive(source, incoming.rebundled(pace.colayers))

    def stay(self, over: Callable[[], bool], told_s: float = math.inf) -> None:
        """After `end`, settle again with workers that train on, until ``over``.

        They have called `settle` where this worker has called `end`.

        Args:
            over: whether all have ended for good; asked again and again.
            told_s: as for `end`.

        Raises:
            PeerError: the others neither trained nor ended in time.
        """
        deadline = self._clock() + self._timeout
        while self.undisturbed and not over():
            if self.machine.resumed_elsewhere:
                with self._using():
                    self.machine.resume()
                self.end(told_s)
                deadline = self._clock() + self._timeout
            elif self._clock() >= deadline:
                raise PeerError(
                    f"{self._me}: the other workers did not end within {self._timeout:g} s; check "
                    "that all still train, or allow more: wingbeat.init(timeout=...)"
                )
            else:
                time.sleep(_STAY_S)

    def advance(self) -> int | None:
        """Apply what has come, and enter the next iteration if that is possible now.

        Returns:
            Its number; None if others have to be waited for.

        Raises:
            PeerError: nobody can go on; says why.
        """
        self._apply()
        with self._using():
            if not self.machine.ready():
                return None
            iteration = self.machine.begin()
            self._journal.began(iteration)
            return iteration

    def _settled(self) -> bool | None:
        self._apply()
        with self._using():
            return True if self.machine.level else None

    def _apply(self) -> None:
        """Bring the replica up to date, and let others have it; nothing is locked meanwhile."""
        with self._using():
            pulled = self.machine.adopt()
        if pulled is not None:
            self._replica.put(pulled)
            self._journal.pulled(self.machine.applied)
        while True:
            with self._using():
                parts = self.machine.take()
            if parts is None:
                break
            self._replica.step(parts)
            self._journal.applied(parts)
        with self._using():
            for worker in self.machine.serve():
                message = self.machine.parameters(self._replica.copied())
                self.machine.posts.append(Post((worker,), message))

    def _until(
        self,
        what: Callable[[], Any],
        said: str,
        told_s: float = math.inf,
        behind: Callable[[], Sequence[int]] | None = None,
    ) -> Any:
        behind = behind or self.machine.behind
        # Whoever is gone, stopped or cut off is out of the roll before this.
        wait = WaitLog(self._me, "sums", self._clock)
        limit_s = MAX_WAIT_FACTOR * self._timeout
        deadline, told = wait.begun + limit_s, wait.begun + told_s
        while True:
            with self._changed:
                before = self._count
            found = what()
            if found is not None:
                return found
            with self._changed:
                now = self._clock()
                left = deadline - now
                if left <= 0:
                    raise PeerError(
                        f"{self._me}: {said} after {limit_s:g} s: waits for "
                        f"{', '.join(map(self._name, behind())) or 'sums'}; check "
                        "that all still train, or allow more: wingbeat.init(timeout=...)"
                    )
                if now >= told:
                    told = math.inf
                    log.warning(
                        f"{self._me}: has ended its training after {self.machine.at} "
                        "iterations, and makes sums for those that still train: "
                        f"{', '.join(map(self._name, behind()))}"
                    )
                wait.log_if_due(", ".join(map(self._name, behind())) or "the others")
                if self._count == before:
                    self._changed.wait(min(left, told - now, LOG_INTERVAL_S))

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Use the machine, and have sent what it says."""
        with self._changed:
            self._check()
            yield
            posts = bool(self.machine.posts)
        if posts:
            self._interrupt()

    def _check(self) -> None:
        if self._error is not None:
            raise PeerError(str(self._error))
        if self.machine.expelled:
            raise PeerError(
                f"{self._me}: the other workers took it for dead, as they had not heard from it; "
                "start it anew"
            )
        if self.machine.stranded:
            raise PeerError(
                f"{self._me}: no worker is left that has all parameters; start the job again from "
                "a checkpoint"
            )

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            until = math.inf
            while not self._ending or (self._waits(until) and self._error is None):
                self.step(self._mailbox.next(_LOOK_S))
                if self._ending and until == math.inf:
                    until = self._clock() + self._lanes.linger
        except PeerError as error:
            self._fail(error)
        except Exception as error:  # nobody hears it here: training does
            self._fail(PeerError(f"{self._me}: {type(error).__name__}: {error}"))
        finally:
            if self._attendance is not None:
                self._attendance.stop()
            with contextlib.suppress(PeerError):
                quick = self._error is not None or self._lanes.cut
                self._mailbox.close(_QUICK_S if quick else CLOSE_TIMEOUT_S)  # all has been told of

    def _waits(self, until: float) -> bool:
        """Whether something is to be done before this worker leaves."""
        return self._busy or self._clock() < until

    def _fail(self, error: PeerError) -> None:
        with self._changed:
            self._error = error
            self._count += 1
            self._changed.notify_all()

    @property
    def _busy(self) -> bool:
        return self._outgoing.busy or self._lanes.busy

    def step(self, message: Message | None) -> None:
        """Do what is to be done now, with the message that has just come if one has.

        Raises:
            PeerError: a worker has sent what none of this job does; names it.
        """
        with self._changed:
            missing = self._presence.missing()
            while message is not None:
                self._take(message)
                message = self._mailbox.poll()
            for event in self._presence.look(missing):  # after its last words
                if isinstance(event, Gone):
                    self._lose(event)
                else:
                    self._welcome(event)
            self._lanes.tick()  # what is to be passed on goes first
            self._outgoing.send()
            self._count += 1
            self._changed.notify_all()

    def _lose(self, gone: Gone) -> None:
        worker = gone.worker
        self.undisturbed = self.undisturbed and not gone.missed
        self._lanes.forget(worker)
        if worker not in self._mailbox.left:  # else it still hears the last words
            self._mailbox.drop(worker)
        self._incoming.pop(worker, None)
        self._outgoing.forget(worker, gone.life)
        if gone.missed:
            self.machine.lost(worker, gone.life)

    def _welcome(self, back: Back) -> None:
        """Connect to a worker that has come again, and let it know."""
        try:
            if back.worker in self._lanes.near:
                self._mailbox.join(back.worker, back.card)
        except UsageError as error:  # it waits in vain, and the others go on
            log.warning(f"{self._me}: {self._name(back.worker)} is not let in: {error}")
            return
        self._lanes.renew(back.worker, back.life)
        assert self._attendance is not None
        self._attendance.met(back.worker, back.life)

    def _take(self, message: Message) -> None:
        try:
            for source, kind, payload in self._lanes.take(message):
                self._hear(source, kind, payload)
        except ProtocolError as error:
            raise PeerError(
                f"{self._me}: {self._name(message.peer)} sent a malformed message: {error}"
            ) from None

    def _hear(self, source: int, kind: int, payload: Any) -> None:
        """Take in the next part of what a worker says."""
        incoming = self._incoming.get(source)
        if incoming is None:
            machine = self.machine
            incoming = Incoming(self._workers, machine.colayers, self._most, machine.epoch)
            self._incoming[source] = incoming
        self._receive(source, incoming.take(kind, payload))

    def _receive(self, source: int, messages: Iterator[tuple[int, Said]]) -> None:
        try:
            for life, said in messages:
                self.machine.receive(source, life, said)
        except Malformed as error:
            raise PeerError(
                f"{self._me}: {self._name(source)} sent a malformed message: {error}"
            ) from None

    def close(self, *, quick: bool = False) -> None:
        """Leave, when all has been sent; the others take this worker for gone.

        Args:
            quick: whether the last words may be lost, as after a failure.
        """
        if quick:
            self._fail(PeerError(f"{self._me}: training has failed here"))
        self._ending = True
        self._interrupt()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()
