"""The runtime of exact strategies that continue without a failed replica.

`Recovery` ends the group in which an operation has failed, agrees with the other members on those
that continue (`members`, `agreement`), copies the weights where they differ, and has the engine
exchange in the new group. It runs in the training thread, in the wait that has failed. The step is
then dropped: its remaining operations are not started, and its gradients are zero.
"""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch

from wingbeat.collectives import Collectives, Handle
from wingbeat.engine.context import BuildContext
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.gradients.sparse import sparse_parameters
from wingbeat.engine.runtime import Runtime
from wingbeat.engine.updates.json_values import decode, encode
from wingbeat.engine.updates.update import DeferredUpdate
from wingbeat.errors import PeerError, UsageError
from wingbeat.exchanges.collective import CollectiveExchange
from wingbeat.exchanges.snapshot import Snapshot, encode_snapshot
from wingbeat.methods.elastic.agreement import Decision, Progress
from wingbeat.methods.elastic.members import Members
from wingbeat.observe.log import log
from wingbeat.schedules.events import Operation
from wingbeat.schema import Length, MalformedMessage, Range, parse_json
from wingbeat.transport.graceful_shutdown import departures_of
from wingbeat.transport.world import World
from wingbeat.types import SERIES, Group

if TYPE_CHECKING:
    from wingbeat.engine.engine import Engine
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.methods.elastic.options import Elastic

_GROUPS = 8
"""Groups of an epoch: one for gradients, and one for buffers."""

_MAX_HEADER = 1 << 24

_STATES = 8
"""Tensors of optimizer state of a parameter; Adam has 4 at most."""

_HEADER_ENTRY = 256
"""Bytes of a tensor's description in the header of a snapshot."""

_CPU = torch.device("cpu")


def check_modules(model: torch.nn.Module) -> None:
    """Raise a `UsageError` for a model that cannot be trained without a failed replica."""
    sparse = next(iter(sparse_parameters(model)), None)
    if sparse is not None:
        raise UsageError(
            f"parameter {sparse!r} has sparse gradients, which min_replicas= does not support: use "
            "an embedding with sparse=False, or leave min_replicas out"
        )
    for name, param in model.named_parameters():
        if param.device.type != "cpu":
            raise UsageError(
                f"parameter {name!r} is on {param.device}: min_replicas= was tested with models on "
                "the CPU only; leave it out, or use wingbeat.LocalSGD() or DiLoCo()"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"{name!r} is a torch.nn.SyncBatchNorm, which waits for all workers of a group of "
                "torch in each forward: use torch.nn.BatchNorm, or leave min_replicas out"
            )


# -- the members of a world ---------------------------------------------------------------


class _Epochs:
    """Opens the group of each epoch in the world of all workers."""

    def __init__(self, world: World, members: Members, first: int) -> None:
        self.world, self.members, self._first = world, members, first
        self._open: list[World] = []

    def enter(self, epoch: int, decision: Decision) -> World:
        """Return the world of an epoch's members."""
        self.members.enter(epoch, decision)
        ranks = sorted(decision.tokens)
        number = self._first + _GROUPS * epoch
        inner = self._open_group(ranks, number)
        inner.make_channel = lambda: self._open_group(ranks, number + 1)
        return inner

    def _open_group(self, ranks: Sequence[int], number: int) -> World:
        inner = self.world.open_group(Group(ranks, epoch=number))
        inner.explains = False
        inner.responds = self.members.responds
        self._open.append(inner)
        return inner

    def leave(self) -> None:
        """Close the groups of the present epoch."""
        opened, self._open = self._open, []
        for inner in opened:
            inner.close()


_epochs: weakref.WeakKeyDictionary[World, weakref.ref[_Epochs]] = weakref.WeakKeyDictionary()
"""By world of all workers, and by the world of the first group: of one model at a time.

The model holds them. They hold the worlds, so a strong reference here would keep all for ever.
"""


def _epochs_of(world: World) -> _Epochs | None:
    found = _epochs.get(world)
    return None if found is None else found()


