"""Optimizer state in shards, one for each worker, and extra training state.

Shards are exported and loaded without communication. A shard lists the elements of parameters that
it contains, so a run with any number of workers can load all shards of an earlier run.

The extra state is one entry of an optimizer's state dict. It contains this worker's residuals, if
there are any; under ``"averages"`` the number of steps, on which model averages depend, and the
outer optimizer's tensors by parameter name; and, where models may differ, under ``"saved"`` the
rank that saved it, the number of ranks, and whether their models differed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from wingbeat.codecs.feedback import MOST_STEPS, MOST_WORKERS, is_plain
from wingbeat.engine.engine import Engine
from wingbeat.engine.gradients.bucket import dtype_name
from wingbeat.engine.updates.stepper import State
from wingbeat.engine.updates.update import LOADED
from wingbeat.errors import UsageError
from wingbeat.schema import excerpt
from wingbeat.types import Span

SHARD_FORMAT = "wingbeat optimizer shard, version 1"
_FIELDS: dict[str, type] = {
    "rank": int,
    "world_size": int,
    "steps": int,
    "param_groups": list,
    "parameters": list,
    "shards": dict,
}

Part = dict[str, Any]


class _Held(NamedTuple):
    """Elements of one parameter whose optimizer state this worker has, under ``key``.

    State whose name is in ``each`` has one value per element, and the shape of ``key``.
    """

    param: torch.Tensor
    span: Span
    state: State
    key: torch.Tensor
    each: set[str]


def export_shard(engine: Engine) -> Part:
    """Return this worker's shard, without copies; raise a `UsageError` if there is none."""
    shards = engine.update.shards
    if engine.world.size > 1 and shards is None:
        where = "the servers have" if engine.update.option else "every worker has"
        raise UsageError(
            f"optimizer.shard_state_dict(): {where} the whole state; save "
            "optimizer.state_dict() on rank 0, or distribute with DeAR(shard_optimizer=True)"
        )
    names, numbers, exported = _names(engine), itertools.count(), {}
    for held in _held(engine, engine.world.rank):
        values = held.state.get(held.key)
        if values:
            exported[names[held.param]] = {
                "start": held.span.start,
                "stop": held.span.stop,
                "each": {k: v.detach().reshape(-1) for k, v in values.items() if k in held.each},
                "all": {k: v for k, v in values.items() if k not in held.each},
            }
    groups = engine.optimizer.__dict__["param_groups"]
    return {
        "format": SHARD_FORMAT,
        "rank": engine.world.rank,
        "world_size": engine.world.size,
        "steps": 0 if shards is None else shards.steps,
        # As in torch's state dict, with numbers instead of parameters.
        "param_groups": [
            {**settings, "params": [next(numbers) for _ in group["params"]]}
            for settings, group in zip(engine.stepper.snapshot(), groups, strict=True)
        ],
        "parameters": _parameters(engine),
        "shards": exported,
    }


def load_shards(
    engine: Engine, parts: list[Part], load_whole: Callable[[dict[str, Any]], None]
) -> None:
    """Load this worker's state from all shards of an earlier run."""
    _check(parts, engine)
    load_whole({"state": {}, "param_groups": parts[0]["param_groups"]})
    if engine.update.shards is not None:
        engine.update.shards.steps = parts[0]["steps"]
    names = _names(engine)
    saved_dtypes = {name: dtype for name, _, dtype in parts[0]["parameters"]}
    for held in _held(engine, 0):
        name = names[held.param]
        shards = _in_order(name, parts)
        if shards:
            held.state[held.key] = _cut(shards, held, saved_dtypes[name])
    if engine.update.shards is None:
        engine.update.on_load_state_dict()  # servers copy the state from the optimizer


# -- this worker's shard ------------------------------------------------------------------


def _held(engine: Engine, rank: int) -> Iterator[_Held]:
    """Yield the state that this worker exports; rank 0 exports the state that all have."""
    state: State = engine.optimizer.__dict__["state"]
    shards = engine.update.shards
    for piece in [] if shards is None else shards.pieces:
        assert shards is not None
        found = shards.state.get(piece.stand_in, {})
        each = {key for key in found if shards.has_each(piece, key)}
        yield _Held(piece.slot.param, piece.span, shards.state, piece.stand_in, each)
    inside = set() if shards is None else {slot.param for slot in engine.slots}
    outside = [p for p in engine.stepper.params() if p not in inside]
    # State with one value per element has the shape of its parameter for all parameters.
    shaped: dict[str, bool] = {}
    for param in outside:
        for key, value in state.get(param, {}).items():
            fits = isinstance(value, torch.Tensor) and value.shape == param.shape
            shaped[key] = shaped.get(key, True) and fits
    for param in outside if rank == 0 else ():
        each = {key for key, fits in shaped.items() if fits}
        yield _Held(param, Span(0, param.numel()), state, param, each)


