"""Starts a job's group generator, beside rank 0, and connects this worker to it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.exchanges.average import GroupAverage
from wingbeat.groups.config import GeneratorConfig
from wingbeat.groups.layout import Layout
from wingbeat.groups.rules import Rules
from wingbeat.transport import interfaces, leaving
from wingbeat.transport.services.launch import InProcess, InThread, Started

if TYPE_CHECKING:
    import torch

    from wingbeat.exchanges.lossy import Lossy
    from wingbeat.groups.client import Client
    from wingbeat.groups.follower import Follower
    from wingbeat.transport.messages.mailbox import Mailbox
    from wingbeat.transport.world import World


class Grouping:
    """This worker's parameters, and its way to the groups that average them.

    Args:
        world: all workers; each makes one at the same time.
        buffer: all parameters: flat, contiguous, on the CPU.
        rules: how groups are made, the same on all workers; None for the static schedule, which
            needs no generator.
        wire: what parameters travel as; as they are if None.
        seed: of random groups.
        encrypted: whether messages to the generator are.

    Raises:
        UsageError: the generator cannot be started.
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
        config = GeneratorConfig(
            room=f"groups/{world.path}",
            host_of=_layout(world).host_of,
            interfaces=("lo",) if world.threads else tuple(link.name for link in world.links),
            encrypted=encrypted,
            timeout=world.timeout,
            rules=rules or Rules(),
            seed=seed,
        )
        self._timeout = world.timeout
        store = world.store if world.group_store is None else world.group_store()
        self._started: Started | None = None
        self._mailbox: Mailbox | None = None
        self.averages = GroupAverage(world, buffer, wire)
        self.client: Client | Follower
        if rules is None:
            self.client = config.follower(store, world.rank)
            return
        try:
            if world.rank == config.host:
                self._started = (InThread if world.threads else InProcess)(config, store)
            self._mailbox, self.client = config.client(store, world.rank)
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

    def close(self) -> None:
        """Leave: nobody waits for this worker any more. The generator ends when all have left."""
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


def _layout(world: World) -> Layout:
    """Return which worker is on which host."""
    identities = world.exchange("group hosts", json.dumps(interfaces.local().identity))
    for rank, identity in enumerate(identities):
        if not isinstance(identity, str):
            raise PeerError(f"rank {rank} sent a malformed identity of its host")
    return Layout.by_name(identities)
