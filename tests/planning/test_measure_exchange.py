"""Exchanges are measured alike on all workers, encoding apart, each interface by itself."""

from __future__ import annotations

import time

import pytest
import torch

from helpers import late
from wingbeat import compression
from wingbeat.collectives import Collectives, Handle
from wingbeat.errors import PeerError, UsageError
from wingbeat.planning.measure import (
    MAX_ELEMENTS,
    MIN_SIZE,
    Operation,
    geometric,
    measure_exchange,
    measure_wire,
)
from wingbeat.transport import loopback
from wingbeat.transport.world import World


class Clock:
    """One worker's own time, which passes only when its test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pretended(Handle):
    """An exchange that takes as long as a test says."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__([])
        self._clock, self._seconds = clock, seconds

    def wait(self) -> None:
        self._clock.now += self._seconds


def pretended(clock: Clock, amount: int, encode_s: float, exchange_s: float, log=None) -> Operation:
    def start() -> Handle:
        clock.now += encode_s
        return Pretended(clock, exchange_s)

    def prepare() -> None:
        clock.now += 1000.0
        if log is not None:
            log.append(amount)

    return Operation(start, amount / 10, prepare)


def run(members, seconds_of, amounts, *, budget_s=1e6, repeats=3, logs=None):
    """Measure on all workers; ``seconds_of(rank, amount)`` says encode and exchange."""

    def body(world: World):
        clock = Clock()
        log = logs[world.rank] if logs is not None else None

        def make(amount: int) -> Operation:
            return pretended(clock, amount, *seconds_of(world.rank, amount), log)

        return measure_exchange(
            Collectives(world), make, amounts, repeats, budget_s=budget_s, now=clock
        )

    return loopback.run(members, body)


def test_measure_exchange_separates_encoding_and_exchange() -> None:
    with late.open_worlds(2) as (members, _):
        found = run(members, lambda rank, n: (2.0 * n, 3.0 * n), [1, 2, 4])
    assert found[0] == found[1]
    assert found[0].encode == ((1.0, 2.0), (2.0, 4.0), (4.0, 8.0))
    assert found[0].exchange == ((0.1, 3.0), (0.2, 6.0), (0.4, 12.0))


def test_measure_exchange_waiting_for_slow_encoder_does_not_count() -> None:
    # Rank 1 encodes for 3 s longer, and rank 0 waits so much longer; the links need 2 s.
    with late.open_worlds(2) as (members, _):
        found = run(members, lambda rank, n: (1.0, 5.0) if rank == 0 else (4.0, 2.0), [1])
    assert found[0].encode == ((1.0, 4.0),)
    assert found[0].exchange == ((0.1, 2.0),)


def test_measure_exchange_cpu_time_is_that_of_busiest_worker() -> None:
    def body(world: World):
        clock, used = Clock(), Clock()

        def start() -> Handle:
            used.now += 100.0  # encoding is not what competes with backward: it holds it up anyway
            return Pretended(used, 2.0 + world.rank)

        return measure_exchange(
            Collectives(world), lambda n: Operation(start, n), [1, 2], 3, now=clock, used=used
        )

    with late.open_worlds(2) as (members, _):
        found = loopback.run(members, body)
    assert found[0] == found[1]
    assert found[0].cpu == ((1.0, 3.0), (2.0, 3.0))


def test_measure_exchange_slowest_worker_counts() -> None:
    with late.open_worlds(3) as (members, _):
        found = run(members, lambda rank, n: (1.0, 2.0 + 3.0 * (rank == 2)), [1])
    assert [f.exchange for f in found] == [((0.1, 5.0),)] * 3


def test_measure_exchange_all_workers_stop_at_budget_together() -> None:
    logs: list[list[int]] = [[], [], []]
    with late.open_worlds(3) as (members, _):
        # Only rank 1 would notice.
        found = run(
            members, lambda rank, n: (0.0, n * (1.0 if rank == 1 else 0.1)), [1, 2, 4, 8, 16, 32],
            budget_s=11.0, repeats=1, logs=logs,
        )  # fmt: skip
    assert [n for n, _ in found[0].encode] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert found[0] == found[1] == found[2]
    # Two of each to see how far to go; then they take turns. Two fifths of 11 s are enough for four
    # of what takes 1 s and for two of what takes 2 s; the others count once.
    assert logs == [[1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 1, 2, 4, 8, 16, 1, 2, 1, 1]] * 3


