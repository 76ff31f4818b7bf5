"""The ranks of a replica make the same averages: one leads, the others follow.

Only the leader of a replica is a client of the group generator. Before each of its averages it
tells the other ranks of the replica, which make the same one in their own columns. No rank replaces
its buffer before all of them are done, because a failed average is repeated without the lost
member: each rank tells the leader its result, and the leader decides one for the replica.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.static_client import ABANDONED, NO_INITIATOR, Arrival
from wingbeat.schema import (
    Length,
    MalformedMessage,
    Messages,
    Payload,
    Range,
    Word,
    WorkerId,
    printable,
)
from wingbeat.transport.detector import Failed, FailureDetector
from wingbeat.transport.failures import ANSWER_TIMEOUT_S, WaitLog, published_failure
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.frames import Limits
from wingbeat.transport.text import MAX_ERROR_CHARS, describe_error

if TYPE_CHECKING:
    from wingbeat.transport.messages.mailbox import Mailbox
    from wingbeat.transport.store import Store
    from wingbeat.transport.world import World

CHECK_S = 0.25
"""Seconds between checks of the other ranks, and of the group, during a wait."""

_KEEPALIVE_S = 1.0
"""Seconds between messages whose loss shows that a rank's host is gone."""

SUCCESS = -2
"""Result of an average that is complete; others are `ABANDONED` and a lost member."""

State = TypeVar("State")

Member = Annotated[int, Range(SUCCESS, "workers")]
"""A result: a lost member, `ABANDONED` or `SUCCESS`."""


# -- messages -----------------------------------------------------------------------------


class Call(enum.IntEnum):
    """What all ranks of a replica do at the same time."""

    STEP = 0
    SYNCHRONIZE = 1
    FETCH = 2


CALLS = {
    Call.STEP: "a step",
    Call.SYNCHRONIZE: "wingbeat.synchronize()",
    Call.FETCH: "a copy of another replica's state",
}


class Begin(NamedTuple):
    """Leader: the call that begins.

    Attributes:
        call: its kind.
    """

    call: Call


class Average(NamedTuple):
    """Leader: average with a group.

    Attributes:
        connection: the id of the group's connections.
        members: replicas.
    """

    connection: Word
    members: Annotated[tuple[WorkerId, ...], Length(least=1)]


class Receive(NamedTuple):
    """Leader: receive the state of another replica.

    Attributes:
        sender: that replica.
        connection: the id of the connections.
    """

    sender: WorkerId
    connection: Word


class Send(NamedTuple):
    """Leader: send the state to another replica, and do not wait for it.

    Attributes:
        receiver: that replica.
        connection: the id of the connections.
    """

    receiver: WorkerId
    connection: Word


class Stop(NamedTuple):
    """Leader: abandon the average, or the transfer of a state, that runs.

    Attributes:
        cause: the member that is lost, if one is.
    """

    cause: Member


class Result(NamedTuple):
    """Follower: what has become of its average. Leader: what becomes of all ranks' averages.

    Attributes:
        result: a lost member, `ABANDONED` or `SUCCESS`.
    """

    result: Member


class Close(NamedTuple):
    """Leader: close connections.

    Attributes:
        all: close all of them.
        connections: ids.
    """

    all: bool
    connections: tuple[Word, ...]


class Renew(NamedTuple):
    """Leader: connection ids are those of another generator.

    Attributes:
        generation: its incarnation.
    """

    generation: Word


class End(NamedTuple):
    """Leader: the call has ended.

    Attributes:
        excluded: `Client.excluded`.
        must_fetch: `Client.must_fetch`.
        stale: `Client.stale`.
        alone: whether there is no generator any more.
        lost: the replicas that the leader does not know to be active.
    """

    excluded: bool
    must_fetch: bool
    stale: bool
    alone: bool
    lost: tuple[WorkerId, ...]


class Raised(NamedTuple):
    """Leader or follower: the call has failed.

    Attributes:
        error: the exception, in UTF-8.
    """

    error: Payload


class Alive(NamedTuple):
    """Leader or follower: it waits."""


MESSAGES = Messages(
    {
        1: Begin, 2: Average, 3: Receive, 4: Send, 5: Stop, 6: Result, 7: Close, 8: End, 9: Raised,
        10: Alive, 11: Renew,
    }
)  # fmt: skip


