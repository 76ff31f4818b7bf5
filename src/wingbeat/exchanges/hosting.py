"""Starts a job's servers, next to the workers, and connects this worker to all of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import weakref
from collections.abc import Callable, Sequence

from wingbeat.compression import Coded
from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.exchanges.client import Client
from wingbeat.exchanges.departures import departures_of
from wingbeat.exchanges.news import News
from wingbeat.servers.config import ServerConfig
from wingbeat.servers.outbox import Order
from wingbeat.servers.protocol import LINKS
from wingbeat.servers.sums import EACH
from wingbeat.transport import graceful_shutdown, interfaces
from wingbeat.transport.messages import Mailbox, open_mailbox
from wingbeat.transport.services import ProcessService, Service, ThreadService
from wingbeat.transport.store import Store
from wingbeat.transport.world import World
from wingbeat.types import Serving

ROOM_FOR = 8
"""How many times the gradients' bytes a server has room for. Two sums of each slice are kept, in
twice the bytes where float16 or bfloat16 is summed in float32; and twice that while buckets are
made anew and sums of the old ones are still under way."""

_SPARE = 64 << 20

SHARE = 4
"""Part of that room, one in so many, that slices may take beside their sums: those of a plan."""

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
        slices: how many slices one server has room for.
        weights: of each network that joins workers and servers, in order, its part of the speed.
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
        self._world = world
        self.count, self.classes = len(hosts), serving.classes
        self.weights = _weights(world)
        most = ROOM_FOR * nbytes + _SPARE
        self.slices = most // (SHARE * EACH)
        config = self._config(serving, hosts, most, wire)
        self.message = config.limits.message
        if optimizer:
            config = dataclasses.replace(config, optimizer=optimizer, memory=memory + _SPARE)
        store = world.store if world.group_store is None else world.group_store()
        self._started: list[Service] = []
        self._news = News(store, f"{config.room}/failed")
        try:
            self._start(config, store)
            mailbox = self._meet(config, store)
        except BaseException as error:
            for started in self._started:
                started.kill()
            if isinstance(error, WingbeatError):
                self._news.tell(str(error).removeprefix(f"rank {world.rank}: "))
            self._news.close(_LOOK_S)
            raise
        self.client = self._client(mailbox, config)
        # Nobody may call `close_world`, as when a function that trains returns.
        weakref.finalize(self, self.client.forget).atexit = False

    def _config(
        self, serving: Serving, hosts: tuple[int, ...], most: int, wire: str | Coded
    ) -> ServerConfig:
        """Return what the first server is told; the others differ in the index."""
        world = self._world
        return ServerConfig(
            room=f"servers/{world.path}",
            index=0,
            workers=world.size,
            hosts=hosts,
            interfaces=("lo",) if world.threads else tuple(link.name for link in world.links),
            classes=self.classes,
            encrypted=serving.encrypted,
            timeout=world.timeout,
            most=most,
            order=serving.order,
            wire=None if isinstance(wire, str) else wire,
            dense=bool(serving.dense and wire),
        )

    def _start(self, config: ServerConfig, store: Store) -> None:
        start, rank = ThreadService if self._world.threads else ProcessService, self._world.rank
        for index in (index for index, host in enumerate(config.hosts) if host == rank):
            try:
                self._started.append(start(dataclasses.replace(config, index=index), store))
            except OSError as err:  # no memory, or too many processes
                raise UsageError(
                    f"rank {rank}: cannot start server {index}: {err}; of {self.count} servers "
                    f"{config.hosts.count(rank)} are to run beside this worker: use fewer"
                ) from None

    def _meet(self, config: ServerConfig, store: Store) -> Mailbox:
        return open_mailbox(
            _Watched(store, self._check),
            self._world.rank,
            [self.number(index) for index in range(self.count)],
            namespace=config.room,
            interfaces=config.interfaces,
            classes=self.classes,
            encrypted=config.encrypted,
            limits=config.limits,
            seconds=config.timeout,
            name=config.name,
        )

    def _client(self, mailbox: Mailbox, config: ServerConfig) -> Client:
        """Return what pushes and pulls; its thread must not keep this alive, and the model."""
        world, news, started = self._world, self._news, self._started
        return Client(
            mailbox,
            [self.number(index) for index in range(self.count)],
            me=f"rank {world.rank}",
            name=config.name,
            timeout=world.timeout,
            order=Order.URGENT if config.order == Order.URGENT.value else Order.READY,
            watch=functools.partial(_failed, news, started),
            tell=news.tell,
            hear=news.hear,
            blame=departures_of(world).blame,
            after=functools.partial(_end, news, started, world.timeout),
        ).serve()

    def number(self, server: int) -> int:
        """Return the number of a server's mailbox."""
        return self._world.size + server

    def close(self) -> None:
        """Leave the servers, and wait until those that were started here have ended.

        Others may need them for longer than this worker. After a failure nobody does.
        """
        failing = graceful_shutdown.is_failing()
        self.client.close(quick=failing)
        _end(
            self._news, self._started, 0.0 if failing or self.client.failed else self._world.timeout
        )

    def _check(self) -> None:
        ended = _failed(self._news, self._started)
        if ended is not None:
            raise PeerError(f"rank {self._world.rank}: {ended} before it had met everyone")
        told = self._news.hear()
        if told is not None:
            raise PeerError(f"rank {self._world.rank}: {told}")


def _failed(news: News, started: Sequence[Service]) -> str | None:
    """Say how one of these servers has ended, or the thread of the news, if one has."""
    return next(filter(None, (each.ended() for each in started)), None) or news.failure or None


def _end(news: News, started: Sequence[Service], seconds: float) -> None:
    """Wait until these servers have ended; kill them if they are not to have any seconds."""
    news.close(_LOOK_S)
    for each in started:
        if seconds:
            each.close(seconds)
        else:
            each.kill()


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


def _weights(world: World) -> tuple[float, ...]:
    """Return the networks' parts of the speed of all, in the order in which mailboxes number them.

    By rank 0's names for them, so that all workers find the same.
    """
    if world.threads or len(world.links) < 2 or len(world.links) > LINKS:
        return (1.0,)
    subnets = world.networks[0] if world.networks else ()
    if len(set(subnets)) < len(world.links):
        return world.weights
    known = zip(map(interfaces.subnet_order, subnets), world.weights, strict=True)
    return tuple(weight for _, weight in sorted(known))


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