@pytest.mark.parametrize("beta", [1e-9, 1e-8, 3e-8, 1e-7, 1e-6])
def test_measure_exchange_ends_within_five_seconds_at_any_rate(beta: float) -> None:
    """Training pauses meanwhile. Preparations, here of 1,000 s each, take no time on links."""
    ends: list[float] = []

    def body(world: World):
        clock, prepared = Clock(), []

        def make(amount: int) -> Operation:
            return pretended(clock, amount, 0.0, 1e-3 + beta * amount, prepared)

        amounts = geometric(MIN_SIZE, MAX_ELEMENTS)
        found = measure_exchange(Collectives(world), make, amounts, now=clock)
        ends.append(clock.now - 1000.0 * len(prepared))
        return found

    with late.open_worlds(2) as (members, _):
        found = loopback.run(members, body)
    assert len(found[0].exchange) >= 4
    assert max(ends) < 5.0


def test_measure_exchange_always_measures_two_amounts() -> None:
    with late.open_worlds(2) as (members, _):
        found = run(members, lambda rank, n: (1.0, 9.0 * n), [1, 2, 4], budget_s=0.1)
    assert found[0].exchange == ((0.1, 9.0), (0.2, 18.0))


def test_measure_exchange_takes_medians_without_first_two() -> None:
    seconds = [100.0, 50.0, 1.0, 9.0, 2.0, 3.0]

    def body(world: World):
        clock, left = Clock(), list(seconds)

        def start() -> Handle:
            return Pretended(clock, left.pop(0))

        return measure_exchange(
            Collectives(world), lambda n: Operation(start, n), [1], 1, budget_s=1e4, now=clock
        )

    with late.open_worlds(2) as (members, _):
        assert loopback.run(members, body)[0].exchange == ((1.0, 2.5),)


def test_measure_exchange_repetitions_begin_with_barrier() -> None:
    """Rank 1 gets ready late: rank 0 must not begin before."""
    ready: list[float] = []
    begun: list[float] = []

    def body(world: World):
        def prepare() -> None:
            if world.rank == 1:
                time.sleep(0.02)
                ready.append(time.monotonic())

        def start() -> Handle:
            if world.rank == 0:
                begun.append(time.monotonic())
            return Collectives(world).all_reduce(torch.zeros(2))

        make = lambda n: Operation(start, n, prepare)  # noqa: E731
        return measure_exchange(Collectives(world), make, [1], 1, budget_s=1e9)

    with late.open_worlds(2) as (members, _):
        loopback.run(members, body)
    assert len(ready) == len(begun) == 6
    assert all(r < b for r, b in zip(ready, begun, strict=True))


@pytest.mark.parametrize(
    "value",
    [[[1.0]], [[1.0, 2.0]], [[1.0, 2.0, 3.0, 4.0]], [[2.0, 1.0, 0.0]], [[-1.0, 1.0, 0.0]],
     [[0.0, float("nan"), 0.0]], [[0.0, float("inf"), 0.0]], [[0, "1", 0]], [[True, True, True]],
     [[0.0, 1.0, -1.0]], [[0.0, 1.0, float("nan")]], None, "ab", {"a": 1}, [[0.0, 1e300, 0.0]],
     [], [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], [None], ["abc"], [0.0]],
)  # fmt: skip
def test_measure_exchange_malformed_measurement_names_sender(value, monkeypatch) -> None:
    def body(world: World):
        world.members = (2, 7)  # of the job
        if world.rank == 1:
            honest = world.exchange
            world.exchange = lambda what, _mine: honest(what, value)  # type: ignore[method-assign]
        clock = Clock()
        return measure_exchange(
            Collectives(world), lambda n: pretended(clock, n, 1.0, 1.0), [1], 1, now=clock
        )

    with late.open_worlds(2) as (members, _), pytest.raises(PeerError) as caught:
        loopback.run(members, body)
    assert "rank 7 sent a malformed measurement of an exchange" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("first", [1, 7, 1024])
