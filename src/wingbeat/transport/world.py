"""The workers of a job, or of a group, and the links between them."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.transport.failures import (
    LONGEST,
    Blame,
    Wait,
    finished_text,
    has_finished,
    is_worth_waiting,
    say_waiting,
)
from wingbeat.transport.group_links import MeetingLink, room_of
from wingbeat.transport.link import MAX_CHANNELS, ChannelLink, Link, lowest_free
from wingbeat.transport.store import Store
from wingbeat.types import Group

if TYPE_CHECKING:
    from wingbeat.transport.nccl import NativeGroup

MAX_OPEN = 64
"""Groups open at once in a process. Each may occupy a thread and the connections to its members."""

REMEMBERED = 4096
"""Sets of ranks whose last epoch is remembered, those used last."""


class Register:
    """Admits groups and keeps count of them; any thread may ask."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._open: set[Group] = set()
        self._last: OrderedDict[tuple[int, tuple[int, ...]], int] = OrderedDict()

    def admit(self, group: Any, rank: int, size: int) -> None:
        """Count ``group`` as open in the process of ``rank``, one of ``size``.

        Raises:
            UsageError: it is no group, has members that do not exist, or has not this rank; this
                epoch of it is over; or too many are open.
        """
        if not isinstance(group, Group):
            raise UsageError(f"open_group({group!r}): allowed is a wingbeat.Group(ranks, epoch)")
        if group.ranks[-1] >= size:
            raise UsageError(
                f"{group}: rank {group.ranks[-1]} does not exist: ranks are 0 to {size - 1}"
            )
        if rank not in group.ranks:
            raise UsageError(
                f"{group}: opened by rank {rank}, which is no member: only members may open it"
            )
        with self._changing:
            key = group.series, group.ranks
            last = self._last.get(key, -1)
            if group.epoch <= last:
                raise UsageError(
                    f"{group}: rank {rank} has opened epoch {last} of these ranks before: give "
                    f"each epoch once, and the next one {last + 1} or higher"
                )
            if len(self._open) >= MAX_OPEN:
                raise UsageError(
                    f"{group}: rank {rank} has {MAX_OPEN} groups open, which is as many as there "
                    "may be: close some (`with world.open_group(group) as members:` does)"
                )
            self._open.add(group)
            self._last[key] = group.epoch
            self._last.move_to_end(key)
            if len(self._last) > REMEMBERED:
                self._last.popitem(last=False)

    def leave(self, group: Group) -> None:
        """Count ``group`` as closed."""
        with self._changing:
            self._open.discard(group)


