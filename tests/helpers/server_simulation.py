"""Workers and servers in one thread: whatever may happen next does, as drawn from a seed."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.mail import Clock, Play
from wingbeat.methods.parameter_server.aggregator import Aggregator
from wingbeat.methods.parameter_server.client import Client, Request, Transfer
from wingbeat.methods.parameter_server.protocol import Ids, Kind, Order, pack_route
from wingbeat.methods.parameter_server.server import Server
from wingbeat.methods.parameter_server.slicing import Slice, partition_buckets
from wingbeat.transport.messages import frames

Activity = Generator[Callable[[], bool], None, None]
"""What a worker does: it says after each thing when it can go on."""

LARGEST = 600
"""Bytes of the largest payload."""

MIN_WINDOW = frames.MAX_HEADER_BYTES + LARGEST
"""Bytes of the smallest window."""

SLICE = 4 * 30
"""Bytes of the largest slice that `Job.drawn` makes."""

ONE_SLICE_WINDOW = frames.MAX_HEADER_BYTES + SLICE
"""Bytes of a window that holds one of them."""


@dataclass(eq=False, slots=True)
class SentMessage:
    """A message on its way, and then as it has arrived."""

    peer: int
    kind: int
    payload: Any
    ids: tuple[int, int, int, int]
    dtype: str
    urgency: int
    interface: int = 0
    size: int = 0
    arrived: bool = False
    kept: bool = False

    def done(self) -> bool:
        return self.arrived


class FakeNetwork:
    """Carries messages, each flow in its order and none before another's; `move` does one thing."""

    def __init__(
        self,
        chance: random.Random,
        workers: int,
        window: int = 1 << 20,
        largest: int = LARGEST,
        links: int = 1,
    ) -> None:
        self.chance, self.workers, self.links = chance, workers, links
        self.window, self.largest = window, largest
        self.boxes: dict[int, FakeMailbox] = {}
        self._flows: dict[tuple[int, int, int, int], deque[SentMessage]] = {}
        self._late: list[tuple[SentMessage, bytes]] = []
        self._leaving: list[int] = []

    def box(self, number: int) -> FakeMailbox:
        self.boxes[number] = FakeMailbox(self, number)
        return self.boxes[number]

    def put(self, source: int, target: int, message: SentMessage) -> None:
        flow = (source, target, message.urgency, message.interface)
        self._flows.setdefault(flow, deque()).append(message)

    def move(self) -> None:
        """Deliver the oldest message of a flow, tell a sender of it, or let someone be gone."""
        what = self.chance.randrange(3)
        if what == 0 and self._late:
            message, bits = self._late.pop(self.chance.randrange(len(self._late)))
            # A worker's memory may have the sum before it hears that the gradients have arrived.
            assert message.kind != Kind.SUM or bytes(message.payload) == bits, "changed under way"
            message.arrived = True
        elif what == 1 and self._leaving:
            number = self._leaving[0]
            if not any(messages for flow, messages in self._flows.items() if flow[0] == number):
                self._leaving.remove(number)
                for other, box in self.boxes.items():
                    if (other < self.workers) != (number < self.workers):
                        box.gone.add(number)
        elif flows := [flow for flow, messages in self._flows.items() if messages]:
            self._deliver(flows[self.chance.randrange(len(flows))])

    def leave(self, number: int) -> None:
        self._leaving.append(number)

    def _deliver(self, flow: tuple[int, int, int, int]) -> None:
        source, target, urgency, interface = flow
        message = self._flows[flow].popleft()
        bits = bytes(message.payload)
        self._late.append((message, bits))
        copy = SentMessage(
            source, message.kind, memoryview(bits), message.ids, message.dtype, urgency, interface,
            message.size,
        )  # fmt: skip
        self.boxes[target].inbox.setdefault(urgency, deque()).append(copy)


