"""Training with averages over groups in virtual time: generator, members and state machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from wingbeat import compression as codecs
from wingbeat import topologies
from wingbeat.compression import Coded, Compression
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.generator import Generator, Member, Run
from wingbeat.methods.model_averaging.rules import PHASES, Rules, group_of
from wingbeat.methods.model_averaging.service import ConnectionCache
from wingbeat.parts.strategy import Strategy
from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.cluster import Links, Traffic, Work
from wingbeat.simulator.exchange import Alike, Collectives, period_of, when_all
from wingbeat.simulator.model import ITEMSIZE, Buckets, Model, shard_of
from wingbeat.simulator.network import LOCAL, GroupNetwork, Network, Wires
from wingbeat.simulator.run import simulate
from wingbeat.types import LayerPositions, Layout

_COPIES = 2
"""Copies of the parameters before and after an average: into the buffer, and by the members."""

_STATE = 5
"""Tensors as large as the model in the state that a late worker copies, under Adam."""

_GRAIN_S = 1e-9
"""Averages of equally many members that begin at the same times, up to this, take equally long."""

Pause = float | Callable[[Callable[[], None]], None]
"""Seconds, or an object that calls back at its end."""


@dataclass(frozen=True, slots=True)
class GroupRun:
    """The result of a simulated run.

    Attributes:
        iteration_s: mean seconds of an iteration, over all iterations of all workers.
        waited: share of them in which the training thread did not compute.
        steps: of each worker, the steps that it made.
        groups: the groups that have averaged, in the order in which they began.
    """

    iteration_s: float
    waited: float
    steps: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def averages(self) -> float:
        """Mean number of averages of a worker in each iteration."""
        return sum(len(group) for group in self.groups) / sum(self.steps)


def simulate_groups(
    model: Model,
    rules: Rules | None,
    layout: Layout,
    links: Links,
    *,
    work: Work | None = None,
    local: Links = LOCAL,
    slow: Mapping[int, float] | None = None,
    jitter: float = 0.02,
    overlap: bool = False,
    every: int = 1,
    iterations: int = 40,
    warmup: int = 8,
    seed: int = 0,
    compression: Compression = "fp32",
    inside: int = 1,
    traffic: Traffic | None = None,
    represented: bool = False,
) -> GroupRun:
    """Train ``model`` with averages of parameters over groups, in virtual time (Ripples, Fig. 7).

    A worker computes, updates, requests a group, takes part in averages and continues. All
    parameters are one flat buffer. Runs are deterministic: equal arguments give bit-identical
    results.

    Args:
        model: layers and their times.
        rules: rules of the group generator; None for the static schedule.
        layout: hosts of the workers; workers of a host share its interfaces.
        links: network interfaces of each host.
        work: cost of communication in processor time, for workers and the generator.
        local: connections between workers of a host.
        slow: by rank, factor of a worker's compute times.
        jitter: standard deviation of an iteration's computation, as a share of it.
        overlap: whether a worker computes its next step while its parameters are averaged.
        every: steps from one average to the next.
        iterations: timed iterations, as the mean over workers.
        warmup: iterations before these.
        seed: of groups and jitter.
        compression: encoding of what is averaged: of differences of models, where it is a codec.
        inside: processes of each worker, which is then a replica with a host of its own, divided by
            FSDP2 as in `wingbeat.simulator.simulate`. Its leader asks for groups, and each process
            averages its part with those of the same number.
        traffic: records the bytes that hosts send for averages.
        represented: whether averages of all workers (`Rules.all_workers`) are taken to begin when
            the last worker is there, and one is simulated for all, by the workers of one host. It
            makes no difference where hosts have unequal links or numbers of workers.

    Raises:
        UsageError: a number is out of range.
    """
    if inside < 1 or (inside > 1 and len(layout.hosts) < layout.workers):
        raise UsageError(
            f"simulate_groups(inside={inside}): 1 or more, and with a host for each of the "
            f"{layout.workers} replicas; the layout has {len(layout.hosts)} hosts"
        )
    if iterations < 1 or every < 1 or warmup < 0 or jitter < 0:
        raise UsageError(
            f"simulate_groups(iterations={iterations}, every={every}, warmup={warmup}, jitter="
            f"{jitter}): allowed are 1 or more iterations, every=1 or more, others from 0 on"
        )
    codec = codecs.parse(compression)
    wire = codec if isinstance(codec, str) else codec.for_differences()
    job = _Job(
        model, rules, layout, links, local, work or Work(), seed, wire, inside, traffic, represented
    )
    first, last = warmup * layout.workers, (warmup + iterations) * layout.workers
    workers = [
        _Worker(rank, job, (slow or {}).get(rank, 1.0), jitter, overlap, every, last)
        for rank in range(layout.workers)
    ]
    job.workers = workers
    for worker in workers:
        worker.begin()
    job.agenda.run()
    return run_of(job.ends, first, last, workers, job.groups)


class Trained(Protocol):
    """What a worker has done: steps, and the seconds of computation and of all."""

    steps: int
    computed_s: float
    trained_s: float


def run_of(
    ends: Sequence[float],
    first: int,
    last: int,
    workers: Sequence[Trained],
    groups: Sequence[tuple[int, ...]],
) -> GroupRun:
    """Return the result of a run, whose iterations ``first`` to ``last`` of all workers count."""
    assert len(ends) >= last, f"workers wait for ever after {len(ends)} iterations"
    begun = ends[first - 1] if first else 0.0
    computed = sum(worker.computed_s for worker in workers)
    return GroupRun(
        (ends[last - 1] - begun) * len(workers) / (last - first),
        1 - computed / sum(worker.trained_s for worker in workers),
        tuple(worker.steps for worker in workers),
        tuple(groups),
    )


class _Job:
    """State that the workers share, with the groups of two or more workers so far."""

    def __init__(
        self,
        model: Model,
        rules: Rules | None,
        layout: Layout,
        links: Links,
        local: Links,
        work: Work,
        seed: int,
        wire: str | Coded,
        inside: int,
        traffic: Traffic | None,
        represented: bool,
    ) -> None:
        self.agenda = Agenda()
        self.model, self.rules, self.layout = model, rules, layout
        self.links, self.work, self.seed = links, work, seed
        self._inside, self._wire, self._local = inside, wire, local
        processes = Layout.even(layout.workers, inside) if inside > 1 else layout
        self.network = Network(self.agenda, Wires(processes, links, local), traffic)
        self.inside_s = 0.0 if inside == 1 else _inside_s(model, inside, links, local, work)
        tensors = shard_of(model, inside).tensors
        self.numel = sum(tensor.numel for tensor in tensors)
        parameters = tuple((tensor.name, tensor.shape) for tensor in tensors)
        self._buckets = Buckets(
            (0,) * len(tensors),
            (len(tensors),),
            (self.numel,),
            (0,),
            (False,),
            LayerPositions((1,), 1),
            (parameters,),
        )
        self.ends: list[float] = []
        self.groups: list[tuple[int, ...]] = []
        self.workers: list[_Worker] = []
        self._generator = Generator(layout, rules, seed) if rules else None
        self._copying: list[int] = []  # late workers, for a state that no worker can send yet
        self._connections = ConnectionCache(layout.workers)
        self._free = 0.0
        # A worker takes part in one average at a time: those of different hosts share no port.
        # Random groups may follow each other so closely that they do.
        divided = rules is None or rules.division
        self._apart = divided and len(layout.hosts) == layout.workers and links.alike
        ring = topologies.fitted("ring", layout, links.count)
        # With a quorum averages have other members each time.
        everyone = rules is not None and rules.whole and rules.quorum is None
        whole = represented and everyone and links.alike
        self._period = period_of(ring, layout, wire) if whole else 0
        self._whole: tuple[list[float], int] | None = None
        self._begun: dict[object, dict[int, tuple[float, Callable[[], None]]]] = {}
        self._traffic = traffic
        self._known: dict[tuple[int, ...], list[tuple[float, int]]] = {}

    def send(self, request: Callable[[Generator], list[Run]]) -> None:
        """Send a message to the generator, which answers messages in order.

        Each message, in or out, takes the generator's processor time.
        """
        self.agenda.at(self.agenda.now + self._trip_s, lambda: self._process(request))

    def request(self, rank: int) -> None:
        """Request a group; a worker that was late copies a peer's state first."""

        def handle(generator: Generator) -> list[Run]:
            if rank in generator:
                return generator.request(rank)
            self._copying.append(rank)
            return []

        self.send(handle)

    def _process(self, request: Callable[[Generator], list[Run]]) -> None:
        assert self._generator is not None
        self._free = max(self._free, self.agenda.now) + self.work.message_s
        self._start(request(self._generator))
        if self._generator.rules.quorum is not None:
            self._end_graces()

    def _end_graces(self) -> None:
        """Serve late workers, and run without those whose grace has ended, as the service does."""
        generator, agenda = self._generator, self.agenda
        assert generator is not None
        active = [rank for rank in range(self.layout.workers) if rank in generator]
        waiting = (w for w in active if generator.is_waiting(w) and not generator.unfinished(w))
        if self._copying and (next(waiting, None) is not None or not active):
            copying, self._copying = self._copying, []
            for rank in copying:
                generator.add(rank, at_once=True)
                agenda.at(agenda.now + self._copy_s, partial(self.request, rank))
        for rank in generator.take_late(agenda.now):
            self._start(generator.mark_late(rank))
        due = generator.due
        if due is not None and due > agenda.now:
            agenda.at(due, self._end_graces)

    @property
    def _copy_s(self) -> float:
        """Seconds for another worker's model, shared model, velocity, and moments of Adam."""
        nbytes = _STATE * self.numel * ITEMSIZE
        return self.work.meeting_s + self.links.latency_s + nbytes / self.links.bytes_per_s

    def _start(self, runs: Sequence[Run]) -> None:
        for run in runs:
            connection = 0
            if len(run.members) > 1:
                self.groups.append(run.members)
                connection = self._connections.id_of(run.members)
            for member in run.members:
                self._free += self.work.message_s
                start = partial(self.workers[member].start_group, run, connection)
                self.agenda.at(self._free + self._trip_s, start)

    @property
    def _trip_s(self) -> float:
        return self.links.latency_s + self.work.message_s

    def take_part(
        self,
        rank: int,
        average: object,
        members: tuple[int, ...],
        over: Callable[[], None],
        *,
        connected: bool,
    ) -> None:
        """Take part in a P-Reduce; call ``over`` when it is complete on this worker.

        Members connect first, unless connections are kept. Parameters are copied before, and
        divided and copied after.
        """
        copies_s = _COPIES * self.numel * ITEMSIZE * self.work.copy_s_per_byte
        begins = self.agenda.now + copies_s + (0.0 if connected else self.work.meeting_s)

        def made() -> None:
            self.agenda.at(self.agenda.now + copies_s, over)

        begin = self._begin_apart if self._apart else self._begin
        if self._period:
            begin = self._begin_whole
        self.agenda.at(begins, partial(begin, rank, average, members, made))

    def _begin(
        self, rank: int, average: object, members: tuple[int, ...], over: Callable[[], None]
    ) -> None:
        layout = Layout.by_name(self.layout.host_of[member] for member in members)
        place = members.index(rank)
        self._exchange(place, average, members, layout, self.agenda, self.network, over)

    def _all_begun(
        self, rank: int, average: object, members: tuple[int, ...], over: Callable[[], None]
    ) -> dict[int, tuple[float, Callable[[], None]]] | None:
        """Return when each member has begun an average, and its callback; None until all have."""
        begun = self._begun.setdefault((average, members), {})
        begun[rank] = self.agenda.now, over
        if len(begun) < len(members):
            return None
        del self._begun[average, members]
        return begun

    def _sent(self, host: int, start: float, seconds: float, nbytes: int) -> None:
        """Record what a host has sent in an average that the network did not carry."""
        if self._traffic is not None:
            self._traffic.carried(host, start, start + seconds, nbytes)

    def _begin_whole(
        self, rank: int, average: object, members: tuple[int, ...], over: Callable[[], None]
    ) -> None:
        """Begin an average of all workers when the last is there, from when on all take as long."""
        begun = self._all_begun(rank, average, members, over)
        if begun is None:
            return
        if self._whole is None:
            found = self._simulated([0.0] * self._period, self.layout, represented=True)
            self._whole = [seconds for seconds, _ in found], found[0][1]
        now, (ended, nbytes) = self.agenda.now, self._whole
        for member, (_, done) in begun.items():
            self.agenda.at(now + ended[member % self._period], done)
        for host in range(len(self.layout.hosts)):
            self._sent(host, now, max(ended), nbytes)

    def _begin_apart(
        self, rank: int, average: object, members: tuple[int, ...], over: Callable[[], None]
    ) -> None:
        """Begin an average that shares no port with others, whose duration may be known."""
        begun = self._all_begun(rank, average, members, over)
        if begun is None:
            return
        first = min(when for when, _ in begun.values())
        later = tuple(round((begun[member][0] - first) / _GRAIN_S) for member in members)
        if later not in self._known:
            apart = Layout.even(len(later), 1)
            self._known[later] = self._simulated([_GRAIN_S * each for each in later], apart)
        for member, (seconds, nbytes) in zip(members, self._known[later], strict=True):
            self.agenda.at(max(self.agenda.now, first + seconds), begun[member][1])
            self._sent(self.layout.host_of[member], first, seconds, nbytes)

    def _simulated(
        self, later: Sequence[float], layout: Layout, *, represented: bool = False
    ) -> list[tuple[float, int]]:
        """Return when each member of an average is done, and the bytes that its host sends.

        ``later`` are the times at which they begin: of all members on ``layout``, or of those that
        represent them.
        """
        members = tuple(range(layout.workers))
        alike = Alike(layout.workers, len(later)) if represented else None
        processes = Layout.even(layout.workers, self._inside) if self._inside > 1 else layout
        agenda, traffic, ended = Agenda(), Traffic(), [0.0] * len(later)
        network = Network(agenda, Wires(processes, self.links, self._local), traffic)

        def end(place: int) -> None:
            ended[place] = agenda.now

        for place, when in enumerate(later):
            over = partial(end, place)
            begin = partial(self._exchange, place, 0, members, layout, agenda, network, over, alike)
            agenda.at(when, begin)
        agenda.run()
        hosts = (layout.host_of[place] for place in range(len(later)))
        return [(when, traffic.sent.get(host, 0)) for when, host in zip(ended, hosts, strict=True)]

    def _exchange(
        self,
        place: int,
        average: object,
        members: tuple[int, ...],
        layout: Layout,
        agenda: Agenda,
        network: Network,
        over: Callable[[], None],
        alike: Alike | None = None,
    ) -> None:
        ring, mesh = (
            topologies.fitted(name, layout, self.links.count) for name in ("ring", "mesh")
        )
        columns = [
            Collectives(
                place,
                len(members),
                self._buckets,
                ring,
                self.links,
                self.work,
                agenda,
                GroupNetwork(network, average, [m * self._inside + column for m in members]),
                alike,
                wire=self._wire,
                mesh=mesh,
                hosts=len(self.layout.hosts),
            )
            for column in range(self._inside)
        ]
        # All processes of a replica encode at the same time, each on a processor of its own.
        encoded = agenda.now + columns[0].before(Operation.ALL_REDUCE, 0).seconds

        def start() -> None:
            for each in columns:
                each.start(Operation.ALL_REDUCE, 0, chained=False)
            after_s = columns[0].after(0).seconds
            parts = [part for each in columns for part in each.under_way(0)]
            when_all(parts, lambda: agenda.at(agenda.now + after_s, over))

        agenda.at(encoded, start)


