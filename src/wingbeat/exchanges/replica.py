"""A model and its optimizer under bounded staleness: rounds are applied as a whole, by any step.

The colayer of number k, behind the k that have gradients, has the optimizer's options.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.exchanges.copied import Copy, written
from wingbeat.exchanges.options import Form, Groups, Options
from wingbeat.exchanges.pieces import Payload, Pieces
from wingbeat.stale.messages import Entry, Round
from wingbeat.stale.pace import IN_FLIGHT, Pace

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, StepCounter

_DIGITS = 20
"""Of a number of steps, at most."""


def pace_of(s: int | None, p: int, colayers: int, in_flight: int | None = IN_FLIGHT) -> Pace:
    """Return the thresholds for machines, which have a colayer of options as well.

    It is sent last: whoever has exchanged ``p`` < k colayers has p; but BSP and SSP wait for all.

    >>> pace_of(0, 10, 10)
    Pace(s=0, p=11, colayers=11, in_flight=2)

    Raises:
        UsageError: a value out of range; names it as users know it.
    """
    Pace(s, p, colayers, in_flight)
    return Pace(s, p + 1 if p == colayers else p, colayers + 1, in_flight)


class Sums:
    """What the owner of a piece makes of contributions; keeps no parameters and no optimizer.

    Args:
        pieces: of the gradients.
        control: makes one payload of what waits in the last colayer, which has no gradients.
    """

    def __init__(self, pieces: Pieces, control: Callable[[Mapping[Entry, Any]], bytes]) -> None:
        self._pieces, self._control = pieces, control

    def combine(self, colayer: int, piece: int, waiting: Mapping[Entry, Any]) -> Payload | None:
        """Add contributions up.

        Raises:
            PeerError: a contribution is malformed; names who sent it.
        """
        if colayer != len(self._pieces):
            return self._pieces.summed(colayer, piece, waiting)
        return None if piece or not waiting else self._control(waiting)


def latest(form: Form, name: Callable[[int], str], waiting: Mapping[Entry, Any]) -> bytes:
    """Of options take the latest; ``form`` is what they are like, ``name`` calls a rank's worker.

    Raises:
        PeerError: they are malformed; names who sent them.
    """
    (_, worker), payload = list(waiting.items())[-1]
    form.read(payload or b"", name(worker))
    return bytes(payload)


def counted(name: Callable[[int], str], waiting: Mapping[Entry, Any]) -> bytes:
    """Return each number of steps with its worker.

    Raises:
        PeerError: one is malformed; names who sent it.
    """
    told = []
    for (_, worker), payload in sorted(waiting.items()):
        count = bytes(payload or b"")
        if not _is_number(count):
            raise PeerError(
                f"{name(worker)} sent {count[:_DIGITS]!r}, as the number of steps that it has "
                "made; check that it runs the same version"
            )
        told.append(b"%d:%s" % (worker, count))
    return b" ".join(told)


class TorchReplica:
    """Parameters and an optimizer; see `wingbeat.exchanges.courier.Replica`.

    Args:
        params: of each colayer.
        pieces: of the gradients of all these.
        optimizer: any that steps on gradients alone.
        step: lets it make a step, on the gradients in ``p.grad``.
        workers: how many there are.
        name: what messages call the worker of a rank.
        others: buffers, and parameters that are not trained: whoever pulls gets these as well.

    Attributes:
        sums: what is made of contributions.

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
        name: Callable[[int], str] = "rank {}".format,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "torch.optim.LBFGS evaluates the loss in its step, and under bounded staleness "
                "sums are applied that come later; use another optimizer, or wingbeat.AllReduce()"
            )
        self._params, self._pieces, self._options = params, pieces, Options(optimizer)
        self._step, self._workers, self._name = step, workers, name
        self._optimizer = optimizer
        self._flat = [param for of_one in params for param in of_one]
        self._tensors = [*self._flat, *others]
        self.sums = Sums(pieces, functools.partial(latest, self._options.form, name))
        self._last: Groups = self._options.form.read(self._options.written(), name(0))

    def rebundle(self, params: Sequence[Sequence[torch.Tensor]], pieces: Pieces) -> None:
        """Go on with the same parameters in other colayers.

        Args:
            params: of each colayer.
            pieces: of the gradients of all these.
        """
        self._params, self._pieces = params, pieces
        others = self._tensors[len(self._flat) :]
        self._flat = [param for of_one in params for param in of_one]
        self._tensors = [*self._flat, *others]
        self.sums = Sums(pieces, functools.partial(latest, self._options.form, self._name))

    @property
    def control(self) -> int:
        """The number of the colayer that has the options."""
        return len(self._pieces)

    def options(self) -> list[bytes | None]:
        """Return the pieces of the colayer of options: piece 0 has them all."""
        return [self._options.written(), *[None] * (self._workers - 1)]

    def step(self, parts: Sequence[Round]) -> None:
        """Step on the sums of one round, with the options of its latest entry.

        A round without options, as when all its iterations were dropped before they had any, has
        those of the round before, and at first those that the optimizer began with. Parameters
        without a gradient are left alone; ``p.grad`` is afterwards what it was.

        Raises:
            PeerError: a sum is malformed; names the worker that its piece belongs to.
        """
        for part in parts:
            if part.colayer == self.control and part.piece == 0 and part.payload is not None:
                self._last = self._options.form.read(part.payload, self._name(0))
        grads = self._pieces.joined([part for part in parts if part.colayer != self.control])
        pairs = [
            (param, grad)
            for params, found in zip(self._params, grads, strict=True)
            for param, grad in zip(params, found, strict=True)
        ]
        if all(grad is None for _, grad in pairs):
            return
        before = [param.grad for param, _ in pairs]
        for param, grad in pairs:
            param.grad = grad
        try:
            with self._options.using(self._last):
                self._step()
        finally:
            for (param, _), grad in zip(pairs, before, strict=True):
                param.grad = grad

    def put(self, payload: Any) -> None:
        """Take over parameters, the optimizer's state and the other tensors of another worker.

        Its options stay with it: those of the round are in use again with the next one.

        Raises:
            PeerError: they are none of this model.
        """
        copy = Copy(payload, self._tensors, self._flat)
        last = self._options.form.read(json.dumps(copy.last).encode(), "the fastest worker")
        copy.put(self._optimizer)
        self._last = last

    def copied(self) -> bytes:
        """Return these for another worker.

        Raises:
            PeerError: the optimizer keeps something that cannot be sent.
        """
        return written(self._tensors, self._flat, self._optimizer, self._last)


