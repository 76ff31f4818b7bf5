"""Network interfaces: which ones connect the workers, and which pairs connect two hosts."""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from wingbeat.errors import UsageError, unknown


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of a host with one address; ``subnet`` as in ``10.0.0.0/24``."""

    name: str
    address: str
    subnet: str


@dataclass(frozen=True, slots=True)
class Host:
    """The host of a rank: its identity and its interfaces.

    A `UsageError` if an address is malformed.
    """

    identity: str
    interfaces: tuple[Interface, ...]

    def __post_init__(self) -> None:
        for each in self.interfaces:
            try:
                known = str(ipaddress.ip_address(each.address)) == each.address
                ipaddress.ip_network(each.subnet)
            except ValueError as error:
                raise UsageError(f"interface {each.name}: {error}") from None
            if not known or "%" in each.address:  # a scope has no meaning on another host
                raise UsageError(f"interface {each.name}: {each.address} is no plain address")


def local() -> Host:
    """Return this host: interfaces that are up and have an address, loopback last.

    An interface is listed with its IPv4 addresses, or, if it has none, with its IPv6 addresses that
    are not link-local.
    """
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        if stats[name].isup:
            found += _addresses(name, entries, socket.AF_INET) or _addresses(
                name, entries, socket.AF_INET6
            )
    found.sort(key=lambda i: (is_loopback(i), i.name))
    return Host(host_identity(), tuple(found))


def _addresses(name: str, entries: Sequence[Any], family: int) -> list[Interface]:
    found = []
    for entry in entries:
        if entry.family == family and entry.netmask:
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (address.version == 6 and address.is_link_local):
                # ipaddress requires a prefix length for IPv6; psutil returns a mask.
                length = int(ipaddress.ip_address(entry.netmask)).bit_count()
                net = ipaddress.ip_network(f"{address}/{length}", strict=False)
                found.append(Interface(name, str(address), str(net)))
    return found


def host_identity() -> str:
    """Return a name that differs between hosts and between network namespaces of one host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def choose(hosts: Sequence[Host], rank: int, named: Sequence[str] | None) -> list[Interface]:
    """Choose this rank's interfaces: the same networks in the same order on every rank.

    Named interfaces are used as given, separately on each host. Otherwise all subnets are used in
    which every host has a distinct address. This excludes container bridges, which have the same
    address on each host. If there is none, but the hosts form a BCube in the order of their ranks,
    each host's interfaces are used in the order of the levels. Workers of a single host use
    loopback. A `UsageError` if a named interface does not exist here, or no network connects all
    hosts.
    """
    if named is not None:
        return [_find(hosts[rank], name) for name in named]
    if len({host.identity for host in hosts}) == 1:
        return [i for i in hosts[rank].interfaces if is_loopback(i)][:1] or list(
            hosts[rank].interfaces[:1]
        )
    subnets = _shared_subnets(hosts)
    if not subnets:
        different = {host.identity: host for host in hosts}
        levels = next(_bcube_levels(list(different.values())), None)
        if levels is not None:
            return levels[list(different).index(hosts[rank].identity)]
        listing = "; ".join(
            f"rank {r}: " + (", ".join(f"{i.name} {i.address}" for i in h.interfaces) or "none")
            for r, h in enumerate(hosts)
        )
        raise UsageError(
            f"no subnet has an interface of every host ({listing}), and in the order of their "
            "ranks the hosts form no BCube; name the interfaces: "
            "wingbeat.init(interfaces=['eth0'])"
        )
    return [next(i for i in hosts[rank].interfaces if i.subnet == s) for s in subnets]


def _find(host: Host, name: str) -> Interface:
    for interface in host.interfaces:
        if interface.name == name:
            return interface
    raise unknown("interface", name, [i.name for i in host.interfaces], where="init(interfaces=)")


