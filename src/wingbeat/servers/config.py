"""What a server has to be told when it is started."""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from wingbeat import compression
from wingbeat.compression import Coded
from wingbeat.servers.notes import Applies
from wingbeat.servers.outbox import Order
from wingbeat.servers.service import Service
from wingbeat.servers.sums import Sums
from wingbeat.servers.updating import UpdatingService
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.store import Store

_log = logging.getLogger(__name__)

WINDOW = 128 << 20
"""Bytes that may wait at a server for their turn to be added, over all workers and classes."""

_LEAST = 2
"""Messages that one flow may hold at least: one is added while the next arrives."""

SILENT = 0.8
"""Part of the timeout after which whoever gives no sign is lost. Sooner than all other waits end:
it is known then over which interface."""

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
        wire: the codec that gradients may go through; None for none.
        dense: whether sums go back in the dtype that they were made in, whatever gradients come in.
        optimizer: what it applies to its shards, as JSON, see `wingbeat.servers.applying.rebuilt`;
            empty where it only sums.
        memory: bytes that parameters and the optimizer's state may take.
    """

    module: ClassVar[str] = "wingbeat.servers"
    uses_store_later: ClassVar[bool] = False

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
    wire: Coded | None = None
    dense: bool = False
    optimizer: str = ""
    memory: int = 0

    @property
    def number(self) -> int:
        """The number of its mailbox."""
        return self.workers + self.index

    def name(self, number: int) -> str:
        """Say who has the mailbox of that number."""
        return name_of(number, self.workers, self.hosts)

    @property
    def me(self) -> str:
        """Say which server it is."""
        return self.name(self.number)

    @property
    def limits(self) -> Limits:
        """What may be under way between it and the workers."""
        links = max(1, len(self.interfaces))
        return limits_of(self.workers, self.classes, self.timeout, links)

    def to_json(self) -> str:
        """Return all of it as text."""
        wire = None if self.wire is None else compression.to_json(self.wire)
        return json.dumps({**asdict(self), "wire": wire})

    @staticmethod
    def from_json(text: str) -> ServerConfig:
        """Return what `to_json` has made."""
        fields = json.loads(text)
        fields["hosts"], fields["interfaces"] = tuple(fields["hosts"]), tuple(fields["interfaces"])
        if fields["wire"] is not None:
            fields["wire"] = compression.from_json(fields["wire"])
        return ServerConfig(**fields)

    def open(self, store: Store) -> Mailbox:
        """Connect to all workers."""
        return open_mailbox(
            store,
            self.number,
            range(self.workers),
            namespace=self.room,
            interfaces=self.interfaces,
            classes=self.classes,
            encrypted=self.encrypted,
            limits=self.limits,
            seconds=self.timeout,
            name=self.name,
        )

    def sums(self) -> Sums:
        """Return what makes the sums; with a codec it takes a second to load."""
        if self.wire is None:
            return Sums(self.workers, self.most, dense=self.dense)
        from wingbeat.servers.coded import CodedSums  # torch, which only a codec needs

        largest = Limits().message
        return CodedSums(self.workers, self.most, wire=self.wire, largest=largest, dense=self.dense)

    def connect(self, store: Store) -> Callable[[Callable[[], bool]], None]:
        """Connect to all workers; return what serves them while its argument says to."""
        sums = self.sums()  # before workers count on it
        if self.optimizer:
            # A busy host may take longer to load torch than a sum may take to come.
            importlib.import_module("wingbeat.servers.applying")
        return functools.partial(self.serve, self.open(store), sums)

    def serve(self, mailbox: Mailbox, sums: Sums, parent: Callable[[], bool]) -> None:
        """Work until all workers have left, or the one that started it is gone."""
        options: dict[str, Any] = {
            "most": self.most,
            "order": Order(self.order),
            "timeout": SOONER * self.timeout,
            "classes": self.classes,
            "sums": sums,
        }
        if self.optimizer:
            service: Service = UpdatingService(
                mailbox, self.workers, make=self._applier, room=self.memory, **options
            )
        else:
            service = Service(mailbox, self.workers, **options)
        service.run(parent)
        away = mailbox.refused_connections + mailbox.refused
        if away:
            _log.warning(
                "%s refused %d connections or frames of strangers: %s",
                self.me,
                away.total(),
                ", ".join(f"{why} {n}" for why, n in sorted(away.items())),
            )

    def _applier(self) -> Applies:
        from wingbeat.servers.applying import Applier  # which needs torch

        return Applier(json.loads(self.optimizer))


def limits_of(workers: int, classes: int, timeout: float, interfaces: int = 1) -> Limits:
    """Return what may be under way between a job's workers and servers.

    All flows to one server together hold `WINDOW` bytes at most, but where there are so many that
    none could hold two messages: then two messages each. There is a flow for each worker, class and
    interface.

    >>> [limits_of(n, 2, 60.0).window >> 20 for n in (1, 2, 4, 8, 64)]
    [32, 32, 16, 8, 8]
    """
    usual = Limits()
    least = _LEAST * (usual.message + MAX_HEADER_BYTES)
    window = min(usual.window, max(least, WINDOW // (workers * classes * interfaces)))
    return Limits(message=usual.message, window=window, silence=SILENT * timeout)


def name_of(number: int, workers: int, hosts: tuple[int, ...]) -> str:
    """Say who has the mailbox of that number, with its role.

    >>> name_of(1, 2, (0, 1)), name_of(3, 2, (0, 1))
    ('rank 1', 'server 1 (started by rank 1)')
    """
    if number < workers:
        return f"rank {number}"
    return f"server {number - workers} (started by rank {hosts[number - workers]})"
