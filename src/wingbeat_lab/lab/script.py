"""Faults at given seconds, to test fault tolerance.

``10s h2.eth0 down; 12s h2.eth0 up; 15s kill h1; 20s rate h3 100mbit`` or a TOML file::

    [[fail]]
    at = "10s"
    do = "h2.eth0 down"

``h2 down`` disconnects all interfaces of host 2; ``kill h1.0`` kills only its first worker. Times
count from the moment all workers have been started.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wingbeat.errors import UsageError, unknown
from wingbeat_lab.lab.spec import (
    LabSpec,
    check_target,
    format_rate,
    parse_rate,
    parse_target,
    parse_time,
    parse_toml,
    read_toml,
)

ACTIONS = ("down", "kill", "rate", "up")
_VICTIM = re.compile(r"h([0-9]{1,6})(?:\.([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class FailEvent:
    """One fault.

    Attributes:
        at: seconds after all workers were started.
        action: ``down``, ``up``, ``kill`` or ``rate``.
        host: the affected host.
        part: the interface (``kill``: the local worker); None for all of the host's.
        rate: for ``rate``, the new bit/s in both directions.
    """

    at: float
    action: str
    host: int
    part: int | None = None
    rate: int = 0

    def to_text(self) -> str:
        """As written in a script."""
        at = f"{self.at:.6f}".rstrip("0").rstrip(".")
        if self.action == "kill":
            return f"{at}s kill h{self.host}" + ("" if self.part is None else f".{self.part}")
        target = f"h{self.host}" + ("" if self.part is None else f".eth{self.part}")
        if self.action == "rate":
            return f"{at}s rate {target} {format_rate(self.rate)}"
        return f"{at}s {target} {self.action}"


def parse_script(text_or_path: str | Path, spec: LabSpec, per_host: int = 1) -> list[FailEvent]:
    """Parse a script, or a file if the value ends in ``.toml``; sorted by time.

    UsageError if a line cannot be parsed, or names something that the lab does not have.
    """
    text = str(text_or_path)
    lines = _toml_lines(text) if text.endswith(".toml") else text.split(";")
    events = [_parse_event(line.strip(), spec, per_host) for line in lines if line.strip()]
    return sorted(events, key=lambda e: e.at)


def _toml_lines(path: str) -> list[str]:
    data = parse_toml(read_toml(path, "fail script"), path)
    for key in data:
        if key != "fail":
            raise unknown("key", key, ["fail"], where=path)
    entries: Any = data.get("fail", [])
    if not isinstance(entries, list):
        raise UsageError(f"{path} must hold [[fail]] tables with at and do")
    return [_toml_line(entry, path) for entry in entries]


def _toml_line(entry: Any, path: str) -> str:
    if not isinstance(entry, dict) or set(entry) != {"at", "do"}:
        raise UsageError(f"each [[fail]] in {path} has the keys at and do, got {entry!r}")
    return f"{entry['at']} {entry['do']}"


def _parse_event(line: str, spec: LabSpec, per_host: int) -> FailEvent:
    words = line.split()
    at = round(parse_time(words[0], where=line), 6)
    match words[1:]:
        case ["kill", victim]:
            return FailEvent(at, "kill", *_parse_victim(victim, line, spec, per_host))
        case ["rate", target, rate]:
            host, part = _parse_link(target, line, spec)
            return FailEvent(at, "rate", host, part, parse_rate(rate, where=line))
        case [target, ("down" | "up") as action]:
            return FailEvent(at, action, *_parse_link(target, line, spec))
    actions = [word for word in words[1:] if not _VICTIM.match(word)]
    if actions and actions[0] not in ACTIONS:
        raise unknown("action", actions[0], ACTIONS, where=repr(line))
    raise UsageError(
        f"cannot read {line!r}; allowed: '10s h2.eth0 down', '10s h2 up', '10s kill h1', "
        "'10s rate h3 100mbit'"
    )


def _parse_link(target: str, line: str, spec: LabSpec) -> tuple[int, int | None]:
    if not spec.shaped:
        raise UsageError(f"{line!r}: a loopback lab has no links of its own; only kill works there")
    host, interface = parse_target(target, where=line)
    check_target(target, host, interface, spec.hosts, spec.rails)
    return host, interface


def _parse_victim(victim: str, line: str, spec: LabSpec, per_host: int) -> tuple[int, int | None]:
    match = _VICTIM.fullmatch(victim)
    if match is None:
        raise UsageError(f"{victim!r} in {line!r} is not a host (h1) or one of its workers (h1.0)")
    host, local = int(match[1]), None if match[2] is None else int(match[2])
    check_target(victim, host, None, spec.hosts, spec.rails)
    if local is not None and local >= per_host:
        allowed = [f"h{host}.{i}" for i in range(per_host)]
        raise unknown("worker", victim, allowed, where=repr(line))
    return host, local
