"""The network of a spec: hosts, switches, links, addresses and rates. Pure.

Interface ``eth<k>`` of host ``n`` has the address ``10.<k>.0.<n+1>/24`` (``/16`` beyond 250
hosts), or ``fd00:0:0:<k>::<n+1>/64`` with ``ip=6``.
In BCube each level-``l`` switch ``s`` has its own subnet ``10.<l>.<s>.0/24``; hosts without a
common switch reach each other through the hosts between them, as BCube's servers do.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_interface

from wingbeat.errors import UsageError
from wingbeat_lab.lab.spec import LabSpec

SUBNET_HOSTS = 250

CLASSES = (("ef", 0xB8), ("af41", 0x88), ("af21", 0x48))
"""DSCP names and their bits in the TOS byte, most urgent first; other traffic is ``be``."""


def class_names(prio: int) -> tuple[str, ...]:
    """Class names of a port, most urgent first: 2 to 4 of ef, af41, af21 and be."""
    return (*(name for name, _ in CLASSES[: prio - 1]), "be") if prio else ("all",)


@dataclass(frozen=True, slots=True)
class Interface:
    """One host interface and its switch port; ``rate`` in bit/s, each direction."""

    name: str
    address: str
    prefix: int
    rate: int
    switch: str
    port: str

    @property
    def version(self) -> int:
        """IP version: 4 or 6."""
        return ip_interface(self.address).version

    @property
    def network(self) -> str:
        """The interface's subnet, as in ``10.1.0.0/24``."""
        return str(ip_interface(f"{self.address}/{self.prefix}").network)


@dataclass(frozen=True, slots=True)
class Route:
    """A route to ``destination`` (one address) by the neighbour ``via`` on ``interface``."""

    destination: str
    via: str
    interface: str


@dataclass(frozen=True, slots=True)
class Host:
    """One emulated host."""

    index: int
    name: str
    interfaces: tuple[Interface, ...]
    routes: tuple[Route, ...] = ()

    @property
    def address(self) -> str:
        """The address that its name resolves to: that of its first interface."""
        return self.interfaces[0].address


