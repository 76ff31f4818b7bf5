"""Exchange under bounded staleness: gradients go to those who sum, sums are applied as they come.

Each bucket is a colayer. What the words between workers mean is `wingbeat.stale`'s; a thread beside
training carries them (`wingbeat.exchanges.courier`), over message flows between all workers.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.exchanges.arriving import Arrived, come
from wingbeat.exchanges.coded import CodedPieces
from wingbeat.exchanges.courier import Courier
from wingbeat.exchanges.departures import departures_of
from wingbeat.exchanges.journals import opened
from wingbeat.exchanges.pieces import Pieces
from wingbeat.exchanges.rebundling import Buckets, Decision, Rebundling
from wingbeat.exchanges.replica import SummedReplica, TorchReplica, pace_of
from wingbeat.exchanges.staleness import shown
from wingbeat.observe.log import log
from wingbeat.schedules.events import Operation
from wingbeat.stale.messages import Round
from wingbeat.stale.worker import Worker
from wingbeat.transport import leaving
from wingbeat.transport.store import Ledger
from wingbeat.transport.world import World
from wingbeat.types import Staleness

PATIENCE_S = 10.0
"""Seconds without a sign, at least, after which a worker is missed."""

_TOLD_S = 5.0
"""Seconds that a script may have ended before it is logged why its process has not."""

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, StepCounter
    from wingbeat.engine.gradients.compression import Compression
    from wingbeat.observe.meter import Section


def arrive(world: World, *, encrypted: bool) -> Arrived:
    """Join this worker to the others, or have it come back to them.

    Args:
        world: the workers; their numbers are their ranks.
        encrypted: whether messages are.

    Raises:
        RendezvousError: a worker did not come, or cannot come back.
    """
    store = world.store if world.group_store is None else world.group_store()
    assert isinstance(store, Ledger), "stores of jobs decide who was first"
    return come(
        store,
        world.rank,
        world.size,
        room=f"stale{world.serial}",
        interfaces=interfaces_of(world),
        joined=reached(world.networks),
        encrypted=encrypted,
        patience=min(PATIENCE_S, world.timeout),
        seconds=world.timeout,
    )


def interfaces_of(world: World) -> tuple[str, ...] | None:
    """Return the names of the interfaces to use; None for all, where `init` has chosen none."""
    return ("lo",) if world.threads else world.interfaces or None


def reached(networks: Sequence[Sequence[str]]) -> list[set[int]] | None:
    """Return by rank whom its interfaces reach directly; None if all reach all.

    Args:
        networks: by rank, the subnet of each interface, as `World.networks`.

    >>> reached([["a", "x"], ["a", "y"], ["b", "x"], ["b", "y"]])
    [{1, 2}, {0, 3}, {0, 3}, {1, 2}]
    >>> reached([["a"], ["a"]])
    """
    ranks = range(len(networks))
    near = [
        {other for other in ranks if other != rank and set(networks[rank]) & set(networks[other])}
        for rank in ranks
    ]
    return None if all(len(others) == len(ranks) - 1 for others in near) else near


class Layers(Protocol):
    """What is measured of a model's layers: `wingbeat.sync.bundling.Bundling`.

    Attributes:
        count: how many tensors they have.
    """

    count: int

    def own(self) -> Any:
        """Return what this worker has measured; what JSON can say."""

    def choose(self, told: Sequence[Any]) -> Buckets | None:
        """Return the tensors of each colayer by what all have measured; None if nobody has."""

    def follow(self, buckets: Buckets) -> None:
        """Have these in the next plan."""

    def replan(self) -> None:
        """Make the buckets of the next plan, and have them `planned`."""

    def stop(self) -> None:
        """Measure no more."""


class StaleExchange:
    """Sends buckets in pieces to those who sum, and has rounds of sums applied.

    Args:
        world: of two workers or more, who are joined in `planned`.
        staleness: how far they may be apart.
        compression: what gradients travel as.
        optimizer: whose options belong to the rounds.
        step: lets it make a step on the gradients in ``p.grad``.
        steps: counts those that were made; where nobody is ahead all must have made as many.
        others: what a worker that comes back needs of the model beside its parameters.

    Attributes:
        machine: this worker's, from `planned` on. Another thread uses it: look, and change nothing.
        apart: whether workers may apply a round in different steps of theirs.
        synchronous: whether rounds go back to the buckets, as gradients that all have.
        waited: told for how many nanoseconds training has waited for others, in each step.
    """

    machine: Worker
    _courier: Courier

    def __init__(
        self,
        world: World,
        staleness: Staleness,
        compression: Compression,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        steps: StepCounter,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        self._steps, self._started, self._ended = steps, 0, False
        self._world, self._staleness, self._compression = world, staleness, compression
        self._optimizer, self._step, self._others = optimizer, step, others
        self._dropped = self.apart = False
        self._layers: Layers | None = None
        self._rebundling: Rebundling | None = None
        self._changing: Decision | None = None
        self._epoch = 0
        self.synchronous = staleness.synchronous
        self.waited: Callable[[int], None] = lambda _: None

    def measures(self, layers: Layers) -> None:
        """Have colayers made anew once by what is measured, where all workers settle.

        A worker that comes back has those of the others at once.
        """
        world = self._world
        assert isinstance(world.store, Ledger), "stores of jobs decide who was first"
        room = f"stale{world.serial}/colayers"
        self._layers, known = layers, weakref.ref(layers)

        def choose(told: Sequence[Any]) -> Buckets | None:
            found = known()  # held weakly: what ends the world keeps no model alive
            return None if found is None else found.choose(told)

        self._rebundling = Rebundling(world.store, room, world.rank, layers.count, choose)
        if world.returned:
            self._rebundling.catch_up()
            if (decision := self._rebundling.decision) is not None and decision.buckets:
                layers.follow(decision.buckets)
                self._epoch = 1

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:  # noqa: ARG002
        """Take these buckets for colayers, and join the workers if that has not been done.

        Raises:
            UsageError: what cannot be summed so, thresholds that do not fit the colayers, or a
                journal that cannot be written.
            RendezvousError: a worker did not come.
        """
        world, staleness, count = self._world, self._staleness, len(buckets)
        p = staleness.exchanged(count)
        pace = pace_of(staleness.s, p, count, staleness.in_flight)
        if world.rank == 0:
            said = count, p, staleness.s, staleness.in_flight
            log.debug("%d colayers: p=%d, s=%s, in_flight=%s", *said)
        colayers = [{slot.name: slot.param for slot in bucket.slots} for bucket in buckets]
        wires = [self._compression.encoded(bucket) for bucket in buckets]
        self._pieces = (
            CodedPieces(colayers, world.size, wires) if any(wires) else Pieces(colayers, world.size)
        )
        params = [[slot.param for slot in bucket.slots] for bucket in buckets]
        if self._changing is not None:
            assert isinstance(self._replica, TorchReplica), "only workers that part measure"
            self._replica.rebundle(params, self._pieces)
            self._courier.rebundle(pace, self._replica.sums.combine, self._changing.view)
            return
        self.apart = pace.mode != "BSP"
        rest = params, self._pieces, self._optimizer
        if self.synchronous:
            self._replica: TorchReplica | SummedReplica = SummedReplica(
                *rest, buckets, self._step, self._steps, world.size, others=self._others
            )
        else:
            self._replica = TorchReplica(*rest, self._step, world.size, others=self._others)
        arrived = arrive(world, encrypted=staleness.encrypted)
        combine, life = self._replica.sums.combine, arrived.life
        self.machine = Worker(
            world.rank, world.size, pace, combine, keep=pace.keep, life=life, epoch=self._epoch
        )
        held = self._held = _Held(self._replica, world)
        self._courier = Courier(
            self.machine,
            arrived.mailbox,
            world.size,
            held,
            me=f"rank {world.rank}",
            timeout=world.timeout,
            # What says that it trains as DDP does ends as DDP does.
            survives=self.apart,
            departures=departures_of(world),
            lanes=arrived.lanes,
            attendance=arrived.attendance,
            journal=opened(f"training{world.serial}", world.rank, life, world.size, pace),
        )
        self._courier.serve()
        world.on_close(_Ending(self._courier, held, world, self._rebundling))
        self._courier.begin(self._refuse_late)

    def _refuse_late(self) -> None:
        """Raise a `PeerError` if the others have changed colayers just as this worker came."""
        meeting, machine = self._rebundling, self.machine
        if meeting is None or not machine.joining or not meeting.over():
            return
        decision, rank = meeting.decision, self._world.rank
        if decision is not None and decision.buckets and decision.view[rank] != 2 * machine.life:
            raise PeerError(
                f"rank {rank}: came back just as the other workers changed their colayers, and "
                "they do not know of it; start it anew"
            )

    @torch.no_grad()
    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Send a bucket's gradients, unless the iteration has been dropped.

        Nothing comes back; but where nobody is ahead, the sum when the bucket's handle is waited
        for.

        Raises:
            PeerError: a worker has failed, or is gone.
        """
        assert operation is Operation.CONTRIBUTE, operation
        if not self._dropped:
            used = [slot.used for slot in bucket.slots]
            flat = bucket.flat[: bucket.numel]
            pieces = self._pieces.cut(bucket.index, flat, used)
            self._dropped = not self._courier.computed(bucket.index, pieces)
            if self._dropped and isinstance(self._pieces, CodedPieces):
                self._pieces.take_back(bucket.index, flat, pieces)
            if self.synchronous:
                self._started += 1
                bucket.handle = _Round(self)

    def take(self) -> None:
        """Wait for the sums of an iteration of which all buckets have been sent; else do nothing.

        Raises:
            PeerError: others were waited for in vain; names them.
        """
        if self._started == len(self._pieces):
            assert isinstance(self._replica, SummedReplica)
            if not self._ended:  # else Ctrl-C has cut a wait for it short
                self._courier.computed(self._replica.control, self._replica.options())
                self._courier.finish()
                self._ended = True
            self._replica.taking = True
            try:
                self._courier.begin()
            finally:
                self._replica.taking = False
            self._started, self._ended = 0, False

    @property
    def taken(self) -> bool:
        """Whether all sums are in the buckets."""
        return not self._started

    def step(self) -> None:
        """End the iteration, apply what has come, and enter the next when that is allowed.

        Raises:
            UsageError: an option of the optimizer that cannot be sent.
            PeerError: others were waited for in vain; names them.
        """
        if not self._dropped:
            self._courier.computed(self._replica.control, self._replica.options())
        self._courier.finish()
        self._dropped = False
        begin, before = time.monotonic_ns(), self._held.spent_ns
        try:
            self._courier.begin()
        finally:
            self.waited(time.monotonic_ns() - begin - (self._held.spent_ns - before))

    def meet(self) -> bool:
        """Settle with all workers if colayers are to be made anew; return whether that was so.

        Raises:
            PeerError: others were waited for in vain; names them.
        """
        meeting = self._rebundling
        if meeting is None or not meeting.is_due(self.machine.zeta):
            return False
        if self._courier.meet(meeting.over):
            self._decide(meeting)
        else:
            self._go_on(meeting.decision)
        self._courier.begin()
        return True

    def _decide(self, meeting: Rebundling) -> None:
        """Have colayers made anew, as all have settled, or go on with those of today."""
        assert self._layers is not None
        own = self._layers.own()

        def decided() -> Decision | None:
            return meeting.decide(self.machine, self._courier.gone(), own)

        decision: Decision = self._courier.await_decision(decided, meeting.missing)
        if decision.buckets is None:
            self._go_on(decision)
            return
        self._changing = decision
        try:
            self._layers.follow(decision.buckets)
            self._layers.replan()
        finally:
            self._changing = None
        if self._world.rank == min(self.members, default=0):
            log.info("%d colayers, by what was measured", self.colayers)

    def _go_on(self, decision: Decision | None) -> None:
        assert decision is not None, "there is one, or all have settled"
        assert decision.buckets is None, "who had not settled is not counted in"
        if self._world.rank == min(self.members, default=0):
            later = "; tried again later" if decision.again else ""
            log.warning("colayers stay as they are: %s%s", decision.why, later)
        if not decision.again and self._layers is not None:
            self._layers.stop()
        self._courier.go_on(decision.rounds)

    def level(self) -> None:
        """Wait until all workers have called this and all is applied; then go on.

        Raises:
            PeerError: a worker did not call it, or has failed; names it.
            UsageError: nobody is ever ahead, and a worker that had run out of batches could not
                repeat the others' steps.
        """
        self._courier.end()
        meeting = self._rebundling
        if meeting is not None:
            meeting.catch_up()
        # All have settled with the same rounds: the last two are of no iteration.
        if meeting is not None and meeting.is_due(self.machine.applied - 2):
            self._decide(meeting)
        else:
            self._courier.resume()
        self._courier.begin()
        if isinstance(self._replica, SummedReplica):
            self._refuse_different(self._replica)

    def _refuse_different(self, replica: SummedReplica) -> None:
        alone, replica.alone = replica.alone, 0
        if any(self._world.exchange("steps alone", alone)):
            digests = self._world.exchange("weights", replica.digest())
            if any(digest != digests[0] for digest in digests):
                raise UsageError(
                    "Canary(s=0): a worker that has run out of batches repeats the others' steps "
                    "on the sums that come, and weights are different afterwards, as after "
                    "clipping, or more than one backward a step: give all workers as many "
                    "batches, or use wingbeat.AllReduce() and model.join()"
                )

    @property
    def room(self) -> str:
        """The model's in the store, on all workers the same, also on one that came back."""
        return f"stale{self._world.serial}/alike"

    @property
    def made(self) -> int:
        """How many rounds were applied here."""
        return self.machine.applied

    @property
    def members(self) -> list[int]:
        """The ranks that take part, and have not ended."""
        world, machine = self._world, self.machine
        ranks = (r for r in range(world.size) if machine.life_of(r) is not None)
        return [r for r in ranks if not world.said("end", r)]

    @property
    def colayers(self) -> int:
        """How many colayers have gradients; behind them, the machine has one of options."""
        return len(self._pieces)

    @property
    def applied(self) -> float:
        """Iterations' worth of all workers' gradients that are in the parameters here."""
        world, machine = self._world, self.machine
        return machine.gei.counted / (world.size**2 * machine.colayers)

    @property
    def fired(self) -> dict[str, int]:
        """How often the bound has acted here: iterations ``dropped``, and parameters ``pulled``."""
        return {"dropped": len(self.machine.dropped), "pulled": self.machine.pulls}

    def sections(self) -> Sequence[Section]:
        """Return how far this worker is, what was dropped, and what it has of the others."""
        return shown(self.machine, self._world.size, self.colayers)


