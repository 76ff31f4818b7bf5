"""A model and its optimizer under bounded staleness: pieces of gradients, and whole rounds of sums.

A piece is a block of a colayer's gradients, one parameter after the other, as dense elements or as
the payload of a codec, followed by one byte for each parameter of the colayer: 1 if it has a
gradient. The owner of a piece adds the contributions in the given order (Canary, section 4.4.2).
Every worker joins the pieces of a round into gradients.

The control colayer has number k, after the k colayers of gradients. It carries the options of the
optimizer, or the number of steps in synchronous training.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wingbeat.codecs import Coding
from wingbeat.collectives import Encoded
from wingbeat.engine.gradients.placed import is_placed, local, place
from wingbeat.errors import PeerError, UsageError
from wingbeat.exchanges.snapshot import Snapshot, encode_snapshot
from wingbeat.methods.bounded_staleness.bound import IN_FLIGHT, StalenessBound
from wingbeat.methods.bounded_staleness.messages import Contribution, PieceSum
from wingbeat.types import Span, blocks_of

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, StepCounter

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
"""The dtypes that can be summed."""

_MAX_DIGITS = 20
"""Maximum digits of a number of steps."""

_SCALARS = (bool, int, float, str, type(None))

Array = np.ndarray[Any, np.dtype[Any]]
Payload = bytes | bytearray
Groups = list[dict[str, Any]]
Tensors = Sequence[torch.Tensor]


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


# -- pieces of gradients ---------------------------------------------------------------------


class Pieces:
    """Splits gradients, adds contributions, and joins sums; holds no parameters.

    ``encodings`` has by colayer the codec and its residual, at least as long as the gradients; None
    for a dense colayer. A worker encodes its contributions. The owner of a piece decodes them, adds
    them in float32, and encodes the sum once for all workers including itself, so all workers hold
    the same bits. One residual keeps the error of this worker's contributions and of the sums of
    its own piece. ``name`` returns the name of a worker in errors.
    """

    def __init__(
        self,
        colayers: Sequence[Mapping[str, torch.Tensor]],
        workers: int,
        encodings: Sequence[Encoded | None] = (),
        name: Callable[[int], str] = "rank {}".format,
    ) -> None:
        for colayer in colayers:
            _check_colayer(colayer)
        self.workers, self.name = workers, name
        self._shapes = [[param.shape for param in colayer.values()] for colayer in colayers]
        self._dtypes = [_DTYPES[next(iter(colayer.values())).dtype] for colayer in colayers]
        sizes = [sum(shape.numel() for shape in shapes) for shapes in self._shapes]
        self._spans = [blocks_of(size, workers) for size in sizes]
        encodings = encodings or [None] * len(colayers)
        self._residuals = [None if each is None else each.residual for each in encodings]
        self._codings: list[list[Coding] | None] = [
            None if each is None else [each.coding.cut(span) for span in spans]
            for each, spans in zip(encodings, self._spans, strict=True)
        ]
        # The communication thread encodes sums while the training thread encodes gradients.
        self._residual_lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shapes)

    def split(self, colayer: int, flat: torch.Tensor, used: Sequence[bool]) -> list[Payload]:
        """Return copies of the pieces of this worker's gradients.

        ``flat`` has the gradients of a colayer, one parameter after the other, zeros for parameters
        without one; ``used`` states for each parameter whether it has a gradient.
        """
        values, flags = flat.detach().numpy(), bytes(map(bool, used))
        return [
            self._encode(colayer, piece, values[span.start : span.stop], flags)
            for piece, span in enumerate(self._spans[colayer])
        ]

    def undo_split(self, colayer: int, flat: torch.Tensor, payloads: Sequence[Payload]) -> None:
        """Undo the effect of `split` on the residual, for pieces that were not sent.

        The gradients in them are dropped; the residual of earlier gradients is kept.
        """
        residual = self._residuals[colayer]
        if residual is None:
            return
        for piece, payload in enumerate(payloads):
            span = self._spans[colayer][piece]
            values = np.empty(len(span), np.float32)
            flags = self._read(colayer, piece, payload, piece, values)
            back = torch.from_numpy(values) - flat[span.start : span.stop].float()
            with self._residual_lock:
                for start, stop in self._ranges(colayer, span, flags.tobytes(), used=True):
                    residual[span.start + start : span.start + stop] += back[start:stop]

    def sum_contributions(
        self, colayer: int, piece: int, contributions: Mapping[Contribution, Any]
    ) -> Payload | None:
        """Add contributions in their order; return None if there are none."""
        if not contributions:
            return None
        total = np.empty(len(self._spans[colayer][piece]), self._dtypes[colayer])
        used = np.zeros(len(self._shapes[colayer]), np.uint8)
        for number, ((_, worker), payload) in enumerate(contributions.items()):
            used |= self._read(colayer, piece, payload, worker, total, add=number > 0)
        return self._encode(colayer, piece, total, used.tobytes())

    def join(self, parts: Sequence[PieceSum]) -> list[torch.Tensor | None]:
        """Return the gradients of a round by parameter; None where there is none.

        Parts of the control colayer are skipped.
        """
        flats = [
            np.zeros(spans[-1].stop, dtype)
            for spans, dtype in zip(self._spans, self._dtypes, strict=True)
        ]
        used = [np.zeros(len(shapes), np.uint8) for shapes in self._shapes]
        for part in parts:
            if part.payload is not None and part.colayer < len(self):
                z, q = part.colayer, part.piece
                span = self._spans[z][q]
                out = flats[z][span.start : span.stop]
                used[z] |= self._read(z, q, part.payload, q, out)
        grads: list[torch.Tensor | None] = []
        for shapes, flat, flags in zip(self._shapes, flats, used, strict=True):
            blocks = torch.from_numpy(flat).split([shape.numel() for shape in shapes])
            for shape, block, flag in zip(shapes, blocks, flags, strict=True):
                grads.append(block.view(shape) if flag else None)
        return grads

    def _read(
        self, colayer: int, piece: int, payload: Any, worker: int, out: Array, *, add: bool = False
    ) -> Array:
        """Write or add the values of a payload; return by parameter whether it has a gradient."""
        flags = len(self._shapes[colayer])
        wanted, found = self._nbytes(colayer, piece) + flags, len(payload or b"")
        if wanted != found:
            raise PeerError(
                f"{self.name(worker)} sent {found} bytes for piece {piece} of colayer {colayer}, "
                f"which has {wanted}; check that it trains the same model"
            )
        used = np.frombuffer(payload, np.uint8, offset=wanted - flags)
        if bool((used > 1).any()):
            raise PeerError(
                f"{self.name(worker)} sent piece {piece} of colayer {colayer} with flags other "
                "than 0 and 1; check that it runs the same version"
            )
        self._decode(colayer, piece, payload, out, add=add)
        return used

    def _nbytes(self, colayer: int, piece: int) -> int:
        codings, elements = self._codings[colayer], len(self._spans[colayer][piece])
        if codings is None:
            return elements * self._dtypes[colayer].itemsize
        return codings[piece].room(Span(0, elements))

    def _decode(self, colayer: int, piece: int, payload: Any, out: Array, *, add: bool) -> None:
        codings = self._codings[colayer]
        if codings is None:
            values = np.frombuffer(payload, self._dtypes[colayer], count=len(out))
            if add:
                out += values
            else:
                out[:] = values
        elif nbytes := self._nbytes(colayer, piece):
            # Any bytes of this size can be decoded.
            encoded = torch.frombuffer(payload, dtype=torch.uint8, count=nbytes)
            span = Span(0, len(out))
            codings[piece].decode(encoded, torch.from_numpy(out), span, add=add)

    def _encode(self, colayer: int, piece: int, values: Array, flags: bytes) -> Payload:
        codings = self._codings[colayer]
        if codings is None:
            return values.tobytes() + flags
        span, coding = self._spans[colayer][piece], codings[piece]
        whole = Span(0, len(span))
        nbytes = coding.room(whole)
        out = bytearray(nbytes + len(flags))
        out[nbytes:] = flags
        residual = self._residuals[colayer]
        with self._residual_lock:
            part = None if residual is None else residual[span.start : span.stop]
            before = None if part is None or all(flags) else part.clone()
            if nbytes:
                payload = torch.frombuffer(out, dtype=torch.uint8, count=nbytes)
                coding.encode(torch.from_numpy(np.ascontiguousarray(values)), whole, payload, part)
            if part is not None and before is not None:
                # Values of parameters without a gradient are not used.
                for start, stop in self._ranges(colayer, span, flags, used=False):
                    part[start:stop] = before[start:stop]
        return out

    def _ranges(
        self, colayer: int, span: Span, flags: bytes, *, used: bool
    ) -> Iterator[tuple[int, int]]:
        """Yield the ranges in a piece of the parameters that have a gradient, or have none."""
        start = 0
        for shape, flag in zip(self._shapes[colayer], flags, strict=True):
            stop = start + shape.numel()
            first, last = max(start, span.start), min(stop, span.stop)
            if bool(flag) is used and first < last:
                yield first - span.start, last - span.start
            start = stop


def _check_colayer(colayer: Mapping[str, torch.Tensor]) -> None:
    first = next(iter(colayer))
    for name, param in colayer.items():
        if param.device.type != "cpu" or param.dtype not in _DTYPES:
            raise UsageError(
                f"parameter {name!r} is {param.dtype} on {param.device}: bounded staleness sums "
                "float32 and float64 on the CPU only; use wingbeat.AllReduce()"
            )
        if param.dtype is not colayer[first].dtype:
            raise UsageError(
                f"parameters {first!r} ({colayer[first].dtype}) and {name!r} ({param.dtype}) are "
                "in one colayer, which has one dtype; use a model of one dtype"
            )


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


# -- the control colayer ---------------------------------------------------------------------

CombineControl = Callable[[Mapping[Contribution, Any]], bytes]


def sum_piece(
    pieces: Pieces,
    combine_control: CombineControl,
    colayer: int,
    piece: int,
    contributions: Mapping[Contribution, Any],
) -> Payload | None:
    """Add the contributions to an owned piece."""
    if colayer != len(pieces):
        return pieces.sum_contributions(colayer, piece, contributions)
    return None if piece or not contributions else combine_control(contributions)


def latest_options(
    schema: OptionsSchema, name: Callable[[int], str], contributions: Mapping[Contribution, Any]
) -> bytes:
    """Return the options of the latest contribution; ``name`` returns a worker's name."""
    (_, worker), payload = list(contributions.items())[-1]
    schema.parse(payload or b"", name(worker))
    return bytes(payload)