class SummedReplica:
    """What a round is where nobody is ahead: gradients that all have, in the buckets they left.

    Who steps on them, and how, is then as with an all-reduce: no options travel. In their place, in
    the colayer behind those that have gradients, each worker tells how many steps it has made.

    A round that comes when this worker takes none, as it has run out of batches and waits for the
    others, is applied by a step of its own.

    Args:
        params: of each colayer.
        pieces: of the gradients of all these.
        optimizer: whose state belongs to the model.
        buckets: one for each colayer.
        step: lets the optimizer make a step, on the gradients in ``p.grad``.
        steps: counts those that were made.
        workers: how many there are.
        name: what messages call the worker of a rank.
        others: buffers, and parameters that are not trained.

    Attributes:
        sums: what is made of contributions.
        taking: whether the round that comes is that of this worker's own iteration.
        alone: how many rounds were applied by steps of its own.
    """

    def __init__(
        self,
        params: Sequence[Sequence[torch.Tensor]],
        pieces: Pieces,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        step: Callable[[], Any],
        steps: StepCounter,
        workers: int,
        name: Callable[[int], str] = "rank {}".format,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        self._pieces, self._optimizer, self._buckets = pieces, optimizer, buckets
        self._step, self._steps, self._workers = step, steps, workers
        self.taking, self.alone = False, 0
        self._flat = [param for of_one in params for param in of_one]
        self._tensors = [*self._flat, *others]
        self.sums = Sums(pieces, functools.partial(counted, name))

    @property
    def control(self) -> int:
        """The number of the colayer that has the numbers of steps."""
        return len(self._pieces)

    def options(self) -> list[bytes | None]:
        """Return the pieces of that colayer: piece 0 has this worker's."""
        return [self._count(), *[None] * (self._workers - 1)]

    @torch.no_grad()
    def step(self, parts: Sequence[Round]) -> None:
        """Put the sums of one round into the buckets, or step on them.

        Raises:
            PeerError: a sum is malformed; names the worker that its piece belongs to.
            UsageError: the workers have made different numbers of steps.
        """
        if self.taking:
            for part in parts:
                if (part.colayer, part.piece) == (self.control, 0):
                    self._check_steps(part)
        grads = self._pieces.joined([part for part in parts if part.colayer != self.control])
        if not self.taking:
            self._step_alone([grad for found in grads for grad in found])
            return
        for bucket, found in zip(self._buckets, grads, strict=True):
            for place, (slot, grad) in enumerate(zip(bucket.slots, found, strict=True)):
                bucket.flags[place] = grad is not None
                if grad is None:
                    slot.view.zero_()
                else:
                    slot.view.copy_(grad)

    def _count(self) -> bytes:
        return b"%d" % self._steps.count

    def _check_steps(self, part: Round) -> None:
        made: dict[int, int] = {}
        for told in bytes(part.payload or b"").split() or [b""]:
            rank, _, count = told.partition(b":")
            if not (_is_number(rank) and _is_number(count) and int(rank) < self._workers):
                raise PeerError(
                    f"{told[:_DIGITS]!r} came as a worker's number of steps; check that all "
                    "workers run the same version"
                )
            made[int(rank)] = int(count)
        if set(made.values()) != {self._steps.count}:
            self._steps.differ(made)

    def _step_alone(self, grads: Sequence[torch.Tensor | None]) -> None:
        if all(grad is None for grad in grads):
            return  # all have ended, and nobody has sent anything
        before = [param.grad for param in self._flat]
        for param, grad in zip(self._flat, grads, strict=True):
            param.grad = grad
        try:
            self._step()
        finally:
            for param, grad in zip(self._flat, before, strict=True):
                param.grad = grad
        self._steps.count += 1
        self.alone += 1

    def digest(self) -> str:
        """Return a hash of the parameters' bits."""
        found = hashlib.sha256()
        for param in self._flat:
            found.update(param.detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    def put(self, payload: Any) -> None:
        """Take over parameters, the optimizer's state and the other tensors of another worker.

        Raises:
            PeerError: they are none of this model.
        """
        Copy(payload, self._tensors, self._flat).put(self._optimizer)

    def copied(self) -> bytes:
        """Return these for another worker.

        Raises:
            PeerError: the optimizer keeps something that cannot be sent.
        """
        return written(self._tensors, self._flat, self._optimizer, [])


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _DIGITS
