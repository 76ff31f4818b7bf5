"""Parts by name, as in ``Strategy(plan="merged")``.

``@`` and a value may follow a name, which sets the option given here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wingbeat import parts, topologies
from wingbeat.parts.plan import SEARCHES
from wingbeat.settings import Named, count_of
from wingbeat.topologies import BCube


def _entry(
    part: str, option: str = "", convert: Callable[[str], Any] = float, **options: Any
) -> Named[Any]:
    """Return the entry of a class of `wingbeat.parts`, which is loaded on first use."""
    return Named(lambda **given: getattr(parts, part)(**options, **given), option, convert)


def _bcube(size: tuple[int, int] = (0, 0)) -> BCube:
    return BCube(*size)


PLANS: Mapping[str, Named[Any]] = {
    "fixed": _entry("FixedBuckets", "mb"),
    **{search: _entry("TunedBuckets", search=search) for search in SEARCHES},
    "layers": _entry("Layers", "count", int),
    "elements": _entry("Elements", "count", int),
    "colayers": _entry("Colayers", "count", int),
    "none": _entry("PerTensor"),
    "one": _entry("OneBucket"),
    "merged": _entry("Merged", "rule", str),
    "chosen": _entry("Chosen", "steps", int),
}

EXCHANGES: Mapping[str, Named[Any]] = {
    **{name: Named(type(topology)) for name, topology in topologies.BY_NAME.items()},
    "bcube": Named(_bcube, "size", topologies.parse_size),
    "elastic": _entry("Elastic", "min_replicas", int),
    "servers": _entry("Servers", "count", int),
    "bounded": _entry("Bounded", "s", count_of),
    "groups": _entry("Groups", "policy", str),
    "pairs": _entry("Pairs"),
}

SCHEDULES: Mapping[str, Named[Any]] = {
    "wfbp": _entry("WaitFree"),
    "dear": _entry("Decoupled"),
    "served": _entry("Served", "pull", str),
    "stale": _entry("Stale"),
    "local": _entry("Local", "every", int),
}

UPDATES: Mapping[str, Named[Any]] = {
    "whole": _entry("Whole"),
    "deferred": _entry("Deferred"),
    "sharded": _entry("Sharded"),
    "servers": _entry("OnServers"),
    "rounds": _entry("InRounds"),
    "averaged": _entry("Averaged"),
    "outer": _entry("Outer", "lr", float),
}
