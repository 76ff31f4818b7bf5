"""Closed forms of an iteration: the alpha-beta arithmetic of each strategy's own schedule.

Shared by `scaling.py` and its tests. All workers are equal. Nothing is simulated, so any number of
workers takes milliseconds. Each form follows the schedule bucket by bucket: what the exchange of a
bucket takes alone, from when on it may begin, and after which other one.

- Ring: DeAR (Zhang et al., 2023), Eqs. 3 and 4: P - 1 rounds in each half. A round takes the
  longest of a chunk's way to the next worker, the link's time for a block, and the thread's time.
- Doubling: ceil(log2 P) rounds (OMGS-SGD, section II-F; Thakur, Rabenseifner and Gropp 2005,
  section 4.1), with the P - 1 messages of Bruck's variant, whose blocks stay separate here.
- Mesh, and sums in a codec: one round of P - 1 messages (Canary, section 4.2).
- Schedules: DeAR, Figs. 2 and 3; under backward as in its section II.
- Servers: Geryon (Wang et al., 2020), section II-A. Bounded staleness: Canary (Zhou et al., 2023),
  sections 4.3 and 5.3. Groups: Ripples (Luo et al., 2020), Fig. 7 and section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from wingbeat.collectives.program import (
    DIRECT_BYTES,
    DIRECT_RANKS,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    NATIVE_CHUNK_BYTES,
    SMALL_GATHER_BYTES,
    chunk_elements,
)
from wingbeat.methods.bounded_staleness.options import Bounded
from wingbeat.methods.bounded_staleness.simulated import FrameSizes, bundled
from wingbeat.methods.model_averaging.options import Local
from wingbeat.methods.model_averaging.simulated_pairs import CHUNK_BYTES
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.slicing import MIN_SHARD
from wingbeat.parts.strategy import Strategy
from wingbeat.simulator import Links, Model, Work, coding_of
from wingbeat.simulator.codecs import ADDED, Packing, factors_sent, packing_of
from wingbeat.simulator.model import ITEMSIZE, Buckets, buckets_of
from wingbeat.simulator.network import LOCAL
from wingbeat.topologies import Doubling, Mesh, Ring, Topology
from wingbeat.types import Span


@dataclass(frozen=True, eq=False)
class Setting:
    """What all rows share: a model, equal links, and the processor time of communication.

    Attributes:
        model: layers and their times.
        links: of each host, with one interface.
        work: costs in processor time.
        requests_per_s: that the state machine of the group generator answers, without its messages.
    """

    model: Model
    links: Links
    work: Work = field(default_factory=Work)
    requests_per_s: float = math.inf

    @cached_property
    def forward_s(self) -> float:
        """Seconds of forward."""
        return sum(layer.forward_s for layer in self.model.layers)

    @cached_property
    def alone_s(self) -> float:
        """Seconds of an iteration of one worker alone."""
        return self.forward_s + sum(layer.backward_s for layer in self.model.layers)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all gradients in float32."""
        return ITEMSIZE * sum(tensor.numel for tensor in self.model.tensors)


@dataclass(frozen=True)
class Iteration:
    """An iteration, and what it demands of each resource, overlapped or not.

    Attributes:
        seconds: of the iteration.
        latency_s: latencies of rounds that follow each other.
        bytes_s: time of a worker's NIC, in its busier direction.
        thread_s: time of the busiest thread of a worker: messages, sums and codecs.
        generator_s: time of the group generator for all workers' requests.
        server_s: time of the busiest server's NIC or thread.
    """

    seconds: float
    latency_s: float = 0.0
    bytes_s: float = 0.0
    thread_s: float = 0.0
    generator_s: float = 0.0
    server_s: float = 0.0


@dataclass(frozen=True)
class Part:
    """A collective alone; ``overlap_s`` of it may run beside the next one of the same lane."""

    seconds: float
    overlap_s: float = 0.0
    latency_s: float = 0.0
    bytes_s: float = 0.0
    thread_s: float = 0.0

    def then(self, other: Part) -> Part:
        """Return both, one after the other."""
        return Part(
            self.seconds + other.seconds,
            other.overlap_s,
            self.latency_s + other.latency_s,
            self.bytes_s + other.bytes_s,
            self.thread_s + other.thread_s,
        )


