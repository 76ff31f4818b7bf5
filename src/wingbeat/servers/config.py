"""What a server has to be told when it is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from wingbeat.servers.notes import Applies
from wingbeat.servers.outbox import Order
from wingbeat.servers.service import Service
from wingbeat.servers.updating import UpdatingService
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.meeting import open_mailbox
from wingbeat.transport.store import Store

SOONER = 0.9
"""Part of the timeout after which a server says whom it waits for: before workers give it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One server's place in the job, and how it is to work.

    Attributes:
        room: of the mailboxes of this job's servers and workers.
        index: this server's number among the servers.
        workers: how many there are; their mailboxes are numbered by rank, servers follow.
        hosts: for each server, the rank of the worker that started it.
        interfaces: names of the network interfaces to use.
        classes: how many classes of flows there are.
        encrypted: whether messages are.
        timeout: seconds that any wait may take.
        most: bytes that all sums together may take.
        order: in which order sums are sent.
        optimizer: what it applies to its shards, as JSON, see `wingbeat.servers.applying.rebuilt`;
            empty where it only sums.
        memory: bytes that parameters and the optimizer's state may take.
    """

    room: str
    index: int
    workers: int
    hosts: tuple[int, ...]
    interfaces: tuple[str, ...]
    classes: int
    encrypted: bool
    timeout: float
    most: int
    order: str
    optimizer: str = ""
    memory: int = 0

    @property
    def number(self) -> int:
        """The number of its mailbox."""
        return self.workers + self.index

    def name(self, number: int) -> str:
        """Say who has the mailbox of that number."""
        return name_of(number, self.workers, self.hosts)

    def to_json(self) -> str:
        """Return all of it as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ServerConfig:
        """Return what `to_json` has made."""
        fields = json.loads(text)
        fields["hosts"], fields["interfaces"] = tuple(fields["hosts"]), tuple(fields["interfaces"])
        return ServerConfig(**fields)

    def open(self, store: Store) -> Mailbox:
        """Connect to all workers."""
        return open_mailbox(
            store,
            self.number,
            range(self.workers),
            room=self.room,
            interfaces=self.interfaces,
            classes=self.classes,
            encrypted=self.encrypted,
            limits=Limits(silence=self.timeout),
            seconds=self.timeout,
            name=self.name,
        )

    def serve(self, mailbox: Mailbox, parent: Callable[[], bool]) -> None:
        """Work until all workers have left, or the one that started it is gone."""
        options: dict[str, Any] = {
            "most": self.most,
            "order": Order(self.order),
            "timeout": SOONER * self.timeout,
            "classes": self.classes,
        }
        if self.optimizer:
            service: Service = UpdatingService(
                mailbox, self.workers, make=self._applier, room=self.memory, **options
            )
        else:
            service = Service(mailbox, self.workers, **options)
        service.run(parent)

    def _applier(self) -> Applies:
        from wingbeat.servers.applying import Applier  # which needs torch: a second to load

        return Applier(json.loads(self.optimizer))


def name_of(number: int, workers: int, hosts: tuple[int, ...]) -> str:
    """Say who has the mailbox of that number, with its role.

    >>> name_of(1, 2, (0, 1)), name_of(3, 2, (0, 1))
    ('rank 1', 'server 1 (started by rank 1)')
    """
    if number < workers:
        return f"rank {number}"
    return f"server {number - workers} (started by rank {hosts[number - workers]})"
