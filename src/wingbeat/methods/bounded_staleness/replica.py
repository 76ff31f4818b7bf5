"""A model and its optimizer under bounded staleness: each round is applied as a whole.

The control colayer has number k, after the k colayers of gradients. It carries the options of the
optimizer, or the number of steps in synchronous training.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.exchanges.snapshot import Snapshot, encode_snapshot
from wingbeat.methods.bounded_staleness.bound import IN_FLIGHT, StalenessBound
from wingbeat.methods.bounded_staleness.messages import Contribution, PieceSum
from wingbeat.methods.bounded_staleness.pieces import Payload, Pieces

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, StepCounter
    from wingbeat.transport.world import World

_MAX_DIGITS = 20
"""Maximum digits of a number of steps."""

_SCALARS = (bool, int, float, str, type(None))

Groups = list[dict[str, Any]]


def bound_with_control(
    s: int | None, p: int, colayers: int, in_flight: int | None = IN_FLIGHT
) -> StalenessBound:
    """Return the bound of a machine, which includes the control colayer.

    The control colayer is sent last: a worker that has exchanged ``p`` < k colayers needs no more;
    BSP and SSP wait for all.

    >>> bound_with_control(0, 10, 10)
    StalenessBound(s=0, p=11, colayers=11, in_flight=2)
    """
    StalenessBound(s, p, colayers, in_flight)
    return StalenessBound(s, p + 1 if p == colayers else p, colayers + 1, in_flight)


# -- options of the optimizer ----------------------------------------------------------------


class OptionsSchema:
    """Parses the options of other workers; holds no reference to the optimizer."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def parse(self, payload: Any, sender: str) -> Groups:
        """Parse a worker's options; raise PeerError if they do not match this optimizer."""
        own = self._groups
        try:
            found = json.loads(bytes(payload))
        except (ValueError, RecursionError):
            found = None
        if type(found) is not list or len(found) != len(own):
            raise _mismatch(sender, f"other than {len(own)} groups")
        return [_merge(sender, mine, theirs) for mine, theirs in zip(own, found, strict=True)]


