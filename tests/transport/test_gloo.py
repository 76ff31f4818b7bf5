"""What is a gloo link's alone; what every link does is in `contracts/transport`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from wingbeat.errors import RendezvousError
from wingbeat.transport.gloo import GlooLink
from wingbeat.transport.interfaces import Interface

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
PATIENT = 100.0
"""Seconds for which the links themselves would wait: no test here may take as long."""


@pytest.fixture
def links() -> Iterator[list[GlooLink]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: GlooLink(store, rank, 2, LO, PATIENT), range(2)))
    yield made
    for link in made:
        link.close()


def error_of(body: Callable[[], object]) -> str:
    """What ``body`` raises, in good time; gloo, which hears no signal, is left to a thread."""
    said: list[str] = []

    def work() -> None:
        try:
            body()
        except (RuntimeError, RendezvousError) as err:
            said.append(str(err))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENT / 4)
    assert not thread.is_alive(), "it waits for longer than it was told to"
    return said[0]


def test_closed_link_raises_after_repeated_close(links: list[GlooLink]) -> None:
    links[0].close()
    links[0].close()
    with pytest.raises(RuntimeError, match="the link is closed"):
        links[0].send(torch.zeros(1), 1, 1)


def test_peer_that_does_not_connect_ends_the_setup_at_the_timeout() -> None:
    said = error_of(lambda: GlooLink(dist.HashStore(), 0, 2, LO, 0.5))
    assert said.startswith("rank 0 at 127.0.0.1 on interface lo did not reach all 2 ranks after")
