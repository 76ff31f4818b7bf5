"""Starts a job's group generator, beside rank 0, and connects this worker to it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.exchanges.average import GroupAverage
from wingbeat.exchanges.departures import departures_of
from wingbeat.exchanges.states import Giving, Lost, take
from wingbeat.groups.client import Client
from wingbeat.groups.config import GeneratorConfig
from wingbeat.groups.layout import Layout
from wingbeat.groups.rules import Rules
from wingbeat.transport import graceful_shutdown, incarnation, interfaces
from wingbeat.transport.services import ProcessService, Service, ThreadService
from wingbeat.types import SERIES

if TYPE_CHECKING:
    import torch

    from wingbeat.exchanges.lossy import Lossy
    from wingbeat.groups.follower import Follower
    from wingbeat.transport.messages.mailbox import Mailbox
    from wingbeat.transport.world import World

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
        self._started: Service | None = None
        self._mailbox: Mailbox | None = None
        self._first = (serial - 1) * SERIES
        self.averages = GroupAverage(world, buffer, wire, first=self._first)
        self.client: Client | Follower
        departures = departures_of(world)
        lives = functools.partial(incarnation.is_alive, store)
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
                self._started = (ThreadService if world.threads else ProcessService)(config, store)
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
        self.client.leave(failed=graceful_shutdown.is_failing())
        self.averages.close()
        quick = graceful_shutdown.is_failing() or self.client.fallen is not None
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