class FakeMailbox:
    """What a `Mailbox` is to a server or a worker, in an `FakeNetwork`."""

    def __init__(self, network: FakeNetwork, number: int) -> None:
        self._network, self._number = network, number
        self.largest = network.largest
        self._used: dict[tuple[int, int, int], int] = {}
        self.inbox: dict[int, deque[SentMessage]] = {}
        self.gone: set[int] = set()
        self.lost: dict[int, str] = {}
        self.cut: dict[int, float] = {}
        self.closed, self.refused = False, Counter[str]()

    @property
    def left(self) -> frozenset[int]:
        return frozenset(self.gone)

    def interrupter(self) -> Callable[[], None]:
        return lambda: None

    def unconnected(self) -> dict[int, float]:
        return self.cut

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(number for number in self._network.boxes if number != self._number)

    def interfaces(self, peer: int) -> tuple[int, ...]:
        # Beside their server, as it were, workers reach it over one.
        workers, links = self._network.workers, self._network.links
        together = workers and (peer - self._number) % workers == 0
        return (0,) if together else tuple(range(links))

    def room(self, peer: int, *, urgency: int, interface: int = 0) -> int:
        return self._network.window - self._used.get((peer, urgency, interface), 0)

    def post(
        self,
        peer: int,
        kind: int,
        payload: Any = b"",
        *,
        ids: Sequence[int] = (0, 0, 0, 0),
        dtype: str = "",
        urgency: int = 0,
        seconds: float | None = None,
        interface: int = 0,
    ) -> SentMessage:
        view = memoryview(payload)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        assert len(view) <= self.largest
        message = SentMessage(
            peer, kind, view, Ids(*ids), dtype, urgency, interface, 50 + len(view)
        )
        room = self.room(peer, urgency=urgency, interface=interface)
        assert room >= message.size or seconds is not None
        assert interface in self.interfaces(peer)
        flow = (peer, urgency, interface)
        self._used[flow] = self._used.get(flow, 0) + message.size
        self._network.put(self._number, peer, message)
        return message

    def poll(self, *, keep: bool = False) -> Any:
        for _, messages in sorted(self.inbox.items()):
            if messages:
                message = messages.popleft()
                message.kept = True
                if not keep:
                    self.free(message)
                return message
        return None

    def free(self, message: SentMessage) -> None:
        if message.kept:
            message.kept = False
            flow = (self._number, message.urgency, message.interface)
            self._network.boxes[message.peer]._used[flow] -= message.size

    def drop(self, peer: int) -> None:
        self.lost.pop(peer, None)
        self.gone.discard(peer)

    def close(self, seconds: float = 0.0) -> None:
        if not self.closed:
            self.closed = True
            self._network.leave(self._number)


class VirtualMailbox:
    """The same on the message layer's own flows, in virtual time."""

    largest = LARGEST

    def __init__(self, play: Play, number: int) -> None:
        self._play, self._number, self._end = play, number, play.ends[number]
        self.closed, self.refused = False, Counter[str]()

    @property
    def left(self) -> frozenset[int]:
        return frozenset(self._end.left)

    @property
    def lost(self) -> Mapping[int, str]:
        return dict.fromkeys(self._end.lost, "is lost")

    def unconnected(self) -> Mapping[int, float]:
        return self._end.unconnected(self._play.clock.now)

    def interrupter(self) -> Callable[[], None]:
        return lambda: None

    def interfaces(self, peer: int) -> tuple[int, ...]:
        return (0,)

    def room(self, peer: int, *, urgency: int, interface: int = 0) -> int:
        return self._end.room(peer, interface, urgency)

    def post(
        self,
        peer: int,
        kind: int,
        payload: Any = b"",
        *,
        ids: Sequence[int] = (0, 0, 0, 0),
        dtype: str = "",
        urgency: int = 0,
        seconds: float | None = None,
        interface: int = 0,
    ) -> Any:
        assert not interface
        contents = bytes(memoryview(payload).cast("B")) if len(payload) else b""
        assert len(contents) <= LARGEST
        return self._play.post(self._number, peer, kind, contents, urgency, tuple(ids), dtype)

    def poll(self, *, keep: bool = False) -> Any:
        return self._end.take(self._play.clock.now, keep=keep)

    def free(self, message: Any) -> None:
        self._end.free(message, self._play.clock.now)

    def close(self, seconds: float = 0.0) -> None:
        self.closed = True


@dataclass(frozen=True)
class Job:
    """How many there are of what, and how they work."""

    workers: int
    servers: int
    classes: int
    sizes: tuple[int, ...]
    rounds: int
    slices: tuple[Slice, ...]
    order: Order
    ready: bool
    """Whether sums come by themselves."""
    weights: tuple[float, ...] = (1.0,)
    """Of each link between workers and servers."""

    @staticmethod
    def drawn(chance: random.Random) -> Job:
        pick = chance.randint
        sizes = tuple(pick(1, 30) for _ in range(pick(1, 3)))
        servers = pick(1, 2)
        weights = ((1.0,), (0.5, 0.5), (0.2, 0.8), (0.1, 0.6, 0.3))[pick(0, 3)]
        return Job(
            workers=pick(1, 3),
            servers=servers,
            classes=pick(1, 2),
            sizes=sizes,
            rounds=pick(1, 3),
            slices=partition_buckets(sizes, servers, pick(5, 30), smallest=5, weights=weights),
            order=chance.choice(list(Order)),
            ready=chance.random() < 0.5,
            weights=weights,
        )


