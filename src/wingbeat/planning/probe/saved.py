"""A probe as a JSON file that people can read and the next run can use."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.planning.costs.fit import Fit, fit_of
from wingbeat.planning.plans.planfile import MEASURED, number, part, rows, whole
from wingbeat.planning.probe.exchange import WAYS
from wingbeat.planning.probe.matrices import Matrix
from wingbeat.planning.probe.model import LinkFit, Probe, Tried

_LONGEST_S = 1e6
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Saved:
    """A probe file's content: what was measured, and for which model and cluster (``key``)."""

    probe: Probe
    key: dict[str, Any]


def save(path: str | os.PathLike[str], probe: Probe, key: Mapping[str, Any]) -> None:
    """Write the file in one go: whoever looks sees the old one or the new one, never a part.

    Args:
        path: the file; its folder has to exist.
        probe: what was measured.
        key: what `wingbeat.planning.probe.model.key_of` says of the model and the cluster.

    Raises:
        UsageError: the folder is missing or cannot be written.
    """
    MEASURED.write(path, _pretty({**to_json(probe), "key": dict(key)}) + "\n")


def load(path: str | os.PathLike[str]) -> Saved:
    """Read a file that `save` wrote, and check everything in it.

    Raises:
        UsageError: no such file or folder, a file of another version, or a damaged one.
    """
    return MEASURED.read(path, lambda data: Saved(from_json(data), part(data, "key", dict)))


# -- to JSON and back -----------------------------------------------------------------------


def to_json(probe: Probe) -> dict[str, Any]:
    """Return all of the probe as JSON knows it; seconds, elements and bytes are in the names."""
    return {
        **MEASURED.head(),
        "what": probe.explain(),
        "workers": probe.workers,
        "links": list(probe.links),
        "wire": probe.wire,
        "way": probe.way,
        "rest_s": probe.rest_s,
        "encode_s_by_elements": probe.encode.to_json(),
        "exchange_s_by_bytes": probe.exchange.to_json(),
        "interfaces": [
            {
                "name": link.name,
                "all_gather_s_by_bytes": link.all_gather.to_json(),
                "all_reduce_s_by_bytes": link.all_reduce.to_json(),
            }
            for link in probe.interfaces
        ],
        **({} if probe.cpu is None else {"cpu_s_by_bytes": probe.cpu.to_json()}),
        **({} if probe.gather is None else {"gather_s_by_bytes": probe.gather.to_json()}),
        "contention": probe.contention,
        "matrices": [
            {"rows": m.rows, "cols": m.cols, "payload_bytes": m.nbytes, "exchange_s": m.exchange_s}
            for m in probe.matrices
        ],
        "tried": [
            {"rules": list(each.rules), "stops": list(each.stops), "iteration_s": each.seconds}
            for each in probe.tried
        ],
        "backward": [
            {"ready_s": ready, "tensor": tensor, "name": name}
            for ready, tensor, name in zip(probe.ready_s, probe.tensors, probe.names, strict=True)
        ],
    }


def from_json(data: Any) -> Probe:
    """Return the probe that `to_json` wrote, from a file or from another worker.

    Raises:
        UsageError: anything in it is damaged; says what, in one line.
    """
    if not isinstance(data, dict):
        raise UsageError(f"a probe is {str(data)[:40]!r}; allowed is what to_json returns")
    backward = rows(data, "backward")
    ready = [number(row.get("ready_s"), "backward.ready_s", 0, _LONGEST_S) for row in backward]
    if ready != sorted(ready):
        raise UsageError("backward.ready_s falls; allowed is the order of gradients")
    tensors = [whole(row.get("tensor"), "backward.tensor", 0) for row in backward]
    if not backward or sorted(tensors) != list(range(len(tensors))):
        raise UsageError("backward.tensor has to name each tensor once")
    if data.get("way") not in WAYS:
        raise UsageError(f"way={data.get('way')!r}; allowed are {', '.join(WAYS)}")
    return Probe(
        workers=whole(data.get("workers"), "workers", 1),
        links=tuple(_text(link, "links") for link in part(data, "links", list)),
        wire=_text(data.get("wire"), "wire"),
        way=data["way"],
        tensors=tuple(tensors),
        names=tuple(_text(row.get("name"), "backward.name") for row in backward),
        ready_s=tuple(ready),
        encode=_fit(data, "encode_s_by_elements"),
        exchange=_fit(data, "exchange_s_by_bytes"),
        interfaces=tuple(
            LinkFit(
                _text(link.get("name"), "interfaces.name"),
                _fit(link, "all_gather_s_by_bytes"),
                _fit(link, "all_reduce_s_by_bytes"),
            )
            for link in rows(data, "interfaces")
        ),
        rest_s=number(data.get("rest_s"), "rest_s", 0, _LONGEST_S),
        # What follows is missing in files of earlier versions, which knew nothing of it.
        cpu=_fit(data, "cpu_s_by_bytes") if "cpu_s_by_bytes" in data else None,
        gather=_fit(data, "gather_s_by_bytes") if "gather_s_by_bytes" in data else None,
        contention=number(data.get("contention", 0.0), "contention", 0, _LONGEST_S),
        matrices=_matrices(data) if "matrices" in data else (),
        tried=_tried(data, len(tensors)) if "tried" in data else (),
    )


def _matrices(data: dict[str, Any]) -> tuple[Matrix, ...]:
    return tuple(
        Matrix(
            whole(row.get("rows"), "matrices.rows", 1),
            whole(row.get("cols"), "matrices.cols", 1),
            number(row.get("payload_bytes"), "matrices.payload_bytes", 0, 2.0**53),
            number(row.get("exchange_s"), "matrices.exchange_s", 0, _LONGEST_S),
        )
        for row in rows(data, "matrices")
    )


def _tried(data: dict[str, Any], tensors: int) -> tuple[Tried, ...]:
    found = []
    for row in rows(data, "tried"):
        stops = [whole(stop, "tried.stops", 1) for stop in part(row, "stops", list)]
        if stops != sorted(set(stops)) or stops[-1:] != [tensors]:
            raise UsageError(f"tried.stops are {stops!r}; allowed are rising ones up to {tensors}")
        names = tuple(_text(name, "tried.rules") for name in part(row, "rules", list))
        seconds = number(row.get("iteration_s"), "tried.iteration_s", 0, _LONGEST_S)
        found.append(Tried(names, tuple(stops), seconds))
    return tuple(found)


def _fit(data: dict[str, Any], key: str) -> Fit:
    return fit_of(data.get(key), key)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} holds {value!r}; allowed is text")
    return value


def _pretty(value: Any, indent: int = 0) -> str:
    """Return JSON with one line for whatever fits into one.

    >>> print(_pretty({"a": [1, 2], "b": {"c": 3}}))
    {
      "a": [1, 2],
      "b": {"c": 3}
    }
    """
    short = json.dumps(value)
    fits = indent > 0 and indent + len(short) <= _WIDTH
    if fits or not value or not isinstance(value, (dict, list)):
        return short
    inner = indent + 2
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_pretty(each, inner)}" for key, each in value.items()]
    else:
        parts = [_pretty(each, inner) for each in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(" " * inner + part for part in parts)
    return f"{left}\n{lines}\n{' ' * indent}{right}"
