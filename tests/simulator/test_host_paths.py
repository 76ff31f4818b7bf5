"""Several interfaces, hosts that pass on, and what a monitor of the interfaces sees."""

from __future__ import annotations

import itertools

import pytest

from wingbeat.simulator import Links, interfaces
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Traffic
from wingbeat.simulator.interfaces import Interfaces, Paths, Stream
from wingbeat.topologies.bcube import BCube
from wingbeat_lab.lab.plan import plan_network
from wingbeat_lab.lab.spec import LabSpec


def play(
    wires: Paths, frames: list[tuple[int, int, int]], traffic: Traffic | None = None
) -> list[float]:
    """When frames (source, target, bytes) have arrived, 100 bytes a second on each interface."""
    agenda, ended = Agenda(), [0.0] * len(frames)
    links = Links(bytes_per_s=100.0, latency_s=0.5, quantum=10)
    network = Interfaces(agenda, links, lambda number: number, wires, traffic)
    for number, (source, target, nbytes) in enumerate(frames):

        def arrived(number: int = number) -> None:
            assert not ended[number]
            ended[number] = agenda.now

        network.carry(Stream(source, target, 0), nbytes, arrived)
    agenda.run()
    return ended


def test_a_bcube_s_paths_are_the_routes_of_its_lab() -> None:
    cube = BCube(3, 2)
    hosts = plan_network(LabSpec.parse("bcube:3x2@1gbit")).hosts
    owner = {i.address: host.index for host in hosts for i in host.interfaces}
    for source, target in itertools.permutations(range(9), 2):
        (path,) = interfaces.bcube(cube)(source, target)
        assert path[0][0][0] == source
        assert path[-1][1][0] == target
        assert [after[0] for _, after in path[:-1]] == [before[0] for before, _ in path[1:]]
        assert all(b == cube.cube(a, level)[cube.digit(b, level)] for (a, level), (b, _) in path)
        routes = {r.destination: r for r in hosts[source].routes}
        if len(path) > 1:
            route = routes[hosts[target].interfaces[0].address]
            assert owner[route.via] == path[0][1][0]
            assert route.interface == f"eth{path[0][0][1]}"


def test_over_two_switches_each_carries_half() -> None:
    traffic = Traffic(1.0)
    assert play(interfaces.star(2), [(0, 1, 400)], traffic) == [pytest.approx(2.5)]
    assert traffic.sent == {0: 400}
    assert play(interfaces.star(1), [(0, 1, 400)]) == [pytest.approx(4.5)]


def test_who_passes_on_does_so_by_quanta() -> None:
    """From 0 to 4 of a BCube(3, 2) by way of 1: two hops, each with its latency."""
    traffic = Traffic(1.0)
    wires = interfaces.bcube(BCube(3, 2))
    assert play(wires, [(0, 4, 400)], traffic) == [pytest.approx(4 + 0.5 + 0.1 + 0.5)]
    assert traffic.sent == {0: 400, 1: 400}


def test_what_is_passed_on_shares_the_card() -> None:
    """1 passes on from 0 to 4 by its interface 1, and sends to 7 by the same."""
    wires = interfaces.bcube(BCube(3, 2))
    both = play(wires, [(0, 4, 400), (1, 7, 400)])
    assert max(both) > 8.0


def test_traffic_is_cut_into_spans() -> None:
    traffic = Traffic(1.0)
    traffic.carried(0, 0.5, 2.5, 200)
    traffic.carried(0, 2.5, 2.5 + 1e-9, 7)
    traffic.carried(1, 1.0, 2.0, 100)
    assert traffic.sent == {0: 207, 1: 100}
    assert traffic.utilisation(100.0, 2.9) == pytest.approx([50 / 200, 200 / 200])
    assert traffic.utilisation(100.0, 3.0)[2] == pytest.approx(57 / 200)
    assert traffic.utilisation(100.0, 5.0)[3:] == [0.0, 0.0]
