"""The group generator's process: it serves requests, and detects dead and slow workers."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, NamedTuple

from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.methods.model_averaging.client import (
    _GENERATOR_LOST,
    Client,
    StaticClient,
    StatusTable,
)
from wingbeat.methods.model_averaging.generator import (
    ID_LIMIT,
    Generator,
    Kind,
    ProtocolError,
    Reason,
    Run,
    encode_members,
    run_ids,
)
from wingbeat.methods.model_averaging.rules import Layout, Rules
from wingbeat.transport.background import BackgroundThread
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.endpoint import Limits, Message
from wingbeat.transport.messages.mailbox import CLOSE_TIMEOUT_S, RECONNECT_S, Mailbox
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info
from wingbeat.transport.store import AtomicStore, Store

_log = logging.getLogger(__name__)


_POLL_S = 0.25
"""Interval between the generator's reads of the rejoin log, in seconds."""


_READ_S = 5.0
"""Timeout of a read of an existing key, in seconds."""


class Rejoin(NamedTuple):
    """A restarted worker.

    Attributes:
        incarnation: the number of its restarts; 0 is the first process.
        card: the address of its mailbox.
    """

    worker: int
    incarnation: int
    card: PeerInfo


def next_incarnation(store: Store, room: str, worker: int) -> int:
    """Return the incarnation of a restarted ``worker``; RendezvousError without the store."""
    try:
        incarnation, index = 1, 0
        while store.has(_entry(room, index)):
            entry = _parse_entry(store.get(_entry(room, index), _READ_S))
            incarnation += entry is not None and entry[0] == worker
            index += 1
    except TimeoutError as error:
        raise RendezvousError(f"rank {worker}: cannot rejoin: {error}") from None
    return incarnation


def announce_rejoin(
    store: AtomicStore, room: str, worker: int, incarnation: int, timeout: float
) -> None:
    """Append ``worker`` to the rejoin log, and wait until the generator has connected to it.

    Raises RendezvousError if the generator is lost, or does not answer within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    text, index = json.dumps([worker, incarnation]), 0
    try:
        while store.claim(_entry(room, index), text) != text:
            index += 1
        while not store.has(_confirmed(room, worker, incarnation)):
            if store.has(f"{room}/{_GENERATOR_LOST}"):
                raise RendezvousError(
                    f"rank {worker}: cannot rejoin: the group generator has died, and the "
                    "others go on without one; start all workers again from a checkpoint"
                )
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rank {worker}: rejoined, and the group generator did not answer within "
                    f"{timeout:g} s; check that rank 0 runs, which has started it"
                )
            time.sleep(0.05)
    except TimeoutError as error:
        raise RendezvousError(f"rank {worker}: cannot rejoin: {error}") from None


class RejoinLog:
    """The generator's reader of the rejoin log, with a thread because the store may block.

    Attributes:
        generator_lost: whether a worker has published that it continues without the generator.
    """

    def __init__(self, store: Store, room: str, workers: int) -> None:
        self._store, self._room, self._workers = store, room, workers
        self._read = 0
        self._rejoined: deque[Rejoin] = deque()
        self._to_confirm: deque[tuple[int, int]] = deque()
        self._stopped = threading.Event()
        self.generator_lost = False
        self._thread = BackgroundThread(self._run, "wingbeat-rejoin-log")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current call of the store."""
        self._stopped.set()

    def next_rejoin(self) -> Rejoin | None:
        """Return the next restarted worker, if any; RendezvousError if the thread has failed."""
        if self._thread.failure:
            raise RendezvousError(f"group generator: {self._thread.failure}")
        return self._rejoined.popleft() if self._rejoined else None

    def confirm(self, rejoin: Rejoin) -> None:
        """Publish to a restarted worker that the generator has connected to it."""
        self._to_confirm.append(rejoin[:2])

    def poll(self) -> None:
        """Read new entries, and write confirmations."""
        while self._to_confirm:
            self._store.set(_confirmed(self._room, *self._to_confirm.popleft()), "1")
        while self._store.has(key := _entry(self._room, self._read)):
            entry, card = _parse_entry(self._store.get(key, _READ_S)), None
            if entry is None:
                _log.warning("ignoring the malformed value of %s in the store", key)
            elif entry[0] < self._workers:
                try:
                    card = read_peer_info(self._store, self._room, *entry, _READ_S)
                except ValueError as error:
                    _log.warning("rank %d rejoins, and is refused: %s", entry[0], error)
            self._read += 1  # after the reads, so that an entry whose read timed out is read again
            if entry is not None and card is not None:
                self._rejoined.append(Rejoin(*entry, card))
        lost = f"{self._room}/{_GENERATOR_LOST}"
        self.generator_lost = self.generator_lost or self._store.has(lost)

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            # A worker that rejoins raises when its own wait times out.
            with contextlib.suppress(TimeoutError, RuntimeError):
                self.poll()


