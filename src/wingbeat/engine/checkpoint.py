"""An optimizer's state in parts, one for each worker, made and loaded without communication.

A part says which elements of which parameters it has, so that a run with any number of workers
can take what it needs from all parts of an earlier run.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wingbeat.engine.engine import Engine
from wingbeat.engine.updates.stepper import State
from wingbeat.errors import UsageError
from wingbeat.types import Span

FORMAT = "wingbeat optimizer shard, version 1"
_FIELDS: dict[str, type] = {
    "rank": int,
    "world_size": int,
    "steps": int,
    "param_groups": list,
    "parameters": list,
    "shards": dict,
}

Part = dict[str, Any]


@dataclass
class _Held:
    """Elements of one parameter that this worker has the optimizer's state for.

    ``state[key]`` is that state, if the optimizer has updated the parameter yet; its tensors with
    a value for each element, those named by ``each``, are of ``key``'s shape.
    """

    param: torch.Tensor
    span: Span
    state: State
    key: torch.Tensor
    each: Callable[[str], bool]

    @property
    def values(self) -> dict[str, Any]:
        """The state, empty where there is none."""
        return self.state.get(self.key, {})


def export(engine: Engine) -> Part:
    """Return this worker's part of the optimizer's state; its tensors are the live ones.

    Raises:
        UsageError: the workers have no parts, because each has the whole.
    """
    shards = engine.update.shards
    if engine.world.size > 1 and shards is None:
        where = "the servers have" if engine.update.option else "every worker has"
        raise UsageError(
            f"optimizer.shard_state_dict(): {where} the whole state; save "
            "optimizer.state_dict() on rank 0, or distribute with DeAR(shard_optimizer=True)"
        )
    names = _names(engine)
    held = [h for h in _held(engine, engine.world.rank) if h.values]
    return {
        "format": FORMAT,
        "rank": engine.world.rank,
        "world_size": engine.world.size,
        "steps": 0 if shards is None else shards.steps,
        "param_groups": _packed_groups(engine),
        "parameters": _parameters(engine),
        "shards": {names[h.param]: _exported(h) for h in held},
    }


def load(engine: Engine, parts: list[Part], load_whole: Callable[[dict[str, Any]], None]) -> None:
    """Take this worker's state from all the parts of an earlier run.

    Args:
        engine: of any strategy and number of workers.
        parts: what `export` returned on each worker of that run, in any order.
        load_whole: the optimizer's own ``load_state_dict``.

    Raises:
        UsageError: the parts are not those of one moment of one run of this model.
    """
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
        engine.update.loaded()  # who has the state elsewhere takes it from the optimizer


# -- what this worker has ----------------------------------------------------------------


def _held(engine: Engine, rank: int) -> Iterator[_Held]:
    """Yield what this worker holds; of what all of them hold, only rank 0 counts."""
    state: State = engine.optimizer.__dict__["state"]
    inside: set[torch.Tensor] = set()
    shards = engine.update.shards
    if shards is not None:
        inside = {slot.param for slot in engine.slots}
        for piece in shards.pieces:
            each = functools.partial(shards.has_each, piece)
            yield _Held(piece.slot.param, piece.span, shards.state, piece.stand_in, each)
    outside = [p for p in engine.stepper.params() if p not in inside]
    each_of_all = _keys_of_each(state, outside)
    for param in outside if rank == 0 else ():
        yield _Held(param, Span(0, param.numel()), state, param, each_of_all.__contains__)


def _keys_of_each(state: State, params: Iterable[torch.Tensor]) -> set[str]:
    """Names of the state that has a value for each element, as all its shapes tell."""
    shaped: dict[str, bool] = {}
    for param in params:
        for key, value in state.get(param, {}).items():
            fits = isinstance(value, torch.Tensor) and value.shape == param.shape
            shaped[key] = shaped.get(key, True) and fits
    return {key for key, fits in shaped.items() if fits}


def _exported(held: _Held) -> dict[str, Any]:
    return {
        "start": held.span.start,
        "stop": held.span.stop,
        "each": {k: v.detach().reshape(-1) for k, v in held.values.items() if held.each(k)},
        "all": {k: v for k, v in held.values.items() if not held.each(k)},
    }


def _names(engine: Engine) -> dict[torch.Tensor, str]:
    # Not the model's own method, which would make gradients whole.
    return {param: name for name, param in torch.nn.Module.named_parameters(engine.model)}


def _parameters(engine: Engine) -> list[list[Any]]:
    names = _names(engine)
    return [
        [names[p], list(p.shape), str(p.dtype).removeprefix("torch.")]
        for p in engine.stepper.params()
    ]


def _packed_groups(engine: Engine) -> list[dict[str, Any]]:
    """The groups as in torch's state dict: settings, and numbers instead of parameters."""
    numbers = itertools.count()
    return [
        {**settings, "params": [next(numbers) for _ in group["params"]]}
        for settings, group in zip(
            engine.stepper.snapshot(), engine.optimizer.__dict__["param_groups"], strict=True
        )
    ]


