"""Mailboxes and a store in virtual time: the real endpoints on simulated connections.

A connection delivers in order, after any time; it may be lost with what is on its way, and is then
renewed. Nothing passes between two processes that are cut off from each other: it waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from simulation.scenario import Fault
from simulation.world import Process, Wait, World
from wingbeat._native import Endpoint
from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.methods.bounded_staleness.streams import Streams
from wingbeat.methods.model_averaging.service import GroupService
from wingbeat.transport.detector import FailureDetector
from wingbeat.transport.interfaces import Host, Interface
from wingbeat.transport.membership import MembershipClient
from wingbeat.transport.messages.frames import DTYPES, NEVER, Limits, Message, Posted
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info, store_key

RECONNECT_S = 0.5
"""At most so long takes a connection to be renewed; less than a live process is given."""

_NUMBER_OF = {name: number for number, name in enumerate(DTYPES)}


class Network:
    """All connections of a world.

    Args:
        interfaces: of each process; number n of one reaches number n of the other.
        delay_s: a frame takes up to so long; most take much less.
    """

    def __init__(self, world: World, interfaces: int = 1, delay_s: float = 0.05) -> None:
        self.world, self.interfaces, self.delay_s = world, interfaces, delay_s
        self.boxes: dict[tuple[str, int], SimulatedMailbox] = {}
        self.cut_until: dict[frozenset[int], float] = {}
        self.chance = world.random("network")
        self.in_flight = 0
        self.reach: Callable[[int, int], tuple[int, ...]] = lambda _a, _b: tuple(range(interfaces))
        self.host = Host(
            "simulated",
            tuple(Interface(f"nic{i}", f"10.0.{i}.1", f"10.0.{i}.0/24") for i in range(interfaces)),
        )
        self._sessions = 0
        world.on_fault |= {"reset": self._reset, "cut": self._cut}

    def delay(self) -> float:
        return self.delay_s * self.chance.random() ** 4

    def is_cut(self, a: int, b: int) -> float:
        """Return for how long two processes are still cut off; 0 if they are not."""
        return max(0.0, self.cut_until.get(frozenset((a, b)), 0.0) - self.world.now)

    def _between(self, fault: Fault) -> list[Connection]:
        ends = set(fault.where)
        return [
            connection
            for box in self.boxes.values()
            for connection in box.connections.values()
            if {connection.a.number, connection.b.number} == ends and connection.a is box
        ]

    def _reset(self, fault: Fault) -> None:
        for connection in self._between(fault):
            connection.lose()

    def _cut(self, fault: Fault) -> None:
        pair = frozenset(fault.where)
        until = self.world.now + fault.seconds
        self.cut_until[pair] = max(until, self.cut_until.get(pair, 0.0))

    def info(self, session: int, classes: int, limits: Limits) -> PeerInfo:
        ports = ((1,) * classes,) * self.interfaces
        return PeerInfo(self.host, session, "2", True, ports, limits.message, limits.window)

    def open_mailbox(
        self,
        store: Any,
        number: int,
        peers: Iterable[int],
        *,
        namespace: str = "",
        interfaces: Sequence[str] | None = None,
        classes: int = 3,
        encrypted: bool = True,
        limits: Limits | None = None,
        seconds: float = 300.0,
        name: Callable[[int], str] = "rank {}".format,
        tolerate_silence: bool = False,
        incarnation: int = 0,
        announce: Callable[[float], Mapping[int, int]] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> SimulatedMailbox:
        """As `wingbeat.transport.messages.connect.open_mailbox`."""
        limits = limits or Limits()
        deadline = self.world.now + seconds
        self._sessions += 1
        info = self.info(self._sessions, classes, limits)
        silence = NEVER if tolerate_silence else limits.silence
        box = SimulatedMailbox(self, number, namespace, info, limits, silence, classes, name)
        store.set(store_key(namespace, number, incarnation), info.to_json())
        theirs: Mapping[int, int] = dict.fromkeys(sorted(set(peers) - {number}), 0)
        if announce is not None:
            theirs = announce(max(0.0, deadline - self.world.now))
        for peer, life in theirs.items():
            try:
                found = read_peer_info(store, namespace, peer, life, deadline - self.world.now)
            except TimeoutError:
                raise RendezvousError(f"{name(number)}: {name(peer)} opened no mailbox") from None
            box.join(peer, found)
        box.wait_connected(max(0.0, deadline - self.world.now), watch)
        return box


class Connection:
    """A connection of two mailboxes; the process with the lower number makes and renews it."""

    def __init__(
        self, a: SimulatedMailbox, b: SimulatedMailbox, interface: int, urgency: int
    ) -> None:
        self.a, self.b, self.where = a, b, (interface, urgency)
        self.network, self.up, self.closed, self.number = a.network, False, False, 0
        self._latest = {a: 0.0, b: 0.0}
        self._leaves: dict[SimulatedMailbox, bool] = {a: False, b: False}

    def other(self, box: SimulatedMailbox) -> SimulatedMailbox:
        return self.b if box is self.a else self.a

    def send(self, source: SimulatedMailbox, frame: Any) -> None:
        """Send a frame; None for that the process has left."""
        if frame is None:
            self._leaves[source] = True
        if self.up:
            self.network.in_flight += 1
            self._later(self._arrive, source, self.number, frame)

    def _later(self, action: Callable[..., object], source: SimulatedMailbox, *args: Any) -> None:
        at = max(self.network.world.now + self.network.delay(), self._latest[source])
        self._latest[source] = at
        self.network.world.at(at, action, source, *args)

    def _arrive(self, source: SimulatedMailbox, number: int, frame: Any) -> None:
        target = self.other(source)
        if number == self.number and self.up and target.process.alive:
            if (left := self.network.is_cut(source.number, target.number)) > 0:
                self._latest[source] = max(self._latest[source], self.network.world.now + left)
                self.network.world.after(left, self._arrive, source, number, frame)
                return
            if target.process.state == "stopped":
                target.process.held.append((self._arrive, (source, number, frame)))
                return
            self.network.in_flight -= 1
            target.receive(source.number, self.where, frame)
            self.network.world.step()
        else:
            self.network.in_flight -= 1

    def lose(self, renew: bool = True) -> None:
        """Lose the connection, and all that is on its way."""
        if self.up:
            self.up, self.number = False, self.number + 1
            for box in (self.a, self.b):
                box.process.when_running(box.disconnected, self)
        if not renew:
            self.closed = True
            for box in (self.a, self.b):
                box.process.when_running(box.forget, self)
        elif not self.closed:
            self.renew()

    def renew(self) -> None:
        world, network = self.a.network.world, self.network
        world.after(RECONNECT_S * network.chance.random() ** 2, self._connect)

    def _connect(self) -> None:
        if self.closed or self.up or not (self.a.process.alive and self.b.process.alive):
            return
        cut = self.network.is_cut(self.a.number, self.b.number)
        if self.a.process.state == "stopped" or cut:  # a stopped process accepts connections
            self.network.world.after(max(cut, 0.1), self._connect)
            return
        self.up = True
        self._latest = dict.fromkeys(self._latest, self.network.world.now)
        for box in (self.a, self.b):
            box.process.when_running(box.connected, self, self.number, box is self.a)
        for box, leaves in self._leaves.items():
            if leaves:
                self.send(box, None)


class SimulatedMailbox:
    """As `wingbeat.transport.messages.mailbox.Mailbox`."""

    def __init__(
        self,
        network: Network,
        number: int,
        namespace: str,
        info: PeerInfo,
        limits: Limits,
        silence: float,
        classes: int,
        name: Callable[[int], str],
    ) -> None:
        self.network, self.world, self.number, self.info = network, network.world, number, info
        self.process: Process = self.world.current
        self._namespace, self._limits, self._classes = namespace, limits, classes
        self.name, self._me = name, name(number)
        self.end = Endpoint(number, info.session, limits.window, silence)
        self.connections: dict[tuple[int, int, int], Connection] = {}
        self._wanted: dict[int, int] = {}  # sessions of the peers
        self._left: set[int] = set()
        self._leaves: set[tuple[int, int, int]] = set()  # the routes of peers that leave
        self._heard: set[tuple[int, int]] = set()
        self._waiters: list[Wait] = []
        self._interrupted = self._closed = False
        self._ticks_at = math.inf
        self._sent: list[Posted] = []
        self.refused: Counter[str] = Counter()
        network.boxes[namespace, number] = self
        self.process.at_end.append(self._die)
        self.process.at_resume.append(self._resumed)

    # -- as a mailbox ---------------------------------------------------------------------

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(self._wanted)

    @property
    def largest(self) -> int:
        return self._limits.message

    @property
    def lost(self) -> Mapping[int, str]:
        lost = self.end.lost
        return dict.fromkeys(lost, f"has been silent for {self._limits.silence:g} s")

    @property
    def left(self) -> frozenset[int]:
        return frozenset(self._left)

    def unconnected(self) -> Mapping[int, float]:
        found = self.end.unconnected(self.world.now)
        return {peer: seconds for peer, seconds in found.items() if peer not in self._left}

    def interfaces(self, peer: int) -> tuple[int, ...]:
        return self.network.reach(self.number, peer)

    def interrupter(self) -> Callable[[], None]:
        def interrupt() -> None:
            self._interrupted = True
            self.world.wake(self._waiters)

        return interrupt

    def room(self, peer: int, *, interface: int | None = None, urgency: int | None = None) -> int:
        return self.end.room(*self._route(peer, interface, urgency))

    def post(
        self,
        peer: int,
        kind: int,
        payload: Any = b"",
        *,
        ids: Sequence[int] = (0, 0, 0, 0),
        dtype: str = "",
        interface: int | None = None,
        urgency: int | None = None,
        seconds: float | None = None,
    ) -> Posted:
        route = self._route(peer, interface, urgency)
        contents = bytes(memoryview(payload).cast("B")) if len(payload) else b""
        assert len(contents) <= self.largest
        wait = self._limits.silence if seconds is None else seconds
        deadline = self.world.now + wait
        while True:
            self._check(peer)
            posted = self.end.post(
                *route, kind, contents, (*ids,), _NUMBER_OF[dtype], self.world.now
            )
            if posted is not None:
                break
            if self.world.now >= deadline:
                raise self._error(f"{self.name(peer)} consumed nothing for {wait:g} s")
            self.world.block(self._waiters, min(deadline - self.world.now, 1.0))
        self._sent.append(posted)
        if len(self._sent) > 1000:
            self._sent = [each for each in self._sent if not each.arrived]
        self._pump()
        return posted

    def poll(self, *, keep: bool = False) -> Message | None:
        self._check_open()
        found = self.end.take(self.world.now, keep)
        if found is not None:
            self._pump()
        return found

    def next(self, seconds: float, *, keep: bool = False) -> Message | None:
        if (found := self.poll(keep=keep)) is not None:
            return found
        if not self._interrupted:
            self.world.block(self._waiters, seconds)
        self._interrupted = False
        return None if self._closed else self.poll(keep=keep)

    def free(self, message: Message) -> None:
        self.end.free(message, self.world.now)
        self._pump()

    def drop(self, peer: int) -> None:
        self._wanted.pop(peer, None)
        self._left.discard(peer)
        self._leaves = {each for each in self._leaves if each[0] != peer}
        self.end.remove_peer(peer)
        for key, connection in list(self.connections.items()):
            if key[0] == peer:
                connection.lose(renew=False)
                self.connections.pop(key, None)

    def join(self, peer: int, info: PeerInfo) -> None:
        self.drop(peer)
        self._heard = {each for each in self._heard if each[0] != peer}
        self._wanted[peer] = info.session
        for interface in self.interfaces(peer):
            for urgency in range(self._classes):
                self.end.add(peer, interface, urgency, info.session)
        other = self.network.boxes.get((self._namespace, peer))
        if other is not None and other.wants(self) and self.wants(other) and not other._closed:
            a, b = (self, other) if self.number < other.number else (other, self)
            for interface in self.interfaces(peer):
                for urgency in range(self._classes):
                    connection = Connection(a, b, interface, urgency)
                    a.connections[b.number, interface, urgency] = connection
                    b.connections[a.number, interface, urgency] = connection
                    connection.renew()

    def wants(self, other: SimulatedMailbox) -> bool:
        return self._wanted.get(other.number) == other.info.session

    def wait_connected(self, seconds: float, watch: Callable[[], None] = lambda: None) -> None:
        deadline = self.world.now + seconds
        while unheard := [
            peer
            for peer in self._wanted
            if any((peer, i) not in self._heard for i in self.interfaces(peer))
        ]:
            if self.world.now >= deadline:
                raise self._error(f"{self.name(unheard[0])} did not answer within {seconds:g} s")
            if not self.world.block(self._waiters, min(1.0, deadline - self.world.now)):
                watch()

    def close(self, seconds: float = 5.0) -> None:
        if self._closed or not self.process.alive:
            return
        self._closed = True
        deadline = self.world.now + seconds
        while (late := self._unarrived()) and self.world.now < deadline:
            self.world.block(self._waiters, min(0.1, deadline - self.world.now))
        for connection in self.connections.values():
            connection.send(self, None)
        self.world.sleep(0.2)  # the last frames
        self._close_connections()
        if late:
            raise self._error("not all messages have arrived")

    def abandon(self) -> None:
        self._closed = True
        self._close_connections()

    # -- inside ---------------------------------------------------------------------------

    def _route(self, peer: int, interface: int | None, urgency: int | None) -> tuple[int, int, int]:
        self._check_open()
        if peer not in self._wanted:
            raise UsageError(f"{self._me}: {self.name(peer)} is no peer of this mailbox")
        return (
            peer,
            self.interfaces(peer)[0] if interface is None else interface,
            self._classes - 1 if urgency is None else urgency,
        )

    def _check(self, peer: int) -> None:
        if peer in self.lost:
            raise self._error(f"{self.name(peer)} {self.lost[peer]}")
        if peer in self._left:
            raise self._error(f"{self.name(peer)} has left")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self._me}: this mailbox is closed")

    def _error(self, what: str) -> PeerError:
        return PeerError(f"{self._me}: {what}")

    def _unarrived(self) -> bool:
        gone = self._left | set(self.end.lost)
        self._sent = [each for each in self._sent if not each.arrived]
        return bool(self._sent) and not gone.issuperset(self._wanted)

    def receive(self, peer: int, where: tuple[int, int], frame: Any) -> None:
        if self.process.world.processes.get(self.process.number) is not self.process:
            return
        if frame is None:
            self._leaves.add((peer, *where))
            if all(each in self._leaves for each in self.connections if each[0] == peer):
                self._left.add(peer)
        else:
            self._heard.add((peer, where[0]))
            self.end.accept(peer, *where, *frame, self.world.now)
        self._pump()
        self.world.wake(self._waiters)

    def connected(self, connection: Connection, number: int, introduce: bool) -> None:
        if connection.up and connection.number == number:
            peer = connection.other(self).number
            self.end.connected(peer, *connection.where, introduce, self.world.now)
            self._pump()
            self.world.wake(self._waiters)

    def disconnected(self, connection: Connection) -> None:
        peer = connection.other(self)
        if self.wants(peer):
            self.end.disconnected(peer.number, *connection.where, self.world.now)
            self.world.wake(self._waiters)

    def forget(self, connection: Connection) -> None:
        key = connection.other(self).number, *connection.where
        if self.connections.get(key) is connection:
            del self.connections[key]

    def _pump(self) -> None:
        end, now = self.end, self.world.now
        while end.busy:
            for route in end.take_busy():
                connection = self.connections.get(route)
                while (frame := end.next(*route, now)) is not None:
                    if connection is not None:
                        connection.send(self, frame)
        if end.due < self._ticks_at:
            self._ticks_at = max(end.due, now)
            self.world.at(self._ticks_at, self._tick, self._ticks_at)

    def _tick(self, when: float) -> None:
        if when == self._ticks_at and self.process.alive:
            self.process.when_running(self._tick_now)

    def _tick_now(self) -> None:
        self._ticks_at = math.inf
        lost = len(self.end.lost)
        self.end.tick(self.world.now)
        self._pump()
        if len(self.end.lost) != lost:
            self.world.wake(self._waiters)

    def _resumed(self) -> None:
        self.end.resume(self.world.now)

    def _close_connections(self) -> None:
        for connection in list(self.connections.values()):
            connection.lose(renew=False)

    def _die(self) -> None:
        self._closed = True
        for connection in list(self.connections.values()):
            # What it has sent last may still arrive.
            self.world.after(self.network.chance.random() * 0.1, connection.lose, False)


class SimulatedStore:
    """A rendezvous store, which each process reaches by a handle of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.values: dict[str, str] = {}
        self.down_until: dict[int, float] = {}
        self.changed: list[Wait] = []
        self.chance = world.random("store")
        world.on_fault["unstore"] = self._cut

    def _cut(self, fault: Fault) -> None:
        until = self.world.now + fault.seconds
        self.down_until[fault.where[0]] = max(until, self.down_until.get(fault.where[0], 0.0))

    def handle(self) -> StoreHandle:
        """Return the handle of the process that runs."""
        return StoreHandle(self, self.world.current)


