"""Bounded staleness in virtual time: closed forms, stragglers, bytes, and the pool beside all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.messages import Progress
from wingbeat.methods.bounded_staleness.simulated import StaleRun, bundled, simulate_bounded
from wingbeat.methods.bounded_staleness.simulated_pool import PoolMember
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.simulator import Links, Model, Work
from wingbeat.simulator.cluster import Coding, Traffic
from wingbeat.simulator.model import TimedLayer
from wingbeat.transport import loopback
from wingbeat.transport.membership import initial_view
from wingbeat.types import Fusion, TensorSpec
from wingbeat_lab.paced import simulator_model
from wingbeat_lab.paced.model import PacedModel
from wingbeat_lab.paced.profile import load_profile

FREE = Work(
    chunk_s=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0, update_s_per_byte=0.0,
    message_s=0.0, message_s_per_byte=0.0,
)  # fmt: skip
LINKS = Links(bytes_per_s=1e9, latency_s=0.0, quantum=1 << 18)
SLOW = Links(bytes_per_s=5e7, latency_s=0.0, quantum=1 << 20)
TWO = Links(bytes_per_s=1e9, latency_s=0.0, count=2, quantum=1 << 20)
NUMEL = 12_000_000
COMPUTE_S = 0.4
"""Of an iteration of `model`."""


def model(layers: int = 1, numel: int = NUMEL) -> Model:
    """0.1 s of forward and 0.3 s of backward, in equal layers."""
    return Model(
        tuple(TimedLayer(0.1 / layers, 0.3 / layers, (i,)) for i in range(layers)),
        tuple(TensorSpec(f"{i}.weight", (numel // layers,), "float32", 4) for i in range(layers)),
    )


def run(bound: StalenessBound, workers: int = 3, iterations: int = 20, **options: Any) -> StaleRun:
    made = options.pop("model", model(bound.colayers))
    links = options.pop("links", LINKS)
    options = {"work": FREE, **options}
    return simulate_bounded(made, bound, workers, links, gradients=iterations * workers, **options)


def bsp(colayers: int = 1) -> StalenessBound:
    return StalenessBound(0, colayers, colayers)


def mean(counts: Mapping[int, float]) -> float:
    return sum(key * count for key, count in counts.items()) / sum(counts.values())


def slow(worker: int, factor: float) -> Any:
    return lambda rank, _iteration: factor * COMPUTE_S * (rank == worker)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("ratio", [1.0, 0.25])
def test_bsp_takes_computation_and_then_its_bytes(workers: int, ratio: float, pool: bool) -> None:
    """Pieces and then sums, of one colayer: nothing overlaps."""
    made = run(bsp(), workers, 10, coding=Coding(ratio=ratio), pool=pool)
    wire = 2 * (workers - 1) / workers * NUMEL * 4 * ratio / LINKS.bytes_per_s
    assert made.seconds == pytest.approx(10 * (COMPUTE_S + wire), rel=0.02)
    assert made.delays == {0: 10 * workers}
    assert (made.lost, made.rounds, set(made.lags)) == (0.0, 10, {0})
    assert made.waited_s == pytest.approx([10 * wire] * workers, rel=0.05)


@pytest.mark.parametrize("pool", [False, True])
def test_colayers_are_exchanged_while_backward_goes_on(pool: bool) -> None:
    """Of four, three are hidden, and the last is on its way alone."""
    made = run(bsp(4), iterations=10, pool=pool)
    last = 2 * 2 / 3 * NUMEL / 4 * 4 / LINKS.bytes_per_s
    assert made.seconds == pytest.approx(10 * (COMPUTE_S + last), rel=0.02)


@pytest.mark.parametrize("pool", [False, True])
def test_without_a_bound_nobody_waits_for_the_network(pool: bool) -> None:
    made = run(StalenessBound(None, 2, 2, in_flight=None), iterations=40, pool=pool)
    assert made.seconds < 40 * COMPUTE_S + 2 * COMPUTE_S
    assert made.waited_s == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("pool", [False, True])
def test_on_a_slow_network_queues_use_up_s(pool: bool) -> None:
    """Workers run ahead until s stops them, so contributions are s steps late, all alike."""
    bound = StalenessBound(4, 2, 2, in_flight=None)
    delays = run(bound, iterations=15, links=SLOW, pool=pool).delays
    assert max(delays) == 4
    assert delays[4] > 0.5 * sum(delays.values())


@pytest.mark.parametrize("s", [4, 18, None])
@pytest.mark.parametrize("pool", [False, True])
def test_on_a_slow_network_one_round_is_in_flight_and_it_is_as_fast(
    s: int | None, pool: bool
) -> None:
    """The links are never idle, and whoever is not slow need not wait for more."""
    options: dict[str, Any] = {"iterations": 30, "links": SLOW, "pool": pool}
    queued = run(StalenessBound(s, 2, 2, in_flight=None), **options)
    made = run(StalenessBound(s, 2, 2), **options)
    assert set(made.delays) <= {0, 1, 2}
    assert made.delays[0] <= 3  # the first
    assert made.delays[2] <= sum(made.delays.values()) / 6  # one iteration in eight finds out
    assert made.seconds <= queued.seconds * 1.01


@pytest.mark.parametrize("pool", [False, True])
def test_who_just_comes_in_time_is_found_out(pool: bool) -> None:
    """Links take about as long as the slow worker: with one round in flight all wait for it."""
    links = Links(bytes_per_s=1e8, latency_s=0.0, quantum=1 << 20)
    options: dict[str, Any] = {"iterations": 40, "links": links, "sleeps": slow(1, 1.25)}
    waits = run(StalenessBound(18, 1, 2, in_flight=1), pool=pool, **options)
    goes_on = run(StalenessBound(18, 1, 2), pool=pool, **options)
    assert goes_on.seconds < 0.93 * waits.seconds


@pytest.mark.parametrize("pool", [False, True])
def test_on_a_slow_network_slow_workers_let_others_run_ahead(pool: bool) -> None:
    """Each iteration another one sleeps for two; without running ahead it would be waited for."""

    def sleeps(rank: int, iteration: int) -> float:
        return 2 * COMPUTE_S * (rank == iteration % 4)

    links = Links(bytes_per_s=2e8, latency_s=0.0, quantum=1 << 20)
    seconds = [
        run(bound, 4, 40, links=links, sleeps=sleeps, pool=pool).seconds
        for bound in (bsp(2), StalenessBound(18, 1, 2, in_flight=1), StalenessBound(18, 1, 2))
    ]
    assert seconds[0] > 1.1 * seconds[1] > 1.1**2 * seconds[2]


@pytest.mark.parametrize("pool", [False, True])
def test_a_slow_worker_holds_bsp_back_and_ssp_after_s(pool: bool) -> None:
    """It takes three times as long; the others are s ahead once, and then as slow."""
    light = model(2, 1000)
    times = [
        run(bound, iterations=24, model=light, sleeps=slow(1, 2.0), pool=pool).seconds
        for bound in (bsp(2), StalenessBound(6, 2, 2))
    ]
    assert times[0] == pytest.approx(24 * 3 * COMPUTE_S, rel=0.02)
    # Three of its iterations for each of the others' until they are 6 ahead: 4 more of each.
    assert times[1] == pytest.approx((24 - 4) * 3 * COMPUTE_S, rel=0.06)


@pytest.mark.parametrize("pool", [False, True])
def test_canary_drops_what_is_too_old_and_goes_on(pool: bool) -> None:
    light = model(4, 1000)
    made = run(StalenessBound(3, 3, 4), iterations=60, model=light, sleeps=slow(1, 6.0), pool=pool)
    assert made.dropped[0] == made.dropped[2] == 0
    assert made.dropped[1] > 3
    assert 0 < made.lost <= made.dropped[1]
    # Two workers at full speed make 2/3 of what was asked for in that time.
    assert made.seconds < 60 * 1.5 * COMPUTE_S * 1.05
    assert made.waited_s[0] < 0.1 * made.seconds


@pytest.mark.parametrize("pool", [False, True])
def test_with_p_colayers_sent_the_others_wait_for_the_rest(pool: bool) -> None:
    """Whoever has sent its one of two in time is never dropped amid backward."""
    light = model(2, 1000)
    made = run(StalenessBound(1, 1, 2), iterations=30, model=light, sleeps=slow(1, 2.0), pool=pool)
    assert made.lost == 1.0 * made.dropped[1]  # before the first colayer: then p has been reached


def test_one_worker_after_the_other_is_slow_and_hardly_matters() -> None:
    """Each iteration another one sleeps: BSP waits for it each time, the others do not."""
    light = model(2, 1000)

    def sleeps(rank: int, iteration: int) -> float:
        return 2 * COMPUTE_S * (rank == iteration % 4)

    waits, goes_on = (
        run(bound, 4, 40, model=light, sleeps=sleeps).seconds
        for bound in (bsp(2), StalenessBound(8, 1, 2))
    )
    assert waits == pytest.approx(40 * 3 * COMPUTE_S, rel=0.02)
    assert goes_on == pytest.approx(40 * 1.5 * COMPUTE_S, rel=0.1)


@pytest.mark.parametrize(("network", "hops"), [("star", 1.0), ("bcube", 1.5)])
@pytest.mark.parametrize("pool", [False, True])
def test_bytes_are_two_thirds_to_and_fro_and_more_where_hosts_pass_on(
    network: str, hops: float, pool: bool
) -> None:
    """Of nine workers 8/9 of the gradients, twice a round; in a BCube(3, 2) half take two hops."""
    traffic = Traffic()
    made = run(
        bsp(), 9, 3, model=model(1, 8 * NUMEL), links=TWO, network=network, traffic=traffic,
        pool=pool,
    )  # fmt: skip
    wire = 2 * 8 / 9 * 8 * NUMEL * 4 * hops
    assert statistics.fmean(traffic.sent.values()) == pytest.approx(3 * wire, rel=0.02)
    assert len(traffic.sent) == (1 if pool else 9)
    assert made.seconds == pytest.approx(3 * (COMPUTE_S + wire / 2e9), rel=0.06)
    assert max(traffic.utilisation(2e9, made.seconds)) <= 1.0 + 1e-9


def test_coding_takes_the_threads_time() -> None:
    """The training thread encodes its gradients and decodes sums, owners the other two."""
    plain = run(bsp(), iterations=10)
    encode, decode = Coding(encode_s_per_byte=1e-9), Coding(decode_s_per_byte=1e-9)
    nbytes = NUMEL * 4e-9
    for coding, more in ((encode, nbytes * (1 + 1 / 3)), (decode, nbytes * 2)):
        for pool in (False, True):
            made = run(bsp(), iterations=10, coding=coding, pool=pool)
            assert made.seconds - plain.seconds == pytest.approx(10 * more, rel=0.1)


def test_messages_have_their_price() -> None:
    plain = run(bsp(), iterations=10)
    work = Work(fill_s_per_byte=0.0, update_s_per_byte=0.0, add_s_per_byte=0.0, message_s=0.01)
    for pool in (False, True):
        made = run(bsp(), iterations=10, work=work, pool=pool)
        # To two others, pieces and sums of five parts each, posted and taken; and where each is.
        assert 10 * 0.01 * 8 * 5 < made.seconds - plain.seconds < 10 * 0.01 * 8 * 5 * 2


CASES = [
    (bsp(4), 1.0, 0.0),
    (StalenessBound(4, 2, 4), 1.0, 0.0),
    (StalenessBound(4, 2, 4), 0.25, 2.0),
    (StalenessBound(2, 3, 4), 1.0, 6.0),
    (StalenessBound(4, 4, 4), 1.0, 2.0),
]


@pytest.mark.parametrize(("bound", "ratio", "factor"), CASES)
def test_one_owner_stands_for_all(bound: StalenessBound, ratio: float, factor: float) -> None:
    options: dict[str, Any] = {
        "model": model(4, 4 * NUMEL),
        "coding": Coding(ratio=ratio),
        "sleeps": slow(1, factor),
        "work": Work(fill_s_per_byte=0.0, update_s_per_byte=0.0),
    }
    full, pool = (run(bound, 5, 20, pool=pool, **options) for pool in (False, True))
    assert pool.seconds == pytest.approx(full.seconds, rel=0.03)
    assert mean(pool.delays) == pytest.approx(mean(full.delays), rel=0.1, abs=0.3)
    assert mean(pool.lags) == pytest.approx(mean(full.lags), rel=0.1, abs=0.3)
    assert pool.lost == pytest.approx(full.lost, rel=0.3, abs=1.0)


class Heard:
    """What a member of a pool of two says, with nobody to hear it."""

    def __init__(self) -> None:
        self.said: list[tuple[int, ...]] = []

    def announce(self, _rank: int, *told: int) -> None:
        self.said.append(told)

    def send_pieces(self, *_pieces: int) -> None:
        pass

    def all_reached(self, _rank: int, _iteration: int) -> bool:
        return True


@pytest.mark.parametrize("sent", [0, 1, 2])
@pytest.mark.parametrize(
    "bound", [bsp(2), StalenessBound(3, 2, 2), StalenessBound(2, 2, 3), StalenessBound(None, 2, 2)]
)
def test_a_member_of_a_pool_says_what_a_real_machine_says(bound: StalenessBound, sent: int) -> None:
    """While another goes on further and further, and it has sent some colayers."""
    heard, real = Heard(), Worker(0, 2, bound, lambda *_: None)
    member = PoolMember(heard, 0, bound)  # type: ignore[arg-type]
    member.advance()
    for machine in (real, member):
        machine.begin_iteration()
        for colayer in range(sent):
            machine.send_colayer(colayer, (None, None))
    for zeta in range(1, 8):
        real.receive(1, 0, Progress(zeta, zeta - 1, 0, False, zeta, initial_view(2)))
        member.update_zeta(zeta)
    colayers = (None, None)
    more = sent < bound.colayers
    taken = {more and each.send_colayer(sent, colayers) for each in (real, member)}
    assert len(taken) == 1
    for machine in (real, member):
        machine.end_iteration()
    posts = [post.message for post in real.outbox if isinstance(post.message, Progress)]
    assert heard.said == [(here.iteration, here.sent_through, here.zeta) for here in posts]
    assert taken == {more and not real.dropped}
    assert member.can_begin() == real.can_begin()


@pytest.mark.parametrize("pool", [False, True])
def test_the_same_arguments_give_the_same_run(pool: bool) -> None:
    first, second = (
        run(StalenessBound(3, 2, 4), 4, sleeps=slow(2, 3.0), pool=pool) for _ in range(2)
    )
    assert first == second


def test_all_of_a_model_is_in_its_colayers() -> None:
    layers = [(0.01, 0.04, 100), (0.02, 0.06, 0), (0.0, 0.1, 300), (0.03, 0.2, 500)]
    made = Model(
        tuple(TimedLayer(f, b, (i,) if n else ()) for i, (f, b, n) in enumerate(layers)),
        tuple(TensorSpec(f"{i}.weight", (n,), "float32", 4) for i, (_, _, n) in enumerate(layers)),
    )
    found = bundled(made, 3)
    assert found.forward_s == pytest.approx(0.06)
    assert found.backward_s == pytest.approx((0.2, 0.1, 0.1))
    assert (found.numel, found.tensors) == ((500, 300, 100), (1, 1, 1))
    assert found.seconds == pytest.approx(0.46)
    assert found.rest_s == 0.0
    assert (bundled(made, 1).numel, bundled(made, 1).tensors) == ((900,), (3,))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("vgg19", 10, marks=pytest.mark.slow),
        ("inception_v3", 10),
        ("bert_base", 10),
        pytest.param("lstm_ptb", 3, marks=pytest.mark.slow),
    ],
)
def test_colayers_are_those_that_training_makes(name: str, count: int) -> None:
    profile = load_profile(name)
    fusion = Fusion(kind="colayers", layers=count)
    (world,) = loopback.worlds(1)
    trained = Bucketing(PacedModel(profile), fusion, world, lockstep=False)
    trained.build()
    made = [[trained.specs[slot.index].shape for slot in each.slots] for each in trained.buckets]
    found = bundled(simulator_model(profile), count)
    assert found.tensors == tuple(map(len, made))
    assert found.numel == tuple(sum(map(math.prod, shapes)) for shapes in made)


def test_measured_colayers_are_bundled_by_backward_times() -> None:
    """VGG-19's are those of the paper's example (section 4.3.2), and not of one size."""
    made = simulator_model(load_profile("vgg19"))
    assert bundled(made, 4, measured=True).tensors == (6, 8, 8, 16)
    assert bundled(made, 4).tensors != (6, 8, 8, 16)
    runs = [
        run(StalenessBound(0, 4, 4), 2, 3, model=made, links=SLOW, measured=measured)
        for measured in (False, True)
    ]
    assert runs[0].seconds != runs[1].seconds


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: run(bsp(), 1), "workers=1"),
        (lambda: run(bsp(), iterations=0), "gradients=0"),
        (lambda: run(bsp(), network="ring"), "network='ring'.*allowed are .'star', 'bcube'"),
        (lambda: run(bsp(), 6, network="bcube", links=TWO), "you have 6 with 2"),
        (lambda: run(StalenessBound(1, 1, 2), model=model(1)), "colayers=2; allowed: up to 1"),
        (lambda: Coding(ratio=0.0), "ratio=0.0"),
        (lambda: Coding(decode_s_per_byte=-1.0), "0 or more"),
    ],
)
def test_what_cannot_be_simulated_is_refused(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


def test_on_shared_cores_the_hosts_work_waits_and_computation_does_not() -> None:
    """Four workers copy gradients for 0.24 s each: by turns on one core, at once on four."""
    work = Work(
        chunk_s=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.24 / (NUMEL * 4), update_s_per_byte=0.0,
        message_s=0.0, message_s_per_byte=0.0,
    )  # fmt: skip
    fast = Links(bytes_per_s=1e12, latency_s=0.0)
    seconds = {
        cores: run(bsp(), 4, 5, work=work, links=fast, cores=cores).seconds / 5
        for cores in (None, 4, 1)
    }
    assert seconds[None] == pytest.approx(COMPUTE_S + 0.24, rel=0.01)
    assert seconds[4] == pytest.approx(seconds[None])
    assert seconds[1] == pytest.approx(COMPUTE_S + 4 * 0.24, rel=0.01)


@pytest.mark.parametrize("options", [{"cores": 0}, {"cores": 2, "pool": True}])
def test_cores_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"simulate_bounded\(cores="):
        run(bsp(), **options)


def test_when_iterations_began_and_what_was_applied_is_told() -> None:
    made = run(bsp(), 3, 4)
    for moments in made.begun:
        times, applied = zip(*moments, strict=True)
        assert list(applied) == [0.0, 1.0, 2.0, 3.0, 4.0][: len(applied)]
        assert times[0] == pytest.approx(0.0, abs=1e-5)
        assert list(times) == sorted(times)


def test_encryption_takes_processor_time_of_each_byte() -> None:
    """One worker's thread sends and receives two thirds of the model's bytes, twice."""
    work = replace(FREE, encrypt_s_per_byte=2e-9)
    plain, encrypted = (
        run(bsp(), 3, 10, work=work, encrypted=encrypted).seconds for encrypted in (False, True)
    )
    handled_s = 2 * (2 / 3) * 2 * NUMEL * 4 * 2e-9
    assert 0.5 * handled_s <= (encrypted - plain) / 10 <= handled_s
