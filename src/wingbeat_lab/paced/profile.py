"""Profiles of known networks on stated devices, by name. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from wingbeat.errors import UsageError, unknown
from wingbeat.profiling.profile import (
    Profile,
    check_totals,
    from_object,
    parse_object,
    read_field,
    read_number,
    read_text,
)

PREFIX = "paced:"
"""Prefix of a paced model's name where other kinds of models can be named too."""


def names() -> tuple[str, ...]:
    """Return the names of the profiles that are part of wingbeat, sorted."""
    folder = resources.files("wingbeat_lab.paced") / "profiles"
    found = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name[: -len(".json")] for name in found if name.endswith(".json")))


def load_profile(name: str) -> Profile:
    """Load a profile by name, or from a file of the same format if ``name`` ends in .json.

    Raises:
        UsageError: no such profile or file, or the file is not a valid profile.
    """
    if name.endswith(".json"):
        return decode(read_text(name), where=name)
    if name not in names():
        raise unknown("model", name, names())
    return _bundled(name)


@cache
def _bundled(name: str) -> Profile:
    file = resources.files("wingbeat_lab.paced") / "profiles" / f"{name}.json"
    return decode(file.read_text(encoding="utf-8"), where=f"{name}.json")


def parse(text: str) -> Profile:
    """Convert ``paced:NAME`` or ``paced:NAME@SCALE`` to a profile.

    >>> parse("paced:resnet50@0.25").scale
    0.25

    Raises:
        UsageError: the name does not exist, or the scale is not a number in (0, 1].
    """
    if not text.startswith(PREFIX):
        raise unknown("model", text, [PREFIX + name for name in names()])
    name, at, scale_text = text[len(PREFIX) :].rpartition("@")
    if not at:
        return load_profile(scale_text)
    if not name.endswith(".json") and name not in names():
        raise unknown("model", name, names(), where=repr(text))
    try:
        scale = float(scale_text)
    except ValueError:
        raise UsageError(
            f"scale {scale_text!r} in {text!r}: allowed is a number more than 0 and at most 1"
        ) from None
    return load_profile(name).scaled(scale)


def decode(text: str, *, where: str) -> Profile:
    """Read a profile from JSON text; ``where`` names it in messages.

    A field ``like`` names a bundled profile whose layers are used; ``forward_share`` then overrides
    forward's share of an iteration.

    Raises:
        UsageError: as for any profile, or ``like`` names no bundled one.
    """
    data = parse_object(text, where)
    if "like" not in data:
        return from_object(data, where)
    profile = _like(data, where)
    check_totals(profile, data, where)
    return profile


def _like(data: Mapping[str, Any], where: str) -> Profile:
    """Return a bundled network at the pace of another device."""
    other = read_field(data, "like", str, where)
    if other not in names():
        raise unknown("model", other, names(), where=f"profile {where}: like")
    for key in ("layers", "shapes_from", "split"):
        if key in data:
            raise UsageError(
                f"profile {where}: has both 'like' and {key!r}, which is {other!r}'s; leave one out"
            )
    profile = _bundled(other)
    batch_size = read_field({"batch_size": profile.batch_size, **data}, "batch_size", int, where)
    rate = read_number(data, "samples_per_second", where)
    if batch_size < 1 or rate <= 0:
        raise UsageError(f"profile {where}: batch_size and samples_per_second must be > 0")
    share = read_number(data, "forward_share", where) if "forward_share" in data else None
    if share is not None and not 0 < share < 1:
        raise UsageError(
            f"profile {where}: forward_share is {share:g}; allowed are numbers between 0 and 1"
        )
    texts = {key: read_field(data, key, str, where) for key in ("name", "device", "source")}
    return profile.paced_as(
        batch_size=batch_size, samples_per_second=rate, forward_share=share, **texts
    )


def table(profiles: Iterable[Profile]) -> str:
    """One row per profile: layers, tensors, millions of parameters, MB (1e6 bytes), ms."""
    head = ["model", "batch", "layers", "tensors", "params (M)", "MB", "forward ms", "backward ms"]
    rows = [
        [
            p.name,
            str(p.batch_size),
            str(len(p.layers)),
            str(p.tensors),
            f"{p.params / 1e6:.2f}",
            f"{p.nbytes / 1e6:.1f}",
            f"{p.forward_ms:.1f}",
            f"{p.backward_ms:.1f}",
        ]
        for p in profiles
    ]
    return _markdown(head, rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
