"""What a run goes on with beside model and optimizer: residuals, and averages of models.

An optimizer's state dict has it under one key, of this worker: ``Residuals.state_dict()`` where a
wire keeps residuals, and under ``"averages"`` how many steps were made, by which turns to average
come, and the outer optimizer's tensors by parameter name. Where workers' models may differ, it has
under ``"saved"`` which rank has saved it, of how many, and whether they did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wingbeat.codecs.feedback import check_tensors
from wingbeat.engine.engine import Engine
from wingbeat.engine.updates.local import LocalUpdate
from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.updates.bounded import BoundedUpdate
from wingbeat.updates.outer import SHARED, START, VELOCITY, OuterUpdate

PARTS = "parts"
"""Where a state that was put together of all workers' has each one's residuals."""

AVERAGES = "averages"
"""Where it has what averages of models go on with."""

SAVED = "saved"
"""Where it has who has saved it, and whether models differed."""

FORMAT = "wingbeat averages, version 1"

_WHERE = "load_state_dict(): averages"


def export(engine: Engine) -> dict[str, Any]:
    """Return copies of all that there is; empty if nothing has to be kept."""
    state = dict(engine.compression.state_dict() or {})
    update = engine.update
    if isinstance(update, LocalUpdate) and update.keeps:
        state[AVERAGES] = {"format": FORMAT, "steps": update.steps, **update.tensors()}
    several = engine.world.size > 1
    if several and isinstance(update, (LocalUpdate, BoundedUpdate)) and update.is_own:
        state[SAVED] = [engine.world.rank, engine.world.size, update.differs]
    return state


def check(engine: Engine, state: Any) -> None:
    """Raise a `UsageError` unless ``state`` is of a run of this model, or None."""
    parts = _parts(state)
    if parts is None:
        engine.compression.check(_residuals(state))
    else:
        engine.compression.check_parts(parts, "load_state_dict")
    averages, update = _averages(state), engine.update
    if averages is None or not isinstance(update, LocalUpdate):
        return
    steps = averages.get("steps")
    if averages.get("format") != FORMAT or type(steps) is not int or steps < 0:
        raise UsageError(
            f"{_WHERE}: not made by state_dict() of this kind; expected {FORMAT!r} with a number "
            "of steps"
        )
    if isinstance(update, OuterUpdate):
        for kind in _kinds(averages):
            _check_names(kind, averages[kind], update.shapes)
            check_tensors(averages[kind], update.shapes, f"{_WHERE}: {kind!r}")


def load(engine: Engine, state: Any) -> None:
    """Go on with ``state``, which was checked; without anything if None. Log what it lacks."""
    _tell(engine, state)
    parts = _parts(state)
    if parts is None or engine.compression.residuals is None:
        engine.compression.load_state_dict(_residuals(state) if parts is None else None)
    else:
        engine.compression.load_parts(parts)
    update = engine.update
    if isinstance(update, LocalUpdate):
        averages = _averages(state) or {}
        tensors = {kind: averages[kind] for kind in _kinds(averages)}
        update.resume(averages.get("steps", 0), tensors)


def _tell(engine: Engine, state: Any) -> None:
    """Log in one line, on one rank, what training lacks that goes on from ``state``."""
    match state.get(SAVED) if isinstance(state, dict) else None:
        case [int(saver), int(size), bool(differed)]:
            pass
        case _:
            return
    update, world = engine.update, engine.world
    if isinstance(update, BoundedUpdate):
        if differed and world.rank == 0:
            log.warning(
                "load_state_dict(): this state was saved between two calls of model.flush(), with "
                "rounds of gradients under way, which are in no state: training goes on without "
                "them; call model.flush() on all ranks before you save"
            )
    elif isinstance(update, LocalUpdate) and world.size > 1 and world.rank == (saver + 1) % size:
        own = "its optimizer's own state"
        if differed:
            own += " and what its model had moved since wingbeat.consensus() are"
        else:
            own += " is"
        log.warning(
            "load_state_dict(): rank %d loads what rank %d has saved: %s lost; to go on as without "
            "a stop, save and load model and optimizer on every rank",
            world.rank, saver, own,
        )  # fmt: skip


def together(states: Sequence[Any]) -> dict[str, Any] | None:
    """Return one state of what `export` has returned on all workers, for any number of them."""
    parts = [part for part in map(_residuals, states) if part]
    averages = _averages(states[0])
    found = {PARTS: parts} if parts else {}
    return found | ({AVERAGES: averages} if averages is not None else {}) or None


def _residuals(state: Any) -> Any:
    """Return what is kept of residuals; None if there is nothing else than averages."""
    if not isinstance(state, dict):
        return state
    return {key: value for key, value in state.items() if key not in (AVERAGES, SAVED)} or None


def _parts(state: Any) -> Any:
    """Return all workers' residuals; None if there are this worker's alone, or none."""
    return state.get(PARTS) if isinstance(state, dict) else None


def _averages(state: Any) -> dict[str, Any] | None:
    averages = state.get(AVERAGES) if isinstance(state, dict) else None
    if averages is not None and not isinstance(averages, dict):
        raise UsageError(f"{_WHERE}: {type(averages).__name__}; expected a dict: save it anew")
    return averages


def _kinds(averages: Mapping[str, Any]) -> list[str]:
    """Return which tensors there are; a run without an outer optimizer has none."""
    found = [kind for kind in (SHARED, VELOCITY, START) if kind in averages]
    if found and not {SHARED, VELOCITY} <= set(found):
        raise UsageError(
            f"{_WHERE}: {found[0]!r} without {SHARED!r} and {VELOCITY!r}; save it anew"
        )
    return found


def _check_names(kind: str, values: Any, shapes: Mapping[str, torch.Size]) -> None:
    if not isinstance(values, dict) or values.keys() != shapes.keys():
        others = sorted(set(values) ^ set(shapes), key=str) if isinstance(values, dict) else []
        raise UsageError(
            f"{_WHERE}: {kind!r} is not of the trained parameters of this model"
            f"{f' ({others[0]!r} is in one of them only)' if others else ''}; load a state of the "
            "same model"
        )
