"""The port of torch's default group is shut to strangers once its ranks are connected."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wingbeat
from helpers.pool import Pool
from wingbeat.transport import gloo

DROPPED_S = 0.3
"""Seconds after which an attempt to connect on this host that has no answer will have none."""


def ports() -> set[tuple[str, int]]:
    """Where this process listens for TCP connections."""
    return {address for _, address in gloo._listening()}


def lets_in(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, DROPPED_S).close()
    except TimeoutError:
        return False
    return True


def open_device(address: str) -> Any:
    return gloo.watch_listeners(lambda: dist.ProcessGroupGloo.create_device(hostname=address))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_blocked_listener_drops_strangers(address: str) -> None:
    before = ports()
    device, opened = open_device(address)
    [port] = ports() - before
    assert lets_in(port)
    opened.block()
    assert not lets_in(port)
    del device
    assert port not in ports()


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
    device, opened = open_device("127.0.0.1")
    monkeypatch.setattr(gloo, "_SO_ATTACH_FILTER", 0x7FFF)
    opened.block()
    assert "cannot attach a socket filter: [Errno 92] Protocol not available" in caplog.text
    del device


def drops_strangers_after_init() -> None:
    before = ports()
    world = wingbeat.init(timeout=20)
    assert dist.get_world_size() == world.size
    opened = ports() - before
    # The default group's; those of wingbeat's connections stay, and that of the store on rank 0.
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
