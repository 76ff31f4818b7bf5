"""The outer optimizer of DiLoCo: its gradient is the average change of the workers' models."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from wingbeat.engine.updates.update import SHARED, START, VELOCITY, Closure, Host, Training
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.flat import FlatModel
from wingbeat.methods.model_averaging.local import Averager, LocalUpdate, Tensors
from wingbeat.schedules.local import Local

_FIRST_SHARED = "first shared model"  # key of a checksum of each worker's first shared model


def num_copies(momentum: float, *, narrow: bool) -> int:
    """Return the number of copies of the parameters that an `OuterUpdate` needs."""
    return 1 + bool(momentum) + narrow


class OuterUpdate(LocalUpdate):
    """Runs local steps, and an outer step of SGD with Nesterov momentum on their average.

    DiLoCo (Douillard et al., 2023), Algorithm 1. ``g`` is the mean over workers of the shared model
    minus each worker's model. Then ``m = momentum * m + g``, and ``lr * (g + momentum * m)`` is
    subtracted from the shared model, as in ``torch.optim.SGD(nesterov=True)``. All workers continue
    from the result.

    With a delay (Streaming DiLoCo, Douillard et al., 2025, section 2.2) a worker continues from the
    shared model plus all its steps since it sent. The paper mixes ``alpha`` of the worker's own
    parameters with the rest of the shared model. Here no step is lost, no parameter needs tuning,
    and workers differ only by the steps of the delay.

    In groups of some workers, shared models differ. Then models are averaged, and ``g`` is a
    worker's own shared model minus that mean, so shared models converge too. With one group of all
    workers both definitions of ``g`` agree.

    If parameters are narrower than the shared model (bf16), changes are measured from the model
    from which the worker started, not from the rounded shared model.

    If all workers share one model (``shared``), an excluded worker has missed outer steps and may
    be at another fragment. Instead of its next average it copies a peer's state, like a restarted
    worker.
    """

    def __init__(
        self,
        training: Training,
        model: FlatModel,
        averager: Averager,
        schedule: Local,
        names: Sequence[str],
        *,
        lr: float,
        momentum: float,
        shared: bool = True,
    ) -> None:
        super().__init__(training, model, averager, schedule)
        self._names = list(names)
        self._lr, self._momentum, self._one_model = lr, momentum, shared
        copies = iter(model.copies)
        self._shared = next(copies)
        self._velocity = next(copies) if momentum else torch.zeros_like(self._shared)
        self._start = next(copies) if model.narrow else self._shared
        self._known = self._given = False
        self._first_checksum: int | None = None  # checksum of the shared model, until compared

    def step(self, host: Host, closure: Closure) -> object:
        """Run the optimizer's own step, and the averages that are due."""
        self._check_kinds()
        self._catch_up()
        self._given = False
        return super().step(host, closure)

    # -- state --------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Always true: the shared model and the velocity are kept."""
        return True

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters by name."""
        parts = self._model.split(self._shared)
        return {name: part.shape for name, part in zip(self._names, parts, strict=True)}

    def tensors(self) -> dict[str, Tensors]:
        """Return copies of the outer optimizer's tensors by kind and parameter name."""
        self._catch_up()
        return {kind: self._named(flat.clone()) for kind, flat in self._kinds().items()}

    def resume(self, steps: int, tensors: Mapping[str, Tensors]) -> None:
        """Continue after ``steps`` steps with the result of `tensors`, if not empty."""
        super().resume(steps, tensors)
        self._given = self._known = SHARED in tensors
        self._velocity.zero_()
        for kind, flat in self._kinds().items():
            parts = self._named(flat)
            # A checkpoint without START has no rounding error.
            default = tensors.get(SHARED, {}) if kind == START else {}
            for name, value in tensors.get(kind, default).items():
                parts[name].copy_(value)

    def handed(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return the outer optimizer's tensors and its progress; see `LocalUpdate.handed`.

        Workers with the same shared model must make the same outer steps. So a worker that copies
        this state takes part in the current average.
        """
        turn = self._under_way
        numbers = [self._schedule.made] if turn is None else [self._begun, *turn]
        return list(self._kinds().values()), numbers

    def take_over(self, numbers: Sequence[int]) -> None:
        """Continue from another worker's state, and make its current outer step.

        Raises ValueError if the numbers do not belong to this training.
        """
        steps, *turn = numbers
        super().take_over([steps])
        self._given = self._known = True
        if turn and self._one_model:
            first, last = turn
            if not 0 <= first < last <= len(self._model.spans):
                raise ValueError(f"fragments {first} to {last} of {len(self._model.spans)}")
            self._begin(first, last)
            self._adopt()

    def _kinds(self) -> Tensors:
        kinds = {SHARED: self._shared, VELOCITY: self._velocity}
        return kinds | ({START: self._start} if self._model.narrow else {})

    def _named(self, flat: torch.Tensor) -> Tensors:
        return dict(zip(self._names, self._model.split(flat), strict=True))

    # -- averages -----------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Use the current model as the shared one, unless the shared model is known.

        It is known after an average. A model that the user loads becomes the shared model.
        """
        if self._moved or self._given:
            return
        flat, spans = self._trained, len(self._model.spans)
        if self._known and self._model.holds(flat, 0, spans):
            return
        self._model.read(0, spans)
        self._shared.copy_(flat)
        self._start.copy_(flat)  # the same tensor, unless parameters are narrower
        world = self._world
        first = not self._known and self._one_model
        if first and not world.has_published(_FIRST_SHARED, world.rank):
            self._first_checksum = zlib.crc32(self._shared.numpy().data)
            world.publish(_FIRST_SHARED, self._first_checksum)
        self._known = True

    def _check_shared(self) -> None:
        """Compare the first shared model with those of the group; fail if one differs."""
        mine, self._first_checksum = self._first_checksum, None
        if mine is None:
            return
        world, members = self._world, self._averager.members
        published = [each for each in members if world.has_published(_FIRST_SHARED, each)]
        others = [each for each in published if world.read(_FIRST_SHARED, each) != mine]
        if self._any(bool(others)):  # the ranks of a replica hold different parts
            named = [world.ranks[each] for each in others]
            raise UsageError(
                f"{world.me} and rank {named[0] if named else 'another one'} started with "
                "different weights, with which an outer optimizer (DiLoCo) never converges to one "
                "model: weights loaded after distribute(), or changed by another optimizer before "
                "the first step, must be the same on all ranks; call wingbeat.synchronize(model) "
                "on all ranks afterwards, or load before distribute()"
            )

    @property
    def _trained(self) -> torch.Tensor:
        return self._model.flat[: len(self._model.trained)]

    def _level(self) -> None:
        self._catch_up()
        # The copies are averaged too, because an excluded worker has missed outer steps.
        super()._level()
        self._first_checksum = None  # all workers share the mean now
        if self._model.narrow:
            mean = self._trained.clone()
            self._model.read(0, len(self._model.spans))
            self._start.add_(self._trained).sub_(mean)

    def _offer(self, first: int, last: int) -> None:
        """Write this worker's change, or its model, to the flat model."""
        super()._offer(first, last)
        if self._one_model:
            inside = self._inside(first, last)
            flat = self._model.flat[inside]
            torch.sub(self._start[inside], flat, out=flat)

    def _take(self, first: int, last: int) -> None:
        """Make the outer step, and continue from the shared model."""
        self._check_shared()
        inside = self._inside(first, last)
        flat, shared = self._model.flat[inside], self._shared[inside]
        velocity = self._velocity[inside]
        if not self._one_model:
            torch.sub(self._start[inside], flat, out=flat)
        if self._momentum:  # 0 times infinity is not a number
            flat.add_(velocity.mul_(self._momentum).add_(flat), alpha=self._momentum)
        shared.sub_(flat, alpha=self._lr)
        moved = None
        if self._sent is not None and self._model.narrow:
            self._model.read(first, last)
            moved = flat - self._sent
        flat.copy_(shared)
        super()._take(first, last)
        if self._model.narrow:
            self._model.read(first, last)
            self._start[inside] = flat if moved is None else flat - moved

    def _inside(self, first: int, last: int) -> slice:
        part = self._model.part(first, last)
        return slice(part.start, part.stop)
