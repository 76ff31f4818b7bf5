from __future__ import annotations

import ipaddress
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.errors import UsageError
from wingbeat_lab.lab import network
from wingbeat_lab.lab.plan import Host, NetworkPlan, class_names, plan_network
from wingbeat_lab.lab.spec import MAX_RATE, MIN_RATE, LabSpec

texts = st.one_of(
    st.builds("star:{}x{}@1gbit".format, st.integers(1, 600), st.integers(1, 4)),
    st.builds("fat-tree:{}/{}@1gbit+1gbit".format, st.integers(9, 40), st.integers(1, 9)),
    st.sampled_from([f"bcube:{a}x{k}@1gbit" for a in range(2, 16) for k in (1, 2, 3) if a**k < 65]),
)


@settings(max_examples=examples(40))
@given(texts)
def test_names_and_addresses_are_unique_and_fit_the_kernel(text: str) -> None:
    plan = plan_network(LabSpec.parse(text))
    interfaces = [i for h in plan.hosts for i in h.interfaces]
    devices = [
        *(i.port for i in interfaces),
        *plan.switches,
        *(p for t in plan.trunks for p in (t.lower_port, t.upper_port)),
    ]
    assert max(Counter(devices).values()) == 1
    assert max(len(d) for d in devices) <= 15
    assert max(Counter(i.address for i in interfaces).values()) == 1
    ends = {t.lower for t in plan.trunks} | {t.upper for t in plan.trunks}
    assert {i.switch for i in interfaces} | ends == set(plan.switches)
    for i in interfaces:
        network = ipaddress.ip_interface(f"{i.address}/{i.prefix}").network
        assert ipaddress.ip_address(i.address) not in (
            network.network_address,
            network.broadcast_address,
        )


def _reach(plan: NetworkPlan, host: Host, target: str) -> Host | None:
    """The host that packets for ``target`` get to next; None if there is no way."""
    owner = {i.address: h for h in plan.hosts for i in h.interfaces}
    for i in host.interfaces:
        if (
            ipaddress.ip_address(target)
            in ipaddress.ip_interface(f"{i.address}/{i.prefix}").network
        ):
            same = [x for x in owner[target].interfaces if x.switch == i.switch]
            return owner[target] if same else None
    for route in host.routes:
        if route.destination == target:
            local = {i.name: i.switch for i in host.interfaces}[route.interface]
            via = owner[route.via]
            return via if local in {i.switch for i in via.interfaces} else None
    return None


@pytest.mark.parametrize("size", ["2x1", "3x2", "2x3", "4x2", "3x3"])
def test_bcube_hosts_reach_every_address_in_at_most_levels_hops(size: str) -> None:
    spec = LabSpec.parse(f"bcube:{size}@1gbit")
    plan = plan_network(spec)
    for host in plan.hosts:
        for other in plan.hosts:
            for i in other.interfaces:
                here: Host | None = host
                for _ in range(spec.rails):
                    if here is other:
                        break
                    assert here is not None
                    here = _reach(plan, here, i.address)
                assert here is other


def test_bcube_3x2_is_the_papers() -> None:
    plan = plan_network(LabSpec.parse("bcube:3x2@250mbit"))
    members: dict[str, list[int]] = {}
    for host in plan.hosts:
        for i in host.interfaces:
            members.setdefault(i.switch, []).append(host.index)
    assert members == {
        "sw0-0": [0, 1, 2],
        "sw0-1": [3, 4, 5],
        "sw0-2": [6, 7, 8],
        "sw1-0": [0, 3, 6],
        "sw1-1": [1, 4, 7],
        "sw1-2": [2, 5, 8],
    }


def test_star_addresses_and_hosts_file() -> None:
    plan = plan_network(LabSpec.parse("star:2x2@1gbit"))
    assert [i.address for i in plan.hosts[1].interfaces] == ["10.0.0.2", "10.1.0.2"]
    assert "10.0.0.2 h1\n" in plan.hosts_file()
    assert "10.1.0.2 h1-eth1\n" in plan.hosts_file()


def test_fat_tree_has_a_trunk_for_each_leaf_switch() -> None:
    plan = plan_network(LabSpec.parse("fat-tree:8/4@1gbit+500mbit"))
    assert [(t.lower, t.upper, t.rate) for t in plan.trunks] == [
        ("leaf0-0", "spine0", 500 * 10**6),
        ("leaf0-1", "spine0", 500 * 10**6),
    ]
    assert [h.interfaces[0].switch for h in plan.hosts] == ["leaf0-0"] * 4 + ["leaf0-1"] * 4


def test_cross_traffic_has_a_host_on_each_leaf_switch_that_no_worker_is_on() -> None:
    plan = plan_network(LabSpec.parse("fat-tree:3x2/2@1gbit+500mbit,cross=400mbit"))
    others = plan.hosts[3:]
    assert plan.others == len(others) == 2
    assert [(h.index, h.name, h.address) for h in others] == [
        (3, "x0", "10.0.0.4"),
        (4, "x1", "10.0.0.5"),
    ]
    assert [[i.switch for i in h.interfaces] for h in others] == [
        ["leaf0-0", "leaf1-0"],
        ["leaf0-1", "leaf1-1"],
    ]
    assert {i.rate for h in others for i in h.interfaces} == {500 * 10**6}


def test_plan_of_loopback_has_no_network() -> None:
    with pytest.raises(UsageError, match="loopback"):
        plan_network(LabSpec.parse("loopback:2"))


@given(st.integers(MIN_RATE, MAX_RATE))
def test_pieces_fit_the_burst_and_bursts_stay_below_a_percent_of_a_second(rate: int) -> None:
    burst = network.burst_bytes(rate)
    assert 2 * 1514 < network.piece_bytes(rate) <= burst - network.HEADROOM
    assert burst <= 96 * 1024
    assert burst <= max(network.MIN_BURST, rate / 8 * 0.01)
    assert network.queue_bytes(rate) >= max(1_000_000, rate // 8 // 20)


def test_piece_size_on_fast_links_is_the_largest() -> None:
    assert network.piece_bytes(10**9) == 65536


def test_every_direction_of_every_link_is_shaped_to_its_own_rate() -> None:
    plan = plan_network(LabSpec.parse("fat-tree:4/2@1gbit+500mbit,h3@200mbit"))
    switch = " | ".join(network.switch_shaping(plan))
    for device, rate in [("h0e0", 10**9), ("h3e0", 2 * 10**8), ("up0-0", 5 * 10**8)]:
        assert f"dev {device} root handle 1: tbf rate {rate}bit" in switch
    assert f"dev down0-1 root handle 1: tbf rate {5 * 10**8}bit" in switch
    (host,) = network.host_shaping(plan.hosts[3], plan.prio)
    assert "dev eth0 root handle 1: tbf rate 200000000bit" in host


def test_priority_classes_by_dscp() -> None:
    lines = network.shape("eth0", 10**9, 3)
    assert [line.split("match ")[1] for line in lines if "u32" in line] == [
        "ip dsfield 0xb8 0xfc flowid 1:10",
        "ip dsfield 0x88 0xfc flowid 1:11",
        "u32 0 0 flowid 1:10",
    ]
    assert "htb default 12" in lines[0]
    assert [class_names(k) for k in (0, 2, 4)] == [
        ("all",),
        ("ef", "be"),
        ("ef", "af41", "af21", "be"),
    ]
