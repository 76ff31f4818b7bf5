"""The topology of hosts with several workers: sums inside each host, exchange between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.topologies.topology import Topology, forward_along
from wingbeat.types import Hop, Layout, Recv, Round, Send, Span


@dataclass(frozen=True, slots=True)
class Hierarchical(Topology):
    """Reduce-scatter inside each host, an exchange between hosts, all-gather inside each host.

    Each host has one worker for each block, its aggregator: on the owner's host the owner, on other
    hosts the worker with the owner's number, modulo the number of workers there. It sums the block
    inside its host; the aggregators of a block form a ring of hosts, or send it straight to the
    owner with ``direct``. So each of H hosts with equal numbers of workers sends ``(H-1)/H`` of the
    buffer, where a ring of all P workers sends ``(P-1)/P``. Nothing is encoded inside a host.

    Horovod's hierarchical all-reduce (NCCL inside, MPI between hosts) has the same three steps.

    Attributes:
        layout: the workers of each host. Hosts may have different numbers of workers.
        direct: whether aggregators exchange with owners directly, so that a block is encoded once
            in each direction; else hosts form a ring.
    """

    symmetric: ClassVar[bool] = True

    layout: Layout
    direct: bool = False

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.reduce_scatter`."""
        plan = _Plan(self, rank, blocks, interface)
        first = [plan.gather_inside(distance) for distance in range(1, plan.hosts + 1)]
        others = range(1, plan.hosts)
        if self.direct:
            sends = [hop for host in others for hop in plan.send(host, to=host)]
            shares = [hop for host in reversed(others) for hop in plan.receive(0, source=host)]
            return [*first, (*sends, *shares)]
        between = [(*plan.send(host, to=-1), *plan.receive(host + 1, source=1)) for host in others]
        return [*first, *between]

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.all_gather`. A chunk is sent to other hosts before its own."""
        plan = _Plan(self, rank, blocks, interface)
        others = range(1, plan.hosts)
        if self.direct:
            sends = [hop for host in reversed(others) for hop in plan.send(0, to=host)]
            arriving = [
                hop for host in others for hop in plan.receive(host, source=host, reduce=False)
            ]
            first = (*sends, *plan.spread_inside(0), *arriving)
            return [first, *map(plan.spread_inside, others)]
        between = [
            (
                *plan.send(host - 1, to=-1),
                *plan.spread_inside(host - 1),
                *plan.receive(host, source=1, reduce=False),
            )
            for host in others
        ]
        return [*between, plan.spread_inside(plan.hosts - 1)]

    def broadcast(
        self, rank: int, root: int, blocks: Sequence[Span], interface: int = 0
    ) -> list[Round]:
        """Forward all blocks from worker to worker; they enter each host once."""
        hosts, first = self.layout.hosts, self.layout.host_of[root]
        order = [worker for k in range(len(hosts)) for worker in hosts[(first + k) % len(hosts)]]
        order.remove(root)
        order.insert(0, root)
        return forward_along(order, rank, blocks, interface)


class _Plan:
    """One worker's hops. A ``distance`` of d is the d-th host before the worker's own.

    ``to`` and ``source`` are distances too. On its own host an owner is the aggregator.
    """

    def __init__(
        self, topology: Hierarchical, rank: int, blocks: Sequence[Span], interface: int
    ) -> None:
        self._layout, self._blocks = topology.layout, blocks
        self._rank, self._interface = rank, interface
        self._host = topology.layout.host_of[rank]
        self.hosts = len(topology.layout.hosts)

    def _owners(self, distance: int) -> tuple[int, ...]:
        return self._layout.hosts[(self._host - distance) % self.hosts]

    def _aggregator(self, owner: int, host: int) -> int:
        layout = self._layout
        there = layout.hosts[host % self.hosts]
        return there[layout.hosts[layout.host_of[owner]].index(owner) % len(there)]

    def _mine(self, distance: int) -> Iterator[int]:
        """Yield the owners on a host whose blocks this worker aggregates."""
        owners = self._owners(distance)
        return (owner for owner in owners if self._aggregator(owner, self._host) == self._rank)

    def _neighbours(self) -> list[int]:
        inside = self._layout.hosts[self._host]
        place = inside.index(self._rank)
        return [*inside[place + 1 :], *inside[:place]]

    def gather_inside(self, distance: int) -> Round:
        """Send each block of a host's workers to its aggregator, and receive the own ones."""
        hops: list[Hop] = []
        for owner in self._owners(distance):
            block, to = self._blocks[owner], self._aggregator(owner, self._host)
            if to != self._rank:
                hops.append(Send(to, block, self._interface, near=True))
            else:
                hops += [
                    Recv(peer, block, True, self._interface, near=True)
                    for peer in self._neighbours()
                ]
        return tuple(hops)

    def spread_inside(self, distance: int) -> Round:
        """Send the blocks of a host's workers that this one aggregates to all others here."""
        hops: list[Hop] = []
        for owner in self._owners(distance):
            block, at = self._blocks[owner], self._aggregator(owner, self._host)
            if at != self._rank:
                hops.append(Recv(at, block, False, self._interface, near=True))
            else:
                hops += [
                    Send(peer, block, self._interface, near=True) for peer in self._neighbours()
                ]
        return tuple(hops)

    def send(self, distance: int, *, to: int) -> Iterator[Hop]:
        """Send the blocks of a host's workers that this one aggregates to the host at ``to``."""
        for owner in self._mine(distance):
            peer = self._aggregator(owner, self._host - to)
            yield Send(peer, self._blocks[owner], self._interface)

    def receive(self, distance: int, *, source: int, reduce: bool = True) -> Iterator[Hop]:
        """Receive the blocks of a host's workers that this one aggregates from ``source``."""
        for owner in self._mine(distance):
            peer = self._aggregator(owner, self._host - source)
            yield Recv(peer, self._blocks[owner], reduce, self._interface)
