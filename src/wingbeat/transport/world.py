"""`World`: the workers of a job or of a group, and the links between them."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.observe.log import log
from wingbeat.schema import MalformedMessage, Range, Sizes, parse_json
from wingbeat.transport.failures import (
    MAX_WAIT_FACTOR,
    WaitLog,
    finished_peer_text,
    has_finished,
    is_progressing,
    process_has_ended,
    publish_wait,
    published_failure,
)
from wingbeat.transport.link import (
    MAX_CHANNELS,
    Link,
    group_prefix,
    lowest_free,
)
from wingbeat.transport.store import AtomicStore, read_value
from wingbeat.types import Group, Layout

if TYPE_CHECKING:
    from wingbeat.transport.mesh import Replica
    from wingbeat.transport.nccl import NcclGroup
    from wingbeat.transport.replica_jobs import TorchJob
    from wingbeat.transport.services import Service, ServiceConfig

_LOG_S = 15.0
"""Seconds of a wait for another rank's value before it is logged."""

MAX_OPEN_GROUPS = 64
"""Maximum open groups of a process."""

_CHANNELS = Range(1, MAX_CHANNELS + 1)

MAX_REMEMBERED_EPOCHS = 4096
"""Maximum sets of ranks whose last epoch is stored; the least recently used is evicted first."""


_LIVENESS_CHECK_S = 0.5
"""Seconds between two checks whether the process whose value is awaited has exited."""


