"""Servers of a job: where they run, how they start and end, and how workers connect to them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from wingbeat.compression import Coded, codec_of
from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.methods.parameter_server.aggregator import SLICE_OVERHEAD
from wingbeat.methods.parameter_server.client import Client
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.protocol import MAX_LINKS, Order, printable
from wingbeat.methods.parameter_server.server import ServerConfig
from wingbeat.transport import graceful_shutdown, interfaces
from wingbeat.transport.graceful_shutdown import departures_of
from wingbeat.transport.mesh import Replica
from wingbeat.transport.messages import Mailbox
from wingbeat.transport.services import BackgroundThread, ProcessService, Service, ThreadService
from wingbeat.transport.store import Store
from wingbeat.transport.world import World
from wingbeat.types import Layout

MEMORY_FACTOR = 8
"""A server's memory limit as a multiple of the gradients' size. Two sums of each slice are kept, in
twice the bytes where float16 or bfloat16 is summed in float32; and twice that while buckets change
and sums of the old ones are still in flight.
"""

_SPARE_BYTES = 64 << 20

OVERHEAD_PART = 4
"""The slice overhead of a plan may take at most 1/4 of a server's memory limit."""

_POLL_S = 1.0
"""Interval between checks for ended servers while connecting, in seconds."""


class ServerGroup:
    """The servers of a job: starts those of this worker, and connects to all of them.

    Each worker creates a `ServerGroup`. ``nbytes``, ``wire``, ``optimizer`` and
    ``max_update_bytes`` are as for `ServerExchange`.

    Attributes:
        message: maximum size of a message.
        max_slices: maximum slices of a server.
        weights: for each network between workers and servers, its share of the total speed.
        numbers: for each server, the number of its mailbox.
        client: this worker's connection to the servers.
    """

    def __init__(
        self,
        world: World,
        servers: Servers,
        nbytes: int,
        wire: str | Coded = "",
        optimizer: str = "",
        max_update_bytes: int = 0,
    ) -> None:
        hosts = place_servers(world.layout, servers.count, world.inside)
        self._world = world
        self.count = len(hosts)
        self.numbers = range(world.size, world.size + self.count)
        self.weights = _network_weights(world)
        max_sum_bytes = MEMORY_FACTOR * nbytes + _SPARE_BYTES
        self.max_slices = max_sum_bytes // (OVERHEAD_PART * SLICE_OVERHEAD)
        config = ServerConfig(
            room=f"servers/{world.path}",
            index=0,
            ranks=world.ranks,
            hosts=hosts,
            interfaces=("lo",) if world.threads else tuple(link.name for link in world.links),
            classes=servers.classes,
            encrypted=servers.encrypted,
            timeout=world.timeout,
            max_sum_bytes=max_sum_bytes,
            order=servers.sending,
            wire=codec_of(wire),
            dense=bool(servers.dense and wire),
            optimizer=optimizer,
            max_update_bytes=max_update_bytes + _SPARE_BYTES,
        )
        self.message = config.limits.message
        store = world.store
        self._started: list[Service] = []
        self._notice = FailureNotice(store, f"{config.room}/failed")
        try:
            self._start(config, store)
            watched = _WatchedStore(store, self._check_startup)
            mailbox = config.open(watched, world.rank, self.numbers)
        except BaseException as error:
            for started in self._started:
                started.kill()
            if isinstance(error, WingbeatError):
                self._notice.publish(str(error).removeprefix(f"{world.me}: "))
            self._notice.close(_POLL_S)
            raise
        self.client = self._make_client(mailbox, config)
        # Ends the servers if `close_world` is never called, for example if the model is
        # garbage-collected.
        weakref.finalize(self, self.client.abandon).atexit = False

    def _start(self, config: ServerConfig, store: Store) -> None:
        start, rank = ThreadService if self._world.threads else ProcessService, self._world.rank
        for index in (index for index, host in enumerate(config.hosts) if host == rank):
            try:
                self._started.append(start(dataclasses.replace(config, index=index), store))
            except OSError as err:  # out of memory, or too many processes
                raise UsageError(
                    f"{self._world.me}: cannot start server {index}: {err}; "
                    f"{config.hosts.count(rank)} of {self.count} servers run beside this worker: "
                    "use fewer"
                ) from None

    def _make_client(self, mailbox: Mailbox, config: ServerConfig) -> Client:
        """Return the client, whose thread must not keep this object, and the model, alive."""
        world, notice, started = self._world, self._notice, self._started
        client = Client(
            mailbox,
            self.numbers,
            me=world.me,
            name=config.name,
            timeout=world.timeout,
            order=Order.URGENT if config.order == Order.URGENT.value else Order.READY,
            check_servers=functools.partial(_find_ended, notice, started),
            publish_failure=notice.publish,
            poll_failure=notice.poll,
            attribute_failure=departures_of(world).first_failure,
            on_abandoned=functools.partial(_stop, notice, started, world.timeout),
        )
        client.start()
        return client

    def close(self) -> None:
        """Disconnect, and wait until the servers that this worker started have ended.

        Other workers may need them longer. After a failure the servers are killed.
        """
        failing = graceful_shutdown.is_failing()
        self.client.close(quick=failing)
        failed = failing or self.client.failed
        _stop(self._notice, self._started, 0.0 if failed else self._world.timeout)

    def _check_startup(self) -> None:
        ended = _find_ended(self._notice, self._started)
        if ended is not None:
            raise PeerError(f"{self._world.me}: {ended} before all workers had connected")
        reason = self._notice.poll()
        if reason is not None:
            raise PeerError(f"{self._world.me}: {reason}")