def _iteration(seconds: float, parts: Sequence[Part], thread_s: float = 0.0) -> Iteration:
    return Iteration(
        seconds,
        sum(part.latency_s for part in parts),
        sum(part.bytes_s for part in parts),
        sum(part.thread_s for part in parts) + thread_s,
    )


# -- collectives -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """A worker's block on the links: ``count`` chunks, the largest of ``chunk`` bytes.

    ``encode_s`` and ``decode_s`` are those of a whole block.
    """

    nbytes: float
    chunk: float
    count: int
    encode_s: float = 0.0
    decode_s: float = 0.0


def _block(nbytes: float) -> _Block:
    """Return a dense block, cut as `wingbeat.collectives` cuts it."""
    chunk = min(nbytes, chunk_elements(int(nbytes), 1, *NATIVE_CHUNK_BYTES))
    return _Block(nbytes, chunk, max(1, math.ceil(nbytes / chunk)))


def _encoded_block(setting: Setting, packing: Packing, numel: int, workers: int) -> _Block:
    """Return a block that is encoded."""
    block = -(-numel // workers)
    size = chunk_elements(block, packing.bytes_per_element, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
    size = min(size, block)
    count, share = -(-block // size), block / numel
    whole, work = packing.seconds(Span(0, numel)), setting.work
    nbytes = packing.nbytes(Span(0, size))
    return _Block(
        nbytes * block / size,
        nbytes,
        count,
        work.slowed(whole.encode * share).seconds,
        work.slowed(whole.decode * share).seconds,
    )


@dataclass(frozen=True)
class Half:
    """A reduce-scatter (``add``) or an all-gather of blocks among so many workers."""

    setting: Setting
    workers: int
    block: _Block
    add: bool

    @property
    def _send_s(self) -> float:
        """Thread's seconds to send a chunk."""
        work, block = self.setting.work, self.block
        return work.chunk_s + block.chunk * work.wire_s_per_byte

    @property
    def _take_s(self) -> float:
        """Thread's seconds to receive a chunk, and to add or decode it."""
        work, block = self.setting.work, self.block
        added = self.add and not block.encode_s
        return self._send_s + block.decode_s / block.count + (
            block.chunk * work.add_s_per_byte if added else 0.0
        )  # fmt: skip

    @property
    def _thread_s(self) -> float:
        """Thread's seconds to send a block and to receive one."""
        work, block = self.setting.work, self.block
        added = self.add and not block.encode_s
        byte_s = 2 * work.wire_s_per_byte + (work.add_s_per_byte if added else 0.0)
        return 2 * block.count * work.chunk_s + block.nbytes * byte_s + block.decode_s

    @property
    def _link_s(self) -> float:
        return self.block.nbytes / self.setting.links.bytes_per_s

    @property
    def _way_s(self) -> float:
        """Seconds from a chunk's departure until the receiver may send it on."""
        links = self.setting.links
        return self.block.chunk / links.bytes_per_s + links.latency_s + self._take_s

    def _part(self, seconds: float, rounds: int, overlap_s: float) -> Part:
        others = self.workers - 1
        return Part(
            seconds,
            overlap_s,
            rounds * self.setting.links.latency_s,
            others * self._link_s,
            others * self._thread_s,
        )

    def ring(self) -> Part:
        """Return P - 1 rounds, in which chunks of a block follow each other."""
        each = max(self._way_s, self._link_s, self._thread_s)
        return self._part((self.workers - 1) * each, self.workers - 1, each)

    def doubling(self) -> Part:
        """Return ceil(log2 P) rounds; a sum's halve its messages, a gather's double them.

        Of a round's messages a half follows from the previous round, so that the link rests only
        for the way of the last one.
        """
        sizes = list(_doublings(self.workers))
        each, way_s, done_s, sent_s = max(self._thread_s, self._link_s), self._way_s, 0.0, 0.0
        for size in reversed(sizes) if self.add else sizes:
            sent_s += size * each
            own_s = 0.0 if self.add else size * each / 2
            done_s = max(sent_s, done_s + own_s) + way_s
        return self._part(done_s, len(sizes), way_s)

    def mesh(self) -> Part:
        """Return one round to all others, whose messages share the link and end together.

        A sum's last ones are hidden where a block has several chunks: the gather of the first
        follows at once.
        """
        others, latency_s = self.workers - 1, self.setting.links.latency_s
        encode_s = self.block.encode_s * (others if self.add else 1)
        if self.block.encode_s and not self.add:  # the own block is rounded, too
            encode_s += self.block.decode_s
        thread_s, carried_s = others * self._thread_s + encode_s, others * self._link_s
        hidden = self.add and self.block.count > 1 and not self.block.encode_s
        if not hidden:
            carried_s += latency_s + others * self._take_s
        # The next round begins once the thread is free: of a latency, what carrying is longer.
        rest_s = min(latency_s, max(0.0, carried_s - thread_s))
        return Part(max(thread_s, carried_s), rest_s, latency_s, others * self._link_s, thread_s)

    def hierarchical(self, inside: int) -> Part:
        """Return sums in hosts of ``inside`` workers, then a ring of hosts, or the reverse."""
        hosts, work, links = self.workers // inside, self.setting.work, self.setting.links
        near = (inside - 1) * self.block.count * 2 * work.chunk_s
        carried = (inside - 1) * self.block.nbytes / LOCAL.bytes_per_s
        near_s = max(near, carried)
        far_s = self.block.nbytes * inside / links.bytes_per_s
        way_s = inside * self.block.chunk / links.bytes_per_s + links.latency_s + self._take_s
        each = max(way_s, far_s, self._thread_s)
        # The next block is summed, or the last one spread, while another travels.
        seconds = near_s + (hosts - 1) * max(each, near_s + self._thread_s)
        thread_s = hosts * near + (hosts - 1) * self._thread_s
        return Part(seconds, each, (hosts - 1) * links.latency_s, (hosts - 1) * far_s, thread_s)


