"""Classes of traffic, by the byte of the IP header."""

from __future__ import annotations

import socket
import sys

import pytest

from helpers import tcp as ranks
from wingbeat.transport.messages.frames import TOS, tos_of
from wingbeat_lab import lab
from wingbeat_lab.lab.plan import CLASSES


def test_the_lab_honours_the_same_classes() -> None:
    assert [tos for _, tos in CLASSES] == list(TOS)


def test_the_last_class_is_best_effort() -> None:
    assert [[tos_of(u, n) for u in range(n)] for n in (1, 2, 3, 4)] == [
        [0],
        [0xB8, 0],
        [0xB8, 0x88, 0],
        [0xB8, 0x88, 0x48, 0],
    ]


def classes_of_connections(address: str) -> list[int]:
    """Return the classes of this process's connections from and to an address."""
    option = (
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        if ":" in address
        else (socket.IPPROTO_IP, socket.IP_TOS)
    )
    return [
        copy.getsockopt(*option) >> 2
        for copy, *ends in ranks.connected_sockets()
        if ends == [address, address]
    ]


@pytest.mark.parametrize("address", ["127.0.7.1", "::1"])
@pytest.mark.parametrize("dscp", [0, 10, 63])
def test_both_ends_of_a_connection_of_collectives_have_the_class(address: str, dscp: int) -> None:
    place = ranks.Interface("lo", address, "::1/128" if ":" in address else "127.0.0.0/8")
    made = ranks.links(2, shared_memory=False, places=[place] * 2, dscp=dscp)
    assert classes_of_connections(address) == [dscp] * 2
    for links in made:
        links[0].abort_waits()
        links[0].close()


TRAINS = """if True:
    import sys, torch, wingbeat
    world = wingbeat.init(timeout=60, dscp=int(sys.argv[1]))
    model, optimizer = torch.nn.Linear(1000, 1000), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.AllReduce())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
    wingbeat.shutdown()
"""


@pytest.mark.lab
@pytest.mark.parametrize(
    ("dscp", "queue"), [pytest.param(0, "be", marks=pytest.mark.slow), (46, "ef")]
)
def test_switches_that_honour_the_class_give_gradients_its_queue(dscp: int, queue: str) -> None:
    result = lab.run("star:2@1gbit,prio=2", [sys.executable, "-c", TRAINS, str(dscp)], timeout=165)
    assert result.exit_code == 0
    out = result.stats.hosts["h0"]["eth0"].out
    other = "ef" if queue == "be" else "be"
    assert out[queue].bytes > 3 * 4_000_000 > 100 * 1000 > out[other].bytes
