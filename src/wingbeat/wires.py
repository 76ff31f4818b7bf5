"""What gradients travel as: their own dtype, a narrower one, or what a codec makes of them.

On the command line a wire is ``name`` or ``name@value``, with the option that matters most:

>>> of("topk@0.05")
TopK(density=0.05)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, get_args

from wingbeat.errors import UsageError, unknown
from wingbeat.settings import Named, Settings, is_number, named
from wingbeat.traits import WHOLE, Part

SPLITS = ("error", "count")
LEVELS = ("mean", "ends")


class CodecPart(Part, Settings):
    """What gradients travel as, where that is no mere dtype.

    Attributes:
        gathers: whether under whole all-reduces each worker's payload goes to all the others.
    """

    exact: ClassVar[bool] = False
    gathers: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Sketch(CodecPart):
    """Each value travels as the number of the bucket of values that it is in (Canary, 4.3.1).

    Args:
        bits: bits of that number, 1 to 8; the fewer, the fewer bytes.
        split: how values are split into buckets: ``"error"`` makes the squared error small,
            ``"count"`` makes the buckets equally full, as the paper does.
        level: what stands for the values of a bucket: the ``"mean"`` of its members, or the mean
            of its two ``"ends"``, as in the paper.
        feedback: keep what the rounding took away, and add it to the next iteration's gradients.
        auto_disable: measure in the first iterations whether this is faster than fp32, and use
            fp32 if it is not; False: use it in any case.

    Raises:
        UsageError: a value out of range.
    """

    bits: int = 8
    split: str = "error"
    level: str = "mean"
    feedback: bool = True
    auto_disable: bool = True

    def __post_init__(self) -> None:
        self.check_count("bits", 1, 8)
        self.check_name("split", SPLITS)
        self.check_name("level", LEVELS)
        self.check_flag("feedback")
        self.check_flag("auto_disable")


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(CodecPart):
    """Only the largest gradients travel; the others wait until they have grown (OMGS-SGD, II-C).

    The defaults are for a first try that learns: a gradient waits a hundred steps on average, and
    none while the weights change fastest. OMGS-SGD has ``density=0.001, warmup=0``.

    Args:
        density: share of the gradients that travel, above 0 up to 1.
        warmup: steps in which the density falls exponentially from 0.25 to ``density``
            (Deep Gradient Compression, section 3.3); 0: none.
        momentum: correct for the momentum that waiting gradients would lose (the same paper,
            section 3.2); use it in place of the optimizer's own, which must be 0 then.
        groups: densities of the parameters whose names match a pattern, such as
            ``{"embedding.*": 0.01}``; the first that matches counts, all others have ``density``.
        auto_disable: measure in the first iterations whether this is faster than fp32, and use
            fp32 if it is not; False: use it in any case.

    Raises:
        UsageError: a value out of range.
    """

    density: float = 0.01
    warmup: int = 400
    momentum: float = 0.0
    groups: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    auto_disable: bool = True

    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_number("density", "numbers above 0 up to 1", lambda v: 0 < v <= 1)
        object.__setattr__(self, "groups", pairs(self.groups))
        self.check_count("warmup", 0, 10_000_000)
        self.check_number("momentum", "numbers from 0 to 0.9999", lambda v: 0 <= v <= 0.9999)
        self.check_flag("auto_disable")

    @property
    def needs(self) -> frozenset[str]:
        """With momentum correction, whole buckets on each worker."""
        return frozenset({WHOLE} if self.momentum else ())

    def density_of(self, name: str) -> float:
        """Return the density of the parameter ``name``.

        >>> TopK(density=0.01, groups={"embedding.*": 0.5}).density_of("embedding.weight")
        0.5
        """
        for pattern, density in pairs(self.groups):
            if fnmatchcase(name, pattern):
                return density
        return self.density


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRank(CodecPart):
    """Large matrices travel as two thin factors, sketched; the rest is sketched (Canary, 4.3.1).

    Args:
        rank: columns of the factors, 1 to 256.
        bits: bits of a sketched value, 1 to 8.
        feedback: keep what was taken away, and add it to the next iteration's gradients.
        auto_disable: measure in the first iterations whether this is faster than fp32, and use
            fp32 if it is not; False: use it in any case.

    Raises:
        UsageError: a value out of range.
    """

    rank: int = 4
    bits: int = 8
    feedback: bool = True
    auto_disable: bool = True

    def __post_init__(self) -> None:
        self.check_count("rank", 1, 256)
        self.check_count("bits", 1, 8)
        self.check_flag("feedback")
        self.check_flag("auto_disable")


@dataclass(frozen=True, kw_only=True, repr=False)
class Half(CodecPart):
    """Half precision, each chunk scaled so that no value is too large or too small for it."""

    auto_disable: bool = False

    def __post_init__(self) -> None:
        self.check_flag("auto_disable")


Coded = Sketch | TopK | LowRank | Half
"""The settings of a codec."""

Wire = str | Coded
"""What a strategy's ``wire`` may be: the name of a dtype or a codec, or a codec's settings."""

DTYPES = {"fp32": "", "bf16": "bfloat16"}
"""Wires that are only another dtype, summed hop by hop; empty is the gradients' own."""