def _inside_s(model: Model, inside: int, links: Links, local: Links, work: Work) -> float:
    """Return the seconds in which a replica gathers and reduces its layers in an iteration."""
    layers = tuple(replace(each, forward_s=0.0, backward_s=0.0) for each in model.layers)
    bare = replace(work, fill_s_per_byte=0.0, update_s_per_byte=0.0)
    idle = replace(model, layers=layers)
    return simulate(
        idle, Strategy(), 1, links, work=bare, local=local, inside=inside, iterations=2
    ).median_s


class _Worker:
    """A training thread and its averaging thread."""

    def __init__(
        self,
        rank: int,
        job: _Job,
        slow: float,
        jitter: float,
        overlap: bool,
        every: int,
        last: int,
    ) -> None:
        self._rank, self._job, self._overlap, self._last = rank, job, overlap, last
        self._every, self._turns = every, 0
        self._slow, self._jitter = slow, jitter
        self._random = Random(f"{job.seed} {rank}")
        self._member = Member(rank, job.rules) if job.rules else None
        self._averages: Counter[tuple[int, ...]] = Counter()
        self._connected: set[object] = set()
        self._busy = False
        self._resume: Callable[[], None] | None = None
        self._thread: Iterator[Pause] = iter(())
        self.steps, self.computed_s, self.trained_s = 0, 0.0, 0.0

    def begin(self) -> None:
        self._thread = self._train()
        self._job.agenda.at(self._job.agenda.now, self._advance)

    def start_group(self, run: Run, connection: int) -> None:
        """Run a group of the generator over the connections with this id."""
        assert self._member is not None
        if not self._member.start(run):
            return
        if len(run.members) == 1:
            self._averaged()
        else:
            self._average(run[:2], run.members, self._averaged, connection)

    def _average(
        self, number: object, members: tuple[int, ...], over: Callable[[], None], kept: object
    ) -> None:
        """Average; ``kept`` is equal for averages over the same connections."""
        connected = kept in self._connected
        self._connected.add(kept)
        self._job.take_part(self._rank, number, members, over, connected=connected)

    def _averaged(self) -> None:
        assert self._member is not None
        run = self._member.finish()
        self._job.send(lambda generator: generator.acknowledge(self._rank, run[0], run[1]))
        if not self._member.waiting:
            self._continue()

    def _advance(self) -> None:
        for pause in self._thread:
            if callable(pause):
                pause(self._advance)
                return
            if pause > 0:
                self._job.agenda.at(self._job.agenda.now + pause, self._advance)
                return

    def _train(self) -> Iterator[Pause]:
        job, agenda = self._job, self._job.agenda
        layers = job.model.layers
        compute_s = self._slow * sum(layer.forward_s + layer.backward_s for layer in layers)
        # Parameters are copied to the flat buffer and back.
        update_s = job.numel * ITEMSIZE * (
            job.work.update_s_per_byte + 2 * job.work.fill_s_per_byte
        )  # fmt: skip
        while len(job.ends) < self._last:
            begun = agenda.now
            seconds = compute_s * max(0.1, self._random.gauss(1.0, self._jitter))
            seconds += update_s + job.inside_s
            yield seconds
            if self._overlap:
                yield from self._wait()
            if (self.steps + 1) % self._every == 0:
                self._request()
            if not self._overlap:
                yield from self._wait()
            self.steps += 1
            self.computed_s += seconds
            self.trained_s += agenda.now - begun
            job.ends.append(agenda.now)

    def _wait(self) -> Iterator[Pause]:
        while self._busy:
            yield self._call_back

    def _call_back(self, resume: Callable[[], None]) -> None:
        self._resume = resume

    def _continue(self) -> None:
        """Continue once no average that the training thread requested is left."""
        self._busy = False
        resume, self._resume = self._resume, None
        if resume is not None:
            self._job.agenda.at(self._job.agenda.now, resume)

    def _request(self) -> None:
        self._busy = True
        if self._member is not None:
            self._member.request()
            self._job.request(self._rank)
            return
        turn, self._turns = self._turns, self._turns + 1
        members = group_of(self._job.layout, self._rank, turn)
        if len(members) == 1:
            self._busy = False
            return
        # All members count the same averages, because each takes part in the same order.
        self._averages[members] += 1
        if members[0] == self._rank:
            self._job.groups.append(members)
        # With an odd number of hosts pairs differ between cycles, and connections are not kept.
        odd = turn % PHASES == 2 and len(self._job.layout.hosts) % 2
        self._average(self._averages[members], members, self._continue, turn if odd else members)
