"""Training with averages of pairs (AD-PSGD) in virtual time, with the machine of a real run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.pair_machine import Apply, Kind, PairMachine, Send
from wingbeat.methods.model_averaging.simulated import GroupRun, run_of
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Traffic, Work
from wingbeat.simulator.interfaces import Interfaces, Stream
from wingbeat.simulator.model import ITEMSIZE, Model
from wingbeat.transport.messages.frames import MAX_HEADER_BYTES
from wingbeat.types import Layout

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk of a model, as in `wingbeat.methods.model_averaging.pair_averager`."""

_WITH_CHUNK = (Kind.CHUNK, Kind.AVERAGE)

_LEAST = 0.1
"""Least factor of a jittered computation."""


def simulate_pairs(
    model: Model,
    layout: Layout,
    links: Links,
    *,
    work: Work | None = None,
    slow: Mapping[int, float] | None = None,
    jitter: float = 0.02,
    iterations: int = 40,
    warmup: int = 8,
    seed: int = 0,
    encrypted: bool = True,
    traffic: Traffic | None = None,
) -> GroupRun:
    """Train ``model`` with averages of pairs while gradients are computed, in virtual time.

    As with ``ADPSGD(overlap=True)``, a worker allows averages of its model while it computes
    gradients, waits for the one that is in progress, and updates. Messages travel over the
    interfaces of hosts and take a thread's time; those within a host take only that. Runs are
    deterministic: equal arguments give bit-identical results.

    Args:
        model: layers and their times.
        layout: hosts of the workers, which share their interfaces; two workers or more.
        links: network interfaces of each host.
        work: cost of communication in processor time.
        slow: by rank, factor of a worker's compute times.
        jitter: standard deviation of an iteration's computation, as a share of it.
        iterations: timed iterations, as the mean over workers.
        warmup: iterations before these.
        seed: of partners and jitter.
        encrypted: whether messages are encrypted.
        traffic: records the bytes that hosts send.

    Raises:
        UsageError: a number is out of range.
    """
    if layout.workers < 2 or iterations < 1 or warmup < 0 or jitter < 0:
        raise UsageError(
            f"simulate_pairs(layout= of {layout.workers} workers, iterations={iterations}, warmup="
            f"{warmup}, jitter={jitter}): allowed are 2 or more workers, 1 or more iterations, "
            "others from 0 on"
        )
    job = _Job(model, layout, links, work or Work(), encrypted, traffic)
    first, last = warmup * layout.workers, (warmup + iterations) * layout.workers
    job.workers = [
        _Worker(rank, job, (slow or {}).get(rank, 1.0), jitter, seed, last)
        for rank in range(layout.workers)
    ]
    for worker in job.workers:
        worker.begin()
    job.agenda.run()
    return run_of(job.ends, first, last, job.workers, job.pairs)


class _Job:
    """State that the workers share, with the pairs that have averaged so far."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        links: Links,
        work: Work,
        encrypted: bool,
        traffic: Traffic | None,
    ) -> None:
        self.agenda, self.model, self.work = Agenda(), model, work
        self.byte_s = work.byte_s(encrypted)
        self.interfaces = Interfaces(
            self.agenda, links, layout.host_of.__getitem__, traffic=traffic
        )
        self.links, self.count = links.count, layout.workers
        self.nbytes = ITEMSIZE * sum(tensor.numel for tensor in model.tensors)
        self.ends: list[float] = []
        self.pairs: list[tuple[int, ...]] = []
        self.workers: list[_Worker] = []

    @property
    def chunks(self) -> int:
        """Chunks of a model."""
        return -(-self.nbytes // CHUNK_BYTES)

    def size_of(self, command: Send) -> int:
        """Return the bytes of a message."""
        if command.kind not in _WITH_CHUNK:
            return MAX_HEADER_BYTES
        left = self.nbytes - command.chunk * CHUNK_BYTES
        return MAX_HEADER_BYTES + min(CHUNK_BYTES, left)


class _Worker:
    """A training thread, and the thread that drives the machine of its averages."""

    def __init__(
        self, rank: int, job: _Job, slow: float, jitter: float, seed: int, last: int
    ) -> None:
        self._rank, self._job, self._last = rank, job, last
        self._slow, self._jitter = slow, jitter
        self._random = Random(f"{seed} {rank}")
        self._machine = PairMachine(rank, job.count, job.chunks, seed)
        self._free = 0.0
        self._resume: Callable[[], None] | None = None
        self._thread: Iterator[float | None] = iter(())
        self.steps, self.computed_s, self.trained_s = 0, 0.0, 0.0

    def begin(self) -> None:
        """Start training now."""
        self._thread = self._train()
        self._job.agenda.at(self._job.agenda.now, self._advance)

    def _advance(self) -> None:
        for pause in self._thread:
            if pause is None:
                self._resume = self._advance
                return
            if pause > 0:
                self._job.agenda.at(self._job.agenda.now + pause, self._advance)
                return

    def _train(self) -> Iterator[float | None]:
        job, agenda, layers = self._job, self._job.agenda, self._job.model.layers
        compute_s = self._slow * sum(layer.forward_s + layer.backward_s for layer in layers)
        update_s = job.nbytes * job.work.update_s_per_byte
        while len(job.ends) < self._last:
            begun = agenda.now
            self._machine.begin()
            self._execute()
            seconds = compute_s * max(_LEAST, self._random.gauss(1.0, self._jitter))
            yield seconds
            self._machine.end()
            while self._machine.pending:
                yield None
            yield update_s
            self.steps += 1
            self.computed_s += seconds + update_s
            self.trained_s += agenda.now - begun
            job.ends.append(agenda.now)

    def _execute(self) -> None:
        """Execute the machine's commands, one after the other."""
        job, agenda = self._job, self._job.agenda
        while self._machine.commands:
            match self._machine.commands.popleft():
                case Send() as command:
                    size = job.size_of(command)
                    self._spend(self._message_s(size))
                    if command.kind is Kind.AVERAGE:
                        self._spend(size * job.work.copy_s_per_byte)
                    agenda.at(self._free, partial(self._carry, command, size))
                case Apply(peer, is_requester):
                    self._spend(job.nbytes * job.work.copy_s_per_byte)
                    if is_requester:
                        job.pairs.append((self._rank, peer))
        if self._resume is not None and not self._machine.pending:
            resume, self._resume = self._resume, None
            agenda.at(max(agenda.now, self._free), resume)

    def _carry(self, command: Send, size: int) -> None:
        other = self._job.workers[command.peer]
        link = command.chunk % self._job.links
        arrived = partial(other._arrived, self._rank, command, size)
        self._job.interfaces.carry(Stream(self._rank, command.peer, 0, link), size, arrived)

    def _arrived(self, sender: int, command: Send, size: int) -> None:
        self._spend(self._message_s(size))
        self._job.agenda.at(self._free, partial(self._receive, sender, command))

    def _receive(self, sender: int, command: Send) -> None:
        self._machine.receive(sender, command.kind, command.number, command.chunk)
        self._execute()

    def _message_s(self, size: int) -> float:
        return self._job.work.message_s + size * self._job.byte_s

    def _spend(self, seconds: float) -> None:
        self._free = max(self._free, self._job.agenda.now) + seconds