HALF_BYTES = 2
"""Bytes of an element in half precision."""

TOPK_BYTES = 6
"""Bytes of a value that top-k sends: float32 and two bytes of index."""

_CODECS: Mapping[str, Named[Coded]] = {
    "fp16": Named(Half),
    "sketch": Named(Sketch, "bits", int),
    "topk": Named(TopK, "density"),
    "lowrank": Named(LowRank, "rank", int),
}


def of(wire: Wire) -> str | Coded:
    """Return what ``wire`` stands for: a dtype's name, empty for the gradients' own, or a codec.

    Raises:
        UsageError: no such wire, or a value out of range.
    """
    if isinstance(wire, Coded):
        return wire
    text = str(wire)
    return DTYPES[text] if text in DTYPES else named("wire", text, _CODECS, also=DTYPES)


def to_json(wire: Coded) -> list[Any]:
    """Return a codec's settings as JSON has it: the class's name and its fields.

    >>> to_json(Half())
    ['Half', {'auto_disable': False}]
    """
    return [type(wire).__name__, asdict(wire)]


def from_json(listed: Sequence[Any]) -> Coded:
    """Return what `to_json` has made.

    >>> from_json(to_json(Sketch(bits=4)))
    Sketch(bits=4)

    Raises:
        UsageError: no such codec, or a value out of range.
    """
    name, fields = listed
    kinds = {kind.__name__: kind for kind in get_args(Coded)}
    if name not in kinds:
        raise unknown("wire", name, kinds)
    made: Coded = kinds[name](**fields)
    return made


def pairs(groups: Any) -> tuple[tuple[str, float], ...]:
    """Return the densities of groups of parameters as pairs, which can be hashed.

    Raises:
        UsageError: what is no name pattern, or a density out of range.
    """
    try:
        listed = groups.items() if isinstance(groups, Mapping) else groups
        made = tuple((pattern, density) for pattern, density in listed)
    except (TypeError, ValueError):
        made = ((groups, None),)
    for pattern, density in made:
        if not (isinstance(pattern, str) and pattern and is_number(density) and 0 < density <= 1):
            raise UsageError(
                f"TopK(groups=...): {pattern!r}: {density!r} is no group; allowed are patterns of "
                "parameter names with densities above 0 up to 1, such as {'embedding.*': 0.01}"
            )
    return made


def least_bytes(wire: str | Coded, shape: Sequence[int], itemsize: int) -> int:
    """Return about how many bytes a gradient of ``shape`` takes at least, tables not counted.

    >>> least_bytes(Sketch(bits=4), (1000, 10), 4)
    5000
    """
    numel = math.prod(shape)
    if isinstance(wire, Sketch):
        return int(numel * wire.bits / 8)
    if isinstance(wire, TopK):
        return int(numel * min(itemsize, TOPK_BYTES * wire.density))
    if isinstance(wire, LowRank):
        thin = wire.rank * (numel // max(1, shape[0]) + shape[0]) if len(shape) == 2 else numel
        return int(min(numel, thin) * wire.bits / 8)
    return numel * min(itemsize, HALF_BYTES) if wire else numel * itemsize