class FailureNotice:
    """Publishes this worker's reason for a failure, and reads the reasons of other workers.

    A failed server cannot report itself: the worker that started it publishes the failure in the
    store. The store may be slow or unreachable when a host has failed, so a separate thread
    accesses it. The first reason under the key is kept.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._requested = threading.Event()
        self._reason: str | None = None
        self._unpublished: str | None = None
        self._closed = False
        self._thread = BackgroundThread(self._run, "wingbeat-failures")

    def publish(self, reason: str) -> None:
        """Publish a reason without blocking."""
        self._unpublished = reason
        self._request()

    def poll(self) -> str | None:
        """Return the published reason as of the last access to the store; start another access."""
        if self._reason is None:
            self._request()
        return self._reason

    @property
    def failure(self) -> str:
        """The exception that ended the thread; empty if there is none."""
        return self._thread.failure

    def close(self, seconds: float) -> None:
        """Stop once the reason is published, or after ``seconds``."""
        self._closed = True
        self._requested.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _request(self) -> None:
        if not self._closed:
            if self._thread.ident is None:
                self._thread.start()
            self._requested.set()

    def _run(self) -> None:
        while not self._closed or self._unpublished is not None:
            self._requested.wait()
            self._requested.clear()
            # Without the store, workers detect a failed server by its silence.
            with contextlib.suppress(RuntimeError, OSError, TimeoutError):
                reason, self._unpublished = self._unpublished, None
                if self._store.has(self._key):
                    self._reason = printable(self._store.get(self._key, 1.0).encode())
                elif reason is not None:
                    self._store.set(self._key, reason)


def _find_ended(notice: FailureNotice, started: Sequence[Service]) -> str | None:
    """Return how one of these servers, or the notice's thread, has ended, if one has."""
    return next(filter(None, (each.ended() for each in started)), None) or notice.failure or None


def _stop(notice: FailureNotice, started: Sequence[Service], seconds: float) -> None:
    """Wait until these servers have ended; kill them if ``seconds`` is 0."""
    notice.close(_POLL_S)
    for each in started:
        if seconds:
            each.close(seconds)
        else:
            each.kill()


class _WatchedStore:
    """A store whose `get` calls ``check`` every second."""

    def __init__(self, store: Store, check: Callable[[], None]) -> None:
        self._store, self._check = store, check
        self.set, self.has = store.set, store.has

    def get(self, key: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                return self._store.get(key, max(0.01, min(_POLL_S, left)))
            except TimeoutError:
                self._check()
                if left <= _POLL_S:
                    raise


def _network_weights(world: World) -> tuple[float, ...]:
    """Return each network's share of the total speed, ordered as in the mailboxes.

    The order is that of rank 0's networks, so it is the same on all workers.
    """
    if world.threads or len(world.links) < 2 or len(world.links) > MAX_LINKS:
        return (1.0,)
    subnets = world.networks[0] if world.networks else ()
    if len(set(subnets)) < len(world.links):
        return world.weights
    known = zip(map(interfaces.subnet_order, subnets), world.weights, strict=True)
    return tuple(weight for _, weight in sorted(known))


def place_servers(layout: Layout, count: int, replica: Replica | None = None) -> tuple[int, ...]:
    """Return for each server the worker that starts it: round-robin over hosts, then over workers.

    A ``count`` of 0 means one server per host. Between ``replica`` and others, whose columns have
    servers of their own, it means so many in each column that there is one per host, or one per
    column if there are more columns. Each column begins with another host, so that all hosts have
    equal parts of the traffic.
    """
    hosts, chosen = layout.hosts, []
    columns, first = (1, 0) if replica is None else (replica.size, replica.place)
    each = count or -(-len(hosts) // columns)
    for index in range(each):
        turn, host = divmod(first * each + index, len(hosts))
        chosen.append(hosts[host][turn % len(hosts[host])])
    return tuple(chosen)
