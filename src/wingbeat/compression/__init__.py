"""Compression options: what gradients travel as, and their textual form.

On the command line it is ``name`` or ``name@value``, with the main option as value; then
``:key=value`` for each of the others. Groups of parameters come last, with + between them:

>>> parse("topk@0.05")
TopK(density=0.05)
>>> parse("sketch@4:split=count:groups=features.*@fp32+*.bias@8")
Sketch(bits=4, split='count', groups=(('features.*', 'fp32'), ('*.bias', 8)))
"""

from __future__ import annotations

import functools
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, cast, get_args

from wingbeat.errors import UsageError, unknown
from wingbeat.settings import READ, Named, Settings, is_number, kinds_of, named, read_options
from wingbeat.traits import WHOLE, Part

SPLITS = ("error", "count")
LEVELS = ("mean", "ends")
MAX_BITS = 8
WHOLE_BITS = 32
"""Bits of a value that is not sketched."""

Groups = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""Patterns of parameter names, and the compression of each."""


class CodecOptions(Part, Settings):
    """Options of a codec.

    Attributes:
        gathers: whether in all-reduces under backward each worker's payload goes to all others.
    """

    @property
    def summed(self) -> bool:
        """Whether all-reduces can sum encoded gradients directly."""
        return False

    exact: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    @property
    def keeps(self) -> bool:
        """Whether residuals are kept for any gradients."""
        return False

    @property
    def ends_after(self) -> int | None:
        """Iterations after which gradients are dense; None: never."""
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class _SketchOptions(CodecOptions):
    """Options common to `Sketch` and `LowRank`."""

    bits: int = 8
    split: str = "error"
    level: str = "mean"
    feedback: bool = True
    groups: Groups = field(default=(), metadata={READ: lambda text: read_groups(text)})
    share: float = 1.0
    total: int = 0
    auto_disable: bool = True

    def __post_init__(self) -> None:
        self.check_bits()
        self.check_name("split", SPLITS)
        self.check_name("level", LEVELS)
        self.check_flag("feedback")
        self.check_number("share", "numbers from 0 to 1", lambda v: 0 <= v <= 1)
        self.check_count("total", 0, 10**12)
        self.check_flag("auto_disable")
        self._check_share()
        object.__setattr__(self, "groups", self._known(self.groups))

    def check_bits(self) -> None:
        """Raise a `UsageError` unless ``bits`` is valid."""
        self.check_count("bits", 1, MAX_BITS)

    def _check_share(self) -> None:
        if self.share == 1:
            return
        kind = type(self).__name__
        if not self.total:
            raise UsageError(
                f"{kind}(share={self.share!r}): a share of how many iterations? Give all of the "
                f"training's, such as {kind}(share={self.share!r}, total=1000, auto_disable=False)"
            )
        if self.auto_disable:
            raise UsageError(
                f"{kind}(share={self.share!r}, auto_disable=True): a trial might end the codec "
                "sooner; write auto_disable=False, or leave out share"
            )

    def _known(self, groups: Any) -> tuple[tuple[str, int | str], ...]:
        """Return the groups as pairs of text, which are hashable and printable."""
        try:
            listed = groups.items() if isinstance(groups, Mapping) else groups
            listed_pairs = [(pattern, value) for pattern, value in listed]
        except (TypeError, ValueError):
            listed_pairs = [(groups, None)]
        return tuple((pattern, self._value(pattern, value)) for pattern, value in listed_pairs)

    def _value(self, pattern: Any, value: Any) -> int | str:
        where = f"{type(self).__name__}(groups=...): {pattern!r}: {value!r}"
        text = to_text(value) if isinstance(value, Coded) else value
        if isinstance(pattern, str) and pattern and isinstance(text, int | str):
            own = self._own(where, text)
            inner = isinstance(own, _SketchOptions) and (own.groups or own.share != 1 or own.total)
            if own != DTYPES["bf16"] and not isinstance(own, TopK) and not inner:
                # One spelling of each: equal groups are to be equal.
                return to_text(own) if isinstance(own, Coded) and isinstance(text, str) else text
        raise UsageError(
            f"{where} is no group; allowed are patterns of parameter names with a number of bits, "
            '"fp32", "fp16", or a sketch or lowrank without groups and share of its own, such as '
            "{'features.0.*': 'fp32', 'classifier.*': 4}"
        )

    def _own(self, where: str, value: int | str) -> str | Coded:
        if isinstance(value, str):
            return parse(value)
        if isinstance(value, bool) or not 1 <= value <= MAX_BITS:
            raise UsageError(f"{where}: allowed are whole numbers of bits, 1 to {MAX_BITS}")
        return cast("Coded", replace(self, bits=value, groups=(), share=1.0, total=0))

    @property
    def keeps(self) -> bool:
        """As ``feedback``, and groups that differ."""
        return any(getattr(each, "feedback", False) for _, each in self.of_groups())

    @property
    def ends_after(self) -> int | None:
        """Iterations after which gradients are dense; None: never."""
        return None if self.share == 1 else round(self.share * self.total)

    def of_groups(self) -> list[tuple[str, str | Coded]]:
        """Return every pattern and the compression of its group; last ``*``, for all others."""
        each = [(pattern, self._own("", value)) for pattern, value in self._listed]
        return [*each, ("*", self._of_others())]

    def _of_others(self) -> Coded:
        """Return the compression of parameters in no group."""
        return cast("Coded", replace(self, groups=(), share=1.0, total=0))

    @property
    def _listed(self) -> tuple[tuple[str, int | str], ...]:
        return cast("tuple[tuple[str, int | str], ...]", self.groups)


@dataclass(frozen=True, kw_only=True, repr=False)
class Sketch(_SketchOptions):
    """Each value travels as the index of its bucket of values (Canary, section 4.3.1).

    Args:
        bits: bits of the index, 1 to 8.
        split: how values are split into buckets: ``"error"`` makes the squared error small,
            ``"count"`` makes the buckets equally full, as the paper does.
        level: the value of a bucket: the ``"mean"`` of its members, or the mean of its two
            ``"ends"``, as in the paper.
        feedback: keep the rounding error, and add it to the next iteration's gradients.
        groups: compression of the parameters whose names match a pattern: a number of bits,
            ``"fp32"``, or another compression, such as ``{"features.*": 4, "*.bias": "fp32"}``.
            The first match counts; all other parameters use the options given here. ``"fp32"``
            beside others in a bucket is float32.
        share: share of all iterations with the codec: the first ``round(share * total)``; the
            others are dense (Canary, Fig. 22a). Below 1 only with ``auto_disable=False``.
        total: number of iterations of the whole training; needed with a share.
        auto_disable: measure in the first iterations whether this is faster than fp32, and use
            fp32 if it is not; False: use it in any case.

    Raises:
        UsageError: a value out of range.
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(CodecOptions):
    """Only the largest gradients travel; the others accumulate (OMGS-SGD, section II-C).

    The defaults are for a first attempt that converges: a gradient waits a hundred steps on
    average, and none while the weights change fastest. OMGS-SGD has ``density=0.001, warmup=0``.

    Args:
        density: share of the gradients that travel, above 0 up to 1.
        warmup: steps in which the density falls exponentially from 0.25 to ``density``
            (Deep Gradient Compression, section 3.3); 0: none. By default its mean is 0.075 in
            these steps, and so in a training that is no longer.
        momentum: correct for the momentum that waiting gradients would lose (the same paper,
            section 3.2); use it in place of the optimizer's own, which must be 0 then.
        bits: of a value that travels: 32 as it is, 1 to 8 through a sketch of all sent values
            (SparseLoCo, Sarfi et al., 2025, has 2); the sketch's error is kept too.
        groups: densities of the parameters whose names match a pattern, such as
            ``{"embedding.*": 0.01}``; the first match counts, all others have ``density``.
        auto_disable: measure in the first iterations whether this is faster than fp32, and use
            fp32 if it is not; False: use it in any case.

    Raises:
        UsageError: a value out of range.
    """

    density: float = 0.01
    warmup: int = 400
    momentum: float = 0.0
    bits: int = 32
    groups: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    auto_disable: bool = True

    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_number("density", "numbers above 0 up to 1", lambda v: 0 < v <= 1)
        object.__setattr__(self, "groups", density_groups(self.groups))
        self.check_count("warmup", 0, 10_000_000)
        self.check_number("momentum", "numbers from 0 to 0.9999", lambda v: 0 <= v <= 0.9999)
        widths = (*range(1, MAX_BITS + 1), WHOLE_BITS)
        whole = f"whole numbers, 1 to {MAX_BITS}, or {WHOLE_BITS}"
        self.check_number("bits", whole, lambda v: isinstance(v, int) and v in widths)
        self.check_flag("auto_disable")

    @property
    def keeps(self) -> bool:
        """True: most gradients wait."""
        return True

    @property
    def needs(self) -> frozenset[str]:
        """With momentum correction, whole buckets on each worker."""
        return frozenset({WHOLE} if self.momentum else ())

    def density_of(self, name: str) -> float:
        """Return the density of the parameter ``name``.

        >>> TopK(density=0.01, groups={"embedding.*": 0.5}).density_of("embedding.weight")
        0.5
        """
        for pattern, density in density_groups(self.groups):
            if fnmatchcase(name, pattern):
                return density
        return self.density


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRank(_SketchOptions):
    """Matrices travel as two thin factors, where these are smaller; the rest as it is.

    Factors are summed as in PowerSGD (Vogels et al., 2019), where all workers sum gradients by
    all-reduces, and the bytes do not grow with their number. Fully connected layers and
    convolutions are matrices, with the first dimension as rows.

    With ``bits`` factors are sketched, and so is the rest (Canary, section 4.3.1); their owners
    decode and add them. ``LowRank(bits=8, split="count", level="ends")`` is that paper's: large
    fully connected layers have matrices (case 1), convolutions have none (case 2).

    Args:
        rank: columns of the factors, 1 to 256.
        bits: of a value: 32 as it is, 1 to 8 through a sketch.
        split: of all sketches, as for `Sketch`.
        level: of all sketches, as for `Sketch`.
        feedback: keep the error, and add it to the next iteration's gradients.
        groups: as for `Sketch`; a number of bits keeps the rank. With anything but ``"fp32"``
            and low rank without bits in one, owners decode and add all factors.
        share: as for `Sketch`.
        total: as for `Sketch`.
        auto_disable: measure in the first iterations whether this is faster than fp32, and use
            fp32 if it is not; False: use it in any case.

    Raises:
        UsageError: a value out of range.
    """

    rank: int = 4
    bits: int = WHOLE_BITS

    def __post_init__(self) -> None:
        self.check_count("rank", 1, 256)
        super().__post_init__()
        sketched = self.bits != WHOLE_BITS or any(isinstance(v, int) for _, v in self._listed)
        for name in ("split", "level"):
            if getattr(self, name) != getattr(LowRank, name) and not sketched:
                raise UsageError(
                    f"LowRank({name}={getattr(self, name)!r}): it is how factors are sketched, and "
                    f"with bits={self.bits} they are not: add bits=8, or leave out {name}"
                )

    def check_bits(self) -> None:
        """Raise a `UsageError` unless ``bits`` is valid."""
        widths = (*range(1, MAX_BITS + 1), WHOLE_BITS)
        whole = f"whole numbers, 1 to {MAX_BITS}, or {WHOLE_BITS}"
        self.check_number("bits", whole, lambda v: isinstance(v, int) and v in widths)

    def _of_others(self) -> Coded:
        if self.bits != WHOLE_BITS:
            return super()._of_others()
        return replace(self, groups=(), share=1.0, total=0, split=SPLITS[0], level=LEVELS[0])

    @property
    def summed(self) -> bool:
        """True if all groups are factors without bits, or exact."""
        own = (found for _, found in self.of_groups())
        return all(
            not each or (isinstance(each, LowRank) and each.bits == WHOLE_BITS) for each in own
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Half(CodecOptions):
    """Half precision, with a scale for each chunk so that no value overflows or underflows."""

    auto_disable: bool = False

    def __post_init__(self) -> None:
        self.check_flag("auto_disable")


Coded = Sketch | TopK | LowRank | Half
"""The settings of a codec."""

Compression = str | Coded
"""What a strategy's ``compression`` may be: the name of a dtype or a codec, or a codec's
settings."""

DTYPES = {"fp32": "", "bf16": "bfloat16"}
"""Wires that are only another dtype, summed hop by hop; empty is the gradients' own."""

BY_NAME: Mapping[str, Named[Coded]] = {
    "fp16": Named(Half),
    "sketch": Named(Sketch, "bits", int),
    "topk": Named(TopK, "density"),
    "lowrank": Named(LowRank, "rank", int),
}


def parse(wire: Compression) -> str | Coded:
    """Return what ``wire`` stands for: a dtype's name, empty for the gradients' own, or a codec.

    Raises:
        UsageError: no such wire, or a value out of range.
    """
    if isinstance(wire, Coded):
        return wire
    text = str(wire)
    if text in DTYPES:
        return DTYPES[text]
    name, _, rest = text.partition(":")
    if rest and name in DTYPES:
        raise UsageError(f"{text!r}: {name} has no options; write {name}")
    made: Coded = named("compression", name, BY_NAME, also=DTYPES)
    # What stands in groups may have options of its own.
    plain, *groups = re.split(r"(?:^|:)(?=groups=)", rest, maxsplit=1)
    kinds = kinds_of(type(made))
    given = read_options(plain.replace(":", ","), kinds, where=text)
    for last in groups:
        given.update(read_options(last, kinds, where=text))
    return replace(made, **given)


def to_text(wire: Coded) -> str:
    """Return the text of which `parse` makes the codec.

    >>> to_text(LowRank(rank=2, split="count", groups={"a.*": 4}))
    'lowrank@2:split=count:groups=a.*@4'
    """
    name, main = next((n, e.option) for n, e in BY_NAME.items() if e.make is type(wire))
    text, last = name, ""
    if main and getattr(wire, main) != getattr(type(wire), main):
        text += f"@{getattr(wire, main)}"
    for each in fields(wire):
        value = getattr(wire, each.name)
        if each.name == "groups":
            last = "+".join(f"{pattern}@{own}" for pattern, own in value)
        elif value != each.default and each.name != main:
            text += f":{each.name}={str(value).lower() if isinstance(value, bool) else value}"
    return f"{text}:groups={last}" if last else text


def read_groups(text: str) -> tuple[tuple[str, int | str], ...]:
    """Read ``PATTERN@WIRE+PATTERN@WIRE``, a number for a number of bits.

    >>> read_groups("features.*@fp32+*.bias@8")
    (('features.*', 'fp32'), ('*.bias', 8))

    Raises:
        UsageError: something else.
    """
    found: list[tuple[str, int | str]] = []
    for item in text.split("+"):
        pattern, at, value = item.partition("@")
        if not pattern or not at or not value:
            raise UsageError(
                f"groups={text!r}: {item!r} is no group; write PATTERN@BITS or PATTERN@WIRE, "
                "several with + between, such as features.*@fp32+classifier.*@4"
            )
        found.append((pattern, int(value) if value.isdecimal() else value))
    return tuple(found)


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
    kinds = {kind.__name__: kind for kind in get_args(Coded)}
    try:
        name, options = listed
        make = kinds.get(name) if isinstance(name, str) else None
        if make is None:
            raise unknown("wire", str(name)[:40], kinds)
        made: Coded = make(**options)
    except (TypeError, ValueError, RecursionError) as err:
        if isinstance(err, UsageError):
            raise
        raise UsageError(f"malformed wire {reprlib.repr(listed)}: {err!s:.80}") from None
    return made


def density_groups(groups: Any) -> tuple[tuple[str, float], ...]:
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


HALF_BYTES = 2
"""Bytes of an element in half precision."""

INDEX_BYTES = 2
"""Bytes that say which value it is that top-k sends."""


@functools.lru_cache(maxsize=4096)
def for_parameter(wire: str | Coded, name: str) -> str | Coded:
    """Return what the parameter ``name`` travels as, without groups; empty for its own dtype.

    >>> for_parameter(Sketch(groups={"features.*": "fp32"}), "features.0.weight")
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


def unmatched_patterns(wire: str | Coded, names: Iterable[str]) -> list[str]:
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
