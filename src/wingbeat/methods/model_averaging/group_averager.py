"""Averages of parameters in groups of the moment, beside training (Ripples, section 3.2)."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.exchanges.departures import departures_of
from wingbeat.methods.model_averaging.client import Client
from wingbeat.methods.model_averaging.group_average import GroupAverage
from wingbeat.methods.model_averaging.rules import Layout, Rules
from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.observe.meter import Section
from wingbeat.transport import incarnation, interfaces, leaving
from wingbeat.transport.services.launch import InProcess, InThread, Started
from wingbeat.transport.text import first_line
from wingbeat.types import SERIES, Group, Span

if TYPE_CHECKING:
    import torch

    from wingbeat.methods.model_averaging.group_average import Lossy
    from wingbeat.methods.model_averaging.static import Follower
    from wingbeat.transport.link import Link
    from wingbeat.transport.messages.mailbox import Mailbox
    from wingbeat.transport.world import World


_PART = 16 << 20
"""Bytes that are sent at a time: each part has the whole timeout."""

_TAG = 0
_LOOK_S = 0.1
_NOTHING = -1
"""In place of a size: there is nothing to give."""


class Giving:
    """States that this worker sends to others, each in a thread: training goes on.

    Args:
        world: all workers.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: dict[threading.Thread, World] = {}

    def give(self, taker: int, meeting: int, blob: bytes | bytearray | None) -> None:
        """Begin to send ``blob`` to a worker that meets this one; None if there is nothing.

        Args:
            taker: its rank.
            meeting: the number of their meeting.
            blob: what it is to have.
        """
        self._under_way = {thread: w for thread, w in self._under_way.items() if thread.is_alive()}
        inner = self._world.open_group(Group((self._world.rank, taker), epoch=meeting))
        thread = threading.Thread(
            target=_give, args=(inner, blob), name="wingbeat-give", daemon=True
        )
        self._under_way[thread] = inner
        thread.start()

    def close(self) -> None:
        """End what is under way; who takes it takes another's."""
        for thread, inner in self._under_way.items():
            for link in inner.links:
                link.close()
            thread.join()
        self._under_way.clear()


def _give(inner: World, blob: bytes | bytearray | None) -> None:
    with contextlib.suppress(RuntimeError, WingbeatError), inner:  # the taker says so
        link, peer = inner.links[0], 1 - inner.rank
        _send(link, peer, torch.tensor([_NOTHING if blob is None else len(blob)]), inner.timeout)
        # The memory of bytes is nobody's to write to, which torch would warn of.
        for part in _parts(bytearray(blob or b"")):
            _send(link, peer, part, inner.timeout)
        _receive(link, peer, torch.zeros(1, dtype=torch.int64), inner.timeout)


def take(world: World, giver: int, meeting: int, most: int, lives: Callable[[], bool]) -> bytearray:
    """Return the state that ``giver`` sends.

    Args:
        world: all workers.
        giver: its rank.
        meeting: the number of their meeting.
        most: bytes that it may have.
        lives: whether the giver does, as far as is known.

    Raises:
        PeerError: it has nothing to give, or too much.
        Lost: it was lost.
    """
    inner = world.open_group(Group((world.rank, giver), epoch=meeting))
    taking = _Taking(inner, most)
    thread = threading.Thread(target=taking.run, name="wingbeat-take", daemon=True)
    thread.start()
    begun = time.monotonic()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if not lives():
            for link in inner.links:
                link.close()
            thread.join()
    inner.close()
    name = f"rank {world.rank}: rank {giver}"
    if taking.blob is None:
        raise Lost(f"{name} was lost {time.monotonic() - begun:.1f} s after it was asked for its "
                   f"state: {taking.why}")  # fmt: skip
    if taking.size == _NOTHING:
        raise PeerError(
            f"{name} offers no state to a worker that has come back; start all workers again from "
            "a checkpoint"
        )
    if not 0 <= taking.size <= most:
        raise PeerError(
            f"{name} sends a state of {taking.size} bytes: allowed are {most}; pass "
            "fetch(most=...) a larger number if the state is so large"
        )
    return taking.blob


