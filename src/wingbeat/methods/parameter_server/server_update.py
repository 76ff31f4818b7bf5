"""Optimizer updates on the servers: gradients are pushed, parameters are pulled.

Geryon (Wang et al., 2020), section II-A. `wingbeat.schedules.served` decides when
operations start. Nothing is pickled: a server imports the optimizer's class by name, and receives
its attributes and settings as JSON. Before training, the rebuilt optimizer is compared with the
user's on test tensors: it must give the same results and treat each element independently.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.placed import local
from wingbeat.engine.gradients.views import ShownGradients, clone_displaced
from wingbeat.engine.updates.divided import SCALER, DividedUpdate
from wingbeat.engine.updates.json_values import encode
from wingbeat.engine.updates.stepper import GroupSnapshot, State
from wingbeat.engine.updates.trials import Division, prove_elementwise
from wingbeat.engine.updates.update import Closure, Training, refuse_evaluating
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.parameter_server.client import Request, Transfer
from wingbeat.methods.parameter_server.coding import bytes_of
from wingbeat.methods.parameter_server.launch import ServerGroup
from wingbeat.methods.parameter_server.protocol import (
    NO_ROUND,
    Document,
    Ids,
    Kind,
    StepSettings,
    pack_numbers,
    split_document,
)
from wingbeat.methods.parameter_server.shard_optimizer import (
    HOOKS,
    decode_state,
    encode_state,
    rebuild_optimizer,
)
from wingbeat.methods.parameter_server.slicing import RequestPlanner, Slice
from wingbeat.observe.events import stream
from wingbeat.schedules.events import (
    Defer,
    Forget,
    Hand,
    Phase,
    Schedule,
    Update,
    UpdateCommand,
    UpdateServers,
)
from wingbeat.schedules.intents import Answer
from wingbeat.schema import to_json
from wingbeat.types import Span

OPTION = 'update="server"'

_ALTERNATIVE = 'use update="worker"'

_REBUILT_ATTRIBUTES = {*HOOKS, "defaults", "param_groups", "state", "step"}
"""Attributes of every optimizer, which a server creates itself."""

_BEFORE_GRADIENTS = -1
"""Position in forward order of messages that precede all gradients."""

ParamState = dict[int, dict[str, Any]]
"""Optimizer state of whole parameters, by slot index and name."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


# -- the optimizer's description -----------------------------------------------------------


class OptimizerDescription(NamedTuple):
    """What a server needs to rebuild an optimizer, as JSON.

    ``elementwise`` maps names of optimizer state to whether it has a value for each element.
    """

    text: str
    elementwise: dict[str, bool]

    def max_nbytes(self, numel: int, nbytes: int) -> int:
        """Return an upper bound on parameters and state, over all servers.

        Both exist under two plans while buckets change. An element of the state may take 8 bytes,
        because the optimizer chooses its dtype.
        """
        return 2 * (nbytes + 8 * numel * (sum(self.elementwise.values()) + 1))


