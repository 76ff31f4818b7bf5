"""Compression options for gradients, and their textual form.

The textual form is ``name`` or ``name@value``, where the value is the main option, followed by
``:key=value`` for other options. Groups of parameters come last, separated by ``+``:

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
from typing import TYPE_CHECKING, Any, ClassVar, cast

from wingbeat.errors import UsageError, unknown
from wingbeat.settings import READ, Named, Settings, is_number, kinds_of, named, read_options
from wingbeat.traits import WHOLE, Part

if TYPE_CHECKING:
    from typing_extensions import Self  # `typing` has it from Python 3.11 on

SPLITS = ("error", "count")
LEVELS = ("mean", "ends")
MAX_BITS = 8
WHOLE_BITS = 32
"""Bits of a value that is not sketched."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CodecOptions(Part, Settings):
    """Options of a codec; those that a codec does not have are neutral.

    Attributes:
        encodes: whether there is a codec; False for a dtype, which `options_of` describes.
        dtype: name of the dtype in which gradients are sent, if not in their own; codecs have none.
        gathers: whether all-reduces during backward send each worker's payload to all others.
        rounded_bytes: bytes of an element if values are only rounded; 0 for other codecs.
        momentum: factor of momentum correction.
    """

    exact: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    encodes: ClassVar[bool] = True
    rounded_bytes: ClassVar[int] = 0
    # Not annotated: no options, unless a codec has them.
    auto_disable = False
    bits = WHOLE_BITS
    dtype = ""
    feedback = False
    groups = cast("Any", ())
    momentum = 0.0
    rank = 0

    @property
    def summed(self) -> bool:
        """Whether all-reduces can sum encoded gradients directly."""
        return False

    @property
    def keeps(self) -> bool:
        """Whether residuals are kept for any gradients."""
        return False

    @property
    def ends_after(self) -> int | None:
        """Number of iterations after which gradients are dense; None: never."""
        return None

    @property
    def warmup_steps(self) -> int:
        """Number of first steps in which more is sent than later."""
        return 0

    @property
    def fixed_density(self) -> float | None:
        """Fraction of the gradients that is sent after the warm-up; None: all."""
        return None

    def without_trial(self) -> Self:
        """Return the same options with ``auto_disable=False``."""
        return replace(self, auto_disable=False)  # type: ignore[call-arg]

    def without_warmup(self) -> Self:
        """Return the options of the steps after the warm-up."""
        return self

    @property
    def key_text(self) -> str:
        """The text by which measurements after the warm-up are stored and compared."""
        return repr(self)

    @property
    def selective(self) -> bool:
        """Whether it is not used for all parameters alike, or not in all iterations."""
        return False

    def for_differences(self) -> Self:
        """Return the options for differences of models, of workers that are not in lockstep."""
        return self.without_trial()

    def check_differences(self, where: str) -> None:
        """Raise a `UsageError` for options that apply to gradients only."""
        if self.ends_after is not None:
            raise UsageError(
                f"{where}, compression={self!r}): iterations are not counted by averages; leave "
                "share out"
            )

    def of_parameter(self, name: str) -> str | CodecOptions:  # noqa: ARG002
        """Return the options for a parameter, without groups; empty for its own dtype."""
        return self

    def of_groups(self) -> list[tuple[str, str | CodecOptions]]:
        """Return every pattern and the compression of its group; the last is ``*``."""
        return [("*", self)]

    def matrix_of(self, shape: Sequence[int]) -> tuple[int, int]:  # noqa: ARG002
        """Return the rows and columns of a gradient's matrix for low rank, or ``(0, 0)``."""
        return 0, 0

    def least_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Return the approximate minimum bytes of an encoded gradient, without tables."""
        return math.prod(shape) * min(itemsize, self.rounded_bytes or itemsize)


Coded = CodecOptions
"""Type of a codec's options."""