class Channel:
    """Messages between the leader of a replica and its other ranks. Not thread-safe.

    All ranks make one at the same time. ``room`` distinguishes channels of a replica.

    Attributes:
        rank: of this process in the job.
        leader: the rank of the replica's leader.
        replica: its number.
        peers: the ranks with which it exchanges messages: the leader with all, the others with it.
        timeout: of `init`, in seconds.
        error: the last failure of a peer that was raised.

    Raises:
        RendezvousError: a rank of the replica is missing.
    """

    def __init__(self, world: World, room: str, *, encrypted: bool) -> None:
        replica = world.inside
        assert replica is not None, "a world without a mesh has no ranks inside"
        self.rank, self.leader = world.ranks[world.rank], replica.leader
        self.replica = replica.number
        followers = tuple(rank for rank in replica.ranks if rank != self.leader)
        self.peers = followers if self.rank == self.leader else (self.leader,)
        self.timeout, self._replicas = world.timeout, world.size
        self._store: Store = world.store
        self._mailbox: Mailbox = open_mailbox(
            replica.mesh_store,
            self.rank,
            self.peers,
            namespace=f"inside {replica.life} {room}",
            interfaces=("lo",) if world.threads else world.interfaces or None,
            classes=1,
            encrypted=encrypted,
            limits=Limits(silence=world.timeout),
            seconds=world.timeout,
        )
        self._detector = FailureDetector(self._mailbox)
        self._received: deque[tuple[int, Any]] = deque()
        self._sent_at = 0.0
        self.error: PeerError | None = None

    def tell(self, message: Any) -> None:
        """Send a message to all peers; raise a PeerError if one cannot receive it."""
        for peer in self.peers:
            try:
                self._post(peer, message)
            except PeerError:
                failed = self._detector.failed().get(peer)
                # What it has sent last may state why.
                while (message := self._mailbox.poll()) is not None:
                    self._take(message)
                for _, record in self._received:
                    if isinstance(record, Raised):
                        raise self._failure(peer, _told(record)) from None
                raise self._lost(peer, failed) from None

    def tell_error(self, error: BaseException) -> None:
        """Tell all peers that can receive it that this rank's call has failed."""
        for peer in self.peers:
            with contextlib.suppress(WingbeatError):
                self._post(peer, Raised(describe_error(error).encode()))

    def _post(self, peer: int, message: Any) -> None:
        kind, ids, payload = MESSAGES.pack(message)
        self._mailbox.post(peer, kind, payload, ids=ids, urgency=0, seconds=self.timeout)

    def next(self, seconds: float) -> tuple[int, Any] | None:
        """Return the next message with its sender; None if none arrives in ``seconds``.

        Raises PeerError if a peer has failed, which is then `error`, or has sent what is not
        allowed.
        """
        deadline = time.monotonic() + seconds
        while not self._received:
            failed = self._detector.failed()  # read before their last messages
            left = deadline - time.monotonic()
            message = self._mailbox.poll() if failed or left <= 0 else self._mailbox.next(left)
            while message is not None:
                self._take(message)
                message = self._mailbox.poll()
            if self._received:
                break
            for peer, how in failed.items():
                raise self._lost(peer, how)
            if left <= 0:
                self._keep_alive()
                return None
        peer, record = self._received.popleft()
        if isinstance(record, Raised):
            raise self._failure(peer, _told(record))
        return peer, record

    def peek(self) -> Any:
        """Return the message that `next` will return, or None; raises as `next`."""
        if (found := self.next(0.0)) is not None:
            self._received.appendleft(found)
        return self._received[0][1] if self._received else None

    def close(self, *, quick: bool) -> None:
        """Close it; ``quick`` without waiting for messages to arrive."""
        if quick or self.error is not None or self._detector.failed():
            self._mailbox.abandon()
            return
        with contextlib.suppress(PeerError):  # a peer may have died just now
            self._mailbox.close()

    def _take(self, message: Any) -> None:
        try:
            record = MESSAGES.parse(message, workers=self._replicas)
        except MalformedMessage as error:
            raise self.violation(message.peer, str(error)) from None
        if not isinstance(record, Alive):
            self._received.append((message.peer, record))

    def violation(self, peer: int, what: str) -> PeerError:
        """Return the error of a malformed or unexpected message."""
        return PeerError(f"rank {self.rank}: rank {peer} violated the protocol: {what}")

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._sent_at >= _KEEPALIVE_S:
            self._sent_at = now
            self.tell(Alive())

    def _lost(self, peer: int, failed: Failed | None) -> PeerError:
        error = published_failure(self._store, peer, ANSWER_TIMEOUT_S)
        how = f"failed with {error}" if error else failed.text if failed else "has failed"
        return self._failure(peer, how)

    def _failure(self, peer: int, how: str) -> PeerError:
        self.error = PeerError(
            f"rank {self.rank}: rank {peer}, which holds the same replica of the model, {how}; the "
            "other replicas continue without this one"
        )
        return self.error


