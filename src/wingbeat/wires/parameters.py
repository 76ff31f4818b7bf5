"""What a wire is for one parameter: its own settings, and its bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

from wingbeat.wires.codecs import WHOLE_BITS, Coded, Half, LowRank, Sketch, TopK

HALF_BYTES = 2
"""Bytes of an element in half precision."""

INDEX_BYTES = 2
"""Bytes that say which value it is that top-k sends."""


@functools.lru_cache(maxsize=4096)
def own(wire: str | Coded, name: str) -> str | Coded:
    """Return what the parameter ``name`` travels as, without groups; empty for its own dtype.

    >>> own(Sketch(groups={"features.*": "fp32"}), "features.0.weight")
    ''
    """
    if isinstance(wire, TopK):
        return replace(wire, density=wire.density_of(name), groups=())
    if isinstance(wire, Sketch | LowRank):
        return next(found for pattern, found in wire.of_groups() if fnmatchcase(name, pattern))
    return wire


def kinds(wire: Coded) -> tuple[str | Coded, ...]:
    """Return all that parameters may travel as; "" is float32, and first whether used or not.

    Two programs that have the same wire have the same list, and can say a place in it.

    >>> kinds(Sketch(bits=4, groups={"features.*": 2, "*.bias": "fp32"}))
    ('', Sketch(bits=4), Sketch(bits=2))
    """
    each: list[str | Coded] = [wire]
    if isinstance(wire, Sketch | LowRank):
        *groups, (_, others) = wire.of_groups()
        each = [others, *(found for _, found in groups)]
    return tuple(dict.fromkeys(["", *each]))


def unmatched(wire: str | Coded, names: Iterable[str]) -> list[str]:
    """Return the patterns of groups that match none of the names, in their order."""
    if isinstance(wire, str | Half):
        return []
    known = list(names)
    return [
        pattern
        for pattern, _ in cast("tuple[tuple[str, Any], ...]", wire.groups)
        if not any(fnmatchcase(name, pattern) for name in known)
    ]


def matrix_of(wire: str | Coded, shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of the matrix that a gradient of ``shape`` is for low rank.

    Rows are the first dimension that is more than one long. Without bits none is a matrix whose
    factors would have half of its elements or more: that is ``(0, 0)``, as with any other wire.

    >>> matrix_of(LowRank(rank=4), (64, 3, 7, 7)), matrix_of(LowRank(rank=4), (10, 10))
    ((64, 147), (0, 0))
    """
    if not isinstance(wire, LowRank):
        return 0, 0
    if wire.bits != WHOLE_BITS:  # as Canary has it, of fully connected layers
        return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)
    rows = next((size for size in shape if size > 1), 1)
    cols = math.prod(shape) // rows
    worth = 2 * wire.rank * (rows + cols) < rows * cols
    return (rows, cols) if worth else (0, 0)


def least_bytes(wire: str | Coded, shape: Sequence[int], itemsize: int) -> int:
    """Return about how many bytes a gradient of ``shape`` takes at least, tables not counted.

    >>> least_bytes(Sketch(bits=4), (1000, 10), 4)
    5000
    >>> least_bytes(LowRank(rank=4), (1000, 1000), 4)
    32000
    """
    numel = math.prod(shape)
    if isinstance(wire, Sketch):
        return int(numel * wire.bits / 8)
    if isinstance(wire, TopK):
        return int(numel * min(itemsize, (wire.bits / 8 + INDEX_BYTES) * wire.density))
    if isinstance(wire, LowRank):
        rows, cols = matrix_of(wire, shape)
        thin = min(numel, wire.rank * (rows + cols)) if rows else numel
        return thin * itemsize if wire.bits == WHOLE_BITS else int(thin * wire.bits / 8)
    return numel * min(itemsize, HALF_BYTES) if wire else numel * itemsize
