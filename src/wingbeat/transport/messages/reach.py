"""Which interfaces of two hosts reach each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from wingbeat.transport.interfaces import Host, Interface, in_order, is_loopback


def usable(own: Host, named: Sequence[str] | None) -> list[Interface]:
    """Return the interfaces to listen on, in the order of their networks, loopback last.

    Hosts that share networks so number them alike; in a BCube a level's number is its interface's.
    """
    chosen = [i for i in own.interfaces if named is None or i.name in named]
    return sorted(chosen, key=lambda i: (is_loopback(i), in_order(i.subnet)))


def pairs(
    own: Host, mine: Sequence[Interface], peer: Host, theirs: Sequence[Interface]
) -> list[tuple[int, int]]:
    """Return (own, peer's) numbers of interfaces that reach each other, in the order of networks.

    Two processes of one host use loopback. Hosts use every network in which each has an address of
    its own, and where there is none, their first interfaces: the network between may lead there.
    """
    if own.identity == peer.identity:
        return [_inside(mine, theirs)]
    found = [
        (a, b)
        for a, one in enumerate(mine)
        for b, other in enumerate(theirs)
        if one.subnet == other.subnet and one.address != other.address and not is_loopback(one)
    ]
    return found or [(0, 0)]


def _inside(mine: Sequence[Interface], theirs: Sequence[Interface]) -> tuple[int, int]:
    ours = {i.address: n for n, i in enumerate(theirs) if is_loopback(i)}
    for number, interface in enumerate(mine):
        if interface.address in ours:
            return number, ours[interface.address]
    return 0, 0
