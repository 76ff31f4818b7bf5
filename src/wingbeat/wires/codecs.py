"""What gradients may travel as, and how it is written.

On the command line a wire is ``name`` or ``name@value``, with the option that matters most;
then ``:key=value`` for each of the others. Groups of parameters come last, with + between them:

>>> of("topk@0.05")
TopK(density=0.05)
>>> of("sketch@4:split=count:groups=features.*@fp32+*.bias@8")
Sketch(bits=4, split='count', groups=(('features.*', 'fp32'), ('*.bias', 8)))
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, cast, get_args

from wingbeat.errors import UsageError, unknown
from wingbeat.settings import READ, Named, Settings, is_number, kinds_of, named, read_options
from wingbeat.traits import WHOLE, Part

SPLITS = ("error", "count")
LEVELS = ("mean", "ends")
MOST_BITS = 8
WHOLE_BITS = 32
"""Of a value that is not sketched."""

Groups = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""Patterns of parameters' names, and what those travel as."""


class CodecPart(Part, Settings):
    """What gradients travel as, where that is no mere dtype.

    Attributes:
        gathers: whether under whole all-reduces each worker's payload goes to all the others.
    """

    @property
    def summed(self) -> bool:
        """Whether all-reduces can sum what gradients are written as, as it is."""
        return False

    exact: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    @property
    def keeps(self) -> bool:
        """Whether residuals are kept of any gradients."""
        return False

    @property
    def ends_after(self) -> int | None:
        """Iterations after which gradients are dense; None: never."""
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class _Sketched(CodecPart):
    """What the two wires with sketches share."""

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
        """Raise a `UsageError` for bits that no value is written with."""
        self.check_count("bits", 1, MOST_BITS)

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
        """Return the groups as pairs of text, which can be hashed and written anywhere."""
        try:
            listed = groups.items() if isinstance(groups, Mapping) else groups
            pairs = [(pattern, value) for pattern, value in listed]
        except (TypeError, ValueError):
            pairs = [(groups, None)]
        return tuple((pattern, self._value(pattern, value)) for pattern, value in pairs)

    def _value(self, pattern: Any, value: Any) -> int | str:
        where = f"{type(self).__name__}(groups=...): {pattern!r}: {value!r}"
        text = spelled(value) if isinstance(value, Coded) else value
        if isinstance(pattern, str) and pattern and isinstance(text, int | str):
            own = self._own(where, text)
            inner = isinstance(own, _Sketched) and (own.groups or own.share != 1 or own.total)
            if own != DTYPES["bf16"] and not isinstance(own, TopK) and not inner:
                # One spelling of each: equal groups are to be equal.
                return spelled(own) if isinstance(own, Coded) and isinstance(text, str) else text
        raise UsageError(
            f"{where} is no group; allowed are patterns of parameter names with a number of bits, "
            '"fp32", "fp16", or a sketch or lowrank without groups and share of its own, such as '
            "{'features.0.*': 'fp32', 'classifier.*': 4}"
        )

    def _own(self, where: str, value: int | str) -> str | Coded:
        if isinstance(value, str):
            return of(value)
        if isinstance(value, bool) or not 1 <= value <= MOST_BITS:
            raise UsageError(f"{where}: allowed are whole numbers of bits, 1 to {MOST_BITS}")
        return cast("Coded", replace(self, bits=value, groups=(), share=1.0, total=0))

    @property
    def keeps(self) -> bool:
        """As ``feedback`` says, and groups that say otherwise."""
        return any(getattr(each, "feedback", False) for _, each in self.of_groups())

    @property
    def ends_after(self) -> int | None:
        """Iterations after which gradients are dense; None: never."""
        return None if self.share == 1 else round(self.share * self.total)

    def of_groups(self) -> list[tuple[str, str | Coded]]:
        """Return every pattern and what its group travels as; last ``*``, for all others."""
        each = [(pattern, self._own("", value)) for pattern, value in self._listed]
        return [*each, ("*", self._of_others())]

    def _of_others(self) -> Coded:
        """Return what those travel as that are in no group."""
        return cast("Coded", replace(self, groups=(), share=1.0, total=0))

    @property
    def _listed(self) -> tuple[tuple[str, int | str], ...]:
        return cast("tuple[tuple[str, int | str], ...]", self.groups)