def _doublings(workers: int) -> Iterator[int]:
    step = 1
    while step < workers:
        yield min(step, workers - step)
        step *= 2


@dataclass(frozen=True)
class Collectives:
    """Collectives of equal workers along a topology; ``inside`` of them are on each host."""

    setting: Setting
    workers: int
    topology: Topology
    inside: int = 1

    def half(self, block: _Block, *, add: bool, small: bool = False) -> Part:
        """Return one half, of which ``small`` buffers are exchanged in the fewest rounds."""
        half = Half(self.setting, self.workers, block, add)
        if self.inside == self.workers:  # a ring in shared memory
            near = replace(self.setting.work, wire_s_per_byte=0.0, add_s_per_byte=0.0)
            half = replace(half, setting=replace(self.setting, links=LOCAL, work=near))
        elif self.inside > 1:
            return half.hierarchical(self.inside)
        if isinstance(self.topology, Mesh) or block.encode_s:
            return half.mesh()
        if isinstance(self.topology, Doubling) or small:
            return half.doubling()
        return half.ring()

    def halves(self, numel: int, packing: Packing | None = None) -> tuple[Part, Part]:
        """Return the reduce-scatter and the all-gather of so many elements."""
        padded = -(-numel // self.workers) * self.workers
        if packing is not None:
            block = _encoded_block(self.setting, packing, padded, self.workers)
        else:
            block = _block(padded / self.workers * ITEMSIZE)
        on = self
        if self.workers <= DIRECT_RANKS and padded * ITEMSIZE <= DIRECT_BYTES and packing is None:
            on = Collectives(self.setting, self.workers, Mesh())
        return on.half(block, add=True), on.half(block, add=False)

    def all_reduce(self, numel: int, packing: Packing | None = None) -> Part:
        """Return both halves."""
        first, second = self.halves(numel, packing)
        return first.then(second)

    def all_reduce_bytes(self, nbytes: int) -> Part:
        """Return the sum of a small buffer, such as factors."""
        block, small = _block(nbytes / self.workers), nbytes < SMALL_GATHER_BYTES
        first, second = (self.half(block, add=add, small=small) for add in (True, False))
        return first.then(second)

    def gather_bytes(self, nbytes: int) -> Part:
        """Return an all-gather of so many bytes of each worker."""
        small = nbytes * self.workers < SMALL_GATHER_BYTES
        return self.half(_block(nbytes), add=False, small=small)


# -- schedules -------------------------------------------------------------------------------


def ready_times(model: Model, buckets: Buckets, before_s: Sequence[float] = ()) -> list[float]:
    """Return when each bucket may be exchanged, counted from the begin of backward.

    ``before_s`` are seconds of the training thread for each bucket, such as to encode it.
    """
    missing, ready = list(buckets.members), [0.0] * len(buckets.members)
    now, following = 0.0, 0
    for layer in reversed(model.layers):
        sizes = {t: model.tensors[t].numel for t in reversed(layer.tensors)}
        if not sizes:
            now += layer.backward_s
        for tensor, numel in sizes.items():
            now += layer.backward_s * numel / sum(sizes.values())
            missing[buckets.of[tensor]] -= 1
            while following < len(missing) and not missing[following]:
                now += before_s[following] if before_s else 0.0
                ready[following] = now
                following += 1
    return ready


def under_backward(
    setting: Setting, strategy: Strategy, workers: int, inside: int = 1
) -> Iteration:
    """Return an iteration whose sums overlap with backward, one bucket after the other."""
    buckets = buckets_of(setting.model, strategy.plan.fusion())
    on = Collectives(setting, workers, _topology(strategy), inside)
    parts = [
        on.all_reduce(numel, packing_of(strategy.wire, parameters) if strategy.wire else None)
        for numel, parameters in zip(buckets.numel, buckets.parameters, strict=True)
    ]
    ready = ready_times(setting.model, buckets)
    end = _in_turn(ready, parts)[-1]
    return _iteration(setting.forward_s + max(setting.alone_s - setting.forward_s, end), parts)


def _topology(strategy: Strategy) -> Topology:
    assert isinstance(strategy.exchange, Topology), "collectives have one"
    return strategy.exchange


def _in_turn(ready: Sequence[float], parts: Sequence[Part]) -> list[float]:
    """Return the ends of collectives in one lane."""
    ends: list[float] = []
    for when, part in zip(ready, parts, strict=True):
        free = ends[-1] - min(part.overlap_s, ends[-1]) if ends else 0.0
        ends.append(max(max(when, free) + part.seconds, ends[-1] if ends else 0.0))
    return ends


def decoupled(setting: Setting, strategy: Strategy, workers: int) -> Iteration:
    """Return a DeAR iteration: sums under backward, gathers under the next forward."""
    buckets = buckets_of(setting.model, strategy.plan.fusion())
    on = Collectives(setting, workers, _topology(strategy))
    halves = [on.halves(numel) for numel in buckets.numel]
    ready = ready_times(setting.model, buckets)
    backward_s = setting.alone_s - setting.forward_s
    gathered, now, begun = [0.0] * len(halves), 0.0, 0.0
    for _ in range(3):  # the second iteration is the first that waits for gathers
        begun = now
        for layer in setting.model.layers:
            now = max([now, *(gathered[buckets.of[t]] for t in layer.tensors)]) + layer.forward_s
        sums = _in_turn([now + each for each in ready], [first for first, _ in halves])
        now += backward_s
        order = buckets.forward
        free = [max(now, sums[-1])] * len(order)
        ends = _in_turn(free, [halves[bucket][1] for bucket in order])
        for bucket, end in zip(order, ends, strict=True):
            gathered[bucket] = end
    return _iteration(now - begun, [first.then(second) for first, second in halves])


def low_rank(setting: Setting, strategy: Strategy, workers: int) -> Iteration:
    """Return an iteration with two sums of factors for each bucket, the second in its own lane."""
    buckets = buckets_of(setting.model, strategy.plan.fusion())
    on, work = Collectives(setting, workers, _topology(strategy)), setting.work
    wire = strategy.wire
    assert not isinstance(wire, str), "low rank is a codec"
    sent = [
        factors_sent(wire, each, work.codecs, work.codecs_idle, work.prices)
        for each in buckets.parameters
    ]
    padded = [[-(-n // workers) * workers * ITEMSIZE for n in (e.first, e.second)] for e in sent]
    firsts = [on.all_reduce_bytes(nbytes) for nbytes, _ in padded]
    seconds = [on.all_reduce_bytes(nbytes) if nbytes else Part(0.0) for _, nbytes in padded]
    ready = ready_times(setting.model, buckets, [each.begin.seconds for each in sent])
    arrived = _in_turn(ready, firsts)
    turn, between = 0.0, []
    for when, each in zip(arrived, sent, strict=True):
        between.append(max(when, turn) + each.between.seconds)
        turn = between[-1] + each.keep.seconds
    summed = _in_turn(between, seconds)
    now = setting.alone_s - setting.forward_s + sum(each.begin.seconds for each in sent)
    for when, kept, each in zip(summed, between, sent, strict=True):
        now = max(now, when, kept + each.keep.seconds) + each.end.seconds
    arithmetic = sum(
        step.seconds for each in sent for step in (each.begin, each.between, each.keep, each.end)
    )
    return _iteration(setting.forward_s + now, [*firsts, *seconds], arithmetic)


def gathered(setting: Setting, strategy: Strategy, workers: int) -> Iteration:
    """Return an iteration in which all workers get all payloads of one bucket after backward."""
    buckets = buckets_of(setting.model, strategy.plan.fusion())
    on, work = Collectives(setting, workers, _topology(strategy)), setting.work
    numel, parameters = buckets.numel[0], buckets.parameters[0]
    packing = packing_of(strategy.wire, parameters)
    assert packing is not None, "top-k is a codec"
    whole = packing.seconds(Span(0, numel))
    row = -(-packing.nbytes(Span(0, numel)) // 8) * 8
    part = on.gather_bytes(row)
    encode_s = work.slowed(whole.encode).seconds
    decode_s = work.slowed((1 + (workers - 1) * ADDED) * whole.decode).seconds
    seconds = setting.alone_s + encode_s + part.seconds + decode_s
    return _iteration(seconds, [part], encode_s + decode_s)


# -- servers ---------------------------------------------------------------------------------


def served(setting: Setting, strategy: Strategy, workers: int) -> Iteration:
    """Return an iteration whose gradients are pushed in backward, and whose sums come back."""
    options, work = strategy.exchange, setting.work
    assert isinstance(options, Servers), "a strategy with servers"
    servers = options.count or workers
    buckets = buckets_of(setting.model, strategy.plan.fusion())
    numels, slices, on_busiest, busiest = buckets.numel, 0, 0.0, 0.0
    for numel in numels:
        shards = min(servers, max(1, numel // MIN_SHARD))
        pieces = math.ceil(math.ceil(numel / shards) / options.slice) if options.slice else 1
        slices += shards * pieces
        # Small buckets go to the servers with the least load.
        on_busiest += pieces * shards / servers
        busiest += numel / servers
    largest = max(-(-numel // min(servers, max(1, numel // MIN_SHARD))) for numel in numels)
    on_busiest, busiest = max(1.0, math.ceil(on_busiest)), max(busiest, float(largest))
    byte_s = work.byte_s(options.encrypted)
    client_s = 2 * (slices * work.message_s + setting.nbytes * byte_s)
    served_bytes = busiest * ITEMSIZE
    server_thread_s = workers * (
        2 * (on_busiest * work.message_s + served_bytes * byte_s)
        + served_bytes * work.add_s_per_byte
    )
    rate = setting.links.bytes_per_s
    beside = servers >= workers  # each NIC is that of a worker and of a server
    nic_s = (setting.nbytes * (1 - 1 / workers if beside else 1.0)) / rate
    others = workers - 1
    server_nic_s = others * served_bytes / rate + nic_s
    exchange_s = max(client_s, server_thread_s, server_nic_s)
    first = ready_times(setting.model, buckets)[0]
    trip_s = 2 * setting.links.latency_s + 4 * work.message_s
    seconds = setting.forward_s + first + trip_s
    seconds += max(setting.alone_s - setting.forward_s - first, exchange_s)
    return Iteration(
        seconds, 2 * setting.links.latency_s, nic_s, client_s,
        server_s=max(server_thread_s, server_nic_s),
    )  # fmt: skip


# -- bounded staleness -----------------------------------------------------------------------


def bounded(setting: Setting, strategy: Strategy, workers: int) -> Iteration:
    """Return an iteration of equal workers, of which one round of sums may be outstanding."""
    options, work, others = strategy.exchange, setting.work, workers - 1
    assert isinstance(options, Bounded), "bounded staleness"
    model = bundled(setting.model, strategy.plan.fusion().layers)
    coding = coding_of(strategy.wire)
    sizes = FrameSizes(model, workers, coding)
    sums = [sizes.round(colayer, workers) for colayer in range(len(sizes.numel))]
    sent = [*sizes.pieces, *sums, *(3 * [sizes.progress])]  # begun, ended, applied
    messages_s = 2 * others * sum(size.handled_s(work) for size in sent)
    numel = sum(sizes.numel)
    add_s = workers * numel * ITEMSIZE * (work.add_s_per_byte + coding.decode_s_per_byte)
    add_s += numel * ITEMSIZE * coding.encode_s_per_byte
    bytes_s = others * sum(size.nbytes for size in sent) / setting.links.bytes_per_s
    training_s = setting.alone_s + sum(model.numel) * ITEMSIZE * (
        coding.encode_s_per_byte + coding.decode_s_per_byte + work.fill_s_per_byte
        + work.update_s_per_byte
    )  # fmt: skip
    seconds = max(training_s, messages_s + add_s, bytes_s)
    latency_s = 2 * setting.links.latency_s
    return Iteration(seconds, latency_s, bytes_s, messages_s + add_s)


# -- averages of models ----------------------------------------------------------------------

COPIES = 2
"""Copies of all parameters before an average and after it."""


def _local_s(setting: Setting) -> float:
    """Seconds of a step without an average: parameters are copied to a flat buffer and back."""
    work = setting.work
    return setting.alone_s + setting.nbytes * (work.update_s_per_byte + 2 * work.fill_s_per_byte)


def grouped(setting: Setting, strategy: Strategy, workers: int, size: int) -> Iteration:
    """Return a step of equal workers whose models are averaged in groups of ``size``.

    Smart groups give each worker a group across hosts and one within its host, in turn. The latter
    has nobody else here, as hosts have one worker, but the generator handles its messages.
    """
    local, work, latency_s = strategy.schedule, setting.work, setting.links.latency_s
    assert isinstance(local, Local), "averages need local steps"
    whole = size >= workers
    part = Collectives(setting, min(size, workers), Ring()).all_reduce(setting.nbytes // ITEMSIZE)
    average_s = part.seconds + 2 * COPIES * setting.nbytes * work.copy_s_per_byte
    requests_s = workers * (3 * work.message_s + 1 / setting.requests_per_s)
    if whole:  # all wait for the last request, and for the last answer
        steps = float(local.every)
        asked_s = workers * (2 * work.message_s + 1 / setting.requests_per_s) / steps
    else:
        average_s += work.meeting_s  # members that have not met
        steps, asked_s = 2.0 * local.every, (1 + size) * work.message_s / local.every
    asked_s += 2 * (latency_s + work.message_s) / local.every
    generator_s = requests_s / local.every
    seconds = _local_s(setting) + average_s / steps + asked_s
    return Iteration(
        seconds if whole else max(seconds, generator_s), part.latency_s / steps,
        part.bytes_s / steps, part.thread_s / steps, generator_s,
    )  # fmt: skip


def paired(setting: Setting, step_s: float, encrypted: bool) -> Iteration:
    """Return a step with an average of pairs, whose seconds events have found.

    A worker asks or serves once in a step, with any other one, so that nothing grows with the
    workers; how long requests wait for each other has no closed form.
    """
    work, nbytes = setting.work, setting.nbytes
    byte_s = work.byte_s(encrypted)
    chunks = -(-nbytes // CHUNK_BYTES)
    thread_s = 2 * (chunks * work.message_s + nbytes * byte_s) + 2 * nbytes * work.copy_s_per_byte
    latency_s = 2 * setting.links.latency_s
    return Iteration(step_s, latency_s, nbytes / setting.links.bytes_per_s, thread_s)