def join_step_counts(
    name: Callable[[int], str], contributions: Mapping[Contribution, Any]
) -> bytes:
    """Return the number of steps of each worker, as ``worker:steps``; ``name`` returns its name.

    Raises PeerError if a number is malformed; the error names the sender.
    """
    counts = []
    for (_, worker), payload in sorted(contributions.items()):
        count = bytes(payload or b"")
        if not _is_number(count):
            raise PeerError(
                f"{name(worker)} sent {count[:_MAX_DIGITS]!r} as its number of steps; check that "
                "it runs the same version"
            )
        counts.append(b"%d:%s" % (worker, count))
    return b" ".join(counts)


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _MAX_DIGITS


# -- replicas --------------------------------------------------------------------------------


@contextlib.contextmanager
def _gradients(params: Tensors, grads: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Set the gradients of parameters; restore those of before afterwards."""
    before = [param.grad for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = place(grad, param) if grad is not None and is_placed(param) else grad
    try:
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


class Replica:
    """Parameters and an optimizer; `CommunicationThread` calls it in the training thread.

    ``others`` are buffers and frozen parameters, which are pulled as well. ``combine`` adds the
    contributions to owned pieces, and holds no parameters and no optimizer.
    """

    combine: Callable[[int, int, Mapping[Contribution, Any]], Payload | None]
    _combine_control: CombineControl

    def __init__(
        self, params: Sequence[Tensors], pieces: Pieces, optimizer: torch.optim.Optimizer,
        step: Callable[[], Any], others: Tensors = (),
    ) -> None:  # fmt: skip
        self._optimizer, self._step, self._others = optimizer, step, others
        self.set_colayers(params, pieces)

    def set_colayers(self, params: Sequence[Tensors], pieces: Pieces) -> None:
        """Use different colayers of the same parameters."""
        self._pieces, self.control = pieces, len(pieces)
        self._flat = [param for colayer in params for param in colayer]
        self._tensors = [*self._flat, *self._others]
        self.combine = functools.partial(sum_piece, pieces, self._combine_control)

    def _control_payload(self) -> bytes:
        raise NotImplementedError

    def control_payloads(self) -> list[bytes | None]:
        """Return the pieces of the control colayer; piece 0 holds its content."""
        return [self._control_payload(), *[None] * (self._pieces.workers - 1)]

    def apply_round(self, parts: Sequence[PieceSum]) -> None:
        """Apply the sums of a round; a malformed sum raises a PeerError that names the sender."""
        raise NotImplementedError

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
        self, params: Sequence[Tensors], pieces: Pieces, optimizer: torch.optim.Optimizer,
        step: Callable[[], Any], others: Tensors = (),
    ) -> None:  # fmt: skip
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "torch.optim.LBFGS evaluates the loss in its step, and bounded staleness applies "
                "sums that arrive later; use another optimizer, or wingbeat.AllReduce()"
            )
        self._options = OptimizerOptions(optimizer)
        schema = self._options.schema
        self._groups: Groups = schema.parse(self._options.serialize(), "this worker")
        self._combine_control = functools.partial(latest_options, schema, pieces.name)
        super().__init__(params, pieces, optimizer, step, others)

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
                sender = self._pieces.name(0)  # which sums the pieces 0
                self._groups = self._options.schema.parse(part.payload, sender)
        grads = self._pieces.join(parts)
        if all(grad is None for grad in grads):
            return
        with _gradients(self._flat, grads), self._options.use(self._groups):
            self._step()

    def load_state(self, payload: Any) -> None:
        """Load pulled state; the optimizer keeps its options, the next round uses the pulled."""
        snapshot = Snapshot(payload, self._tensors, self._flat)
        sent = json.dumps(snapshot.extra).encode()
        groups = self._options.schema.parse(sent, "the fastest worker")
        snapshot.load_into(self._optimizer)
        self._groups = groups

    def state_bytes(self) -> bytes:
        """Return the state that `load_state` loads."""
        return encode_snapshot(self._tensors, self._flat, self._optimizer, self._groups)


class SynchronousReplica(Replica):
    """A replica that writes the sums of a round to the buckets, as an all-reduce does.

    The user's step then applies them, and no options are sent. The control colayer carries the
    number of steps of each worker, which must be equal. A worker that has run out of batches
    applies the rounds of the others by additional steps, counted by ``own_steps``. ``in_iteration``
    is whether the next round belongs to this worker's current iteration.
    """

    def __init__(
        self, params: Sequence[Tensors], pieces: Pieces, optimizer: torch.optim.Optimizer,
        step: Callable[[], Any], others: Tensors = (), *,
        buckets: Sequence[Bucket], steps: StepCounter,
    ) -> None:  # fmt: skip
        self._combine_control = functools.partial(join_step_counts, pieces.name)
        super().__init__(params, pieces, optimizer, step, others)
        self._buckets, self._steps = buckets, steps
        self.in_iteration, self.own_steps = False, 0

    def _control_payload(self) -> bytes:
        return b"%d" % self._steps.count

    @torch.no_grad()
    def apply_round(self, parts: Sequence[PieceSum]) -> None:
        """Write the sums of a round to the buckets, or make a step on them."""
        grads = self._pieces.join(parts)
        if not self.in_iteration:
            self._step_alone(grads)
            return
        for part in parts:
            if (part.colayer, part.piece) == (self.control, 0):
                self._check_steps(part)
        remaining = iter(grads)
        for bucket in self._buckets:
            for position, (slot, grad) in enumerate(zip(bucket.slots, remaining, strict=False)):
                bucket.flags[position] = grad is not None
                if grad is None:
                    slot.view.zero_()
                else:
                    slot.view.copy_(grad)

    def _check_steps(self, part: PieceSum) -> None:
        counts: dict[int, int] = {}
        for text in bytes(part.payload or b"").split() or [b""]:
            rank, _, count = text.partition(b":")
            if not (_is_number(rank) and _is_number(count) and int(rank) < self._pieces.workers):
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
            found.update(local(param.detach()).contiguous().numpy().tobytes())
        return found.hexdigest()