def _check(channel: Channel, failed: str) -> None:
    """Refuse a call after one that has failed: ranks may not be in the same state any more."""
    if failed:
        raise PeerError(
            f"rank {channel.rank}: an earlier call of wingbeat has failed ({failed}), and the "
            "ranks of this replica may differ since: start it again"
        )


def _told(raised: Raised) -> str:
    text = bytes(raised.error[:MAX_ERROR_CHARS]).decode(errors="replace")
    return f"failed: {printable(text)}"


# -- the leader ---------------------------------------------------------------------------


class Attempts(Protocol):
    """Averages that are not applied at once, in one column: `GroupAllReduce`."""

    def attempt(self, run: Run, connection: int, arrival: Callable[[], Arrival]) -> int | None:
        """Average; as `Reducer.average`, but leave the buffer unchanged."""

    def apply(self) -> None:
        """Replace the buffer by the average of a successful attempt."""

    def renew(self, generation: int) -> None:
        """Count connection ids from 0 again."""

    def publish_cause(self, connection: int, member: int) -> None:
        """Tell the peers in this column that the group fails because of ``member``."""

    def grace_period(self) -> Any:
        """Return how long to wait for members that will not arrive: a `GracePeriod`."""

    def close(self, connections: Iterable[int] | None = None) -> None:
        """Close the connections with these ids; all if None."""


class Flags(Protocol):
    """What a client has decided, and all ranks of a replica follow: `Client`."""

    @property
    def fallback(self) -> str | None:
        """Why there is no generator."""

    @property
    def excluded(self) -> bool:
        """Whether groups have continued without the worker."""

    @property
    def lost_peers(self) -> set[int]:
        """The workers that it does not know to be active."""

    @property
    def stale(self) -> bool:
        """Whether the worker was silent, so that its model is old."""

    @property
    def must_fetch(self) -> bool:
        """Whether the worker must copy a peer's state."""


