"""Training under bounded staleness: buckets are sent in pieces, and rounds of sums are applied.

Each bucket is a colayer. The worker's state machine defines the messages, and a communication
thread sends and receives them. Backward sends a worker's own gradients (Canary, section 5.3). All
workers apply the same rounds in the same order, but at different times: none, one or several in a
call of ``optimizer.step``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from wingbeat.collectives import Handle
from wingbeat.engine.gradients.placed import local
from wingbeat.engine.gradients.views import SentGradients, replaced
from wingbeat.engine.updates.update import Closure, Host, Training, WholeUpdate
from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.exchanges.on_host import BucketsOnHost
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.colayers import (
    Buckets,
    ColayerChange,
    ColayerDecision,
    LayerProfiler,
)
from wingbeat.methods.bounded_staleness.communication import CommunicationThread
from wingbeat.methods.bounded_staleness.consistency import ConsistencyCheck
from wingbeat.methods.bounded_staleness.journal import open_journal
from wingbeat.methods.bounded_staleness.membership import join_workers
from wingbeat.methods.bounded_staleness.messages import check_workers
from wingbeat.methods.bounded_staleness.options import Bounded
from wingbeat.methods.bounded_staleness.replica import (
    AsynchronousReplica,
    Pieces,
    SynchronousReplica,
    bound_with_control,
)
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.observe.log import log, log_event
from wingbeat.observe.meter import Cell, Section
from wingbeat.schedules.events import Operation, Step, UpdateCommand
from wingbeat.transport import graceful_shutdown
from wingbeat.transport.graceful_shutdown import departures_of
from wingbeat.transport.messages.frames import Limits
from wingbeat.transport.world import World

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, PendingOperation, StepCounter
    from wingbeat.engine.gradients.compression import Compression

SUSPECT_AFTER_S = 10.0
"""Minimum seconds of silence after which a worker is suspected."""

MAX_SHOWN_BITS = 16
"""Maximum number of workers for which a cell of the index shows one bit each; above it, a count."""

_LOG_AFTER_S = 5.0
"""Seconds after the end of a script after which a log line states why its process still runs."""

_OTHERS = "or use wingbeat.AllReduce()"

_Versions = tuple[tuple[int, int], tuple[tuple[int, int], ...]]
"""Address and version of a parameter, and of the tensors in its optimizer state."""


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
        machine: the state machine, from `planned` on; only the communication thread changes it.
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
        self._sending: list[PendingOperation] = []
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
        self._profiler = profiler
        chooser = weakref.WeakMethod(profiler.choose_colayers)  # does not keep the model alive

        def choose(measured: Sequence[Any]) -> Buckets | None:
            found = chooser()
            return None if found is None else found(measured)

        namespace = f"stale{world.serial}/colayers"
        self._change = ColayerChange(world.store, namespace, world.rank, profiler.count, choose)
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
        if world.leads:
            log.debug(
                "%d colayers: p=%d, s=%s, in_flight=%s",
                count, p, bounded.s, bounded.in_flight,
            )  # fmt: skip
        colayers = [{slot.name: local(slot.param) for slot in bucket.slots} for bucket in buckets]
        encodings = [self._compression.encoded(bucket) for bucket in buckets]
        self._pieces = Pieces(colayers, world.size, encodings, world.name)
        self._on_host = BucketsOnHost(buckets)
        params = [[slot.param for slot in bucket.slots] for bucket in buckets]
        if self._changing is not None:
            self._replica.set_colayers(params, self._pieces)
            self._communication.change_colayers(bound, self._replica.combine, self._changing.view)
        else:
            self._connect(bound, params, buckets)

    def _connect(
        self,
        bound: StalenessBound,
        params: Sequence[Sequence[torch.Tensor]],
        buckets: Sequence[Bucket],
    ) -> None:
        world = self._world
        common = params, self._pieces, self._optimizer, self._step, self._others
        self.replicas_diverge = bound.mode != "BSP"
        if self.replicas_diverge:
            check_workers(world.size, bound.colayers, bound.max_buffered, Limits().message)
        if self.synchronous:
            self._replica: AsynchronousReplica | SynchronousReplica = SynchronousReplica(
                *common, buckets=buckets, steps=self._steps
            )
        else:
            self._replica = AsynchronousReplica(*common)
        inside = world.replica
        joined = join_workers(
            world.store, world.rank, world.size, namespace=f"stale{world.serial}",
            interfaces=("lo",) if world.threads else world.interfaces or None,
            neighbours=neighbours(world.networks), encrypted=self._bounded.encrypted,
            suspect_after=min(SUSPECT_AFTER_S, world.timeout), seconds=world.timeout,
            name=world.name, inside=inside,
            record=functools.partial(log_event, rank=world.ranks[world.rank]),
        )  # fmt: skip
        self.machine = Worker(
            world.rank, world.size, bound, self._replica.combine, max_buffered=bound.max_buffered,
            incarnation=joined.incarnation, epoch=self._epoch,
        )  # fmt: skip
        column = "" if inside is None else f"-column{inside.place}"
        journal = open_journal(
            f"training{world.serial}{column}", world.rank, joined.incarnation, world.size, bound
        )
        # Synchronous training ends when a worker is lost, as with DDP.
        self._communication = CommunicationThread(
            self.machine, joined.mailbox, self._replica, timeout=world.timeout,
            tolerates_loss=self.replicas_diverge, departures=departures_of(world),
            streams=joined.streams, membership=joined.membership, journal=journal,
            name=world.name, inside=inside,
        )  # fmt: skip
        # A model may be gone before its worker ends, and a world holds its channels weakly: without
        # the channel `_shut_down` would not be called, and the other workers would wait for ever.
        self._communication.start(keep=world)
        shut_down = functools.partial(_shut_down, self._communication, world, self._change)
        world.on_close(shut_down)
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

        The bucket's handle is done when its gradients and their residual are no longer used.
        Synchronous training receives the sum when it waits for it.
        """
        assert operation is Operation.CONTRIBUTE, operation
        own = self._on_host.of(bucket.index)
        used = [slot.used for slot in bucket.slots]
        flat = own.flat[: bucket.numel]
        send = functools.partial(self._send, self._pieces, bucket.index, flat, used)
        self._sending.append(self._on_host.start(own, send, back=False))
        if self.synchronous:
            self._buckets_sent += 1
            bucket.handle = _RoundHandle(self)

    @torch.no_grad()
    def _send(
        self, pieces: Pieces, colayer: int, flat: torch.Tensor, used: Sequence[bool]
    ) -> Handle:
        if not self._dropped:
            payloads = pieces.split(colayer, flat, used)
            self._dropped = not self._communication.send_colayer(colayer, payloads)
            if self._dropped:
                pieces.undo_split(colayer, flat, payloads)
        return Handle([])

    def _await_sends(self) -> None:
        """Wait until all gradients of the iteration have come from the device and were sent."""
        while self._sending:
            self._sending.pop(0).wait()

    def _send_control(self) -> None:
        self._communication.send_colayer(self._replica.control, self._replica.control_payloads())

    def await_round(self) -> None:
        """Wait for what was sent, and for the sums if all buckets of the iteration have been."""
        self._await_sends()
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
        self._await_sends()
        if not self._dropped:
            self._send_control()
        self._communication.end_iteration()
        self._dropped = False
        begin, before = time.monotonic_ns(), self._communication.applying_ns
        try:
            self._communication.begin_iteration()
        finally:
            applying = self._communication.applying_ns - before
            self.waited(time.monotonic_ns() - begin - applying)

    # -- drains ---------------------------------------------------------------------------

    def drain_if_due(self) -> bool:
        """Drain and change colayers if that is due; return whether all replicas were equal."""
        change = self._change
        if change is None or not change.is_due(self.machine.zeta):
            return False
        if self._communication.finish(cancelled=change.poll_decision):
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
        return {"dropped": self.machine.dropped, "pulled": self.machine.pulls}

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
        "dropped": machine.dropped,
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
        """Wait for the gradients, and for the round if all buckets have been sent."""
        self._exchange.await_round()

    wait_received = wait