class StoreHandle:
    """An `AtomicStore`: a call takes a moment, in which others may have changed the store."""

    def __init__(self, store: SimulatedStore, process: Process) -> None:
        self._store, self._world, self._process = store, store.world, process

    def _reach(self, seconds: float = 5.0) -> bool:
        """Take a while; whether the store is reached in time."""
        store, world = self._store, self._world
        world.step()
        if store.chance.random() < 0.3:
            world.sleep(store.chance.random() ** 3 * 0.1)
        until = store.down_until.get(self._process.number, 0.0)
        if until <= world.now:
            return self._process.alive
        world.sleep(min(seconds, until - world.now))
        return until <= world.now + 1e-6 and self._process.alive

    def set(self, key: str, value: str) -> None:
        if not self._reach():
            raise RuntimeError("the store is unavailable")
        self._store.values[key] = value
        self._world.wake(self._store.changed)

    def get(self, key: str, seconds: float) -> str:
        deadline = self._world.now + seconds
        if not self._reach(seconds):
            raise TimeoutError(f"no answer for {seconds:g} s")
        while key not in self._store.values:
            if self._world.now >= deadline:
                raise TimeoutError(key)
            self._world.block(self._store.changed, deadline - self._world.now)
        return self._store.values[key]

    def has(self, key: str) -> bool:
        return self._reach() and key in self._store.values

    def claim(self, key: str, value: str) -> str:
        if not self._reach():
            raise RuntimeError("the store is unavailable")
        found = self._store.values.setdefault(key, value)
        self._world.wake(self._store.changed)
        return found


def detectors(world: World) -> dict[str, Any]:
    """What `virtual` replaces, because its clock is that of the machine by default."""

    def clocked(made: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: made(*args, **{"clock": world.clock} | options)

    def detector(mailbox: Any, clock: Any = None, *reached: Any) -> FailureDetector:
        return FailureDetector(mailbox, clock or world.clock, *reached)

    found = {each.__name__: clocked(each) for each in (MembershipClient, Streams, GroupService)}
    return found | {"FailureDetector": detector}
