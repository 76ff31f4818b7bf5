"""From the marks of iterations to a profile's layers. No torch, no clock.

An iteration begins after one optimizer step and ends after the next. Its marks divide it without
gaps, so the times of all layers add up to it:

- `(optimizer)`: from the end of backward to the end of the step, with clipping.
- `(data)`: from then to the start of forward.
- A layer's forward: until its module returns, since the module before it did. So what runs between
  modules belongs to the next one.
- `(loss)`: from the last module to the first gradient. With several backward passes for each step,
  all passes but the last as well: gradients are complete in the last.
- A layer's backward: from the gradient of its output until that of another layer's output.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wingbeat.errors import UsageError
from wingbeat.profiling.profile import Parameter, ProfiledLayer

START, FORWARD, LAYER = "start", "forward", "layer"
BACKWARD, OUTPUT, GRADIENT, BACKWARD_END = "backward", "output", "gradient", "backward end"
STEP, STEP_END = "step", "step end"

OPTIMIZER, DATA, LOSS = "(optimizer)", "(data)", "(loss)"

APART = 0.1
"""Share of a module's backward between two of its gradients that are ready at different times."""


class Call(NamedTuple):
    """A call of a module that calls no other: its name, and which of its calls in a forward."""

    module: str
    number: int


class Mark(NamedTuple):
    """What happened, and when in milliseconds; ``name`` is a parameter's, ``call`` a module's."""

    kind: str
    ms: float
    call: Call | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter to exchange: the modules that hold it, its name in the first, and its shape."""

    modules: tuple[str, ...]
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of the model.

    Attributes:
        parameters: by full name, those that require gradients.
        kinds: the kind of each module.
        composite: modules whose gradients may be ready at different times, because their code is
            not one operation of torch.
    """

    parameters: Mapping[str, Named]
    kinds: Mapping[str, str]
    composite: frozenset[str] = frozenset()


Parts = defaultdict[tuple[str | Call | None, str], float]
"""Milliseconds. Keys are `OPTIMIZER`, `DATA`, `LOSS`, a call, or None, and a second value:
``"forward"``, ``"backward"``, the gradient until which it took, or ``""`` for the rest."""


@dataclass(slots=True)
class Timed:
    """One iteration: milliseconds by part, and the order of its calls and gradients.

    Attributes:
        calls: in the order of the first forward.
        gradients: in the order in which they are ready, in the last backward, with the call during
            whose backward that was; None is the loss.
        early: parameters whose gradients were complete before the last backward.
        passes: number of backward passes.
        batch: number of samples.
        parts: the time, without gaps.
    """

    calls: list[Call] = field(default_factory=list)
    gradients: list[tuple[Call | None, str]] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    passes: int = 0
    batch: int = 0
    parts: Parts = field(default_factory=lambda: defaultdict(float))

    @property
    def structure(self) -> tuple[object, ...]:
        """What has to be equal in iterations that are averaged."""
        early = tuple(sorted(self.early))
        return tuple(self.calls), tuple(self.gradients), early, self.passes, self.batch

    @property
    def total_ms(self) -> float:
        """Milliseconds of the iteration."""
        return math.fsum(self.parts.values())


def timed(marks: Sequence[Mark], batch: int) -> Timed:
    """Divide an iteration among its parts; ``batch`` counts its samples."""
    last = max(i for i, mark in enumerate(marks) if mark.kind == BACKWARD)
    begun = next(i for i, mark in enumerate(marks) if mark.kind in (FORWARD, BACKWARD))
    done = Timed(batch=batch)
    parts = done.parts
    carried, current, known = 0.0, None, set[Call]()
    for i, (before, mark) in enumerate(itertools.pairwise(marks), 1):
        spent = mark.ms - before.ms
        done.passes += mark.kind == BACKWARD
        if i <= begun:
            parts[OPTIMIZER if mark.kind == STEP_END else DATA, "forward"] += spent
        elif not done.passes:
            carried += spent
            if mark.kind == LAYER and mark.call is not None:
                parts[mark.call, "forward"] += carried
                carried = 0.0
                done.calls.append(mark.call)
                known.add(mark.call)
        elif i <= last:
            parts[LOSS, "forward"] += spent
            if mark.kind == GRADIENT:
                done.early.append(mark.name)
        elif mark.kind in (STEP, STEP_END):
            parts[OPTIMIZER, "forward"] += spent
        else:
            parts[current, mark.name] += spent
            if mark.kind == GRADIENT:
                done.gradients.append((current, mark.name))
            elif mark.kind == OUTPUT:
                current = mark.call if mark.call in known else None
    parts[LOSS, "forward"] += carried
    parts[LOSS, "backward"] = parts.pop((None, ""), 0.0)
    late = {name for _, name in done.gradients}
    done.early = [name for name in dict.fromkeys(done.early) if name not in late]
    return done


def typical(iterations: Sequence[Timed]) -> Timed:
    """Return the medians of the iterations with the most common order of calls and gradients.

    Raises:
        UsageError: not more than half of the iterations have the same order.
    """
    groups: dict[object, list[Timed]] = {}
    for each in iterations:
        groups.setdefault(each.structure, []).append(each)
    most = max(groups.values(), key=len)
    if 2 * len(most) <= len(iterations):
        raise UsageError(
            f"only {len(most)} of {len(iterations)} measured iterations are alike "
            f"({_difference(iterations)}); profile a script whose every step runs the same "
            "modules on batches of one size"
        )
    first = most[0]
    keys = dict.fromkeys(key for each in most for key in each.parts)
    parts = {key: statistics.median(each.parts[key] for each in most) for key in keys}
    return replace(first, parts=defaultdict(float, parts))


