"""What the group generator's process has to be told when it is started."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.groups.board import Board
from wingbeat.groups.client import Client
from wingbeat.groups.follower import Follower
from wingbeat.groups.generator import Generator
from wingbeat.groups.layout import Layout
from wingbeat.groups.patience import FACTOR, LEAST_S, Patience
from wingbeat.groups.returns import Returns, announce, life_of
from wingbeat.groups.rooms import CAPACITY, Rooms
from wingbeat.groups.rules import Rules
from wingbeat.groups.service import GroupService
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.store import AtomicStore, Store

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

    module: ClassVar[str] = "wingbeat.groups"
    uses_store_later: ClassVar[bool] = True

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

    def connect(self, store: Store) -> Callable[[Callable[[], bool]], None]:
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
        elif rank == self.host or not isinstance(store, AtomicStore):
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

    def _come_back(self, store: AtomicStore, rank: int) -> Mailbox:
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
            namespace=self.room,
            interfaces=self.interfaces,
            classes=1,
            encrypted=self.encrypted,
            limits=Limits(silence=self.silence),
            seconds=self.timeout,
            name=self.name,
            incarnation=life,
            announce=told,
        )
