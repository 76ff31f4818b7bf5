"""Workers and servers with a codec: the same bits in any order of events, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from helpers.lossy_network import Faults
from helpers.mail import Clock, Play
from helpers.server_simulation import (
    LARGEST,
    MIN_WINDOW,
    FakeMailbox,
    FakeNetwork,
    Job,
    JobSimulation,
    SentMessage,
    VirtualMailbox,
)
from wingbeat.codecs import Coding, make
from wingbeat.codecs.codec import Dense
from wingbeat.codecs.coding import Region
from wingbeat.compression import Sketch
from wingbeat.methods.parameter_server.aggregator import Aggregator
from wingbeat.methods.parameter_server.client import Request, Transfer
from wingbeat.methods.parameter_server.coding import (
    SliceCodec,
    SliceCoding,
    bytes_tensor,
    cast_format,
    coded_format,
    residual_format,
)
from wingbeat.methods.parameter_server.protocol import Ids, Kind, pack_route
from wingbeat.methods.parameter_server.server import Server
from wingbeat.methods.parameter_server.slicing import Slice
from wingbeat.transport.messages.frames import Limits
from wingbeat.types import Span

GAMES = 600
QUICK = 100
"""Interleavings of a block of seeds, and how many `make test` runs."""

BLOCKS = [
    range(QUICK),
    *(
        pytest.param(range(GAMES * block, GAMES * (block + 1)), marks=pytest.mark.slow)
        for block in range(4)
    ),
]

WIRE = Sketch(bits=1)
"""It loses much of any two numbers that differ, and a table has room for two."""


def coding(numel: int) -> Coding:
    last = max(1, numel - 2)
    regions = [Region(Span(0, last), make(WIRE))]
    if last < numel:
        regions.append(Region(Span(last, numel), Dense()))
    return Coding(regions)


@dataclass
class Slot:
    """One slice as it has to be after so many rounds, counted out one after the other."""

    plan: SliceCoding
    residuals: list[torch.Tensor]
    rest: torch.Tensor
    sums: list[torch.Tensor] = field(default_factory=list)

    def next(self, gradients: list[torch.Tensor], owner: int, taken: bool) -> None:
        numel = len(self.rest)
        total = torch.zeros(numel)
        for rank, (x, residual) in enumerate(zip(gradients, self.residuals, strict=True)):
            decoded = self._through(x, residual)
            total = decoded if rank == 0 else total + decoded
        self.sums.append(self._through(total, self.rest))
        if taken:
            self.residuals[owner] += self.rest
            self.rest.zero_()

    def _through(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        span = Span(0, len(x))
        room = torch.empty(self.plan.coding.room(span), dtype=torch.uint8)
        self.plan.coding.encode(x, span, room, residual)
        out = torch.empty(len(x))
        self.plan.coding.decode(room, out, span)
        return out


class CodedJobSimulation(JobSimulation):
    """A job with a codec. Workers pull residuals after some of the rounds."""

    def __init__(self, chance: random.Random, job: Job, *args: Any) -> None:
        super().__init__(chance, job, *args)
        self.values = [[torch.from_numpy(m) for m in row] for row in self.memory]
        self.residuals = [[torch.zeros(n) for n in job.sizes] for _ in range(job.workers)]
        self.taken = [
            [chance.random() < 0.4 for _ in range(job.workers)] for _ in range(job.rounds)
        ]
        self.slots = {each.number: self.counted(each) for each in job.slices}

    def sums(self) -> Aggregator:
        return Aggregator(self.job.workers, 1 << 20, codec=SliceCodec(WIRE, LARGEST))

    def counted(self, each: Slice) -> Slot:
        plan = SliceCoding.of(
            WIRE, coding(self.job.sizes[each.bucket]), Span(each.start, each.stop)
        )
        made = Slot(
            plan, [torch.zeros(len(each)) for _ in range(self.job.workers)], torch.zeros(len(each))
        )
        for turn in range(self.job.rounds):
            owner = each.number % self.job.workers
            gradients = [
                torch.from_numpy(self.gradients[each.bucket][turn, rank, each.start : each.stop])
                for rank in range(self.job.workers)
            ]
            made.next(gradients, owner, self.taken[turn][owner])
        return made

    def act(self, rank: int) -> Generator[Callable[[], bool], None, None]:
        """Push, have the sums, and now and then take over what they lack."""
        buckets = list(range(len(self.job.sizes)))
        for turn in range(self.job.rounds):
            handles: dict[int, Request] = {}
            for bucket in self.shuffled(buckets):
                self.memory[rank][bucket][:] = self.gradients[bucket][turn, rank]
                kind = Kind.PUSH_PULL if self.job.ready else Kind.PUSH
                handles[bucket] = self.start(rank, kind, bucket, turn)
                yield lambda: True
            for bucket in self.shuffled(buckets) if not self.job.ready else []:
                yield handles[bucket].done
                handles[bucket] = self.start(rank, Kind.PULL, bucket, turn)
            early = self.job.ready or self.chance.random() < 0.5
            if not early and self.taken[turn][rank]:
                yield from self.take(rank, turn)
            for bucket in self.shuffled(buckets):
                yield handles[bucket].done
                self.check(rank, bucket, turn)
            if early and self.taken[turn][rank]:
                yield from self.take(rank, turn)
        self.clients[rank].close()

    def take(self, rank: int, turn: int) -> Generator[Callable[[], bool], None, None]:
        requests = [
            self.start(rank, Kind.PULL_RESIDUAL, b, turn) for b in range(len(self.job.sizes))
        ]
        for request in self.chance.sample(requests, len(requests)):
            yield request.done
            request.wait()

    def start(self, rank: int, kind: Kind, bucket: int, turn: int) -> Request:
        parts = []
        for each in self.job.slices:
            if each.bucket != bucket or (
                kind is Kind.PULL_RESIDUAL and each.number % self.job.workers != rank
            ):
                continue
            residual = self.residuals[rank][bucket][each.start : each.stop]
            part = self.values[rank][bucket][each.start : each.stop]
            form: Any = coded_format(self.slots[each.number].plan, part, residual)
            if kind is Kind.PULL_RESIDUAL:
                form = residual_format(residual)
            route = pack_route(min(bucket, self.job.classes - 1), bucket, each.link)
            ids = Ids(0, each.number, turn, route)
            server = self.job.workers + each.server
            parts.append(Transfer(server, ids, memoryview(b""), self.job.classes - 1, bucket, form))
        return self.clients[rank].request(kind, "float32", parts, f"bucket {bucket}")

    def check(self, rank: int, bucket: int, turn: int) -> None:
        for each in self.job.slices:
            if each.bucket == bucket:
                found = self.values[rank][bucket][each.start : each.stop]
                assert torch.equal(found, self.slots[each.number].sums[turn]), (
                    "not the sum by ranks"
                )
        self.checked += 1

    def check_kept(self) -> None:
        """What is left at the end is where it has to be, to the bit."""
        for each in self.job.slices:
            slot = self.slots[each.number]
            for rank in range(self.job.workers):
                found = self.residuals[rank][each.bucket][each.start : each.stop]
                assert torch.equal(found, slot.residuals[rank])
            sums = self.servers[each.server]._aggregator
            rest = sums.take_residual((0, each.number))
            assert torch.equal(
                torch.zeros_like(slot.rest) if rest is None else torch.from_numpy(rest), slot.rest
            )


@pytest.mark.parametrize("seeds", BLOCKS)
def test_coded_job_in_any_order_gives_same_sums_and_residuals(seeds: range) -> None:
    checked = taken = 0
    for seed in seeds:
        chance = random.Random(seed)
        job = Job.drawn(chance)
        window = chance.choice([MIN_WINDOW, 2 * MIN_WINDOW])
        network = FakeNetwork(chance, job.workers, window, links=len(job.weights))
        simulation = CodedJobSimulation(chance, job, network.box, network.move, Clock())
        simulation.play()
        simulation.check_kept()
        checked += simulation.checked
        taken += sum(map(sum, simulation.taken))
    assert checked > 4 * len(seeds)
    assert taken > len(seeds)


def test_coded_job_with_network_faults_loses_nothing() -> None:
    faults = Faults(drop=0.2, repeat=0.1, delay=0.05, reorder=True)
    for seed in range(60):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        limits = Limits(message=LARGEST, window=1 << 20, silence=1e9)
        play = Play(job.workers + job.servers, faults, seed, limits, job.classes)
        simulation = CodedJobSimulation(
            chance, job, lambda n, play=play: VirtualMailbox(play, n), play.step, play.clock
        )
        simulation.play()
        simulation.check_kept()


# -- one server or one worker, and what nobody should send ------------------------------------


@dataclass
class Rig:
    """One server and the mailboxes of two workers."""

    service: Server
    box: FakeMailbox
    workers: list[FakeMailbox]
    network: FakeNetwork

    def send(self, rank: int, kind: Kind, number: int = 0, turn: int = 0, **more: Any) -> None:
        self.workers[rank].post(2, kind, ids=(0, number, turn, 0), **more)

    def push(self, rank: int, number: int = 0, turn: int = 0) -> None:
        form = coded_format(PLAN, torch.tensor([1.0, 2.0, 4.0 + rank, 7.0]), None)
        self.send(rank, Kind.PUSH_PULL, number, turn, payload=form.encode(), dtype=form.dtype)

    def received(self, rank: int) -> list[SentMessage]:
        for _ in range(200):
            for _ in range(5):
                self.network.move()
            self.service.step(self.box.poll())
        out = []
        while (message := self.workers[rank].poll()) is not None:
            out.append(message)
        return out


PLAN = SliceCoding.of(WIRE, coding(40), Span(20, 24))
LOSSY = SliceCoding.of(WIRE, coding(40), Span(0, 30))


def rig(sums: Aggregator | None = None) -> Rig:
    network = FakeNetwork(random.Random(0), 2)
    boxes = [network.box(number) for number in range(3)]
    sums = Aggregator(2, 1 << 20, codec=SliceCodec(WIRE, LARGEST)) if sums is None else sums
    service = Server(boxes[2], 2, sums, clock=Clock())  # type: ignore[arg-type]
    return Rig(service, boxes[2], boxes[:2], network)


@pytest.mark.parametrize(
    ("send", "why"),
    [
        (lambda r: r.send(1, Kind.PULL_RESIDUAL), "rank 1 does not own the residual of slice 0"),
        (lambda r: r.send(0, Kind.PULL_RESIDUAL, turn=1), "of round 1 was pulled after round -1"),
        (
            lambda r: [r.send(0, Kind.PULL_RESIDUAL) for _ in "ab"],
            "rank 0 requested slice 0 of round 0 twice",
        ),
        (lambda r: r.send(0, Kind.RESIDUAL), "rank 0 sent a message of kind 7"),
        (
            lambda r: r.send(0, Kind.PUSH, dtype="uint8", payload=b"\x01"),
            "malformed: version is missing",
        ),
    ],
)  # fmt: skip
def test_invalid_request_fails_all_workers_with_reason(send: Any, why: str) -> None:
    made = rig()
    send(made)
    for rank in range(2):
        (message,) = made.received(rank)
        assert message.kind == Kind.FAILED
        assert why in bytes(message.payload).decode()


def test_residual_is_sent_once_sum_is_complete() -> None:
    made = rig()
    gradients = torch.randn(30, generator=torch.Generator().manual_seed(0))
    form = coded_format(LOSSY, gradients, None)
    for rank in range(2):
        made.send(0, Kind.PULL_RESIDUAL) if rank else None
        made.send(rank, Kind.PUSH, payload=form.encode(), dtype=form.dtype)
        messages = made.received(0)
        assert [message.kind for message in messages] == [Kind.RESIDUAL] * rank
    (message,) = messages
    assert (message.dtype, len(message.payload)) == ("float32", 4 * 30)
    made.send(0, Kind.PULL_RESIDUAL)
    (message,) = made.received(0)
    assert (message.kind, message.dtype, len(message.payload)) == (Kind.RESIDUAL, "", 0)


def test_residual_without_codec_is_empty() -> None:
    made = rig(Aggregator(2, 1 << 20))
    for rank in range(2):
        made.send(rank, Kind.PUSH, payload=bytes(16), dtype="float32")
    made.received(0)
    made.send(0, Kind.PULL_RESIDUAL)
    (message,) = made.received(0)
    assert (message.kind, message.dtype, len(message.payload)) == (Kind.RESIDUAL, "", 0)


GOOD = coded_format(PLAN, torch.tensor([1.0, 2.0, 3.0, 4.0]), None).encode()


@pytest.mark.parametrize(
    ("dtype", "payload"),
    [
        ("uint8", bytes(GOOD)[:-1]),
        ("uint8", bytes(GOOD) + b"\0"),
        ("uint8", b"\x02" + bytes(GOOD)[1:]),
        ("uint8", bytes(GOOD)[:23] + b"\x01" + bytes(GOOD)[24:]),
        ("uint8", b""),
        ("", bytes(GOOD)),
        ("float32", bytes(16)),
    ],
    ids=["short", "long", "version", "kind", "empty", "dtype", "float32"],
)
def test_coded_format_of_malformed_reply_raises_and_writes_nothing(
    dtype: str, payload: bytes
) -> None:
    part = torch.arange(4.0)
    with pytest.raises(ValueError, match="another form"):
        coded_format(PLAN, part, None).decode(dtype, memoryview(payload))
    assert part.tolist() == [0.0, 1.0, 2.0, 3.0]
    coded_format(PLAN, part, None).decode("uint8", GOOD)
    assert part[0] > 1.0, "two values stand for the four"


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float32", 12), ("float32", 20), ("bfloat16", 16), ("", 16), ("uint8", 0)],
)
def test_dense_format_of_malformed_reply_raises_and_writes_nothing(dtype: str, nbytes: int) -> None:
    part = torch.arange(4.0)
    made: list[Any] = [cast_format(part, "bfloat16", "float32"), residual_format(part)]
    made.append(coded_format(PLAN, part, None, "float32"))
    for form in made:
        with pytest.raises(ValueError, match="another form"):
            form.decode(dtype, memoryview(b"\x01" * nbytes))
    assert part.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_bytes_tensor_of_unaligned_or_read_only_payload_copies() -> None:
    values = torch.arange(300.0).numpy().tobytes()
    for offset in range(5):
        padded = bytearray(offset) + values
        read = bytes_tensor(memoryview(padded)[offset:]).view(torch.float32)
        assert torch.equal(read, torch.arange(300.0))
    assert bytes_tensor(memoryview(values)).numpy().tobytes() == values
