"""The communication thread of a worker: sends and receives the messages of its state machine.

`Streams` deliver the messages between two workers in order. The communication thread and the
training thread share the state machine under one lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.journal import Journal
from wingbeat.methods.bounded_staleness.membership import (
    MembershipMonitor,
    WorkerLost,
    WorkerRejoined,
)
from wingbeat.methods.bounded_staleness.messages import (
    Envelope,
    Frame,
    Message,
    ViewProposal,
    decode_frames,
    decode_header,
    decode_message,
    encode_frame,
)
from wingbeat.methods.bounded_staleness.streams import BEGIN, MORE, Streams
from wingbeat.methods.bounded_staleness.worker import Combine, Worker
from wingbeat.observe.log import log
from wingbeat.schema import MalformedMessage
from wingbeat.transport.actor import QUICK_S
from wingbeat.transport.failures import LOG_INTERVAL_S, MAX_WAIT_FACTOR, WaitLog
from wingbeat.transport.graceful_shutdown import Departures
from wingbeat.transport.membership import MembershipClient, View
from wingbeat.transport.messages.frames import Message as Packet
from wingbeat.transport.messages.frames import Reassembly
from wingbeat.transport.messages.mailbox import CLOSE_TIMEOUT_S, Mailbox

if TYPE_CHECKING:
    from wingbeat.methods.bounded_staleness.replica import Replica
    from wingbeat.transport.mesh import Replica as MeshReplica

_POLL_S = 0.1  # timeout of a wait for messages
_CHECK_S = 0.05  # between checks for lost workers
_SERVE_POLL_S = 0.02  # between checks of whether all workers have finished

MAX_PAYLOAD = 1 << 36
"""Maximum payload size in bytes."""


class _Queued(NamedTuple):
    incarnation: int
    frame: Frame


class FrameSender:
    """Sends the messages of a machine in parts: small frames are combined, large ones split."""

    def __init__(self, machine: Worker, streams: Streams) -> None:
        self._machine, self._streams = machine, streams
        self._queues: dict[int, deque[_Queued]] = {}
        self._rest: dict[int, Iterator[memoryview]] = {}  # the rest of a payload sent in parts
        self._blocked: dict[int, tuple[int, Any]] = {}  # a part for which its stream has no room
        self._removed: dict[int, int] = {}  # the last ended incarnation of each worker
        self._last = machine.rank  # the receiver of the last part

    @property
    def busy(self) -> bool:
        """Whether messages are pending."""
        return bool(self._queues or self._machine.outbox)

    def remove_worker(self, worker: int, incarnation: int) -> None:
        """Discard all messages for an ended incarnation; keep those for a later one."""
        self._removed[worker] = incarnation
        self._blocked.pop(worker, None)
        self._rest.pop(worker, None)
        queue = self._queues.pop(worker, ())
        later = deque(each for each in queue if each.incarnation > incarnation)
        if later:
            self._queues[worker] = later

    def send_pending(self) -> None:
        """Send as much as the streams have room for."""
        while self._machine.outbox:
            self._enqueue(self._machine.outbox.popleft())
        # One part to each worker in turn, from the next rank on, so that not all workers send to
        # the same one at a time.
        turns = deque(sorted(self._queues, key=lambda worker: (worker <= self._last, worker)))
        while turns:
            worker = turns.popleft()
            if self._send_part(worker):
                self._last = worker
                turns.append(worker)
            elif not self._queues[worker] and worker not in self._blocked:
                del self._queues[worker]

    def _enqueue(self, envelope: Envelope) -> None:
        message, machine = envelope.message, self._machine
        frame = encode_frame(message, machine.incarnation, machine.epoch)
        for worker in envelope.to:
            incarnation = self._receiving_incarnation(worker, message)
            # The machine still addresses a worker that left after all had drained.
            if incarnation > self._removed.get(worker, -1):
                self._queues.setdefault(worker, deque()).append(_Queued(incarnation, frame))

    def _receiving_incarnation(self, worker: int, message: Message) -> int:
        """Return the incarnation that a message is for; -1 if the receiver is dead."""
        known, current = self._machine.incarnation_of(worker), self._streams.incarnation(worker)
        if known is None:
            return current
        return max(known, current) if isinstance(message, ViewProposal) else known

    def _send_part(self, worker: int) -> bool:
        """Send the next part to a worker; return False if there is none, or no room."""
        part = self._blocked.pop(worker, None) or self._next_part(worker)
        if part is None or self._streams.send(worker, *part):
            return part is not None
        self._blocked[worker] = part
        return False

    def _next_part(self, worker: int) -> tuple[int, Any] | None:
        rest = self._rest.get(worker)
        if rest is not None:
            if (chunk := next(rest, None)) is not None:
                return MORE, chunk
            del self._rest[worker]
        queue, current = self._queues[worker], self._streams.incarnation(worker)
        while queue and current > queue[0].incarnation:
            queue.popleft()
        if not queue or current < queue[0].incarnation:  # not connected again yet
            return None
        header, payload = queue.popleft().frame
        largest = self._streams.largest
        if payload and len(header) + len(payload) > largest:
            starts = range(0, len(payload), largest)
            self._rest[worker] = (payload[start : start + largest] for start in starts)
            return BEGIN, header
        room = largest - len(header) - len(payload)
        together: list[bytes | memoryview] = [header, payload]
        while queue and queue[0].incarnation == current:
            header, payload = queue[0].frame
            room -= len(header) + len(payload)
            if room < 0:
                break
            queue.popleft()
            together += header, payload
        return BEGIN, b"".join(together)


class FrameReceiver:
    """Assembles the messages of one worker from parts."""

    def __init__(
        self, workers: int, colayers: int, max_payload: int = MAX_PAYLOAD, epoch: int = 0
    ) -> None:
        self._workers, self._colayers, self._max_payload = workers, colayers, max_payload
        self._epoch = epoch
        self._early: list[tuple[Sequence[int], bytearray | None]] = []  # messages of the next epoch
        self._words: Sequence[int] = ()  # words of the frame with an incomplete payload
        self._payload: Reassembly | None = None

    def receive_part(self, kind: int, part: Any) -> Iterator[tuple[int, Message]]:
        """Yield the sender's incarnation and the message for each complete message.

        Messages of the next epoch wait for `change_colayers`. A malformed part raises
        MalformedMessage.
        """
        if (kind == BEGIN) != (self._payload is None):
            raise MalformedMessage(f"unexpected part of kind {kind}")
        if (payload := self._payload) is not None:
            try:
                payload.append(part)
            except ValueError as error:
                raise MalformedMessage(str(error)) from None
            if payload.complete:
                self._payload = None
                yield from self._decode(self._words, payload.data)
            return
        for frame in decode_frames(part, self._max_payload):
            if len(frame.payload) < frame.payload_nbytes:
                self._words, self._payload = frame.words, Reassembly(frame.payload_nbytes)
            else:
                # Kernels need aligned memory; the copy is aligned.
                yield from self._decode(frame.words, bytearray(frame.payload) or None)

    def change_colayers(self, colayers: int) -> Iterator[tuple[int, Message]]:
        """Start the next epoch with this many colayers; yield its messages that arrived early."""
        self._colayers, self._epoch = colayers, self._epoch + 1
        early, self._early = self._early, []
        for words, payload in early:
            yield from self._decode(words, payload)

    def _decode(
        self, words: Sequence[int], payload: bytearray | None
    ) -> Iterator[tuple[int, Message]]:
        header = decode_header(words)
        epoch = header.epoch
        if epoch == self._epoch:
            message = decode_message(header, words, self._workers, self._colayers, payload)
            yield header.incarnation, message
        elif epoch > self._epoch + 1:
            raise MalformedMessage(f"epoch is {epoch}; this worker is in epoch {self._epoch}")
        elif epoch > self._epoch:
            self._early.append((words, payload))


class CommunicationThread:
    """Connects a worker's state machine to the other workers.

    Unless ``tolerates_loss``, training ends on all workers when one is lost, so that the parts of a
    partitioned network do not both continue. Without ``membership`` each worker decides by itself
    which workers are lost. The replica is held weakly: the thread does not keep the model alive.
    ``name`` returns the name of a worker in messages. ``inside`` are the ranks that hold this
    worker's model together, if there are several: another of them may block the training thread
    while it waits in its own column, so that this thread has to answer requests for parameters.

    Attributes:
        no_failures: whether no worker was lost, and this one is in its first incarnation.
        applying_ns: nanoseconds spent applying rounds.
        replica_released: whether to apply no more rounds to the model.
    """

    def __init__(
        self,
        machine: Worker,
        mailbox: Mailbox,
        replica: Replica,
        *,
        timeout: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        tolerates_loss: bool = True,
        departures: Departures | None = None,
        streams: Streams | None = None,
        membership: MembershipClient | None = None,
        journal: Journal | None = None,
        name: Callable[[int], str] = "rank {}".format,
        inside: MeshReplica | None = None,
    ) -> None:
        self.machine, self._mailbox = machine, mailbox
        self._replica, self.replica_released = weakref.ref(replica), False
        self._name, self._me = name, name(machine.rank)
        self._answers, self._applying = inside is not None, False
        self._timeout, self._clock = timeout, clock
        if streams is None:
            streams = Streams(mailbox, machine.rank, machine.workers, begin=timeout, clock=clock)
        self._streams, self._membership = streams, membership
        self._journal = journal or Journal(
            None, machine.rank, machine.incarnation, machine.workers, machine.bound
        )
        self._detector = MembershipMonitor(
            mailbox, streams, machine, membership, tolerates_loss=tolerates_loss,
            departures=departures or Departures(None, self._me), name=name, inside=inside,
            clock=clock,
        )  # fmt: skip
        self._checked = -math.inf
        self._changed = threading.Condition()
        self._interrupt = mailbox.interrupter()
        self._sender = FrameSender(machine, streams)
        self._receivers: dict[int, FrameReceiver] = {}
        self._error: PeerError | None = None
        self._closing = False
        self._events = 0  # a counter, so that training misses no event between two checks
        self.no_failures, self.applying_ns = machine.incarnation == 0, 0
        self._thread = threading.Thread(
            target=self._run, name="wingbeat-communication", daemon=True
        )

    # -- called by the training thread ----------------------------------------------------

    def start(self, keep: object = None) -> None:
        """Start the thread and the membership client; the thread keeps ``keep`` alive."""
        self._keep = keep
        if self._membership is not None:
            self._membership.start(self._interrupt)
        self._thread.start()

    def send_colayer(self, colayer: int, payloads: Sequence[bytes | bytearray | None]) -> bool:
        """Send the pieces of a colayer; see `Worker.send_colayer`."""
        with self._lock_machine():
            iteration = self.machine.iteration
            sent = self.machine.send_colayer(colayer, payloads)
            if sent:
                self._journal.sent(iteration, colayer)
            return sent

    def begin_iteration(self, poll: Callable[[], object] = lambda: None) -> int:
        """Wait until the bound allows the next iteration, enter it, and return its number."""

        def entered() -> int | None:
            poll()
            return self.try_begin_iteration()

        iteration: int = self._wait_for(entered, "cannot begin the next iteration")
        return iteration

    def try_begin_iteration(self) -> int | None:
        """Apply rounds and enter the next iteration; return None if the bound forbids it."""
        self._apply_rounds()
        with self._lock_machine():
            if not self.machine.can_begin():
                return None
            iteration = self.machine.begin_iteration()
            self._journal.began(iteration)
            return iteration

    def end_iteration(self) -> None:
        """End the iteration; see `Worker.end_iteration`."""
        with self._lock_machine():
            self.machine.end_iteration()
            self._journal.dropped(self.machine.last_dropped)

    def finish(
        self, log_after_s: float = math.inf, cancelled: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until all workers have called this, and apply all rounds; then `resume` or `close`.

        A worker that closes then is not lost. Return False if drained workers resume before this
        one has drained (``cancelled()`` is true).
        """
        with self._lock_machine():
            self.machine.finish()

        def drained() -> bool | None:
            return self._is_drained() or (False if cancelled() else None)

        if not self._wait_for(drained, "cannot finish", log_after_s):
            return False
        if self._journal.enabled:
            digest = None
            with contextlib.suppress(UsageError):  # the model may have been garbage-collected
                digest = hashlib.sha256(self._state_bytes()).hexdigest()
            self._journal.drained(self.machine.applied, digest)
        return True

    def await_decision(self, decided: Callable[[], Any], missing: Callable[[], list[int]]) -> Any:
        """Wait for a decision of all drained workers; apply no round meanwhile."""

        def poll() -> Any:
            with self._lock_machine():
                pass
            return decided()

        return self._wait_for(poll, "cannot change its colayers", behind=missing)

    def lost_workers(self) -> frozenset[int]:
        """Return the lost workers, including those that left after all had drained."""
        with self._lock_machine():
            return frozenset(self._detector.lost)

    def resume(self) -> None:
        """Resume after all have drained."""
        with self._lock_machine():
            self.machine.resume()

    def resume_at(self, first: int) -> None:
        """Resume without being drained; see `Worker.resume_at`."""
        with self._lock_machine():
            self._journal.resumed(self.machine.iteration)
            self.machine.resume_at(first)

    def change_colayers(self, bound: StalenessBound, combine: Combine, view: View) -> None:
        """Continue with other colayers; see `Worker.change_colayers`."""
        with self._lock_machine():
            self.machine.change_colayers(bound, combine, view)
            self._journal.changed_colayers(bound, self.machine.iteration)
            for source, receiver in list(self._receivers.items()):
                self._receive(source, source, receiver.change_colayers(bound.colayers))

    def serve_until(self, finished: Callable[[int], bool], log_after_s: float = math.inf) -> None:
        """After `finish`, drain again with workers that have resumed, until all are ``finished``.

        A worker that was lost after it had drained is not awaited. Raises PeerError if the others
        neither trained nor finished in time.
        """
        workers, deadline = range(self.machine.workers), self._clock() + self._timeout
        while self.no_failures:
            lost = self.lost_workers()
            if all(worker in lost or finished(worker) for worker in workers):
                return
            if self.machine.peer_resumed:
                self.resume()
                self.finish(log_after_s)
                deadline = self._clock() + self._timeout
            elif self._clock() >= deadline:
                raise PeerError(
                    f"{self._me}: the other workers did not finish within {self._timeout:g} s; "
                    "check that all still train, or set a longer wingbeat.init(timeout=...)"
                )
            else:
                time.sleep(_SERVE_POLL_S)

    def close(self, *, quick: bool = False) -> None:
        """Send pending messages and end the thread; the others treat this worker as exited."""
        if quick:
            self._fail(PeerError(f"{self._me}: training has failed here"))
        self._closing = True
        self._interrupt()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _is_drained(self) -> bool | None:
        self._apply_rounds()
        with self._lock_machine():
            return True if self.machine.fully_applied else None

    def _apply_rounds(self) -> None:
        """Apply received rounds without the lock, and answer pull requests."""
        with self._lock_machine():
            pulled = self.machine.take_pulled_state()
            self._applying = pulled is not None
        if pulled is not None:
            if (replica := self._replica()) is not None:
                replica.load_state(pulled)
            self._journal.pulled(self.machine.applied)
        while True:
            with self._lock_machine():
                parts = self.machine.take_round()
                self._applying = parts is not None
            if parts is None:
                break
            if not self.replica_released and (replica := self._replica()) is not None:
                begin = time.monotonic_ns()
                replica.apply_round(parts)
                self.applying_ns += time.monotonic_ns() - begin
            replica = None  # holds the model no longer than it is used
            self._journal.applied(parts)
        with self._lock_machine():
            self._answer_pulls()

    def _answer_pulls(self) -> None:
        """Send the parameters, in which all rounds are that the machine counts as applied."""
        for worker in self.machine.take_pull_requests():
            response = self.machine.pull_response(self._state_bytes())
            self.machine.outbox.append(Envelope((worker,), response))

    def _state_bytes(self) -> bytes:
        replica = self._replica()
        if replica is None:
            raise UsageError(
                "another worker requests the parameters of a model that is gone here: keep a "
                "reference to the model until training has ended"
            )
        return replica.state_bytes()

    def _wait_for(
        self,
        condition: Callable[[], Any],
        failure: str,
        log_after_s: float = math.inf,
        behind: Callable[[], Sequence[int]] | None = None,
    ) -> Any:
        """Wait until ``condition`` returns a value other than None."""
        lagging = behind or self.machine.lagging_peers
        # The limit exceeds the time in which a lost worker is detected.
        wait = WaitLog(self._me, "sums", self._clock)
        limit_s = MAX_WAIT_FACTOR * self._timeout
        deadline, log_at = wait.begun + limit_s, wait.begun + log_after_s
        while True:
            with self._changed:
                events = self._events
            found = condition()
            if found is not None:
                return found
            with self._changed:
                now = self._clock()
                names = ", ".join(map(self._name, lagging()))
                if now >= deadline:
                    raise PeerError(
                        f"{self._me}: {failure} after {limit_s:g} s: waiting for "
                        f"{names or 'sums'}; check that all still train, or set a longer "
                        "wingbeat.init(timeout=...)"
                    )
                if now >= log_at:
                    log_at = math.inf
                    log.warning(
                        f"{self._me}: finished training after {self.machine.iteration} "
                        f"iterations, and sums gradients for workers that still train: {names}"
                    )
                wait.log_if_due(names or "the others")
                if self._events == events:
                    self._changed.wait(min(deadline - now, log_at - now, LOG_INTERVAL_S))

    @contextlib.contextmanager
    def _lock_machine(self) -> Iterator[None]:
        """Lock the machine, and wake the thread to send its messages."""
        with self._changed:
            self._raise_if_failed()
            yield
            pending = bool(self.machine.outbox)
        if pending:
            self._interrupt()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise PeerError(str(self._error))
        if self.machine.expelled:
            raise PeerError(
                f"{self._me}: removed by the other workers, which received nothing from it; "
                "restart this worker"
            )
        if self.machine.stranded:
            raise PeerError(
                f"{self._me}: no remaining worker has all parameters; start the job again from a "
                "checkpoint"
            )

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            linger_until = math.inf
            # Until all is sent; other workers may also need this one to forward their messages.
            while not self._closing or (
                self._error is None
                and (self._sender.busy or self._streams.busy or self._clock() < linger_until)
            ):
                self.process(self._mailbox.next(_POLL_S))
                if self._closing and linger_until == math.inf:
                    linger_until = self._clock() + self._streams.linger
        except PeerError as error:
            self._fail(error)
        except Exception as error:  # raised in the training thread
            self._fail(PeerError(f"{self._me}: {type(error).__name__}: {error}"))
        finally:
            if self._membership is not None:
                self._membership.stop()
            with contextlib.suppress(PeerError):
                quick = self._error is not None or self._streams.cut
                self._mailbox.close(QUICK_S if quick else CLOSE_TIMEOUT_S)

    def _fail(self, error: PeerError) -> None:
        with self._changed:
            self._error = error
            self._notify_training()

    def _notify_training(self) -> None:
        self._events += 1
        self._changed.notify_all()

    def process(self, packet: Packet | None) -> None:
        """Process received packets, lost workers and pending messages."""
        with self._changed:
            now = self._clock()
            due = now >= self._checked + _CHECK_S
            suspects = self._detector.suspects() if due else {}
            while packet is not None:
                self._receive_packet(packet)
                packet = self._mailbox.poll()
            if due:
                self._checked = now
                for event in self._detector.poll(suspects):  # after a lost worker's last messages
                    if isinstance(event, WorkerLost):
                        self._remove_worker(event)
                    else:
                        self._readmit_worker(event)
            if self._answers and not self._applying and self._replica() is not None:
                self._answer_pulls()
            self._streams.tick()  # forwarded packets are sent first
            self._sender.send_pending()
            self._notify_training()

    def _remove_worker(self, event: WorkerLost) -> None:
        worker = event.worker
        self.no_failures = self.no_failures and not event.needed
        self._streams.forget(worker)
        if worker not in self._mailbox.left:  # a worker that left still receives the last messages
            self._mailbox.drop(worker)
        self._receivers.pop(worker, None)
        self._sender.remove_worker(worker, event.incarnation)
        if event.needed:
            self.machine.mark_lost(worker, event.incarnation)

    def _readmit_worker(self, event: WorkerRejoined) -> None:
        try:
            if event.worker in self._streams.near:
                self._mailbox.join(event.worker, event.peer_info)
        except UsageError as error:  # the rejecting worker continues; the restarted one times out
            log.warning(f"{self._me}: cannot accept {self._name(event.worker)} again: {error}")
            return
        self._streams.renew(event.worker, event.incarnation)
        assert self._membership is not None
        self._membership.acknowledge(event.worker, event.incarnation)

    def _receive_packet(self, packet: Packet) -> None:
        machine = self.machine
        try:
            for source, kind, part in self._streams.receive(packet):
                if source not in self._receivers:
                    self._receivers[source] = FrameReceiver(
                        machine.workers, machine.colayers, epoch=machine.epoch
                    )
                parts = self._receivers[source].receive_part(kind, part)
                self._receive(source, packet.peer, parts)
        except MalformedMessage as error:
            raise self._malformed(packet.peer, packet.peer, error) from None

    def _receive(self, source: int, via: int, messages: Iterator[tuple[int, Message]]) -> None:
        try:
            for incarnation, message in messages:
                self.machine.receive(source, incarnation, message)
        except MalformedMessage as error:
            raise self._malformed(source, via, error) from None

    def _malformed(self, source: int, via: int, error: Exception) -> PeerError:
        who = self._name(source)
        if via != source:  # either of them may be at fault
            who += f", or {self._name(via)}, which forwarded it,"
        return PeerError(f"{self._me}: {who} sent a malformed message: {error}")
