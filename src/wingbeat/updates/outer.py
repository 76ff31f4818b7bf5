"""The outer optimizer: how far workers have come is averaged, and is its gradient (DiLoCo)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from wingbeat.engine.updates.flat import FlatModel
from wingbeat.engine.updates.local import Averager, LocalUpdate, Tensors
from wingbeat.engine.updates.update import Closure, Host, Training
from wingbeat.errors import UsageError
from wingbeat.schedules.local import Local
from wingbeat.transport.world import World

SHARED = "shared"
"""Of the outer optimizer's tensors, the model that workers share."""

VELOCITY = "velocity"
"""The outer optimizer's momentum."""

START = "start"
"""Where workers set out from the shared model, if parameters have fewer bits than that."""

_SHARED_FIRST = "first shared model"
"""Under which name workers publish a digest of that."""


def copies_of(momentum: float, *, narrow: bool) -> int:
    """Return how many tensors as long as the parameters an `OuterUpdate` has.

    Args:
        momentum: Nesterov's, 0 for none.
        narrow: whether parameters have fewer bits than the flat model.
    """
    return 1 + bool(momentum) + narrow


class OuterUpdate(LocalUpdate):
    """Runs local steps, and an outer step of SGD with Nesterov momentum on their average.

    DiLoCo (Douillard et al., 2023), Algorithm 1. With ``g`` the mean over workers of the shared
    model less each one's own: ``m = momentum * m + g``, and the shared model becomes itself less
    ``lr * (g + momentum * m)``, as ``torch.optim.SGD(nesterov=True)`` has it. All workers then
    go on from there.

    Under a delay (Streaming DiLoCo, Douillard et al., 2025, section 2.2) a worker goes on from the
    shared model plus all that it has moved since it sent, where the paper mixes: ``alpha`` of the
    worker's own parameters, the rest of the shared model. So nothing of a step is lost, nothing
    has to be tuned, and workers differ by the steps of the delay alone.

    In groups of some, workers' shared models differ. There models are averaged, and ``g`` is a
    worker's own shared model less that mean, which also draws shared models together; with one
    group of all it is the same number.

    Where parameters have fewer bits than the shared model (bf16), how far they have come is counted
    from where they have set out, and not from what was rounded to that.

    Where all share one model, a worker that the others have not waited for has missed outer steps,
    and may be at another fragment. In place of its next average it takes over the state of one of
    them, as one that comes back does.

    Args:
        training: what it works on.
        model: its parameters, with as many copies as `copies_of` says.
        averager: with whom.
        schedule: when.
        names: the parameters', in the order of the flat model.
        lr: the outer learning rate.
        momentum: Nesterov's, 0 for none.
        alike: whether all workers are in each group, and share one model: then differences travel.

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
        alike: bool = True,
    ) -> None:
        super().__init__(training, model, averager, schedule)
        self._names = list(names)
        self._lr, self._momentum, self._alike = lr, momentum, alike
        copies = iter(model.copies)
        self._shared = next(copies)
        self._velocity = next(copies) if momentum else torch.zeros_like(self._shared)
        # The same tensor unless it is different: most models have one dtype.
        self._start = next(copies) if model.narrow else self._shared
        self._known = self._given = False
        self._begun_with: int | None = None  # a digest of the first shared model, until compared

    def step(self, host: Host, closure: Closure) -> object:
        """Run the optimizer's own step, and what the schedule adds."""
        self._check_kinds()
        self._catch_up()
        self._given = False
        return super().step(host, closure)

    # -- state --------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Always: a shared model, and a velocity."""
        return True

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of each parameter, by name."""
        parts = self._model.split(self._shared)
        return {name: part.shape for name, part in zip(self._names, parts, strict=True)}

    def tensors(self) -> dict[str, Tensors]:
        """Return copies of the outer optimizer's, by kind and parameter name."""
        self._catch_up()
        return {kind: self._named(flat.clone()) for kind, flat in self._kinds().items()}

    def resume(self, steps: int, tensors: Mapping[str, Tensors]) -> None:
        """Go on as after so many steps, with what `tensors` has returned; without it if empty."""
        super().resume(steps, tensors)
        self._given = self._known = SHARED in tensors
        self._velocity.zero_()
        for kind, flat in self._kinds().items():
            parts = self._named(flat)
            # Who was saved without has not rounded anything.
            values = tensors.get(kind, tensors.get(SHARED, {}) if kind == START else {})
            for name, value in values.items():
                parts[name].copy_(value)

    def handed(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return the outer optimizer's tensors, and how far it is; see `LocalUpdate.handed`.

        An outer step is made by all or by none who have the same shared model. So whoever takes
        this over takes part in the average that is under way here.
        """
        under_way, made = self._under_way, self._schedule.made
        turn = [] if under_way is None else [*under_way]
        return list(self._kinds().values()), [made if under_way is None else self._begun, *turn]

    def take_over(self, numbers: Sequence[int]) -> None:
        """Go on as another worker, whose tensors these are; make the outer step that it makes.

        Raises:
            ValueError: the numbers are none of this training.
            PeerError: the others went on without this worker.
        """
        steps, *turn = numbers
        super().take_over([steps])
        self._given = self._known = True
        if turn and self._alike:
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
        """Share the model as it is, unless it is known what is shared.

        After workers have met it is, as the mean over all of how far each has come stays what it
        was. But whoever loads a model then shares that.
        """
        if self._moved or self._given:
            return
        flat = self._trained
        if self._known and self._model.holds(flat, 0, len(self._model.spans)):
            return
        self._model.read(0, len(self._model.spans))
        for kept in {id(t): t for t in (self._shared, self._start)}.values():
            kept.copy_(flat)
        if (
            not self._known
            and self._alike
            and not self._world.said(_SHARED_FIRST, self._world.rank)
        ):
            self._begun_with = zlib.crc32(self._shared.numpy().data)
            self._world.publish(_SHARED_FIRST, self._begun_with)
        self._known = True

    @property
    def _world(self) -> World:
        return self._training.collectives.world

    def _check_shared(self) -> None:
        """Compare what was shared first with those of whom this worker has averaged with.

        Raises:
            UsageError: one has shared another model, so that no two would ever be the same.
        """
        mine, self._begun_with = self._begun_with, None
        if mine is None:
            return
        for rank in self._averager.members:
            world = self._world
            if world.said(_SHARED_FIRST, rank) and world.read(_SHARED_FIRST, rank) != mine:
                raise UsageError(
                    f"rank {world.rank} and rank {rank} began with different weights, from which "
                    "an outer optimizer (DiLoCo) never comes to the same: what is loaded after "
                    "distribute(), or changed by another optimizer before the first step, has to "
                    "be the same on all ranks; call wingbeat.synchronize(model) on all ranks after "
                    "it, or load before distribute()"
                )

    @property
    def _trained(self) -> torch.Tensor:
        return self._model.flat[: len(self._model.trained)]

    def _level(self) -> None:
        self._catch_up()
        # With the flat model goes what lies behind it: who has left early, or was left out, knows
        # less than others.
        super()._level()
        self._begun_with = None  # whatever it was, all share the mean now
        if self._model.narrow:
            mean = self._trained.clone()
            self._model.read(0, len(self._model.spans))
            self._start.add_(self._trained).sub_(mean)

    def _offer(self, first: int, last: int) -> None:
        """Put into the flat model how far this worker has come, or its model."""
        super()._offer(first, last)
        if self._alike:
            inside = self._inside(first, last)
            flat = self._model.flat[inside]
            torch.sub(self._start[inside], flat, out=flat)

    def _take(self, first: int, last: int) -> None:
        """Make the outer step, and go on from the shared model."""
        self._check_shared()
        inside = self._inside(first, last)
        flat, shared = self._model.flat[inside], self._shared[inside]
        velocity = self._velocity[inside]
        if not self._alike:
            torch.sub(self._start[inside], flat, out=flat)
        if self._momentum:  # 0 times what has diverged is no number
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
