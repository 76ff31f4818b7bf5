from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from wingbeat.errors import UsageError
from wingbeat.schema import MalformedMessage, from_json, to_json
from wingbeat.transport.interfaces import Host, Interface, choose, local

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
UP = SimpleNamespace(isup=True)
DOCKER = Interface("docker0", "172.17.0.1", "172.17.0.0/16")


def host(identity: str, *interfaces: Interface) -> Host:
    return Host(identity, (*interfaces, LO))


def eth(number: int, address: int, name: str = "") -> Interface:
    return Interface(name or f"eth{number}", f"10.0.{number}.{address}", f"10.0.{number}.0/24")


def test_every_network_that_joins_all_hosts_is_used_in_the_same_order() -> None:
    hosts = [host("a", eth(1, 1), eth(0, 1)), host("b", eth(0, 2), eth(1, 2, "enp3s0"))]
    assert [i.name for i in choose(hosts, 0, None)] == ["eth0", "eth1"]
    assert [i.name for i in choose(hosts, 1, None)] == ["eth0", "enp3s0"]


def test_a_container_bridge_with_one_address_on_all_hosts_is_no_network() -> None:
    hosts = [host("a", eth(0, 1), DOCKER), host("b", eth(0, 2), DOCKER)]
    assert [i.name for i in choose(hosts, 1, None)] == ["eth0"]


def test_several_workers_of_a_host_share_its_interfaces() -> None:
    a, b = host("a", eth(0, 1)), host("b", eth(0, 2))
    assert [i.name for i in choose([a, a, b, b], 1, None)] == ["eth0"]


def test_workers_of_one_host_use_loopback() -> None:
    assert choose([host("a", eth(0, 1))] * 2, 1, None) == [LO]


def test_a_named_interface_is_taken_and_a_wrong_name_refused() -> None:
    hosts = [host("a", eth(0, 1), eth(1, 1))] * 2
    assert [i.name for i in choose(hosts, 0, ["eth1"])] == ["eth1"]
    with pytest.raises(UsageError, match=r"unknown interface 'eth2' .*did you mean 'eth[01]'"):
        choose(hosts, 0, ["eth2"])


def test_hosts_without_a_common_network_are_refused_with_their_interfaces() -> None:
    hosts = [host("a", eth(0, 1)), host("b", eth(1, 2))]
    with pytest.raises(UsageError, match=r"rank 0: eth0 10.0.0.1.*rank 1: eth1 10.0.1.2"):
        choose(hosts, 0, None)


def test_interfaces_that_are_down_are_left_out_and_loopback_is_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def address(text: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(family=socket.AF_INET, address=text, netmask="255.255.255.0")]

    found = {"a-lo": "127.0.0.1", "eth1": "10.0.1.7", "eth0": "10.0.0.7", "eth2": "10.0.2.7"}
    addresses = {name: address(text) for name, text in found.items()}
    stats = {name: SimpleNamespace(isup=name != "eth0") for name in found}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    assert [i.name for i in local().interfaces] == ["eth1", "eth2", "a-lo"]


def test_interface_has_its_ipv4_address_or_else_a_global_ipv6_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(family: int, address: str, netmask: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address, netmask=netmask)

    four, six = socket.AF_INET, socket.AF_INET6
    whole, half = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff::"
    found = {
        "lo": [entry(four, "127.0.0.1", "255.0.0.0"), entry(six, "::1", whole)],
        "eth0": [entry(six, "fd00::7", half), entry(four, "10.0.0.7", "255.255.255.0")],
        "eth1": [entry(six, "fe80::1%eth1", half), entry(six, "fd00:0:0:1::7", half)],
        "eth2": [entry(six, "fe80::2%eth2", half)],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(found, UP))
    assert local().interfaces == (
        Interface("eth0", "10.0.0.7", "10.0.0.0/24"),
        Interface("eth1", "fd00:0:0:1::7", "fd00:0:0:1::/64"),
        LO,
    )
    assert from_json(Host, to_json(local())) == local()


def test_networks_of_both_versions_are_used_in_the_same_order() -> None:
    def card(name: str, address: int) -> Interface:
        return Interface(name, f"fd00::{address}", "fd00::/64")

    hosts = [host("a", card("a0", 1), eth(1, 1)), host("b", eth(1, 2), card("z9", 2))]
    assert [i.name for i in choose(hosts, 0, None)] == ["eth1", "a0"]
    assert [i.name for i in choose(hosts, 1, None)] == ["eth1", "z9"]


