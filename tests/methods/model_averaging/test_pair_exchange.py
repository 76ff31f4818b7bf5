"""Exchanges of two workers, step by step in one thread: deaths, invalid messages."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from helpers.pair_simulation import FakeMailbox, FakeNetwork
from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.pair_averager import PairBuffer, PairExchange
from wingbeat.methods.model_averaging.pair_machine import WINDOW, Kind, PairMachine
from wingbeat.transport.detector import RECONNECT_S

NUMEL = 40 * WINDOW
"""Elements; 16 a part, so not all parts are under way at once."""


class Play:
    """Some workers, whose threads are a test's steps.

    Args:
        workers: how many.
        seed: of the models, of whom they ask, and of the command of messages.
        wire: as for `PairBuffer`.
        reach: as for `FakeNetwork`.
    """

    def __init__(
        self, workers: int, seed: int = 0, wire: torch.dtype | None = None, reach: int = 1
    ) -> None:
        self.network, self.chance = FakeNetwork(workers, reach), Random(seed)
        self.time = 0.0
        random = torch.Generator().manual_seed(seed)
        self.models = [torch.randn(NUMEL, generator=random) for _ in range(workers)]
        self.exchanges = []
        for rank, model in enumerate(self.models):
            pair_buffer = PairBuffer(model, wire, chunk_bytes=64)
            machine = PairMachine(rank, workers, len(pair_buffer.spans), seed)
            self.exchanges.append(
                PairExchange(
                    machine, self.network.boxes[rank], pair_buffer, timeout=5.0,
                    clock=lambda: self.time,
                )
            )  # fmt: skip

    def step(self, rank: int) -> bool:
        """Let a worker's thread take a message in, one of any flow; whether there was one."""
        mail = self.network.boxes[rank].mail
        if not mail:
            self.exchanges[rank].step(None)
            return False
        flows = {(message.peer, message.interface): message for message in reversed(mail)}
        message = flows[self.chance.choice(sorted(flows))]
        mail.remove(message)
        self.exchanges[rank].step(message)
        return True

    def end(self, rank: int) -> None:
        """End a worker's step, which waits for nothing more."""
        ended = self.exchanges[rank].end()
        self.exchanges[rank].step(None)
        ended.result(0)

    def run(self, ranks: list[int] | None = None, most: int = 10**6) -> None:
        """Go on until nobody says anything, or for so many steps."""
        ranks = list(range(len(self.models))) if ranks is None else ranks
        quiet = 0
        while quiet < 2 * len(ranks) and most:
            self.chance.shuffle(ranks)
            for rank in ranks:
                quiet = 0 if self.step(rank) else quiet + 1
                most -= 1


@pytest.mark.parametrize("reach", [1, 3])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_models_are_averaged_in_pairs_over_any_interfaces(
    wire: torch.dtype | None, reach: int
) -> None:
    play = Play(5, seed=3, wire=wire, reach=reach)
    total = torch.stack(play.models).double().sum(0)
    for _ in range(8):
        for exchange in play.exchanges:
            exchange.begin()
        play.run()
        for rank in range(5):
            play.end(rank)
    assert [p.machine.averages for p in play.exchanges][::2] == [8] * 3
    models = torch.stack(play.models).double()
    assert torch.allclose(models.sum(0), total, rtol=0, atol=1e-4)
    assert float((models - models.mean(0)).abs().max()) < 0.5


def test_average_uses_all_interfaces_and_each_response_returns_on_its_own() -> None:
    play = Play(2, reach=3)
    over: dict[int, set[int]] = {Kind.CHUNK: set(), Kind.AVERAGE: set()}
    for box in play.network.boxes:
        post = box.post

        def noted(peer, kind, payload=b"", *, ids, interface=None, post=post):
            if kind in over:
                over[kind].add((ids[1], interface))
            post(peer, kind, payload, ids=ids, interface=interface)

        box.post = noted
    for exchange in play.exchanges:
        exchange.begin()
    play.run()
    assert over[Kind.CHUNK] == over[Kind.AVERAGE]
    assert {interface for _, interface in over[Kind.AVERAGE]} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(25))