@dataclass(frozen=True, kw_only=True, repr=False)
class _SketchOptions(CodecOptions):
    """Options common to `Sketch` and `LowRank`."""

    bits: int = 8
    split: str = "error"
    level: str = "mean"
    feedback: bool = True
    groups: Any = field(default=(), metadata={READ: lambda text: read_groups(text)})
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
        """Return the groups as hashable pairs."""
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
                # Normalise the spelling, so that equal groups compare equal.
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
        return replace(self, bits=value, groups=(), share=1.0, total=0)

    @property
    def keeps(self) -> bool:
        """Whether error feedback is enabled for any group."""
        return any(options_of(each).feedback for _, each in self.of_groups())

    @property
    def ends_after(self) -> int | None:
        """Number of iterations after which gradients are dense; None: never."""
        return None if self.share == 1 else round(self.share * self.total)

    @property
    def selective(self) -> bool:
        """Whether there are groups, or a share of iterations."""
        return self.ends_after is not None or bool(self.groups)

    def of_groups(self) -> list[tuple[str, str | CodecOptions]]:
        """As `CodecOptions.of_groups`."""
        each = [(pattern, self._own("", value)) for pattern, value in self.groups]
        return [*each, ("*", self._of_others())]

    def of_parameter(self, name: str) -> str | CodecOptions:
        """As `CodecOptions.of_parameter`: the first match."""
        return next(found for pattern, found in self.of_groups() if fnmatchcase(name, pattern))

    def least_bytes(self, shape: Sequence[int], itemsize: int) -> int:  # noqa: ARG002
        """As `CodecOptions.least_bytes`."""
        return int(math.prod(shape) * self.bits / 8)

    def _of_others(self) -> Self:
        return replace(self, groups=(), share=1.0, total=0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Sketch(_SketchOptions):
    """Each value is sent as the index of its quantization bucket (Canary, section 4.3.1).

    Args:
        bits: bits of the index, 1 to 8.
        split: how values are divided into buckets: ``"error"`` approximately minimizes the squared
            error, ``"count"`` gives the buckets equal counts, as in the paper.
        level: the value of a bucket: the ``"mean"`` of its members, or the mean of its two
            ``"ends"``, as in the paper.
        feedback: add the rounding error to the next iteration's gradients.
        groups: compression of the parameters whose names match a pattern: a number of bits,
            ``"fp32"``, or another compression, such as ``{"features.*": 4, "*.bias": "fp32"}``.
            The first match applies; all other parameters use the options given here. In a bucket
            with other codecs, ``"fp32"`` is always float32.
        share: fraction of iterations with the codec: the first ``round(share * total)``; later
            ones are dense (Canary, Fig. 22a). A value below 1 requires ``auto_disable=False``.
        total: number of iterations of the whole training; required if ``share`` is below 1.
        auto_disable: measure in the first iterations whether the codec is faster than fp32, and
            use fp32 if it is not. False always uses the codec.

    Raises:
        UsageError: a value is out of range.
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(CodecOptions):
    """Only the largest gradients are sent; the others accumulate (OMGS-SGD, section II-C).

    The defaults favour convergence: a gradient is delayed by a hundred steps on average, but less
    while the weights change fastest. OMGS-SGD uses ``density=0.001, warmup=0``.

    Args:
        density: fraction of the gradients that is sent, above 0 up to 1.
        warmup: steps in which the density decreases exponentially from 0.25 to ``density``
            (Deep Gradient Compression, section 3.3); 0 disables it. With the defaults the mean
            density of these steps is 0.075.
        momentum: momentum correction for delayed gradients (the same paper, section 3.2). It
            replaces the optimizer's momentum, which must be 0.
        bits: bits of a sent value: 32 for float32, 1 to 8 for a sketch of all sent values
            (SparseLoCo, Sarfi et al., 2025, uses 2), whose error is kept too.
        groups: densities of the parameters whose names match a pattern, such as
            ``{"embedding.*": 0.01}``. The first match applies; all others use ``density``.
        auto_disable: measure in the first iterations whether the codec is faster than fp32, and
            use fp32 if it is not. False always uses the codec.

    Raises:
        UsageError: a value is out of range.
    """

    density: float = 0.01
    warmup: int = 400
    momentum: float = 0.0
    bits: int = 32
    groups: Any = ()
    auto_disable: bool = True

    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_number("density", "numbers above 0 up to 1", lambda v: 0 < v <= 1)
        object.__setattr__(self, "groups", density_groups(self.groups))
        self.check_count("warmup", 0, 10_000_000)
        self.check_number("momentum", "numbers from 0 to 0.9999", lambda v: 0 <= v <= 0.9999)
        _check_bits_or_whole(self)
        self.check_flag("auto_disable")

    @property
    def keeps(self) -> bool:
        """True, as most gradients are delayed."""
        return True

    @property
    def needs(self) -> frozenset[str]:
        """Momentum correction requires undivided buckets on each worker."""
        return frozenset({WHOLE} if self.momentum else ())

    @property
    def warmup_steps(self) -> int:
        """Number of steps in which the density decreases."""
        return self.warmup

    def without_warmup(self) -> Self:
        """As `CodecOptions.without_warmup`."""
        return replace(self, warmup=0)

    @property
    def key_text(self) -> str:
        """As `CodecOptions.key_text`; the density is included even if it is the default."""
        others = repr(replace(self, density=TopK.density, warmup=TopK.warmup))
        density = f"TopK(density={self.density!r}"
        return others.replace("TopK(", f"{density}, ").replace(", )", ")")

    def for_differences(self) -> Self:
        """Return the options for differences of models, which travel at one density."""
        return replace(self, auto_disable=False, warmup=0)

    def check_differences(self, where: str) -> None:
        """Raise a `UsageError` for options that apply to gradients only."""
        if self.momentum:
            raise UsageError(
                f"{where}, compression={self!r}): momentum correction is of gradients, and here "
                "the outer optimizer has momentum; write momentum=0, and Outer(momentum=...)"
            )
        if self.warmup not in (0, TopK.warmup):
            raise UsageError(
                f"{where}, compression={self!r}): differences of many steps travel at one density "
                "from the first on; leave warmup out"
            )

    @property
    def fixed_density(self) -> float:
        """The density after the warm-up."""
        return self.density

    def of_parameter(self, name: str) -> TopK:
        """Return the options with the density of a parameter.

        >>> TopK(density=0.01, groups={"embedding.*": 0.5}).of_parameter("embedding.weight")
        TopK(density=0.5)
        """
        for pattern, density in self.groups:
            if fnmatchcase(name, pattern):
                return replace(self, density=density, groups=())
        return replace(self, groups=()) if self.groups else self

    def least_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """As `CodecOptions.least_bytes`."""
        encoded = (self.bits / 8 + INDEX_BYTES) * self.density
        return int(math.prod(shape) * min(itemsize, encoded))


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRank(_SketchOptions):
    """Matrices are sent as two thin factors if these are smaller; other gradients are dense.

    All-reduces sum the factors as in PowerSGD (Vogels et al., 2019), so that the number of bytes
    does not grow with the number of workers. Fully connected layers and convolutions are matrices,
    with the first dimension as rows.

    With ``bits`` below 32, factors and other gradients are sketched (Canary, section 4.3.1), and
    the owners of blocks decode and add them. ``LowRank(bits=8, split="count", level="ends")`` is
    that paper's codec: only large fully connected layers are matrices (case 1), convolutions are
    not (case 2).

    Args:
        rank: columns of the factors, 1 to 256.
        bits: bits of a value: 32 for float32, 1 to 8 for a sketch.
        split: as for `Sketch`, for all sketches.
        level: as for `Sketch`, for all sketches.
        feedback: add the error to the next iteration's gradients.
        groups: as for `Sketch`; a number of bits keeps the rank. If a group is neither ``"fp32"``
            nor low rank with 32 bits, the owners of blocks decode and add all factors.
        share: as for `Sketch`.
        total: as for `Sketch`.
        auto_disable: measure in the first iterations whether the codec is faster than fp32, and
            use fp32 if it is not. False always uses the codec.

    Raises:
        UsageError: a value is out of range.
    """

    rank: int = 4
    bits: int = WHOLE_BITS

    def __post_init__(self) -> None:
        self.check_count("rank", 1, 256)
        super().__post_init__()
        sketched = self.bits != WHOLE_BITS or any(isinstance(v, int) for _, v in self.groups)
        for name in ("split", "level"):
            if getattr(self, name) != getattr(LowRank, name) and not sketched:
                raise UsageError(
                    f"LowRank({name}={getattr(self, name)!r}): it is how factors are sketched, and "
                    f"with bits={self.bits} they are not: add bits=8, or leave out {name}"
                )

    def check_bits(self) -> None:
        """Raise a `UsageError` unless ``bits`` is valid."""
        _check_bits_or_whole(self)

    def _of_others(self) -> Self:
        if self.bits != WHOLE_BITS:
            return super()._of_others()
        return replace(self, groups=(), share=1.0, total=0, split=SPLITS[0], level=LEVELS[0])

    @property
    def summed(self) -> bool:
        """True if every group is fp32 or low rank with 32 bits."""
        own = (found for _, found in self.of_groups())
        return all(
            not each or (isinstance(each, LowRank) and each.bits == WHOLE_BITS) for each in own
        )

    def matrix_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of a gradient's matrix.

        The first dimension longer than 1 is the rows. The result is ``(0, 0)`` if dense factors
        would have at least half of the elements.

        >>> LowRank(rank=4).matrix_of((64, 3, 7, 7)), LowRank(rank=4).matrix_of((10, 10))
        ((64, 147), (0, 0))
        """
        if self.bits != WHOLE_BITS:  # Canary: only fully connected layers
            return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)
        rows = next((size for size in shape if size > 1), 1)
        cols = math.prod(shape) // rows
        worth = 2 * self.rank * (rows + cols) < rows * cols
        return (rows, cols) if worth else (0, 0)

    def least_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """As `CodecOptions.least_bytes`."""
        numel, (rows, cols) = math.prod(shape), self.matrix_of(shape)
        thin = min(numel, self.rank * (rows + cols)) if rows else numel
        return thin * itemsize if self.bits == WHOLE_BITS else int(thin * self.bits / 8)