class OpenGroups:
    """The open groups of a process and their last epochs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Group] = set()
        self._last: OrderedDict[tuple[int, tuple[int, ...]], int] = OrderedDict()

    def add(self, group: Any, rank: int, size: int) -> None:
        """Record ``group`` as open; a `UsageError` if it is invalid or the limit is reached."""
        if not isinstance(group, Group):
            raise UsageError(f"open_group({group!r}): allowed is a wingbeat.Group(ranks, epoch)")
        if group.ranks[-1] >= size:
            raise UsageError(
                f"{group}: rank {group.ranks[-1]} does not exist: ranks are 0 to {size - 1}"
            )
        if rank not in group.ranks:
            raise UsageError(f"{group}: rank {rank} is not a member: only members may open it")
        with self._lock:
            key = group.series, group.ranks
            last = self._last.get(key, -1)
            if group.epoch <= last:
                raise UsageError(
                    f"{group}: rank {rank} has already opened epoch {last} of these ranks: use "
                    f"epoch {last + 1} or higher"
                )
            if len(self._open) >= MAX_OPEN_GROUPS:
                raise UsageError(
                    f"{group}: rank {rank} has {MAX_OPEN_GROUPS} groups open, which is the limit: "
                    "close some (`with world.open_group(group) as members:` does)"
                )
            self._open.add(group)
            self._last[key] = group.epoch
            self._last.move_to_end(key)
            if len(self._last) > MAX_REMEMBERED_EPOCHS:
                self._last.popitem(last=False)

    def discard(self, group: Group) -> None:
        """Record ``group`` as closed."""
        with self._lock:
            self._open.discard(group)


_ALONE = Layout.even(1, 1)


@dataclass(eq=False)
class World:
    """The workers of a job, or of a group or channel of them, as seen by one worker.

    Attributes:
        rank: this worker's number, 0 to ``size - 1``.
        size: number of workers.
        links: one per network interface in use.
        speeds: measured bytes per second of each link, equal on all workers.
        timeout: seconds without a sign of life from a peer after which a wait for it fails.
        store: the rendezvous store.
        make_nccl_group: creates the NCCL group, given the TOS byte of its traffic (None: the
            default); None without NCCL.
        nccl_devices: device types whose tensors use the NCCL group.
        channel: the channel of the links that this world uses.
        make_links: creates the links of a group; None without links.
        group: the members, if this is the world of a group; else None. In a group, ``rank`` and
            ``size`` count its members, and `ranks` has their ranks in the job.
        threads: whether the workers are threads of one process.
        networks: for each rank, the subnet of each of its links; empty if all ranks are directly
            connected.
        interfaces: names of this host's interfaces in use; empty if the system chooses.
        layout: the workers of each host; default: each has a host of its own.
        members: the rank of each worker in the job; empty if it is the same number. The workers of
            a column of a mesh have other numbers, those of their replicas.
        torch_job: the ranks of torch's default group, if each replica is a torch job of its own;
            None if it has all ranks.
        host_service: starts a service that outlives this worker; None: a worker starts its own.
        encrypted: whether its connections are encrypted; None: those between hosts.
        dscp: class of what this worker sends over them.
        inside: the ranks that hold this worker's model together; None if it holds all of it.
        returned: whether this worker was restarted alone while the others continue. It has no
            links; only strategies with dynamic membership accept it.
        incarnation: number of processes that had this rank before this one, since the store exists.
        serial: number of channels opened before this one, by which a restarted worker finds its
            channel.
        parent: the world in which this channel was opened.
        make_channel: opens a second group of the same members in place of a channel of a group.
        explains: whether the error of a failed collective names the rank that caused it, for which
            others are waited for.
        responds: whether the process of a rank of the job answers; its silence ends a wait in this
            group, which can continue without it. None: the timeout does.
    """

    rank: int
    size: int
    links: tuple[Link, ...]
    speeds: tuple[float, ...]
    timeout: float
    store: AtomicStore
    make_nccl_group: Callable[[int | None], NcclGroup] | None = None
    nccl_devices: frozenset[str] = frozenset({"cuda"})
    channel: int = 0
    make_links: Callable[[Group], tuple[Link, ...]] | None = None
    group: Group | None = None
    threads: bool = False
    networks: tuple[tuple[str, ...], ...] = ()
    interfaces: tuple[str, ...] = ()
    returned: bool = False
    incarnation: int = 0
    serial: int = 0
    parent: World | None = None
    layout: Layout = _ALONE
    members: tuple[int, ...] = ()
    inside: Replica | None = None
    torch_job: TorchJob | None = None
    host_service: Callable[[ServiceConfig, AtomicStore], Service] | None = None
    encrypted: bool | None = None
    dscp: int = 0
    make_channel: Callable[[], World] | None = None
    explains: bool = True
    responds: Callable[[int], bool] | None = None
    _prefix: str = ""
    _nccl_groups: dict[int | None, NcclGroup] = field(init=False, default_factory=dict)
    _exchanges: int = field(init=False, default=0)
    _users: list[Callable[[], None]] = field(init=False, default_factory=list)
    _closers: list[Callable[[], object]] = field(init=False, default_factory=list)
    _channels: set[int] = field(init=False, default_factory=set)
    _opened: int = field(init=False, default=0)
    _series: int = field(init=False, default=0)
    _children: weakref.WeakSet[World] = field(init=False, default_factory=weakref.WeakSet)
    _open_groups: OpenGroups = field(init=False, default_factory=OpenGroups)

    def __post_init__(self) -> None:
        if self.layout is _ALONE:
            self.layout = Layout.even(self.size, 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each of these workers in the job, as used in error messages."""
        if self.members:
            return self.members
        return tuple(range(self.size)) if self.group is None else self.group.ranks

    def name(self, rank: int) -> str:
        """Return the name of one of these workers in messages, by its rank in the job."""
        return f"rank {self.ranks[rank]}"

    @property
    def me(self) -> str:
        """The name of this worker in messages."""
        return self.name(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this worker logs what concerns all; in a mesh, rank 0 of the job."""
        return self.rank == 0 and self.ranks[0] == 0

    @property
    def replica(self) -> Replica | None:
        """The replica of this worker, if it has several ranks; None otherwise."""
        return self.inside if self.inside is not None and self.inside.size > 1 else None

    def replica_of(self, worker: int) -> tuple[int, ...]:
        """Return the ranks in the job of the replica in which one of these workers is."""
        rank = self.ranks[worker]
        replicas = () if self.inside is None else self.inside.replicas
        return next((ranks for ranks in replicas if rank in ranks), (rank,))

    def name_of(self, worker: int) -> str:
        """Return the name of one of these workers, with its replica, in messages."""
        ranks = self.replica_of(worker)
        if self.inside is None or len(ranks) == 1:
            return f"rank {ranks[0]}"
        return self.inside.name(self.inside.replicas.index(ranks))

    @property
    def weights(self) -> tuple[float, ...]:
        """Fraction of each tensor that each link carries, proportional to the link's speed."""
        return tuple(speed / sum(self.speeds) for speed in self.speeds)

    @property
    def path(self) -> str:
        """A prefix for keys in the store, unique among the worlds of this job."""
        return f"{self._prefix}{self._exchanges}"

    def next_series(self) -> int:
        """Return a number from 1 on for a user of this world's groups, the same on all workers.

        Its epochs start at ``(number - 1) * SERIES``. A restarted process creates its users in the
        same order.
        """
        self._series += 1
        return self._series

    def open_group(self, group: Group, *, interface: int | None = None) -> World:
        """Create a world of the group's members. Only members call it, and it does not block.

        The collectives of a group sum over its members, over the connections between them. The
        first one restores connections that were lost. Collectives of different groups and of this
        world can run in any order relative to each other. If a member fails, the group fails on all
        members. The others can then open another group, with the same ranks in a later epoch or
        with other ranks.

        Close the group after use, or open it in a ``with`` block. Closing this world also closes
        its groups.

        Args:
            group: the members.
            interface: index of the only interface to use, the same on all members; None: all.

        Raises:
            UsageError: the group has ranks that do not exist, lacks this rank, or was opened with
                this epoch before; too many groups are open; there is no such interface; or this is
                not the world of all workers.
        """
        if self.group is not None or self.channel:
            raise UsageError(
                f"{group}: open_group() was called on a group or channel: call it on the world "
                "that wingbeat.init() returned"
            )
        if interface is not None and not 0 <= interface < len(self.links):
            raise UsageError(
                f"open_group(interface={interface}): allowed are 0 to {len(self.links) - 1}"
            )
        used = slice(interface, None if interface is None else interface + 1)
        self._open_groups.add(group, self.rank, self.size)
        links: tuple[Link, ...] = ()
        if len(group.ranks) > 1:
            assert self.make_links is not None, "a world of several workers makes links"
            links = self.make_links(group)[used]
        inner = World(
            group.ranks.index(self.rank),
            len(group.ranks),
            links,
            self.speeds[used][: len(links)],
            self.timeout,
            self.store,
            nccl_devices=self.nccl_devices,
            group=group,
            networks=tuple(self.networks[r][used] for r in group.ranks) if self.networks else (),
            layout=Layout.by_name(self.layout.host_of[r] for r in group.ranks),
            members=tuple(self.members[r] for r in group.ranks) if self.members else (),
            inside=self.inside,
            _prefix=group_prefix(group),
        )
        self._children.add(inner)
        inner.on_closed(weakref.finalize(inner, self._open_groups.discard, group))
        return inner

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_channel(self) -> World:
        """Create a world of the same workers with an independent order. Every worker must call it.

        Collectives and exchanges of a channel can run in any order relative to those of this world
        and of its other channels. Close the channel after use; closing this world also closes it.
        A `UsageError` if all channels are in use, or this is the world of a group. A
        `RendezvousError` as in `exchange`.
        """
        if self.make_channel is not None:
            return self.make_channel()
        if self.group is not None:
            raise UsageError(f"{self.group} has no channels: open another group instead")
        if len(self._channels) > MAX_CHANNELS // 2:
            gc.collect()  # dropped models hold their channels until collected
        taken = self._channels if self.returned else self._used_channels()
        number = lowest_free(taken)
        self._channels.add(number)
        inner = replace(
            self,
            channel=number,
            make_links=None,
            serial=self._opened,
            parent=self,
            _prefix=f"{self._prefix}{self._exchanges}.",
        )
        self._opened += 1
        self._children.add(inner)
        # Another world may use the number after this one is closed or collected.
        inner.on_closed(weakref.finalize(inner, self._channels.discard, number))
        return inner

    def _used_channels(self) -> set[int]:
        own = sorted(self._channels)
        return set().union(*self.exchange("channels", own, list[Annotated[int, _CHANNELS]]))

    def exchange(self, what: str, value: Any, hint: Any = Any, **sizes: int) -> list[Any]:
        """Exchange one ``value`` of each worker; return all of them by rank.

        The values are of the type ``hint``, as in `schema.from_json`; by default any JSON. Every
        rank must make the same calls in the same order. A `RendezvousError` if a rank has exited,
        published nothing within the timeout, or another type; names the rank and ``what``. A
        `UsageError` if this worker was restarted alone, so the others have completed this exchange.
        """
        if self.returned:
            raise UsageError(
                f"rank {self.rank} was restarted while the others continue: it cannot take part in "
                f"{what!r}; train with a strategy whose workers may rejoin (wingbeat.Canary), "
                "or restart all workers"
            )
        self.store.set(f"{self._prefix}{self._exchanges + 1}/{what}/{self.rank}", json.dumps(value))
        return self.replay_exchange(what, hint, **sizes)

    def replay_exchange(self, what: str, hint: Any = Any, **sizes: int) -> list[Any]:
        """Return the result of an `exchange` in which this rank's former process took part.

        ``hint`` and a `RendezvousError` are as in `exchange`.
        """
        self._exchanges += 1
        prefix = f"{self._prefix}{self._exchanges}/{what}"
        return [self._fetch(what, prefix, peer, hint, sizes) for peer in range(self.size)]

    def publish(self, what: str, value: Any) -> None:
        """Publish this worker's ``value`` as JSON for `read`, once per name."""
        self.store.set(f"{self._prefix}published/{what}/{self.rank}", json.dumps(value))

    def read(self, what: str, peer: int, hint: Any = Any, **sizes: int) -> Any:
        """Wait for the value that ``peer`` published as ``what``.

        ``hint`` and a `RendezvousError` are as in `exchange`.
        """
        return self._fetch(what, f"{self._prefix}published/{what}", peer, hint, sizes)

    def has_published(self, what: str, peer: int) -> bool:
        """Whether ``peer`` has published a value as ``what``. Does not wait."""
        return self.store.has(f"{self._prefix}published/{what}/{peer}")

    def _fetch(self, what: str, prefix: str, peer: int, hint: Any, sizes: Sizes) -> Any:
        mine, theirs = self.ranks[self.rank], self.ranks[peer]
        text = self._await(f"{prefix}/{peer}", what, peer)
        try:
            return parse_json(hint, text, what, **sizes)
        except MalformedMessage as error:
            raise RendezvousError(
                f"rank {mine}: rank {theirs} published malformed {what}: {error}; check that it is "
                "running the same script"
            ) from None

    def _await(self, key: str, what: str, peer: int) -> str:
        """Return the value of ``key``, which ``peer`` publishes.

        Waits until ``peer`` has exited, and beyond the timeout while it is progressing.
        """
        mine, theirs = self.ranks[self.rank], self.ranks[peer]
        wait, progress_s = WaitLog(f"rank {mine}", f"the value of {what!r}"), self.timeout
        slice_s, logged = min(_LIVENESS_CHECK_S, self.timeout), False
        try:
            while True:
                begin = time.monotonic()
                try:
                    return self.store.get(key, slice_s)
                except TimeoutError as error:
                    if time.monotonic() - begin < slice_s / 2:  # it did not wait
                        raise RendezvousError(
                            f"rank {mine}: cannot read {what!r} of rank {theirs} in the store: "
                            f"{error}; read the output of the process that serves the store: rank "
                            "0, or its launcher"
                        ) from None
                if process_has_ended(self.store, theirs):
                    return self._last_value(key, what, theirs)
                if not logged and wait.seconds() >= _LOG_S:
                    self._log_long_wait(what, theirs, wait.seconds())
                    logged = True
                if wait.seconds() < progress_s:
                    continue
                progress_s += self.timeout
                publish_wait(self.store, mine, theirs)
                stuck = wait.seconds() > MAX_WAIT_FACTOR * self.timeout
                if stuck or not is_progressing(self.store, mine, theirs):
                    raise RendezvousError(
                        f"rank {mine}: rank {theirs} published nothing for {what!r} within "
                        f"{self.timeout:g} s; check that it is running the same script"
                    )
                wait.log_if_due(f"rank {theirs}")
        finally:
            if wait.seconds() > self.timeout:
                publish_wait(self.store, mine, None)

    def _last_value(self, key: str, what: str, theirs: int) -> str:
        """Return the value of ``key`` of a process that has exited, or raise how it exited."""
        text = read_value(self.store, key)  # it may have published it before it exited
        if text is not None:
            return text
        mine = self.ranks[self.rank]
        if has_finished(self.store, theirs):
            raise RendezvousError(finished_peer_text(mine, theirs, repr(what)))
        if failure := published_failure(self.store, theirs):
            raise RendezvousError(
                f"rank {mine}: rank {theirs} failed with {failure}, noticed in the exchange of "
                f"{what!r}"
            )
        raise RendezvousError(
            f"rank {mine}: the process of rank {theirs} has ended, and published nothing for "
            f"{what!r}: it was killed, or called os._exit(); read its output"
        )

    def _log_long_wait(self, what: str, theirs: int, seconds: float) -> None:
        log.warning(
            "rank %d: has waited for %r of rank %d for %d s, and waits for up to %d s: that rank "
            "has not come so far, or this process was started again alone, and the others have the "
            "store of the former one; such a restart needs `wingbeat store`",
            *(self.ranks[self.rank], what, theirs, round(seconds), round(self.timeout)),
        )

    @property
    def nccl(self) -> NcclGroup:
        """The group for tensors on GPUs. The first call creates it and must run on every rank.

        A `UsageError` if this world has none.
        """
        return self.nccl_in(None)

    def nccl_in(self, traffic_class: int | None) -> NcclGroup:
        """Return the group whose traffic has this TOS byte. Its first call must run on every rank.

        A `UsageError` if this world has none, or traffic classes are not supported.
        """
        if traffic_class not in self._nccl_groups:
            if self.group is not None:
                raise UsageError(f"{self.group} carries CPU tensors only: copy them to the CPU")
            if self.make_nccl_group is None:
                raise UsageError("this world carries CPU tensors only; move the model to the CPU")
            self._nccl_groups[traffic_class] = self.make_nccl_group(traffic_class)
        return self._nccl_groups[traffic_class]

    def on_close(self, callback: Callable[[], None]) -> None:
        """Register ``callback``, called once before the links are closed."""
        self._users.append(callback)

    def on_closed(self, callback: Callable[[], object]) -> None:
        """Register ``callback``, called once after the links are closed."""
        self._closers.append(callback)

    def close(self) -> None:
        """Stop the threads that use the links, then close the links. Idempotent."""
        self.finish()
        if not self.channel:
            for link in self.links:
                link.close()
        closers, self._closers = self._closers, []
        for close in closers:
            close()

    def finish(self) -> None:
        """Close groups and channels, and stop the threads that use the links. Idempotent."""
        for inner in list(self._children):
            inner.close()
        users, self._users = self._users, []
        for callback in users:
            callback()


_current: World | None = None


def current() -> World:
    """Return the world that `init` created; a `UsageError` if `init` has not been called."""
    if _current is None:
        raise UsageError("wingbeat is not initialised: call wingbeat.init() before distribute()")
    return _current


def set_current(world: World | None) -> World | None:
    """Install ``world`` as the current one and return the previous one."""
    global _current
    before, _current = _current, world
    return before
