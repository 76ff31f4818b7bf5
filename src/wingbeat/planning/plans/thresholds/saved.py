"""Thresholds that were found, as a JSON file that people can read and the next run can use."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.planning.plans.planfile import THRESHOLDS, number, part, rows, whole
from wingbeat.planning.plans.thresholds.cuts import Cuts, fits
from wingbeat.planning.plans.thresholds.result import Result, Sample

_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


@dataclass(frozen=True, slots=True)
class Saved:
    """A file's content: what was found, and for which model and cluster (``key``)."""

    result: Result
    key: dict[str, Any]


def save(path: str | os.PathLike[str], result: Result, key: Mapping[str, Any]) -> None:
    """Write the file in one go: whoever looks sees the old one or the new one, never a part.

    Args:
        path: the file; its folder has to exist.
        result: what tuning has found.
        key: what tells this model on this cluster from others, as JSON knows it.

    Raises:
        UsageError: the folder is missing or cannot be written.
    """
    text = json.dumps(_to_json(result, key), indent=2)
    THRESHOLDS.write(path, text + "\n")


def load(path: str | os.PathLike[str]) -> Saved:
    """Read a file that `save` wrote, and check everything in it.

    Raises:
        UsageError: no such file or folder, a file of another version, or a damaged one.
    """
    return THRESHOLDS.read(path, _from_json)


def _to_json(result: Result, key: Mapping[str, Any]) -> dict[str, Any]:
    """Thresholds stand there for people, and the cuts that they make for the next run."""
    return {
        **THRESHOLDS.head(),
        "thresholds": list(result.thresholds),
        "why": result.explain(),
        "layers": result.layers,
        "classes": result.classes,
        "iterations": result.iterations,
        "cuts": list(result.chosen),
        "looked_beside": [list(base) for base in result.bases],
        "samples": [
            {"cuts": list(s.cuts), "seconds": s.seconds, "iterations": s.iterations}
            for s in result.samples
        ],
        "key": dict(key),
    }


def _from_json(data: dict[str, Any]) -> Saved:
    # Files of earlier versions counted buckets; their key says so, and they are not used.
    layers = whole(data.get("layers", data.get("buckets")), "layers", 1)
    classes = whole(data.get("classes"), "classes", 2)
    samples = tuple(
        Sample(
            _cuts(row.get("cuts"), "samples.cuts", layers, classes),
            number(row.get("seconds"), "samples.seconds", _SHORTEST_S, _LONGEST_S),
            whole(row.get("iterations"), "samples.iterations", 1),
        )
        for row in rows(data, "samples")
    )
    chosen = _cuts(data.get("cuts"), "cuts", layers, classes)
    bases = tuple(
        _cuts(base, "looked_beside", layers, classes - 1)
        for base in part(data, "looked_beside", list)
    )
    tried = [sample.cuts for sample in samples]
    if len(set(tried)) != len(tried) or bool(samples) != bool(bases):
        raise UsageError("samples has to hold each division once, and looked_beside what stayed")
    if samples and not {chosen, (), *bases} <= set(tried):
        raise UsageError("cuts and looked_beside have to be among the samples, and one class too")
    result = Result(
        layers=layers,
        classes=classes,
        chosen=chosen,
        bases=bases,
        samples=samples,
        iterations=whole(data.get("iterations"), "iterations", 0),
    )
    return Saved(result, part(data, "key", dict))


def _cuts(value: Any, where: str, layers: int, classes: int) -> Cuts:
    whole_ones = isinstance(value, list) and all(type(cut) is int for cut in value)
    if not whole_ones or not fits(value, layers, classes):
        raise UsageError(
            f"{where} holds {value!r}; allowed are at most {classes - 1} rising whole numbers "
            f"above 0 and below {layers}"
        )
    return tuple(value)