@dataclass(frozen=True, kw_only=True, repr=False)
class Sketch(_Sketched):
    """Each value travels as the number of the bucket of values that it is in (Canary, 4.3.1).

    Args:
        bits: bits of that number, 1 to 8; the fewer, the fewer bytes.
        split: how values are split into buckets: ``"error"`` makes the squared error small,
            ``"count"`` makes the buckets equally full, as the paper does.
        level: what stands for the values of a bucket: the ``"mean"`` of its members, or the mean
            of its two ``"ends"``, as in the paper.
        feedback: keep what the rounding took away, and add it to the next iteration's gradients.
        groups: what parameters travel as whose names match a pattern: a number of bits,
            ``"fp32"``, or another wire, such as ``{"features.*": 4, "*.bias": "fp32"}``; the
            first that matches counts, all others have the settings given here. ``"fp32"`` beside
            others in a bucket is float32.
        share: of all iterations, that with the codec: the first ``round(share * total)`` of them;
            the others are dense (Canary, Fig. 22a). Below 1 only with ``auto_disable=False``.
        total: how many iterations the whole training has; needed with a share.
        auto_disable: measure in the first iterations whether this is faster than fp32, and use
            fp32 if it is not; False: use it in any case.

    Raises:
        UsageError: a value out of range.
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(CodecPart):
    """Only the largest gradients travel; the others wait until they have grown (OMGS-SGD, II-C).

    The defaults are for a first try that learns: a gradient waits a hundred steps on average, and
    none while the weights change fastest. OMGS-SGD has ``density=0.001, warmup=0``.

    Args:
        density: share of the gradients that travel, above 0 up to 1.
        warmup: steps in which the density falls exponentially from 0.25 to ``density``
            (Deep Gradient Compression, section 3.3); 0: none. By default its mean is 0.075 in
            these steps, and so in a training that is no longer.
        momentum: correct for the momentum that waiting gradients would lose (the same paper,
            section 3.2); use it in place of the optimizer's own, which must be 0 then.
        bits: of a value that travels: 32 as it is, 1 to 8 through a sketch of all that travel
            (SparseLoCo, Sarfi et al., 2025, has 2); what that takes away waits too.
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
    bits: int = 32
    groups: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    auto_disable: bool = True

    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_number("density", "numbers above 0 up to 1", lambda v: 0 < v <= 1)
        object.__setattr__(self, "groups", pairs(self.groups))
        self.check_count("warmup", 0, 10_000_000)
        self.check_number("momentum", "numbers from 0 to 0.9999", lambda v: 0 <= v <= 0.9999)
        widths = (*range(1, MOST_BITS + 1), WHOLE_BITS)
        whole = f"whole numbers, 1 to {MOST_BITS}, or {WHOLE_BITS}"
        self.check_number("bits", whole, lambda v: isinstance(v, int) and v in widths)
        self.check_flag("auto_disable")

    @property
    def keeps(self) -> bool:
        """Always: most gradients wait."""
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
        for pattern, density in pairs(self.groups):
            if fnmatchcase(name, pattern):
                return density
        return self.density


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRank(_Sketched):
    """Matrices travel as two thin factors, where these are smaller; the rest as it is.

    Factors are summed as PowerSGD does it (Vogels et al., 2019), where all workers sum gradients
    by all-reduces, and bytes do not grow with their number. Fully connected layers and
    convolutions are matrices, as their first dimension has it.

    With ``bits`` factors are sketched, and so is the rest (Canary, 4.3.1); their owners decode and
    add them. ``LowRank(bits=8, split="count", level="ends")`` is that paper's: large fully
    connected layers have matrices (case 1), convolutions have none (case 2).

    Args:
        rank: columns of the factors, 1 to 256.
        bits: of a value: 32 as it is, 1 to 8 through a sketch.
        split: of all sketches, as for `Sketch`.
        level: of all sketches, as for `Sketch`.
        feedback: keep what was taken away, and add it to the next iteration's gradients.
        groups: as for `Sketch`; a number of bits leaves the rank as it is. With anything but
            ``"fp32"`` and low rank without bits in one, owners decode and add all factors.
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
        """Raise a `UsageError` for bits that no value is written with."""
        widths = (*range(1, MOST_BITS + 1), WHOLE_BITS)
        whole = f"whole numbers, 1 to {MOST_BITS}, or {WHOLE_BITS}"
        self.check_number("bits", whole, lambda v: isinstance(v, int) and v in widths)

    def _of_others(self) -> Coded:
        if self.bits != WHOLE_BITS:
            return super()._of_others()
        return replace(self, groups=(), share=1.0, total=0, split=SPLITS[0], level=LEVELS[0])

    @property
    def summed(self) -> bool:
        """Where all are factors without bits, or exact."""
        own = (found for _, found in self.of_groups())
        return all(
            not each or (isinstance(each, LowRank) and each.bits == WHOLE_BITS) for each in own
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Half(CodecPart):
    """Half precision, each chunk scaled so that no value is too large or too small for it."""

    auto_disable: bool = False

    def __post_init__(self) -> None:
        self.check_flag("auto_disable")


Coded = Sketch | TopK | LowRank | Half
"""The settings of a codec."""

Wire = str | Coded
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


def of(wire: Wire) -> str | Coded:
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


def spelled(wire: Coded) -> str:
    """Return the text of which `of` makes the codec.

    >>> spelled(LowRank(rank=2, split="count", groups={"a.*": 4}))
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
