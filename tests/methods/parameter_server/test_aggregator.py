"""`Aggregator`: sums in any order of events belong to one round, in the order of ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from wingbeat.methods.parameter_server.aggregator import (
    ITEMSIZE,
    SLICE_OVERHEAD,
    Aggregator,
    SliceSum,
    narrow,
    sum_dtype,
    widen,
)
from wingbeat.methods.parameter_server.protocol import RequestError

GAMES = 2500
QUICK = 800
"""Interleavings of a block of seeds, and how many `make test` runs."""

BLOCKS = [
    range(QUICK),
    *(
        pytest.param(range(GAMES * block, GAMES * (block + 1)), marks=pytest.mark.slow)
        for block in range(4)
    ),
]

PLENTY = 1 << 30
Key = tuple[int, int]


def gradients(rng: np.random.Generator, dtype: str, numel: int) -> bytes:
    """So far apart that the order in which they are added shows."""
    values = rng.standard_normal(numel).astype(np.float32) * np.float32(10) ** rng.integers(-3, 4)
    return bytes(narrow(values.astype(sum_dtype(dtype)), dtype).tobytes())


def by_rank(payloads: list[bytes], dtype: str) -> bytes:
    """What the sum has to be."""
    total = widen(memoryview(payloads[0]), dtype).copy()
    for each in payloads[1:]:
        total = total + widen(memoryview(each), dtype)
    return bytes(narrow(total, dtype).tobytes())


def state(sums: Aggregator) -> object:
    """All that a refused message must leave as it is."""
    return (
        sums.nbytes,
        sums._plan,
        {
            key: (
                t.encoding, t.round, t.added, sorted(t.early), t.started_at, t.nbytes,
                t.buffer is not None and t.buffer[: t.encoding.numel * bool(t.added)].tobytes(),
                [(s.round, id(s.result), len(s.readers)) for s in t.sums],
            )
            for key, t in sums._slices.items()
        },
    )  # fmt: skip


def refused(sums: Aggregator, *args: object) -> str:
    before = state(sums)
    with pytest.raises(RequestError) as caught:
        sums.push(*args)  # type: ignore[arg-type]
    assert state(sums) == before
    return str(caught.value)


@dataclass
class Reader:
    """Somebody to whom a sum is being sent."""

    sum: SliceSum
    bits: bytes
    done: bool = False

    def over(self) -> None:
        assert self.sum.result.tobytes() == self.bits, "it was written to while it was read"
        self.done = True


@dataclass
class Worker:
    """What one worker does next, each slice by itself: push, then pull or not, and so on."""

    rank: int
    plan: int = 0
    rounds: list[int] = field(default_factory=list)
    pushed: list[bool] = field(default_factory=list)

    def begin(self, slices: int) -> None:
        self.rounds, self.pushed = [0] * slices, [False] * slices


class Game:
    """Some workers and one server's sums; who does what next is drawn."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        pick = self.chance.randint
        self.size, self.slices = pick(1, 4), pick(1, 3)
        self.rounds, self.plans = pick(1, 4), pick(1, 2)
        self.prompt = self.chance.random() < 0.5
        self.held = self.chance.choice([0, 8, 24, 1 << 20])
        self.sums = Aggregator(self.size, PLENTY, self.held)
        self.credited: set[tuple[int, int, int, int]] = set()
        self.shapes: dict[Key, tuple[str, int]] = {}
        self.sent: dict[tuple[int, int, int], dict[int, bytes]] = {}
        self.bits: dict[tuple[int, int, int], bytes] = {}
        self.readers: list[Reader] = []
        self.workers = [Worker(rank) for rank in range(self.size)]
        for worker in self.workers:
            worker.begin(self.slices)
        for plan in range(self.plans):
            for number in range(self.slices):
                self.shapes[plan, number] = self.chance.choice([*ITEMSIZE]), pick(1, 5)

    def play(self) -> None:
        while any(worker.plan < self.plans for worker in self.workers):
            what = self.chance.random()
            if what < 0.1:
                self.do_wrong()
            elif what < 0.2 and self.readers:
                self.readers.pop(self.chance.randrange(len(self.readers))).over()
            else:
                going = [worker for worker in self.workers if worker.plan < self.plans]
                self.go_on(self.chance.choice(going))
        for reader in self.readers:
            reader.over()
        assert len(self.bits) == self.plans * self.slices * self.rounds

    def go_on(self, worker: Worker) -> None:
        left = [n for n in range(self.slices) if worker.rounds[n] < self.rounds]
        if not left:
            worker.plan += 1
            worker.begin(self.slices)
            return
        number = self.chance.choice(left)
        if worker.pushed[number]:
            self.pull(worker, number)
        else:
            self.push(worker, number)

    def push(self, worker: Worker, number: int) -> None:
        key, rank, turn = (worker.plan, number), worker.rank, worker.rounds[number]
        dtype, numel = self.shapes[key]
        payload = gradients(self.rng, dtype, numel)
        sent = self.sent.setdefault((*key, turn), {})
        sent[rank] = payload
        lent = bytearray(payload)
        name = (*key, turn, rank)
        done = self.sums.push(
            rank, key, turn, dtype, memoryview(lent), 1.5, lambda: self.credited.add(name)
        )
        worker.pushed[number] = True
        assert (done is not None) == (len(sent) == self.size)
        total = self.sums._slices[key]
        there = {r for r in sent if done is not None or r < total.added}
        assert {r for r in sent if (*key, turn, r) in self.credited} == there
        if (done is not None or rank < total.added) and not total.deferred:
            lent[:] = b"\xff" * len(lent)  # it was added, so nobody reads it any more
        if done is not None:
            assert (done.round, done.dtype) == (turn, dtype)
            self.bits[(*key, turn)] = by_rank([sent[r] for r in range(self.size)], dtype)
            self.read(done, (*key, turn))
        self.check_memory()

    def pull(self, worker: Worker, number: int) -> None:
        """As late as can be, or not at all: only then may the worker push again."""
        key, turn = (worker.plan, number), worker.rounds[number]
        found = self.sums.completed_sum(key, turn)
        if (*key, turn) not in self.bits:
            assert found is None
            return
        if self.chance.random() < 0.7:
            assert found is not None
            assert found.round == turn
            self.read(found, (*key, turn))
        worker.pushed[number] = False
        worker.rounds[number] += 1

    def read(self, total: SliceSum, name: tuple[int, int, int]) -> None:
        reader = Reader(total, self.bits[name])
        assert total.result.tobytes() == reader.bits, "not the sum of this round by rank"
        if self.prompt:
            return
        total.readers.append(lambda: reader.done)
        self.readers.append(reader)

    def check_memory(self) -> None:
        whole = {
            key: numel * sum_dtype(dtype).itemsize
            for key, (dtype, numel) in self.shapes.items()
            if key in self.sums._slices
        }
        assert whole.keys() == self.sums._slices.keys()
        if self.prompt:
            assert self.sums.nbytes <= 2 * sum(whole.values())
        held = 0
        for total in self.sums._slices.values():
            arrays = [each.result for each in total.sums]
            arrays += [each for each in (total.buffer, total.spare) if each is not None]
            held += sum(each.nbytes for each in arrays)
        assert self.sums.nbytes >= held
        kept = sum(sum(map(len, total.deferred)) for total in self.sums._slices.values())
        assert self.sums._deferred == kept <= self.held

    def do_wrong(self) -> None:
        worker = self.chance.choice(self.workers)
        if worker.plan == self.plans:
            return
        number = self.chance.randrange(self.slices)
        key, turn = (worker.plan, number), worker.rounds[number]
        dtype, numel = self.shapes[key]
        payload = memoryview(gradients(self.rng, dtype, numel))
        push = [worker.rank, key, turn, dtype, payload]
        wrong = self.chance.randrange(7)
        if wrong == 0 and worker.pushed[number]:
            text = "twice|in round"
        elif wrong == 1:
            push[2], text = turn + self.chance.choice([-2, -1, 2, 3]), "in round"
        elif wrong == 2:
            push[3], text = self.chance.choice(["", "int8", "float8"]), "allowed: float32"
        elif wrong == 3:
            push[4], text = payload[: self.chance.choice([0, len(payload) - 1])], "which is no"
        elif wrong == 4 and key in self.sums._slices:
            push[4], text = memoryview(bytes(payload) * 2), "which has"
        elif wrong == 5 and key in self.sums._slices:
            others = [d for d in ITEMSIZE if d != dtype and not len(payload) % ITEMSIZE[d]]
            push[3], text = self.chance.choice(others or [""]), "which has|allowed"
        elif wrong == 6 and self.sums._plan > 0:
            push[1], text = (self.sums._plan - 1, number), "after"
        else:
            return
        message = refused(self.sums, *push)
        assert any(part in message for part in text.split("|")), message
        assert f"rank {worker.rank} pushed" in message
        assert "\n" not in message


