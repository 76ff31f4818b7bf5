"""The cluster to emulate: one frozen dataclass, written as a line of text or a TOML file.

The text is ``kind:size[@rate[+trunk]][,option]...``::

    star:4@1gbit                    4 hosts, one switch, 1 Gbit/s each way
    star:4x2@1gbit                  the same with two interfaces (rails) a host, two switches
    bcube:3x2@250mbit               BCube(3, 2): 9 hosts, one interface for each of 2 levels
    fat-tree:8/4@1gbit+500mbit      8 hosts, 4 a leaf switch, trunks of 500 Mbit/s to a spine
    star:4@1gbit,h3@200mbit         host 3 is slower, on all its interfaces
    star:4x2@1gbit,h3.eth1@200mbit  only its second interface is
    star:4@1gbit,prio=2             two strict-priority classes by DSCP on every port
    star:4@1gbit,ip=6               hosts that have IPv6 addresses only
    fat-tree:8/4@1gbit+1gbit,cross=800mbitx4   others' traffic on every trunk, in 4 flows each way
    loopback:4                      4 workers on this host, no namespaces, links unshaped
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from wingbeat.errors import UsageError, unknown


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a document; UsageError naming ``where`` if it is not TOML."""
    # Imported here because the process inside a lab has only the standard library, which has no
    # TOML on Python 3.10. Only the launcher reads files.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as err:
        raise UsageError(f"{where} is not TOML: {err}") from None
    return data