def _shared_subnets(hosts: Sequence[Host]) -> list[str]:
    """Return the subnets in which every host has a distinct address, sorted."""
    address_of: dict[str, dict[str, str]] = defaultdict(dict)
    for host in hosts:
        for interface in host.interfaces:
            if not is_loopback(interface):
                address_of[interface.subnet].setdefault(host.identity, interface.address)
    count = len({host.identity for host in hosts})
    shared = [
        subnet
        for subnet, by_host in address_of.items()
        if len(by_host) == count and len(set(by_host.values())) == count
    ]
    return sorted(shared, key=subnet_order)


def _bcube_levels(hosts: Sequence[Host]) -> Iterator[list[list[Interface]]]:
    """Yield each host's interfaces by level, for every BCube that the hosts form in this order.

    Hosts on one level-l switch differ only in digit l of their numbers, in base ``ports``.
    """
    for levels in range(2, len(hosts).bit_length()):
        ports = round(len(hosts) ** (1 / levels))
        if ports**levels != len(hosts):
            continue
        found: list[list[Interface]] = [[] for _ in hosts]
        for level, number in itertools.product(range(levels), range(len(hosts))):
            low = ports**level
            if number // low % ports == 0:
                cube = range(number, number + ports * low, low)
                _add_level([hosts[i] for i in cube], [found[i] for i in cube])
        if all(len(own) == levels for own in found):
            yield found


def _add_level(cube: Sequence[Host], found: Sequence[list[Interface]]) -> None:
    """Append to each host its interface in the first subnet that connects this cube, if any."""
    for subnet in _shared_subnets(cube):
        own = [next(i for i in host.interfaces if i.subnet == subnet) for host in cube]
        if not any(one in known for one, known in zip(own, found, strict=True)):
            for one, known in zip(own, found, strict=True):
                known.append(one)
            return


def subnet_order(subnet: str) -> tuple[int, Any]:
    """Return the sort key of a subnet, IPv4 first."""
    network = ipaddress.ip_network(subnet)
    return network.version, network


def is_loopback(interface: Interface) -> bool:
    """Whether the address of an interface is a loopback address."""
    return ipaddress.ip_address(interface.address).is_loopback


def listening(own: Host, named: Sequence[str] | None) -> Host:
    """Return a host with the interfaces to listen on, in order of their networks, loopback last.

    Hosts that share networks number them equally; in a BCube the number is the level. A
    `UsageError` if a named interface does not exist, or there is none.
    """
    for name in named or ():
        _find(own, name)
    chosen = [i for i in own.interfaces if named is None or i.name in named]
    if not chosen:
        raise UsageError("this host has no interface that is up and has an address: bring one up")
    chosen.sort(key=lambda i: (is_loopback(i), subnet_order(i.subnet)))
    return Host(own.identity, tuple(chosen))


def interface_pairs(own: Host, peer: Host) -> list[tuple[int, int]]:
    """Return (own, peer's) numbers of interfaces that reach each other, in the order of networks.

    Two processes of one host use loopback. Two hosts use every network in which both have distinct
    addresses; of several in one network, the first with the first and so on: each interface is in
    one pair at most. Without such a network they use their first interfaces, which may be routed.
    """
    mine, theirs = own.interfaces, peer.interfaces
    if own.identity == peer.identity:
        return [_loopback_pair(mine, theirs)]
    found = []
    for subnet in dict.fromkeys(one.subnet for one in mine if not is_loopback(one)):
        ours = [a for a, one in enumerate(mine) if one.subnet == subnet]
        peers = [b for b, other in enumerate(theirs) if other.subnet == subnet]
        found += [
            (a, b)
            for a, b in zip(ours, peers, strict=False)
            if mine[a].address != theirs[b].address
        ]
    return sorted(found) or [(0, 0)]


def _loopback_pair(mine: Sequence[Interface], theirs: Sequence[Interface]) -> tuple[int, int]:
    ours = {i.address: n for n, i in enumerate(theirs) if is_loopback(i)}
    for number, interface in enumerate(mine):
        if interface.address in ours:
            return number, ours[interface.address]
    return 0, 0
