"""The exchange of bounded staleness: sends buckets in pieces, and applies rounds of sums.

Each bucket is a colayer. The worker's state machine defines the messages, and a communication
thread sends and receives them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.exchanges.departures import departures_of
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.colayers import (
    ColayerChange,
    ColayerDecision,
    LayerProfiler,
    weak_chooser,
)
from wingbeat.methods.bounded_staleness.communication import CommunicationThread
from wingbeat.methods.bounded_staleness.journal import open_journal
from wingbeat.methods.bounded_staleness.membership import JoinedWorker, join_workers
from wingbeat.methods.bounded_staleness.options import Bounded
from wingbeat.methods.bounded_staleness.pieces import EncodedPieces, Pieces
from wingbeat.methods.bounded_staleness.replica import (
    AsynchronousReplica,
    SynchronousReplica,
    WeakReplica,
    bound_with_control,
)
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.observe.log import log
from wingbeat.observe.meter import Cell, Section
from wingbeat.schedules.events import Operation
from wingbeat.transport import graceful_shutdown
from wingbeat.transport.store import AtomicStore
from wingbeat.transport.world import World

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, StepCounter
    from wingbeat.engine.gradients.compression import Compression

PATIENCE_S = 10.0
"""Minimum seconds of silence after which a worker is suspected."""

MAX_SHOWN_BITS = 16
"""Maximum number of workers for which a cell of the index shows one bit each; above it, a count."""

_LOG_AFTER_S = 5.0
"""Seconds after the end of a script after which a log line states why its process still runs."""


def open_connections(world: World, *, encrypted: bool) -> JoinedWorker:
    """Connect this worker to the others, or reconnect a restarted one."""
    store = world.store if world.group_store is None else world.group_store()
    assert isinstance(store, AtomicStore), "the stores of jobs can claim keys"
    return join_workers(
        store,
        world.rank,
        world.size,
        namespace=f"stale{world.serial}",
        interfaces=("lo",) if world.threads else world.interfaces or None,
        neighbours=neighbours(world.networks),
        encrypted=encrypted,
        patience=min(PATIENCE_S, world.timeout),
        seconds=world.timeout,
    )


def neighbours(networks: Sequence[Sequence[str]]) -> list[set[int]] | None:
    """Return by rank the workers that its interfaces reach directly; None if all reach all.

    ``networks`` has by rank the subnet of each interface, as `World.networks`.

    >>> neighbours([["a", "x"], ["a", "y"], ["b", "x"], ["b", "y"]])
    [{1, 2}, {0, 3}, {0, 3}, {1, 2}]
    >>> neighbours([["a"], ["a"]])
    """
    ranks = range(len(networks))
    near = [
        {other for other in ranks if other != rank and set(networks[rank]) & set(networks[other])}
        for rank in ranks
    ]
    return None if all(len(others) == len(ranks) - 1 for others in near) else near


class BoundedStalenessExchange:
    """Sends buckets in pieces to the owners of the pieces, and applies rounds of sums.

    ``others`` are the tensors other than parameters that a restarted worker needs.

    Attributes:
        machine: the state machine, from `planned` on; read-only, as the communication thread uses
            it.
        replicas_diverge: whether workers may apply a round in different steps.
        synchronous: whether the sums of a round are written to the buckets, as by an all-reduce.
        waited: called in each step with the nanoseconds that training has waited for other workers.
    """

    machine: Worker
    _communication: CommunicationThread

    def __init__(
        self,
        world: World,
        bounded: Bounded,
        compression: Compression,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        steps: StepCounter,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        self._steps, self._buckets_sent, self._control_sent = steps, 0, False
        self._world, self._bounded, self._compression = world, bounded, compression
        self._optimizer, self._step, self._others = optimizer, step, others
        self._dropped = self.replicas_diverge = False
        self._profiler: LayerProfiler | None = None
        self._change: ColayerChange | None = None
        self._changing: ColayerDecision | None = None
        self._epoch = 0
        self.synchronous = bounded.exact
        self.waited: Callable[[int], None] = lambda _: None

    # -- connections and colayers ---------------------------------------------------------

    def set_profiler(self, profiler: LayerProfiler) -> None:
        """Change colayers once, by measurements, when all workers drain."""
        world = self._world
        assert isinstance(world.store, AtomicStore), "the stores of jobs can claim keys"
        self._profiler = profiler
        self._change = ColayerChange(
            world.store, f"stale{world.serial}/colayers", world.rank, profiler.count,
            weak_chooser(profiler),
        )  # fmt: skip
        if world.returned:
            self._change.catch_up()
            if (decision := self._change.decision) is not None and decision.buckets:
                profiler.set_colayers(decision.buckets)
                self._epoch = 1

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:  # noqa: ARG002
        """Use these buckets as colayers, and connect the workers if they are not connected."""
        world, bounded, count = self._world, self._bounded, len(buckets)
        p = bounded.exchanged(count)
        bound = bound_with_control(bounded.s, p, count, bounded.in_flight)
        if world.rank == 0:
            log.debug(
                "%d colayers: p=%d, s=%s, in_flight=%s",
                count, p, bounded.s, bounded.in_flight,
            )  # fmt: skip
        colayers = [{slot.name: slot.param for slot in bucket.slots} for bucket in buckets]
        wires = [self._compression.encoded(bucket) for bucket in buckets]
        self._pieces = (
            EncodedPieces(colayers, world.size, wires)
            if any(wires)
            else Pieces(colayers, world.size)
        )
        params = [[slot.param for slot in bucket.slots] for bucket in buckets]
        if self._changing is not None:
            self._replica.set_colayers(params, self._pieces)
            combine = self._replica.aggregator.combine
            self._communication.change_colayers(bound, combine, self._changing.view)
        else:
            self._connect(bound, params, buckets)

    def _connect(
        self,
        bound: StalenessBound,
        params: Sequence[Sequence[torch.Tensor]],
        buckets: Sequence[Bucket],
    ) -> None:
        world, common = self._world, (params, self._pieces, self._optimizer, self._step)
        self.replicas_diverge = bound.mode != "BSP"
        if self.synchronous:
            self._replica: AsynchronousReplica | SynchronousReplica = SynchronousReplica(
                *common, world.size, self._others, buckets=buckets, steps=self._steps
            )
        else:
            self._replica = AsynchronousReplica(*common, world.size, self._others)
        joined = open_connections(world, encrypted=self._bounded.encrypted)
        incarnation = joined.incarnation
        self.machine = Worker(
            world.rank, world.size, bound, self._replica.aggregator.combine,
            max_buffered=bound.max_buffered, incarnation=incarnation, epoch=self._epoch,
        )  # fmt: skip
        self._weak_replica = WeakReplica(self._replica, world)
        journal = open_journal(
            f"training{world.serial}", world.rank, incarnation, world.size, bound
        )
        self._communication = CommunicationThread(
            self.machine,
            joined.mailbox,
            self._weak_replica,
            timeout=world.timeout,
            # Synchronous training ends when a worker is lost, as with DDP.
            tolerates_loss=self.replicas_diverge,
            departures=departures_of(world),
            lanes=joined.lanes,
            membership=joined.membership,
            journal=journal,
        )
        self._communication.start()
        world.on_close(_Shutdown(self._communication, self._weak_replica, world, self._change))
        self._communication.begin_iteration(self._refuse_late)

    def _refuse_late(self) -> None:
        """Raise a `PeerError` if the others have changed colayers while this worker joined."""
        change, machine = self._change, self.machine
        if change is None or not machine.joining or not change.poll_decision():
            return
        decision, rank = change.decision, self._world.rank
        own = 2 * machine.incarnation
        if decision is not None and decision.buckets and decision.view[rank] != own:
            raise PeerError(
                f"rank {rank}: joined while the other workers changed their colayers, and was not "
                "counted in; restart this worker"
            )

    # -- gradients ------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Send a bucket's gradients, unless the iteration has been dropped.

        Synchronous training receives the sum when it waits for the bucket's handle.
        """
        assert operation is Operation.CONTRIBUTE, operation
        if not self._dropped:
            used = [slot.used for slot in bucket.slots]
            flat = bucket.flat[: bucket.numel]
            pieces = self._pieces.split(bucket.index, flat, used)
            self._dropped = not self._communication.send_colayer(bucket.index, pieces)
            if self._dropped and isinstance(self._pieces, EncodedPieces):
                self._pieces.undo_split(bucket.index, flat, pieces)
            if self.synchronous:
                self._buckets_sent += 1
                bucket.handle = _RoundHandle(self)

    def _send_control(self) -> None:
        self._communication.send_colayer(self._replica.control, self._replica.control_payloads())

    def await_round(self) -> None:
        """Wait for the sums of the iteration if all of its buckets have been sent."""
        if self._buckets_sent == len(self._pieces):
            assert isinstance(self._replica, SynchronousReplica)
            if not self._control_sent:  # true if Ctrl-C has interrupted an earlier wait
                self._send_control()
                self._communication.end_iteration()
                self._control_sent = True
            self._replica.in_iteration = True
            try:
                self._communication.begin_iteration()
            finally:
                self._replica.in_iteration = False
            self._buckets_sent, self._control_sent = 0, False

    @property
    def round_received(self) -> bool:
        """Whether all sums are in the buckets."""
        return not self._buckets_sent

    def step(self) -> None:
        """End the iteration, apply rounds, and enter the next one when the bound allows it."""
        if not self._dropped:
            self._send_control()
        self._communication.end_iteration()
        self._dropped = False
        begin, before = time.monotonic_ns(), self._weak_replica.spent_ns
        try:
            self._communication.begin_iteration()
        finally:
            self.waited(time.monotonic_ns() - begin - (self._weak_replica.spent_ns - before))

    # -- drains ---------------------------------------------------------------------------

    def drain_if_due(self) -> bool:
        """Drain and change colayers if that is due; return whether all replicas were equal."""
        change = self._change
        if change is None or not change.is_due(self.machine.zeta):
            return False
        if self._communication.try_drain(change.poll_decision):
            self._decide(change)
        else:
            self._keep_colayers(change.decision)
        self._communication.begin_iteration()
        return True

    def drain(self) -> None:
        """Wait until all workers have called this and all rounds are applied; then resume."""
        self._communication.finish()
        change = self._change
        if change is not None:
            change.catch_up()
        # All workers have drained with the same rounds; the last two belong to no iteration.
        if change is not None and change.is_due(self.machine.applied - 2):
            self._decide(change)
        else:
            self._communication.resume()
        self._communication.begin_iteration()
        if isinstance(self._replica, SynchronousReplica):
            self._check_equal(self._replica)

    def _decide(self, change: ColayerChange) -> None:
        assert self._profiler is not None
        own = self._profiler.measurements()

        def decided() -> ColayerDecision | None:
            return change.decide(self.machine, self._communication.lost_workers(), own)

        decision: ColayerDecision = self._communication.await_decision(decided, change.missing)
        if decision.buckets is None:
            self._keep_colayers(decision)
            return
        self._changing = decision
        try:
            self._profiler.set_colayers(decision.buckets)
            self._profiler.rebucket()
        finally:
            self._changing = None
        if self._world.rank == min(self.members, default=0):
            log.info("%d colayers, by what was measured", self.colayers)

    def _keep_colayers(self, decision: ColayerDecision | None) -> None:
        assert decision is not None, "otherwise all have drained"
        assert decision.buckets is None, "this worker was counted in, and had not drained"
        if self._world.rank == min(self.members, default=0):
            later = "; tried again later" if decision.retry else ""
            log.warning("colayers stay as they are: %s%s", decision.reason, later)
        if not decision.retry and self._profiler is not None:
            self._profiler.stop()
        self._communication.resume_at(decision.rounds)

    def _check_equal(self, replica: SynchronousReplica) -> None:
        own_steps, replica.own_steps = replica.own_steps, 0
        if any(self._world.exchange("steps alone", own_steps)):
            digests = self._world.exchange("weights", replica.digest())
            if any(digest != digests[0] for digest in digests):
                raise UsageError(
                    "Canary(s=0): a worker that has run out of batches repeats the others' steps "
                    "on the sums that it receives, and weights differ afterwards, as after "
                    "clipping, or more than one backward a step: give all workers as many "
                    "batches, or use wingbeat.AllReduce() and model.join()"
                )

    # -- state ----------------------------------------------------------------------------

    @property
    def room(self) -> str:
        """The namespace of the model in the store; the same on all workers and after restarts."""
        return f"stale{self._world.serial}/alike"

    @property
    def made(self) -> int:
        """Number of rounds applied on this worker."""
        return self.machine.applied

    @property
    def members(self) -> list[int]:
        """The ranks that are alive and have not finished."""
        world, machine = self._world, self.machine
        ranks = (r for r in range(world.size) if machine.incarnation_of(r) is not None)
        return [r for r in ranks if not world.has_published("end", r)]

    @property
    def colayers(self) -> int:
        """Number of colayers with gradients; the machine has one more, the control colayer."""
        return len(self._pieces)

    @property
    def applied(self) -> float:
        """Number of iterations of all workers whose gradients are in the parameters here."""
        world, machine = self._world, self.machine
        return machine.gei.counted / (world.size**2 * machine.colayers)

    @property
    def fired(self) -> dict[str, int]:
        """How often the bound took effect here: ``dropped`` iterations, ``pulled`` parameters."""
        return {"dropped": len(self.machine.dropped), "pulled": self.machine.pulls}

    def sections(self) -> Sequence[Section]:
        """Return the sections of this worker for `wingbeat top`."""
        return status_sections(self.machine, self._world.size, self.colayers)