@dataclass(frozen=True, kw_only=True, repr=False)
class Half(CodecOptions):
    """Half precision (float16), with a scale per chunk that prevents overflow and underflow."""

    auto_disable: bool = False

    rounded_bytes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self.check_flag("auto_disable")


@dataclass(frozen=True, kw_only=True, repr=False)
class _Dtype(CodecOptions):
    """Gradients are summed in the dtype of that name; empty: in their own."""

    dtype: str = ""

    encodes: ClassVar[bool] = False

    @property
    def rounded_bytes(self) -> int:  # type: ignore[override]
        """2 for a narrower dtype."""
        return 2 if self.dtype else 0

    @property
    def key_text(self) -> str:
        """The dtype's name in `DTYPES`."""
        return next((name for name, dtype in DTYPES.items() if dtype == self.dtype), self.dtype)


@functools.cache
def _dtype(name: str) -> CodecOptions:
    return _Dtype(dtype=name)


def options_of(wire: str | CodecOptions) -> CodecOptions:
    """Return a codec's options, or those of a dtype, which are neutral but for its name."""
    return _dtype(wire) if isinstance(wire, str) else wire


def codec_of(wire: str | CodecOptions) -> CodecOptions | None:
    """Return a codec's options; None for a dtype."""
    return None if isinstance(wire, str) else wire