def test_host_with_one_interface_limits_the_others_to_its_network() -> None:
    hosts = [host("a", eth(0, 1), eth(1, 1)), host("b", eth(1, 2)), host("c", eth(0, 3), eth(1, 3))]
    assert [[i.name for i in choose(hosts, rank, None)] for rank in range(3)] == [["eth1"]] * 3


def test_description_of_this_host_survives_json() -> None:
    here = local()
    assert any(i.address.startswith("127.") for i in here.interfaces)
    assert from_json(Host, to_json(here)) == here


def described(address: str, subnet: str) -> dict[str, object]:
    return {
        "identity": "a",
        "interfaces": [{"name": "x", "address": address, "subnet": subnet}],
    }


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (None, "is None"),
        ({}, "identity is missing"),
        ({"identity": "a"}, "interfaces is missing"),
        ({"identity": "a", "interfaces": [{"name": "x"}]}, "address is missing"),
        (described("y", "10.0.0.0/24"), "interface x: 'y' does not appear"),
        (described("10.0.0.1", "10.0.0.1/24"), "interface x: .* has host bits set"),
        (described("fe80::1%x", "fe80::/64"), "interface x: fe80::1%x is no plain address"),
    ],
)
def test_a_malformed_description_is_refused(bad: object, problem: str) -> None:
    with pytest.raises(MalformedMessage, match=problem):
        from_json(Host, bad)


def bcube(ports: int, levels: int, *, names: str = "eth") -> list[Host]:
    """Hosts of a BCube; each names its interfaces in an order of its own."""

    def one(number: int) -> Host:
        found = []
        for level in range(levels):
            low = ports**level
            switch = number // (low * ports) * low + number % low
            net, port = f"10.{level}.{switch}", number // low % ports
            name = f"{names}{(level + number) % levels}"
            found.append(Interface(name, f"{net}.{port + 1}", f"{net}.0/24"))
        found.sort(key=lambda interface: interface.name)
        return host(str(number), *found)

    return [one(number) for number in range(ports**levels)]


@pytest.mark.parametrize("size", [(2, 2), (3, 2), (2, 3), (4, 2), (2, 4)])
def test_hosts_of_a_bcube_use_an_interface_a_level_whatever_their_names(size) -> None:
    ports, levels = size
    hosts = bcube(ports, levels)
    for rank in range(len(hosts)):
        chosen = choose(hosts, rank, None)
        assert [i.subnet.split(".")[1] for i in chosen] == [str(k) for k in range(levels)]
        assert all(i in hosts[rank].interfaces for i in chosen)


def test_several_workers_of_a_bcubes_host_share_its_interfaces() -> None:
    hosts = [one for one in bcube(2, 2) for _ in range(2)]
    chosen = [[i.subnet for i in choose(hosts, rank, None)] for rank in range(8)]
    assert chosen[::2] == chosen[1::2]
    assert chosen[6] == ["10.0.1.0/24", "10.1.1.0/24"]


def test_hosts_in_another_order_form_no_bcube() -> None:
    hosts = bcube(2, 2)
    hosts[0], hosts[1], hosts[2], hosts[3] = hosts[0], hosts[3], hosts[1], hosts[2]
    with pytest.raises(UsageError, match="in the order of their ranks the hosts form no BCube"):
        choose(hosts, 0, None)


def test_an_interface_is_of_one_level() -> None:
    """Pairs on one switch each are no BCube(2, 2), nor are switches of four two of its levels."""
    pairs = [host(str(n), eth(n // 2, n)) for n in range(4)]
    fours = [host(str(n), eth(n // 4, n), eth(10 + n % 4, n)) for n in range(8)]
    for hosts in (pairs, fours):
        with pytest.raises(UsageError, match="form no BCube"):
            choose(hosts, 0, None)


def test_a_network_that_joins_all_goes_before_a_bcube() -> None:
    joined = [
        Host(one.identity, (eth(99, n, "lan"), *one.interfaces))
        for n, one in enumerate(bcube(2, 2))
    ]
    assert [i.name for i in choose(joined, 2, None)] == ["lan"]


def test_container_bridges_join_no_level() -> None:
    hosts = [Host(one.identity, (DOCKER, *one.interfaces)) for one in bcube(2, 2)]
    assert [i.subnet for i in choose(hosts, 1, None)] == ["10.0.0.0/24", "10.1.1.0/24"]