def read_toml(path: str, kind: str) -> str:
    """Read a file's text; UsageError naming the ``kind`` of file if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise UsageError(f"cannot read {kind} {path!r}: {err.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{kind} {path!r} is not UTF-8 text") from None


RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TIME_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60)}
MIN_RATE, MAX_RATE = 10**6, 100 * 10**9

_NUMBER = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([a-zA-Z/]*)")


def parse_rate(text: str, *, where: str = "") -> int:
    """Parse a rate in bit/s.

    >>> parse_rate("2.5gbit")
    2500000000

    Raises:
        UsageError: not a number and a unit, or outside 1 mbit to 100 gbit.
    """
    value, unit = _number(text, "rate", "1gbit or 500mbit", where)
    if unit.lower() not in RATE_UNITS:
        raise unknown("rate unit", unit, RATE_UNITS, where=_in(text, where))
    bits = value * RATE_UNITS[unit.lower()]
    if bits != int(bits) or not MIN_RATE <= bits <= MAX_RATE:
        raise UsageError(f"rate {_in(text, where)} is outside 1mbit to 100gbit")
    return int(bits)


def format_rate(rate: int) -> str:
    """Format a rate in the largest unit that needs no fraction.

    >>> format_rate(2_500_000_000)
    '2500mbit'
    """
    for unit, factor in sorted(RATE_UNITS.items(), key=lambda item: -item[1]):
        if rate % factor == 0:
            return f"{rate // factor}{unit}"
    raise AssertionError("every whole number divides by one")


def parse_time(text: str, *, where: str = "") -> float:
    """Parse a duration in seconds; a number without unit is seconds.

    >>> parse_time("250ms")
    0.25

    Raises:
        UsageError: not a number with one of the units ms, s, m.
    """
    value, unit = _number(text, "time", "10s or 250ms", where)
    if unit and unit not in TIME_UNITS:
        raise unknown("time unit", unit, TIME_UNITS, where=_in(text, where))
    return float(value * TIME_UNITS[unit or "s"])


def _number(text: str, kind: str, example: str, where: str) -> tuple[Decimal, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (kind == "rate" and not match[2]):
        raise UsageError(f"{kind} {_in(text, where)} needs a number and a unit, such as {example}")
    return Decimal(match[1]), match[2]


def _in(text: str, where: str) -> str:
    return f"{text!r} in {where!r}" if where else repr(text)


KINDS = ("bcube", "fat-tree", "loopback", "star")
MAX_HOSTS = 1000
"""A Linux bridge has at most 1024 ports."""
MAX_BCUBE_HOSTS = 250
"""Addresses are ``10.<level>.<switch>.<digit + 1>``."""
MAX_RAILS = 16
MAX_PRIO = 4
MAX_FLOWS = 64

_N = "[0-9]{1,6}"
_SHAPES = {
    "star": (re.compile(rf"(?P<hosts>{_N})(x(?P<rails>{_N}))?"), "star:4@1gbit or star:4x2@1gbit"),
    "bcube": (re.compile(rf"(?P<alpha>{_N})x(?P<levels>{_N})"), "bcube:3x2@250mbit"),
    "fat-tree": (
        re.compile(rf"(?P<hosts>{_N})(x(?P<rails>{_N}))?/(?P<leaf>{_N})"),
        "fat-tree:8/4@1gbit+500mbit",
    ),
    "loopback": (re.compile(rf"(?P<hosts>{_N})"), "loopback:4"),
}
_SHARE = re.compile(r"[0-9]{0,6}(\.[0-9]{1,6})?(?<=[0-9])")
_TARGET = re.compile(rf"h(?P<host>{_N})(\.eth(?P<interface>{_N}))?")


@dataclass(frozen=True, slots=True, order=True)
class Override:
    """A different rate (bit/s, both directions) of one host, or of one of its interfaces."""

    host: int
    interface: int | None
    rate: int

    @property
    def target(self) -> str:
        """As written in a spec: ``h3`` or ``h3.eth1``."""
        return f"h{self.host}" if self.interface is None else f"h{self.host}.eth{self.interface}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """An emulated cluster.

    Attributes:
        kind: ``star``, ``bcube``, ``fat-tree`` or ``loopback``.
        hosts: number of hosts; for BCube alpha to the power of ``rails``.
        rails: interfaces per host; for BCube the number of levels.
        rate: bit/s of every host link in each direction; 0 for loopback, which is unshaped.
        leaf: fat-tree only, hosts on one leaf switch.
        trunk: fat-tree only, bit/s between a leaf switch and the spine in each direction.
        overrides: hosts or interfaces with another rate.
        prio: strict-priority classes by DSCP on every port: 0 (off) or 2 to 4.
        ip: IP version of the hosts' addresses: 4, or 6 in a star or a fat-tree without ``prio``.
        cross: fat-tree only, bit/s of cross-traffic in each direction of every trunk; 0 for none.
            It is best effort and flows between additional hosts, one on each leaf switch, on
            which no worker runs.
        cross_flows: TCP connections that share ``cross`` in each direction.

    Raises:
        UsageError: an invalid value; the message states what is allowed.
    """

    kind: str
    hosts: int
    rails: int = 1
    rate: int = 0
    leaf: int = 0
    trunk: int = 0
    overrides: tuple[Override, ...] = ()
    prio: int = 0
    ip: int = 4
    cross: int = 0
    cross_flows: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("lab kind", self.kind, KINDS)
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise UsageError(f"{self.hosts} hosts in a {self.kind} lab; allowed: 1 to {MAX_HOSTS}")
        if not 1 <= self.rails <= MAX_RAILS:
            raise UsageError(f"{self.rails} interfaces a host; allowed: 1 to {MAX_RAILS}")
        if self.prio not in (0, *range(2, MAX_PRIO + 1)):
            raise UsageError(f"prio={self.prio}; allowed: 0 (off) or 2 to {MAX_PRIO} classes")
        self._check_version()
        if self.kind == "loopback":
            self._check_loopback()
        elif not self.rate:
            raise UsageError(f"a {self.kind} lab needs a rate, such as {_SHAPES[self.kind][1]}")
        if self.kind == "bcube" and (self.alpha < 2 or self.alpha**self.rails != self.hosts):
            raise UsageError(f"bcube needs alpha >= 2 and alpha ** levels hosts, got {self.hosts}")
        if self.kind == "bcube" and self.hosts > MAX_BCUBE_HOSTS:
            raise UsageError(f"{self.hosts} hosts in a bcube; allowed: up to {MAX_BCUBE_HOSTS}")
        self._check_fat_tree()
        self._check_cross()
        object.__setattr__(self, "overrides", tuple(sorted(self.overrides, key=_override_key)))
        self._check_overrides()

    @property
    def alpha(self) -> int:
        """BCube's switch size: the integer whose ``rails``-th power is ``hosts``."""
        alpha: int = round(self.hosts ** (1 / self.rails))
        return alpha

    @property
    def shaped(self) -> bool:
        """Whether links have rates; those of loopback have none."""
        return self.kind != "loopback"

    def link_rate(self, host: int, interface: int) -> int:
        """Rate in bit/s of one interface: its own override, else its host's, else the lab's."""
        own = {(o.host, o.interface): o.rate for o in self.overrides}
        return own.get((host, interface), own.get((host, None), self.rate))

    def with_prio(self, prio: int) -> LabSpec:
        """The same lab with ``prio`` strict-priority classes (0: off)."""
        return replace(self, prio=prio)

    @property
    def leaves(self) -> int:
        """Leaf switches of each rail; 0 without any."""
        return -(-self.hosts // self.leaf) if self.leaf else 0

    def with_cross(self, amount: str, flows: int = 1) -> LabSpec:
        """The same lab with cross-traffic: a rate, or a share of the trunks' rate from 0 to 1.

        >>> str(LabSpec.parse("fat-tree:4/2@1gbit+1gbit").with_cross("0.8", 4))
        'fat-tree:4/2@1gbit+1gbit,cross=800mbitx4'

        Raises:
            UsageError: the amount is neither, or this lab has no trunk.
        """
        if not self.trunk:
            self._refuse_cross(amount)
        if not _SHARE.fullmatch(amount):
            return replace(self, cross=parse_rate(amount), cross_flows=flows)
        rate = round(float(amount) * self.trunk)
        if not MIN_RATE <= rate <= self.trunk:
            raise UsageError(
                f"cross-traffic of {amount} of a trunk of {format_rate(self.trunk)}; allowed: "
                f"shares from {MIN_RATE / self.trunk:g} to 1, or a rate such as 500mbit"
            )
        return replace(self, cross=rate, cross_flows=flows)

    @classmethod
    def parse(cls, text_or_path: str | Path) -> LabSpec:
        """Parse a spec's text, or a file if the value ends in ``.toml``.

        >>> LabSpec.parse("star:4x2@1gbit,h3@200mbit").link_rate(3, 1)
        200000000

        Raises:
            UsageError: the text, the file or a value in it is invalid.
        """
        text = str(text_or_path)
        if text.endswith(".toml"):
            return cls.from_toml(read_toml(text, "lab file"), where=text)
        return cls(**_parse_text(text.strip()))

    def to_text(self) -> str:
        """The canonical line: ``parse(to_text())`` gives an equal spec."""
        size = f"{self.hosts}" + (f"x{self.rails}" if self.rails > 1 else "")
        if self.kind == "bcube":
            size = f"{self.alpha}x{self.rails}"
        if self.kind == "fat-tree":
            size += f"/{self.leaf}"
        text = f"{self.kind}:{size}"
        text += f"@{format_rate(self.rate)}" if self.rate else ""
        text += f"+{format_rate(self.trunk)}" if self.trunk else ""
        text += "".join(f",{o.target}@{format_rate(o.rate)}" for o in self.overrides)
        text += f",prio={self.prio}" if self.prio else ""
        text += f",cross={format_rate(self.cross)}" if self.cross else ""
        text += f"x{self.cross_flows}" if self.cross_flows > 1 else ""
        return text + (f",ip={self.ip}" if self.ip != 4 else "")

    def __str__(self) -> str:
        return self.to_text()

    @classmethod
    def from_toml(cls, text: str, *, where: str = "lab TOML") -> LabSpec:
        """Parse a TOML document.

        Raises:
            UsageError: the text is not TOML, has an unknown key, or has an invalid value.
        """
        return cls(**_parse_toml(parse_toml(text, where), where))

    def _check_version(self) -> None:
        if self.ip not in (4, 6):
            raise UsageError(f"ip={self.ip}; allowed: 4 or 6, the version of the hosts' addresses")
        if self.ip == 6 and (self.prio or self.kind not in ("star", "fat-tree")):
            raise UsageError(
                f"ip=6 in {self.to_text()!r}: allowed in a star or a fat-tree, without prio"
            )

    def _check_loopback(self) -> None:
        if self.rate or self.prio or self.overrides or self.rails != 1:
            raise UsageError("a loopback lab is unshaped: it takes no rates, rails or prio")

    def _check_fat_tree(self) -> None:
        if self.kind != "fat-tree":
            if self.leaf or self.trunk:
                raise UsageError(f"a {self.kind} lab has no leaf switches or trunks; fat-tree has")
            return
        if not 1 <= self.leaf <= self.hosts:
            raise UsageError(f"{self.leaf} hosts a leaf switch; allowed: 1 to {self.hosts}")
        if not self.trunk:
            raise UsageError("a fat-tree needs a trunk rate, such as fat-tree:8/4@1gbit+500mbit")

    def _check_cross(self) -> None:
        if not 1 <= self.cross_flows <= MAX_FLOWS:
            raise UsageError(
                f"{self.cross_flows} flows of cross-traffic; allowed: 1 to {MAX_FLOWS}"
            )
        if not self.cross:
            if self.cross_flows > 1:
                raise UsageError(f"{self.cross_flows} flows of no cross-traffic; give it a rate")
            return
        if self.leaves < 2:
            self._refuse_cross(format_rate(self.cross))
        if self.cross > self.trunk:
            raise UsageError(
                f"cross-traffic of {format_rate(self.cross)} on trunks of "
                f"{format_rate(self.trunk)}; allowed: up to their rate"
            )

    def _refuse_cross(self, amount: str) -> NoReturn:
        size = f" of {self.leaves} leaf switch" if self.leaves else ""
        raise UsageError(
            f"cross-traffic of {amount} in a {self.kind} lab{size}: no link there is shared with "
            "hosts that do not train; allowed: a fat-tree of two leaf switches or more, such as "
            "fat-tree:4/2@1gbit+1gbit"
        )

    def _check_overrides(self) -> None:
        seen: set[str] = set()
        for o in self.overrides:
            check_target(o.target, o.host, o.interface, self.hosts, self.rails)
            if o.target in seen:
                raise UsageError(f"{o.target} has two rates in {self.to_text()!r}")
            seen.add(o.target)


def parse_target(text: str, *, where: str = "") -> tuple[int, int | None]:
    """Parse ``h3`` or ``h3.eth1`` into (host, interface or None); UsageError for anything else."""
    match = _TARGET.fullmatch(text.strip())
    if match is None:
        place = f" in {where!r}" if where else ""
        raise UsageError(f"{text!r}{place} is not a host (h3) or an interface (h3.eth1)")
    return int(match["host"]), None if match["interface"] is None else int(match["interface"])


def check_target(text: str, host: int, interface: int | None, hosts: int, rails: int) -> None:
    """Raise UsageError if the lab has no such host or interface."""
    if host >= hosts:
        raise unknown("host", text, _few("h", hosts), where=f"a lab of {hosts} hosts")
    if interface is not None and interface >= rails:
        allowed = [f"h{host}.eth{i}" for i in range(rails)]
        raise unknown("interface", text, allowed, where=f"a lab with {rails} a host")


def _few(prefix: str, count: int) -> list[str]:
    """The names 0 to ``count`` - 1, abbreviated where the list would be long."""
    if count <= 16:
        return [f"{prefix}{i}" for i in range(count)]
    return [f"{prefix}0 to {prefix}{count - 1}"]


def _override_key(o: Override) -> tuple[int, int, int]:
    return (o.host, -1 if o.interface is None else o.interface, o.rate)


def _parse_text(text: str) -> dict[str, Any]:
    kind, colon, rest = text.partition(":")
    if kind not in KINDS:
        raise unknown("lab kind", kind, KINDS, where=repr(text))
    shape, example = _SHAPES[kind]
    head, *options = [part.strip() for part in rest.split(",")]
    size, at, rates = head.partition("@")
    match = shape.fullmatch(size)
    if not colon or match is None:
        raise UsageError(f"size {size!r} in {text!r} is not what {kind} takes, such as {example}")
    values = _sizes(kind, {k: int(v) for k, v in match.groupdict().items() if v is not None})
    if at:
        rate, plus, trunk = rates.partition("+")
        values["rate"] = parse_rate(rate, where=text)
        if plus:
            values["trunk"] = parse_rate(trunk, where=text)
    overrides = []
    for option in options:
        name, at, rate = option.partition("@")
        if at:
            overrides.append(
                Override(*parse_target(name, where=text), parse_rate(rate, where=text))
            )
        else:
            values |= _parse_option(option, text)
    return {"kind": kind, "overrides": tuple(overrides), **values}


def _parse_option(option: str, text: str) -> dict[str, int]:
    name, _, value = option.partition("=")
    allowed = {"prio": f"0 (off) or 2 to {MAX_PRIO}", "ip": "4 or 6"}
    if name == "cross":
        return _parse_cross(value, text)
    if name not in allowed:
        raise unknown(
            "option",
            name,
            [*allowed, "cross", "h<N>@<rate>", "h<N>.eth<K>@<rate>"],
            where=repr(text),
        )
    if option == "prio":
        return {"prio": 2}
    if not re.fullmatch(_N, value):
        raise UsageError(f"{name}={value!r} in {text!r}; allowed: {allowed[name]}")
    return {name: int(value)}


def _parse_cross(value: str, text: str) -> dict[str, int]:
    rate, times, flows = value.partition("x")
    if times and not re.fullmatch(_N, flows):
        raise UsageError(f"cross={value!r} in {text!r}; allowed: a rate and flows, as in 1gbitx4")
    return {"cross": parse_rate(rate, where=text), "cross_flows": int(flows or 1)}


def _sizes(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Turn BCube's alpha and levels into hosts and rails; check limits before the power."""
    if kind != "bcube":
        return values
    alpha, levels = values.pop("alpha"), values.pop("levels")
    if not (alpha >= 2 and 1 <= levels <= MAX_RAILS and alpha**levels <= MAX_BCUBE_HOSTS):
        raise UsageError(
            f"bcube:{alpha}x{levels} is out of range; allowed: alpha from 2, levels from 1, "
            f"alpha ** levels up to {MAX_BCUBE_HOSTS} hosts"
        )
    return {**values, "hosts": alpha**levels, "rails": levels}


_KEYS: dict[str, dict[str, type]] = {
    "star": {"hosts": int, "rails": int, "rate": str},
    "bcube": {"alpha": int, "levels": int, "rate": str},
    "fat-tree": {"hosts": int, "rails": int, "rate": str, "leaf": int, "trunk": str}
    | {"cross": str, "cross_flows": int},
    "loopback": {"hosts": int, "rails": int},
}
_NEEDED = {"hosts", "alpha", "levels"}


def _parse_toml(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = data.get("kind")
    if kind not in KINDS:
        raise unknown("lab kind", str(kind), KINDS, where=where)
    types: dict[str, type] = {**_KEYS[kind], "kind": str, "prio": int, "ip": int, "override": dict}
    types["measured"] = list  # of `wingbeat probe`: latencies, which a lab does not emulate
    for key, value in data.items():
        if key not in types:
            raise unknown("key", key, types, where=where)
        if not isinstance(value, types[key]) or isinstance(value, bool):
            raise UsageError(f"{key} = {value!r} in {where} must be of type {types[key].__name__}")
    for key in sorted(_NEEDED & types.keys() - data.keys()):
        raise UsageError(f"{where} lacks {key}, which {kind} needs")
    values = {k: v for k, v in data.items() if k not in ("override", "measured")}
    for key in ("rate", "trunk", "cross"):
        if key in values:
            values[key] = parse_rate(values[key], where=where)
    overrides = tuple(
        Override(*parse_target(name, where=where), parse_rate(str(rate), where=where))
        for name, rate in data.get("override", {}).items()
    )
    return {**_sizes(kind, values), "overrides": overrides}
