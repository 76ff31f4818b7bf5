"""Worlds over TCP or shared memory whose ranks are threads of this process."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from wingbeat.transport import tcp
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.world import World
from wingbeat.types import Layout

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")


def exchanges(size: int) -> list[Callable[[str, Any], list[Any]]]:
    """Return `World.exchange` of each rank, for one exchange."""
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def of(rank: int) -> Callable[[str, Any], list[Any]]:
        def exchange(_what: str, value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait(20.0)
            return list(values)

        return exchange

    return [of(rank) for rank in range(size)]


def links(
    size: int,
    *,
    interfaces: int = 1,
    keys: list[bytes | None] | None = None,
    timeout: float = 20.0,
    shared_memory: bool = True,
    encrypted: bool | None = None,
    choices: list[bool | None] | None = None,
    places: list[Interface] | None = None,
    dscp: int = 0,
) -> list[tuple[tcp.TcpLink, ...]]:
    """Connect ``size`` ranks over loopback, and return the links of each.

    ``choices`` has a value of ``encrypted`` for each rank, and ``places`` an interface.
    """
    found, store = exchanges(size), Switchboard()
    used, chosen = keys or [None] * size, choices or [encrypted] * size
    interface = places or [LO] * size

    def connect(rank: int) -> tuple[tcp.TcpLink, ...]:
        return tcp.connect(
            *(rank, [interface[rank]] * interfaces, found[rank], used[rank], timeout, store),
            encrypted=chosen[rank],
            dscp=dscp,
            shared_memory=shared_memory,
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(connect, range(size)))


def worlds(
    size: int,
    *,
    interfaces: int = 1,
    timeout: float = 20.0,
    shared_memory: bool = True,
    encrypted: bool | None = None,
    layout: Layout | None = None,
) -> list[World]:
    """Return the worlds of ``size`` connected ranks. Close them all at the same time."""
    store = Switchboard()
    return [
        World(
            rank,
            size,
            mine,
            (1.0,) * interfaces,
            timeout,
            store,
            threads=True,
            layout=layout or Layout.even(size, 1),
        )
        for rank, mine in enumerate(
            links(size, interfaces=interfaces, shared_memory=shared_memory, encrypted=encrypted)
        )
    ]


def close(members: list[World]) -> None:
    """Close all worlds."""
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(lambda world: world.close(), members))


def connected_sockets() -> Iterator[tuple[socket.socket, str, str]]:
    """Yield a copy of each connected TCP socket of this process, its address and the peer's."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or it listens
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family != socket.AF_UNIX:
                    yield copy, copy.getsockname()[0], copy.getpeername()[0]