def open_world(part: Elastic, world: World) -> World:
    """Return the group of the present members; a process that was restarted waits for it.

    Raises:
        UsageError: this job cannot continue without a replica.
        RendezvousError: no member admits this process.
    """
    if part.min_replicas > world.size:
        raise UsageError(
            f"min_replicas={part.min_replicas}: this job has {world.size} workers; allowed are 1 "
            f"to {world.size}"
        )
    if world.threads or world.members or world.inside is not None:
        raise UsageError(
            "min_replicas= is for workers that hold the whole model each: with mesh= use "
            "wingbeat.LocalSGD() or DiLoCo()"
        )
    if world.torch_job is not None and world.torch_job.size > 1:
        raise UsageError(
            f"min_replicas= with replicas of {world.torch_job.size} ranks: a replica that fails "
            "must be one process; start a torch job for each process, or use wingbeat.LocalSGD() "
            "or DiLoCo()"
        )
    if _epochs_of(world) is not None:
        gc.collect()  # a dropped model holds its epochs until it is collected
    if _epochs_of(world) is not None:
        raise UsageError(
            "min_replicas= is possible for one model at a time: distribute one module that "
            "contains both, or call wingbeat.release() on the first"
        )
    serial = world.next_series()
    members = Members(world, part.min_replicas, serial)
    if world.returned:
        epoch, decision = members.join()
    else:
        epoch, decision = 0, members.begin()
    epochs = _Epochs(world, members, (serial - 1) * SERIES)
    world.on_close(weakref.finalize(epochs, members.close))
    inner = epochs.enter(epoch, decision)
    _epochs[world] = _epochs[inner] = weakref.ref(epochs)
    _joined[inner] = decision
    return inner


_joined: weakref.WeakKeyDictionary[World, Decision] = weakref.WeakKeyDictionary()
"""The decision by which this process has become a member of a group."""


# -- the exchange -------------------------------------------------------------------------


class ElasticHandle:
    """An operation on a bucket whose failure is recovered from in the wait for it."""

    def __init__(self, inner: Handle | None, failed: PeerError | None, recovery: Recovery) -> None:
        self.inner = inner
        self._failed, self._recovery = failed, recovery

    def done(self) -> bool:
        """As `Handle.done`."""
        return self.inner is None or self.inner.done()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """As `Handle.add_done_callback`."""
        if self.inner is None:
            callback(self)
        else:
            self.inner.add_done_callback(callback)

    def wait(self) -> None:
        """As `Handle.wait`, but recover from a failure."""
        self._recovering(lambda: self.inner.wait() if self.inner is not None else None)

    def wait_received(self) -> None:
        """As `Handle.wait_received`, but recover from a failure."""
        self._recovering(lambda: self.inner.wait_received() if self.inner is not None else None)

    def _recovering(self, wait: Callable[[], None]) -> None:
        failed = self._failed
        if failed is None:
            try:
                wait()
            except PeerError as error:
                failed = error
        if failed is not None:
            self._recovery.recover(failed)


class ElasticExchange(CollectiveExchange):
    """Collectives of the present members. In a step that is dropped nothing is exchanged."""

    def __init__(
        self, collectives: Collectives, compression: Compression, recovery: Recovery
    ) -> None:
        super().__init__(collectives, compression)
        self._recovery = recovery

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """As `Exchange.start`; raises nothing if an earlier operation failed."""
        if self._recovery.progress.dropping:
            bucket.handle = None
            bucket.flat.zero_()
            return
        before = bucket.handle
        failed: PeerError | None = None
        if isinstance(before, ElasticHandle):
            failed = before._failed
            bucket.handle = before.inner
        if failed is None:
            try:
                super().start(operation, bucket, chained)
            except PeerError as error:
                failed = error
        inner = bucket.handle if failed is None else None
        assert inner is None or isinstance(inner, Handle)
        bucket.handle = ElasticHandle(inner, failed, self._recovery)


def build_runtime(context: BuildContext) -> Runtime:
    """Make a runtime that continues without failed workers."""
    collectives = context.training.collectives
    epochs = _epochs_of(collectives.world)
    assert epochs is not None, "the channel of its world holds it"
    recovery = Recovery(epochs, collectives)
    exchange = ElasticExchange(collectives, context.compression, recovery)
    runtime = context.runtime(lambda: exchange)
    runtime.recovery = recovery
    return runtime


# -- recovery -----------------------------------------------------------------------------


class _Header(NamedTuple):
    """What the source sends before its weights, if any are copied.

    Attributes:
        state: as in `Report`.
        updated: as in `Report`.
        order: the order in which gradients become ready; empty if it is not known yet.
        unused: parameters without a gradient in the first backward.
        nbytes: of the snapshot.
    """

    state: Annotated[int, Range(-1)]
    updated: Annotated[tuple[int, ...], Length(most=1 << 20)]
    order: Annotated[tuple[int, ...], Length(most=1 << 24)]
    unused: Annotated[tuple[int, ...], Length(most=1 << 24)]
    nbytes: Annotated[int, Range(0, 1 << 48)]


