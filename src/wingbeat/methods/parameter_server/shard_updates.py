"""The parameters of one server: pending steps, barriers, and requests for parameters; without I/O.

Geryon (Wang et al., 2020), section II-A: servers aggregate, and workers pull parameters. A slice is
updated once its sum is complete and the step is known; slices do not wait for each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wingbeat.methods.parameter_server.aggregator import (
    SLICE_OVERHEAD,
    Array,
    SliceKey,
    SliceSum,
    convert,
)
from wingbeat.methods.parameter_server.protocol import (
    NO_ROUND,
    Document,
    Ids,
    Kind,
    RequestError,
    StepSettings,
    position_of,
    sent_by,
    unpack_numbers,
)
from wingbeat.schema import MalformedMessage, parse_json
from wingbeat.transport.text import describe_error

if TYPE_CHECKING:
    from wingbeat.methods.parameter_server.shard_optimizer import ShardOptimizer, SliceParameters


@dataclass(eq=False, slots=True)
class Shard:
    """One slice of the parameters.

    ``current`` are the parameters in the form in which they are sent; its round counts updates.
    ``gradients`` replace the sum in the next update. ``route`` is for parameters that are sent
    without a request. ``fetches`` are requests for the parameters of the next update, by rank.
    """

    params: SliceParameters
    current: SliceSum = field(init=False)
    gradients: Array | None = None
    route: int = 0
    fetches: dict[int, Ids] = field(default_factory=dict)

    def set_current(self, number: int) -> None:
        """Set `current` to the parameters as they are after so many updates."""
        self.current = SliceSum(number, self.params.dtype, self.params.memory)


class ParameterReply(NamedTuple):
    """A reply to one worker: parameters, optimizer state, or None if parameters follow later."""

    worker: int
    ids: Ids
    params: SliceSum | None = None
    state: tuple[dict[str, Any], list[memoryview]] | None = None


class _Request(NamedTuple):
    worker: int
    barrier: int  # handled once all workers have passed so many barriers
    kind: int
    ids: Ids
    payload: Any
    received_at: float

    @property
    def nbytes(self) -> int:  # a document is counted when its first message arrives
        return SLICE_OVERHEAD + (0 if isinstance(self.payload, Document) else len(self.payload))


@dataclass(slots=True)
class _Step:
    """One update of all slices, which all workers request."""

    plan: int
    number: int  # of updates after it
    round: int  # whose sums are used; `NO_ROUND`: gradients that were sent for this step
    started_at: float
    # By rank that has requested the step: whether it gets the parameters without a request.
    pushes_to: dict[int, bool] = field(default_factory=dict)
    digest: tuple[int, str] | None = None  # of the first rank that sent settings
    settings: StepSettings | None = None  # the optimizer's, from the leading worker
    leader: int = -1
    remaining: set[int] = field(default_factory=set)  # slices that are not updated yet
    used: frozenset[int] = frozenset()  # parameters with a gradient on some worker


class ShardUpdates:
    """All parameters of one server.

    ``make_optimizer`` is called on first use. ``completed_sum`` returns a slice's sum of a round if
    it is complete. Parameters and optimizer state are limited to ``max_nbytes``. ``name`` returns
    the name of a worker in errors.
    """

    def __init__(
        self,
        workers: int,
        make_optimizer: Callable[[], ShardOptimizer],
        completed_sum: Callable[[SliceKey, int], SliceSum | None],
        max_nbytes: int,
        *,
        name: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self._workers, self._max_nbytes, self._name = workers, max_nbytes, name
        self._make_optimizer, self._completed_sum = make_optimizer, completed_sum
        self._created: ShardOptimizer | None = None
        self._shards: dict[int, dict[int, Shard]] = {}
        self._documents: dict[int, tuple[Ids, Document]] = {}
        self._barriers = [0] * workers
        self._queued: list[_Request] = []
        self._step: _Step | None = None
        self._due: list[tuple[int, int]] = []
        self._queued_nbytes = 0
        self.nbytes = 0

    @property
    def has_work(self) -> bool:
        """Whether a slice can be updated now."""
        return bool(self._due)

    def find_incomplete(self, before: float) -> tuple[str, set[int]] | None:
        """Return what has been incomplete since before a time, and the workers it waits for."""
        step, ranks = self._step, set(range(self._workers))
        if step is not None and step.started_at < before and ranks - step.pushes_to.keys():
            return "step", ranks - step.pushes_to.keys()
        if any(request.received_at < before for request in self._queued):
            return "optimizer state", {rank for rank in ranks if self._is_behind(rank)}
        return None

    def is_waiting_for(self, worker: int) -> bool:
        """Whether a step or a queued request waits for a worker."""
        step = self._step
        behind = bool(self._queued) and self._is_behind(worker)
        return behind or (step is not None and worker not in step.pushes_to)

    def _is_behind(self, worker: int) -> bool:
        return self._barriers[worker] < max(self._barriers)

    # -- requests -------------------------------------------------------------------------

    def handle(
        self, worker: int, kind: int, ids: Ids, payload: Any, now: float = 0.0
    ) -> Iterator[ParameterReply]:
        """Handle a request; yield the replies.

        Requests after a `Kind.BARRIER` wait until all workers have sent as many barriers, because
        none may read before all have loaded.
        """
        if kind == Kind.BARRIER:
            yield from self._pass_barrier(worker, ids.plan)
            return
        if kind == Kind.CONTINUATION:
            if worker not in self._documents:
                raise RequestError(f"{self._name(worker)} sent a fragment without a document")
            ids, document = self._documents.pop(worker)
            with sent_by(self._name(worker)):
                document.append(payload)
        elif kind == Kind.LOAD:
            free = self._max_nbytes - self.nbytes - self._queued_nbytes
            with sent_by(self._name(worker)):
                document = Document(payload, free)
            self._queued_nbytes += document.nbytes
        else:
            request = _Request(worker, self._barriers[worker], kind, ids, payload, now)
            yield from self._submit(request)
            return
        if document.complete:
            kind = Kind.LOAD if "pieces" in document.fields else Kind.CONTINUATION
            # Whole slices are loaded once all workers have sent theirs; plain values at once.
            barrier = self._barriers[worker] + (kind == Kind.LOAD)
            yield from self._submit(_Request(worker, barrier, kind, ids, document, now))
        else:
            self._documents[worker] = ids, document

    def _pass_barrier(self, worker: int, plan: int) -> Iterator[ParameterReply]:
        before = min(self._barriers)
        self._barriers[worker] += 1
        if min(self._barriers) > before:
            queued, self._queued = self._queued, []
            # The first worker may already request what the last one has just loaded.
            for request in sorted(queued, key=lambda r: (r.barrier, r.kind != Kind.LOAD)):
                self._queued_nbytes -= request.nbytes
                yield from self._submit(request)
            self._drop_before(plan)

    def _submit(self, request: _Request) -> Iterator[ParameterReply]:
        if request.barrier > min(self._barriers):
            self._queued_nbytes += request.nbytes
            if self._queued_nbytes + self.nbytes > self._max_nbytes:
                raise RequestError(
                    f"rank {request.worker}: queued requests need {self._queued_nbytes} bytes; "
                    f"the server's limit is {self._max_nbytes}"
                )
            self._queued.append(request)
            return
        worker, ids, payload = request.worker, request.ids, request.payload
        match request.kind:
            case Kind.LOAD:
                self._queued_nbytes -= len(payload.data)
                self._load(worker, ids, payload)
            case Kind.CONTINUATION:
                self._queued_nbytes -= len(payload.data)
                shard = self._shard(worker, ids)
                with sent_by(self._name(worker)):
                    self._optimizer.set_values(shard.params, payload.data)
                shard.set_current(shard.current.round)
            case Kind.FETCH:
                yield ParameterReply(worker, ids, self._fetch(worker, ids))
            case Kind.STATE:
                yield ParameterReply(worker, ids, state=self._export_state(worker, ids))
            case Kind.GRADIENTS:
                self._set_gradients(worker, ids, payload)
            case Kind.STEP:
                self._request_step(worker, ids, payload, request.received_at)
            case _:
                raise RequestError(f"{self._name(worker)} sent a message of kind {request.kind}")

    def set_route(self, key: SliceKey, route: int) -> None:
        """Set how the parameters of a slice are sent without a request."""
        shard = self._shards.get(key[0], {}).get(key[1])
        if shard is not None:
            shard.route = route

    def sum_completed(self, key: SliceKey) -> None:
        """Update a slice whose sum is complete, if the step is known."""
        step = self._step
        if step is not None and step.plan == key[0] and key[1] in step.remaining:
            self._push_due(step, key[1])

    def _load(self, worker: int, ids: Ids, document: Document) -> None:
        shards, optimizer = self._shards.setdefault(ids.plan, {}), self._optimizer
        with sent_by(self._name(worker)):
            params = optimizer.load(document.fields, document.data)
        before = shards.get(ids.slice)
        if before is not None:
            self._drop(before)
        shards[ids.slice] = shard = Shard(params, route=0 if before is None else before.route)
        shard.set_current(ids.round)
        self._grow(params.nbytes)

    def _set_gradients(self, worker: int, ids: Ids, payload: Any) -> None:
        shard = self._shard(worker, ids)
        if len(payload) != shard.params.memory.nbytes:
            raise RequestError(
                f"{self._name(worker)} sent {len(payload)} bytes of gradients for slice "
                f"{ids.slice}, which has {shard.params.memory.nbytes}"
            )
        # Copied: the payload may be read-only, and the optimizer may overwrite gradients.
        shard.gradients = np.frombuffer(payload, np.uint8).copy()

    def _fetch(self, worker: int, ids: Ids) -> SliceSum | None:
        """Return the requested parameters; None if they are sent after the next update."""
        shard = self._shard(worker, ids)
        if ids.round == shard.current.round:
            return shard.current
        if ids.round != shard.current.round + 1 or worker in shard.fetches:
            raise RequestError(
                f"{self._name(worker)} requested slice {ids.slice} after update {ids.round}"
            )
        shard.fetches[worker] = ids
        return None

    def _export_state(self, worker: int, ids: Ids) -> tuple[dict[str, Any], list[memoryview]]:
        shard = self._shard(worker, ids)
        if ids.round != shard.current.round:
            raise RequestError(
                f"{self._name(worker)} requested the state of slice {ids.slice} after update "
                f"{ids.round}; the last one is {shard.current.round}"
            )
        return self._optimizer.export_state(shard.params)

    def _shard(self, worker: int, ids: Ids) -> Shard:
        shard = self._shards.get(ids.plan, {}).get(ids.slice)
        if shard is None:
            raise RequestError(
                f"{self._name(worker)} requested slice {ids.slice} of plan {ids.plan}, which is "
                "not loaded"
            )
        return shard

    # -- steps ----------------------------------------------------------------------------

    def _request_step(self, worker: int, ids: Ids, payload: Any, now: float) -> None:
        """Record a worker's request for a step; begin once all workers have sent theirs."""
        if self._step is None:
            self._step = _Step(ids.plan, ids.round, ids.slice, now)
        step = self._step
        requested = (ids.plan, ids.round, ids.slice)
        if worker in step.pushes_to or requested != (step.plan, step.number, step.round):
            raise RequestError(
                f"{self._name(worker)} requested update {ids.round} of plan {ids.plan}, and others "
                f"update {step.number} of plan {step.plan}"
            )
        step.pushes_to[worker] = bool(ids.route)
        try:
            settings = parse_json(StepSettings, payload)
        except MalformedMessage as error:
            raise RequestError(
                f"{self._name(worker)} sent malformed settings of a step: {error}"
            ) from None
        if settings.digest:
            step.digest = step.digest or (worker, settings.digest)
            if settings.digest != step.digest[1]:
                raise RequestError(
                    f"{self._name(worker)} has other settings in the optimizer's param groups than "
                    f"{self._name(step.digest[0])}: set the same on all ranks"
                )
        if settings.groups is not None:
            step.settings, step.leader = settings, worker
        if len(step.pushes_to) == self._workers:
            self._begin_step(step)

    def _begin_step(self, step: _Step) -> None:
        settings = step.settings
        if settings is None or settings.groups is None:
            raise RequestError("no worker sent the settings of a step")
        optimizer = self._optimizer
        with sent_by(self._name(step.leader)):
            step.used = unpack_numbers(settings.used)
            optimizer.set_options(settings.groups, settings.scaler)
        shards = self._shards.get(step.plan, {})
        step.remaining = set(shards)
        wrong = {shard.current.round for shard in shards.values()} - {step.number - 1}
        if wrong:
            raise RequestError(f"update {step.number} came after update {min(wrong)}")
        for number in shards:
            if step.round == NO_ROUND or self._completed_sum((step.plan, number), step.round):
                self._push_due(step, number)
        if not step.remaining:
            self._step = None

    def _push_due(self, step: _Step, number: int) -> None:
        route = self._shards[step.plan][number].route
        heapq.heappush(self._due, (position_of(route), number))

    def update_next(self) -> Iterator[ParameterReply]:
        """Update the first slice in forward order; yield the replies."""
        if not self._due:
            return
        step = self._step
        assert step is not None
        _, number = heapq.heappop(self._due)
        step.remaining.discard(number)
        shard = self._shards[step.plan][number]
        before = shard.params.nbytes
        gradients = self._gradients(step, number, shard)
        if gradients is not None:
            if not shard.current.is_unused():
                self._optimizer.copy_values(shard.params)
            self._optimizer.step(shard.params, gradients, step.used)
        shard.gradients = None
        shard.set_current(step.number)
        self._grow(shard.params.nbytes - before)
        if not step.remaining:
            self._step = None
        ids = Ids(step.plan, number, step.number, shard.route)
        fetches, shard.fetches = shard.fetches, {}
        for worker in (worker for worker, pushes in step.pushes_to.items() if pushes):
            fetches.setdefault(worker, ids)
        for worker, requested in sorted(fetches.items()):
            yield ParameterReply(worker, requested, shard.current)

    def _gradients(self, step: _Step, number: int, shard: Shard) -> Array | None:
        if step.round == NO_ROUND:
            return shard.gradients
        total = self._completed_sum((step.plan, number), step.round)
        assert total is not None
        if total.dtype != shard.params.dtype:
            return convert(total.result, shard.params.dtype)
        # The optimizer may overwrite the gradients.
        return total.result if total.is_unused() else total.result.copy()

    @property
    def _optimizer(self) -> ShardOptimizer:
        if self._created is None:
            try:
                self._created = self._make_optimizer()
            except Exception as error:
                reason = describe_error(error)
                raise RequestError(f"cannot create the optimizer on a server: {reason}") from None
        return self._created

    def _drop_before(self, plan: int) -> None:
        """Drop older plans; all workers have passed the barrier of a newer one."""
        old = [number for number in self._shards if number < plan]
        for shard in [shard for number in old for shard in self._shards.pop(number).values()]:
            self._drop(shard)

    def _drop(self, shard: Shard) -> None:
        self._optimizer.drop(shard.params)
        self.nbytes -= shard.params.nbytes

    def _grow(self, nbytes: int) -> None:
        self.nbytes += nbytes
        count = sum(map(len, self._shards.values()))
        if self.nbytes + SLICE_OVERHEAD * count > self._max_nbytes:
            raise RequestError(
                f"parameters and optimizer state need {self.nbytes} bytes; the server's limit is "
                f"{self._max_nbytes}"
            )
