"""Workers and servers that update in one thread: whatever may happen next does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from helpers.mail import Clock
from helpers.server_simulation import LARGEST, Job, JobSimulation
from wingbeat.methods.parameter_server.client import Transfer
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.protocol import Kind, Order, pack_numbers
from wingbeat.methods.parameter_server.server import Server
from wingbeat.methods.parameter_server.server_update import RemoteOptimizer
from wingbeat.methods.parameter_server.shard_optimizer import ShardOptimizer
from wingbeat.methods.parameter_server.shard_updates import ShardUpdates
from wingbeat.methods.parameter_server.slicing import KIND_OF, RequestPlanner
from wingbeat.schedules.events import Operation
from wingbeat.types import LayerPositions

SGD = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
SETTINGS = {k: v for k, v in SGD.param_groups[0].items() if k != "params"}

DESCRIPTION: dict[str, Any] = {
    "module": "torch.optim.sgd",
    "name": "SGD",
    "path": [],
    "attributes": {},
    "defaults": SETTINGS,
    "dtype": "float32",
    "elementwise": {"momentum_buffer": True},
}

Wait = Callable[[], bool]


@dataclass
class Turn:
    """What all workers do in one iteration.

    Attributes:
        kind: ``"sum"``, a step on the sums; ``"own"``, one on gradients that somebody has looked
            at; or ``"drop"``.
        used: the parameters that have a gradient.
        slice: elements of the slices from now on; 0: as before.
        changed: whether the workers change their parameters before the step.
    """

    kind: str
    used: frozenset[int]
    slice: int
    changed: bool


class UpdateJobSimulation(JobSimulation):
    """A job with one parameter for each bucket, trained by SGD with momentum on the servers."""

    def __init__(
        self,
        chance: random.Random,
        job: Job,
        box: Callable[[int], Any],
        move: Callable[[], object],
        clock: Clock,
    ) -> None:
        super().__init__(chance, job, box, move, clock)
        every = range(len(job.sizes))
        self.turns = [
            Turn(
                chance.choice(["sum", "sum", "own", "drop"]),
                frozenset(b for b in every if chance.random() < 0.8),
                chance.choice([0, 0, 3, 8]),
                chance.random() < 0.3,
            )
            for _ in range(job.rounds)
        ]
        self.expected = list(self.trained())
        options = Servers(
            slice=chance.choice([4, 9, 30]),
            classes=job.classes,
            order="random" if chance.random() < 0.3 else "ready",
        )
        self.requests = [
            RequestPlanner(options, job.servers, rank, job.weights) for rank in range(job.workers)
        ]
        self.remotes = [
            RemoteOptimizer(
                SimpleNamespace(
                    numbers=range(job.workers, job.workers + job.servers),
                    count=job.servers, message=LARGEST, client=self.clients[rank],
                ),  # type: ignore[arg-type]
                self.requests[rank],
            )
            for rank in range(job.workers)
        ]  # fmt: skip
        self.changed = [False] * job.workers
        self.params = [[p.clone() for p in self.start_values()] for _ in range(job.workers)]

    def server(self, index: int) -> Server:
        job, aggregator = self.job, self.sums()
        updates = ShardUpdates(
            job.workers, lambda: ShardOptimizer(DESCRIPTION), aggregator.completed_sum, 1 << 20
        )
        return Server(
            self.boxes[job.workers + index], job.workers, aggregator, updates, order=job.order,
            timeout=1e9, classes=job.classes, clock=self.clock,
        )  # fmt: skip

    def start_values(self) -> list[torch.Tensor]:
        rng = torch.Generator().manual_seed(len(self.job.sizes))
        return [torch.randn(n, generator=rng) for n in self.job.sizes]

    def trained(self) -> Generator[list[torch.Tensor], None, None]:
        """The parameters after each turn, by one optimizer on all of them."""
        params = [torch.nn.Parameter(p) for p in self.start_values()]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for number, turn in enumerate(self.turns):
            if turn.changed:
                self.change(params)
            for bucket, param in enumerate(params):
                total = torch.from_numpy(self.gradients[bucket][number].sum(0))
                scale = 0.5 if turn.kind == "own" else 1.0
                param.grad = total * scale if bucket in turn.used else None
            if turn.kind != "drop":
                optimizer.step()
            yield [p.detach().clone() for p in params]

    def change(self, params: Any) -> None:
        for param in params:
            param.data.mul_(0.75)

    # -- a worker -------------------------------------------------------------------------

    def act(self, rank: int) -> Generator[Wait, None, None]:
        remote, requests = self.remotes[rank], self.requests[rank]
        buckets = list(range(len(self.job.sizes)))
        connected = [False] * len(buckets)
        places = LayerPositions(tuple(bucket + 1 for bucket in buckets), len(buckets))
        requests.set_buckets(self.job.sizes, buckets, connected, places, LARGEST // 4)
        self.hold(rank, {})
        for number, turn in enumerate(self.turns):
            if number and turn.slice:
                old, slices = remote.planner.plan, requests.slices()
                request = remote.request_state(old, slices)
                yield request.done
                state = self.joined(slices, request)
                requests._options = Servers(slice=turn.slice, classes=self.job.classes)
                requests.set_buckets(self.job.sizes, buckets, connected, places, LARGEST // 4)
                self.hold(rank, state)
            for bucket in self.shuffled(buckets):
                self.memory[rank][bucket][:] = self.gradients[bucket][number, rank]
                self.begin(rank, Operation.PUSH, bucket)
                yield lambda: True
            if turn.kind != "sum":
                handles = [self.begin(rank, Operation.PULL, b) for b in self.shuffled(buckets)]
                for handle in (h for each in handles for h in each):
                    yield handle.done
            if turn.changed:
                self.change(self.params[rank])
                self.changed[rank] = True
            if turn.kind != "drop":
                yield from self.agree(number)
                yield from self.update(rank, number, turn)
            self.compare(rank, number)
        self.clients[rank].close()

    def agree(self, number: int) -> Generator[Wait, None, None]:
        """Wait for all workers, as they do where they tell each other what they do."""
        self.said = getattr(self, "said", {})
        self.said[number] = self.said.get(number, 0) + 1
        yield lambda: bool(self.said[number] == self.job.workers)

    def update(self, rank: int, number: int, turn: Turn) -> Generator[Wait, None, None]:
        remote, requests = self.remotes[rank], self.requests[rank]
        remote.updates += 1
        for each in requests.slices():
            flat = torch.from_numpy(self.memory[rank][each.bucket])
            if each.number % self.job.workers != rank:
                continue
            if self.changed[rank]:
                values = self.params[rank][each.bucket][each.start : each.stop].clone()
                remote.load(each, {}, values)
            if turn.kind == "own":
                flat[each.start : each.stop] *= 0.5
                remote.send_gradients(each, flat[each.start : each.stop])
        self.changed[rank] = False
        unasked = self.job.ready
        operation = Operation.EXPECT if unasked else Operation.FETCH
        handles = [self.begin(rank, operation, b) for b in range(len(self.job.sizes))]
        words: dict[str, Any] = {"digest": "same"}
        if rank == number % self.job.workers:
            words |= {"groups": [SETTINGS], "used": pack_numbers(turn.used)}
        remote.step(json.dumps(words).encode(), summed=turn.kind == "sum", unasked=unasked)
        for handle in (h for each in handles for h in each):
            yield handle.done
        for bucket, param in enumerate(self.params[rank]):
            param.copy_(torch.from_numpy(self.memory[rank][bucket]))

    def begin(self, rank: int, operation: Operation, bucket: int) -> list[Any]:
        requests, remote = self.requests[rank], self.remotes[rank]
        new = operation in (Operation.FETCH, Operation.EXPECT)
        found = []
        for number in requests.begin(operation, bucket):
            memory = memoryview(self.memory[rank][number]).cast("B")
            parts = [
                Transfer(
                    self.job.workers + asked.slice.server,
                    asked.ids._replace(round=remote.updates) if new else asked.ids,
                    memory[4 * asked.slice.start : 4 * asked.slice.stop],
                    min(asked.urgency, self.job.classes - 1),
                    asked.position,
                )
                for asked in requests.requests(number)
            ]
            found.append(self.clients[rank].request(KIND_OF[operation], "float32", parts, "bucket"))
        return found

    def hold(self, rank: int, state: dict[int, torch.Tensor]) -> None:
        remote = self.remotes[rank]
        for each in self.requests[rank].slices():
            if each.number % self.job.workers == rank:
                data = [self.params[rank][each.bucket][each.start : each.stop]]
                memory = None
                if each.bucket in state:
                    memory = {"momentum_buffer": {"each": "float32"}}
                    data.append(state[each.bucket][each.start : each.stop])
                words = {
                    "dtype": "float32", "numel": len(each),
                    "pieces": [[each.bucket, 0, 0, len(each)]], "state": [memory],
                }  # fmt: skip
                remote.load(each, words, torch.cat(data).view(torch.uint8))
        remote.barrier()

    def joined(self, slices: Any, request: Any) -> dict[int, torch.Tensor]:
        state: dict[int, torch.Tensor] = {}
        for each, part in zip(slices, request.transfers, strict=True):
            document = request.documents[part.ids[:3]]
            [memory] = document.fields["state"]
            if memory is not None:
                assert list(memory) == ["momentum_buffer"]
                into = state.setdefault(each.bucket, torch.zeros(self.job.sizes[each.bucket]))
                values = np.frombuffer(document.data, "f4")
                into[each.start : each.stop] = torch.from_numpy(values.copy())
        return state

    def compare(self, rank: int, number: int) -> None:
        for mine, want in zip(self.params[rank], self.expected[number], strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
        self.checked += 1


__all__ = ["Kind", "Order", "UpdateJobSimulation"]
