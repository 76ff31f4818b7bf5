"""What each network interface is worth by itself: plain collectives (OMGS-SGD, section II-F)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from wingbeat import topologies
from wingbeat.collectives import Collectives
from wingbeat.probe.exchange import (
    BUDGET_S,
    FIRST,
    REPEATS,
    Action,
    Points,
    Samples,
    growing,
    measure_exchange,
)
from wingbeat.transport.link import Link, Pending
from wingbeat.transport.world import World

_FACTOR = 4.0
"""Between two amounts. Two coefficients need few."""


@dataclass(frozen=True, slots=True)
class LinkSamples:
    """Plain collectives on one network interface, or on ``name`` of several together.

    Attributes:
        all_gather: bytes that each worker brings, and seconds (Eq. 11).
        all_reduce: bytes of the buffer, and seconds.
    """

    name: str
    all_gather: Points
    all_reduce: Points


def measure_links(
    collectives: Collectives,
    *,
    topology: str = "ring",
    largest_bytes: int = 1 << 20,
    repeats: int = REPEATS,
    budget_s: float = BUDGET_S,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[LinkSamples, ...]:
    """Measure plain collectives on each network interface by itself, then on all together.

    All-gathers go by doubling, as those of small payloads do; all-reduces by ``topology``, or
    around a ring where that is for several interfaces together (a BCube) and one is measured.
    Tensors are on the CPU. Nothing else may be under way.

    Args:
        collectives: those of the whole world.
        topology: as in `Choices`.
        largest_bytes: the largest amount; the smallest is 1 K.
        repeats: as for `measure_exchange`.
        budget_s: as for `measure_exchange`.
        now: a clock, in seconds.

    Raises:
        PeerError: as for `measure_exchange`.
    """
    whole = collectives.world

    def measure(name: str, world: World) -> LinkSamples:
        by_what = []
        together = topologies.get(topology).spans_links and world is not whole
        reduced = "ring" if together else topology
        for what, how in (("all_gather", "doubling"), ("all_reduce", reduced)):
            alone = Collectives(world, how)

            def action(nbytes: int, what: str = what, alone: Collectives = alone) -> Action:
                return _plain_action(alone, what, nbytes)

            samples = measure_exchange(
                alone, action, growing(FIRST, largest_bytes, _FACTOR), repeats,
                budget_s=budget_s, whole=whole, now=now,
            )  # fmt: skip
            by_what.append(_whole_time(samples))
        return LinkSamples(name, *by_what)

    found = []
    for link in whole.links:
        with _alone(whole, link) as world:
            found.append(measure(link.name, world))
    if len(whole.links) > 1:
        found.append(measure(" + ".join(link.name for link in whole.links), whole))
    return tuple(found)


@contextlib.contextmanager
def _alone(whole: World, link: Link) -> Iterator[World]:
    """Lend a world of one link, whose thread ends with the loan."""
    borrowed = _Borrowed(link)
    world = World(
        rank=whole.rank,
        size=whole.size,
        links=(borrowed,),
        speeds=(whole.speeds[whole.links.index(link)],),
        timeout=whole.timeout,
        store=whole.store,
        nccl_devices=frozenset(),
    )
    try:
        yield world
    finally:
        borrowed.returned = True
        world.close()


class _Borrowed:
    """A link of the whole world, for another one to use; that one's end does not close it.

    Tags begin anew, which does no harm: between two workers messages of the same tag match in
    order, and whoever uses the link next has waited for all of its own.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.returned = False

    @property
    def name(self) -> str:
        """The interface's name."""
        return self._link.name

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """As the link does."""
        return self._link.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """As the link does."""
        return self._link.recv(tensor, peer, tag)

    def close(self) -> None:
        """Break the connections while they are in use: a peer was lost, and others must know."""
        if not self.returned:
            self._link.close()


def _plain_action(collectives: Collectives, what: str, nbytes: int) -> Action:
    size = collectives.world.size
    if what == "all_gather":
        rows = torch.zeros(size * nbytes, dtype=torch.uint8)
        return Action(lambda: collectives.all_gather(rows), nbytes)
    buffer = torch.zeros(-(-nbytes // 4))
    return Action(lambda: collectives.all_reduce(buffer), 4 * buffer.numel())


def _whole_time(samples: Samples) -> Points:
    """Nothing is encoded: what the call takes is a part of the exchange."""
    pairs = zip(samples.encode, samples.exchange, strict=True)
    return tuple((nbytes, call + seconds) for (_, call), (nbytes, seconds) in pairs)