def _names(engine: Engine) -> dict[torch.Tensor, str]:
    # The model's own method would gather gradients.
    return {param: name for name, param in torch.nn.Module.named_parameters(engine.model)}


def _parameters(engine: Engine) -> list[list[Any]]:
    names = _names(engine)
    return [[names[p], list(p.shape), dtype_name(p.dtype)] for p in engine.stepper.params()]


# -- all shards of an earlier run ----------------------------------------------------------


def _in_order(name: str, parts: list[Part]) -> list[dict[str, Any]]:
    shards = [part["shards"][name] for part in parts if name in part["shards"]]
    return sorted(shards, key=lambda shard: int(shard["start"]))


def _cut(shards: list[dict[str, Any]], held: _Held, saved_dtype: str) -> dict[str, Any]:
    """Assemble the state of the elements in ``held.span``."""
    # Copied, because state of whole parameters may contain lists of tensors that training changes.
    state = {key: copy.deepcopy(value) for key, value in shards[0]["all"].items()}
    span, like = held.span, held.param
    for key in shards[0]["each"]:
        parts = []
        for shard in shards:
            first, last = max(span.start, shard["start"]), min(span.stop, shard["stop"])
            if first < last:
                parts.append(shard["each"][key][first - shard["start"] : last - shard["start"]])
        value = torch.cat(parts).to(like.device).reshape(held.key.shape)
        # As in torch, state of the parameter's dtype is converted with the parameter.
        follows = str(value.dtype) == f"torch.{saved_dtype}"
        state[key] = value.to(like.dtype) if follows else value
    return state


def _check(parts: list[Part], engine: Engine) -> None:
    if not isinstance(parts, list) or not parts:
        raise UsageError(
            f"load_shards({type(parts).__name__}): pass a list of what shard_state_dict() "
            "returned on every worker"
        )
    for position, part in enumerate(parts):
        well_formed = isinstance(part, dict) and part.get("format") == SHARD_FORMAT
        if not well_formed or not _has_fields(part):
            raise UsageError(
                f"load_shards(parts): parts[{position}] was not made by "
                "optimizer.shard_state_dict()"
            )
    _check_complete(parts)
    for part in parts:
        _check_fits(part, engine)
    known = {name: torch.Size(shape) for name, shape, _ in _parameters(engine)}
    for part in parts:
        unknown = next((name for name in part["shards"] if name not in known), None)
        if unknown is not None:
            raise UsageError(
                f"load_shards(parts): rank {part['rank']}'s part has parameter {excerpt(unknown)}, "
                "which its own list does not name; save it again"
            )
    for name, shape in known.items():
        _check_tiled(name, shape.numel(), parts)


def _has_fields(part: Part) -> bool:
    if any(type(part.get(key)) is not kind for key, kind in _FIELDS.items()):
        return False
    return 0 <= part["rank"] < part["world_size"] <= MOST_WORKERS and (_is_steps(part["steps"]))


def _check_complete(parts: list[Part]) -> None:
    first = parts[0]
    for part in parts:
        for key, what in (("world_size", "workers"), ("steps", "steps")):
            if part[key] != first[key]:
                raise UsageError(
                    f"load_shards(parts): rank {first['rank']}'s part is of a run after "
                    f"{first['steps']} steps with {first['world_size']} workers, rank "
                    f"{part['rank']}'s of one after {part['steps']} with {part['world_size']}; "
                    f"all parts must have the same number of {what}"
                )
    ranks = sorted(part["rank"] for part in parts)
    wanted = list(range(first["world_size"]))
    missing = [rank for rank in wanted if rank not in ranks]
    if missing:
        raise UsageError(
            f"load_shards(parts): the part of rank {missing[0]} is missing; a run with "
            f"{first['world_size']} workers has parts of ranks 0 to {first['world_size'] - 1}"
        )
    if ranks != wanted:
        twice = next(rank for rank in ranks if ranks.count(rank) > 1 or rank not in wanted)
        raise UsageError(
            f"load_shards(parts): rank {twice} occurs more often than a run with "
            f"{first['world_size']} workers has it; pass each worker's part once"
        )


def _check_fits(part: Part, engine: Engine) -> None:
    mine = [entry[:2] for entry in _parameters(engine)]
    sizes = [len(group["params"]) for group in engine.optimizer.__dict__["param_groups"]]
    try:
        theirs = [[name, list(shape)] for name, shape, _ in part["parameters"]]
        their_sizes = [len(group["params"]) for group in part["param_groups"]]
    except (KeyError, TypeError, ValueError):
        theirs, their_sizes = [], []
    for a, b in itertools.zip_longest(mine, theirs):
        if a != b:
            raise UsageError(
                f"load_shards(parts): this optimizer has {_shown(a)} where rank {part['rank']}'s "
                f"part has {_shown(b)}; load parts of the same model and the same order of "
                "parameters"
            )
    if sizes != their_sizes:
        raise UsageError(
            f"load_shards(parts): this optimizer has param groups of {sizes} parameters, "
            f"rank {part['rank']}'s part of {their_sizes}; make the same groups"
        )


