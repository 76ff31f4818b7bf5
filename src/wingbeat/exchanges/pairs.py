"""AD-PSGD: parameters averaged by two workers at a time, atomically, beside training.

As published by Lian et al. (2018) and described in sections 2.3 and 2.4 of Ripples: active workers
ask, passive ones answer, so nobody waits in a ring. Who may do what when is
`wingbeat.pairs.worker`'s.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Sequence

import torch

from wingbeat.errors import MismatchError, PeerError, UsageError
from wingbeat.exchanges.average import GroupAverage
from wingbeat.exchanges.departures import departures_of
from wingbeat.exchanges.grouping import next_serial
from wingbeat.exchanges.halves import Halves
from wingbeat.exchanges.pairing import Pairing
from wingbeat.groups.board import Board
from wingbeat.groups.follower import Follower
from wingbeat.groups.layout import Layout
from wingbeat.observe.meter import Section
from wingbeat.pairs.split import is_active, partners
from wingbeat.pairs.worker import Worker
from wingbeat.transport import graceful_shutdown
from wingbeat.transport.incarnation import is_alive
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.store import Store
from wingbeat.transport.world import World
from wingbeat.types import SERIES, Span

SILENCE_S = 10.0
"""Seconds without a sign, at most, after which a worker that is waited for is lost."""


class PairAverager:
    """Averages this worker's parameters with one other's at a time. An `Averager`.

    Workers of even rank are active: each `begin` asks a passive one, at random, and `end` waits
    for the average. The others serve one at a time between `begin` and `end`, which waits only for
    an average that is in the midst. An average is all or nothing: if a partner dies, an active
    worker asks another one, and a passive one keeps its model.

    Args:
        world: all workers, on CPUs; each makes one at the same time.
        buffer: all parameters: flat, contiguous, of floating point numbers, on the CPU.
        whole: what is averaged when all workers meet, of which the buffer is a part; the buffer if
            None.
        wire: what they travel as; as they are if None. Then both have the same bits afterwards;
            otherwise the sum of both stays, and they differ by what was rounded.
        seed: of whom active workers ask.
        encrypted: whether messages are.
        silence: seconds without a sign after which a worker that is waited for is lost.

    Attributes:
        buffer: as given.

    Raises:
        UsageError: a buffer or a wire that cannot be averaged.
        MismatchError: another worker has a buffer or a wire that differs.
        RendezvousError: a worker did not come.
        PeerError: a worker cannot be reached.
    """

    def __init__(
        self,
        world: World,
        buffer: torch.Tensor,
        *,
        whole: torch.Tensor | None = None,
        wire: torch.dtype | None = None,
        seed: int = 0,
        encrypted: bool = True,
        silence: float = SILENCE_S,
    ) -> None:
        _check(buffer)
        self._world, self.buffer = world, buffer
        self._whole = buffer if whole is None else whole
        halves = Halves(buffer, wire)
        _compare(world, [buffer.numel(), str(buffer.dtype), str(wire)])
        self._machine = Worker(world.rank, world.size, len(halves.spans), seed)
        self._everyone = world.parent or world
        self._first = (next_serial(self._everyone) - 1) * SERIES
        store = _store_of(world)
        board = Board(store, f"pairs/{world.path}", world.size)
        self._follower = Follower(
            world.rank, Layout.even(1, world.size), world.timeout, board, everyone=True,
            lives=functools.partial(is_alive, store),
        )  # fmt: skip
        self._follower.lost = departures_of(world).lost
        self._begun = self._left = False
        self._pairing: Pairing | None = None
        if world.size > 1:
            self._pairing = _joined(world, self._machine, halves, encrypted, silence, board.lose)
            self._pairing.serve()
            # Dropped without `close_world`, it takes its thread along.
            weakref.finalize(self, self._pairing.forget).atexit = False
        world.on_close(_Closing(self))

    @property
    def members(self) -> tuple[int, ...]:
        """This worker, and whom it has averaged with last."""
        return () if self._pairing is None else self._pairing.members

    def begin(self, part: Span) -> None:
        """The buffer is this worker's model now; leave it alone until `end`.

        Args:
            part: all of the buffer: models are averaged whole.

        Raises:
            UsageError: the part is not the whole buffer, or `end` was not called.
            PeerError: nobody is left to average with.
        """
        if part != Span(0, self.buffer.numel()):
            raise UsageError(
                f"begin({part}): models are averaged whole, allowed is "
                f"{Span(0, self.buffer.numel())}"
            )
        if self._begun:
            raise UsageError("begin() was called twice: call end() before the model changes")
        if self._pairing is not None:
            self._pairing.begin()
        self._begun = True

    def end(self) -> None:
        """Wait as long as the exchange asks for; then the model may change. Nothing if not begun.

        An active worker waits for its average, a passive one for an average that is in the midst.

        Raises:
            PeerError: a worker was waited for in vain; names it.
        """
        try:
            if self._begun and self._pairing is not None:
                self._pairing.end()
        except Exception:
            self._begun = False
            raise
        self._begun = False  # not so after Ctrl-C: the buffer may still be in an average

    def taken(self) -> None:
        """Nothing is lost that would have to be sent later."""

    def level(self, part: Span | None = None) -> None:
        """Make the buffer, and what it is a part of, the mean over all workers; same bits.

        Passive workers serve until no active one asks any more. What was begun is ended. Whoever
        is lost, or has left, is left out.

        Args:
            part: of what the buffer is a part of; all if None.

        Raises:
            PeerError: a worker did not call it in time; names it. Or the others went on without
                this one.
        """
        self.end()
        if self._pairing is None:
            return
        self._begun = True  # until it has ended: whom this one serves uses the buffer
        self._pairing.level()
        self._begun = False
        self._pairing.watching = True
        whole = self._whole if part is None else self._whole[part.start : part.stop]
        averages = GroupAverage(self._everyone, whole, first=self._first)
        try:
            with torch.no_grad():
                self._follower.level(averages)
        finally:
            self._pairing.watching = False
            averages.close()
        self._check_level()

    def _check_level(self) -> None:
        """Raise a `PeerError` unless all who live have the same now."""
        me, silent = self._world.rank, self._follower.silent
        if silent:
            names = ", ".join(f"rank {rank}" for rank in sorted(silent))
            raise PeerError(
                f"rank {me}: no word that it waits for the mean of all came from {names} within "
                f"{self._world.timeout:g} s: the mean is of the others; start all workers again"
            )

    def sections(self) -> Sequence[Section]:
        """Return whom this worker averages with, and how often it has; other threads ask."""
        machine, pairing = self._machine, self._pairing
        meeting = machine.asked or machine.served
        return [
            Section(
                "pairs",
                {
                    "set": "active" if is_active(self._world.rank) else "passive",
                    "averages": machine.averages,
                    "waits": 0 if pairing is None else pairing.waits,
                    "partner": "-" if meeting is None else meeting.peer,
                    "queue": len(machine.queue),
                },
            )
        ]

    def close(self) -> None:
        """Leave; nobody waits for this worker any more. May be called again."""
        if self._pairing is not None:
            if not self._left:
                self._left = True
                self._follower.leave(failed=graceful_shutdown.is_failing())
            self._pairing.close(quick=graceful_shutdown.is_failing())


class _Closing:
    """Has an averager leave when its world closes, and does not keep it alive."""

    def __init__(self, averager: PairAverager) -> None:
        self._of = weakref.ref(averager)

    def __call__(self) -> None:
        averager = self._of()
        if averager is not None:
            averager.close()


def _check(buffer: torch.Tensor) -> None:
    """Raise a `UsageError` if the buffer cannot be averaged."""
    flat = buffer.dim() == 1 and buffer.is_contiguous()
    if not (flat and buffer.device.type == "cpu" and buffer.is_floating_point()):
        raise UsageError(
            f"a buffer of shape {tuple(buffer.shape)}, {buffer.dtype}, on {buffer.device}: allowed "
            "is a flat, contiguous one of floating point numbers on the CPU"
        )


def _compare(world: World, own: list[object]) -> None:
    """Raise a `MismatchError` if not all workers have the same buffer and wire."""
    for rank, theirs in enumerate(world.exchange("pairs", own)):
        if theirs != own:
            raise MismatchError(
                f"rank {world.rank} averages [elements, dtype, wire] = {json.dumps(own)}, rank "
                f"{rank} {json.dumps(theirs)[:80]}: give all workers the same model and wire"
            )


def _store_of(world: World) -> Store:
    """Return a way to the store whose waits hold up nobody else."""
    return world.store if world.group_store is None else world.group_store()


def _joined(
    world: World,
    machine: Worker,
    halves: Halves,
    encrypted: bool,
    silence: float,
    gone: Callable[[int], None],
) -> Pairing:
    """Connect this worker to its partners."""
    mailbox = open_mailbox(
        _store_of(world),
        world.rank,
        partners(world.rank, world.size),
        namespace=f"pairs/{world.path}",
        interfaces=("lo",) if world.threads else world.interfaces or None,
        classes=1,
        encrypted=encrypted,
        limits=Limits(silence=min(silence, world.timeout)),
        seconds=world.timeout,
    )
    return Pairing(
        machine, mailbox, halves, me=f"rank {world.rank}", timeout=world.timeout, gone=gone,
        departures=departures_of(world),
    )  # fmt: skip
