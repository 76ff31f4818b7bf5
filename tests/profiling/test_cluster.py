"""The probe of a cluster, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wingbeat import testing
from wingbeat.errors import PeerError, UsageError
from wingbeat.profiling import cluster
from wingbeat.profiling.cluster import Cluster, Nic, ProbedHost
from wingbeat.transport.world import World
from wingbeat.types import Layout
from wingbeat_lab.lab.spec import LabSpec

SHORT_S = 1e-6


def hosts(*rates: tuple[float, ...]) -> Cluster:
    """Hosts whose NICs have these rates in Mbit/s."""
    return Cluster(
        tuple(
            ProbedHost(f"node{h}", 2, tuple(Nic(f"e{n}", 1e6 * r, 5e-5) for n, r in enumerate(own)))
            for h, own in enumerate(rates)
        )
    )


@pytest.mark.parametrize(
    ("measured", "spec"),
    [
        (hosts((941,), (941,)), "star:2@941mbit"),
        (hosts((1000.4, 998), (1003, 1002), (997, 290)), "star:3x2@1000mbit,h2.eth1@290mbit"),
        (hosts((9.41,), (9.4,), (30.26,)), "star:3@9410kbit,h2.eth0@30300kbit"),
        (hosts((95,), (100,), (106,)), "star:3@100mbit"),
    ],
)
def test_cluster_file_is_read_by_the_lab(measured: Cluster, spec: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(measured.to_toml(), encoding="utf-8")
    assert LabSpec.parse(path) == LabSpec.parse(spec)


def test_cluster_file_has_every_figure_and_no_character_that_breaks_it(tmp_path: Path) -> None:
    made = hosts((100,), (100,))
    odd = Cluster((replace(made.hosts[0], name='no"de\\\n1'), made.hosts[1]))
    text = odd.to_toml()
    assert 'host = "node1"' in text.splitlines()
    assert "ranks = 2" in text
    assert '  { name = "e0", gbit_per_s = 0.1, latency_us = 50.0 },' in text
    (tmp_path / "x.toml").write_text(text, encoding="utf-8")
    assert LabSpec.parse(tmp_path / "x.toml").hosts == 2


def probed(world: World) -> tuple[Cluster, list[str]]:
    lines: list[str] = []
    name = f"host{world.layout.host_of[world.rank]}"
    return cluster.probe(world, name, lines.append, long_enough_s=SHORT_S), lines


@pytest.mark.parametrize(
    "layout", [Layout([0, 0, 1, 1, 1]), Layout([0, 1, 0, 2, 3, 4, 5])], ids=["two", "six"]
)
def test_all_ranks_get_the_same_figures_of_all_hosts(layout: Layout) -> None:
    worlds = testing.worlds(layout.workers)
    for world in worlds:
        world.layout = layout
    found = testing.run(worlds, probed)
    assert all(each == found[0] for each in found)
    made, lines = found[0]
    assert [host.name for host in made.hosts] == [f"host{h}" for h in range(len(layout.hosts))]
    assert [host.ranks for host in made.hosts] == [len(ranks) for ranks in layout.hosts]
    for host in made.hosts:
        assert len(host.nics) == len(worlds[0].links)
        assert all(nic.rate > 0 and 0 < nic.latency_s < 10 for nic in host.nics)
    assert len(lines) == len(worlds[0].links)


def test_rate_is_that_with_the_best_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [8e6, 8e6, 2e6, 8e6]

    def slower_end(_w: object, _l: object, _n: object, shift: int, nbytes: int) -> list[float]:
        return [nbytes / min(own[h], own[(h - shift) % 4]) for h in range(4)]

    monkeypatch.setattr(cluster, "_round", slower_end)
    world = testing.worlds(4)[0]
    assert cluster._rates(world, world.links[0], range(4), 0.2) == own


def test_one_host_is_refused() -> None:
    worlds = testing.worlds(2)
    for world in worlds:
        world.layout = Layout([0, 0])
    with pytest.raises(UsageError, match="all 2 ranks are on one host"):
        probed(worlds[0])


def test_lost_peer_is_named_with_the_nic() -> None:
    worlds = testing.worlds(2)
    for world in worlds:
        world.layout = Layout([0, 1])

    def lose(world: World) -> str:
        if world.rank == 0:
            world.links[0].close()
        with pytest.raises(PeerError) as caught:
            probed(world)
        return str(caught.value)

    for text in testing.run(worlds, lose):
        assert "measuring NIC" in text
        assert "\n" not in text
