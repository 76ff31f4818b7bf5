"""Workers and servers with a codec: whatever the order of events, the same bits, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from helpers.mail import Clock, Play
from helpers.serving import LARGEST, LEAST, Box, Drama, Job, Letter, Office, VirtualBox
from wingbeat.codecs import Coding, make
from wingbeat.codecs.codec import Dense
from wingbeat.codecs.coding import Region
from wingbeat.compression import Sketch
from wingbeat.exchanges import forms
from wingbeat.exchanges.part import Part
from wingbeat.exchanges.request import Request
from wingbeat.servers.coded import CodedSums, bytes_of
from wingbeat.servers.partition import Slice
from wingbeat.servers.protocol import Ids, Kind, wish_of
from wingbeat.servers.service import Service
from wingbeat.servers.sums import Sums
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.loopback import Faults
from wingbeat.types import Span

GAMES = 600
"""For each of four seeds."""

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

    plan: forms.Plan
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


class CodedDrama(Drama):
    """As `Drama`, but slices are encoded, and what sums lack is taken after some of the rounds."""

    def __init__(self, chance: random.Random, job: Job, *args: Any) -> None:
        super().__init__(chance, job, *args)
        self.values = [[torch.from_numpy(m) for m in row] for row in self.memory]
        self.residuals = [[torch.zeros(n) for n in job.sizes] for _ in range(job.workers)]
        self.taken = [
            [chance.random() < 0.4 for _ in range(job.workers)] for _ in range(job.rounds)
        ]
        self.slots = {each.number: self.counted(each) for each in job.slices}

    def sums(self) -> CodedSums:
        return CodedSums(self.job.workers, 1 << 20, wire=WIRE, largest=LARGEST)

    def counted(self, each: Slice) -> Slot:
        plan = forms.Plan(WIRE, coding(self.job.sizes[each.bucket]), Span(each.start, each.stop))
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
                kind = Kind.PUSH if self.job.ready else Kind.STORE
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
        requests = [self.start(rank, Kind.TAKE, b, turn) for b in range(len(self.job.sizes))]
        for request in self.chance.sample(requests, len(requests)):
            yield request.done
            request.wait()

    def start(self, rank: int, kind: Kind, bucket: int, turn: int) -> Request:
        parts = []
        for each in self.job.slices:
            if each.bucket != bucket or (
                kind is Kind.TAKE and each.number % self.job.workers != rank
            ):
                continue
            residual = self.residuals[rank][bucket][each.start : each.stop]
            part = self.values[rank][bucket][each.start : each.stop]
            form: Any = forms.Encoded(part, residual, self.slots[each.number].plan)
            if kind is Kind.TAKE:
                form = forms.Rest(residual)
            wish = wish_of(min(bucket, self.job.classes - 1), bucket, each.link)
            ids = Ids(0, each.number, turn, wish)
            server = self.job.workers + each.server
            parts.append(Part(server, ids, memoryview(b""), self.job.classes - 1, bucket, form))
        return self.clients[rank].start(kind, "float32", parts, f"bucket {bucket}")

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
            sums = self.services[each.server]._sums
            rest = sums.take((0, each.number))
            assert torch.equal(
                torch.zeros_like(slot.rest) if rest is None else torch.from_numpy(rest), slot.rest
            )


MORE = [pytest.param(block, marks=pytest.mark.slow) for block in (2, 3)]
"""The same with other seeds."""


@pytest.mark.parametrize("block", [0, 1, *MORE])
def test_whatever_the_order_all_workers_have_the_same_sums_and_nothing_is_lost(block: int) -> None:
    checked = taken = 0
    for seed in range(GAMES * block, GAMES * (block + 1)):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        window = chance.choice([LEAST, 2 * LEAST])
        office = Office(chance, job.workers, window, links=len(job.weights))
        drama = CodedDrama(chance, job, office.box, office.move, Clock())
        drama.play()
        drama.check_kept()
        checked += drama.checked
        taken += sum(map(sum, drama.taken))
    assert checked > 4 * GAMES
    assert taken > GAMES


def test_whatever_the_network_does_nothing_is_lost() -> None:
    faults = Faults(drop=0.1, repeat=0.1, cut=0.1, delay=0.05, reorder=True)
    for seed in range(60):
        chance = random.Random(seed)
        job = Job.drawn(chance)
        limits = Limits(message=LARGEST, window=1 << 20, silence=1e9)
        play = Play(job.workers + job.servers, faults, seed, limits, job.classes)
        drama = CodedDrama(
            chance, job, lambda n, play=play: VirtualBox(play, n), play.step, play.clock
        )
        drama.play()
        drama.check_kept()


# -- one server or one worker, and what nobody should send ------------------------------------


@dataclass
class Rig:
    """One server and the mailboxes of two workers."""

    service: Service
    box: Box
    workers: list[Box]
    office: Office

    def send(self, rank: int, kind: Kind, number: int = 0, turn: int = 0, **more: Any) -> None:
        self.workers[rank].post(2, kind, ids=(0, number, turn, 0), **more)

    def push(self, rank: int, number: int = 0, turn: int = 0) -> None:
        form = forms.Encoded(torch.tensor([1.0, 2.0, 4.0 + rank, 7.0]), None, PLAN)
        self.send(rank, Kind.PUSH, number, turn, payload=form.packed(), dtype=form.dtype)

    def heard(self, rank: int) -> list[Letter]:
        for _ in range(200):
            for _ in range(5):
                self.office.move()
            self.service.step(self.box.poll())
        out = []
        while (letter := self.workers[rank].poll()) is not None:
            out.append(letter)
        return out


PLAN = forms.Plan(WIRE, coding(40), Span(20, 24))
LOSSY = forms.Plan(WIRE, coding(40), Span(0, 30))


def rig(sums: Sums | None = None) -> Rig:
    office = Office(random.Random(0), 2)
    boxes = [office.box(number) for number in range(3)]
    sums = CodedSums(2, 1 << 20, wire=WIRE, largest=LARGEST) if sums is None else sums
    service = Service(boxes[2], 2, most=1 << 20, sums=sums, clock=Clock())  # type: ignore[arg-type]
    return Rig(service, boxes[2], boxes[:2], office)


@pytest.mark.parametrize(
    ("send", "why"),
    [
        (lambda r: r.send(1, Kind.TAKE), "rank 1 wants what sums of slice 0 lack"),
        (lambda r: r.send(0, Kind.TAKE, turn=1), "slice 0 of round 1 was pulled after round -1"),
        (lambda r: [r.send(0, Kind.TAKE) for _ in "ab"], "rank 0 wants slice 0 of round 0 twice"),
        (lambda r: r.send(0, Kind.REST), "rank 0 sent a message of kind 7"),
        (lambda r: r.send(0, Kind.STORE, dtype="uint8", payload=b"\x01"), "malformed: 1 bytes are"),
    ],
)  # fmt: skip
def test_what_no_worker_may_send_ends_the_sums_and_all_are_told_why(send: Any, why: str) -> None:
    made = rig()
    send(made)
    for rank in range(2):
        (letter,) = made.heard(rank)
        assert letter.kind == Kind.FAILED
        assert why in bytes(letter.payload).decode()


def test_what_a_sum_lacks_is_sent_when_the_sum_is_complete() -> None:
    made = rig()
    gradients = torch.randn(30, generator=torch.Generator().manual_seed(0))
    form = forms.Encoded(gradients, None, LOSSY)
    for rank in range(2):
        made.send(0, Kind.TAKE) if rank else None
        made.send(rank, Kind.STORE, payload=form.packed(), dtype=form.dtype)
        letters = made.heard(0)
        assert [letter.kind for letter in letters] == [Kind.REST] * rank
    (letter,) = letters
    assert (letter.dtype, len(letter.payload)) == ("float32", 4 * 30)
    made.send(0, Kind.TAKE)
    (letter,) = made.heard(0)
    assert (letter.kind, letter.dtype, len(letter.payload)) == (Kind.REST, "", 0)


def test_a_server_that_keeps_nothing_says_so() -> None:
    made = rig(Sums(2, 1 << 20))
    for rank in range(2):
        made.send(rank, Kind.STORE, payload=bytes(16), dtype="float32")
    made.heard(0)
    made.send(0, Kind.TAKE)
    (letter,) = made.heard(0)
    assert (letter.kind, letter.dtype, len(letter.payload)) == (Kind.REST, "", 0)


GOOD = forms.Encoded(torch.tensor([1.0, 2.0, 3.0, 4.0]), None, PLAN).packed()


@pytest.mark.parametrize(
    ("dtype", "payload"),
    [
        ("uint8", bytes(GOOD)[:-1]),
        ("uint8", bytes(GOOD) + b"\0"),
        ("uint8", b"\x03" + bytes(GOOD)[1:]),
        ("uint8", bytes(GOOD)[:19] + b"\x01" + bytes(GOOD)[20:]),
        ("uint8", b""),
        ("", bytes(GOOD)),
        ("float32", bytes(16)),
    ],
    ids=["short", "long", "version", "kind", "empty", "dtype", "float32"],
)
def test_an_encoded_sum_of_another_form_is_refused_and_not_written(
    dtype: str, payload: bytes
) -> None:
    part = torch.arange(4.0)
    with pytest.raises(ValueError, match="another form"):
        forms.Encoded(part, None, PLAN).unpack(dtype, memoryview(payload))
    assert part.tolist() == [0.0, 1.0, 2.0, 3.0]
    forms.Encoded(part, None, PLAN).unpack("uint8", GOOD)
    assert part[0] > 1.0, "two values stand for the four"


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float32", 12), ("float32", 20), ("bfloat16", 16), ("", 16), ("uint8", 0)],
)
def test_a_dense_sum_or_a_rest_of_another_form_is_refused_and_not_written(
    dtype: str, nbytes: int
) -> None:
    part = torch.arange(4.0)
    made: list[Any] = [forms.Cast(part, "bfloat16", "float32"), forms.Rest(part)]
    made.append(forms.Encoded(part, None, PLAN, "float32"))
    for form in made:
        with pytest.raises(ValueError, match="another form"):
            form.unpack(dtype, memoryview(b"\x01" * nbytes))
    assert part.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_payload_that_cannot_be_read_where_it_is_is_copied() -> None:
    values = torch.arange(300.0).numpy().tobytes()
    for offset in range(5):
        padded = bytearray(offset) + values
        read = bytes_of(memoryview(padded)[offset:]).view(torch.float32)
        assert torch.equal(read, torch.arange(300.0))
    assert bytes_of(memoryview(values)).numpy().tobytes() == values
