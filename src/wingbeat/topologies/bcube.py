"""BCube: hosts with one network interface for each level of a recursive network of small switches.

BCube(alpha, beta) (Guo et al., SIGCOMM 2009; Canary, section 4.4.1) has alpha**beta workers. In
base alpha, a worker's rank has one digit for each level. Interface ``l`` is connected to port
``digit l`` of the switch that connects the alpha workers with equal other digits, its level-``l``
cube.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.errors import UsageError
from wingbeat.topologies.topology import Topology
from wingbeat.types import Hop, Recv, Round, Send, Span, split

MOST_PORTS = 1000
MOST_LEVELS = 16


@dataclass(frozen=True, slots=True, repr=False)
class BCube(Topology):
    """Synchronous all-reduce over all interfaces of a BCube concurrently, as in BML.

    Every block is divided into ``levels`` equal parts. Part ``t`` is reduced along level ``t``
    first, then along level ``t + 1`` and so on, modulo ``levels``; in each of the ``levels`` rounds
    every interface carries one part. The all-gather is the reverse. Reduce-scatter and all-gather
    each send ``1 - 1/n`` of the buffer, equally on all interfaces: 1.78 buffers per all-reduce for
    BCube(3, 2), as many as a ring sends over one interface. The result is bitwise equal on all
    workers.

    ``ports`` of each switch are the papers' alpha, ``levels``, the interfaces of each worker, their
    beta. 0: derived from the numbers of workers and interfaces.

    Raises:
        UsageError: only one of them is 0, or one is out of range.
    """

    spans_links: ClassVar[bool] = True

    ports: int = 0
    levels: int = 0

    def __post_init__(self) -> None:
        sizes = ((self.ports, 2, MOST_PORTS), (self.levels, 1, MOST_LEVELS))
        whole = all(type(n) is int and low <= n <= high for n, low, high in sizes)
        if not whole and (self.ports, self.levels) != (0, 0):
            raise UsageError(
                f"BCube(ports={self.ports!r}, levels={self.levels!r}): allowed are ports from 2 to "
                f"{MOST_PORTS} and levels from 1 to {MOST_LEVELS}, or neither, to have both found"
            )

    @property
    def size(self) -> str:
        """Ports and levels, as in ``3x2``; empty if not yet known."""
        return f"{self.ports}x{self.levels}" if self.levels else ""

    @property
    def workers(self) -> int:
        """The number of workers, ``ports ** levels``."""
        count: int = self.ports**self.levels
        return count

    def fitted(self, workers: int, interfaces: int) -> BCube:
        """Return the BCube of ``workers`` with ``interfaces`` each.

        Raises:
            UsageError: there is none, or its size differs from this one's.
        """
        if workers == 1:
            return self
        if not self.levels:
            ports = _root(workers, interfaces)
            if ports**interfaces != workers:
                raise UsageError(_none_text(workers, interfaces, ports))
            return type(self)(ports, interfaces)
        if (self.workers, self.levels) != (workers, interfaces):
            raise UsageError(
                f"{_said(self.workers, self.levels)} are {self}; you have {workers} with "
                f"{interfaces}: start {self.workers}, and name the interfaces to use, as in "
                f"wingbeat.init(interfaces={[f'eth{i}' for i in range(self.levels)]})"
            )
        return self

    def __repr__(self) -> str:
        sizes = f"ports={self.ports}, levels={self.levels}" if self.levels else ""
        return f"{type(self).__name__}({sizes})"

    def __str__(self) -> str:
        return f"BCube({self.ports}, {self.levels})" if self.levels else "BCube()"

    def digit(self, rank: int, level: int) -> int:
        """Return the port of a worker on its level-``level`` switch."""
        low: int = self.ports**level
        return rank // low % self.ports

    def cube(self, rank: int, level: int) -> list[int]:
        """Return the workers on a worker's level-``level`` switch by port, including itself."""
        low: int = self.ports**level
        first = rank - self.digit(rank, level) * low
        return [first + port * low for port in range(self.ports)]

    def check_networks(self, networks: Sequence[Sequence[str]]) -> None:
        """Raise a `UsageError` unless the interfaces of each cube are in one network."""
        if len(networks) == 1:
            return
        for level, rank in itertools.product(range(self.levels), range(self.workers)):
            cube = self.cube(rank, level)
            if rank == cube[0] and len({networks[member][level] for member in cube}) > 1:
                listed = ", ".join(f"{member} on {networks[member][level]}" for member in cube)
                raise UsageError(
                    f"{self}: interface {level} is to join the ranks {cube} by one switch, but "
                    f"they are in several networks ({listed}): give the ranks in the order of "
                    f"the ports (digit l of a rank in base {self.ports} is its port at level l), "
                    "and the interfaces in the order of the levels"
                )

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:  # noqa: ARG002
        """As `Topology.reduce_scatter`."""
        parts = self._parts(blocks)
        return [self._round(rank, parts, step, True) for step in range(len(parts) and self.levels)]

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:  # noqa: ARG002
        """As `Topology.all_gather`; the reverse of the reduce-scatter."""
        parts = self._parts(blocks)
        steps = reversed(range(len(parts) and self.levels))
        return [self._round(rank, parts, step, False) for step in steps]

    def broadcast(
        self,
        rank: int,
        root: int,
        blocks: Sequence[Span],
        interface: int = 0,  # noqa: ARG002
    ) -> list[Round]:
        """Send ``root``'s blocks level by level: workers that have a block send it along the next.

        Blocks begin at different levels, so that all interfaces are used.
        """
        if not self._parts(blocks):
            return []
        rounds: list[Round] = []
        for number, block in enumerate(blocks):
            order = self._order(number)
            far = [self.digit(rank, at) != self.digit(root, at) for at in order]
            wrong = [step for step, differs in enumerate(far) if differs]
            # A worker receives a block along the last level at which it differs from the root.
            begin = wrong[-1] + 1 if wrong else 0
            if wrong:
                level = order[wrong[-1]]
                source = self.cube(rank, level)[self.digit(root, level)]
                rounds.append((Recv(source, block, False, level),))
            sends = [
                Send(peer, block, level)
                for level in order[begin:]
                for peer in self._others(rank, level)
            ]
            rounds.append(tuple(sends))
        return rounds

    def _parts(self, blocks: Sequence[Span]) -> list[list[Span]]:
        """Return each block's parts, or nothing for a single worker."""
        if len(blocks) == 1:
            return []
        if not self.levels or len(blocks) != self.workers:
            raise UsageError(f"{self} is not for {len(blocks)} workers: fitted() returns what is")
        return [split(block, [1] * self.levels) for block in blocks]

    def _others(self, rank: int, level: int, way: int = 1) -> list[int]:
        """Return a cube's other workers, from the next one upwards, or downwards if way is -1."""
        cube, own = self.cube(rank, level), self.digit(rank, level)
        return [cube[(own + way * k) % self.ports] for k in range(1, self.ports)]

    def _round(self, rank: int, parts: Sequence[Sequence[Span]], step: int, reduce: bool) -> Round:
        """Return one round: each part's span to be summed is divided by ``ports``, or the reverse.

        When gathering, the blocks that a worker has held for longest are sent first.
        """
        return interleave(
            self._hops(rank, [block[part] for block in parts], self._order(part)[step:], reduce)
            for part in range(self.levels)
        )

    def _hops(
        self, rank: int, spans: Sequence[Span], order: Sequence[int], reduce: bool
    ) -> Iterator[Hop]:
        level, *later = order
        theirs = [
            (peer, spans[block])
            for peer in self._others(rank, level)
            for block in self._around(peer, later)
        ]
        own = [
            (peer, spans[block])
            for peer in self._others(rank, level, -1)
            for block in self._around(rank, later)
        ]
        sent, received = (theirs, own) if reduce else (own, theirs)
        yield from (Send(peer, span, level) for peer, span in sent)
        yield from (Recv(peer, span, reduce, level) for peer, span in received)

    def _order(self, part: int) -> list[int]:
        return [(part + step) % self.levels for step in range(self.levels)]

    def _around(self, rank: int, levels: Sequence[int]) -> Iterator[int]:
        """Yield the blocks whose owners differ from ``rank`` only at these levels.

        The order of distances is equal for all ranks, so that no two workers send to one receiver.
        """
        for moves in itertools.product(range(self.ports), repeat=len(levels)):
            block = rank
            for level, offset in zip(levels, moves, strict=True):
                block = self.cube(block, level)[(self.digit(rank, level) + offset) % self.ports]
            yield block