@pytest.mark.parametrize("seeds", BLOCKS)
def test_push_in_any_order_sums_each_round_in_rank_order(seeds: range) -> None:
    for seed in seeds:
        Game(seed).play()


def pushed(
    sums: Aggregator, key: Key, turn: int, ranks: range | list[int], value: float = 1.0
) -> SliceSum:
    done = None
    for rank in ranks:
        done = sums.push(
            rank, key, turn, "float32", memoryview(np.full(4, value + rank, "f4")).cast("B"), 7.0
        )
    assert done is not None
    return done


def test_completed_sum_while_next_round_is_pushed_returns_previous_round() -> None:
    sums = Aggregator(2, PLENTY)
    pushed(sums, (0, 0), 0, range(2))
    sums.push(0, (0, 0), 1, "float32", memoryview(bytes(16)))
    late = sums.completed_sum((0, 0), 0)
    assert late is not None
    assert late.result.tolist() == [3.0] * 4
    assert sums.completed_sum((0, 0), 1) is None


def test_completed_sum_of_other_round_or_older_plan_raises() -> None:
    sums = Aggregator(1, PLENTY)
    assert sums.completed_sum((1, 0), 0) is None, "it may come before any push"
    pushed(sums, (1, 0), 0, [0])
    pushed(sums, (1, 0), 1, [0])
    for turn in (0, 3):
        with pytest.raises(RequestError, match=f"slice 0 of round {turn} was pulled after round 1"):
            sums.completed_sum((1, 0), turn)
    with pytest.raises(RequestError, match="slice 0 of plan 0 was pulled after plan 1"):
        sums.completed_sum((0, 0), 0)