def test_death_at_any_moment_leaves_models_whole(seed: int) -> None:
    """Its partner's model is its own or an average, and never a part of each."""
    play = Play(4, seed)
    before = [model.clone() for model in play.models]
    for exchange in play.exchanges:
        exchange.begin()
    dead = seed % 4
    play.run(most=5 + 9 * seed)
    alive = [rank for rank in range(4) if rank != dead]
    play.network.kill(dead)
    play.run(alive)
    for rank in alive:
        play.end(rank)
        assert play.network.boxes[rank].dropped == [dead] * ((rank - dead) % 2)
    # Whatever was averaged with whom: all elements by the same weights.
    basis = torch.stack(before, dim=1).double()
    for rank in alive:
        model = play.models[rank].double()
        weights = torch.linalg.lstsq(basis, model[:, None]).solution
        assert torch.allclose((basis @ weights)[:, 0], model, atol=1e-5)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)


def test_error_without_partners_names_those_lost() -> None:
    play = Play(4)
    for exchange in play.exchanges:
        exchange.begin()
    for dead in (1, 3):
        play.network.kill(dead)
    ended = play.exchanges[0].end()
    with pytest.raises(PeerError, match="no worker is left"):
        play.exchanges[0].run()
    with pytest.raises(PeerError, match=r"rank 0: no worker is left .*: rank"):
        ended.result(0)
    with pytest.raises(
        PeerError, match="rank 1 gave no sign for 10 s, rank 3 gave no sign for 10 s; start"
    ):
        play.exchanges[0].begin()


def test_worker_without_connections_is_lost_though_nobody_waits_for_it() -> None:
    """But not at once: a process that lives makes its connection anew."""
    play = Play(4, seed=1)
    for rank in (0, 2):
        play.network.boxes[rank].cut[1] = 0.9 * RECONNECT_S
    play.time = 1.0
    play.run()
    assert not any(exchange.machine.lost for exchange in play.exchanges)
    play.network.boxes[0].cut[1] = play.network.boxes[2].cut[1] = 1.1 * RECONNECT_S
    play.exchanges[2].begin()
    play.time = 2.0
    play.run([0, 2])
    assert [play.exchanges[rank].machine.lost for rank in (0, 2)] == [{1}, {1}]
    assert play.network.boxes[0].dropped == [1]
    assert play.exchanges[2].machine.waiting_for() == (3,), "another one is asked"


def test_training_continues_when_all_others_have_left() -> None:
    play = Play(2)
    play.network.boxes[0].left = frozenset({1})
    play.run()
    play.exchanges[0].begin()
    play.end(0)
    assert play.exchanges[0].machine.skipped == 1


def test_message_before_a_goodbye_is_handled() -> None:
    play = Play(2)
    box = play.network.boxes[1]
    box.left = frozenset({0})
    box.late.append(message(Kind.FAILED, ids=(0, 0, 0, 0)))
    with pytest.raises(PeerError, match=r"no worker is left .* rank 0 has failed"):
        play.exchanges[1].step(None)
    assert play.exchanges[1].machine.lost == {0}


def test_unreachable_worker_is_lost_after_its_last_messages() -> None:
    play = Play(2)
    play.exchanges[1].begin()
    play.network.boxes[1].lost[0] = "gave no sign for 10 s"
    play.network.boxes[1].late.append(message(Kind.REQUEST))
    with pytest.raises(PeerError, match="no worker is left"):
        play.exchanges[1].step(None)  # its turn cannot be said to it
    assert play.exchanges[1].machine.lost == {0}
    assert play.exchanges[1].machine.served is None


def test_progress_extends_a_wait() -> None:
    play = Play(2)
    exchange = play.exchanges[1]
    exchange.begin()
    exchange.step(message(Kind.REQUEST))
    ended = exchange.end()
    play.time = 4.0
    exchange.step(message(Kind.CHUNK, bytes(64)))
    for play.time in (53.99, 54.51):
        assert not ended.done()
        exchange.step(None)
    with pytest.raises(
        PeerError, match=r"rank 1: rank 0 is alive, but an average did not come .* 50"
    ):
        ended.result(0)


