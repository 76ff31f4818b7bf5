"""Starts a job's servers, next to the workers, and connects this worker to all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from wingbeat.errors import PeerError, WingbeatError
from wingbeat.exchanges.client import Client
from wingbeat.exchanges.news import News
from wingbeat.servers.config import ServerConfig, limits_of, name_of
from wingbeat.servers.launch import InProcess, InThread, Started
from wingbeat.servers.outbox import Order
from wingbeat.transport import interfaces, leaving
from wingbeat.transport.messages import open_mailbox
from wingbeat.transport.store import Store
from wingbeat.transport.world import World
from wingbeat.types import Serving
from wingbeat.wires import Coded

ROOM_FOR = 8
"""How many times the gradients' bytes a server has room for. Two sums of each slice are kept, in
twice the bytes where float16 or bfloat16 is summed in float32; and twice that while buckets are
made anew and sums of the old ones are still under way."""

_SPARE = 64 << 20

_LOOK_S = 1.0
"""Seconds between two looks at whether a server has ended while its mailbox is waited for."""


class Hosting:
    """This worker's servers, and its way to all of them.

    Args:
        world: the workers; all make one at the same time.
        serving: how many servers, and how.
        nbytes: of all gradients.
        wire: what gradients travel as: empty for their own dtype, the name of one, or a codec.
        optimizer: what servers apply, see `ServerConfig`; empty where they only sum.
        memory: bytes that parameters and the optimizer's state may take on a server.

    Attributes:
        count: how many servers there are.
        classes: how many classes of flows.
        message: bytes of the largest message.
        client: pushes and pulls.
    """

    def __init__(
        self,
        world: World,
        serving: Serving,
        nbytes: int,
        wire: str | Coded = "",
        optimizer: str = "",
        memory: int = 0,
    ) -> None:
        identity = json.dumps(interfaces.local().identity)
        hosts = placement(world.exchange("server hosts", identity), serving.count)
        self._world, self._hosts = world, hosts
        self.count, self.classes = len(hosts), serving.classes
        limits = limits_of(world.size, self.classes, world.timeout)
        self.message = limits.message
        room = f"servers/{world.path}"
        store = world.store if world.group_store is None else world.group_store()
        names = ("lo",) if world.threads else tuple(link.name for link in world.links)
        start = InThread if world.threads else InProcess
        self._started: list[Started] = [
            start(
                ServerConfig(
                    room=room,
                    index=index,
                    workers=world.size,
                    hosts=hosts,
                    interfaces=names,
                    classes=self.classes,
                    encrypted=serving.encrypted,
                    timeout=world.timeout,
                    most=ROOM_FOR * nbytes + _SPARE,
                    order=serving.order,
                    wire=None if isinstance(wire, str) else wire,
                    dense=bool(serving.dense and wire),
                    optimizer=optimizer,
                    memory=memory + bool(optimizer) * _SPARE,
                ),
                store,
            )
            for index, host in enumerate(hosts)
            if host == world.rank
        ]
        self._news = News(store, f"{room}/failed")
        try:
            mailbox = open_mailbox(
                _Watched(store, self._check),
                world.rank,
                [self.number(index) for index in range(self.count)],
                room=room,
                interfaces=names,
                classes=self.classes,
                encrypted=serving.encrypted,
                limits=limits,
                seconds=world.timeout,
                name=self._name,
            )
        except BaseException as error:
            for started in self._started:
                started.kill()
            if isinstance(error, WingbeatError):
                self._news.tell(str(error).removeprefix(f"rank {world.rank}: "))
            self._news.close(_LOOK_S)
            raise
        self.client = Client(
            mailbox,
            [self.number(index) for index in range(self.count)],
            me=f"rank {world.rank}",
            name=self._name,
            timeout=world.timeout,
            order=Order.URGENT if serving.order == Order.URGENT.value else Order.READY,
            watch=self._ended,
            tell=self._news.tell,
            hear=self._news.hear,
        ).serve()

    def number(self, server: int) -> int:
        """Return the number of a server's mailbox."""
        return self._world.size + server

    def close(self) -> None:
        """Leave the servers, and wait until those that were started here have ended.

        Others may need them for longer than this worker. After a failure nobody does.
        """
        failing = leaving.failing()
        self.client.close(quick=failing)
        self._news.close(_LOOK_S)
        for started in self._started:
            if failing or self.client.failed:
                started.kill()
            else:
                started.close(self._world.timeout)

    def _name(self, number: int) -> str:
        return name_of(number, self._world.size, self._hosts)

    def _ended(self) -> str | None:
        return next(filter(None, (started.ended() for started in self._started)), None)

    def _check(self) -> None:
        ended = self._ended()
        if ended is not None:
            raise PeerError(f"rank {self._world.rank}: {ended} before it had met everyone")
        told = self._news.hear()
        if told is not None:
            raise PeerError(f"rank {self._world.rank}: {told}")


class _Watched:
    """A store in which nothing is waited for once a server that was started here has ended."""

    def __init__(self, store: Store, check: Callable[[], None]) -> None:
        self._store, self._check = store, check
        self.set, self.has = store.set, store.has

    def get(self, key: str, seconds: float) -> str:
        """As `Store.get`, a second at a time."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                return self._store.get(key, max(0.01, min(_LOOK_S, left)))
            except TimeoutError:
                self._check()
                if left <= _LOOK_S:
                    raise


def placement(identities: list[object], count: int) -> tuple[int, ...]:
    """Return for each server the rank that starts it: hosts in turn, and on each its ranks in turn.

    Args:
        identities: by rank, what tells its host from others.
        count: how many servers; 0 for one on each host.

    Raises:
        PeerError: an identity that is no text.
    """
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        if not isinstance(identity, str):
            raise PeerError(f"rank {rank} sent a malformed identity of its host")
        ranks.setdefault(identity, []).append(rank)
    hosts = list(ranks.values())
    chosen = []
    for index in range(count or len(hosts)):
        turn, host = divmod(index, len(hosts))
        chosen.append(hosts[host][turn % len(hosts[host])])
    return tuple(chosen)