class Recovery:
    """Leaves failed workers out, and admits those that return.

    Attributes:
        progress: how far this process has come.
    """

    def __init__(self, epochs: _Epochs, collectives: Collectives) -> None:
        self._epochs, self._members = epochs, epochs.members
        self._collectives = collectives
        self.progress = Progress()
        self._engine: Callable[[], Engine | None] = lambda: None

    def attach(self, engine: Engine) -> None:
        """Recover this engine; copy the weights if this process has returned."""
        self._engine = weakref.ref(engine)
        engine.steps_made.admits = True
        if isinstance(engine.update, DeferredUpdate):
            engine.update.on_update = self._updated
        decision = _joined.pop(self._collectives.world)
        if self._members.epoch == 0:
            return
        self.progress.state = -1
        engine.copied = True
        self.progress.enter(decision, member=False, in_step=False)
        engine.steps_made.count = self.progress.steps
        try:
            self._copy(engine, decision)
        except PeerError as error:
            self.recover(error, in_step=False)

    def _updated(self, numbers: set[int]) -> None:
        engine = self._engine()
        assert engine is not None, "its update has called this"
        self.progress.update(numbers, len(engine.buckets))

    @property
    def wanted(self) -> bool:
        """Whether this process knows of another one that asks to join."""
        return self._members.wanted

    def close(self) -> None:
        """Leave the members; another model may be distributed then."""
        self._members.close()
        self._epochs.leave()
        _epochs.pop(self._epochs.world, None)

    def recover(self, error: PeerError | None, *, in_step: bool = True) -> None:
        """Continue in another epoch, after a failure or, without an ``error``, to admit others.

        ``in_step`` is whether this process is between the beginning of a step and its end. A
        `PeerError` if training cannot continue.
        """
        engine = self._engine()
        if engine is None:
            raise error or PeerError("the model is no longer distributed")
        begun, former = time.monotonic(), self._members.tokens
        if error is not None:
            log.warning("%s", error)
        while True:
            if error is not None:
                self._collectives.abandon()
                engine.buffer_sync.abandon()
            self._epochs.leave()  # without an error, what others still read is sent first
            if error is not None:
                self._drop_operations(engine)
            member = self.progress.state >= 0
            epoch, decision = self._members.agree(
                self.progress.report(self._members.token, member=member)
            )
            member &= epoch == self._members.epoch + 1
            self.progress.enter(decision, member=member, in_step=in_step)
            if not member:
                self.progress.state = -1
            engine.move(self._epochs.enter(epoch, decision))
            engine.steps_made.count = self.progress.steps
            try:
                self._copy(engine, decision)
            except PeerError as again:
                log.warning("%s", again)
                error = again
                continue
            break
        engine.steps_made.asked = False  # all members have agreed since
        self._log(former, decision, time.monotonic() - begun)

    def _log(self, former: Mapping[int, str], decision: Decision, seconds: float) -> None:
        whole, ranks = self._epochs.world, sorted(decision.tokens)
        departures = departures_of(whole)
        for rank, token in former.items():
            if decision.tokens.get(rank) != token:
                departures.lost(rank)
        for rank in ranks:
            if former.get(rank) != decision.tokens[rank]:
                departures.back(rank)
        copied = f"; rank {decision.source} gave its weights to " if decision.copies else ""
        copied += ", ".join(map(str, decision.copies))
        log.warning(
            "%s: continues with %s of %s workers (ranks %s) from step %s on, after %s%s",
            *(f"rank {whole.rank}", len(ranks), whole.size, ", ".join(map(str, ranks))),
            *(decision.resume, f"{seconds:.2f} s", copied),
        )

    def _drop_operations(self, engine: Engine) -> None:
        """Drop what is outstanding, and due updates, which a failed operation has prevented."""
        update = engine.update
        if isinstance(update, DeferredUpdate) and update.drop():
            self.progress.begin()
        for bucket in engine.buckets:
            bucket.handle = None
            bucket.flat.zero_()

    def _copy(self, engine: Engine, decision: Decision) -> None:
        """Copy the state of the source, on the members that differ from it."""
        world = self._collectives.world
        source, me = world.ranks.index(decision.source), world.ranks[world.rank]
        snapshot = b""
        if me == decision.source and decision.copies:
            snapshot = _snapshot(engine)
        order, unused = engine.bucketing.order
        own = _Header(
            self.progress.state, tuple(sorted(self.progress.updated)),
            tuple(order), tuple(unused), len(snapshot),
        )  # fmt: skip
        text = self._broadcast(json.dumps(own).encode() if me == decision.source else b"", source)
        try:
            header: _Header = parse_json(_Header, text.decode())
            if header.nbytes > (most := _most_nbytes(engine)):
                raise MalformedMessage(
                    f"a snapshot of {header.nbytes} bytes, at most {most} are possible"
                )
            engine.bucketing.follow_order(header.order, header.unused)
        except (MalformedMessage, ValueError) as error:
            raise PeerError(
                f"rank {me}: rank {decision.source} sent a malformed header of its state: {error}"
            ) from None
        if decision.copies:
            if header.nbytes == 0:
                raise PeerError(f"rank {me}: rank {decision.source} sent an empty snapshot")
            payload = self._broadcast(snapshot, source, header.nbytes)
            if me in decision.copies:
                _load(engine, payload)
        self.progress.copy(header.state, set(header.updated))

    def _broadcast(self, payload: bytes, source: int, nbytes: int = -1) -> bytearray:
        """Return the bytes of the source; without ``nbytes``, their number is sent first."""
        mine = self._collectives.world.rank == source
        if nbytes < 0:
            length = torch.tensor([len(payload)], device="cpu")
            self._collectives.broadcast(length, source, label="length of a state").wait()
            nbytes = int(length)
            if not 0 <= nbytes <= _MAX_HEADER:
                world = self._collectives.world
                raise PeerError(
                    f"{world.me}: {world.name(source)} sent a header of {nbytes} bytes, at most "
                    f"{_MAX_HEADER} are possible"
                )
        found = bytearray(payload) if mine else bytearray(nbytes)
        if nbytes:
            buffer = torch.frombuffer(found, dtype=torch.uint8)
            self._collectives.broadcast(buffer, source, label="state").wait()
        return found

    # -- steps ------------------------------------------------------------------------------

    def guard(self, operation: Callable[[], object], *, in_step: bool = True) -> None:
        """Perform an operation with other workers, and recover if it fails."""
        try:
            operation()
        except PeerError as error:
            self.recover(error, in_step=in_step)

    def stepped(self, engine: Engine, *, applied: bool) -> None:
        """Record a step; ``applied`` is whether it was not dropped. Admit others if all agree."""
        self.progress.step()
        assert self.progress.steps == engine.steps_made.count, "both count calls of step()"
        if applied and not any(bucket.due for bucket in engine.buckets):
            self.progress.apply()
        if engine.steps_made.asked:
            engine.steps_made.asked = False
            engine.flush()
            self.guard(engine.buffer_sync.apply, in_step=False)
            if not self.progress.dropping:
                self.recover(None, in_step=False)

    def level(self) -> None:
        """Wait until all members come here, with equal weights."""
        while not self.progress.dropping:
            try:
                self._collectives.all_reduce(torch.zeros(1, device="cpu")).wait()
            except PeerError as error:
                self.recover(error, in_step=False)
            else:
                return