@dataclass(frozen=True, slots=True)
class Trunk:
    """A link between two switches, by the port at each end; ``rate`` in bit/s, each direction."""

    lower: str
    lower_port: str
    upper: str
    upper_port: str
    rate: int


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The whole network.

    Attributes:
        hosts: by index; those on which workers run come first.
        switches: by name.
        trunks: links between switches.
        prio: strict-priority classes on every port, 0 for none.
        others: how many hosts, at the end, are for cross-traffic only.
    """

    hosts: tuple[Host, ...]
    switches: tuple[str, ...]
    trunks: tuple[Trunk, ...]
    prio: int
    others: int = 0

    def hosts_file(self) -> str:
        """The ``/etc/hosts`` of every host: ``h3`` is its first interface, ``h3-eth1``..."""
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        for host in self.hosts:
            lines.append(f"{host.address} {host.name}")
            lines += [f"{i.address} {host.name}-{i.name}" for i in host.interfaces]
            if host.interfaces[0].version == 6:
                continue
            # Servers that listen for both IP versions (torch's store) look names up this way.
            lines += [f"::ffff:{i.address} {host.name}.lab" for i in host.interfaces]
        return "\n".join(lines) + "\n"


def plan_network(spec: LabSpec) -> NetworkPlan:
    """Return the network of a shaped spec; UsageError for ``loopback``, which has none."""
    if spec.kind == "loopback":
        raise UsageError("a loopback lab has no network of its own")
    if spec.kind == "bcube":
        return _bcube(spec)
    return _star(spec) if spec.kind == "star" else _fat_tree(spec)


def _flat_hosts(
    spec: LabSpec, switch_of: dict[tuple[int, int], str], others: int = 0
) -> tuple[Host, ...]:
    """Hosts whose ``k``-th interfaces all share one subnet, with ``others`` hosts at the end."""
    prefix = _flat_prefix(spec, others)
    return tuple(
        Host(
            index=n,
            name=f"h{n}",
            interfaces=tuple(
                Interface(
                    name=f"eth{k}",
                    address=_flat_address(n, k, spec.ip),
                    prefix=prefix,
                    rate=spec.link_rate(n, k),
                    switch=switch_of[n, k],
                    port=f"h{n}e{k}",
                )
                for k in range(spec.rails)
            ),
        )
        for n in range(spec.hosts)
    )


def _flat_address(host: int, interface: int, version: int) -> str:
    if version == 6:
        return f"fd00:0:0:{interface:x}::{host + 1:x}"
    return f"10.{interface}.{host // SUBNET_HOSTS}.{host % SUBNET_HOSTS + 1}"


def _star(spec: LabSpec) -> NetworkPlan:
    switch_of = {(n, k): f"sw{k}" for n in range(spec.hosts) for k in range(spec.rails)}
    switches = tuple(f"sw{k}" for k in range(spec.rails))
    return NetworkPlan(_flat_hosts(spec, switch_of), switches, (), spec.prio)


def _fat_tree(spec: LabSpec) -> NetworkPlan:
    leaves = spec.leaves
    switch_of = {
        (n, k): f"leaf{k}-{n // spec.leaf}" for n in range(spec.hosts) for k in range(spec.rails)
    }
    trunks = tuple(
        Trunk(f"leaf{k}-{i}", f"up{k}-{i}", f"spine{k}", f"down{k}-{i}", spec.trunk)
        for k in range(spec.rails)
        for i in range(leaves)
    )
    switches = tuple(sorted({*switch_of.values(), *(t.upper for t in trunks)}))
    others = leaves if spec.cross else 0
    hosts = (*_flat_hosts(spec, switch_of, others), *_others(spec, others))
    return NetworkPlan(hosts, switches, trunks, spec.prio, others)


def _others(spec: LabSpec, count: int) -> tuple[Host, ...]:
    """One host per leaf switch, whose own link never limits its cross-traffic."""
    return tuple(
        Host(
            index=spec.hosts + n,
            name=f"x{n}",
            interfaces=tuple(
                Interface(
                    name=f"eth{k}",
                    address=_flat_address(spec.hosts + n, k, spec.ip),
                    prefix=_flat_prefix(spec, count),
                    rate=spec.trunk,
                    switch=f"leaf{k}-{n}",
                    port=f"x{n}e{k}",
                )
                for k in range(spec.rails)
            ),
        )
        for n in range(count)
    )


def _flat_prefix(spec: LabSpec, others: int) -> int:
    return 64 if spec.ip == 6 else 24 if spec.hosts + others <= SUBNET_HOSTS else 16


def _bcube(spec: LabSpec) -> NetworkPlan:
    alpha = spec.alpha
    hosts = tuple(
        Host(
            index=n,
            name=f"h{n}",
            interfaces=tuple(
                Interface(
                    name=f"eth{k}",
                    address=_bcube_address(n, k, alpha),
                    prefix=24,
                    rate=spec.link_rate(n, k),
                    switch=f"sw{k}-{_bcube_switch(n, k, alpha)}",
                    port=f"h{n}e{k}",
                )
                for k in range(spec.rails)
            ),
            routes=_bcube_routes(n, spec),
        )
        for n in range(spec.hosts)
    )
    per_level = spec.hosts // alpha
    switches = tuple(f"sw{k}-{s}" for k in range(spec.rails) for s in range(per_level))
    return NetworkPlan(hosts, switches, (), spec.prio)


def _digit(host: int, level: int, alpha: int) -> int:
    low: int = alpha**level
    return host // low % alpha


def _bcube_switch(host: int, level: int, alpha: int) -> int:
    """The switch of a host at a level: the host's number without digit ``level``."""
    low: int = alpha**level
    return host // (low * alpha) * low + host % low


def _bcube_address(host: int, level: int, alpha: int) -> str:
    switch, digit = _bcube_switch(host, level, alpha), _digit(host, level, alpha)
    return f"10.{level}.{switch}.{digit + 1}"


def _bcube_routes(host: int, spec: LabSpec) -> tuple[Route, ...]:
    """Host routes to every address outside the subnets of ``host``.

    The next hop corrects one digit (BCube's own routing): each hop is nearer, and none loops.
    """
    alpha, routes = spec.alpha, []
    for other in range(spec.hosts):
        differ = [k for k in range(spec.rails) if _digit(host, k, alpha) != _digit(other, k, alpha)]
        if not differ:
            continue
        level = differ[0]
        step = (_digit(other, level, alpha) - _digit(host, level, alpha)) * alpha**level
        via = _bcube_address(host + step, level, alpha)
        routes += [
            Route(_bcube_address(other, k, alpha), via, f"eth{level}")
            for k in range(spec.rails)
            if differ != [k]
        ]
    return tuple(routes)