# -- what the parts have -----------------------------------------------------------------


def _in_order(name: str, parts: list[Part]) -> list[dict[str, Any]]:
    shards = [part["shards"][name] for part in parts if name in part["shards"]]
    return sorted(shards, key=lambda shard: int(shard["start"]))


def _cut(shards: list[dict[str, Any]], held: _Held, saved_dtype: str) -> dict[str, Any]:
    """Put together the state of the elements in ``held.span``."""
    # Of whole parameters it may be lists of tensors, in which training goes on.
    state = {key: copy.deepcopy(value) for key, value in shards[0]["all"].items()}
    span, like = held.span, held.param
    for key in shards[0]["each"]:
        parts = []
        for shard in shards:
            first, last = max(span.start, shard["start"]), min(span.stop, shard["stop"])
            if first < last:
                parts.append(shard["each"][key][first - shard["start"] : last - shard["start"]])
        value = torch.cat(parts).to(like.device).reshape(held.key.shape)
        # State of the parameter's own dtype follows it to another precision, as in torch.
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
        well_formed = isinstance(part, dict) and part.get("format") == FORMAT
        if not well_formed or any(type(part.get(k)) is not kind for k, kind in _FIELDS.items()):
            raise UsageError(
                f"load_shards(parts): parts[{position}] was not made by "
                "optimizer.shard_state_dict()"
            )
    _check_complete(parts)
    _check_fits(parts, engine)
    known = {name: list(shape) for name, shape, _ in parts[0]["parameters"]}
    for part in parts:
        for name in part["shards"]:
            if name not in known:
                raise UsageError(
                    f"load_shards(parts): rank {part['rank']}'s part has parameter {name!r}, "
                    "which its own list does not name; save it anew"
                )
    for name, shape in known.items():
        _check_tiled(name, torch.Size(shape).numel(), parts)


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


def _check_fits(parts: list[Part], engine: Engine) -> None:
    mine = [entry[:2] for entry in _parameters(engine)]
    sizes = [len(group["params"]) for group in engine.optimizer.__dict__["param_groups"]]
    for part in parts:
        try:
            theirs = [[name, [int(n) for n in shape]] for name, shape, _ in part["parameters"]]
            their_sizes = [len(group["params"]) for group in part["param_groups"]]
        except (KeyError, TypeError, ValueError):
            theirs, their_sizes = [], []
        for a, b in itertools.zip_longest(mine, theirs):
            if a != b:
                raise UsageError(
                    f"load_shards(parts): this optimizer has {_shown(a)} where rank "
                    f"{part['rank']}'s part has {_shown(b)}; load parts of the same model and "
                    "the same order of parameters"
                )
        if sizes != their_sizes:
            raise UsageError(
                f"load_shards(parts): this optimizer has param groups of {sizes} parameters, "
                f"rank {part['rank']}'s part of {their_sizes}; make the same groups"
            )


def _shown(entry: Any) -> str:
    return "no more parameters" if entry is None else f"parameter {entry[0]!r} {tuple(entry[1])}"


def _check_tiled(name: str, numel: int, parts: list[Part]) -> None:
    """Make sure that the parts have each element of a parameter once, or none of them."""
    try:
        shards = _in_order(name, parts)
        keys = [(list(shard["each"]), list(shard["all"])) for shard in shards]
        wrong = any(
            not isinstance(value, torch.Tensor) or value.shape != (shard["stop"] - shard["start"],)
            for shard in shards
            for value in shard["each"].values()
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        wrong = True
    if wrong or any(other != keys[0] for other in keys):
        raise UsageError(
            f"load_shards(parts): the state of parameter {name!r} is damaged, or of different "
            "kinds in different parts; save it anew"
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
