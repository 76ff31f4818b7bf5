"""A model and its optimizer under bounded staleness: rounds are applied as a whole, by any step.

The colayer of number k, behind the k that have gradients, has the optimizer's options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wingbeat.errors import UsageError
from wingbeat.exchanges.copied import Copy, written
from wingbeat.exchanges.options import Form, Groups, Options
from wingbeat.exchanges.pieces import Payload, Pieces
from wingbeat.stale.messages import Entry, Round
from wingbeat.stale.pace import IN_FLIGHT, Pace


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
        form: what options are like.
        name: what messages call the worker of a rank.
    """

    def __init__(self, pieces: Pieces, form: Form, name: Callable[[int], str]) -> None:
        self._pieces, self._form, self._name = pieces, form, name

    def combine(self, colayer: int, piece: int, waiting: Mapping[Entry, Any]) -> Payload | None:
        """Add contributions up; of options take the latest.

        Raises:
            PeerError: a contribution is malformed; names who sent it.
        """
        if colayer != len(self._pieces):
            return self._pieces.summed(colayer, piece, waiting)
        if piece or not waiting:
            return None
        (_, worker), payload = list(waiting.items())[-1]
        self._form.read(payload or b"", self._name(worker))
        return bytes(payload)


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
        self.sums = Sums(pieces, self._options.form, name)
        self._last: Groups = self._options.form.read(self._options.written(), name(0))

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