def status_sections(machine: Worker, workers: int, colayers: int) -> list[Section]:
    """Return a worker's staleness, and the oldest incomplete row of its index.

    Any thread may call it. It takes no lock, so values may come from different moments.
    """
    iteration, in_flight = machine.iteration, machine.bound.max_ahead
    fastest = max(iteration, machine.zeta)  # zeta may lag between two iterations
    rows: dict[str, Cell] = {
        "iteration": iteration,
        "fastest": fastest,
        "behind": fastest - iteration,
        "dropped": len(machine.dropped),
        "in_flight": "any" if in_flight is None else in_flight,
        "waiting": machine.buffered_rounds,
        "pulled": machine.pulls,
    }
    row = machine.gei.retired
    index: dict[str, Cell] = {"row": row}
    for colayer, mask in enumerate(machine.gei.row(row, own=machine.rank)[:colayers]):
        index[f"c{colayer}"] = format_mask(mask, workers)
    return [Section("staleness", rows), Section("exchanged", index)]


def format_mask(mask: int, workers: int) -> str:
    """Return a bit for each worker, worker 0 first; for many workers, the number of set bits.

    >>> format_mask(0b101, 4), format_mask(0b101, 25)
    ('1.1.', '2/25')
    """
    if workers > MAX_SHOWN_BITS:
        return f"{mask.bit_count()}/{workers}"
    return "".join("1" if mask >> worker & 1 else "." for worker in range(workers))