def test_geometric_amounts_grow_and_end_with_last(first) -> None:
    for last in (1, 5, 1024, 1025, 70_000):
        amounts = geometric(first, last, 1.3)
        assert amounts[-1] == last
        assert amounts == sorted(set(amounts))


# -- real exchanges -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "collective", "bytes_each"),
    [
        ("", "all-reduce", 4),
        ("bfloat16", "all-reduce", 2),
        ("", "reduce-scatter", 4),
        (compression.TopK(density=0.01), "reduce-scatter", None),
        (compression.TopK(density=0.01), "payload all-gather", None),
        (compression.TopK(density=0.01, momentum=0.9, warmup=100), "payload all-gather", None),
        (compression.Sketch(bits=8), "all-reduce", None),
        (compression.Half(), "payload all-gather", None),
    ],
    ids=str,
)
def test_measure_wire_measures_exchange_of_training(wire, collective, bytes_each) -> None:
    size, largest = 3, 5000

    def body(world: World):
        state = torch.get_rng_state()
        found = measure_wire(Collectives(world), wire, collective, largest, repeats=2)
        assert torch.equal(state, torch.get_rng_state())
        return found

    with late.open_worlds(size) as (members, _):
        found = loopback.run(members, body)
    assert found[0] == found[1] == found[2]
    numels = [int(n) for n, _ in found[0].encode]
    assert numels == [1026, 4098, 5001]
    assert all(seconds > 0 for _, seconds in found[0].encode + found[0].exchange)
    sizes = [nbytes for nbytes, _ in found[0].exchange]
    if bytes_each is not None:
        assert sizes == [bytes_each * n for n in numels]
    if isinstance(wire, compression.TopK):
        # After the warm-up: one in a hundred, 6 bytes each, 4 for the one block of 65,536; aligned.
        assert sizes == [-(-(6 * round(n / 100) + 4) // 4) * 4 for n in numels]


@pytest.mark.parametrize(
    ("wire", "collective"),
    [
        ("", "all-reduce"),
        (compression.Sketch(bits=8), "all-reduce"),
        (compression.TopK(density=0.01), "payload all-gather"),
    ],
    ids=str,
)
def test_measure_wire_repetitions_exchange_same_gradients(wire, collective, monkeypatch) -> None:
    """Sums of sums would soon be infinite, which some codecs treat in a time of its own."""
    put_in: set[tuple[int, float]] = set()

    def noted(usual):
        def start(self, buffer, **options):
            put_in.add((len(buffer), float(buffer.abs().sum())))
            return usual(self, buffer, **options)

        return start

    for name in ("all_reduce", "all_gather_sum"):
        monkeypatch.setattr(Collectives, name, noted(getattr(Collectives, name)))
    with late.open_worlds(2) as (members, _):
        loopback.run(
            members, lambda world: measure_wire(Collectives(world), wire, collective, 3000)
        )
    assert [numel for numel, _ in sorted(put_in)] == [1024, 3000]


def test_measure_wire_payload_all_gather_encodes_in_call(monkeypatch) -> None:
    """The codec sleeps for 20 ms; that has to be in the encoding, and is not in the exchange."""
    from wingbeat.codecs.topk import TopKCodec

    slow = TopKCodec.encode

    def encode(self, *args, **options) -> None:
        time.sleep(0.02)
        slow(self, *args, **options)

    monkeypatch.setattr(TopKCodec, "encode", encode)
    with late.open_worlds(2) as (members, _):
        found = loopback.run(
            members,
            lambda world: measure_wire(
                Collectives(world),
                compression.TopK(density=0.01),
                "payload all-gather",
                500,
                repeats=3,
            ),
        )
    [(_, encode_s)], [(_, exchange_s)] = found[0].encode, found[0].exchange
    assert encode_s > 0.02
    assert exchange_s < 0.02


def test_measure_wire_invalid_collective_is_refused() -> None:
    collectives = Collectives(loopback.worlds(1)[0])
    with pytest.raises(UsageError, match="unknown collective 'broadcast'"):
        measure_wire(collectives, "", "broadcast", 10)
    with pytest.raises(UsageError, match="collective='payload all-gather' with wire='bfloat16'"):
        measure_wire(collectives, "bfloat16", "payload all-gather", 10)