def _difference(iterations: Sequence[Timed]) -> str:
    """Describe how the first two structures differ."""
    first = iterations[0]
    other = next(each for each in iterations if each.structure != first.structure)
    for what, one, two in (
        ("samples", first.batch, other.batch),
        ("backward passes", first.passes, other.passes),
    ):
        if one != two:
            return f"one has {one} {what}, another {two}"
    apart = sorted({c.module for c in set(first.calls) ^ set(other.calls)})
    if apart:
        return f"not all run module {apart[0]!r}"
    return "modules run, or gradients are ready, in different orders"


def layers_of(iteration: Timed, model: Description) -> tuple[ProfiledLayer, ...]:
    """Return the layers in the order of forward; backward visits them from the last to the first.

    A parameter stands where its gradient is ready: with the first call of its module in the usual
    case, also if the module is called again or shares it. One that another module uses directly is
    a layer before or after it. One without a gradient is ready at the end of backward.
    """
    parts, names = iteration.parts, _Unique()
    having = {name for _, name in iteration.gradients}
    unready = [n for n in model.parameters if n not in having and n not in set(iteration.early)]

    def whole(name: str, kind: str, forward: float, backward: float) -> Iterator[ProfiledLayer]:
        if forward > 0 or backward > 0:
            yield ProfiledLayer(names(name), kind, (), forward, backward)

    def bare(parameters: Iterable[str]) -> Iterator[ProfiledLayer]:
        for module, run in _by_module(parameters, model):
            yield _layer(names, model, module, run, 0.0, 0.0)

    found = [*whole(OPTIMIZER, "optimizer", parts[OPTIMIZER, "forward"], 0.0)]
    found += whole(DATA, "data", parts[DATA, "forward"], 0.0)
    found += bare(unready)
    for call in iteration.calls:
        found += _layers_of_call(iteration, call, model, names)
    # Gradients that are ready while the loss runs backward.
    spent = [(name, parts[None, name]) for at, name in iteration.gradients if at is None]
    for name, ms in reversed(spent):
        found.append(_layer(names, model, model.parameters[name].modules[0], [name], 0.0, ms))
    kind = "loss" if iteration.passes == 1 else "accumulation"
    found += whole(LOSS, kind, parts[LOSS, "forward"], parts[LOSS, "backward"])
    found += bare(iteration.early)
    return tuple(found)


@dataclass(slots=True)
class _Run:
    """Gradients of one module that are ready one after the other, and the time until the last."""

    module: str
    parameters: list[str]
    ms: float


def _layers_of_call(
    iteration: Timed, call: Call, model: Description, names: _Unique
) -> list[ProfiledLayer]:
    """Return the layer of a call, and those of others' parameters with gradients meanwhile."""
    parts = iteration.parts
    runs = _runs(iteration, call, model)
    own = [run for run in runs if run.module == call.module]
    if not own:
        own = [_Run(call.module, [], 0.0)]
        runs += own
    whole = math.fsum(run.ms for run in own)
    shares = {id(run): run.ms / whole if whole > 0 else 1 / len(own) for run in own}
    runs[-1].ms += parts[call, ""]
    return [
        _layer(
            names,
            model,
            run.module,
            run.parameters,
            parts[call, "forward"] * shares.get(id(run), 0.0),
            run.ms,
        )
        for run in reversed(runs)
    ]


def _runs(iteration: Timed, call: Call, model: Description) -> list[_Run]:
    """Return the gradients that are ready during the backward of a call, in that order."""
    parts = iteration.parts
    ready = [name for at, name in iteration.gradients if at == call]
    total = parts[call, ""] + math.fsum(parts[call, name] for name in ready)
    runs: list[_Run] = []
    for name in ready:
        holders, ms = model.parameters[name].modules, parts[call, name]
        module = call.module if call.module in holders else holders[0]
        alone = module in model.composite and ms > APART * total
        if runs and runs[-1].module == module and not alone:
            runs[-1].parameters.append(name)
            runs[-1].ms += ms
        else:
            runs.append(_Run(module, [name], ms))
    return runs


def _layer(
    names: _Unique,
    model: Description,
    module: str,
    parameters: Sequence[str],
    forward_ms: float,
    backward_ms: float,
) -> ProfiledLayer:
    held = (model.parameters[name] for name in reversed(parameters))
    return ProfiledLayer(
        names(module),
        model.kinds[module],
        tuple(Parameter(each.name, each.shape) for each in held),
        forward_ms,
        backward_ms,
    )


def _by_module(parameters: Iterable[str], model: Description) -> Iterator[tuple[str, list[str]]]:
    key = lambda name: model.parameters[name].modules[0]  # noqa: E731
    for module, run in itertools.groupby(parameters, key):
        yield module, list(run)


class _Unique:
    """Makes names of layers unique as attributes, in which dots are underscores."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def __call__(self, name: str) -> str:
        key = name.replace(".", "_")
        self._seen[key] += 1
        if self._seen[key] == 1:
            return name
        return self(f"{name}#{self._seen[key]}")
