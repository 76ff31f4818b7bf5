"""What tuning has found, as a JSON file that people can read and the next run can use."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.planning.plans.planfile import TUNED, number, part, rows, whole
from wingbeat.planning.plans.result import Result
from wingbeat.planning.plans.sample import Sample

_SEARCHES = ("bo", "random", "grid")
_MEASURED, _EXPECTED = "iterations_per_s", "expected_iterations_per_s"
_TINY, _HUGE = 1e-12, 1e12


@dataclass(frozen=True, slots=True)
class Saved:
    """A plan file's content: what was found, and for which model and cluster (``key``)."""

    result: Result
    key: dict[str, Any]

    @property
    def chosen_bytes(self) -> int:
        """The bucket size that was chosen, in bytes."""
        return self.result.chosen_bytes

    @property
    def chosen_topology(self) -> str:
        """The topology that was chosen; empty where topologies were not tuned."""
        return self.result.chosen_topology


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
        **({"chosen_topology": result.chosen_topology} if result.chosen_topology else {}),
        "why": result.explain(),
        "search": result.search,
        **({"buckets_of_every_size": result.buckets} if result.buckets else {}),
        "steps_per_trial": result.steps,
        "range_mb": [_mb(result.low_bytes), _mb(result.high_bytes)],
        "samples": [
            {
                "mb": _mb(sample.nbytes),
                **({"topology": sample.topology} if sample.topology else {}),
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
    sizes, trials = part(data, "bytes", dict), rows(data, "samples")
    nbytes = [whole(value, "bytes.samples", 1) for value in part(sizes, "samples", list)]
    limits = [whole(value, "bytes.range", 1) for value in part(sizes, "range", list)]
    costs = [number(value, "decision_s", 0, _HUGE) for value in part(data, "decision_s", list)]
    buckets = whole(data.get("buckets_of_every_size", 0), "buckets_of_every_size", 0)
    if bool(trials) == bool(buckets) or {len(nbytes), len(costs)} != {len(trials)}:
        raise UsageError("samples, bytes.samples and decision_s have to be equally long")
    if len(limits) != 2 or limits[0] > limits[1]:
        raise UsageError(f"bytes.range={limits!r} has to be the smallest and the largest size")
    chosen = whole(sizes.get("chosen"), "bytes.chosen", 1)
    along = [_name(trial, "topology") for trial in trials]
    topology = _name(data, "chosen_topology")
    if trials and (chosen, topology) not in zip(nbytes, along, strict=True):
        raise UsageError(f"bytes.chosen={chosen!r} {topology} is none of bytes.samples")
    if data.get("search") not in _SEARCHES:
        raise UsageError(f"search={data.get('search')!r}; allowed are {', '.join(_SEARCHES)}")
    result = Result(
        search=data["search"],
        low_bytes=limits[0],
        high_bytes=limits[1],
        steps=whole(data.get("steps_per_trial"), "steps_per_trial", 1),
        samples=tuple(
            Sample(*each) for each in zip(nbytes, _column(trials, _MEASURED), along, strict=True)
        ),
        expected=tuple(_column(trials, _EXPECTED)),
        chosen_bytes=chosen,
        costs_s=tuple(costs),
        buckets=buckets,
        chosen_topology=topology,
    )
    return Saved(result, part(data, "key", dict))


def _mb(nbytes: int) -> float:
    return round(nbytes / 2**20, 4)


def _name(data: Mapping[str, Any], key: str) -> str:
    """Return the name under a key, empty where there is none."""
    name = data.get(key, "")
    if not isinstance(name, str):
        raise UsageError(f"{key}={name!r} has to be a name")
    return name


def _column(trials: list[dict[str, Any]], key: str) -> list[float]:
    """Return one value of every sample."""
    return [number(trial.get(key), f"samples.{key}", _TINY, _HUGE) for trial in trials]
