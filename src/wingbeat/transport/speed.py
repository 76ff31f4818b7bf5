"""How fast each link is, so that tensors are striped over them and cut into messages by that."""

from __future__ import annotations

import time

import torch

from wingbeat.errors import PeerError
from wingbeat.transport.link import Link
from wingbeat.transport.world import World

_FIRST_BYTES = 16 << 10
_LONG_ENOUGH_S = 0.04
_LAST_BYTES = 16 << 20

_TIMES = 3
"""How often a message that counts is sent: on a busy host any one may be late, none is early."""


def measure_speeds(world: World) -> tuple[float, ...]:
    """Measure all links and return the bytes a second of each, equal on every rank.

    Each rank sends to the next while it receives from the one before, on one link after the
    other, with messages that grow until one takes 40 ms, three times of three. A link is as fast
    as its slowest rank, at its best.

    Raises:
        PeerError: a transfer failed or took longer than the world's timeout.
    """
    speeds = []
    for link in world.links:
        nbytes = _FIRST_BYTES
        while (seconds := _best_seconds(world, link, nbytes)) < _LONG_ENOUGH_S:
            if nbytes >= _LAST_BYTES:
                break
            nbytes *= 2
        speeds.append(nbytes / seconds)
    return tuple(speeds)


def _best_seconds(world: World, link: Link, nbytes: int) -> float:
    """Return how long an exchange takes its slowest rank, at best; equal on every rank."""
    best = float("inf")
    for _ in range(_TIMES):
        best = min(best, max(world.exchange("speed", _exchange_seconds(world, link, nbytes))))
        if best < _LONG_ENOUGH_S and nbytes < _LAST_BYTES:
            break  # a larger one will tell
    return best


def _exchange_seconds(world: World, link: Link, nbytes: int) -> float:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    outgoing, incoming = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    begin = time.monotonic()
    receive = link.recv(incoming, before, 0)
    send = link.send(outgoing, after, 0)
    try:
        receive.wait(world.timeout)
        send.wait(world.timeout)
    except RuntimeError as err:
        raise PeerError(
            f"rank {world.rank}: measuring interface {link.name} with ranks {before} and {after} "
            f"failed after {time.monotonic() - begin:.1f} s: {str(err).splitlines()[0]}; check "
            "that it joins these hosts, or name others: wingbeat.init(interfaces=[...])"
        ) from None
    return time.monotonic() - begin