def _check_bits_or_whole(options: CodecOptions) -> None:
    widths = (*range(1, MAX_BITS + 1), WHOLE_BITS)
    allowed = f"whole numbers, 1 to {MAX_BITS}, or {WHOLE_BITS}"
    options.check_number("bits", allowed, lambda v: isinstance(v, int) and v in widths)


Compression = str | Coded
"""Type of a strategy's ``compression``: the name of a dtype or codec, or a codec's options."""

DTYPES = {"fp32": "", "bf16": "bfloat16"}
"""Dtypes by name, in which gradients are summed at each hop; empty: the gradients' dtype."""

BY_NAME: Mapping[str, Named[Coded]] = {
    "fp16": Named(Half),
    "sketch": Named(Sketch, "bits", int),
    "topk": Named(TopK, "density"),
    "lowrank": Named(LowRank, "rank", int),
}


def parse(wire: Compression) -> str | Coded:
    """Return the codec's options, or the dtype's name, which is empty for the gradients' dtype.

    Raises:
        UsageError: the name is unknown, or a value is out of range.
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
    # Groups may contain options.
    plain, *groups = re.split(r"(?:^|:)(?=groups=)", rest, maxsplit=1)
    kinds = kinds_of(type(made))
    given = read_options(plain.replace(":", ","), kinds, where=text)
    for last in groups:
        given.update(read_options(last, kinds, where=text))
    return replace(made, **given)


def to_text(wire: Coded) -> str:
    """Return the textual form that `parse` reads.

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
    """Parse ``PATTERN@WIRE+PATTERN@WIRE``, where a number means bits.

    >>> read_groups("features.*@fp32+*.bias@8")
    (('features.*', 'fp32'), ('*.bias', 8))

    Raises:
        UsageError: the text is malformed.
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
    """Return a codec's options as a JSON value: the class name and the fields.

    >>> to_json(Half())
    ['Half', {'auto_disable': False}]
    """
    return [type(wire).__name__, asdict(wire)]


def from_json(listed: Sequence[Any]) -> Coded:
    """Return the options from the result of `to_json`.

    >>> from_json(to_json(Sketch(bits=4)))
    Sketch(bits=4)

    Raises:
        UsageError: the codec is unknown, or a value is out of range.
    """
    kinds = {type(entry.make()).__name__: entry.make for entry in BY_NAME.values()}
    try:
        name, options = listed
        make = kinds.get(name) if isinstance(name, str) else None
        if make is None:
            raise unknown("compression", str(name)[:40], kinds)
        made: Coded = make(**options)
    except (TypeError, ValueError, RecursionError) as err:
        if isinstance(err, UsageError):
            raise
        raise UsageError(f"malformed compression {reprlib.repr(listed)}: {err!s:.80}") from None
    return made


def density_groups(groups: Any) -> tuple[tuple[str, float], ...]:
    """Return the densities of groups of parameters as hashable pairs.

    Raises:
        UsageError: a pattern is malformed, or a density is out of range.
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


