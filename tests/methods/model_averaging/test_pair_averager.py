"""AD-PSGD's averages with real messages between threads over the loopback."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Any

import pytest
import torch

from helpers.mailboxes import receive
from wingbeat.errors import MismatchError, PeerError, UsageError
from wingbeat.methods.model_averaging.local import Averager
from wingbeat.methods.model_averaging.pair_averager import PairAverager
from wingbeat.methods.model_averaging.pair_machine import Kind
from wingbeat.transport import loopback
from wingbeat.transport.detector import Failed, Failure
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.world import World
from wingbeat.types import Span

NUMEL = 600_001
"""Elements: three parts, the last of which is not full."""

ALL = Span(0, NUMEL)


def play(workers: int, body: Callable[[World], object], timeout: float = 120.0) -> list:
    worlds = loopback.worlds(workers, timeout=timeout)
    try:
        return loopback.run(worlds, body)
    finally:
        for world in worlds:
            world.close()


def filled(world: World) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.rank))


def made(world: World, **options: Any) -> PairAverager:
    """With a silence that no busy machine reaches."""
    return PairAverager(world, filled(world), **{"silence": 60.0} | options)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "wingbeat-pairs"]


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_models_converge_and_their_sum_is_unchanged(workers: int, wire: torch.dtype | None) -> None:
    steps = 12

    def body(world: World) -> tuple[torch.Tensor, torch.Tensor, dict]:
        buffer = filled(world)
        averager: Averager = PairAverager(world, buffer, dtype=wire, seed=2, silence=60.0)
        chance = Random(world.rank)
        for _ in range(steps):
            averager.begin(ALL)
            time.sleep(chance.random() / 200)
            averager.end()
        if world.rank % 2:  # serves until nobody asks any more
            averager.begin(ALL)
        world.exchange("all have stepped", None)
        averager.end()
        averaged = buffer.clone()
        averager.synchronize()
        cells = averager.sections()[0].cells
        averager.close()
        averager.close()
        return averaged, buffer, cells

    found = play(workers, body)
    begun = torch.stack([filled(world) for world in loopback.worlds(workers)])
    wanted = begun.mean(0)
    averaged = torch.stack([averaged for averaged, _, _ in found])
    assert torch.allclose(averaged.mean(0), wanted, atol=1e-5)
    # The first average alone takes away half the difference of two models, whoever they are.
    most = (1 - 0.9 / (workers - 1)) if workers > 1 else 0.0
    assert float((averaged - wanted).square().sum()) <= most * float(
        (begun - wanted).square().sum()
    )
    for _, mean, cells in found:
        assert torch.equal(mean, found[0][1])
        assert torch.allclose(mean, wanted, atol=1e-5)
        assert cells["queue"] == 0
    counts = [cells["averages"] for _, _, cells in found]
    assert counts[::2] == [steps if workers > 1 else 0] * ((workers + 1) // 2)
    assert sum(counts[1::2]) == (sum(counts[::2]) if workers > 1 else 0)
    assert not threads()


def test_average_gives_two_workers_equal_bits() -> None:
    def body(world: World) -> torch.Tensor:
        buffer = filled(world)
        with_others = PairAverager(world, buffer, silence=60.0)
        with_others.begin(ALL)
        world.exchange("begun", None)
        if world.rank == 0:
            with_others.end()
        world.exchange("averaged", None)
        with_others.end()
        return buffer

    one, other = play(2, body)
    assert torch.equal(one, other)


def test_passive_worker_serves_nothing_while_its_model_changes() -> None:
    def body(world: World) -> None:
        buffer = filled(world)
        averager = PairAverager(world, buffer, silence=60.0)
        if world.rank == 0:
            averager.begin(ALL)
            world.exchange("asked", None)
            averager.end()
            return
        world.exchange("asked", None)
        eventually(lambda: averager.sections()[0].cells["queue"] == 1)
        assert torch.equal(buffer, filled(world))
        averager.begin(ALL)
        averager.end()
        assert not torch.equal(buffer, filled(world))

    play(2, body)


def test_active_worker_asks_another_when_its_partner_leaves() -> None:
    def body(world: World) -> object:
        averager = made(world, seed=5)
        if world.rank == 0:
            averager.begin(ALL)
            eventually(lambda: averager.sections()[0].cells["partner"] != "-")
            world.publish("asked", averager.sections()[0].cells["partner"])
            averager.end()
            world.publish("averaged", True)
            return averager.sections()[0].cells["averages"]
        if world.rank == 2:
            return None
        if world.read("asked", 0) == world.rank:
            averager.close()
            return "left"
        averager.begin(ALL)
        world.read("averaged", 0)
        averager.end()
        return "served"

    averages, *others = play(4, body)
    assert averages == 1
    assert sorted(others, key=str) == [None, "left", "served"]


def test_workers_continue_when_training_fails_on_one() -> None:
    def body(world: World) -> int:
        averager = made(world)
        for step in range(6):
            averager.begin(ALL)
            if world.rank == 1 and step == 3:
                averager._exchange.close(quick=True)
                return 3
            averager.end()
        if world.rank == 3:
            averager.begin(ALL)
        world.publish("done", True)
        for rank in (0, 2, 4):
            world.read("done", rank)
        return averager.sections()[0].cells["averages"]

    found = play(5, body)
    assert found[0] == found[2] == found[4] == 6


@pytest.mark.parametrize("dead", [0, 1])
def test_dead_worker_is_detected_when_its_connections_close(dead: int) -> None:
    """Long before its silence; and by who has connected as by who was connected to."""

    def body(world: World) -> object:
        averager = made(world)
        if world.rank == dead:
            averager._exchange.mailbox.abandon()  # as the system closes what a process had
        elif dead:
            averager.begin(ALL)
            with pytest.raises(PeerError, match=r"rank 0: no worker is left .*: rank 1 has ended"):
                averager.end()
        else:
            eventually(lambda: averager._exchange.machine.lost == {0})
        return None

    begun = time.monotonic()
    play(2, body)
    assert time.monotonic() - begun < 50


def test_silent_worker_is_named() -> None:
    over = threading.Event()
    silent = Failed(Failure.SILENT, "has been silent for 5 s")

    def body(world: World) -> object:
        averager = made(world)
        if world.rank == 1:
            assert over.wait(100)
            averager._exchange.close(quick=True)  # the other one has failed, and does not answer
            return None
        averager._exchange._detector.failed = lambda: {1: silent}
        averager.begin(ALL)
        with pytest.raises(PeerError, match=r"rank 0: no worker is left .*: rank 1 has been sil"):
            averager.end()
        over.set()
        return None

    play(2, body)


def test_worker_that_does_not_synchronize_is_named() -> None:
    def body(world: World) -> None:
        averager = made(world)
        if world.rank == 1:
            averager._exchange._timeout = 0.02
            said = (
                r"rank 1: rank 0 is alive, but the call of wingbeat\.synchronize\(\) .* for 0\.2 s"
            )
            with pytest.raises(PeerError, match=said):
                averager.synchronize()
            world.publish("said", True)
        else:
            world.read("said", 1)

    play(2, body)


def test_synchronize_can_be_repeated_after_a_timeout() -> None:
    """The passive worker serves meanwhile, and may also step on before it levels."""

    def body(world: World) -> torch.Tensor:
        buffer = filled(world)
        averager = PairAverager(world, buffer, silence=60.0)
        if world.rank == 1:
            exchange = averager._exchange
            exchange._timeout = 0.02
            for _ in range(2):
                with pytest.raises(PeerError, match=r"rank 0 is alive, .* for 0\.2 s"):
                    averager.synchronize()
            averager.end()  # of what was amid then
            averager.begin(ALL)  # a step in between
            averager.end()
            exchange._timeout = 60.0
            world.publish("said", True)
        else:
            world.read("said", 1)
        for _ in range(2):
            averager.synchronize()
            buffer += world.rank
        return buffer

    one, other = play(2, body)
    mean = (filled(loopback.worlds(2)[0]) + filled(loopback.worlds(2)[1])) / 2
    assert torch.allclose(one, mean + 0.5, atol=1e-5)
    assert torch.allclose(other, mean + 1.5, atol=1e-5)


def test_average_interrupted_in_a_synchronization_is_completed() -> None:
    def body(world: World) -> torch.Tensor:
        buffer = filled(world)
        averager = PairAverager(world, buffer, silence=60.0)
        if world.rank == 1:
            exchange, synchronize = averager._exchange, averager._exchange.synchronize

            class Interrupted(Future[None]):
                """Waits until the model is in the midst of an average; then Ctrl-C."""

                def result(self, timeout: float | None = None) -> None:
                    machine = exchange.machine
                    eventually(lambda: machine.served is not None or machine.averages)
                    raise KeyboardInterrupt

            def interrupted() -> Future[None]:
                exchange.synchronize, wait = synchronize, synchronize()
                wait.__class__ = Interrupted
                return wait

            exchange.synchronize = interrupted
            with pytest.raises(KeyboardInterrupt):
                averager.synchronize()
            averager.end()
            assert not exchange.machine.pending
            averager.begin(ALL)
            averager.end()
        else:
            averager.begin(ALL)
            averager.end()
        averager.synchronize()
        return buffer

    one, other = play(2, body)
    assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["fails", "leaves"])
@pytest.mark.parametrize("gone", [1, 2])
def test_synchronize_covers_all_remaining_workers(gone: int, how: str) -> None:
    """Active and passive workers without one that has failed, or has ended early; twice."""

    def body(world: World) -> torch.Tensor | None:
        buffer = filled(world)
        averager = PairAverager(world, buffer, silence=60.0)
        averager.synchronize()
        if world.rank == gone:
            averager._exchange.close(quick=True) if how == "fails" else averager.close()
            return None
        buffer += world.rank
        averager.synchronize()
        buffer += world.rank
        averager.synchronize()
        return buffer

    found = [each for each in play(4, body) if each is not None]
    ranks = [rank for rank in range(4) if rank != gone]
    begun = torch.stack([filled(world) for world in loopback.worlds(4)]).mean(0)
    for each in found:
        assert torch.equal(each, found[0])
    torch.testing.assert_close(found[0], begun + 2 * sum(ranks) / 3, rtol=1e-5, atol=1e-5)


def test_live_worker_that_does_not_synchronize_is_named_and_learns_it() -> None:
    def body(world: World) -> None:
        averager = made(world)
        if world.rank == 0:
            averager._client._timeout = 0.3
            said = r"rank 0: no other worker .*: rank 1 gave no sign for 0.3 s"
            with pytest.raises(PeerError, match=said):
                averager.synchronize()
            world.publish("said", True)
        else:
            world.read("said", 0)
            with pytest.raises(
                PeerError, match=r"rank 1: no other .*: the others have continued without rank 1"
            ):
                averager.synchronize()

    play(2, body)


def test_malformed_chunk_is_refused_with_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            averager = made(world)
            averager.begin(ALL)
            world.publish("begun", True)
            with pytest.raises(PeerError, match="rank 1: rank 0 violated the protocol: 3 bytes"):
                eventually(lambda: averager.end() or averager.begin(ALL) or False)
            return
        world.exchange("pairs", [NUMEL, "torch.float32", "None"])
        box = open_mailbox(
            world.store, 0, [1], namespace=f"pairs/{world.path}", interfaces=("lo",), classes=1
        )
        world.read("begun", 1)
        box.post(1, Kind.REQUEST, ids=(1, 0, 0, 0))
        assert receive(box, 100.0).kind == Kind.GRANT
        box.post(1, Kind.CHUNK, b"abc", ids=(1, 0, 0, 0))
        while (kind := receive(box, 100.0).kind) != Kind.FAILED:
            assert kind == Kind.KEEPALIVE, "it waits for this worker"
        box.abandon()

    play(2, body)


def test_synchronizations_with_steps_in_between_give_the_mean() -> None:
    def body(world: World) -> list[float]:
        buffer = torch.zeros(NUMEL)
        averager, found = PairAverager(world, buffer, silence=60.0), []
        for level in range(3):
            for _ in range(2):
                averager.begin(ALL)
                averager.end()
                buffer += world.rank
            averager.begin(ALL)  # the next one ends it
            averager.synchronize()
            found.append(float(buffer[level]))
        return found

    assert play(3, body) == [[2.0, 4.0, 6.0]] * 3


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (torch.zeros(3, 3), r"a buffer of shape \(3, 3\)"),
        (torch.zeros(6)[::2], r"allowed is a flat, contiguous one"),
        (torch.zeros(3, dtype=torch.int64), "torch.int64"),
        (torch.zeros(3, device="meta"), "on meta"),
    ],
)
def test_invalid_buffer_is_refused(buffer: torch.Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PairAverager(loopback.worlds(1)[0], buffer)


def test_different_models_are_refused_before_connection_setup() -> None:
    def body(world: World) -> None:
        with pytest.raises(MismatchError, match=r"give all workers the same model and compression"):
            PairAverager(world, torch.zeros(3 + world.rank))

    play(2, body)


def test_calls_in_the_wrong_order_are_refused() -> None:
    world = loopback.worlds(1)[0]
    averager = PairAverager(world, torch.zeros(NUMEL))
    averager.end()  # nothing was begun
    with pytest.raises(UsageError, match=r"allowed is Span\(start=0, stop=600001\)"):
        averager.begin(Span(0, 3))
    averager.begin(ALL)
    with pytest.raises(UsageError, match=r"begin\(\) was called twice"):
        averager.begin(ALL)

    def body(world: World) -> None:
        closed = PairAverager(world, torch.zeros(NUMEL))
        closed.close()
        with pytest.raises(UsageError, match=r"rank \d: close\(\) was called"):
            closed.begin(ALL)

    play(2, body)


def test_error_of_the_thread_is_raised_by_each_later_step() -> None:
    over = threading.Barrier(2)

    def body(world: World) -> None:
        averager = made(world)

        def fails() -> None:
            raise PeerError("rank 7 sent what it never sends")

        if world.rank == 0:  # alone: a worker whose only partner has failed has another error
            averager._exchange.ask(fails).exception()
            for _ in range(2):
                with pytest.raises(PeerError, match="rank 7 sent"):
                    averager.begin(ALL)
        over.wait(30)

    play(2, body)


def test_error_of_the_thread_has_one_line() -> None:
    def body(world: World) -> None:
        averager = made(world)
        if world.rank == 0:
            exchange = averager._exchange

            def fails(_: object) -> None:
                raise RuntimeError("sizes differ\nException raised from here")

            exchange.step = fails
            eventually(lambda: exchange.error is not None)
            with pytest.raises(PeerError, match=r"^rank 0: RuntimeError: sizes differ$"):
                averager.begin(ALL)
            world.publish("said", True)
        else:
            world.read("said", 0)

    play(2, body)


def test_garbage_collected_averager_ends_its_thread() -> None:
    def body(world: World) -> None:
        PairAverager(world, torch.zeros(8))

    worlds = loopback.worlds(2)
    loopback.run(worlds, body)
    gc.collect()
    eventually(lambda: not threads())
    for world in worlds:
        world.close()