class Leader:
    """A `Reducer` that averages in the columns of all ranks of a replica."""

    def __init__(self, channel: Channel, reducer: Attempts) -> None:
        self._channel, self._reducer = channel, reducer
        self._failed = ""
        self._results: dict[int, int] = {}  # of the average that runs, in the order of arrival

    @contextlib.contextmanager
    def call(self, call: Call, client: Flags) -> Iterator[None]:
        """Lead the others through a call of this rank's client. None follows one that fails."""
        _check(self._channel, self._failed)
        try:
            self._channel.tell(Begin(call))
            yield
            lost = tuple(sorted(client.lost_peers))
            alone = client.fallback is not None
            flags = client.excluded, client.must_fetch, client.stale
            self._channel.tell(End(*flags, alone, lost))
        except BaseException as error:
            self._failed = describe_error(error)
            self._channel.tell_error(error)
            raise

    def watch(self) -> None:
        """Raise a PeerError if another rank has failed."""
        message = self._channel.peek()
        if message is not None:
            raise self._channel.violation(self._channel.peers[0], f"{message!r:.80}")

    def average(self, run: Run, connection: int, arrival: Callable[[], Arrival]) -> int | None:
        """Average in all columns; as `Reducer.average`. The buffers change in all or none."""
        self._channel.tell(Average(connection, run.members))
        self._results.clear()

        def continued() -> Arrival:
            self._read(0.0)
            if (cause := self._cause()) is None:
                return arrival()
            self._reducer.publish_cause(connection, cause)
            return Arrival.IMPOSSIBLE

        own = self._reducer.attempt(run, connection, continued)
        result = self._decide(SUCCESS if own is None else own, arrival)
        self._channel.tell(Result(result))
        return settle(self._reducer, connection, result)

    def close(self, connections: Iterable[int] | None = None) -> None:
        """Close these connections in all columns; all if None."""
        ids = None if connections is None else tuple(connections)
        if ids != ():
            self._channel.tell(Close(ids is None, ids or ()))
        self._reducer.close(ids)

    def renew(self, generation: int) -> None:
        """Count connection ids from 0 again in all columns; as `GroupAllReduce.renew`."""
        self._channel.tell(Renew(generation))
        self._reducer.renew(generation)

    def send(self, receiver: int, connection: int) -> None:
        """Have the others send their parts of the state."""
        self._channel.tell(Send(receiver, connection))

    def receive(
        self,
        receive: Callable[[int, int, Callable[[], bool]], State | None],
        sender: int,
        connection: int,
        is_active: Callable[[], bool],
    ) -> State | None:
        """Receive a state on all ranks; None if one of them has lost the sender."""
        self._channel.tell(Receive(sender, connection))
        self._results.clear()

        def continued() -> bool:
            self._read(0.0)
            return self._cause() is None and is_active()

        state = receive(sender, connection, continued)

        def arrival() -> Arrival:
            return Arrival.POSSIBLE if is_active() else Arrival.IMPOSSIBLE

        result = self._decide(ABANDONED if state is None else SUCCESS, arrival)
        self._channel.tell(Result(result))
        return state if result == SUCCESS else None

    def _decide(self, own: int, arrival: Callable[[], Arrival]) -> int:
        """Wait for the results of all ranks; return that of the replica."""
        channel, grace, stopped = self._channel, self._reducer.grace_period(), False
        wait = WaitLog(f"rank {channel.rank}", "its part of an average", time.monotonic)
        self._results[channel.rank] = own
        while missing := [rank for rank in channel.peers if rank not in self._results]:
            cause = self._cause()
            if not stopped and (cause is not None or not grace.lasts(arrival())):
                stopped = True
                channel.tell(Stop(ABANDONED if cause is None else cause))
            self._read(CHECK_S)
            wait.check(f"rank {missing[0]}", channel.timeout)
        cause = self._cause()
        return SUCCESS if cause is None else cause

    def _cause(self) -> int | None:
        """Return the first result that is a lost member, or any that is no success.

        This replica itself, if no other: a column takes itself for lost when the others close it.
        """
        failed = [result for result in self._results.values() if result != SUCCESS]
        failed.sort(key=lambda result: (result == ABANDONED, result == self._channel.replica))
        return next(iter(failed), None)

    def _read(self, seconds: float) -> None:
        found = self._channel.next(seconds)
        if found is not None:
            rank, message = found
            if not isinstance(message, Result) or rank in self._results:
                raise self._channel.violation(rank, f"{message!r:.80}")
            self._results[rank] = message.result


def settle(reducer: Attempts, connection: int, result: int) -> int | None:
    """Apply this rank's average, or give it up with those of the other ranks."""
    if result == SUCCESS:
        reducer.apply()
        return None
    if result != ABANDONED:
        reducer.publish_cause(connection, result)
    reducer.close([connection])
    return result


# -- the others ---------------------------------------------------------------------------