def _entry(room: str, index: int) -> str:
    return f"{room}/rejoin/{index}"


def _confirmed(room: str, worker: int, incarnation: int) -> str:
    return f"{room}/confirmed/{worker}.{incarnation}"


def _parse_entry(text: str) -> tuple[int, int] | None:
    try:
        match json.loads(text):
            case [int(worker), int(incarnation)] if worker >= 0 and incarnation > 0:
                return worker, incarnation
    except (ValueError, RecursionError):
        pass
    return None


FACTOR = 8.0
"""Timeout of a step, as a multiple of its worker's usual step."""


MIN_TIMEOUT_S = 2.0
"""Lower bound of the timeout of a step, in seconds."""


CAPACITY = 16
"""Number of groups whose connections a worker keeps open."""


SILENCE_S = 5.0
"""Seconds without a message after which an awaited worker, or the generator, is dead."""


_DECAY = 0.9
"""Factor per step by which a worker's longest step decays."""


_CHECK_S = 0.25
"""Interval between checks for dead and slow workers, in seconds."""


_BATCH = 256
"""Messages that are handled between two checks."""


_KEEPALIVE_S = 5.0
"""Maximum interval between keepalive messages to waiting workers, in seconds."""


_QUICK_CLOSE_S = 1.0
"""Timeout of the shutdown if the worker that started this process has exited, in seconds."""


class AdaptiveTimeout:
    """Timeouts of steps, adapted to each worker's own step times. Time is passed in.

    ``first_s`` is the timeout while a worker's usual step is unknown, that is of its first step.
    """

    def __init__(
        self, workers: int, first_s: float, factor: float = FACTOR, min_s: float = MIN_TIMEOUT_S
    ) -> None:
        self.first_s, self._factor, self._min_s = first_s, factor, min_s
        self._usual_s = [0.0] * workers
        self._since: list[float | None] = [None] * workers
        self._paused: set[int] = set()
        self._steps = [0] * workers

    def start_step(self, worker: int, now: float) -> None:
        """Record that ``worker`` starts a step."""
        self._since[worker] = now

    def start_paused_step(self, worker: int, now: float) -> None:
        """Record that ``worker`` starts a step after a synchronization, or a copy of a state.

        It may evaluate and save first, so its timeout is that of a first step, and its duration
        does not count as usual.
        """
        self._since[worker] = now
        self._paused.add(worker)

    def stop(self, worker: int) -> None:
        """Record that ``worker`` waits for others."""
        self._since[worker] = None

    def start_completion(self, worker: int, now: float) -> None:
        """Record that others have completed a group that ``worker`` has not completed."""
        if self._since[worker] is None:
            self._since[worker] = now

    def end_step(self, worker: int, now: float) -> None:
        """Record that ``worker`` has ended a step."""
        since, self._since[worker] = self._since[worker], None
        if worker in self._paused:
            self._paused.discard(worker)
        elif since is not None:
            self._steps[worker] += 1
            # The first step includes warm-up, and counts only until there is another one.
            decay = _DECAY if self._steps[worker] > 2 else 0.0
            self._usual_s[worker] = max(now - since, decay * self._usual_s[worker])

    def reset(self, worker: int) -> None:
        """Drop the step times of ``worker``; a restarted process may differ."""
        self._usual_s[worker], self._since[worker], self._steps[worker] = 0.0, None, 0
        self._paused.discard(worker)

    def timeout_s(self, worker: int) -> float:
        """Return the timeout of the worker's current step."""
        usual_s = 0.0 if worker in self._paused else self._usual_s[worker]
        return max(self._min_s, self._factor * usual_s) if usual_s else self.first_s

    def is_unusual(self, worker: int, now: float) -> bool:
        """Whether the step takes twice as long as usual, so that the worker may be dead."""
        since = self._since[worker]
        return since is not None and now - since > 2 * self._usual_s[worker]

    def is_overdue(self, worker: int, now: float) -> bool:
        """Whether the step has timed out."""
        since = self._since[worker]
        return since is not None and now - since > self.timeout_s(worker)


