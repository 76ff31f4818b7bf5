"""What carries averages between two workers, step by step in one thread: deaths, nonsense."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from helpers.pairs import Box, Office
from wingbeat.errors import PeerError
from wingbeat.exchanges.halves import Halves
from wingbeat.exchanges.pairing import Pairing
from wingbeat.pairs.protocol import Kind
from wingbeat.pairs.worker import WINDOW, Worker
from wingbeat.transport.messages.mailbox import RECONNECT_S

NUMEL = 40 * WINDOW
"""Elements; 16 a part, so not all parts are under way at once."""


class Play:
    """Some workers, whose threads are a test's steps.

    Args:
        workers: how many.
        seed: of the models, of whom they ask, and of the order of messages.
        wire: as for `Halves`.
        reach: as for `Office`.
    """

    def __init__(
        self, workers: int, seed: int = 0, wire: torch.dtype | None = None, reach: int = 1
    ) -> None:
        self.office, self.chance = Office(workers, reach), Random(seed)
        self.time = 0.0
        random = torch.Generator().manual_seed(seed)
        self.models = [torch.randn(NUMEL, generator=random) for _ in range(workers)]
        self.pairings = []
        for rank, model in enumerate(self.models):
            halves = Halves(model, wire, piece_bytes=64)
            machine = Worker(rank, workers, len(halves.spans), seed)
            self.pairings.append(
                Pairing(
                    machine, self.office.boxes[rank], halves, me=f"rank {rank}", timeout=5.0,
                    clock=lambda: self.time,
                )
            )  # fmt: skip

    def step(self, rank: int) -> bool:
        """Let a worker's thread take a message in, one of any flow; whether there was one."""
        mail = self.office.boxes[rank].mail
        if not mail:
            self.pairings[rank].step(None)
            return False
        flows = {(message.peer, message.route.interface): message for message in reversed(mail)}
        message = flows[self.chance.choice(sorted(flows))]
        mail.remove(message)
        self.pairings[rank].step(message)
        return True

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
def test_models_are_averaged_two_at_a_time_over_any_interfaces(
    wire: torch.dtype | None, reach: int
) -> None:
    play = Play(5, seed=3, wire=wire, reach=reach)
    total = torch.stack(play.models).double().sum(0)
    for _ in range(8):
        for pairing in play.pairings:
            pairing.begin()
        play.run()
        for pairing in play.pairings:
            pairing.end()
    assert [p.machine.averages for p in play.pairings][::2] == [8] * 3
    models = torch.stack(play.models).double()
    assert torch.allclose(models.sum(0), total, rtol=0, atol=1e-4)
    assert float((models - models.mean(0)).abs().max()) < 0.5


def test_all_interfaces_are_used_and_each_part_comes_back_where_it_went() -> None:
    play = Play(2, reach=3)
    over: dict[int, set[int]] = {Kind.PIECE: set(), Kind.MEAN: set()}
    for box in play.office.boxes:
        post = box.post

        def noted(peer, kind, payload=b"", *, ids, interface=None, post=post):
            if kind in over:
                over[kind].add((ids[1], interface))
            post(peer, kind, payload, ids=ids, interface=interface)

        box.post = noted
    for pairing in play.pairings:
        pairing.begin()
    play.run()
    assert over[Kind.PIECE] == over[Kind.MEAN]
    assert {interface for _, interface in over[Kind.MEAN]} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(25))
def test_a_worker_that_dies_at_any_moment_leaves_models_whole(seed: int) -> None:
    """Its partner's model is its own or an average, and never a part of each."""
    play = Play(4, seed)
    before = [model.clone() for model in play.models]
    for pairing in play.pairings:
        pairing.begin()
    dead = seed % 4
    play.run(most=5 + 9 * seed)
    alive = [rank for rank in range(4) if rank != dead]
    play.office.kill(dead)
    play.run(alive)
    for rank in alive:
        play.pairings[rank].end()
        assert play.office.boxes[rank].dropped == [dead] * ((rank - dead) % 2)
    # Whatever was averaged with whom: all elements by the same weights.
    basis = torch.stack(before, dim=1).double()
    for rank in alive:
        model = play.models[rank].double()
        weights = torch.linalg.lstsq(basis, model[:, None]).solution
        assert torch.allclose((basis @ weights)[:, 0], model, atol=1e-5)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)


def test_who_has_nobody_left_says_whom_it_has_lost() -> None:
    play = Play(4)
    for pairing in play.pairings:
        pairing.begin()
    for dead in (1, 3):
        play.office.kill(dead)
    play.run([0, 2])
    with pytest.raises(PeerError, match="rank 0: nobody is left to average parameters with: rank"):
        play.pairings[0].end()
    with pytest.raises(
        PeerError, match="rank 1 gave no sign for 10 s, rank 3 gave no sign for 10 s; start"
    ):
        play.pairings[0].begin()


def test_who_is_not_connected_any_more_is_gone_though_nobody_waits_for_it() -> None:
    """But not at once: a process that lives makes its connection anew."""
    play = Play(4, seed=1)
    for rank in (0, 2):
        play.office.boxes[rank].cut[1] = 0.9 * RECONNECT_S
    play.time = 1.0
    play.run()
    assert not any(pairing.machine.lost for pairing in play.pairings)
    play.office.boxes[0].cut[1] = play.office.boxes[2].cut[1] = 1.1 * RECONNECT_S
    play.time = 1.2
    play.run([0])
    assert not play.pairings[0].machine.lost, "it has looked just now"
    play.pairings[2].begin()
    play.time = 2.0
    play.run([0, 2])
    assert [play.pairings[rank].machine.lost for rank in (0, 2)] == [{1}, {1}]
    assert play.office.boxes[0].dropped == [1]
    assert play.pairings[2].machine.behind() == (3,), "another one is asked"