class Lost(Exception):
    """Who gave its state was lost; says how."""


class _Taking:
    """Receives a state in a thread of its own.

    Attributes:
        size: what the giver has said.
        blob: all of it; None if it was lost.
        why: how.
    """

    def __init__(self, inner: World, most: int) -> None:
        self._inner, self._most = inner, most
        self.size = 0
        self.blob: bytearray | None = None
        self.why = ""

    def run(self) -> None:
        inner = self._inner
        link, peer, seconds = inner.links[0], 1 - inner.rank, inner.timeout
        try:
            size = torch.zeros(1, dtype=torch.int64)
            _receive(link, peer, size, seconds)
            self.size = int(size)
            blob = bytearray(self.size if 0 < self.size <= self._most else 0)
            for part in _parts(blob):
                _receive(link, peer, part, seconds)
            if len(blob) == max(0, self.size):
                _send(link, peer, size, seconds)
            self.blob = blob
        except (RuntimeError, MemoryError, WingbeatError) as error:
            self.why = first_line(error)


def _parts(blob: bytearray) -> Iterator[torch.Tensor]:
    if blob:
        yield from torch.frombuffer(blob, dtype=torch.uint8).split(_PART)


def _send(link: Link, peer: int, tensor: torch.Tensor, seconds: float) -> None:
    link.send(tensor, peer, _TAG).wait(seconds)


def _receive(link: Link, peer: int, tensor: torch.Tensor, seconds: float) -> None:
    link.recv(tensor, peer, _TAG).wait(seconds)


_log = logging.getLogger(__name__)

_STATES, _OTHER = 8, 64 << 20
"""A state may have so many times the bytes of the parameters, and some more."""