def parse_size(text: str) -> tuple[int, int]:
    """Parse ``3x2`` as ports and levels; `UsageError` for other texts."""
    ports, _, levels = text.partition("x")
    fine = ports.isdecimal() and levels.isdecimal() and len(text) < 9
    if not fine or not int(ports) * int(levels):
        raise UsageError(
            f"bcube@{text}: allowed are PORTSxLEVELS, such as bcube@3x2 for 9 workers with 2 "
            "interfaces each, or bcube alone, to have both found"
        )
    return int(ports), int(levels)


def interleave(parts: Iterable[Iterable[Hop]]) -> Round:
    """Alternate the parts' hops, so that all interfaces are used from the start.

    All hops of a round between two workers belong to one part, so both have the same order.
    """
    turns = itertools.zip_longest(*parts)
    return tuple(hop for turn in turns for hop in turn if hop is not None)


def _root(workers: int, levels: int) -> int:
    """Return the largest number of ports with which a BCube has at most ``workers`` workers."""
    ports = 1
    while levels and (ports + 1) ** levels <= workers:
        ports += 1
    return ports


def _said(workers: int, interfaces: int) -> str:
    each = "1 interface" if interfaces == 1 else f"{interfaces} interfaces"
    return f"{workers} workers with {each} each"


def _none_text(workers: int, interfaces: int, ports: int) -> str:
    """List the numbers of workers that form a BCube; ``ports`` is the result of `_root`."""
    near = [p for p in (ports, ports + 1) if p > 1 and interfaces]
    fit = [f"{_said(p**interfaces, interfaces)} are BCube({p}, {interfaces})" for p in near]
    fit += [
        f"{_said(workers, levels)} are BCube({p}, {levels})"
        for levels in range(1, MOST_LEVELS)
        if (p := _root(workers, levels)) > 1 and p**levels == workers
    ]
    return (
        f"topology 'bcube': {'; '.join(fit)}; you have {workers} with {interfaces}: start so many, "
        "name the interfaces (wingbeat.init(interfaces=['eth0'])), or choose another topology"
    )
