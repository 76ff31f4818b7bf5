"""Connections in shared memory: which ranks use them, and what is left of them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tcp as ranks
from helpers.waiting import until
from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.transport import tcp
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.tcp import TcpLink

Cluster = list[tuple[TcpLink, ...]]


def mappings() -> int:
    """Return the number of mapped memories of connections in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:wingbeat")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def close(made: Cluster) -> None:
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(lambda links: [link.close() for link in links], made))


def exchange_everything(made: Cluster) -> None:
    """Send between all pairs of ranks over all links."""
    for a, b in itertools.permutations(range(len(made)), 2):
        for ours, theirs in zip(made[a], made[b], strict=True):
            given, out = torch.randn(1000), torch.zeros(1000)
            coming = theirs.recv(out, a, 1)
            ours.send(given, b, 1).wait(20.0)
            coming.wait(20.0)
            assert torch.equal(given, out)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = mappings(), descriptors()
    yield
    # The thread of an interface that was closed may still be ending, that of an earlier test too.
    until(lambda: mappings() <= before[0] and descriptors() <= before[1])


def test_ranks_of_one_host_share_memory_until_they_close(nothing_left: None) -> None:
    before = mappings()
    made = ranks.links(3, interfaces=2)
    assert mappings() == before + 3 * 2 * 2  # pairs, interfaces, and both ranks are here
    exchange_everything(made)
    close(made)


def test_switched_off_on_one_rank_tcp_connects_it(nothing_left: None) -> None:
    found, store = ranks.exchanges(3), Switchboard()

    def connect(rank: int) -> tuple[TcpLink, ...]:
        return tcp.connect(
            *(rank, [ranks.LO], found[rank], None, 20.0, store), shared_memory=rank != 1
        )

    before = mappings()
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(connect, range(3)))
    assert mappings() == before + 2
    exchange_everything(made)
    close(made)


def test_ranks_of_different_hosts_use_tcp(
    monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    names = itertools.count()
    monkeypatch.setattr(tcp, "host_identity", lambda: f"host {next(names)}")
    before = mappings()
    made = ranks.links(3)
    assert mappings() == before
    exchange_everything(made)
    close(made)


@pytest.mark.parametrize("side", ["accepting", "connecting"])
def test_tcp_is_used_where_memory_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nothing_left: None,
    side: str,
) -> None:
    original = _native.Rings

    def rings(*args: Any) -> _native.Rings:
        if bool(args) == (side == "connecting"):
            for each in itertools.chain(*args):
                os.close(each)
            raise RuntimeError("no memory")
        return original(*args)

    rings.DESCRIPTORS = original.DESCRIPTORS  # type: ignore[attr-defined]
    monkeypatch.setattr(_native, "Rings", rings)
    before = mappings()
    made = ranks.links(2)
    assert "rank 1 shares no memory with rank 0, which is on the same host: " in caplog.text
    assert "no memory; they use TCP" in caplog.text
    monkeypatch.undo()
    assert mappings() == before
    exchange_everything(made)
    close(made)


def test_name_that_nobody_serves_leads_to_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two hosts with the same identity, such as copies of a virtual machine."""
    wrapper = with_name(tcp._Port._dial_locally, "wingbeat/nobody")
    monkeypatch.setattr(tcp._Port, "_dial_locally", wrapper)
    made = ranks.links(2)
    assert "refused; they use TCP" in caplog.text
    exchange_everything(made)
    close(made)


def with_name(dial: Callable[..., Any], name: str) -> Callable[..., Any]:
    def wrapper(port: Any, peer: int, _name: str, *rest: Any) -> Any:
        return dial(port, peer, name, *rest)

    return wrapper


def exchange_over(connection: socket.socket, rank: int) -> Callable[[str, Any], list[Any]]:
    """Return `World.exchange` of one of two processes."""

    def exchange(_what: str, value: Any) -> list[Any]:
        connection.sendall(json.dumps(value).encode() + b"\n")
        theirs = json.loads(connection.makefile("rb").readline())
        return [value, theirs] if rank == 0 else [theirs, value]

    return exchange


def test_killed_peer_is_noticed_and_leaves_nothing(nothing_left: None) -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        (link,) = tcp.connect(1, [ranks.LO], exchange_over(theirs, 1), None, 20.0, Switchboard())
        sent = link.send(torch.zeros(50_000_000, dtype=torch.uint8), 0, 1)
        sent.wait(100.0)
        os._exit(0)
    theirs.close()
    (link,) = tcp.connect(0, [ranks.LO], exchange_over(ours, 0), None, 20.0, Switchboard())
    coming = link.recv(torch.zeros(1), 1, 2)
    early = link.recv(torch.zeros(50_000_001, dtype=torch.uint8), 1, 9)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for each in (coming, early):
        with pytest.raises(RuntimeError, match="closed by the peer"):
            each.wait(20.0)
    link.close()
    ours.close()


def test_shared_memory_switch_allows_on_and_off() -> None:
    assert tcp.shared_memory_enabled({})
    assert not tcp.shared_memory_enabled({tcp.SWITCH: "off"})
    with pytest.raises(UsageError, match="WINGBEAT_SHARED_MEMORY=no: allowed are on and off"):
        tcp.shared_memory_enabled({tcp.SWITCH: "no"})