class Grouping:
    """This worker's parameters, and its way to the groups that average them.

    Args:
        world: all workers; each makes one at the same time, or comes back to the others with it.
        buffer: all parameters: flat, contiguous, on the CPU.
        rules: how groups are made, the same on all workers; None for the static schedule, which
            needs no generator.
        wire: what parameters travel as; as they are if None.
        seed: of random groups.
        encrypted: whether messages to the generator are. Parameters never are.

    Attributes:
        offer: returns what a worker that comes back is to have, in a state between two steps;
            None if nothing. See `fetch`.

    Raises:
        UsageError: the generator cannot be started, or nobody can come back to it.
        PeerError: a worker sent a malformed identity of its host.
        RendezvousError: a worker, or the generator, did not come.
    """

    def __init__(
        self,
        world: World,
        buffer: torch.Tensor,
        rules: Rules | None,
        *,
        wire: Lossy | torch.dtype | None = None,
        seed: int = 0,
        encrypted: bool = True,
    ) -> None:
        serial = next_serial(world)
        config = GeneratorConfig(
            room=f"groups{serial}",
            host_of=_layout(world, serial).host_of,
            interfaces=_interfaces(world),
            encrypted=encrypted,
            timeout=world.timeout,
            rules=rules or Rules(),
            seed=seed,
        )
        self._world, self._timeout = world, world.timeout
        self._most = _STATES * buffer.numel() * buffer.element_size() + _OTHER
        self._giving = Giving(world)
        self.offer: Callable[[], bytes | None] | None = None
        store = world.store if world.group_store is None else world.group_store()
        self._started: Started | None = None
        self._mailbox: Mailbox | None = None
        self._first = (serial - 1) * SERIES
        self.averages = GroupAverage(world, buffer, wire, first=self._first)
        self.client: Client | Follower
        departures = departures_of(world)
        lives = functools.partial(incarnation.lives, store)
        if rules is None:
            if world.returned:
                raise UsageError(
                    f"rank {world.rank} was started again while the others go on: the static "
                    "schedule lets nobody come back; use Rules(), or start all workers again"
                )
            self.client = config.follower(store, world.rank, lives)
            self.client.lost = departures.lost
            return
        try:
            if world.rank == config.host and not world.returned:
                self._started = (InThread if world.threads else InProcess)(config, store)
            self._mailbox, self.client = config.client(store, world.rank, world.returned, lives)
            self.client.give = self._give
            self.client.lost, self.client.back = departures.lost, departures.back
        except BaseException as error:
            self._end(quick=True)
            if isinstance(error, OSError) and not isinstance(error, WingbeatError):
                raise UsageError(
                    f"rank {world.rank}: cannot start the group generator: {error}"
                ) from None
            raise

    def step(self) -> None:
        """Average the buffer with groups', until the next step may begin.

        Raises:
            PeerError: no group came in time.
        """
        self.client.step(self.averages)

    def level(self) -> None:
        """Average the buffer with all that take part, when all of them have called this.

        Afterwards it is the same on all of them. Others may have steps to make before.

        Raises:
            PeerError: the generator has given no sign in time.
        """
        self.client.level(self.averages)

    def renew(self) -> None:
        """Have no group of this worker's from when others go on without it, until it does `fetch`.

        A step ends without an average then, and `left_out` says so.
        """
        if isinstance(self.client, Client):
            self.client.renews = True

    @property
    def left_out(self) -> bool:
        """Whether this worker has to `fetch` before it is in a group again.

        Others went on without it since it met all, or fetched a state, and it renews or was silent.
        """
        client = self.client
        if not isinstance(client, Client) or client.fallen is not None:
            return False
        return client.stale or (client.renews and client.left_out)

    def fetch(self, most: int | None = None, *, join: bool = False) -> bytearray:
        """Return what a worker that takes part offers: for one that has come back, before a step.

        That one's `offer` is called while it waits for a group, and sends in a thread of its own.
        If it is lost, another one is asked.

        Args:
            most: bytes that it may have; some times as many as the buffer if None.
            join: whether this worker takes part from now on: the group that the other is in then
                waits for it. Otherwise it does when it asks for a group.

        Raises:
            UsageError: groups follow the static schedule, which lets nobody come back.
            PeerError: nobody takes part, offers anything or sends it in time; or it is too much.
        """
        if not isinstance(self.client, Client):
            raise UsageError("fetch(): nobody comes back to the static schedule; use Rules()")
        limit = self._most if most is None else most

        def taken(giver: int, meeting: int, lives: Callable[[], bool]) -> bytearray | None:
            try:
                return take(self._world, giver, self._first + meeting, limit, lives)
            except Lost as error:
                _log.warning("%s; another one is asked", error)
                return None

        return self.client.fetch(taken, join=join)

    def _give(self, taker: int, meeting: int) -> None:
        blob = self.offer() if self.offer is not None else None
        self._giving.give(taker, self._first + meeting, blob)

    def close(self) -> None:
        """Leave: nobody waits for this worker any more. The generator ends when all have left."""
        self._giving.close()
        self.client.leave(failed=leaving.failing())
        self.averages.close()
        quick = leaving.failing() or self.client.fallen is not None
        if self._mailbox is None:
            return
        if quick:
            self._mailbox.abandon()
        else:
            with contextlib.suppress(PeerError):  # it may have died just now
                self._mailbox.close()
        self._end(quick)

    def _end(self, quick: bool) -> None:
        started, self._started = self._started, None
        if started is not None:
            if quick:
                started.kill()
            else:
                started.close(self._timeout)


_made: weakref.WeakKeyDictionary[World, int] = weakref.WeakKeyDictionary()
"""How many of a world: whoever is started again makes them in the same order."""


def next_serial(world: World) -> int:
    """Return the number of what meets in groups of a world, the same on all workers; from 1 on.

    Its epochs are those from ``(number - 1) * SERIES`` on.
    """
    serial = _made[world] = _made.get(world, 0) + 1
    return serial


def _interfaces(world: World) -> tuple[str, ...]:
    if world.threads:
        return ("lo",)
    return world.interfaces or tuple(link.name for link in world.links)