def test_push_with_slow_reader_uses_one_more_buffer() -> None:
    sums = Aggregator(1, PLENTY)
    slow = Reader(pushed(sums, (0, 0), 0, [0], 5.0), np.full(4, 5.0, "f4").tobytes())
    slow.sum.readers.append(lambda: slow.done)
    for turn in range(1, 9):
        pushed(sums, (0, 0), turn, [0], float(turn))
    assert sums.nbytes == 3 * 16
    slow.over()
    pushed(sums, (0, 0), 9, [0])
    assert sums.nbytes == 3 * 16


def test_push_completing_new_plan_drops_older_plans() -> None:
    sums = Aggregator(2, PLENTY)
    pushed(sums, (0, 0), 0, range(2))
    pushed(sums, (0, 1), 0, range(2))
    sums.push(1, (1, 0), 0, "float32", memoryview(bytes(16)))
    assert sums.completed_sum((0, 1), 0) is not None, "rank 0 may still want it"
    sums.push(0, (1, 0), 0, "float32", memoryview(bytes(16)))
    assert sums.nbytes == 16
    assert list(sums._slices) == [(1, 0)]


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_push_over_memory_limit_raises_and_keeps_state(dtype: str) -> None:
    numel = 1 << 12
    payload = memoryview(bytes(numel * ITEMSIZE[dtype]))
    each = numel * ({2: 6, 4: 4, 8: 8}[ITEMSIZE[dtype]])
    sums = Aggregator(1, 2 * each + 2 * SLICE_OVERHEAD)
    assert sums.push(0, (0, 0), 0, dtype, payload) is not None
    assert sums.push(0, (0, 1), 0, dtype, payload) is not None
    message = refused(sums, 0, (0, 2), 0, dtype, payload)
    assert "the server's limit is" in message
    assert sums.nbytes == 2 * each


def test_push_of_tiny_slices_counts_overhead() -> None:
    sums = Aggregator(2, 10 * SLICE_OVERHEAD)
    for number in range(10):
        sums.push(0, (0, number), 0, "float32", memoryview(bytes(4)))
    message = refused(sums, 0, (0, 10), 0, "float32", memoryview(bytes(4)))
    assert "10 slices need 44 bytes, and 1024 more each" in message


def test_find_incomplete_returns_late_workers() -> None:
    sums = Aggregator(4, PLENTY)
    assert sums.find_incomplete(100.0) is None
    payload = memoryview(bytes(4))
    sums.push(0, (0, 5), 0, "float32", payload, 3.0)
    sums.push(2, (0, 5), 0, "float32", payload, 4.0)
    assert sums.find_incomplete(3.0) is None
    assert sums.find_incomplete(3.5) == ((0, 5), {1, 3})
    assert [sums.is_waiting_for(worker) for worker in range(4)] == [False, True, False, True]
    sums.push(3, (0, 5), 0, "float32", payload, 5.0)
    assert sums.push(1, (0, 5), 0, "float32", payload, 6.0) is not None
    assert sums.find_incomplete(100.0) is None
    assert not any(sums.is_waiting_for(worker) for worker in range(4))
    sums.push(1, (0, 5), 1, "float32", payload, 8.0)
    assert sums.find_incomplete(7.0) is None, "the new round has begun later"
    assert sums.find_incomplete(8.5) == ((0, 5), {0, 2, 3})


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_push_with_dense_sums_reuses_memory(dtype: str) -> None:
    sums, rng, n = Aggregator(2, PLENTY, dense=True), np.random.default_rng(0), 100
    wide = sum_dtype(dtype)
    for turn in range(6):
        payloads = [gradients(rng, dtype, n) for _ in range(2)]
        for rank in range(2):
            done = sums.push(rank, (0, 0), turn, dtype, memoryview(payloads[rank]))
        assert done is not None
        total = widen(memoryview(payloads[0]), dtype) + widen(memoryview(payloads[1]), dtype)
        assert done.dtype == wide.name
        assert done.result.tobytes() == total.tobytes()
    assert sums.nbytes == 2 * n * wide.itemsize
    assert sum(each.result.nbytes for each in sums._slices[0, 0].sums) == sums.nbytes
    assert sums._slices[0, 0].spare is None


def test_push_completing_new_plan_drops_deferred_payloads() -> None:
    sums, one = Aggregator(2, PLENTY), memoryview(np.ones(4, "f4")).cast("B")
    sums.push(0, (0, 0), 0, "float32", one)
    assert sums._deferred == 16
    for rank in range(2):
        sums.push(rank, (1, 0), 0, "float32", one)
    assert sums._deferred == 0