def _tensors(engine: Engine) -> list[torch.Tensor]:
    """Return what equals on all members: parameters, frozen ones, and buffers.

    Without their version counters: a forward may have saved them for a backward that is dropped.
    """
    with torch._C.DisableTorchFunctionSubclass():
        trained = [slot.param.data for slot in engine.slots]
    return [*trained, *engine.bucketing.others]


def _most_nbytes(engine: Engine) -> int:
    """Return an upper bound on the bytes of a snapshot of this model and its optimizer.

    State has elements of up to 8 bytes, in up to `_STATES` tensors like each parameter.
    """
    tensors = _tensors(engine)
    params = engine.stepper.params()
    weights = sum(each.numel() * each.element_size() for each in tensors)
    state = 8 * _STATES * sum(each.numel() + 1 for each in params)
    return weights + state + _MAX_HEADER + _HEADER_ENTRY * (len(tensors) + _STATES * len(params))


def _snapshot(engine: Engine) -> bytes:
    groups = [
        {key: encode(value) for key, value in group.items() if key != "params"}
        for group in engine.optimizer.__dict__["param_groups"]
    ]
    params = engine.stepper.params()
    with engine.stepper.inside(), torch.no_grad():
        return encode_snapshot(_tensors(engine), params, engine.optimizer, groups)


def _load(engine: Engine, payload: bytearray) -> None:
    with engine.stepper.inside(), torch.no_grad():
        snapshot = Snapshot(payload, _tensors(engine), engine.stepper.params())
        groups = engine.optimizer.__dict__["param_groups"]
        given = snapshot.extra
        if not isinstance(given, list) or len(given) != len(groups):
            raise PeerError("another worker sent other param groups than this one has")
        snapshot.load_into(engine.optimizer)
        # A process that has returned continues with the same learning rate.
        for group, options in zip(groups, given, strict=True):
            found = {str(key): decode(value, _CPU) for key, value in dict(options).items()}
            group.update({key: value for key, value in found.items() if key != "params"})