class OptimizerOptions:
    """The options of an optimizer's parameter groups that have a default.

    Workers apply a round in different iterations, and learning-rate schedules depend on the
    iteration. So workers send their options, and a round is applied with those of its latest
    contribution.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = tuple(optimizer.defaults)
        self._members = self._group_members()
        self.schema = OptionsSchema(self._scalars())

    def _current(self) -> Groups:
        groups = self._optimizer.param_groups
        return [{name: group[name] for name in self._names} for group in groups]

    def _group_members(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self._optimizer.param_groups]

    def serialize(self) -> bytes:
        """Return the current options for the other workers.

        Raises UsageError if options cannot be sent, or the parameter groups have changed.
        """
        if self._group_members() != self._members:
            raise UsageError(
                "the optimizer's param groups hold other parameters than at distribute(), which is "
                "not possible under bounded staleness (Canary): call wingbeat.release(model, "
                "optimizer), change them, and distribute() again"
            )
        return json.dumps(self._scalars()).encode()

    def _scalars(self) -> Groups:
        own = [{name: _to_python(value) for name, value in g.items()} for g in self._current()]
        for number, group in enumerate(own):
            for name, value in group.items():
                items = value if type(value) in (tuple, list) else (value,)
                if not all(type(item) in _SCALARS for item in items):
                    raise UsageError(
                        f"{type(self._optimizer).__name__}: {name}={value!r:.60} of group {number} "
                        "cannot be sent to the other workers; under bounded staleness options must "
                        "be numbers, strings or flags, such as lr=0.1 instead of a tensor"
                    )
        return own

    @contextlib.contextmanager
    def use(self, groups: Groups) -> Iterator[None]:
        """Set these options on the optimizer; restore its own afterwards, for its schedules."""
        own = self._current()
        self._set(groups)
        try:
            yield
            self._check_unchanged(groups)
        finally:
            self._set(own)

    def _check_unchanged(self, groups: Groups) -> None:
        for now, given in zip(self._current(), groups, strict=True):
            name = next((name for name in self._names if now[name] != given[name]), None)
            if name is not None:
                kind = type(self._optimizer).__name__
                raise UsageError(
                    f"{kind}.step() changes its option {name} (from {given[name]!r} to "
                    f"{now[name]!r:.60}), and under bounded staleness (Canary) each round brings "
                    "its own options: use another optimizer, or wingbeat.AllReduce()"
                )

    def _set(self, groups: Groups) -> None:
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(values)


def _to_python(value: Any) -> Any:
    """Convert NumPy scalars, which many schedules compute."""
    if type(value) in (tuple, list):
        return type(value)(map(_to_python, value))
    return value.item() if isinstance(value, np.generic) else value


def _merge(sender: str, mine: dict[str, Any], theirs: Any) -> dict[str, Any]:
    if type(theirs) is not dict or set(theirs) != set(mine):
        raise _mismatch(sender, f"options other than {', '.join(mine)}")
    return {name: _parse_value(sender, name, value, theirs[name]) for name, value in mine.items()}


def _parse_value(sender: str, name: str, mine: Any, theirs: Any) -> Any:
    """Return another worker's value of an option, converted to the type of this worker's."""
    if type(mine) in (tuple, list) and type(theirs) is list and len(theirs) == len(mine):
        both = zip(mine, theirs, strict=True)
        return type(mine)(_parse_value(sender, name, a, b) for a, b in both)
    number = type(mine) in (int, float) and type(theirs) in (int, float)
    # An option may be set later, or reset to None.
    either = None in (mine, theirs) and type(theirs) in _SCALARS
    if number or either or (type(mine) in (bool, str) and type(theirs) is type(mine)):
        return theirs
    raise _mismatch(sender, f"{name}={theirs!r:.40}, and this worker has {mine!r:.40}")


def _mismatch(sender: str, what: str) -> PeerError:
    return PeerError(
        f"{sender} sent optimizer options with {what}; check that it trains with the same optimizer"
    )


# -- sums ------------------------------------------------------------------------------------


class Aggregator:
    """Computes the sums of owned pieces; holds no parameters and no optimizer."""

    def __init__(
        self, pieces: Pieces, control: Callable[[Mapping[Contribution, Any]], bytes]
    ) -> None:
        self._pieces, self._control = pieces, control

    def combine(
        self, colayer: int, piece: int, contributions: Mapping[Contribution, Any]
    ) -> Payload | None:
        """Add contributions."""
        if colayer != len(self._pieces):
            return self._pieces.sum_contributions(colayer, piece, contributions)
        return None if piece or not contributions else self._control(contributions)


def latest_options(schema: OptionsSchema, contributions: Mapping[Contribution, Any]) -> bytes:
    """Return the options of the latest contribution."""
    (_, worker), payload = list(contributions.items())[-1]
    schema.parse(payload or b"", f"rank {worker}")
    return bytes(payload)


def join_step_counts(contributions: Mapping[Contribution, Any]) -> bytes:
    """Return the number of steps of each worker, as ``worker:steps``.

    Raises PeerError if a number is malformed; the error names the sender.
    """
    counts = []
    for (_, worker), payload in sorted(contributions.items()):
        count = bytes(payload or b"")
        if not _is_number(count):
            raise PeerError(
                f"rank {worker} sent {count[:_MAX_DIGITS]!r} as its number of steps; check that "
                "it runs the same version"
            )
        counts.append(b"%d:%s" % (worker, count))
    return b" ".join(counts)


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _MAX_DIGITS


@contextlib.contextmanager
def _gradients(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
) -> Iterator[None]:
    before = [param.grad for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    try:
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


# -- replicas --------------------------------------------------------------------------------


class Replica:
    """Parameters and an optimizer; `CommunicationThread` calls it in the training thread.

    ``others`` are buffers and frozen parameters, which are pulled as well.
    """

    aggregator: Aggregator

    def __init__(
        self,
        params: Sequence[Sequence[torch.Tensor]],
        pieces: Pieces,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        workers: int,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        self._optimizer, self._step, self._workers = optimizer, step, workers
        self._others = others
        self.set_colayers(params, pieces)

    def set_colayers(self, params: Sequence[Sequence[torch.Tensor]], pieces: Pieces) -> None:
        """Use different colayers of the same parameters."""
        self._pieces = pieces
        self._flat = [param for colayer in params for param in colayer]
        self._tensors = [*self._flat, *self._others]

    @property
    def control(self) -> int:
        """The number of the control colayer."""
        return len(self._pieces)

    def _control_payload(self) -> bytes:
        raise NotImplementedError

    def control_payloads(self) -> list[bytes | None]:
        """Return the pieces of the control colayer; piece 0 holds its content."""
        return [self._control_payload(), *[None] * (self._workers - 1)]

    def apply_round(self, parts: Sequence[PieceSum]) -> None:
        """Apply the sums of a round; a malformed sum raises a PeerError that names the sender."""
        raise NotImplementedError

    def _join(self, parts: Sequence[PieceSum]) -> list[torch.Tensor | None]:
        joined = self._pieces.join([part for part in parts if part.colayer != self.control])
        return [grad for grads in joined for grad in grads]

    def load_state(self, payload: Any) -> None:
        """Load pulled parameters, optimizer state and other tensors."""
        Snapshot(payload, self._tensors, self._flat).load_into(self._optimizer)

    def state_bytes(self) -> bytes:
        """Return the state that `load_state` loads."""
        return encode_snapshot(self._tensors, self._flat, self._optimizer, [])


class AsynchronousReplica(Replica):
    """A replica that applies each round by an optimizer step with the options of the round.

    Raises:
        UsageError: the optimizer needs a closure, or has options that cannot be sent.
    """

    def __init__(
        self,
        params: Sequence[Sequence[torch.Tensor]],
        pieces: Pieces,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        workers: int,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "torch.optim.LBFGS evaluates the loss in its step, and bounded staleness applies "
                "sums that arrive later; use another optimizer, or wingbeat.AllReduce()"
            )
        self._options = OptimizerOptions(optimizer)
        super().__init__(params, pieces, optimizer, step, workers, others)
        self._groups: Groups = self._options.schema.parse(self._options.serialize(), "rank 0")

    def set_colayers(self, params: Sequence[Sequence[torch.Tensor]], pieces: Pieces) -> None:
        """Use different colayers of the same parameters."""
        super().set_colayers(params, pieces)
        combine_options = functools.partial(latest_options, self._options.schema)
        self.aggregator = Aggregator(pieces, combine_options)

    def _control_payload(self) -> bytes:
        return self._options.serialize()

    def apply_round(self, parts: Sequence[PieceSum]) -> None:
        """Make a step on the sums of a round, with the options of its latest contribution.

        A round without options, all of whose iterations were dropped, uses those of the previous
        round, and initially the optimizer's own. Parameters without a gradient are not updated.
        ``p.grad`` is restored afterwards.
        """
        for part in parts:
            if part.colayer == self.control and part.piece == 0 and part.payload is not None:
                self._groups = self._options.schema.parse(part.payload, "rank 0")
        grads = self._join(parts)
        if all(grad is None for grad in grads):
            return
        with _gradients(self._flat, grads), self._options.use(self._groups):
            self._step()

    def load_state(self, payload: Any) -> None:
        """Load pulled parameters, optimizer state and other tensors.

        The optimizer keeps its own options; the next round uses the pulled ones.
        """
        snapshot = Snapshot(payload, self._tensors, self._flat)
        groups = self._options.schema.parse(
            json.dumps(snapshot.extra).encode(), "the fastest worker"
        )
        snapshot.load_into(self._optimizer)
        self._groups = groups

    def state_bytes(self) -> bytes:
        """Return the state that `load_state` loads."""
        return encode_snapshot(self._tensors, self._flat, self._optimizer, self._groups)


class SynchronousReplica(Replica):
    """A replica that writes the sums of a round to the buckets, as an all-reduce does.

    The user's step then applies them, and no options are sent. The control colayer carries the
    number of steps of each worker, which must be equal. A worker that has run out of batches
    applies the rounds of the others by additional steps.

    Attributes:
        in_iteration: whether the next round belongs to this worker's current iteration.
        own_steps: rounds that were applied by additional steps.
    """

    def __init__(
        self,
        params: Sequence[Sequence[torch.Tensor]],
        pieces: Pieces,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        workers: int,
        others: Sequence[torch.Tensor] = (),
        *,
        buckets: Sequence[Bucket],
        steps: StepCounter,
    ) -> None:
        super().__init__(params, pieces, optimizer, step, workers, others)
        self._buckets, self._steps = buckets, steps
        self.in_iteration, self.own_steps = False, 0
        self.aggregator = Aggregator(pieces, join_step_counts)

    def _control_payload(self) -> bytes:
        return b"%d" % self._steps.count

    @torch.no_grad()
    def apply_round(self, parts: Sequence[PieceSum]) -> None:
        """Write the sums of a round to the buckets, or make a step on them."""
        if not self.in_iteration:
            self._step_alone(self._join(parts))
            return
        for part in parts:
            if (part.colayer, part.piece) == (self.control, 0):
                self._check_steps(part)
        grads = iter(self._join(parts))
        for bucket in self._buckets:
            for place, (slot, grad) in enumerate(zip(bucket.slots, grads, strict=False)):
                bucket.flags[place] = grad is not None
                if grad is None:
                    slot.view.zero_()
                else:
                    slot.view.copy_(grad)

    def _check_steps(self, part: PieceSum) -> None:
        counts: dict[int, int] = {}
        for text in bytes(part.payload or b"").split() or [b""]:
            rank, _, count = text.partition(b":")
            if not (_is_number(rank) and _is_number(count) and int(rank) < self._workers):
                raise PeerError(
                    f"a worker sent {text[:_MAX_DIGITS]!r} as its number of steps; check that "
                    "all workers run the same version"
                )
            counts[int(rank)] = int(count)
        if set(counts.values()) != {self._steps.count}:
            self._steps.differ(counts)

    def _step_alone(self, grads: Sequence[torch.Tensor | None]) -> None:
        if all(grad is None for grad in grads):
            return  # all workers have finished
        with _gradients(self._flat, grads):
            self._step()
        self._steps.count += 1
        self.own_steps += 1

    def digest(self) -> str:
        """Return a hash of the parameters' bits."""
        found = hashlib.sha256()
        for param in self._flat:
            found.update(param.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


class WeakReplica:
    """Holds a weak reference to a replica, so that the communication thread does not keep the model
    alive.

    Attributes:
        spent_ns: nanoseconds spent applying rounds.
    """

    def __init__(self, replica: Replica, world: World) -> None:
        self._replica, self._world = weakref.ref(replica), world
        self._released = False
        self.spent_ns = 0

    def release(self) -> None:
        """Apply no more rounds."""
        self._released = True

    def apply_round(self, parts: Sequence[PieceSum]) -> None:
        """Do as `Replica.apply_round` while the replica exists."""
        replica = self._replica()
        if replica is not None and not self._released:
            begin = time.monotonic_ns()
            replica.apply_round(parts)
            self.spent_ns += time.monotonic_ns() - begin

    def load_state(self, payload: Any) -> None:
        """Do as `Replica.load_state` while the replica exists."""
        replica = self._replica()
        if replica is not None:
            replica.load_state(payload)

    def state_bytes(self) -> bytes:
        """Do as `Replica.state_bytes`; raise UsageError if the replica no longer exists."""
        replica = self._replica()
        if replica is None:
            raise UsageError(
                "another worker requests the parameters of a model that is gone here: keep a "
                "reference to the model until training has ended"
            )
        return replica.state_bytes()
