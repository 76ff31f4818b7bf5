"""Interfaces and switch ports with strict priority classes, served in quanta, and the paths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Traffic
from wingbeat.simulator.network import Side
from wingbeat.topologies.bcube import BCube

Path = Sequence[tuple[Side, Side]]
"""Hops from host to host, each with the sending and the receiving interface."""

Paths = Callable[[int, int], Sequence[Path]]
"""Maps source and target to paths that carry equal shares."""


def star(interfaces: int) -> Paths:
    """Return the paths where interface ``l`` of each host is on switch ``l``."""

    def paths(source: int, target: int) -> Sequence[Path]:
        return [[((source, link), (target, link))] for link in range(interfaces)]

    return paths


def bcube(cube: BCube) -> Paths:
    """Return the paths of a BCube, where hosts forward between switches.

    There is one path, which corrects the lowest digit first, as the routes of a lab's BCube do.
    """

    def paths(source: int, target: int) -> Sequence[Path]:
        hops, at = [], source
        for level in range(cube.levels):
            after = cube.cube(at, level)[cube.digit(target, level)]
            if after != at:
                hops.append(((at, level), (after, level)))
                at = after
        return [hops]

    return paths


class Stream(NamedTuple):
    """One direction of a connection; frames arrive in order. Urgency 0 is the most urgent class.

    Processes of different ``column`` are different ones.
    """

    source: int
    target: int
    urgency: int
    link: int = 0
    column: int = 0


Action = Callable[[], None]


@dataclass(slots=True)
class _Frame:
    """Bytes that wait at a port, with callbacks for the begin of a quantum and for the end."""

    left: int
    begun: Callable[[int, bool], None] | None
    over: Action | None


@dataclass(slots=True)
class _Class:
    """The waiting streams of one class, in round-robin order, and their frames."""

    turn: deque[Stream] = field(default_factory=deque)
    frames: dict[Stream, deque[_Frame]] = field(default_factory=dict)


class Port:
    """One direction of an interface: strict priority between classes, round-robin within a class.

    A quantum that has begun is completed.
    """

    def __init__(
        self,
        agenda: Agenda,
        links: Links,
        bytes_per_s: float,
        carried: Callable[[float, float, int], None] | None = None,
    ) -> None:
        self._agenda, self._record = agenda, carried
        self._seconds_per_byte = 1 / bytes_per_s
        self._quantum = links.quantum
        self._classless = not links.priorities
        self._classes: dict[int, _Class] = {}
        self._order: list[int] = []
        self._busy = False

    def offer(
        self,
        stream: Stream,
        nbytes: int,
        begun: Callable[[int, bool], None] | None,
        over: Action | None,
    ) -> None:
        """Queue bytes after the earlier frames of the stream."""
        urgency = 0 if self._classless else stream.urgency
        if urgency not in self._classes:
            self._classes[urgency] = _Class()
            self._order = sorted(self._classes)
        waiting = self._classes[urgency]
        frames = waiting.frames.setdefault(stream, deque())
        if not frames:
            waiting.turn.append(stream)
        frames.append(_Frame(nbytes, begun, over))
        if not self._busy:
            self._busy = True
            self._serve()

    def _serve(self) -> None:
        waiting = next((c for u in self._order if (c := self._classes[u]).turn), None)
        if waiting is None:
            self._busy = False
            return
        stream = waiting.turn.popleft()
        frames = waiting.frames[stream]
        frame = frames[0]
        nbytes = min(self._quantum, frame.left)
        frame.left -= nbytes
        last = not frame.left
        if last:
            frames.popleft()
        # Frames that arrive meanwhile precede this stream's next quantum.
        again = waiting.turn if frames else None
        if frame.begun is not None:
            frame.begun(nbytes, last)
        ends = self._agenda.now + nbytes * self._seconds_per_byte
        if self._record is not None:
            self._record(self._agenda.now, ends, nbytes)
        over = frame.over if last else None
        self._agenda.at(ends, lambda: self._sent(stream, again, over))

    def _sent(self, stream: Stream, again: deque[Stream] | None, over: Action | None) -> None:
        if again is not None:
            again.append(stream)
        if over is not None:
            over()
        self._serve()


class Ports(NamedTuple):
    """The ports of all hosts: from each interface to its switch, and from there to it."""

    out: dict[Side, Port]
    into: dict[Side, Port]


class Interfaces:
    """Interfaces of each host, on switches limited only at their ports towards a host.

    A quantum begins to arrive one latency after it begins to leave, if the receiver's port is free.
    All processes of a host share its ports, and traffic within a host is free. Without ``paths`` a
    frame uses the interfaces of its stream's link. Hosts forward by quanta. Interfaces of several
    columns of processes, which exchange nothing, share ``ports``.
    """

    def __init__(
        self,
        agenda: Agenda,
        links: Links,
        host: Callable[[int], int],
        paths: Paths | None = None,
        traffic: Traffic | None = None,
        ports: Ports | None = None,
        column: int = 0,
    ) -> None:
        self._agenda, self._links = agenda, links
        self._host, self._paths, self._traffic = host, paths, traffic
        self._out, self._in = ports or Ports({}, {})
        self._column = column

    def carry(self, stream: Stream, nbytes: int, arrived: Action) -> None:
        """Carry a frame after those of the same stream; call ``arrived`` at its end.

        Several paths carry equal shares of it.
        """
        stream = stream._replace(column=self._column)
        source, target = self._host(stream.source), self._host(stream.target)
        if source == target:
            self._agenda.at(self._agenda.now, arrived)
            return
        link = stream.link
        paths = self._paths(source, target) if self._paths else [[((source, link), (target, link))]]
        if self._links.crosses(source, target):
            paths = [self._over_spine(hop) for ((hop),) in paths]
        whole = arrived if len(paths) == 1 else _after(len(paths), arrived)
        for path in paths:
            self._pass_on(stream, path, -(-nbytes // len(paths)), whole)

    def _pass_on(self, stream: Stream, path: Path, nbytes: int, arrived: Action | None) -> None:
        (source, target), *rest = path
        egress = self._into(target)
        agenda, latency = self._agenda, self._links.latency_s
        if source[0] >= 0 and target[0] >= 0:
            latency = self._links.latency(source[0], target[0])

        def begun(part: int, last: bool) -> None:
            over = arrived if last else None
            if rest:
                over = partial(self._pass_on, stream, rest, part, over)
            agenda.at(agenda.now + latency, lambda: egress.offer(stream, part, None, over))

        self._out_of(source).offer(stream, nbytes, begun, None)

    def _over_spine(self, hop: tuple[Side, Side]) -> Path:
        """Return the path by the trunks of both leaf switches, as hosts with numbers below 0."""
        (source, out), (target, into) = hop
        up, down = (-1 - 2 * (source // self._links.leaf)), (-2 - 2 * (target // self._links.leaf))
        return [((source, out), (up, out)), ((down, into), (target, into))]

    def _rate(self, side: Side) -> float:
        return self._links.trunk_bytes_per_s if side[0] < 0 else self._links.rate(*side)

    def _into(self, side: Side) -> Port:
        if side not in self._in:
            self._in[side] = Port(self._agenda, self._links, self._rate(side))
        return self._in[side]

    def _out_of(self, side: Side) -> Port:
        if side not in self._out:
            seen = self._traffic if side[0] >= 0 else None
            note = partial(seen.carried, side[0]) if seen else None
            self._out[side] = Port(self._agenda, self._links, self._rate(side), note)
        return self._out[side]


def _after(count: int, action: Action) -> Action:
    """Return a callback that calls ``action`` the ``count``-th time."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            action()

    return one