def _layout(world: World, serial: int) -> Layout:
    """Return which worker is on which host; whoever comes back is where it was."""
    what = f"group hosts {serial}"
    if not world.returned:
        world.publish(what, json.dumps(interfaces.local().identity))
    identities = [world.read(what, rank) for rank in range(world.size)]
    for rank, identity in enumerate(identities):
        if not isinstance(identity, str):
            raise PeerError(f"rank {rank} sent a malformed identity of its host")
    return Layout.by_name(identities)


class GroupAverager:
    """Has a thread meet the groups that this worker is in, while training goes on.

    Args:
        grouping: this worker's way to groups; closed with it.
        buffer: all parameters: flat, contiguous, of floating point, on the CPU.
        world: of all workers.
    """

    def __init__(self, grouping: Grouping, buffer: torch.Tensor, world: World) -> None:
        self.buffer = buffer
        self.grouping, self._threads, self._closed = grouping, world.threads, False
        self._rank = world.rank
        self._whole = Span(0, buffer.numel())
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._over = threading.Event()
        self._over.set()
        self._failed: BaseException | None = None
        self._averages = self._waits = self._before = 0
        self._thread = threading.Thread(target=self._serve, name="wingbeat-averages", daemon=True)
        self._thread.start()

    @property
    def members(self) -> tuple[int, ...]:
        """Of the last group that `begin` has led to; this worker, if it was left to itself."""
        averages = self.grouping.averages
        return averages.members if averages.made > self._before else (self._rank,)

    def begin(self, part: Span) -> None:
        """Have the part averaged in the next groups; leave it alone until `end`.

        Raises:
            UsageError: it was closed.
        """
        self._start(part, self.grouping.step)

    def end(self) -> None:
        """Wait until this worker's groups are done.

        Raises:
            PeerError: no group came in time, or the generator has sent what it never sends.
        """
        self._waits += not self._over.is_set()
        self._over.wait()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def taken(self) -> None:
        """The average was taken over: what it lacks on account of a codec is sent the next time."""
        self.grouping.averages.wire.taken()

    def level(self, part: Span | None = None) -> None:
        """Make the buffer the mean over all workers that take part, who all call this.

        It travels as it is, whatever averages travel as; what these have rounded off it has back.

        Args:
            part: of it; all if None.

        Raises:
            PeerError: a worker did not; names it.
            UsageError: it was closed.
        """
        self.grouping.averages.wire.settle(self.buffer)
        self._start(part or self._whole, self.grouping.level)
        self.end()

    def sections(self) -> Sequence[Section]:
        """Return how often it has averaged and waited, with whom last, and who takes no part."""
        client = self.grouping.client
        return [
            Section(
                "groups",
                {
                    "averages": self._averages,
                    "waits": self._waits,
                    "group": " ".join(map(str, sorted(self.grouping.averages.members))),
                    "absent": " ".join(map(str, sorted(client.absent))),
                    "generator": "gone" if client.fallen else "",
                },
            )
        ]

    def close(self) -> None:
        """Leave; nobody waits for this worker any more."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._threads:
            # Whoever closes worlds of one process closes one after the other.
            threading.Thread(target=self._end, name="wingbeat-ending").start()
        else:
            self._end()

    def _end(self) -> None:
        if not leaving.failing():
            self._thread.join()
        self.grouping.close()

    def _start(self, part: Span, step: Callable[[], None]) -> None:
        if self._closed:  # its thread would never answer
            raise UsageError(
                f"rank {self._rank}: wingbeat was shut down, and models are averaged no more: call "
                "wingbeat.shutdown() after the last step and wingbeat.consensus()"
            )
        averages = self.grouping.averages
        averages.part, averages.plain = part, step == self.grouping.level
        self._before = averages.made
        self._over.clear()
        self._jobs.put(step)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
                self._averages += 1
            except BaseException as error:  # for the thread that trains
                self._failed = error
            self._over.set()