def test_missing_average_is_logged_and_raises_after_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Play(2)
    exchange = play.exchanges[0]
    exchange.begin()
    play.run()  # rank 1 does not begin
    ended = exchange.end()
    for play.time in (49.99, 50.51):
        assert not ended.done()
        exchange.step(None)
    with pytest.raises(
        PeerError, match=r"rank 0: rank 1 is alive, but an average did not come .* 50"
    ):
        ended.result(0)
    assert "rank 0: has waited for an average of rank 1 for 50 s; it is alive" in caplog.text


def test_synchronization_cancelled_after_it_completed_completes_again_alone() -> None:
    """An interrupt may come when the thread has just completed it."""
    play = Play(2)
    waits = [exchange.synchronize() for exchange in play.exchanges]
    play.run()
    assert all(wait.done() for wait in waits)
    exchange = play.exchanges[1]
    exchange.cancel(waits[1])
    again = exchange.synchronize()
    exchange.step(None)
    again.result(0)


def test_cancelled_synchronization_is_repeated_with_its_number() -> None:
    play = Play(2)
    exchange = play.exchanges[1]
    cut = exchange.synchronize()
    play.run()
    exchange.cancel(cut)
    exchange.step(None)
    assert cut.cancelled()
    waits = [each.synchronize() for each in play.exchanges]
    play.run()
    assert all(wait.done() for wait in waits)


def test_awaited_worker_receives_keepalives() -> None:
    play = Play(4, seed=1)
    for rank in (0, 2):
        play.exchanges[rank].begin()
        play.exchanges[rank].machine.end()
    play.run()
    for _ in range(3):
        play.time += 1.0
        play.exchanges[0].step(None)
    asked = play.exchanges[0].machine.waiting_for()[0]
    assert [m.kind for m in play.network.boxes[asked].mail if m.peer == 0] == [Kind.KEEPALIVE] * 3


def test_queued_workers_receive_keepalives() -> None:
    play = Play(3)
    for exchange in play.exchanges:
        exchange.begin()
    for rank in (0, 2, 1, 1):
        play.step(rank)
    server, first = play.exchanges[1], play.exchanges[1].machine.served.peer
    assert server.machine.queue == (2 - first,)
    play.network.boxes[2 - first].mail.clear()
    play.time += 1.0
    server.step(None)
    assert [m.kind for m in play.network.boxes[2 - first].mail] == [Kind.KEEPALIVE]


def message(kind: int, payload: bytes = b"", ids: tuple = (1, 0, 0, 0)) -> SimpleNamespace:
    return SimpleNamespace(
        peer=0, kind=kind, ids=ids, payload=memoryview(payload), interface=0
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        message(Kind.GRANT),
        message(99),
        message(Kind.KEEPALIVE, b"x"),
        message(Kind.CHUNK, bytes(64), ids=(2, 0, 0, 0)),
        message(Kind.CHUNK, bytes(63)),
        message(Kind.CHUNK, bytes(64), ids=(1, 10**6, 0, 0)),
        message(Kind.DONE),
    ],
    ids=["turn", "kind", "payload", "number", "short", "part", "early"],
)
def test_invalid_message_is_refused_and_changes_nothing(wrong: SimpleNamespace) -> None:
    play = Play(2)
    before = play.models[1].clone()
    exchange = play.exchanges[1]
    exchange.begin()
    exchange.step(message(Kind.REQUEST))
    with pytest.raises(PeerError, match="rank 1: rank 0 violated the protocol: "):
        exchange.step(wrong)
    assert torch.equal(play.models[1], before)


def test_failure_of_a_partner_is_logged_and_the_next_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Play(3)
    for exchange in play.exchanges:
        exchange.begin()
    for rank in (0, 2, 1, 1):
        play.step(rank)
    first = play.exchanges[1].machine.served.peer
    box: FakeMailbox = play.network.boxes[first]
    box.post(1, Kind.FAILED, ids=(0, 0, 0, 0))
    box.mail.clear()
    play.run([1, 2 - first])
    assert f"rank 1: rank {first} has failed; the others continue without it" in caplog.text
    assert play.exchanges[2 - first].machine.averages == 1
    assert play.exchanges[1].machine.lost == {first}
