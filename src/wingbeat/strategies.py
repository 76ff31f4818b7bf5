"""The presets: each strategy is a frozen, keyword-only dataclass that names its choices.

On the command line a strategy is ``name`` or ``name:key=value,key=value``; the name is the
class's in lower case and the keys are its fields, so that there is one list of both:

>>> parse("dear:mb=10")
DeAR(plan='fixed', mb=10.0, topology='ring')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from wingbeat.errors import UsageError, unknown
from wingbeat.types import Choices

TOPOLOGIES = ("ring", "mesh")


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Wait-free backpropagation: buckets are all-reduced while backward goes on, as DDP does.

    Gradients are whole when ``backward()`` returns. Exact: the weights equal DDP's.

    Args:
        mb: bucket size in MB (1 MB = 2**20 bytes); a parameter that is larger travels alone.
        first_mb: size of the bucket that is ready first, small so that the links start early.
        topology: ``"ring"`` (fewest peers) or ``"mesh"`` (direct exchange, fewest hops).

    Raises:
        UsageError: a value out of range.
    """

    mb: float = 25.0
    first_mb: float = 1.0
    topology: str = "ring"

    def __post_init__(self) -> None:
        _check_size(self, "mb")
        _check_size(self, "first_mb")
        _check_name(self, "topology", TOPOLOGIES)

    def choices(self) -> Choices:
        """Return the answers to the five questions of the design, for the engine."""
        return Choices(
            schedule="wfbp",
            topology=self.topology,
            bucket_bytes=int(self.mb * 2**20),
            first_bucket_bytes=int(min(self.first_mb, self.mb) * 2**20),
        )


@dataclass(frozen=True, kw_only=True)
class DeAR:
    """All-reduce split in two: reduce-scatter under backward, all-gather under the next forward.

    DeAR (Zhang et al., 2023), section III: BackPipe starts a bucket's reduce-scatter as soon as
    its gradients are ready; FeedPipe gathers buckets in forward order and updates each one's
    parameters just before the layer that needs them. Exact: the weights equal DDP's.

    Args:
        plan: how buckets are chosen; ``"fixed"`` is a fixed buffer (DeAR-FB, section IV-A).
        mb: bucket size in MB (1 MB = 2**20 bytes); the paper starts at 25.
        topology: ``"ring"`` (fewest peers) or ``"mesh"`` (direct exchange, fewest hops).

    Raises:
        UsageError: a value out of range.
    """

    plan: str = "fixed"
    mb: float = 25.0
    topology: str = "ring"

    def __post_init__(self) -> None:
        _check_name(self, "plan", ("fixed",))
        _check_size(self, "mb")
        _check_name(self, "topology", TOPOLOGIES)

    def choices(self) -> Choices:
        """Return the answers to the five questions of the design, for the engine."""
        size = int(self.mb * 2**20)
        return Choices(
            schedule="dear",
            topology=self.topology,
            bucket_bytes=size,
            first_bucket_bytes=size,
        )


Strategy = AllReduce | DeAR
_CLASSES: dict[str, type[Strategy]] = {c.__name__.lower(): c for c in (AllReduce, DeAR)}


def names() -> list[str]:
    """Return the strategies' names as the command line spells them."""
    return list(_CLASSES)


def parse(text: str) -> Strategy:
    """Turn ``name`` or ``name:key=value,key=value`` into the dataclass that Python users write.

    Raises:
        UsageError: an unknown name or key, or a value of the wrong kind; names the nearest match.
    """
    name, _, rest = text.partition(":")
    if name.lower() not in _CLASSES:
        raise unknown("strategy", name, _CLASSES)
    cls = _CLASSES[name.lower()]
    return cls(**options(rest, {f.name: type(f.default) for f in fields(cls)}, where=text))


def options(text: str, kinds: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Parse ``key=value,key=value`` with each value converted to its field's type.

    Raises:
        UsageError: an unknown key, a missing value, or one that does not convert.
    """
    out: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, eq, value = item.partition("=")
        if key not in kinds:
            raise unknown("option", key, kinds, where=repr(where))
        if not eq or not value:
            raise UsageError(f"option {key!r} in {where!r} has no value; write {key}=VALUE")
        out[key] = _convert(kinds[key], key, value, where)
    return out


def _convert(kind: Callable[[str], Any], key: str, value: str, where: str) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise UsageError(f"option {key}={value!r} in {where!r}: allowed are true and false")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        kind_name = getattr(kind, "__name__", "value")
        raise UsageError(f"option {key}={value!r} in {where!r} is no valid {kind_name}") from None


def _check_size(strategy: Strategy, key: str) -> None:
    value = getattr(strategy, key)
    ok = isinstance(value, (int, float)) and 0 < value <= 4096
    if not ok:
        raise UsageError(
            f"{type(strategy).__name__}({key}={value!r}): allowed are sizes above 0 up to 4096 MB"
        )


def _check_name(strategy: Strategy, key: str, allowed: tuple[str, ...]) -> None:
    value = getattr(strategy, key)
    if value not in allowed:
        raise unknown(f"{type(strategy).__name__} {key}", str(value), allowed)
