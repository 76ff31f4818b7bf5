"""Workers that exchange gradients in parts, without links: one after the other in one thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wingbeat.collectives import Handle
from wingbeat.engine.gradients.bucket import Bucket, Slot, fill
from wingbeat.schedules.events import Operation
from wingbeat_lab.ako.partial import PartialExchange
from wingbeat_lab.ako.unsent import UnsentGradients

SHAPES = ((3, 4), (5,), (), (2, 3))


@dataclass
class FakeWorld:
    """One worker's place; what workers tell each other is known before anybody asks."""

    rank: int
    size: int
    said: Any = None
    replica: None = None

    @property
    def me(self) -> str:
        """The name of this worker."""
        return self.name(self.rank)

    def name(self, rank: int) -> str:
        """Return the name of a worker."""
        return f"rank {rank}"

    def exchange(self, _what: str, value: Any) -> list[Any]:
        """Return what all say, as if it had come by a network."""
        answers: list[Any] = json.loads(json.dumps(self.said(value) if self.said else [value]))
        return answers


class Room:
    """Delivers what all workers have sent, when it is told to.

    Attributes:
        elements: how many each worker has sent to each other one, by bucket, in the last turn.
    """

    def __init__(self) -> None:
        self.gathers: dict[int, dict[int, torch.Tensor]] = {}
        self.elements: dict[int, int] = {}

    def deliver(self) -> None:
        """Copy each worker's row to all the others."""
        for bucket, buffers in self.gathers.items():
            size = len(buffers)
            rows = {rank: buffer.view(size, -1) for rank, buffer in buffers.items()}
            for sender in rows:
                for taker in rows.values():
                    taker[sender] = rows[sender][sender]
            self.elements[bucket] = rows[0].shape[1]
        self.gathers = {}


class FakeCollectives:
    """Gathers by a `Room`."""

    def __init__(self, room: Room, rank: int, size: int) -> None:
        self.world = FakeWorld(rank, size)
        self._room = room

    def all_gather(self, buffer: torch.Tensor, *, bucket: int) -> Handle:
        """Have it gathered when the room delivers."""
        self._room.gathers.setdefault(bucket, {})[self.world.rank] = buffer
        return Handle([])


class Worker:
    """One worker's parameters, buckets and exchange.

    Attributes:
        applied: the sum of all gradients that it was given to apply, by parameter.
    """

    def __init__(
        self,
        room: Room,
        rank: int,
        size: int,
        partitions: int,
        dtype: torch.dtype = torch.float32,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        wire: str = "",
    ) -> None:
        collectives: Any = FakeCollectives(room, rank, size)
        self.world: FakeWorld = collectives.world
        self.slots = [
            Slot(i, f"p{i}", torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
            for i, shape in enumerate(shapes)
        ]
        self.unsent = UnsentGradients(wire, self.slots, collectives)
        self.exchange = PartialExchange(collectives, self.unsent, partitions)
        self.applied = {s.name: torch.zeros(s.param.shape, dtype=torch.float64) for s in self.slots}
        self.buckets: list[Bucket] = []
        self.plan([list(range(len(shapes)))])

    def plan(self, groups: Sequence[Sequence[int]]) -> None:
        """Make buckets anew, of these parameters by number."""
        self.buckets = [
            Bucket(number, [self.slots[i] for i in group], self.world.size)
            for number, group in enumerate(groups)
        ]
        self.exchange.planned(self.buckets, self.buckets)

    def send(self, gradients: dict[str, torch.Tensor]) -> None:
        """Begin an iteration with these gradients, and none of other parameters."""
        self.unsent.count_step()
        for bucket in self.buckets:
            bucket.reset()
            for slot in bucket.slots:
                slot.param.grad = gradients.get(slot.name)
            fill(bucket.slots, 1.0)
            bucket.write_tail(3, self.world.rank)
            bucket.wire = self.unsent.launching(bucket)
            self.exchange.start(Operation.ALL_REDUCE, bucket)

    def take(self) -> dict[str, torch.Tensor]:
        """End it: return the gradients that are shown, and count them as applied."""
        shown = {}
        for bucket in self.buckets:
            bucket.settle()
            assert bucket.counts.tolist() == [4] * self.world.size
            for slot in bucket.contributed():
                shown[slot.name] = slot.view.clone()
                self.applied[slot.name] += slot.view.double()
        return shown

    def kept(self) -> dict[str, torch.Tensor]:
        """What the others have not been sent."""
        assert self.unsent.residuals is not None
        found: dict[str, torch.Tensor] = self.unsent.residuals.state_dict()["residuals"]
        return found


def crew(size: int, partitions: int, **options: Any) -> tuple[Room, list[Worker]]:
    """As many workers in one room."""
    room = Room()
    return room, [Worker(room, rank, size, partitions, **options) for rank in range(size)]


def iterate(
    room: Room, workers: Sequence[Worker], gradients: Sequence[dict[str, torch.Tensor]] = ()
) -> list[dict[str, torch.Tensor]]:
    """One iteration of all; without gradients it only sends what is left."""
    for rank, worker in enumerate(workers):
        worker.send(gradients[rank] if gradients else {})
    room.deliver()
    return [worker.take() for worker in workers]