INDEX_BYTES = 2
"""Bytes of the index of a value in top-k."""


@functools.lru_cache(maxsize=4096)
def for_parameter(wire: str | CodecOptions, name: str) -> str | CodecOptions:
    """Return the compression of the parameter ``name``, without groups; empty for its dtype.

    >>> for_parameter(Sketch(groups={"features.*": "fp32"}), "features.0.weight")
    ''
    """
    codec = codec_of(wire)
    return wire if codec is None else codec.of_parameter(name)


def kinds(wire: CodecOptions) -> tuple[str | CodecOptions, ...]:
    """Return the compressions of all parameters; the first is always "", float32.

    Equal options give equal lists, so that a position identifies a compression.

    >>> kinds(Sketch(bits=4, groups={"features.*": 2, "*.bias": "fp32"}))
    ('', Sketch(bits=4), Sketch(bits=2))
    """
    *groups, (_, others) = wire.of_groups()
    return tuple(dict.fromkeys(["", others, *(found for _, found in groups)]))


def unmatched_patterns(wire: str | CodecOptions, names: Iterable[str]) -> list[str]:
    """Return the patterns of groups that match none of the names, in order."""
    known, groups = list(names), options_of(wire).groups
    return [p for p, _ in groups if not any(fnmatchcase(name, p) for name in known)]


def least_bytes(wire: str | CodecOptions, shape: Sequence[int], itemsize: int) -> int:
    """Return the approximate minimum bytes of an encoded gradient of ``shape``, without tables.

    >>> least_bytes(Sketch(bits=4), (1000, 10), 4), least_bytes("bfloat16", (1000,), 4)
    (5000, 2000)
    >>> least_bytes(LowRank(rank=4), (1000, 1000), 4)
    32000
    """
    return options_of(wire).least_bytes(shape, itemsize)
