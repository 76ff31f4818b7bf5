"""Which interfaces of two hosts reach each other."""

from __future__ import annotations

import pytest

from wingbeat.transport.interfaces import Host, Interface, interface_pairs, listening

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")


def host(identity: str, *interfaces: Interface) -> Host:
    return Host(identity, (*interfaces, LO))


def eth(name: str, address: str) -> Interface:
    return Interface(name, address, address.rpartition(".")[0] + ".0/24")


def reached(a: Host, b: Host) -> list[tuple[str, str]]:
    """The names of what reaches what, and the same from the other side."""
    a, b = listening(a, None), listening(b, None)
    found = interface_pairs(a, b)
    assert sorted((y, x) for x, y in interface_pairs(b, a)) == sorted((y, x) for x, y in found)
    return [(a.interfaces[x].name, b.interfaces[y].name) for x, y in found]


def test_pairs_use_every_common_network_in_order() -> None:
    a = host("a", eth("eth1", "10.1.0.1"), eth("eth0", "10.0.0.1"))
    b = host("b", eth("x", "10.0.0.2"), eth("y", "10.1.0.2"))
    assert reached(a, b) == [("eth0", "x"), ("eth1", "y")]


def test_pairs_use_a_switch_of_some_hosts() -> None:
    """BCube(2, 2): hosts 0 and 1 share a level-0 switch, 0 and 2 a level-1 switch."""
    h0 = host("0", eth("eth0", "10.0.0.1"), eth("eth1", "10.1.0.1"))
    h1 = host("1", eth("eth0", "10.0.0.2"), eth("eth1", "10.1.1.1"))
    h2 = host("2", eth("eth0", "10.0.1.1"), eth("eth1", "10.1.0.2"))
    assert reached(h0, h1) == [("eth0", "eth0")]
    assert reached(h0, h2) == [("eth1", "eth1")]
    assert reached(h1, h2) == [("eth0", "eth0")], "no common switch: by what routes there are"


def test_container_bridge_makes_no_pair() -> None:
    bridge = Interface("docker0", "172.17.0.1", "172.17.0.0/16")
    a, b = host("a", eth("eth0", "10.0.0.1"), bridge), host("b", eth("eth0", "10.0.0.2"), bridge)
    assert reached(a, b) == [("eth0", "eth0")]


def test_two_processes_of_a_host_use_loopback() -> None:
    a = host("a", eth("eth0", "10.0.0.1"))
    assert reached(a, a) == [("lo", "lo")]


def test_pairs_use_only_named_interfaces() -> None:
    a = host("a", eth("eth0", "10.0.0.1"), eth("eth1", "10.1.0.1"))
    assert [i.name for i in listening(a, ["eth1"]).interfaces] == ["eth1"]


@pytest.mark.parametrize("identity", ["a", "b"])
def test_hosts_without_loopback_have_a_pair(identity: str) -> None:
    a = Host("a", (eth("eth0", "10.0.0.1"),))
    b = Host(identity, (eth("eth0", "10.0.0.1"),))
    assert reached(a, b) == [("eth0", "eth0")]
