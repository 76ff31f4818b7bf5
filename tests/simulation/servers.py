"""Parameter servers and clients: each worker has each sum, or an error in time."""

from __future__ import annotations

import concurrent.futures._base as futures
import itertools
import math
import random
from typing import Any

import numpy as np

from helpers.server_simulation import LARGEST, Job
from simulation.network import Network, SimulatedStore, detectors
from simulation.scenario import FaultRates, Scenario, draw_faults
from simulation.world import World, virtual
from wingbeat.errors import PeerError, RendezvousError
from wingbeat.methods.parameter_server import client as client_module
from wingbeat.methods.parameter_server import protocol
from wingbeat.methods.parameter_server import server as server_module
from wingbeat.methods.parameter_server.aggregator import Aggregator
from wingbeat.methods.parameter_server.client import Client, Request, Transfer
from wingbeat.methods.parameter_server.protocol import Ids, Kind, Order, pack_route
from wingbeat.methods.parameter_server.server import SILENT, Server
from wingbeat.transport import actor, failures
from wingbeat.transport.failures import MAX_WAIT_FACTOR
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES, Limits

MODULES = [actor, client_module, failures, futures, protocol, server_module]

TIMEOUT_S = 20.0
"""The timeout of `init`."""


class Servers:
    """Workers that push gradients and pull sums in any order.

    The servers have the numbers after them; each ends with the worker that has started it.
    """

    name = "servers"

    @staticmethod
    def draw(seed: int) -> Scenario:
        chance = random.Random(f"servers {seed}")
        job = Job.drawn(random.Random(f"job {seed}"))
        options = {
            "rounds": str(chance.choice([2, 4, 8])),
            "window": str(chance.choice([0, 0, 300, 2000])),
        }
        processes = tuple(range(job.workers + job.servers))
        pairs = tuple(itertools.product(range(job.workers), processes[job.workers :]))
        kills = chance.random() < 0.7
        rates = FaultRates(
            processes=processes, pairs=pairs, until=1.5 * int(options["rounds"]),
            killable=processes if kills else (), stop_s=25.0 if kills else 6.0,
            cut_s=25.0 if kills else 6.0,
        )  # fmt: skip
        return Scenario("servers", seed, tuple(options.items()), draw_faults(rates, chance, 6))

    def __init__(self, scenario: Scenario, world: World) -> None:
        options = dict(scenario.options)
        self.world = world
        self.job = job = Job.drawn(random.Random(f"job {scenario.seed}"))
        self.rounds = int(options["rounds"])
        links = len(job.weights)
        self.network = Network(world, links)
        self.store = SimulatedStore(world)
        window = MAX_HEADER_BYTES + LARGEST + int(options["window"])
        self.limits = Limits(LARGEST, window, SILENT * TIMEOUT_S)
        rng = np.random.default_rng(scenario.seed)
        shape = (self.rounds, job.workers)
        self.gradients = [
            (rng.standard_normal((*shape, n)) * 10.0 ** rng.integers(-3, 4, (*shape, 1))).astype(
                "f4"
            )
            for n in job.sizes
        ]
        self.checked = 0
        self.finished: dict[int, float] = {}  # when a worker had ended
        self.pending: set[int] = set()
        self.errors: list[str] = []
        self.clients: dict[int, Any] = {}
        # A turn of a worker, and seconds in which the end of a process is found and reported.
        self.detected_s = 1.2 * len(job.sizes) + 5.0
        self.limit_s = MAX_WAIT_FACTOR * TIMEOUT_S + 60.0
        lasting = sum(fault.seconds + 2.0 for fault in scenario.faults)
        kinds = {fault.kind for fault in scenario.faults}
        # A connection that is not renewed for a second is that of a process that has ended.
        self.harmless = kinds <= {"reset"} or (
            kinds <= {"cut", "stop"} and lasting < SILENT * TIMEOUT_S
        )

    def run(self) -> None:
        job = self.job
        others = detectors(self.world)
        with virtual(self.world, MODULES, **others):
            for number in range(job.workers + job.servers):
                main = self.worker if number < job.workers else self.server
                self.pending.add(number)
                process = self.world.spawn(number, lambda main=main, number=number: main(number))
                process.at_end.append(lambda number=number: self.pending.discard(number))
            self.world.run(lambda: not self.pending, 7200.0)
        if self.harmless:
            assert not self.errors, self.errors
            assert self.checked == job.workers * self.rounds * len(job.sizes)

    def open(self, number: int) -> object:
        workers, servers = range(self.job.workers), range(self.job.servers)
        peers = [self.job.workers + s for s in servers] if number in workers else list(workers)
        return self.network.open_mailbox(
            self.store.handle(), number, peers, namespace="servers", limits=self.limits,
            classes=self.job.classes, seconds=TIMEOUT_S,
        )  # fmt: skip

    def server(self, number: int) -> None:
        job = self.job
        try:
            Server(
                self.open(number), job.workers, Aggregator(job.workers, 1 << 20), order=job.order,
                timeout=TIMEOUT_S, classes=job.classes, clock=self.world.clock,
            ).run(lambda: self.world.processes[number % job.workers].alive)  # fmt: skip
        except (PeerError, RendezvousError) as error:
            self.note(error)
        self.world.end(self.world.current)

    def note(self, error: Exception) -> None:
        self.world.log(f"{self.world.now:10.3f} {error}")
        self.world.check_not_in_vain(error, self.detected_s)
        if self.world.scenario.kills_only:
            self.check_cause(error)
        for wrong in ("malformed", "unexpected message", "Error:"):
            assert wrong not in str(error), error
        self.errors.append(str(error))

    def check_cause(self, error: Exception) -> None:
        """An error comes soon after a process was killed, and names one that has failed."""
        never = math.inf
        at = [t for (n, _), t in self.world.killed.items() if t < self.finished.get(n, never)]
        assert at, f"nothing was killed: {error}"
        seconds = self.world.now - min(at)
        assert seconds <= self.detected_s, f"{seconds:g} s after a process was killed: {error}"
        ended = [
            number
            for number, process in self.world.processes.items()
            if not process.alive or (number in self.clients and self.clients[number].failed)
        ]
        what = str(error).partition(": ")[2]
        named = [n for n in ended if f"rank {n} " in what or f"process {n} " in what]
        assert named or "the worker that started this server has ended" in what, error

    def worker(self, rank: int) -> None:
        job = self.job
        order = Order.URGENT if job.order is Order.URGENT else Order.READY
        client = None
        try:
            with self.world.limited(self.limit_s, "connecting"):
                mailbox = self.open(rank)
            client = Client(
                mailbox, range(job.workers, job.workers + job.servers), me=f"rank {rank}",
                name="process {}".format, timeout=TIMEOUT_S, order=order, clock=self.world.clock,
            )  # fmt: skip
            self.clients[rank] = client
            client.start()
            self.train(rank, client)
            client.close()
            self.await_servers(rank)  # which end with it if it is killed
            self.finished[rank] = self.world.now
        except (PeerError, RendezvousError) as error:
            self.note(error)
            if client is not None:
                client.close(quick=True)
        self.world.end(self.world.current)

    def await_servers(self, rank: int) -> None:
        """Wait until the servers that a worker has started have ended, as `Service.close` does."""
        numbers = range(self.job.workers, self.job.workers + self.job.servers)
        own = [number for number in numbers if number % self.job.workers == rank]
        deadline = self.world.now + self.limit_s
        while any(self.world.processes[n].alive for n in own) and self.world.now < deadline:
            self.world.sleep(0.1)

    def train(self, rank: int, client: Client) -> None:
        job, world = self.job, self.world
        chance = world.random("worker", rank)
        memory = [np.zeros(n, "f4") for n in job.sizes]

        def start(kind: Kind, bucket: int, turn: int) -> Request:
            view = memoryview(memory[bucket]).cast("B")
            # Thresholds may change between a push and its pull, and classes differ by worker.
            urgency, out = (chance.randrange(job.classes) for _ in range(2))
            parts = [
                Transfer(
                    job.workers + each.server,
                    Ids(0, each.number, turn, pack_route(urgency, bucket, each.link)),
                    view[4 * each.start : 4 * each.stop], out, bucket,
                )
                for each in job.slices
                if each.bucket == bucket
            ]  # fmt: skip
            return client.request(kind, "float32", parts, f"bucket {bucket}")

        def shuffled() -> list[int]:
            return chance.sample(range(len(job.sizes)), len(job.sizes))

        for turn in range(self.rounds):
            handles: dict[int, Request] = {}
            for bucket in shuffled():
                memory[bucket][:] = self.gradients[bucket][turn, rank]
                handles[bucket] = start(Kind.PUSH_PULL if job.ready else Kind.PUSH, bucket, turn)
                world.sleep(chance.random())
            if not job.ready:
                for bucket in shuffled():
                    handles[bucket] = start(Kind.PULL, bucket, turn)
                    world.sleep(chance.random() * 0.1)
            for bucket in shuffled():
                with world.limited(self.limit_s, f"the sum of bucket {bucket}"):
                    handles[bucket].wait()
                total = self.gradients[bucket][turn, 0].copy()
                for other in self.gradients[bucket][turn, 1:]:
                    total += other
                assert memory[bucket].tobytes() == total.tobytes(), "not the sum by ranks"
                self.checked += 1