def describe_optimizer(
    optimizer: torch.optim.Optimizer, snapshot: GroupSnapshot
) -> OptimizerDescription:
    """Describe an optimizer; raise UsageError if it cannot run on servers."""
    refuse_evaluating(optimizer)
    kind = type(optimizer)
    _check_importable(kind)
    encode_groups(snapshot)
    attributes = vars(optimizer)
    description = {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "path": [place for place in sys.path if place],
        "attributes": _encode_possible(
            {k: v for k, v in attributes.items() if k not in _REBUILT_ATTRIBUTES}
        ),
        "defaults": _encode_possible(attributes.get("defaults", {})),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    replica = rebuild_optimizer(json.loads(json.dumps(description)))
    division = Division(OPTION, "the servers", _ALTERNATIVE, replica)
    elementwise = prove_elementwise(optimizer, kind.step, division)
    return OptimizerDescription(
        json.dumps({**description, "elementwise": elementwise}), elementwise
    )


def encode_groups(snapshot: GroupSnapshot) -> list[dict[str, Any]]:
    """Encode the settings of the param groups; UsageError if one cannot be sent to servers."""
    out: list[dict[str, Any]] = []
    for number, group in enumerate(snapshot):
        out.append({})
        for key, value in group.items():
            try:
                out[-1][key] = encode(value)
            except TypeError as error:
                raise UsageError(
                    f"{OPTION}: setting {key!r} of the optimizer's group {number}: {error}; "
                    "allowed are numbers, text, None, small tensors, and lists and tuples of them; "
                    f"{_ALTERNATIVE}"
                ) from None
    return out


def _encode_possible(values: dict[str, Any]) -> dict[str, Any]:
    """Encode the values that can be encoded; the comparison shows whether others are needed."""
    out = {}
    for key, value in values.items():
        with contextlib.suppress(TypeError):
            out[key] = encode(value)
    return out


def _check_importable(kind: type) -> None:
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if kind.__module__ == "__main__" or found is not kind:
        raise UsageError(
            f"{OPTION}: optimizer {kind.__name__} is defined in {kind.__module__} as "
            f"{kind.__qualname__}, which a server cannot import: move the class to the top level "
            f"of a module that the script imports, or {_ALTERNATIVE}"
        )


# -- requests ------------------------------------------------------------------------------


class RemoteOptimizer:
    """The optimizer on the servers, from the view of one worker.

    All requests use the most urgent class, so a server receives them in order.

    Attributes:
        updates: number of requested updates.
        landing: by bucket, the buffer for its parameters; by default the bucket's buffer.
        unused: slot indices of parameters whose sums the next update does not use, because no
            worker has a gradient for them.
    """

    def __init__(self, servers: ServerGroup, planner: RequestPlanner) -> None:
        self._servers, self.planner = servers, planner
        self.updates = 0
        self.landing: dict[int, torch.Tensor] = {}
        self.unused: frozenset[int] = frozenset()

    def load(self, each: Slice, fields: dict[str, Any], data: torch.Tensor) -> None:
        """Load parameters of a slice, and its optimizer state if the fields describe it.

        See `shard_optimizer.ShardOptimizer.load` for ``fields``; empty ones replace the values
        only. ``data`` must not change until it has arrived.
        """
        document = split_document(fields, [bytes_of(data.cpu())], self._servers.message)
        for count, payload in enumerate(document):
            kind = Kind.CONTINUATION if count else Kind.LOAD
            self._submit(kind, each.server, each.number, self.updates, payload)

    def send_gradients(self, each: Slice, gradients: torch.Tensor) -> None:
        """Send gradients of a slice that replace the sum in the next update."""
        payload = bytes_of(gradients.cpu())
        self._submit(Kind.GRADIENTS, each.server, each.number, self.updates, payload)

    def barrier(self) -> None:
        """Signal that this worker has loaded all its slices; servers wait for all workers."""
        for server in range(self._servers.count):
            self._submit(Kind.BARRIER, server)

    def step(self, settings: bytes, *, summed: bool, unasked: bool) -> None:
        """Request the update with number `updates`.

        With ``summed``, the update uses the last round's sums, otherwise the gradients of
        `send_gradients`. With ``unasked``, the servers send the parameters without a request.
        """
        number = self.planner.completed_rounds() if summed else NO_ROUND
        # No worker waits for a server without slices, which would see steps of several updates.
        for server in sorted({each.server for each in self.planner.slices()}):
            self._submit(Kind.STEP, server, number, self.updates, settings, route=unasked)

    def request_state(self, plan: int, slices: Sequence[Slice]) -> Request:
        """Request the optimizer state of slices without blocking."""
        transfers = [
            self._transfer(each.server, Ids(plan, each.number, self.updates, 0), b"")
            for each in slices
        ]
        return self._servers.client.request(Kind.STATE, "", transfers, "the optimizer's state")

    def _submit(
        self,
        kind: Kind,
        server: int,
        number: int = 0,
        updates: int = 0,
        payload: Any = b"",
        route: int = 0,
    ) -> None:
        ids = Ids(self.planner.plan, number, updates, route)
        transfers = [self._transfer(server, ids, payload)]
        self._servers.client.request(kind, "", transfers, "an update request")

    def _transfer(self, server: int, ids: Ids, payload: Any) -> Transfer:
        memory = memoryview(payload)
        return Transfer(self._servers.numbers[server], ids, memory, 0, _BEFORE_GRADIENTS)


# -- slices --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotPart:
    """``length`` elements of a parameter that lie in a slice.

    They begin at element ``first`` of the parameter, and at element ``offset`` of the slice.
    """

    slot: Slot
    group: int
    first: int
    offset: int
    length: int

    def of_slot(self) -> slice:
        """Return the elements of the parameter."""
        return slice(self.first, self.first + self.length)

    def copy_to(self, values: torch.Tensor) -> bool | torch.Tensor:
        """Copy the elements to a slice's values; return whether any of these has changed.

        On an accelerator this is a tensor, for which the host does not wait here.
        """
        known = values[self.offset : self.offset + self.length]
        now = local(self.slot.param.detach()).reshape(-1)[self.of_slot()]
        # Compare bits: NaN equals itself, and 0 differs from -0.
        bits = _INTEGERS[known.element_size()]
        changed: bool | torch.Tensor
        if known.device.type != "cpu":
            changed = known.view(bits).ne(now.view(bits)).any()
        else:
            changed = not torch.equal(known.view(bits), now.view(bits))
            if not changed:
                return False
        known.copy_(now)
        return changed


def _truths(flags: Sequence[bool | torch.Tensor]) -> list[bool]:
    """Return the values of flags, with one wait for each accelerator on which some are."""
    there: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for flag in flags:
        if isinstance(flag, torch.Tensor):
            there[flag.device].append(flag)
    values = {device: iter(torch.stack(some).tolist()) for device, some in there.items()}
    return [next(values[flag.device]) if isinstance(flag, torch.Tensor) else flag for flag in flags]


@dataclass(eq=False, slots=True)
class OwnedSlice:
    """A slice with the parts of parameters in it.

    The worker ``owner`` sends changed parameters to the server. On that worker, ``known`` are the
    server's values.
    """

    slice: Slice
    bucket: Bucket
    owner: int
    parts: Sequence[SlotPart]
    known: torch.Tensor = field(init=False)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the slice of a buffer of the bucket."""
        return flat[self.slice.start : self.slice.stop]

    def values(self) -> torch.Tensor:
        """Return this worker's parameters; zeros where the optimizer has none."""
        values = torch.zeros_like(self.cut(self.bucket.flat))
        for part in self.parts:
            part.copy_to(values)
        return values

    def update_known(self) -> list[bool | torch.Tensor]:
        """Copy this worker's parameters to `known`; return for each part whether it has changed."""
        return [part.copy_to(self.known) for part in self.parts]

    def export(
        self, states: ParamState, elementwise: dict[str, bool]
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the slice's parameters and optimizer state: fields, and the bytes of arrays."""
        self.update_known()
        state: list[Any] = []
        arrays = [self.known]
        for part in self.parts:
            values = states.get(part.slot.index)
            state.append(None if values is None else {})
            for key, value in (values or {}).items():
                state[-1][key] = _encode_state(part, key, value, elementwise, arrays)
        fields = {
            "dtype": str(self.known.dtype).removeprefix("torch."),
            "numel": len(self.slice),
            "pieces": [[p.slot.index, p.group, p.offset, p.length] for p in self.parts],
            "state": state,
        }
        return fields, torch.cat([array.cpu().view(torch.uint8) for array in arrays])


def _encode_state(
    part: SlotPart, key: str, value: Any, elementwise: dict[str, bool], arrays: list[torch.Tensor]
) -> dict[str, Any]:
    shape, what = part.slot.shape, f"optimizer state {key!r} of parameter {part.slot.name!r}"
    try:
        own = local(value) if isinstance(value, torch.Tensor) else value
        return encode_state(key, own, shape, elementwise, arrays, part.of_slot())
    except ValueError as error:
        raise UsageError(
            f"{what} {error}, and must have the parameter's, {tuple(shape)}: load the state of the "
            "same model"
        ) from None
    except TypeError as error:
        raise UsageError(f"{what}: {error}; {_ALTERNATIVE}") from None


class OwnedSlices:
    """All slices of one plan, assigned to workers in turn; ``owned`` are this worker's."""

    def __init__(
        self, plan: int, slices: Sequence[Slice], training: Training, rank: int, workers: int
    ) -> None:
        self.plan = plan
        buckets = training.bucketing.buckets
        self.all = []
        for each in slices:
            bucket = buckets[each.bucket]
            parts = list(_parts_in(each, bucket, training))
            self.all.append(OwnedSlice(each, bucket, each.number % workers, parts))
        self.owned = [each for each in self.all if each.owner == rank]
        self.owned_in: dict[int, list[OwnedSlice]] = defaultdict(list)  # by bucket
        for own in self.owned:
            own.known = own.values()
            self.owned_in[own.slice.bucket].append(own)

    def overlapping(self, others: Iterable[OwnedSlice]) -> list[Slice]:
        """Return the slices that share elements with another plan's slices."""
        wanted: dict[int, list[Span]] = defaultdict(list)
        for other in others:
            for part in other.parts:
                wanted[part.slot.index].append(Span(part.first, part.first + part.length))
        return [
            each.slice
            for each in self.all
            if any(
                Span(part.first, part.first + part.length).overlaps(span)
                for part in each.parts
                for span in wanted.get(part.slot.index, ())
            )
        ]

    def collect(self, remote: RemoteOptimizer, slices: Sequence[Slice]) -> ParamState:
        """Wait for the optimizer state of slices from the servers; it is zero in others.

        Raises PeerError if a server's state is malformed.
        """
        request = remote.request_state(self.plan, slices)
        request.wait()
        states: ParamState = {}
        arrays: dict[tuple[int, str], torch.Tensor] = {}
        for each, transfer in zip(slices, request.transfers, strict=True):
            document = request.documents.pop(transfer.ids[:3])
            try:
                self._join(self.all[each.number], document, states, arrays)
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise PeerError(
                    f"server {each.server} sent a malformed state of slice {each.number}: {error}"
                ) from None
        slots = {part.slot.index: part.slot for each in self.all for part in each.parts}
        for (index, key), flat in arrays.items():
            # Use the parameter's memory format, as the optimizer would.
            slot = slots[index]
            value = torch.empty_like(local(slot.param), dtype=flat.dtype).detach()
            states[index][key] = slot.expose(value.copy_(flat.view(value.shape)))
        return states

    def _join(
        self,
        owned: OwnedSlice,
        document: Document,
        states: ParamState,
        arrays: dict[tuple[int, str], torch.Tensor],
    ) -> None:
        end = 0
        for part, state in zip(owned.parts, document.fields["state"], strict=True):
            index, numel = part.slot.index, part.slot.shape.numel()
            values, elementwise, end = decode_state(state, part.length, document.data, end)
            for key, value in values.items():
                found = states.setdefault(index, {})
                if key not in elementwise:
                    found[key] = value
                    continue
                found.setdefault(key, None)  # keeps the order of keys
                empty = torch.zeros(numel, dtype=value.dtype, device="cpu")
                arrays.setdefault((index, key), empty)[part.of_slot()] = value


def _parts_in(each: Slice, bucket: Bucket, training: Training) -> Iterable[SlotPart]:
    """Yield the parts of the optimizer's parameters that lie in a slice."""
    stop = 0
    for slot in bucket.slots:
        start, stop = stop, stop + slot.shape.numel()
        first, last = max(start, each.start), min(stop, each.stop)
        group = training.stepper.group_of(slot.param)
        if first < last and group is not None:
            yield SlotPart(slot, group, first - start, first - each.start, last - first)


# -- the update ----------------------------------------------------------------------------


class ServerUpdate(DividedUpdate):
    """Sends gradients and changed parameters to the servers, and receives new parameters.

    Each slice has an owner among the workers. The owner detects parameters that were changed
    locally, and sends gradients that the user has inspected, and may have changed.
    """

    option: ClassVar[str] = OPTION
    state_is: ClassVar[str] = (
        f"{OPTION}: the servers have it; call optimizer.state_dict() for a copy of all of it, and "
        "optimizer.load_state_dict() to change it"
    )
    shards = None

    def __init__(
        self,
        training: Training,
        schedule: Schedule,
        views: ShownGradients,
        remote: RemoteOptimizer,
        elementwise: dict[str, bool],
    ) -> None:
        super().__init__(training, schedule, views)
        self._remote = remote
        self._elementwise = elementwise
        self._slices: OwnedSlices | None = None
        self._summed = self._has_state = False

    # -- commands --------------------------------------------------------------------------

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Perform one command of the schedule."""
        buckets = self._training.bucketing.buckets
        match command:
            case Hand(answer):
                self._send_changes(answer)
            case UpdateServers(answer, unasked):
                self._request_step(answer, unasked)
            case Defer(number, used):
                self._defer(buckets[number], used or frozenset())
            case Forget(spent):
                self._forget(spent)
            case Update(number):
                with stream.timed("update", bucket=number):
                    self._apply_parameters(buckets[number])

    def _send_changes(self, answer: Answer) -> None:
        """Send locally changed parameters, and gradients that differ from the servers' sums."""
        self._remote.updates += 1
        self._has_state = True
        self._summed = self._schedule.phase is Phase.REDUCED
        slots = self._training.bucketing.slots
        unused = frozenset(slot.index for slot in slots if slot.owned) - answer.used
        self._remote.unused = unused if self._summed else frozenset()
        rank = self._training.collectives.world.rank
        if answer.follows(rank):
            return
        active = [r for r, _ in enumerate(answer.intents) if not answer.follows(r)]
        finals = [] if self._summed else self._prepare_gradients(answer.used, active, rank)
        changed = self._changed(rank)
        for each in self._plan.all:
            # The leader also sends the slices of workers without batches, which do not see local
            # changes of the others.
            if each in changed:
                self._remote.load(each.slice, {}, each.known)
            elif rank == answer.leader and answer.follows(each.owner):
                self._remote.load(each.slice, {}, each.values())
        for each in finals:
            self._remote.send_gradients(each.slice, each.cut(each.bucket.flat))

    def _changed(self, rank: int) -> set[OwnedSlice]:
        """Copy this worker's slices to what is known; return those that have changed."""
        owned = [each for each in self._plan.all if each.owner == rank]
        flags = [each.update_known() for each in owned]
        truths = iter(_truths([flag for some in flags for flag in some]))
        return {
            each
            for each, some in zip(owned, flags, strict=True)
            if any(list(itertools.islice(truths, len(some))))  # each has its own
        }

    def _prepare_gradients(
        self, used: frozenset[int], active: list[int], rank: int
    ) -> list[OwnedSlice]:
        """Copy the gradients into the buckets; return the slices that this worker sends."""
        buckets = self._training.bucketing.buckets
        for bucket in buckets:
            bucket.settle()
        clone_displaced(self._training.bucketing)
        for bucket in buckets:
            self._renew_if_kept(bucket)
            for slot in bucket.slots:
                grad = slot.param.grad
                if slot.index in used and grad is None:
                    slot.view.zero_()
                elif slot.index in used and grad is not None and not slot.holds(grad):
                    slot.view.copy_(local(grad))
        return [
            each
            for each in self._plan.all
            if active[each.slice.number % len(active)] == rank
            and any(part.slot.index in used for part in each.parts)
        ]

    def _request_step(self, answer: Answer, unasked: bool) -> None:
        rank = self._training.collectives.world.rank
        settings = StepSettings("")
        if not answer.follows(rank):
            groups = encode_groups(self._snapshot)
            settings = StepSettings(hashlib.sha1(json.dumps(groups).encode()).hexdigest())
            if rank == answer.leader:
                inside = self._training.optimizer.__dict__
                scaler = {key: encode(inside[key]) for key in SCALER if inside.get(key) is not None}
                used = pack_numbers(answer.used)
                settings = StepSettings(settings.digest, groups, used, scaler)
        payload = json.dumps(to_json(settings)).encode()
        self._remote.step(payload, summed=self._summed, unasked=unasked)

    def _forget(self, spent: frozenset[int] | None) -> None:
        super()._forget(spent)
        if spent is not None:
            for bucket in self._training.bucketing.buckets:
                self._renew_if_kept(bucket)

    def _renew_if_kept(self, bucket: Bucket) -> None:
        """Give the bucket a new buffer if the user keeps gradients in the old one."""
        if bucket.is_referenced():
            bucket.reallocate()
            self._views.on_new_buffer(bucket)

    def _apply_parameters(self, bucket: Bucket) -> None:
        fresh = {slot.index for slot in self._fresh.pop(bucket.index)}
        landing = self._remote.landing.get(bucket.index, bucket.flat)
        end = 0
        with self._pending.updating([bucket]):
            for slot in bucket.slots:
                start, end = end, end + slot.shape.numel()
                if slot.index in fresh:
                    local(slot.param.detach()).copy_(landing[start:end].view(slot.shape))
        for each in self._plan.owned_in.get(bucket.index, ()):
            each.known.copy_(each.cut(landing))

    # -- plans and state -------------------------------------------------------------------

    @property
    def _plan(self) -> OwnedSlices:
        assert self._slices is not None
        return self._slices

    @torch.no_grad()
    def on_new_buckets(self) -> None:
        """Load parameters and state of the slices that this worker owns in a new plan."""
        old, world = self._slices, self._training.collectives.world
        planner = self._remote.planner
        new = OwnedSlices(planner.plan, planner.slices(), self._training, world.rank, world.size)
        if old is None:
            states = self._take_local_state()
        else:
            states = old.collect(self._remote, old.overlapping(new.owned))
        self._slices = new
        for bucket in self._training.bucketing.buckets:
            if not all(slot.owned for slot in bucket.slots):
                # Another optimizer's gradients stay in the bucket's buffer.
                self._remote.landing[bucket.index] = torch.zeros_like(bucket.flat)
        self._load(states)

    @torch.no_grad()
    def on_load_state_dict(self) -> None:
        """Send a state that the optimizer has loaded to the servers."""
        self._load(self._take_local_state())

    def _load(self, states: ParamState) -> None:
        self._has_state |= bool(states)
        for each in self._plan.owned:
            fields, data = each.export(states, self._elementwise)
            self._remote.load(each.slice, fields, data)
        self._remote.barrier()

    def _take_local_state(self) -> ParamState:
        """Remove the state of the servers' parameters from the local optimizer; return it."""
        state: State = self._training.optimizer.__dict__["state"]
        slots = self._training.bucketing.slots
        found = {slot.index: state.pop(slot.param, None) for slot in slots}
        return {index: each for index, each in found.items() if each}

    @torch.no_grad()
    def _whole(self) -> State:
        """Collect the state from the servers, without other workers."""
        plan = self._plan
        joined = plan.collect(self._remote, [each.slice for each in plan.all])
        slots = self._training.bucketing.slots
        for slot in slots:
            if slot.owned and not slot.shape.numel():
                self._add_empty_state(slot, joined)
        parts = {slot.param: joined[slot.index] for slot in slots if slot.index in joined}
        others: State = self._training.optimizer.__dict__["state"]
        known = {**others, **parts}
        order = [p for p in self._training.stepper.params() if p in known]
        return defaultdict(dict, {key: known[key] for key in [*order, *others]})

    def _add_empty_state(self, slot: Slot, states: ParamState) -> None:
        """Add the state of a `DTensor` of which this rank has no element, and no server has any.

        Numbers such as the count of steps are those of the first parameter of the same group.
        """
        group_of = self._training.stepper.group_of
        group = group_of(slot.param)
        others = (s for s in self._training.bucketing.slots if s.index in states)
        like = next((states[s.index] for s in others if group_of(s.param) == group), {})
        for key, value in like.items():
            found = states.setdefault(slot.index, {})
            if self._elementwise.get(key):
                part = torch.empty_like(local(slot.param), dtype=value.dtype).detach()
                found[key] = slot.expose(part)
            else:
                found[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def _parts(self) -> int:
        return len(self._plan.all) if self._has_state else 0