class JobSimulation:
    """A job from begin to end.

    Args:
        chance: who does something next, and what.
        job: what there is.
        box: makes the mailbox of a number.
        move: lets the network do something.
    """

    def __init__(
        self,
        chance: random.Random,
        job: Job,
        box: Callable[[int], Any],
        move: Callable[[], object],
        clock: Clock,
    ) -> None:
        self.chance, self.job, self.move, self.clock = chance, job, move, clock
        rng = np.random.default_rng(chance.randrange(2**32))
        shape = (job.rounds, job.workers)
        self.gradients = [
            (rng.standard_normal((*shape, n)) * 10.0 ** rng.integers(-3, 4, (*shape, 1))).astype(
                "f4"
            )
            for n in job.sizes
        ]
        self.boxes = [box(number) for number in range(job.workers + job.servers)]
        self.servers = [self.server(index) for index in range(job.servers)]
        numbers = range(job.workers, job.workers + job.servers)
        order = Order.URGENT if job.order is Order.URGENT else Order.READY
        self.clients = [
            Client(
                self.boxes[rank], numbers, me=f"rank {rank}", name="process {}".format,
                timeout=1e9, order=order, clock=clock,
            )
            for rank in range(job.workers)
        ]  # fmt: skip
        self.memory = [[np.zeros(n, "f4") for n in job.sizes] for _ in range(job.workers)]
        self.checked = self.held_back = 0

    def server(self, index: int) -> Server:
        job = self.job
        return Server(
            self.boxes[job.workers + index], job.workers, self.sums(), order=job.order,
            timeout=1e9, classes=job.classes, clock=self.clock,
        )  # fmt: skip

    def sums(self) -> Aggregator:
        """What a server sums by."""
        return Aggregator(self.job.workers, 1 << 20)

    def play(self, most: int = 20_000, begun: Mapping[int, Activity] | None = None) -> None:
        """Let things happen until all workers are done; fail if that does not come to pass."""
        acts = {rank: self.act(rank) for rank in range(self.job.workers)} | dict(begun or {})
        waits: dict[int, Callable[[], bool]] = {}
        for _ in range(most):
            self.clock.now += 0.01
            what = self.chance.random()
            if what < 0.4:
                self.move()
            elif what < 0.8:
                self.step(self.chance.randrange(len(self.boxes)))
            else:
                rank = self.chance.choice(list(acts))
                if rank not in waits or waits[rank]():
                    waits[rank] = next(acts[rank], lambda: False)
                    if acts[rank].gi_frame is None:  # type: ignore[attr-defined]
                        del acts[rank]
            if not acts:
                return
        raise AssertionError(f"ranks {list(acts)} wait for ever")

    def step(self, number: int) -> None:
        box = self.boxes[number]
        if number >= self.job.workers:
            self.servers[number - self.job.workers].step(box.poll(keep=True))
        elif not box.closed:
            self.clients[number].step(box.poll())
            self.held_back += self.ahead(number) and self.clients[number]._queue.queued > 0

    def ahead(self, rank: int) -> bool:
        """Whether gradients of this worker wait at a server for those of lower ranks."""
        totals = [t for each in self.servers for t in each._aggregator._slices.values()]
        return any(rank in total.early for total in totals)

    def waiting(self, server: int) -> int:
        """Bytes that wait at a server for their turn."""
        totals = self.servers[server]._aggregator._slices.values()
        return sum(len(each) for total in totals for each, _ in total.early.values())

    def act(self, rank: int) -> Activity:
        """What a worker does: push, and have the sums; perhaps not the last ones."""
        buckets = list(range(len(self.job.sizes)))
        for turn in range(self.job.rounds):
            handles: dict[int, Request] = {}
            for bucket in self.shuffled(buckets):
                self.memory[rank][bucket][:] = self.gradients[bucket][turn, rank]
                kind = Kind.PUSH_PULL if self.job.ready else Kind.PUSH
                handles[bucket] = self.start(rank, kind, bucket, turn)
                yield lambda: True
            if not self.job.ready and turn == self.job.rounds - 1 and self.chance.random() < 0.3:
                for handle in handles.values():
                    yield handle.done
                break
            for bucket in self.shuffled(buckets):
                if not self.job.ready:
                    handles[bucket] = self.start(rank, Kind.PULL, bucket, turn)
                    yield lambda: True
            for bucket in self.shuffled(buckets):
                yield handles[bucket].done
                self.check(rank, bucket, turn)
        self.clients[rank].close()

    def start(self, rank: int, kind: Kind, bucket: int, turn: int) -> Request:
        memory = memoryview(self.memory[rank][bucket]).cast("B")
        # Thresholds may change between a push and its pull, and classes differ between workers.
        urgency, out = (self.chance.randrange(self.job.classes) for _ in range(2))
        parts = [
            Transfer(
                self.job.workers + each.server,
                Ids(0, each.number, turn, pack_route(urgency, bucket, each.link)),
                memory[4 * each.start : 4 * each.stop],
                out,
                bucket,
            )
            for each in self.job.slices
            if each.bucket == bucket
        ]
        return self.clients[rank].request(kind, "float32", parts, f"bucket {bucket}")

    def check(self, rank: int, bucket: int, turn: int) -> None:
        each = self.gradients[bucket][turn]
        total = each[0].copy()
        for other in each[1:]:
            total = total + other
        assert self.memory[rank][bucket].tobytes() == total.tobytes(), "not the sum by ranks"
        self.checked += 1

    def shuffled(self, items: list[int]) -> list[int]:
        return self.chance.sample(items, len(items))