class _RoundHandle:
    """A pending sum; all buckets of a round complete together."""

    def __init__(self, exchange: BoundedStalenessExchange) -> None:
        self._exchange = exchange

    def done(self) -> bool:
        return self._exchange.round_received

    def add_done_callback(self, callback: Callable[[Any], None]) -> NoReturn:
        raise NotImplementedError(f"no thread calls {callback} when a round is complete")

    def wait(self) -> None:
        """Wait for the round if all buckets have been sent; the gradients were copied."""
        self._exchange.await_round()

    wait_received = wait


class _Shutdown:
    """Ends a worker when all have finished; until then the others need the sums of its pieces."""

    def __init__(
        self,
        communication: CommunicationThread,
        replica: WeakReplica,
        world: World,
        change: ColayerChange | None,
    ) -> None:
        self._communication, self._replica, self._world = communication, replica, world
        self._change = change

    def __call__(self) -> None:
        if graceful_shutdown.is_failing():
            self._communication.close(quick=True)
        elif self._world.threads:
            # The worlds of one process are closed one after the other.
            self._replica.release()
            threading.Thread(target=self._finish, name="wingbeat-shutdown").start()
        else:
            self._finish()

    def _finish(self) -> None:
        quick = True
        try:
            if self._change is not None:
                self._change.mark_finished()
            self._communication.finish(_LOG_AFTER_S)
            if self._communication.no_failures:
                world = self._world
                world.publish("end", None)
                self._communication.serve_until(
                    lambda: all(world.has_published("end", peer) for peer in range(world.size)),
                    _LOG_AFTER_S,
                )
            quick = False
        except WingbeatError as error:
            log.warning("%s", error)
        with contextlib.suppress(WingbeatError):
            self._communication.close(quick=quick)