def test_who_trains_on_when_all_others_have_left_is_not_stopped() -> None:
    play = Play(2)
    play.office.boxes[0].left = frozenset({1})
    play.run()
    play.pairings[0].begin()
    play.pairings[0].end()
    assert play.pairings[0].machine.alone == 1


def test_last_words_that_came_with_the_farewell_count() -> None:
    play = Play(2)
    box = play.office.boxes[1]
    box.left = frozenset({0})
    box.late.append(message(Kind.FAILED, ids=(0, 0, 0, 0)))
    play.pairings[1].step(None)
    assert play.pairings[1].machine.lost == {0}


def test_who_cannot_be_sent_to_is_gone_after_its_last_words() -> None:
    play = Play(2)
    play.pairings[1].begin()
    play.office.boxes[1].lost[0] = "gave no sign for 10 s"
    play.office.boxes[1].late.append(message(Kind.ASK))
    play.pairings[1].step(None)  # its turn cannot be said to it
    assert play.pairings[1].machine.lost == {0}
    assert play.pairings[1].machine.served is None


def test_a_wait_goes_on_while_there_is_progress() -> None:
    play = Play(2)
    pairing = play.pairings[1]
    pairing.begin()
    pairing.step(message(Kind.ASK))
    play.time = 4.0
    pairing.step(message(Kind.PIECE, bytes(64)))
    ticks = iter([0.0, 0.0, 53.99, 53.99, 53.99, 54.01])
    pairing._clock = lambda: next(ticks)
    pairing._changed.wait = lambda seconds: True  # type: ignore[method-assign]
    with pytest.raises(PeerError, match=r"rank 1: rank 0 is alive, but an average did not .* 50"):
        pairing.end()


def test_an_average_that_does_not_come_is_logged_has_a_deadline_and_a_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Play(2)
    pairing = play.pairings[0]
    pairing.begin()
    play.run()  # rank 1 does not begin
    ticks = iter([0.0, 0.0, 49.99, 49.99, 49.99, 50.01])
    pairing._clock = lambda: next(ticks)
    pairing._changed.wait = lambda seconds: True  # type: ignore[method-assign]
    with pytest.raises(PeerError, match=r"rank 0: rank 1 is alive, but an average did not .* 50"):
        pairing.end()
    assert "rank 0: has waited for an average of rank 1 for 50 s; it lives" in caplog.text


def test_who_is_waited_for_is_sent_something_that_has_to_arrive() -> None:
    play = Play(4, seed=1)
    for rank in (0, 2):
        play.pairings[rank].begin()
        play.pairings[rank].machine.shut()
    play.run()
    for _ in range(3):
        play.time += 1.0
        play.pairings[0].step(None)
    asked = play.pairings[0].machine.behind()[0]
    assert [m.kind for m in play.office.boxes[asked].mail if m.peer == 0] == [Kind.ALIVE] * 3


def test_those_in_the_queue_hear_that_it_is_anothers_turn() -> None:
    play = Play(3)
    for pairing in play.pairings:
        pairing.begin()
    for rank in (0, 2, 1, 1):
        play.step(rank)
    server, first = play.pairings[1], play.pairings[1].machine.served.peer
    assert server.machine.queue == (2 - first,)
    play.office.boxes[2 - first].mail.clear()
    play.time += 1.0
    server.step(None)
    assert [m.kind for m in play.office.boxes[2 - first].mail] == [Kind.ALIVE]


def message(kind: int, payload: bytes = b"", ids: tuple = (1, 0, 0, 0)) -> SimpleNamespace:
    route = SimpleNamespace(interface=0)
    return SimpleNamespace(
        peer=0, kind=kind, ids=ids, payload=memoryview(payload), route=route
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        message(Kind.GRANT),
        message(99),
        message(Kind.ALIVE, b"x"),
        message(Kind.PIECE, bytes(64), ids=(2, 0, 0, 0)),
        message(Kind.PIECE, bytes(63)),
        message(Kind.PIECE, bytes(64), ids=(1, 10**6, 0, 0)),
        message(Kind.DONE),
    ],
    ids=["turn", "kind", "payload", "number", "short", "part", "early"],
)
def test_nonsense_is_refused_by_name_and_changes_nothing(wrong: SimpleNamespace) -> None:
    play = Play(2)
    before = play.models[1].clone()
    pairing = play.pairings[1]
    pairing.begin()
    pairing.step(message(Kind.ASK))
    with pytest.raises(PeerError, match="rank 1: rank 0 sent what it never sends: "):
        pairing.step(wrong)
    assert torch.equal(play.models[1], before)


def test_a_failure_elsewhere_is_said_and_the_next_has_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    play = Play(3)
    for pairing in play.pairings:
        pairing.begin()
    for rank in (0, 2, 1, 1):
        play.step(rank)
    first = play.pairings[1].machine.served.peer
    box: Box = play.office.boxes[first]
    box.post(1, Kind.FAILED, ids=(0, 0, 0, 0))
    box.mail.clear()
    play.run([1, 2 - first])
    assert f"rank 1: rank {first} has failed; the others go on without it" in caplog.text
    assert play.pairings[2 - first].machine.averages == 1
    assert play.pairings[1].machine.lost == {first}