class ConnectionCache:
    """Decides which groups' connections stay open. Members with open connections keep their id.

    The paper keeps NCCL communicators until there are 64, and then makes one for each average
    (section 6.1). Here each worker keeps the connections of its most recent groups. The generator
    tracks all of them, decides which are closed, and notifies every member before it opens others.

    Raises:
        UsageError: the capacity is less than 1.
    """

    def __init__(self, workers: int, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise UsageError(
                f"ConnectionCache(capacity={capacity}): allowed are 1 group a worker and more"
            )
        self._capacity = capacity
        self._open: list[OrderedDict[tuple[int, ...], None]] = [
            OrderedDict() for _ in range(workers)
        ]
        self._ids: dict[tuple[int, ...], int] = {}
        self._closed: list[list[int]] = [[] for _ in range(workers)]
        self._last_id = 0

    def id_of(self, members: Sequence[int]) -> int:
        """Return the id of the members' connections, from 1 on; a new one if they are not open.

        Closes the least recently used connections of each member that has too many.
        """
        key = tuple(sorted(members))
        if key not in self._ids:
            for member in key:
                if len(self._open[member]) >= self._capacity:
                    self._close(next(iter(self._open[member])))
            self._ids[key] = self.new_id()
        for member in key:
            self._open[member][key] = None
            self._open[member].move_to_end(key)
        return self._ids[key]

    def new_id(self) -> int:
        """Return a new id, for connections that are not kept."""
        self._last_id += 1
        return self._last_id

    def close_all(self, worker: int) -> None:
        """Close all connections of a worker, because they may be broken."""
        for key in list(self._open[worker]):
            self._close(key)

    def pop_closed(self, worker: int) -> list[int]:
        """Return the ids that ``worker`` must close before it opens others; each once."""
        ids, self._closed[worker] = self._closed[worker], []
        return ids

    def _close(self, key: tuple[int, ...]) -> None:
        number = self._ids.pop(key)
        for member in key:
            del self._open[member][key]
            self._closed[member].append(number)


class GroupService:
    """Serves one job's group generator.

    The mailbox is connected to all workers, numbered by rank. ``rejoins`` are the restarted
    workers; None if there are none.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        generator: Generator,
        workers: int,
        timeouts: AdaptiveTimeout,
        connections: ConnectionCache | None = None,
        clock: Callable[[], float] = time.monotonic,
        rejoins: RejoinLog | None = None,
    ) -> None:
        self._mailbox, self._generator, self._workers = mailbox, generator, workers
        self._timeouts, self._clock = timeouts, clock
        self._connections = connections or ConnectionCache(workers)
        self._rejoins = rejoins
        self._checked_at = clock()
        self._gone: set[int] = set()  # send no more messages
        self._silent: set[int] = set()  # send no messages, but may again
        self._stale: set[int] = set()  # were silent, and have not copied a state since
        self._probed: set[int] = set()
        self._synchronizing: set[int] = set()  # their group of all workers is not done
        self._behind: set[int] = set()  # groups have continued without them
        self._missed: set[int] = set()  # others have synchronized without them
        self._fetching: set[int] = set()
        self._kept_alive_at = self._checked_at
        self._requests = [0] * workers
        for worker in range(workers):
            timeouts.start_step(worker, self._checked_at)

    def run(self, parent: Callable[[], bool] = lambda: True) -> None:
        """Serve until all workers have left, or a worker has fallen back.

        It also ends when ``parent()`` is false: rank 0, which has started this process, has exited.
        """
        while len(self._gone | self._silent) < self._workers and parent():
            # If this process was suspended, workers may have continued without it.
            if self._rejoins is not None and self._rejoins.generator_lost:
                break
            self.step(self._mailbox.next(_CHECK_S))
        if not parent() and 0 not in self._gone:
            self._remove_for_good(0)  # otherwise each of the others would have to detect it
        with contextlib.suppress(PeerError):  # dead workers do not confirm the shutdown
            self._mailbox.close(CLOSE_TIMEOUT_S if parent() else _QUICK_CLOSE_S)

    def step(self, message: Message | None) -> None:
        """Handle the given message, further ones that have arrived, and checks that are due."""
        for _ in range(_BATCH):
            if message is None:
                break
            self._receive(message.peer, message.kind, message.ids)
            message = self._mailbox.poll()
        if message is not None:
            self._receive(message.peer, message.kind, message.ids)
        while self._rejoins is not None and (rejoin := self._rejoins.next_rejoin()) is not None:
            self._connect(rejoin, self._rejoins)
        now = self._clock()
        if now - self._checked_at > _CHECK_S:
            self._checked_at = now
            self._check_workers(now)

    def _receive(self, worker: int, kind: int, ids: Sequence[int]) -> None:
        if worker in self._gone:
            return
        if worker in self._silent:
            self._end_silence(worker)
        try:
            runs = self._handle(worker, kind, ids)
        except ProtocolError as error:
            self._send(worker, Kind.REFUSED, payload=str(error).encode())
            self._remove_for_good(worker)
            return
        self._start(runs)

    def _handle(self, worker: int, kind: int, ids: Sequence[int]) -> list[Run]:
        generator, now = self._generator, self._clock()
        self._probed.discard(worker)
        match kind:
            case Kind.REQUEST:
                return self._handle_request(worker, now, copies_state=bool(ids[0]))
            case Kind.SYNCHRONIZE:
                return self._handle_request(worker, now, synchronize=True)
            case Kind.DONE:
                return self._handle_done(worker, ids[0], ids[1], now)
            case Kind.LOST:
                if generator.run_together(worker, ids[0], ids[1], ids[2]):
                    return self._remove(ids[2])
                return []  # The group already runs without that member.
            case Kind.FETCH_STATE:
                self._handle_fetch(worker, now, join=bool(ids[1]))
                self._find_sender(worker, ids[0] - 1)
                return []
            case Kind.KEEPALIVE:
                return []
        raise ProtocolError(f"a message of kind {kind}")

    def _handle_request(
        self, worker: int, now: float, *, copies_state: bool = False, synchronize: bool = False
    ) -> list[Run]:
        """Handle a request for a group, or for one of all workers; add an excluded worker.

        Not one that ``copies_state``, which may be at another fragment, or that was silent, whose
        model is old. Without other workers it has missed nothing.
        """
        generator = self._generator
        self._requests[worker] += 1
        if worker in self._fetching:  # it has a peer's state by now
            self._fetching.discard(worker)
            self._behind.discard(worker)
            self._stale.discard(worker)
            self._missed.discard(worker)
        must_fetch = worker in self._stale or (copies_state and worker in self._behind)
        if must_fetch and not synchronize and self._others(worker):
            self._send_membership(worker, worker)
            return []
        if worker not in generator:
            generator.add(worker)
            self._broadcast_membership(Kind.ADDED, worker)
        if not synchronize:
            self._timeouts.end_step(worker, now)
            return generator.request(worker)
        self._timeouts.stop(worker)
        self._synchronizing.add(worker)
        return generator.synchronize(worker)

    def _others(self, worker: int) -> list[int]:
        return [w for w in range(self._workers) if w != worker and w in self._generator]

    def _handle_fetch(self, worker: int, now: float, *, join: bool) -> None:
        generator = self._generator
        self._fetching.add(worker)
        self._behind.add(worker)
        if join and worker not in generator:
            generator.add(worker, at_once=True)
            self._broadcast_membership(Kind.ADDED, worker)
        if worker in generator and not generator.is_waiting(worker):
            self._timeouts.start_paused_step(worker, now)

    def _handle_done(self, worker: int, number: int, epoch: int, now: float) -> list[Run]:
        generator, timeouts = self._generator, self._timeouts
        others = generator.unfinished(worker)
        runs = generator.acknowledge(worker, number, epoch)
        if worker not in generator:
            return runs
        if generator.is_waiting(worker):
            timeouts.stop(worker)
        elif worker in self._synchronizing:
            self._synchronizing.discard(worker)
            self._behind.discard(worker)
            self._stale.discard(worker)
            timeouts.start_paused_step(worker, now)
        else:
            timeouts.start_step(worker, now)
        for other in others:
            if other != worker:
                timeouts.start_completion(other, now)
        return runs

    def _start(self, runs: Iterable[Run]) -> None:
        """Send members the groups to run; remove a member that cannot be reached."""
        due = deque(runs)
        while due:
            run = due.popleft()
            connection = self._connections.id_of(run.members) if len(run.members) > 1 else 0
            if run.members[0] in self._synchronizing:
                if len(run.members) == 1:
                    self._send_inactive(run.members[0])  # with the reasons as known by now
                self._missed |= {w for w in range(self._workers) if w not in self._generator}
                self._missed.difference_update(run.members)
            for member in run.members:
                payload = encode_members(run.members, self._connections.pop_closed(member))
                if not self._send(member, Kind.RUN, run_ids(run, connection), payload):
                    due += self._remove(member)
                    break  # The others run the next epoch.

    def _find_sender(self, receiver: int, lost: int) -> None:
        """Let an active worker send its state to ``receiver``; ``lost`` only without any other."""
        generator = self._generator
        senders = self._others(receiver)
        senders.sort(key=lambda w: (w == lost, w in self._behind, not generator.is_waiting(w)))
        for sender in senders:
            ids = (sender, receiver, self._connections.new_id(), 0)
            if self._send(sender, Kind.SEND_STATE, ids):
                self._send(receiver, Kind.SEND_STATE, ids)
                return
        self._send(receiver, Kind.SEND_STATE, (receiver, receiver, 0, 0))

    def _connect(self, rejoin: Rejoin, rejoins: RejoinLog) -> None:
        """Connect to a restarted worker. Its first request makes it active."""
        worker = rejoin.worker
        self._remove_for_good(worker)  # the loss of the old process may not be detected yet
        try:
            self._mailbox.join(worker, rejoin.card)
        except UsageError:
            return  # Its mailbox has other options. Its own wait times out.
        self._gone.discard(worker)
        self._probed.discard(worker)
        self._requests[worker] = 0
        self._silent.discard(worker)
        self._stale.discard(worker)
        self._missed.discard(worker)
        self._send_inactive(worker)
        rejoins.confirm(rejoin)

    def _end_silence(self, worker: int) -> None:
        """Send a worker that was silent what it has missed. Its next request makes it active."""
        self._silent.discard(worker)
        self._send_inactive(worker)
        for other in self._others(worker):
            self._send_membership(worker, other, Kind.ADDED)
        self._send_membership(worker, worker)

    def _send_inactive(self, worker: int) -> None:
        for other in range(self._workers):
            if other != worker and other not in self._generator:
                self._send_membership(worker, other)

    def _remove_for_good(self, worker: int) -> None:
        self._gone.add(worker)
        self._silent.discard(worker)
        self._start(self._remove(worker, gone=True))

    def _remove(self, worker: int, *, gone: bool = False) -> list[Run]:
        """Remove a worker; unless ``gone`` it counts as alive, and synchronization waits for it."""
        generator = self._generator
        if worker in generator or (gone and generator.is_late(worker)):
            self._behind.add(worker)
            self._fetching.discard(worker)
            self._synchronizing.discard(worker)
            self._connections.close_all(worker)
            self._broadcast_membership(Kind.REMOVED, worker)
        if gone:
            self._timeouts.reset(worker)
            return generator.remove(worker)
        self._timeouts.stop(worker)
        return generator.mark_late(worker)

    def _broadcast_membership(self, kind: Kind, worker: int) -> None:
        """Notify all workers, including ``worker``."""
        for other in range(self._workers):
            self._send_membership(other, worker, kind)

    def _send_membership(self, to: int, worker: int, kind: Kind = Kind.REMOVED) -> None:
        reason = self._reason(worker) if kind == Kind.REMOVED else 0
        ids = (worker, self._requests[worker] % ID_LIMIT, reason, int(to in self._missed))
        self._send(to, kind, ids)

    def _reason(self, worker: int) -> Reason:
        if worker in self._mailbox.left:
            return Reason.LEFT
        if worker in self._mailbox.unconnected():
            return Reason.DIED
        return Reason.SILENT if worker in self._silent | self._stale else Reason.LATE

    def _send(
        self, worker: int, kind: Kind, ids: Sequence[int] = (0, 0, 0, 0), payload: bytes = b""
    ) -> bool:
        """Send a message without blocking; return whether the worker can be sent anything."""
        if worker in self._gone:
            return False
        try:
            self._mailbox.post(worker, kind, payload, ids=ids, urgency=0, seconds=0.0)
        except PeerError:
            return False
        return True

    def _check_workers(self, now: float) -> None:
        """Remove dead workers, and those whose step has timed out while others wait for it."""
        for worker in self._mailbox.left - self._gone:
            self._remove_for_good(worker)
        lost = set(self._mailbox.lost) - self._gone
        for worker in self._silent - lost:
            self._end_silence(worker)
        for worker in lost - self._silent:
            self._silent.add(worker)
            self._stale.add(worker)
            self._start(self._remove(worker, gone=True))
        unconnected = self._mailbox.unconnected()
        for worker in range(self._workers):
            generator = self._generator
            present = worker in generator or generator.is_late(worker)
            if present and unconnected.get(worker, 0.0) > RECONNECT_S:
                self._start(self._remove(worker, gone=True))
            elif generator.is_awaited(worker) and self._timeouts.is_overdue(worker, now):
                self._start(self._remove(worker))
            # Detects dead workers even if no worker waits for them.
            elif self._timeouts.is_unusual(worker, now) and worker not in self._probed:
                self._probed.add(worker)
                self._send(worker, Kind.KEEPALIVE)
        if now - self._kept_alive_at > min(_KEEPALIVE_S, self._timeouts.first_s / 4):
            self._kept_alive_at = now
            self._send_keepalives()

    def _send_keepalives(self) -> None:
        """Notify waiting workers that a worker they wait for is alive."""
        for worker in range(self._workers):
            waits = worker in self._generator and self._generator.is_waiting(worker)
            if waits and (awaited := self._generator.waiting_for(worker)):
                self._send(worker, Kind.KEEPALIVE, (awaited[0] + 1, 0, 0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """Configuration of the generator's process, and how workers connect to it.

    Attributes:
        room: prefix of keys in the rendezvous store.
        timeout: seconds for connection setup, a worker's first step, and a wait for a group.
        rules: how groups are made.
        silence: seconds without a message after which an awaited peer is dead.
        factor: timeout of a step, as a multiple of its worker's usual step.
        least: lower bound of that timeout in seconds.
        capacity: groups whose connections a worker keeps open.
    """

    module: ClassVar[str] = "wingbeat.methods.model_averaging"
    uses_store_later: ClassVar[bool] = True

    room: str
    host_of: tuple[int, ...]
    interfaces: tuple[str, ...]
    encrypted: bool = True
    timeout: float
    rules: Rules
    seed: int = 0
    silence: float = SILENCE_S
    factor: float = FACTOR
    least: float = MIN_TIMEOUT_S
    capacity: int = CAPACITY

    def __post_init__(self) -> None:
        """Raise UsageError if groups would run in the middle of steps."""
        if self.rules.notified:
            raise UsageError(
                "Rules(notified=True) is for simulations only: a worker receives groups only while "
                "its request waits; leave it out"
            )

    @property
    def workers(self) -> int:
        """The number of workers; their mailboxes are numbered by rank."""
        return len(self.host_of)

    @property
    def number(self) -> int:
        """The number of the generator's mailbox."""
        return self.workers

    @property
    def me(self) -> str:
        """The name of the service in messages."""
        return "the group generator (started by rank 0)"

    def name(self, number: int) -> str:
        """Return the name of the mailbox with this number in messages."""
        return self.me if number == self.number else f"rank {number}"

    def to_json(self) -> str:
        """Return the configuration as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> GeneratorConfig:
        """Return the configuration that `to_json` has written."""
        fields = json.loads(text)
        for each in ("host_of", "interfaces"):
            fields[each] = tuple(fields[each])
        return GeneratorConfig(**fields | {"rules": Rules(**fields["rules"])})

    def connect(self, store: Store) -> Callable[[Callable[[], bool]], None]:
        """Connect to all workers; return a function that serves them while its argument is true."""
        mailbox = self._open(store, self.number, range(self.workers))
        return functools.partial(self._serve, mailbox, RejoinLog(store, self.room, self.workers))

    def client(
        self,
        store: Store,
        rank: int,
        returned: bool = False,
        is_running: Callable[[int], bool] = lambda _: False,
    ) -> tuple[Mailbox, Client]:
        """Connect a worker to the generator. The caller closes the mailbox.

        Raises RendezvousError if the generator did not connect, or is dead.
        """
        if not returned:
            mailbox = self._open(store, rank, [self.number])
        elif rank == 0 or not isinstance(store, AtomicStore):
            raise RendezvousError(
                f"rank {rank}: cannot rejoin: the group generator has ended with the process "
                "before this one, which had started it; start all workers again from a checkpoint"
            )
        else:
            mailbox = self._rejoin(store, rank)
        layout, table = Layout(self.host_of), StatusTable(store, self.room, self.workers)
        client = Client(
            mailbox, rank, self.number, layout, self.rules, self.timeout, table, is_running
        )
        return mailbox, client

    def static_client(
        self, store: Store, rank: int, is_running: Callable[[int], bool] = lambda _: False
    ) -> StaticClient:
        """Return a worker's client of the static schedule, without a generator."""
        table = StatusTable(store, self.room, self.workers)
        return StaticClient(rank, Layout(self.host_of), self.timeout, table, is_running=is_running)

    def _rejoin(self, store: AtomicStore, rank: int) -> Mailbox:
        incarnation = next_incarnation(store, self.room, rank)

        def announce(timeout: float) -> dict[int, int]:
            announce_rejoin(store, self.room, rank, incarnation, timeout)
            return {self.number: 0}

        return self._open(store, rank, [self.number], incarnation, announce)

    def _serve(self, mailbox: Mailbox, rejoins: RejoinLog, parent: Callable[[], bool]) -> None:
        generator = Generator(Layout(self.host_of), self.rules, self.seed)
        connections = ConnectionCache(self.workers, self.capacity)
        timeouts = AdaptiveTimeout(self.workers, self.timeout, self.factor, self.least)
        service = GroupService(
            mailbox, generator, self.workers, timeouts, connections, rejoins=rejoins
        )
        rejoins.start()
        try:
            service.run(parent)
        finally:
            rejoins.stop()

    def _open(
        self,
        store: Store,
        number: int,
        peers: range | list[int],
        incarnation: int = 0,
        announce: Callable[[float], Mapping[int, int]] | None = None,
    ) -> Mailbox:
        return open_mailbox(
            store,
            number,
            peers,
            namespace=self.room,
            interfaces=self.interfaces,
            classes=1,
            encrypted=self.encrypted,
            limits=Limits(silence=self.silence),
            seconds=self.timeout,
            name=self.name,
            incarnation=incarnation,
            announce=announce,
        )
