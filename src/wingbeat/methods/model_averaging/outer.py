"""The outer optimizer of DiLoCo: its gradient is the average change of the workers' models."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from wingbeat.codecs.feedback import check_tensors
from wingbeat.engine.updates.trials import Division, prove_elementwise
from wingbeat.engine.updates.update import (
    LOADED,
    SHARED,
    START,
    UNMERGED,
    VELOCITY,
    Closure,
    Host,
    Training,
)
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.flat import FlatModel
from wingbeat.methods.model_averaging.local import Averager, LocalUpdate, Tensors
from wingbeat.methods.model_averaging.rules import Unmerged
from wingbeat.schedules.local import Local
from wingbeat.schema import excerpt
from wingbeat.types import Span

_FIRST_SHARED = "first shared model"  # key of a checksum of each worker's first shared model

OPTION = "DiLoCo(outer_optimizer=...)"

_CHOSEN, _NUMBERS, _MADE = "outer.", "outer.numbers", "steps made"
"""In a checkpoint: the prefix of state per element, the rest of the state, and in it a count."""

_DIVISION = Division(
    OPTION,
    "fragments and ranks",
    "use one that updates each element by itself, such as torch.optim.SGD or Adam",
)


# -- the outer step -----------------------------------------------------------------------


class OuterOptimizer(Protocol):
    """Makes outer steps on spans of the shared model, each of one fragment or more."""

    def kinds(self) -> Tensors:
        """Return its tensors as long as the shared model, not copied, by their checkpoint names."""

    def numbers(self) -> dict[str, list[float]]:
        """Return the rest of its state, of each fragment; empty if there is none."""

    def step(self, first: int, last: int, gradient: torch.Tensor) -> None:
        """Make a step on fragments ``first`` to ``last - 1``; may overwrite their gradient."""

    def restore(self, numbers: Mapping[str, Sequence[float]] | None = None) -> None:
        """Continue from `kinds`, which have been replaced, and these `numbers`, if any."""


class Nesterov:
    """SGD with Nesterov momentum, as ``torch.optim.SGD(nesterov=True)``, in two passes."""

    def __init__(self, model: FlatModel, lr: float, momentum: float) -> None:
        self._part, self._lr, self._momentum = model.part, lr, momentum
        self._shared = model.copies[0]
        self._velocity = model.copies[1] if momentum else torch.zeros_like(self._shared)

    def kinds(self) -> Tensors:
        """Return the velocity."""
        return {VELOCITY: self._velocity}

    def numbers(self) -> dict[str, list[float]]:
        """Return nothing."""
        return {}

    def step(self, first: int, last: int, gradient: torch.Tensor) -> None:
        """Make a step."""
        inside = _slice(self._part(first, last))
        if self._momentum:  # 0 times infinity is not a number
            velocity = self._velocity[inside].mul_(self._momentum).add_(gradient)
            gradient.add_(velocity, alpha=self._momentum)
        self._shared[inside].sub_(gradient, alpha=self._lr)

    def restore(self, numbers: Mapping[str, Sequence[float]] | None = None) -> None:
        """Do nothing: the velocity is all of the state."""


class ChosenOptimizer:
    """The user's outer optimizer, over one flat parameter for each fragment.

    Its state per element lies in `FlatModel.copies`, and its numbers, such as a step counter, in
    `FlatModel.extra`: so synchronization averages both, and a returned worker copies both.

    Args:
        make: makes it of a list of parameters.
        sizes: elements of each fragment on this rank.
        dtype: of the shared model.

    Attributes:
        copies, extra: number of copies and of further elements that the flat model needs.

    Raises:
        UsageError: ``make`` returns no optimizer of these parameters, or one that does not update
            each element by itself.
    """

    def __init__(
        self,
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        zero = torch.zeros((), dtype=dtype, device="cpu")
        # Without memory, until they are parts of the flat model.
        self._params = [torch.nn.Parameter(zero.expand(size)) for size in sizes]
        self._optimizer = optimizer = make(list(self._params))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"{OPTION}: it returned {type(optimizer).__name__}; return a torch.optim.Optimizer"
            )
        given = [param for group in optimizer.param_groups for param in group["params"]]
        if {*map(id, given)} != {*map(id, self._params)}:
            raise UsageError(
                f"{OPTION}: the optimizer has {len(given)} parameters and was to have the "
                f"{len(self._params)} that were passed; return an optimizer of all of them"
            )
        each = prove_elementwise(optimizer, type(optimizer).step, _DIVISION)
        self._elements = sorted(key for key, whole in each.items() if whole)
        self._rest = sorted(key for key, whole in each.items() if not whole)
        self.copies = len(self._elements)
        self.extra = (1 + len(self._rest)) * len(sizes)

    def describe(self) -> str:
        """Return its class and settings, to compare between workers."""
        groups = [
            sorted((key, repr(value)) for key, value in group.items() if key != "params")
            for group in self._optimizer.param_groups
        ]
        return f"{type(self._optimizer).__qualname__} {groups}"

    def bind(self, model: FlatModel) -> None:
        """Let parameters and state be parts of the flat model."""
        self._spans = model.spans
        self._copies = dict(zip(self._elements, model.copies[1:], strict=False))
        self._table = model.extra.view(1 + len(self._rest), len(self._spans))
        for param, span in zip(self._params, self._spans, strict=True):
            param.data = model.copies[0][_slice(span)]
        state = self._optimizer.state
        self._first = [copy.deepcopy(dict(state.get(param, {}))) for param in self._params]
        for number in range(len(self._params)):
            self._collect(number)

    def kinds(self) -> Tensors:
        """Return the state per element."""
        return {_CHOSEN + key: flat for key, flat in self._copies.items()}

    def numbers(self) -> dict[str, list[float]]:
        """Return the rest of the state, and how many steps each fragment has made."""
        return dict(zip([_MADE, *self._rest], self._table.tolist(), strict=True))

    def step(self, first: int, last: int, gradient: torch.Tensor) -> None:
        """Make a step of the user's optimizer."""
        start = self._spans[first].start
        chosen = range(first, last)
        for number in chosen:
            span = self._spans[number]
            self._params[number].grad = gradient[span.start - start : span.stop - start]
        self._optimizer.step()
        for number in chosen:
            self._params[number].grad = None
            self._table[0, number] += 1
            self._collect(number)

    def restore(self, numbers: Mapping[str, Sequence[float]] | None = None) -> None:
        """Continue from the state per element, and from these numbers or those of the model."""
        if numbers is not None:
            for row, key in zip(self._table, [_MADE, *self._rest], strict=True):
                values = numbers.get(key, [0.0])
                # Another number of fragments: they have made as many steps, as far as is known.
                whole = values if len(values) == len(row) else [values[0]] * len(row)
                row.copy_(torch.tensor(whole, device="cpu"))
        for number in range(len(self._params)):
            self._restore(number)

    def _collect(self, number: int) -> None:
        """Move state that the optimizer has made into the flat model."""
        state = self._optimizer.state.get(self._params[number], {})
        inside = _slice(self._spans[number])
        for key, flat in self._copies.items():
            value, view = state.get(key), flat[inside]
            if value is not None and value.data_ptr() != view.data_ptr():
                state[key] = view.copy_(value)
        for row, key in enumerate(self._rest, start=1):
            value = state.get(key)
            try:
                self._table[row, number] = 0.0 if value is None else float(value)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"{OPTION}: the state {key!r} of {type(self._optimizer).__name__} is "
                    f"{value!r:.40}, which cannot be averaged or saved; use an optimizer whose "
                    "state is one number per element, or one number"
                ) from None

    def _restore(self, number: int) -> None:
        param, inside = self._params[number], _slice(self._spans[number])
        state = self._optimizer.state
        if self._table[0, number] <= 0:  # it has made no step
            state.pop(param, None)
            if self._first[number]:
                state[param] = copy.deepcopy(self._first[number])
            self._collect(number)
            return
        if set(self._rest) | set(self._copies) != set(state.get(param, ())):
            kept, before = param.detach().clone(), self._table[:, number].clone()
            elements = [flat[inside].clone() for flat in self._copies.values()]
            param.grad = torch.zeros_like(param)
            self._optimizer.step()  # which creates the state
            param.grad = None
            param.data.copy_(kept)
            for flat, value in zip(self._copies.values(), elements, strict=True):
                flat[inside] = value
            self._table[:, number] = before
        for key, flat in self._copies.items():
            if state[param].get(key) is not None:
                state[param][key] = flat[inside]
        for row, key in enumerate(self._rest, start=1):
            value, number_now = state[param].get(key), float(self._table[row, number])
            if isinstance(value, torch.Tensor):
                value.fill_(number_now)
            elif value is not None:
                state[param][key] = type(value)(number_now)