@dataclass(eq=False)
class World:
    """This worker's place among all of them.

    Attributes:
        rank: this worker's number, 0 to ``size - 1``.
        size: number of workers.
        links: one per network interface in use.
        speeds: bytes a second that each link carries, as measured, alike on all workers.
        timeout: seconds without a sign of a peer after which a wait gives up and names it.
        store: where the workers exchange small texts.
        make_native: makes the group that runs whole collectives itself, given the TOS byte of its
            traffic (None: the usual one); None where there is none.
        native_on: the device types whose tensors go to that group.
        channel: which channel of the links this world's messages go through.
        make_links: makes the links of a group, whose members wait for each other for so many
            seconds; None where there is nobody to link to.
        group: which of all workers these are; None if they are all. In a group ``rank`` and
            ``size`` count its members alone, and `ranks` has their numbers among all.
        group_store: returns a way to the store that groups have for themselves, so that none waits
            for what others ask it; None where all ask by the same.
        threads: whether the workers are threads of one process.
        networks: for each rank, the subnet that each of its links is on, so that one knows who is
            joined directly; empty where all are.
        interfaces: names of this host's that are used; empty where the system chooses.
        returned: whether this worker was started again alone, while the others go on: it has no
            links, and only a strategy whose workers come and go lets it in.
        serial: of a channel, how many were opened before it: whoever is started again finds the
            same one by that.
        parent: of a channel, the world that it was opened in.
    """

    rank: int
    size: int
    links: tuple[Link, ...]
    speeds: tuple[float, ...]
    timeout: float
    store: Store
    make_native: Callable[[int | None], NativeGroup] | None = None
    native_on: frozenset[str] = frozenset({"cuda"})
    channel: int = 0
    make_links: Callable[[Group, float], tuple[Link, ...]] | None = None
    group: Group | None = None
    group_store: Callable[[], Store] | None = None
    threads: bool = False
    networks: tuple[tuple[str, ...], ...] = ()
    interfaces: tuple[str, ...] = ()
    returned: bool = False
    serial: int = 0
    parent: World | None = None
    _natives: dict[int | None, NativeGroup] = field(default_factory=dict)
    _close: Callable[[], None] | None = None
    _exchanges: int = 0
    _users: list[Callable[[], None]] = field(default_factory=list)
    _channels: set[int] = field(default_factory=set)
    _opened: int = 0
    _inner: weakref.WeakSet[World] = field(default_factory=weakref.WeakSet)
    _name: str = ""
    _register: Register = field(default_factory=Register)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of each of these workers among all: what messages call them."""
        return tuple(range(self.size)) if self.group is None else self.group.ranks

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the share of each tensor that each link carries, in proportion to its speed."""
        return tuple(speed / sum(self.speeds) for speed in self.speeds)

    @property
    def path(self) -> str:
        """What keeps apart what is exchanged here from what other worlds of this job exchange."""
        return f"{self._name}{self._exchanges}"

    def open_group(self, group: Group, *, interface: int | None = None) -> World:
        """Make a world of the group's members alone; only they call it, and it waits for nobody.

        Its collectives sum over the members. They go over connections of their own, made by the
        first collective, so they can be in any order relative to this world's and other groups',
        and each group goes on by itself. If a member fails, its group fails on all members, and
        whoever goes on opens another: of the same ranks in a later epoch, or of other ranks.

        Close it, or use it in ``with``, when the group is done; this world closes it too.

        Args:
            group: the members.
            interface: the index of the only one to use, the same on all members; None: all.

        Raises:
            UsageError: the group has ranks that do not exist, or not this one; this epoch of
                it is over; too many groups are open; there is no such interface; or this is not
                the world of all workers.
        """
        if self.group is not None or self.channel:
            raise UsageError(
                f"{group} was opened in a part of the world: call open_group on what "
                "wingbeat.init() has returned"
            )
        if interface is not None and not 0 <= interface < len(self.links):
            raise UsageError(
                f"open_group(interface={interface}): allowed are 0 to {len(self.links) - 1}"
            )
        used = slice(interface, None if interface is None else interface + 1)
        self._register.admit(group, self.rank, self.size)
        links: tuple[Link, ...] = ()
        if len(group.ranks) > 1:
            assert self.make_links is not None, "a world of several workers makes links"
            links = self.make_links(group, self.timeout)[used]
        inner = World(
            group.ranks.index(self.rank),
            len(group.ranks),
            links,
            self.speeds[used][: len(links)],
            self.timeout,
            self.store if self.group_store is None else self.group_store(),
            group=group,
            networks=tuple(self.networks[r][used] for r in group.ranks) if self.networks else (),
            _name=room_of(group),
        )
        self._inner.add(inner)
        inner._close = weakref.finalize(inner, self._register.leave, group)
        return inner

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # What is under way will not be waited for: call off a meeting, whoever may yet come.
            for link in self.links:
                if isinstance(link, MeetingLink) and not link.met:
                    link.close()
        self.close()

    def open_channel(self) -> World:
        """Make a world of the same workers, apart from this one; every worker must call it.

        Its collectives and exchanges can be in any order relative to this world's and those of
        its other channels. Close it when it is not needed any more; this world closes it too.

        Raises:
            UsageError: all channels are in use, or this is the world of a group.
            PeerError: a worker sent something that is no list of channels.
        """
        if self.group is not None:
            raise UsageError(f"{self.group} has no channels: open another group in place of one")
        if len(self._channels) > MAX_CHANNELS // 2:
            gc.collect()  # dropped models keep theirs until they are collected
        taken = self._channels if self.returned else self._taken_channels()
        number = lowest_free(taken)
        self._channels.add(number)
        inner = World(
            self.rank,
            self.size,
            tuple(ChannelLink(link, number) for link in self.links),
            self.speeds,
            self.timeout,
            self.store,
            self.make_native,
            self.native_on,
            number,
            group_store=self.group_store,
            threads=self.threads,
            networks=self.networks,
            interfaces=self.interfaces,
            returned=self.returned,
            serial=self._opened,
            parent=self,
            _name=f"{self._name}{self._exchanges}.",
        )
        self._opened += 1
        self._inner.add(inner)
        # Given back once, when it is closed or collected: another may have it after that.
        inner._close = weakref.finalize(inner, self._channels.discard, number)
        return inner

    def _taken_channels(self) -> set[int]:
        taken: set[int] = set()
        for rank, answer in enumerate(self.exchange("channels", sorted(self._channels))):
            fine = isinstance(answer, list) and all(
                type(n) is int and 0 < n <= MAX_CHANNELS for n in answer
            )
            if not fine:
                raise PeerError(
                    f"rank {self.ranks[self.rank]}: rank {self.ranks[rank]} sent malformed "
                    f"channels: {str(answer)[:80]}"
                )
            taken.update(answer)
        return taken

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Give every worker everyone's ``value``, by rank. Values travel as JSON.

        Called the same number of times on every rank, in the same order.

        Raises:
            RendezvousError: a rank published nothing within the timeout, or something that is
                not JSON; names the rank and ``what``.
            UsageError: this worker was started again alone, so the others are past this.
        """
        if self.returned:
            raise UsageError(
                f"rank {self.rank} was started again while the others go on: it cannot do {what!r} "
                "with them; train with a strategy whose workers may come back (wingbeat.Canary), "
                "or start all workers again"
            )
        self.store.set(f"{self._name}{self._exchanges + 1}/{what}/{self.rank}", json.dumps(value))
        return self.repeated(what)

    def repeated(self, what: str) -> list[Any]:
        """Return what an `exchange` gave the process before this one, of a worker that `returned`.

        Raises:
            RendezvousError: as `exchange`.
        """
        self._exchanges += 1
        prefix = f"{self._name}{self._exchanges}/{what}"
        return [self._fetch(what, prefix, peer) for peer in range(self.size)]

    def publish(self, what: str, value: Any) -> None:
        """Let the others `read` this worker's ``value``, as JSON; once under each name."""
        self.store.set(f"{self._name}said/{what}/{self.rank}", json.dumps(value))

    def read(self, what: str, peer: int) -> Any:
        """Wait for what ``peer`` has published under the name ``what``.

        Raises:
            RendezvousError: as for `exchange`.
        """
        return self._fetch(what, f"{self._name}said/{what}", peer)

    def said(self, what: str, peer: int) -> bool:
        """Whether ``peer`` has published something under the name ``what``; waits for nobody."""
        return self.store.has(f"{self._name}said/{what}/{peer}")

    def _fetch(self, what: str, prefix: str, peer: int) -> Any:
        try:
            return json.loads(self._awaited(f"{prefix}/{peer}", what, peer))
        except (TimeoutError, ValueError, RecursionError) as err:
            mine, theirs = self.ranks[self.rank], self.ranks[peer]
            if isinstance(err, TimeoutError) and has_finished(self.store, theirs):
                raise RendezvousError(finished_text(mine, theirs, repr(what))) from None
            kind = "sent no answer" if isinstance(err, TimeoutError) else "sent no valid JSON"
            raise RendezvousError(
                f"rank {mine}: rank {theirs} {kind} for {what!r} within {self.timeout:g} s; "
                "check that it is running the same script"
            ) from None

    def _awaited(self, key: str, what: str, peer: int) -> str:
        """Return what ``peer`` publishes under ``key``, for which it has longer if it lives.

        Raises:
            TimeoutError: it did not within the timeout, and does not live or waits for this worker;
                or not within `LONGEST` times as many seconds.
        """
        mine, theirs = self.ranks[self.rank], self.ranks[peer]
        wait = Wait(f"rank {mine}", f"the answer for {what!r}")
        try:
            while True:
                try:
                    return self.store.get(key, self.timeout)
                except TimeoutError:
                    say_waiting(self.store, mine, theirs)
                    stuck = wait.seconds() > LONGEST * self.timeout
                    if stuck or not is_worth_waiting(self.store, mine, theirs):
                        raise
                    wait.look(f"rank {theirs}")
        finally:
            if wait.seconds() > self.timeout:
                say_waiting(self.store, mine, None)

    @property
    def native(self) -> NativeGroup:
        """The group for tensors on GPUs, made on first use, by every rank alike.

        Raises:
            UsageError: this world has none.
        """
        return self.native_in(None)

    def native_in(self, traffic_class: int | None) -> NativeGroup:
        """Return the group whose traffic has that TOS byte, made on first use, by all ranks alike.

        Raises:
            UsageError: this world has none, or none with classes.
        """
        if traffic_class not in self._natives:
            if self.group is not None:
                raise UsageError(f"{self.group} carries CPU tensors only: copy them to the CPU")
            if self.make_native is None:
                raise UsageError("this world carries CPU tensors only; move the model to the CPU")
            self._natives[traffic_class] = self.make_native(traffic_class)
        return self._natives[traffic_class]

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once before the links are closed."""
        self._users.append(callback)

    def close(self) -> None:
        """Stop the threads that use the links, then close the links. Safe to call twice."""
        for inner in list(self._inner):
            inner.close()
        users, self._users = self._users, []
        for callback in users:
            callback()
        self._give_up_unmet()
        if not self.channel:
            for link in self.links:
                link.close()
        close, self._close = self._close, None
        if close is not None:
            close()

    def _give_up_unmet(self) -> None:
        """Tell the other members of a group that this one closes it before it has met them."""
        if self.group is not None and self._close is not None:
            met = any(isinstance(link, MeetingLink) and link.met for link in self.links)
            if self.links and not met:
                rank, room = self.ranks[self.rank], room_of(self.group)
                Blame(self.store, rank, self.ranks[-1] + 1, self.timeout, room).give_up()


_current: World | None = None


def current() -> World:
    """Return the world made by `init`.

    Raises:
        UsageError: `init` has not been called.
    """
    if _current is None:
        raise UsageError("wingbeat is not initialised: call wingbeat.init() before distribute()")
    return _current


def set_current(world: World | None) -> World | None:
    """Install ``world`` as the current one and return the one before."""
    global _current
    before, _current = _current, world
    return before