class Follower:
    """Does what the leader of its replica does. Has the methods of a `Client`.

    Attributes:
        fallback: not None if the leader has no generator any more.
        excluded, must_fetch, stale, lost_peers: as the leader's.
        on_fetch: as `Client.on_fetch`.
    """

    def __init__(self, channel: Channel, reducer: Attempts) -> None:
        self._channel, self._reducer = channel, reducer
        self._failed = ""
        self.fallback: str | None = None
        self.excluded = self.must_fetch = self.stale = self.copies_state = False
        self.lost_peers: set[int] = set()
        self.on_fetch: Callable[[int, int], None] = lambda _worker, _connection: None

    def step(self, _reducer: object) -> None:
        """Take part in the groups of the leader's step."""
        self._follow(Call.STEP)

    def synchronize(self, _reducer: object) -> None:
        """Take part in the groups of the leader's synchronization."""
        self._follow(Call.SYNCHRONIZE)

    def fetch_state(
        self, receive: Callable[[int, int, Callable[[], bool]], State | None], *, join: bool = False
    ) -> State:
        """Return this rank's part of the state that the leader fetches."""
        del join  # the leader's
        state = self._follow(Call.FETCH, receive)
        if state is None:
            raise self._channel.violation(self._channel.leader, "it has fetched no state")
        return state

    def leave(self, *, failed: bool = False) -> None:
        """Do nothing: the leader leaves."""

    def _follow(
        self,
        call: Call,
        receive: Callable[[int, int, Callable[[], bool]], State | None] | None = None,
    ) -> State | None:
        channel, state = self._channel, None
        _check(channel, self._failed)
        try:
            self._begin(call)
            while not isinstance(message := self._await(), End):
                match message:
                    case Average(connection, members) if receive is None:
                        self._average(connection, members)
                    case Close(everything, connections):
                        self._reducer.close(None if everything else connections)
                    case Receive(sender, connection) if receive is not None:
                        state = self._receive(receive, sender, connection)
                    case Send(receiver, connection):
                        self.on_fetch(receiver, connection)
                    case Renew(generation):
                        self._reducer.renew(generation)
                    case Stop():  # sent before the leader had this rank's result
                        pass
                    case _:
                        raise channel.violation(channel.leader, f"{message!r:.80}")
        except BaseException as error:
            self._failed = describe_error(error)
            if error is not channel.error:
                channel.tell_error(error)
            raise
        self.excluded, self.must_fetch = message.excluded, message.must_fetch
        self.stale = message.stale
        self.fallback = "the leader has none" if message.alone else None
        self.lost_peers = set(message.lost)
        return state

    def _begin(self, call: Call) -> None:
        channel = self._channel
        begun = self._await(limited=True)
        if not isinstance(begun, Begin):
            raise channel.violation(channel.leader, f"{begun!r:.80}")
        if begun.call != call:
            raise UsageError(
                f"rank {channel.rank} is in {CALLS[call]}, and rank {channel.leader}, which holds "
                f"the same replica of the model, in {CALLS[begun.call]}: all ranks of a replica "
                "must make the same calls in the same order"
            )

    def _average(self, connection: int, members: tuple[int, ...]) -> None:
        reducer = self._reducer

        def arrival() -> Arrival:
            message = self._channel.peek()
            if not isinstance(message, Stop):
                return Arrival.POSSIBLE
            if message.cause >= 0:
                reducer.publish_cause(connection, message.cause)
            return Arrival.IMPOSSIBLE

        own = reducer.attempt(Run(0, 0, members, NO_INITIATOR), connection, arrival)
        settle(reducer, connection, self._agree(SUCCESS if own is None else own))

    def _receive(
        self,
        receive: Callable[[int, int, Callable[[], bool]], State | None],
        sender: int,
        connection: int,
    ) -> State | None:
        state = receive(sender, connection, lambda: not isinstance(self._channel.peek(), Stop))
        agreed = self._agree(ABANDONED if state is None else SUCCESS)
        return state if agreed == SUCCESS else None

    def _agree(self, result: int) -> int:
        """Tell the leader this rank's result; return that of the replica."""
        self._channel.tell(Result(result))
        while not isinstance(message := self._await(), Result):
            if not isinstance(message, Stop):
                raise self._channel.violation(self._channel.leader, f"{message!r:.80}")
        return message.result

    def _await(self, *, limited: bool = False) -> Any:
        """Wait for the leader's next message.

        In a call it is as long as the leader's waits, which have limits, and as long as the leader
        is alive. Before a call, ``limited``, the leader may be blocked elsewhere.
        """
        channel = self._channel
        wait = WaitLog(f"rank {channel.rank}", "the next average", time.monotonic)
        while (found := channel.next(CHECK_S)) is None:
            if limited:
                wait.check(f"rank {channel.leader}", channel.timeout)
        return found[1]
