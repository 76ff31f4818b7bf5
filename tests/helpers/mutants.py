"""What a parser may be given: anything at all, and valid inputs that are spoilt."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import resource
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

DEEP = 100_000
"""Brackets in a document that is nested too deeply for any parser."""

NESTED = 700
"""Levels of a value that a JSON parser still returns."""

_ODD: tuple[Any, ...] = (
    None, True, False, "", "x", "-1", "1e999", "\ud800", "\x00", "٣", "²", "9" * 5000,
    0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400,
    0.0, -0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), [], {}, [[]], {"": None},
)  # fmt: skip
"""Values of every kind, and at the ends of what they may be."""

_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20)
)
anything_json: st.SearchStrategy[Any] = st.recursive(
    _scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
_seeds = st.integers(0, 2**64 - 1)


def values(valid: Sequence[Any]) -> st.SearchStrategy[Any]:
    """JSON values: any, spoilt ones of ``valid``, and deeply nested ones."""
    spoilt = _seeds.map(lambda seed: spoil_value(valid, random.Random(seed)))
    return st.one_of(anything_json, spoilt, spoilt, _any_of(_nested()))


def texts(valid: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts: any, spoilt ones of ``valid``, as characters and as JSON, and bombs."""
    spoilt = _seeds.map(lambda seed: spoil_text(valid, random.Random(seed)))
    any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)
    return st.one_of(any_text, anything_json.map(json.dumps), spoilt, spoilt, _any_of(BOMBS))


def raw(valid: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes: any, spoilt ones of ``valid``, and texts, also such as are no UTF-8."""
    spoilt = _seeds.map(lambda seed: spoil_bytes(valid, random.Random(seed)))
    readable = [data.decode() for data in valid if _is_text(data)]
    written = texts(readable).map(lambda text: text.encode("utf-8", "surrogatepass"))
    return st.one_of(st.binary(max_size=200), spoilt, spoilt, written)


def environments(valid: Sequence[dict[str, str]]) -> st.SearchStrategy[dict[str, str]]:
    """Environments: variables of ``valid`` with other values, or without some."""
    names = sorted({name for each in valid for name in each})
    ends = _any_of(("", "0", "1", "-1", "x[", "²", "9" * 5000, *BOMBS[:2]))
    known = st.sampled_from(sorted({value for each in valid for value in each.values()}))
    drawn = st.dictionaries(st.sampled_from(names), known | ends | st.text(max_size=12))
    return (
        st.tuples(st.sampled_from(list(valid)), drawn).map(lambda both: {**both[0], **both[1]})
        | drawn
    )


BOMBS = (
    "[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP, "(" * DEEP, "9" * 100_000,
    "[1e999999, NaN, -Infinity]", '"\\ud800"', "\ud800", "\x00", "",
)  # fmt: skip
"""Documents that are nested too deeply, too long, or not what they seem."""


@contextlib.contextmanager
def memory_for(nbytes: int) -> Iterator[None]:
    """Have this process get at most ``nbytes`` more of address space: beyond is a `MemoryError`."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _any_of(few: Sequence[Any]) -> st.SearchStrategy[Any]:
    """One of them; `st.sampled_from` would show all of them where one makes a test fail."""
    return st.integers(0, len(few) - 1).map(few.__getitem__)


def _nested() -> list[Any]:
    found: list[Any] = []
    for kind in ("list", "tuple", "x"):
        inner: Any = 0
        for _ in range(NESTED):
            inner = {kind: [inner]}
        found.append(inner)
    flat: Any = 0
    for _ in range(NESTED):
        flat = [flat]
    return [*found, flat]


def spoil_value(valid: Sequence[Any], chance: random.Random) -> Any:
    """Return one of ``valid``, changed in some places."""
    value = json.loads(json.dumps(chance.choice(valid)))
    for _ in range(chance.choice((1, 1, 2, 5))):
        value = _with_one_change(value, chance)
    return value


def _with_one_change(value: Any, chance: random.Random) -> Any:
    """Change one place: go down at random, and spoil what is there."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, other = chance.choice(keys), chance.choice(keys)
        how = chance.random()
        if how < 0.12:
            del value[key]
        elif how < 0.2:
            value[key], value[other] = value[other], value[key]
        elif how < 0.25 and isinstance(value, list):
            value.extend(copy.deepcopy(value * chance.choice((1, 3))))
        elif how < 0.3 and isinstance(value, dict):
            value[chance.choice(("x", "", "\ud800", "wingbeat"))] = _odd(chance)
        else:
            value[key] = _with_one_change(value[key], chance)
        return value
    if isinstance(value, (int, float)) and chance.random() < 0.3:
        return value * chance.choice((-1, 2, 10**6, 10**40, 0))
    if isinstance(value, str) and chance.random() < 0.3:
        return spoil_text([value], chance, json_too=False)
    if chance.random() < 0.1:
        return [value]
    return _odd(chance)


def _odd(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(_ODD))  # a list may be changed next


def spoil_text(valid: Sequence[str], chance: random.Random, *, json_too: bool = True) -> str:
    """Return one of ``valid``, changed in some places, as characters or as JSON."""
    text = chance.choice(valid) if valid else ""
    if json_too and chance.random() < 0.6:
        with contextlib.suppress(ValueError):
            return json.dumps(spoil_value([json.loads(text)], chance))
    parts = (
        "",
        "0",
        "-",
        "@",
        ":",
        ",",
        "=",
        "9" * 30,
        "\ud800",
        "\x00",
        "²",
        "٣",
        "1e999",
        "[",
        '"',
    )
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        cut = end if chance.random() < 0.3 else min(end, at + chance.randrange(3))
        text = text[:at] + chance.choice((*parts, text[at:end] * 2)) + text[cut:]
    return text


def spoil_bytes(valid: Sequence[bytes], chance: random.Random) -> bytes:
    """Return one of ``valid``, changed in some places."""
    data = bytearray(chance.choice(valid))
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        how = chance.randrange(5)
        if how == 0:
            del data[at:]
        elif how == 1:
            del data[at : min(end, at + 8)]
        elif how == 2:
            data[at:at] = chance.randbytes(chance.choice((1, 4, 8)))
        elif how == 3:
            data[at : at + 4] = chance.choice((b"\xff" * 4, bytes(4), b"\x00\x00\x00\x80"))
        elif at < len(data):
            data[at] ^= 1 << chance.randrange(8)
    return bytes(data)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
