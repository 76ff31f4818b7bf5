"""The group generator at work: takes requests from its mailbox, and tells groups to run."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.methods.model_averaging.client import Client
from wingbeat.methods.model_averaging.generator import (
    WRAPS,
    Generator,
    Kind,
    Malformed,
    Run,
    Unexpected,
    Why,
    ids_of,
    payload_of,
)
from wingbeat.methods.model_averaging.rendezvous import Back, Board, Returns, announce, life_of
from wingbeat.methods.model_averaging.rules import Layout, Rules
from wingbeat.methods.model_averaging.static import Follower
from wingbeat.transport.messages.endpoint import Limits, Message
from wingbeat.transport.messages.mailbox import CLOSING, UNCONNECTED_S, Mailbox
from wingbeat.transport.messages.meeting import open_mailbox
from wingbeat.transport.store import Ledger, Store

FACTOR = 8.0
"""How many times its usual step a worker may take."""

LEAST_S = 2.0
"""Seconds that any step may take."""

_KEPT = 0.9
"""How much of its longest step counts one step later."""


class Patience:
    """Deadlines that follow the step times of each worker.

    Args:
        workers: how many there are.
        first_s: seconds that a step may take until its worker's usual one is known: its first.
        factor: how many times the usual one it may take later.
        least_s: seconds that it may take in any case.

    Attributes:
        first_s: as above.
    """

    def __init__(
        self, workers: int, first_s: float, factor: float = FACTOR, least_s: float = LEAST_S
    ) -> None:
        self.first_s, self._factor, self._least_s = first_s, factor, least_s
        self._usual_s = [0.0] * workers
        self._since: list[float | None] = [None] * workers
        self._paused: set[int] = set()
        self._steps = [0] * workers

    def freed(self, worker: int, now: float) -> None:
        """Note that ``worker`` goes on computing."""
        self._since[worker] = now

    def pauses(self, worker: int, now: float) -> None:
        """Note that ``worker`` goes on after all were one: it may evaluate and save first.

        Its next step may take as long as a first one, and says nothing of those that follow.
        """
        self._since[worker] = now
        self._paused.add(worker)

    def waits(self, worker: int) -> None:
        """Note that ``worker`` waits for others."""
        self._since[worker] = None

    def owes(self, worker: int, now: float) -> None:
        """Note that others of its group are done, and ``worker`` is about to be."""
        if self._since[worker] is None:
            self._since[worker] = now

    def asked(self, worker: int, now: float) -> None:
        """Note that ``worker`` has ended a step."""
        since, self._since[worker] = self._since[worker], None
        if worker in self._paused:
            self._paused.discard(worker)
        elif since is not None:
            self._steps[worker] += 1
            # The first step, which warms up, counts only until there is another.
            kept = _KEPT if self._steps[worker] > 2 else 0.0
            self._usual_s[worker] = max(now - since, kept * self._usual_s[worker])

    def gone(self, worker: int) -> None:
        """Forget its steps: those of its next life may differ."""
        self._usual_s[worker], self._since[worker], self._steps[worker] = 0.0, None, 0
        self._paused.discard(worker)

    def deadline_s(self, worker: int) -> float:
        """Return how many seconds its step may take."""
        usual_s = 0.0 if worker in self._paused else self._usual_s[worker]
        return max(self._least_s, self._factor * usual_s) if usual_s else self.first_s

    def unusual(self, worker: int, now: float) -> bool:
        """Whether its step takes twice as long as usual: time to see whether it lives."""
        since = self._since[worker]
        return since is not None and now - since > 2 * self._usual_s[worker]

    def overdue(self, worker: int, now: float) -> bool:
        """Whether its step takes longer than it may."""
        since = self._since[worker]
        return since is not None and now - since > self.deadline_s(worker)


CAPACITY = 16
"""Groups whose connections a worker keeps."""

_Key = tuple[int, ...]


class Rooms:
    """Numbers the meetings of groups: members whose connections are kept have the same number.

    Args:
        workers: how many there are.
        capacity: groups whose connections a worker keeps.

    Raises:
        UsageError: they could keep none.
    """

    def __init__(self, workers: int, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise UsageError(f"Rooms(capacity={capacity}): allowed are 1 group a worker and more")
        self._capacity = capacity
        self._of: list[OrderedDict[_Key, None]] = [OrderedDict() for _ in range(workers)]
        self._numbers: dict[_Key, int] = {}
        self._closed: list[list[int]] = [[] for _ in range(workers)]
        self._made = 0

    def meeting(self, members: Sequence[int]) -> int:
        """Return the number of the members' meeting, from 1 on; a new one if none is kept.

        Then the one that was used longest ago is closed of each member that has too many.
        """
        key = tuple(sorted(members))
        if key not in self._numbers:
            for member in key:
                if len(self._of[member]) >= self._capacity:
                    self._close(next(iter(self._of[member])))
            self._made += 1
            self._numbers[key] = self._made
        for member in key:
            self._of[member][key] = None
            self._of[member].move_to_end(key)
        return self._numbers[key]

    def once(self) -> int:
        """Return the number of a meeting whose connections nobody keeps."""
        self._made += 1
        return self._made

    def gone(self, worker: int) -> None:
        """Close all meetings of a worker: connections to it may be broken."""
        for key in list(self._of[worker]):
            self._close(key)

    def closed(self, worker: int) -> list[int]:
        """Return the meetings that ``worker`` is to close before it opens another; once."""
        numbers, self._closed[worker] = self._closed[worker], []
        return numbers

    def _close(self, key: _Key) -> None:
        number = self._numbers.pop(key)
        for member in key:
            del self._of[member][key]
            self._closed[member].append(number)


_LOOK_S = 0.25
"""Seconds between two looks at what nobody tells: workers that are gone, steps that are late."""

_AT_ONCE = 256
"""Messages that are taken in between two looks."""

_COMFORT_S = 5.0
"""Seconds between two signs to those who wait, at most."""

_QUICK_S = 1.0
"""Seconds that the last words may take when the worker that started it will not hear them."""


class GroupService:
    """One job's group generator.

    Args:
        mailbox: joins it to all workers, whose numbers are their ranks.
        generator: the rules.
        workers: how many there are.
        patience: how long they may compute.
        rooms: which groups' connections they keep.
        clock: seconds.
        returns: who has come back; None if nobody does.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        generator: Generator,
        workers: int,
        patience: Patience,
        rooms: Rooms | None = None,
        clock: Callable[[], float] = time.monotonic,
        returns: Returns | None = None,
    ) -> None:
        self._mailbox, self._generator, self._workers = mailbox, generator, workers
        self._patience, self._clock = patience, clock
        self._rooms = rooms or Rooms(workers)
        self._returns = returns
        self._looked = clock()
        self._gone: set[int] = set()  # for good: nothing comes from there any more
        self._silent: set[int] = set()  # nothing comes from there, but may again
        self._stale: set[int] = set()  # were silent, and have not fetched a state since
        self._probed: set[int] = set()
        self._levels: set[int] = set()  # their group of all is not done
        self._behind: set[int] = set()  # others have gone on without them
        self._missed: set[int] = set()  # others have made a mean of all without them
        self._fetching: set[int] = set()
        self._comforted = self._looked
        self._asked = [0] * workers
        for worker in range(workers):
            patience.freed(worker, self._looked)

    def run(self, parent: Callable[[], bool] = lambda: True, host: int = 0) -> None:
        """Serve until every worker has left, or the one that started it, ``host``, is gone.

        Or one goes on without a generator, as this one was stopped: then all do.
        """
        while len(self._gone | self._silent) < self._workers and parent():
            if self._returns is not None and self._returns.over:
                break
            self.step(self._mailbox.next(_LOOK_S))
        if not parent() and host not in self._gone:
            self._leave(host)  # otherwise each of the others would have to find that out
        # Workers that are gone without a word hear no last one: nobody is left to be told.
        with contextlib.suppress(PeerError):
            self._mailbox.close(CLOSING if parent() else _QUICK_S)

    def step(self, message: Message | None) -> None:
        """Do what is to be done now, with the message that has just come if one has."""
        for _ in range(_AT_ONCE):
            if message is None:
                break
            self._take(message.peer, message.kind, message.ids)
            message = self._mailbox.poll()
        if message is not None:
            self._take(message.peer, message.kind, message.ids)
        while self._returns is not None and (back := self._returns.news()) is not None:
            self._come_back(back, self._returns)
        now = self._clock()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._look_after(now)

    def _take(self, worker: int, kind: int, ids: Sequence[int]) -> None:
        if worker in self._gone:
            return
        if worker in self._silent:
            self._hear_again(worker)
        try:
            runs = self._heard(worker, kind, ids)
        except (Unexpected, Malformed) as error:
            self._post(worker, Kind.REFUSED, payload=str(error).encode())
            self._leave(worker)
            return
        self._tell(runs)

    def _heard(self, worker: int, kind: int, ids: Sequence[int]) -> list[Run]:
        """Do what a worker says.

        Raises:
            Unexpected: no worker says so now.
            Malformed: nobody says so ever.
        """
        generator, now = self._generator, self._clock()
        self._probed.discard(worker)
        match kind:
            case Kind.ASK:
                return self._asks(worker, now, renews=bool(ids[0]))
            case Kind.LEVEL:
                return self._asks(worker, now, level=True)
            case Kind.DONE:
                return self._done(worker, ids[0], ids[1], now)
            case Kind.LOST:
                if generator.runs(worker, ids[0], ids[1], ids[2]):
                    return self._without(ids[2])
                return []  # The others go on without it already.
            case Kind.FETCH:
                self._fetches(worker, now, join=bool(ids[1]))
                self._find_state(worker, ids[0] - 1)
                return []
            case Kind.ALIVE:
                return []
        raise Malformed(f"a message of kind {kind}")

    def _asks(
        self, worker: int, now: float, *, renews: bool = False, level: bool = False
    ) -> list[Run]:
        """Let a worker ask for a group, or for one of all; if it was left out it joins again.

        But not if it ``renews``: then it may be at another part of the model than the others, with
        whom no average can be made; and not if it was silent, as its model is old. If there are no
        others any more, it has missed nothing.
        """
        generator = self._generator
        self._asked[worker] += 1
        if worker in self._fetching:  # it has somebody's state by now
            self._fetching.discard(worker)
            self._behind.discard(worker)
            self._stale.discard(worker)
            self._missed.discard(worker)
        fetches = worker in self._stale or (renews and worker in self._behind)
        if fetches and not level and self._others(worker):
            self._tell_out(worker, worker)
            return []
        if worker not in generator:
            generator.joined(worker)
            self._tell_all(Kind.IN, worker)
        if not level:
            self._patience.asked(worker, now)
            return generator.request(worker)
        self._patience.waits(worker)
        self._levels.add(worker)
        return generator.level(worker)

    def _others(self, worker: int) -> list[int]:
        """Return who takes part beside ``worker``."""
        return [w for w in range(self._workers) if w != worker and w in self._generator]

    def _fetches(self, worker: int, now: float, *, join: bool) -> None:
        """Let a worker take somebody's state; its next step comes after that."""
        generator = self._generator
        self._fetching.add(worker)
        self._behind.add(worker)
        if join and worker not in generator:
            generator.joined(worker, at_once=True)
            self._tell_all(Kind.IN, worker)
        if worker in generator and not generator.waits(worker):
            self._patience.pauses(worker, now)

    def _done(self, worker: int, number: int, epoch: int, now: float) -> list[Run]:
        """Let a worker be done with a group, which the others are then about to be."""
        generator, patience = self._generator, self._patience
        others = generator.unfinished(worker)
        runs = generator.acknowledge(worker, number, epoch)
        if worker not in generator:
            return runs
        if generator.waits(worker):
            patience.waits(worker)
        elif worker in self._levels:
            self._levels.discard(worker)
            self._behind.discard(worker)
            self._stale.discard(worker)
            patience.pauses(worker, now)
        else:
            patience.freed(worker, now)
        for other in others:
            if other != worker:
                patience.owes(other, now)
        return runs

    def _tell(self, runs: Iterable[Run]) -> None:
        """Tell members what runs; who cannot be told is gone, whereupon more may run."""
        due = deque(runs)
        while due:
            run = due.popleft()
            meeting = self._rooms.meeting(run.members) if len(run.members) > 1 else 0
            if run.members[0] in self._levels:
                if len(run.members) == 1:
                    self._tell_absent(run.members[0])  # why, as it is known by now
                self._missed |= {w for w in range(self._workers) if w not in self._generator}
                self._missed.difference_update(run.members)
            for member in run.members:
                payload = payload_of(run.members, self._rooms.closed(member))
                if not self._post(member, Kind.RUN, ids_of(run, meeting), payload):
                    due += self._without(member)
                    break  # The others run the next epoch.

    def _find_state(self, taker: int, lost: int) -> None:
        """Have somebody who takes part give its state to ``taker``."""
        generator = self._generator
        here = self._others(taker)
        # Who waits hears it at once, the others when their step is over. Who could not give it
        # before may live.
        here.sort(key=lambda w: (w == lost, w in self._behind, not generator.waits(w)))
        for giver in here:
            ids = (giver, taker, self._rooms.once(), 0)
            if self._post(giver, Kind.STATE, ids):
                self._post(taker, Kind.STATE, ids)
                return
        self._post(taker, Kind.STATE, (taker, taker, 0, 0))

    def _come_back(self, back: Back, returns: Returns) -> None:
        """Connect to a worker that was started again; it takes part when it asks."""
        worker = back.worker
        self._leave(worker)  # The process before may not have been missed yet.
        try:
            self._mailbox.join(worker, back.card)
        except UsageError:
            return  # It was opened differently, and will say that nobody answers.
        self._gone.discard(worker)
        self._probed.discard(worker)
        self._asked[worker] = 0
        self._silent.discard(worker)
        self._stale.discard(worker)
        self._missed.discard(worker)
        self._tell_absent(worker)
        returns.met(back)

    def _hear_again(self, worker: int) -> None:
        """Let a worker that was silent hear what it has missed; it takes part when it asks."""
        self._silent.discard(worker)
        self._tell_absent(worker)
        for other in self._others(worker):
            self._tell_out(worker, other, Kind.IN)
        self._tell_out(worker, worker)

    def _tell_absent(self, worker: int) -> None:
        """Tell a worker which others take no part."""
        for other in range(self._workers):
            if other != worker and other not in self._generator:
                self._tell_out(worker, other)

    def _leave(self, worker: int) -> None:
        """Let a worker be gone for good."""
        self._gone.add(worker)
        self._silent.discard(worker)
        self._tell(self._without(worker, gone=True))

    def _without(self, worker: int, *, gone: bool = False) -> list[Run]:
        """Return what runs when a worker takes no part any more.

        Unless it is ``gone`` it lives, as far as is known: then a mean over all waits for it.
        """
        generator = self._generator
        if worker in generator or (gone and generator.is_late(worker)):
            self._out(worker)
        if gone:
            self._patience.gone(worker)
            return generator.gone(worker)
        self._patience.waits(worker)
        return generator.late(worker)

    def _out(self, worker: int) -> None:
        self._behind.add(worker)
        self._fetching.discard(worker)
        self._levels.discard(worker)
        self._rooms.gone(worker)
        self._tell_all(Kind.OUT, worker)

    def _tell_all(self, kind: Kind, worker: int) -> None:
        """Tell all workers, this one too, who takes part."""
        for other in range(self._workers):
            self._tell_out(other, worker, kind)

    def _tell_out(self, to: int, worker: int, kind: Kind = Kind.OUT) -> None:
        """Tell one worker that ``worker`` takes no part any more, and why, or does again."""
        why = self._why(worker) if kind == Kind.OUT else 0
        ids = (worker, self._asked[worker] % WRAPS, why, int(to in self._missed))
        self._post(to, kind, ids)

    def _why(self, worker: int) -> Why:
        """Return why a worker takes no part, as far as is known now."""
        if worker in self._mailbox.left:
            return Why.LEFT
        if worker in self._mailbox.unconnected():
            return Why.ENDED
        return Why.SILENT if worker in self._silent | self._stale else Why.LATE

    def _post(
        self, worker: int, kind: Kind, ids: Sequence[int] = (0, 0, 0, 0), payload: bytes = b""
    ) -> bool:
        """Send it; whether the worker can be sent anything. Waits for nobody."""
        if worker in self._gone:
            return False
        try:
            self._mailbox.post(worker, kind, payload, ids=ids, urgency=0, seconds=0.0)
        except PeerError:
            return False
        return True

    def _look_after(self, now: float) -> None:
        """Find workers that are gone, and those for whom others have waited long enough."""
        for worker in self._mailbox.left - self._gone:
            self._leave(worker)
        lost = set(self._mailbox.lost) - self._gone
        for worker in self._silent - lost:
            self._hear_again(worker)
        for worker in lost - self._silent:
            self._silent.add(worker)
            self._stale.add(worker)
            self._tell(self._without(worker, gone=True))
        unconnected = self._mailbox.unconnected()
        for worker in range(self._workers):
            generator = self._generator
            here = worker in generator or generator.is_late(worker)
            if here and unconnected.get(worker, 0.0) > UNCONNECTED_S:
                self._tell(self._without(worker, gone=True))
            elif generator.awaited(worker) and self._patience.overdue(worker, now):
                self._tell(self._without(worker))
            # A dead one that nobody waits for has to go as well.
            elif self._patience.unusual(worker, now) and worker not in self._probed:
                self._probed.add(worker)
                self._post(worker, Kind.ALIVE)
        if now - self._comforted > min(_COMFORT_S, self._patience.first_s / 4):
            self._comforted = now
            self._comfort()

    def _comfort(self) -> None:
        """Give a sign to those who wait for others that live, and say for whom."""
        for worker in range(self._workers):
            waits = worker in self._generator and self._generator.waits(worker)
            if waits and (missing := self._generator.missing(worker)):
                self._post(worker, Kind.ALIVE, (missing[0] + 1, 0, 0, 0))


