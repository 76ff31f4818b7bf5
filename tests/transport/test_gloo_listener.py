"""gloo's listening sockets are shut to strangers once all peers are connected."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wingbeat
from helpers.pool import Pool
from wingbeat.transport import descriptors, gloo
from wingbeat.transport.gloo import GlooGroups, GlooLink
from wingbeat.transport.interfaces import Interface
from wingbeat.types import Group

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
PATIENT = timedelta(seconds=30)
DROPPED_S = 0.3
"""Seconds after which an attempt to connect on this host that has no answer will have none."""


def ports() -> set[tuple[str, int]]:
    """Where this process listens for TCP connections."""
    found = set()
    for name in os.listdir(descriptors.FD_DIRECTORY):
        if name.isdigit() and gloo._is_listening(int(name)):
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    found.add(copy.getsockname()[:2])
    return found


def lets_in(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, DROPPED_S).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_blocked_listener_drops_strangers_until_unblocked(address: str) -> None:
    before = ports()
    device, opened = gloo.open_device(address)
    [port] = ports() - before
    assert lets_in(port)
    opened.block()
    assert not lets_in(port)
    opened.unblock()
    assert lets_in(port)
    opened.unblock()
    del device
    assert port not in ports()


def test_connected_link_drops_strangers_and_transfers() -> None:
    before, store = ports(), dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda rank: GlooLink(store, rank, 2, LO, 30.0), range(2)))
    opened = ports() - before
    assert len(opened) == 2
    assert not any(map(lets_in, opened))
    into = torch.zeros(3)
    received = links[1].recv(into, 0, 1)
    links[0].send(torch.arange(3.0), 1, 1).wait(30.0)
    received.wait(30.0)
    assert into.tolist() == [0, 1, 2]
    for link in links:
        link.close()


def test_groups_listen_only_during_their_setup() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = ports()
    ranks = [
        GlooGroups(
            dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30)), k, 2, [LO]
        )
        for k in range(2)
    ]
    seen: set[tuple[str, int]] = set()

    def meet(group: Group) -> list[Any]:
        def one(rank: int) -> Any:
            [link] = ranks[rank].links(group, 30.0)
            sent = link.send(torch.ones(1), 1 - rank, 1)
            link.recv(torch.zeros(1), 1 - rank, 1).wait(30.0)
            sent.wait(30.0)
            return link

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))

    for epoch in range(3):
        links = meet(Group((0, 1), epoch))
        seen |= ports() - before
        assert len(seen) == 2, "the devices of the first meeting are used again"
        assert not any(map(lets_in, seen))
        for link in links:
            link.close()
        assert not any(map(lets_in, seen)), "an idle device listens"
    for rank in ranks:
        rank.close()


def test_foreign_listener_meanwhile_leaves_all_ports_open(caplog: pytest.LogCaptureFixture) -> None:
    foreign: list[socket.socket] = []

    def make() -> Any:
        foreign.append(socket.create_server(("127.0.0.1", 0)))
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

    device, opened = gloo.watch_listeners(make)
    opened.block()
    assert not opened.known
    assert lets_in(foreign[0].getsockname())
    assert "2 sockets started to listen, but gloo opened 1" in caplog.text
    foreign[0].close()
    del device


def test_kernel_without_filters_leaves_the_port_open_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, opened = gloo.open_device("127.0.0.1")
    monkeypatch.setattr(gloo, "_SO_ATTACH_FILTER", 0x7FFF)
    opened.block()
    opened.unblock()
    assert "cannot attach a socket filter: [Errno 92] Protocol not available" in caplog.text
    del device


def drops_strangers_after_init() -> None:
    before = ports()
    world = wingbeat.init(timeout=20)
    assert dist.get_world_size() == world.size
    opened = ports() - before
    # The default group's; where rank 0 serves the store, that port stays.
    assert sum(not lets_in(port) for port in opened) == 1
    whole = dist.new_group(list(range(world.size)))
    for group in (None, whole):
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        assert ones.item() == world.size
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"No device\(s\) specified"):
        dist.split_group(split_ranks=[list(range(world.size))])
    assert time.monotonic() - begin < 10
    dist.barrier()
    wingbeat.shutdown()


def test_init_leaves_no_gloo_port_open(fresh_pool: Callable[..., Pool]) -> None:
    fresh_pool(2, default_group=False).run(drops_strangers_after_init)


def keeps_the_scripts_own_port_open() -> None:
    [own] = [port for port in ports() if port[0] == "127.0.0.1"][:1]
    wingbeat.init(timeout=20)
    assert lets_in(own)
    dist.barrier()
    wingbeat.shutdown()


def test_default_group_of_the_script_keeps_its_port(fresh_pool: Callable[..., Pool]) -> None:
    fresh_pool(2, default_group=True).run(keeps_the_scripts_own_port_open)
