"""What tuning has found, as a JSON file that people can read and the next run can use."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from wingbeat.errors import UsageError
from wingbeat.plans.planfile import TUNED
from wingbeat.plans.result import Result
from wingbeat.plans.search import Sample

_SEARCHES = ("bo", "random", "grid")
_MEASURED, _EXPECTED = "iterations_per_s", "expected_iterations_per_s"
_TINY, _HUGE = 1e-12, 1e12
_Kind = TypeVar("_Kind", dict[str, Any], list[Any])


@dataclass(frozen=True, slots=True)
class Saved:
    """A plan file's content: what was found, and for which model and cluster (``key``)."""

    result: Result
    key: dict[str, Any]

    @property
    def chosen_bytes(self) -> int:
        """The bucket size that was chosen, in bytes."""
        return self.result.chosen_bytes


def save(path: str | os.PathLike[str], result: Result, key: Mapping[str, Any]) -> None:
    """Write the file in one go: whoever looks sees the old one or the new one, never a part.

    Args:
        path: the file; its folder has to exist.
        result: what tuning has found.
        key: what tells this model on this cluster from others, as JSON knows it: a digest of
            names, shapes and dtypes of the parameters, the number of workers, of links...

    Raises:
        UsageError: the folder is missing or cannot be written.
    """
    TUNED.write(path, json.dumps(_to_json(result, key), indent=2) + "\n")


def load(path: str | os.PathLike[str]) -> Saved:
    """Read a file that `save` wrote, and check everything in it.

    Raises:
        UsageError: no such file or folder, a file of another version, or a damaged one.
    """
    return TUNED.read(path, _from_json)


# -- to JSON and back -----------------------------------------------------------------------


def _to_json(result: Result, key: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes stand twice: in MB for people, in bytes for the next run."""
    return {
        **TUNED.head(),
        "chosen_mb": _mb(result.chosen_bytes),
        "why": result.explain(),
        "search": result.search,
        "steps_per_trial": result.steps,
        "range_mb": [_mb(result.low_bytes), _mb(result.high_bytes)],
        "samples": [
            {
                "mb": _mb(sample.nbytes),
                _MEASURED: sample.throughput,
                _EXPECTED: expected,
            }
            for sample, expected in zip(result.samples, result.expected, strict=True)
        ],
        "decision_s": list(result.costs_s),
        "bytes": {
            "chosen": result.chosen_bytes,
            "range": [result.low_bytes, result.high_bytes],
            "samples": [sample.nbytes for sample in result.samples],
        },
        "key": dict(key),
    }


def _from_json(data: dict[str, Any]) -> Saved:
    sizes, trials = _get(data, "bytes", dict), _get(data, "samples", list)
    nbytes = [_whole(value, "bytes.samples") for value in _get(sizes, "samples", list)]
    limits = [_whole(value, "bytes.range") for value in _get(sizes, "range", list)]
    costs = [_number(value, "decision_s", zero=True) for value in _get(data, "decision_s", list)]
    if not trials or {len(nbytes), len(costs)} != {len(trials)}:
        raise UsageError("samples, bytes.samples and decision_s have to be equally long")
    if len(limits) != 2 or limits[0] > limits[1]:
        raise UsageError(f"bytes.range={limits!r} has to be the smallest and the largest size")
    chosen = _whole(sizes.get("chosen"), "bytes.chosen")
    if chosen not in nbytes:
        raise UsageError(f"bytes.chosen={chosen!r} is none of bytes.samples")
    if data.get("search") not in _SEARCHES:
        raise UsageError(f"search={data.get('search')!r}; allowed are {', '.join(_SEARCHES)}")
    result = Result(
        search=data["search"],
        low_bytes=limits[0],
        high_bytes=limits[1],
        steps=_whole(data.get("steps_per_trial"), "steps_per_trial"),
        samples=tuple(
            Sample(size, throughput)
            for size, throughput in zip(nbytes, _column(trials, _MEASURED), strict=True)
        ),
        expected=tuple(_column(trials, _EXPECTED)),
        chosen_bytes=chosen,
        costs_s=tuple(costs),
    )
    return Saved(result, _get(data, "key", dict))


def _mb(nbytes: int) -> float:
    return round(nbytes / 2**20, 4)


def _get(data: dict[str, Any], key: str, kind: type[_Kind]) -> _Kind:
    value = data.get(key)
    if not isinstance(value, kind):
        raise UsageError(f"{key!r} is missing or no {kind.__name__}")
    return value


def _column(trials: list[Any], key: str) -> list[float]:
    """Return one value of every sample."""
    if not all(isinstance(trial, dict) for trial in trials):
        raise UsageError("'samples' is no list of dicts")
    return [_number(trial.get(key), f"samples.{key}") for trial in trials]


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**53:
        raise UsageError(f"{where} holds {value!r}; allowed are whole numbers above 0")
    return value


def _number(value: Any, where: str, *, zero: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    least = 0.0 if zero else _TINY
    if not is_number or not least <= value <= _HUGE:
        raise UsageError(f"{where} holds {value!r}; allowed are numbers from {least} to {_HUGE}")
    return float(value)