SILENCE_S = 5.0
"""Seconds without a sign after which a worker, or the generator, that is waited for is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """The group generator's place in the job, and how it is to work.

    Attributes:
        room: of the mailboxes of the generator and the workers.
        host_of: of each worker, its host.
        host: the rank of the worker that starts it.
        interfaces: names of the network interfaces to use.
        encrypted: whether messages are.
        timeout: seconds that meeting may take, a worker's first step, and a wait for a group.
        rules: how groups are made.
        seed: of random groups.
        silence: seconds without a sign after which a peer that is waited for is dead.
        factor: how many times its usual step a worker may take until others go on without it.
        least: seconds that any step may take.
        capacity: groups whose connections a worker keeps.
    """

    module: ClassVar[str] = "wingbeat.methods.model_averaging"
    asks_later: ClassVar[bool] = True

    room: str
    host_of: tuple[int, ...]
    host: int = 0
    interfaces: tuple[str, ...]
    encrypted: bool = True
    timeout: float
    rules: Rules
    seed: int = 0
    silence: float = SILENCE_S
    factor: float = FACTOR
    least: float = LEAST_S
    capacity: int = CAPACITY

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: groups that a worker would have to run while it computes.
        """
        if self.rules.notified:
            raise UsageError(
                "Rules(notified=True) is for simulations: workers hear of groups only when they "
                "ask; leave it out"
            )

    @property
    def workers(self) -> int:
        """How many there are; their mailboxes are numbered by rank."""
        return len(self.host_of)

    @property
    def number(self) -> int:
        """The number of the generator's mailbox, behind the workers'."""
        return self.workers

    @property
    def me(self) -> str:
        """Say which service it is."""
        return f"the group generator (started by rank {self.host})"

    def name(self, number: int) -> str:
        """Say who has the mailbox of that number."""
        return self.me if number == self.number else f"rank {number}"

    def to_json(self) -> str:
        """Return all of it as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> GeneratorConfig:
        """Return what `to_json` has made."""
        fields = json.loads(text)
        for each in ("host_of", "interfaces"):
            fields[each] = tuple(fields[each])
        return GeneratorConfig(**fields | {"rules": Rules(**fields["rules"])})

    def meet(self, store: Store) -> Callable[[Callable[[], bool]], None]:
        """Connect to all workers; return what serves them while its argument says to."""
        mailbox = self._open(store, self.number, range(self.workers))
        return functools.partial(self._serve, mailbox, Returns(store, self.room, self.workers))

    def client(
        self,
        store: Store,
        rank: int,
        returned: bool = False,
        lives: Callable[[int], bool] = lambda _: False,
    ) -> tuple[Mailbox, Client]:
        """Connect a worker to the generator; its mailbox is to be closed at the end.

        Args:
            store: where they meet.
            rank: the worker's.
            returned: whether it was started again while the others go on.
            lives: whether the process of a worker runs, as far as is known.

        Raises:
            RendezvousError: the generator did not come, or is dead.
        """
        if not returned:
            mailbox = self._open(store, rank, [self.number])
        elif rank == self.host or not isinstance(store, Ledger):
            raise RendezvousError(
                f"rank {rank}: cannot come back: the group generator has ended with the process "
                "before this one, which had started it; start all workers again from a checkpoint"
            )
        else:
            mailbox = self._come_back(store, rank)
        layout, board = Layout(self.host_of), self.board(store)
        client = Client(mailbox, rank, self.number, layout, self.rules, self.timeout, board, lives)
        return mailbox, client

    def board(self, store: Store) -> Board:
        """Return what workers tell each other without a generator."""
        return Board(store, self.room, self.workers)

    def follower(
        self, store: Store, rank: int, lives: Callable[[int], bool] = lambda _: False
    ) -> Follower:
        """Return a worker's groups of the static schedule: there is no generator."""
        board = self.board(store)
        return Follower(rank, Layout(self.host_of), self.timeout, board, lives=lives)

    def _come_back(self, store: Ledger, rank: int) -> Mailbox:
        life = life_of(store, self.room, rank)

        def told(left: float) -> dict[int, int]:
            announce(store, self.room, rank, life, left)
            return {self.number: 0}

        return self._open(store, rank, [self.number], life, told)

    def _serve(self, mailbox: Mailbox, returns: Returns, parent: Callable[[], bool]) -> None:
        generator = Generator(Layout(self.host_of), self.rules, self.seed)
        rooms = Rooms(self.workers, self.capacity)
        patience = Patience(self.workers, self.timeout, self.factor, self.least)
        service = GroupService(
            mailbox, generator, self.workers, patience, rooms, returns=returns
        )  # fmt: skip
        returns.start()
        try:
            service.run(parent, self.host)
        finally:
            returns.stop()

    def _open(
        self,
        store: Store,
        number: int,
        peers: range | list[int],
        life: int = 0,
        told: Callable[[float], Mapping[int, int]] | None = None,
    ) -> Mailbox:
        return open_mailbox(
            store,
            number,
            peers,
            room=self.room,
            interfaces=self.interfaces,
            classes=1,
            encrypted=self.encrypted,
            limits=Limits(silence=self.silence),
            seconds=self.timeout,
            name=self.name,
            life=life,
            announce=told,
        )