class _Round:
    """A bucket's sum under way: it comes with all others of its round."""

    def __init__(self, exchange: StaleExchange) -> None:
        self._exchange = exchange

    def done(self) -> bool:
        """Whether it is in the bucket."""
        return self._exchange.taken

    def add_done_callback(self, callback: Callable[[Any], None]) -> NoReturn:
        """Rounds are taken by the thread that trains alone."""
        raise NotImplementedError(f"nobody could call {callback} when a round is there")

    def wait(self) -> None:
        """Take the round, if all of it has been sent; gradients that are sent were copied.

        Raises:
            PeerError: others were waited for in vain; names them.
        """
        self._exchange.take()

    wait_received = wait


class _Held:
    """A replica that the courier, whose thread goes on, does not keep alive, nor its model.

    Args:
        replica: held weakly.
        world: kept, as long as the thread goes on, so that it is closed in the end.

    Attributes:
        spent_ns: nanoseconds that rounds have taken to apply.
    """

    def __init__(self, replica: TorchReplica | SummedReplica, world: World) -> None:
        self._replica, self._world = weakref.ref(replica), world
        self._let_go = False
        self.spent_ns = 0

    def let_go(self) -> None:
        """Apply nothing more."""
        self._let_go = True

    def step(self, parts: Sequence[Round]) -> None:
        """Let the replica apply a round, while there is one."""
        replica = self._replica()
        if replica is not None and not self._let_go:
            begin = time.monotonic_ns()
            replica.step(parts)
            self.spent_ns += time.monotonic_ns() - begin

    def put(self, payload: Any) -> None:
        """As the replica."""
        replica = self._replica()
        if replica is not None:
            replica.put(payload)

    def copied(self) -> bytes:
        """As the replica.

        Raises:
            UsageError: the model is gone, so that nobody can have its parameters.
        """
        replica = self._replica()
        if replica is None:
            raise UsageError(
                "another worker asks for parameters of a model that is gone here: keep a reference "
                "to it until training has ended"
            )
        return replica.copied()


class _Ending:
    """Has a worker leave when all have ended: until then the others need the sums that it makes."""

    def __init__(
        self, courier: Courier, held: _Held, world: World, rebundling: Rebundling | None
    ) -> None:
        self._courier, self._held, self._world = courier, held, world
        self._rebundling = rebundling

    def __call__(self) -> None:
        """Leave; after a failure at once."""
        if leaving.failing():
            self._courier.close(quick=True)
        elif self._world.threads:
            # Whoever closes worlds of one process closes one after the other.
            self._held.let_go()
            threading.Thread(target=self._end, name="wingbeat-ending").start()
        else:
            self._end()

    def _end(self) -> None:
        quick = True
        try:
            if self._rebundling is not None:
                self._rebundling.ended()
            self._courier.end(_TOLD_S)
            if self._courier.undisturbed:
                # Nobody leaves before all know that all have ended.
                world = self._world
                world.publish("end", None)
                self._courier.stay(
                    lambda: all(world.said("end", peer) for peer in range(world.size)), _TOLD_S
                )
            quick = False
        except WingbeatError as error:
            log.warning("%s", error)
        with contextlib.suppress(WingbeatError):
            self._courier.close(quick=quick)