def _shut_down(
    communication: CommunicationThread, world: World, change: ColayerChange | None
) -> None:
    """End a worker when all have finished; until then the others need the sums of its pieces."""
    if graceful_shutdown.is_failing():
        communication.close(quick=True)
    elif world.threads:
        # The worlds of one process are closed one after the other.
        communication.replica_released = True
        finish = functools.partial(_finish, communication, world, change)
        threading.Thread(target=finish, name="wingbeat-shutdown").start()
    else:
        _finish(communication, world, change)


def _finish(communication: CommunicationThread, world: World, change: ColayerChange | None) -> None:
    quick = True
    try:
        if change is not None:
            change.mark_finished()
        communication.finish(_LOG_AFTER_S)
        if communication.no_failures:
            world.publish("end", None)
            communication.serve_until(
                lambda worker: world.has_published("end", worker), _LOG_AFTER_S
            )
        quick = False
    except WingbeatError as error:
        log.warning("%s", error)
    with contextlib.suppress(WingbeatError):
        communication.close(quick=quick)


# -- updates ---------------------------------------------------------------------------------


class SynchronousUpdate(WholeUpdate):
    """The optimizer's own step on synchronous rounds; workers drain before they equalize state."""

    def __init__(self, training: Training, exchange: BoundedStalenessExchange) -> None:
        super().__init__(training)
        self._exchange = exchange
        self._drained_at = 0

    def level(self, *, always: bool) -> bool:
        """Wait for all workers."""
        made = self._training.steps.count
        drains, self._drained_at = always or made != self._drained_at, made
        if drains:
            self._exchange.drain()
        return drains