# -- local and outer steps ----------------------------------------------------------------


class OuterUpdate(LocalUpdate):
    """Runs local steps, and outer steps on their average.

    DiLoCo (Douillard et al., 2023), Algorithm 1. ``g`` is the mean over workers of the shared model
    minus each worker's model, and the outer optimizer's gradient. By default ``m = momentum * m +
    g``, and ``lr * (g + momentum * m)`` is subtracted from the shared model, as in
    ``torch.optim.SGD(nesterov=True)``. All workers continue from the result.

    With a delay (Streaming DiLoCo, Douillard et al., 2025, section 2.2) a worker continues from the
    shared model plus all its steps since it sent: no step is lost, no parameter needs tuning, and
    workers differ only by the steps of the delay. With ``alpha``, as in that paper and in torchft,
    it continues from ``alpha`` of its own parameters and ``1 - alpha`` of the shared model.

    In groups of some workers, shared models differ. Then models are averaged, and ``g`` is a
    worker's own shared model minus that mean, so shared models converge too. With one group of all
    workers both definitions of ``g`` agree.

    If parameters are narrower than the shared model (bf16), changes are measured from the model
    from which the worker started, not from the rounded shared model.

    If all workers share one model (``shared``), an excluded worker has missed outer steps and may
    be at another fragment. Instead of its next average it copies a peer's state, like a restarted
    worker.

    With ``unmerged``, workers have weights in the average by what it has counted.
    """

    def __init__(
        self,
        training: Training,
        model: FlatModel,
        averager: Averager,
        schedule: Local,
        names: Sequence[str],
        optimizer: OuterOptimizer,
        *,
        shared: bool = True,
        alpha: float | None = None,
        unmerged: Unmerged | None = None,
    ) -> None:
        super().__init__(training, model, averager, schedule)
        self._names, self._outer = list(names), optimizer
        self._one_model, self._alpha, self._unmerged = shared, alpha, unmerged
        self._keeps_sent = self._keeps_sent and alpha is None
        self._shared = model.copies[0]
        self._start = model.copies[-1] if model.narrow else self._shared
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
        """Always true: the shared model and the outer optimizer's state are kept."""
        return True

    def tensors(self) -> dict[str, Any]:
        """Return copies of the outer optimizer's state by kind, tensors by parameter name."""
        self._catch_up()
        found: dict[str, Any] = {
            kind: self._named(flat.clone()) for kind, flat in self._kinds().items()
        }
        if numbers := self._outer.numbers():
            found[_NUMBERS] = numbers
        if self._unmerged is not None:
            found[UNMERGED] = [list(counted) for counted in self._unmerged.counted]
        return found

    def check_averages(self, averages: Mapping[str, Any]) -> None:
        """Raise a `UsageError` unless they are of this model and kind of outer optimizer."""
        mine = self._kinds()
        known = (SHARED, VELOCITY, START, *mine)
        given = {key for key in averages if key in known or key.startswith(_CHOSEN)} - {_NUMBERS}
        if given:
            missing = sorted((mine.keys() ^ given) - {START})
            if missing:
                raise UsageError(
                    f"{LOADED}: {sorted(given)[0]!r} without {missing[0]!r}, or of another outer "
                    f"optimizer, with {', '.join(sorted(given))} in place of "
                    f"{', '.join(sorted(mine))}; save it again, or load it with the same one"
                )
        parts = self._model.split(self._shared)
        shapes = {name: part.shape for name, part in zip(self._names, parts, strict=True)}
        for kind in sorted(given):
            _check_names(kind, averages[kind], shapes)
            check_tensors(averages[kind], shapes, f"{LOADED}: {kind!r}")
        _check_counts(averages, self._outer.numbers() if given else {})

    def resume(self, averages: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, or from the first step if it has no shared model."""
        super().resume(averages)
        self._given = self._known = SHARED in averages
        for kind, flat in self._kinds().items():
            if kind not in (SHARED, START):
                flat.zero_()
            parts = self._named(flat)
            # A checkpoint without START has no rounding error.
            default = averages.get(SHARED, {}) if kind == START else {}
            for name, value in averages.get(kind, default).items():
                parts[name].copy_(value)
        self._outer.restore(averages.get(_NUMBERS, {}))
        if self._unmerged is not None:
            self._unmerged.load(averages.get(UNMERGED, []))

    def handed(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return the outer optimizer's tensors and its progress; see `LocalUpdate.handed`.

        Workers with the same shared model must make the same outer steps. So a worker that copies
        this state takes part in the current average.
        """
        turn = self._under_way
        numbers = [self._schedule.made] if turn is None else [self._begun, *turn]
        return [*self._kinds().values(), self._model.extra], numbers

    def take_over(self, numbers: Sequence[int], moved: torch.Tensor | None = None) -> None:
        """Continue from another worker's state, and make its current outer step.

        With ``moved``, a result of `moves`, this worker's own steps are kept, and merged then.
        Raises ValueError if the numbers do not belong to this training.
        """
        steps, *turn = numbers
        super().take_over([steps])
        self._outer.restore()
        self._given = self._known = True
        if moved is not None:
            self._rebase(moved)
        elif self._unmerged is not None:
            self._unmerged.reset()
        if turn and self._one_model:
            first, last = turn
            if not 0 <= first < last <= len(self._model.spans):
                raise ValueError(f"fragments {first} to {last} of {len(self._model.spans)}")
            self._begin(first, last)
            self._adopt()

    def moves(self) -> torch.Tensor:
        """Return what this worker's parameters have moved since they were merged, negative."""
        self._model.read(0, len(self._model.spans))
        return self._start - self._trained

    def _rebase(self, moved: torch.Tensor) -> None:
        """Continue from the shared model plus this worker's own steps."""
        spans = len(self._model.spans)
        torch.sub(self._shared, moved, out=self._trained)
        self._model.write(0, spans)
        if self._model.narrow:
            self._model.read(0, spans)
            torch.add(self._trained, moved, out=self._start)

    def _kinds(self) -> Tensors:
        kinds = {SHARED: self._shared, **self._outer.kinds()}
        return kinds | ({START: self._start} if self._model.narrow else {})

    def _named(self, flat: torch.Tensor) -> Tensors:
        return dict(zip(self._names, self._model.split(flat), strict=True))

    # -- weights ------------------------------------------------------------------------------

    def count_tokens(self, tokens: int) -> None:
        """Count tokens that this worker has processed; a `UsageError` for no whole number."""
        if self._unmerged is None:
            super().count_tokens(tokens)
            return
        if type(tokens) is not int or tokens < 0:
            raise UsageError(
                f"count_tokens({tokens!r:.40}): allowed are whole numbers from 0 on, those of "
                "tokens or samples of this rank's batch"
            )
        self._unmerged.count(tokens)

    def _made_step(self) -> None:
        if self._unmerged is not None:
            self._unmerged.step()

    def _weight(self, first: int, last: int) -> float | None:
        """Return this worker's weight in the average of some fragments; that of a whole replica."""
        if self._unmerged is None:
            return None
        tokens, steps = self._unmerged.offer(first, last)
        if self._world.replica is not None:
            counted = torch.tensor([float(tokens)], dtype=torch.float64, device="cpu")
            tokens = int(self._world.replica.sum(counted))
        if steps and not tokens:
            raise UsageError(
                f"{self._world.me} has made {steps} steps since its last merge and counted no "
                "tokens, by which DiLoCo(weights=...) weights it: call wingbeat.count_tokens("
                "model, number) in each step, or leave weights out"
            )
        return self._unmerged.weight(tokens, steps)

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
        self._outer.restore()
        self._first_checksum = None  # all workers share the mean now
        if self._model.narrow:
            mean = self._trained.clone()
            self._model.read(0, len(self._model.spans))
            self._start.add_(self._trained).sub_(mean)

    def _offer(self, first: int, last: int) -> None:
        """Write this worker's change, or its model, to the flat model."""
        super()._offer(first, last)
        if self._one_model:
            inside = _slice(self._model.part(first, last))
            flat = self._model.flat[inside]
            torch.sub(self._start[inside], flat, out=flat)

    def _take(self, first: int, last: int) -> None:
        """Make the outer step, and continue from the shared model."""
        self._check_shared()
        inside = _slice(self._model.part(first, last))
        flat, shared = self._model.flat[inside], self._shared[inside]
        if not self._one_model:
            torch.sub(self._start[inside], flat, out=flat)
        self._outer.step(first, last, flat)
        if self._unmerged is not None:
            self._unmerged.merged()
        moved = None
        if self._alpha is not None:
            self._model.read(first, last)
            moved = (flat - shared).mul_(self._alpha)
            torch.add(shared, moved, out=flat)
        else:
            if self._sent is not None and self._model.narrow:
                self._model.read(first, last)
                moved = flat - self._sent
            flat.copy_(shared)
        super()._take(first, last)
        if self._model.narrow:
            self._model.read(first, last)
            self._start[inside] = flat if moved is None else flat - moved


def _slice(span: Span) -> slice:
    return slice(span.start, span.stop)


# -- checks of a checkpoint ---------------------------------------------------------------


def _check_names(kind: str, values: Any, shapes: Mapping[str, torch.Size]) -> None:
    if not isinstance(values, dict) or values.keys() != shapes.keys():
        others = sorted(set(values) ^ set(shapes), key=str) if isinstance(values, dict) else []
        raise UsageError(
            f"{LOADED}: {kind!r} is not of the trained parameters of this model"
            f"{f' ({excerpt(others[0])} is in one of them only)' if others else ''}; load a state "
            "of the same model"
        )


def _check_counts(averages: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Check the numbers of an outer optimizer, and what was counted since the last merge."""
    numbers, counted = averages.get(_NUMBERS, {}), averages.get(UNMERGED, [])
    if not isinstance(numbers, dict) or (mine and numbers.keys() != mine.keys()):
        raise UsageError(
            f"{LOADED}: {_NUMBERS!r} are not those of this outer optimizer; save it again"
        )
    for values in numbers.values():
        if not isinstance(values, list) or not values or not all(map(_is_real, values)):
            raise UsageError(f"{LOADED}: {_NUMBERS!r} has {values!r:.40}; save it again")
    whole = isinstance(counted, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
        for pair in counted
    )
    if not whole:
        raise UsageError(f"{LOADED}: {UNMERGED!r} is {counted!r:.40}; save it again")


def _is_real(value: Any) -> bool:
    return type(value) is float and value - value == 0