def _shown(entry: Any) -> str:
    if entry is None:
        return "no more parameters"
    return f"parameter {excerpt(entry[0])} {excerpt(tuple(entry[1]))}"


def _check_tiled(name: str, numel: int, parts: list[Part]) -> None:
    """Check that the shards have each element of a parameter once, or none of them."""
    try:
        shards = _in_order(name, parts)
        keys = [(list(shard["each"]), list(shard["all"])) for shard in shards]
        wrong = any(
            not is_plain(value) or value.shape != (shard["stop"] - shard["start"],)
            for shard in shards
            for value in shard["each"].values()
        ) or any(
            type(shard[key]) is not kind
            for shard in shards
            for key, kind in (("start", int), ("stop", int), ("each", dict), ("all", dict))
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        wrong = True
    if wrong or any(other != keys[0] for other in keys):
        raise UsageError(
            f"load_shards(parts): the state of parameter {name!r} is damaged, or of different "
            "kinds in different parts; save it again"
        )
    end = 0
    for shard in [*shards, {"start": numel, "stop": numel}] if shards else []:
        start = shard["start"]
        if start != end:
            what = "in no part" if start > end else "in two parts"
            low, high = sorted((start, end))
            raise UsageError(
                f"load_shards(parts): elements {low} to {high - 1} of parameter {name!r} are "
                f"{what}; pass what shard_state_dict() returned at one moment of one run"
            )
        end = shard["stop"]


# -- the extra state -----------------------------------------------------------------------

PARTS = "parts"
"""The key of all workers' residuals in merged state."""

AVERAGES = "averages"
SAVED = "saved"

AVERAGES_FORMAT = "wingbeat averages, version 1"


def export_extra(engine: Engine) -> dict[str, Any]:
    """Return copies of the extra state; empty if there is none."""
    state = dict(engine.compression.state_dict() or {})
    update = engine.update
    if averages := update.averages():
        state[AVERAGES] = {"format": AVERAGES_FORMAT, **averages}
    if engine.world.size > 1 and update.is_own:
        state[SAVED] = [engine.world.rank, engine.world.size, update.differs]
    return state


def check_extra(engine: Engine, state: Any) -> None:
    """Raise a `UsageError` unless ``state`` is None or extra state of this model."""
    parts = _parts(state)
    if parts is None:
        engine.compression.check(_residuals(state))
    else:
        engine.compression.check_parts(parts, "load_state_dict")
    averages, update = _averages(state), engine.update
    if averages is None or not update.averaging:
        return
    steps = averages.get("steps")
    if averages.get("format") != AVERAGES_FORMAT or not _is_steps(steps):
        raise UsageError(
            f"{LOADED}: not made by state_dict() of this kind; expected {AVERAGES_FORMAT!r} with a "
            "number of steps"
        )
    update.check_averages(averages)


def _is_steps(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_STEPS


def load_extra(engine: Engine, state: Any) -> None:
    """Load extra state that was checked, and log what it lacks; None resets it."""
    _log_missing(engine, state)
    parts = _parts(state)
    if parts is None or engine.compression.residuals is None:
        engine.compression.load_state_dict(_residuals(state) if parts is None else None)
    else:
        engine.compression.load_parts(parts)
    update = engine.update
    if update.averaging:
        update.resume(_averages(state) or {})


def _log_missing(engine: Engine, state: Any) -> None:
    """Log once, on one rank, what ``state`` lacks."""
    match state.get(SAVED) if isinstance(state, dict) else None:
        case [int(saver), int(size), bool(differed)] if 0 <= saver < size:
            pass
        case _:
            return
    engine.update.log_lost(saver, size, differed)


def merge_extra(states: Sequence[Any]) -> dict[str, Any] | None:
    """Merge all workers' results of `export_extra`, for any number of workers."""
    parts = [part for part in map(_residuals, states) if part]
    averages = _averages(states[0])
    found = {PARTS: parts} if parts else {}
    return found | ({AVERAGES: averages} if averages is not None else {}) or None


def _residuals(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: value for key, value in state.items() if key not in (AVERAGES, SAVED)} or None


def _parts(state: Any) -> Any:
    """Return all workers' residuals, or None."""
    return state.get(PARTS) if isinstance(state, dict) else None


def _averages(state: Any) -> dict[str, Any] | None:
    averages = state.get(AVERAGES) if isinstance(state, dict) else None
    if averages is not None and not isinstance(averages, dict):
        raise UsageError(f"{LOADED}: {type(averages).__name__}; expected a dict: save it again")
    return averages