class BoundedUpdate(WholeUpdate):
    """Applies rounds by the optimizer's own step on all parameters, and enters iterations."""

    def __init__(
        self, training: Training, views: SentGradients, exchange: BoundedStalenessExchange
    ) -> None:
        super().__init__(training)
        self._views, self._exchange = views, exchange
        self._has_stepped = False
        self._versions: dict[str, _Versions] | None = None  # None if all are equal
        self._alike = ConsistencyCheck(training, exchange)
        self._loaded = self._leaving = False

    def step(self, host: Host, closure: Closure) -> Any:
        """Apply rounds when the user calls ``optimizer.step``.

        Raises:
            UsageError: gradients were changed since they were sent, have not been sent, or were
                used by the previous step; or ``step`` has a closure or other arguments.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) under bounded staleness (Canary): gradients are sent in "
                "backward, which a closure may repeat; call backward(), then step() without one"
            )
        if self._exchange.replicas_diverge:
            where = "under bounded staleness (Canary)"
            self._training.stepper.arguments.refuse_others(where, "wingbeat.Canary(s=0)")
        host.recover()
        if not self._views.sent:
            self._check_nothing_to_step()
            return None
        if replaced(self._training.bucketing.slots):
            raise UsageError(
                "optimizer.step(): gradients were changed or dropped after backward, when they had "
                "been sent to the other workers (Canary): leave p.grad alone between backward() "
                f"and step(), {_OTHERS}"
            )
        self._check_unchanged()
        if self._loaded and self._exchange.replicas_diverge:
            self._check_equal()
        self._loaded = False
        return super().step(host, None)

    def _check_nothing_to_step(self) -> None:
        slots = self._training.bucketing.slots
        slot = next((slot for slot in slots if slot.param.grad is not None), None)
        if slot is not None:
            raise UsageError(
                f"optimizer.step(): the gradient of parameter {slot.name!r} has not been sent: "
                "the last backward before a step has to be outside of no_sync(), and after "
                "zero_grad() there has to be one"
            )
        if self._views.spent:
            raise UsageError(
                "a second optimizer.step() after one backward: the first has used its gradients "
                "(Canary); call step() once after each backward, and zero_grad() before the next, "
                f"{_OTHERS}"
            )

    def _check_unchanged(self) -> None:
        """Raise a `UsageError` if weights or optimizer state were changed since the last step."""
        if self._versions is None:
            return
        for name, now in self._current_versions().items():
            before = self._versions[name]
            if now != before:
                what = "the optimizer's state of " if now[0] == before[0] else ""
                raise UsageError(
                    f"{what}parameter {name!r} was changed after optimizer.step(), when workers "
                    "may have applied different sums (Canary): call model.synchronize() on all "
                    "ranks first, and change it on all alike; or use Canary(s=0)"
                )

    def _check_equal(self) -> None:
        """Raise a `UsageError` if weights or optimizer state differ; log it during ``release``."""
        found = self._alike.different()
        if found is None:
            return
        text = (
            f"{found} differs between workers (Canary), because something other than "
            "optimizer.step() has changed it: a state that each rank has saved for itself and "
            "loads, or a write between two steps; save, load and write on all ranks alike right "
            "after model.synchronize(), and load one state on all now; or use Canary(s=0)"
        )
        if not self._leaving:
            raise UsageError(text)
        log.warning("release(): %s", text)

    @torch.no_grad()
    def _broadcast_frozen(self) -> None:
        first = self._alike.of_frozen()
        if first is not None:
            for _, param in self._training.bucketing.frozen:
                own = local(param.detach())
                values = own.clone(memory_format=torch.contiguous_format)
                sent = values.view(-1).view(torch.uint8)
                collectives = self._training.collectives
                collectives.broadcast(sent, first, label="frozen parameters").wait()
                own.copy_(values)

    def _current_versions(self) -> dict[str, _Versions]:
        found: dict[str, _Versions] = {}
        for slot in self._training.bucketing.slots:
            state = self._training.optimizer.state.get(slot.param, {}).values()
            tensors = (local(value) for value in state if isinstance(value, torch.Tensor))
            versions = tuple((id(tensor), tensor._version) for tensor in tensors)
            own = local(slot.param)
            found[slot.name] = (own.data_ptr(), own._version), versions
        return found

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Apply rounds, the only command."""
        assert isinstance(command, Step), command
        self._training.steps.count += 1
        self._has_stepped = True
        try:
            self._exchange.step()
        finally:
            self._views.spend()
            diverge = self._exchange.replicas_diverge
            self._versions = self._current_versions() if diverge else None
        if self._exchange.drain_if_due():
            self._versions = self._current_versions()

    @property
    def differs(self) -> bool:
        """Whether other workers may have applied other rounds."""
        return self._exchange.replicas_diverge and self._has_stepped

    def log_lost(self, saver: int, size: int, differed: bool) -> None:  # noqa: ARG002
        """Log once, on one rank, that a state lacks rounds that were under way."""
        if differed and self._training.collectives.world.leads:
            log.warning(
                "load_state_dict(): this state was saved between two calls of model.synchronize(), "
                "with rounds of gradients under way, which are in no state: training continues "
                "without them; call model.synchronize() on all ranks before you save"
            )

    @property
    def is_own(self) -> bool:
        """Whether a state dict would be that of this worker only."""
        return self.differs

    def level(self, *, always: bool) -> bool:
        """Wait for all workers and apply all sent rounds; UsageError between backward and step."""
        if self._views.sent:
            raise UsageError(
                "synchronize(), load_state_dict() or release() between backward() and step() "
                "(Canary): the gradients have been sent, and are applied before step(); call it "
                "first"
            )
        drains, self._has_stepped = self._has_stepped or always, False
        self._loaded = self._loaded or not always  # a state is about to be loaded
        if drains:
            self._check_unchanged()
            self._exchange.drain()
            self._versions = None
            if self._exchange.replicas_diverge:
                self._check_equal()
                self._broadcast_frozen()
        return drains

    def before_detach(self) -> None:
        """End the open iteration when training is released; its gradients were sent."""
        self._leaving = True
        if self._views.sent:
            self.perform(Step(), None)
        else:
            self._versions = None

    def refuse_lost(self, what: str) -> NoReturn:
        """Raise a UsageError: gradients cannot be changed after backward has sent them."""
        raise UsageError(
            f"{what}: under bounded staleness (Canary) gradients are sent in backward, and sums of "
            f"several iterations return; leave it out, {_OTHERS}"
        )
