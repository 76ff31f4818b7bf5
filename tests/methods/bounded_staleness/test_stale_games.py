"""Thousands of histories of bounded staleness in virtual time, each audited from its logs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from helpers.stale import Game, Player, Replica, add, audit, gradient
from wingbeat.methods.bounded_staleness.messages import Parameters, Round
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.methods.bounded_staleness.view import whole

MODES = {
    "BSP": lambda rng, k: Pace(0, k, k),
    "SSP": lambda rng, k: Pace(rng.randrange(1, 4), k, k),
    "PGE": lambda rng, k: Pace(rng.randrange(3), rng.randrange(1, k), k),
    "ASP": lambda rng, k: Pace(None, k, k),
}


def game(mode: str, seed: int, kills: int = 0, most: int = 9) -> Game:
    """A game that is as its seed says."""
    rng = random.Random(f"{mode} {seed} {kills}")
    pace = MODES[mode](rng, rng.randrange(2, 5))
    pace = dataclasses.replace(pace, in_flight=rng.choice((1, 2, 3, None)))
    assert pace.mode == mode
    return Game(
        seed, rng.randrange(2, most + 1), pace, iterations=rng.randrange(1, 8), kills=kills,
        keep=rng.choice((None, 2, 3)),
    )  # fmt: skip


def play(mode: str, seed: int, kills: int = 0, most: int = 9) -> Game:
    """Play a game, and audit it unless nobody was left who had all parameters."""
    played = game(mode, seed, kills, most).play()
    if not played.stranded:
        audit(played)
    assert not played.stranded or (played.keep is not None and (kills > 1 or played.n == 2))
    return played


@pytest.mark.parametrize("mode", MODES)
def test_contributions_count_once_everywhere_and_replicas_end_equal(mode: str) -> None:
    for seed in range(40):
        play(mode, seed)


@pytest.mark.parametrize("mode", MODES)
def test_workers_die_and_come_back(mode: str) -> None:
    for seed in range(60):
        play(mode, seed, kills=1 + seed % 4, most=6)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2250, 125))
@pytest.mark.parametrize("mode", MODES)
def test_ten_thousand_histories(mode: str, first: int) -> None:
    for seed in range(first, first + 125):
        play(mode, seed)
        play(mode, seed, kills=1 + seed % 4)


def test_two_that_ask_each_other_for_parameters_ask_somebody_else() -> None:
    play("PGE", 1180, kills=1)


def test_games_drop_pull_lose_and_bring_back() -> None:
    # Otherwise the games above would show nothing.
    played = [play("PGE", seed, kills=2, most=6) for seed in range(40)]
    players = [player for each in played for player in each.living()]
    assert sum(len(player.machine.dropped) for player in players) > 20
    assert sum(1 for p in players for _, sent in p.machine.dropped if sent) > 3
    assert sum(player.pulls for player in players) > 20
    assert sum(player.life > 0 and len(player.begun) > 0 for player in players) > 5
    assert sum(len(each.dead) for each in played) > 40


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_bsp_is_the_synchronous_result_bit_for_bit(n: int) -> None:
    pace = Pace(0, 3, 3)
    reference = Replica(n, 3)
    for iteration in range(6):
        for z in range(3):
            for q in range(n):
                grads = {(iteration, w): gradient(w, iteration, z, q) for w in range(n)}
                total = add(z, q, grads)
                reference.step((Round(z, q, iteration, (), (), whole(n), total),))
    for seed in range(5):
        played = Game(seed, n, pace, iterations=6).play()
        audit(played)
        assert {player.replica.bits() for player in played.living()} == {reference.bits()}
        assert not any(player.machine.dropped for player in played.living())


def test_a_killed_worker_holds_bsp_up_only_until_it_is_missed() -> None:
    played = Game(3, 4, Pace(0, 2, 2), iterations=8, returns=False, even=True)
    played.later(5.0, played.kill)
    audit(played.play())
    assert len(played.living()) == 3
    for player in played.living():
        assert player.begun == list(range(8))


def test_workers_that_are_alike_are_summed_together() -> None:
    # Late answers would be right as well, but each would cost a round of staleness.
    game = Game(0, 6, Pace(4, 3, 4), iterations=12, even=True)
    game.lag = 0.01
    audit(game.play())
    ages = [
        part.number - iteration
        for parts in game.living()[0].applied
        for part in parts
        for iteration, _ in part.entries
    ]
    assert sum(ages) / len(ages) < 0.5


class Paused(Game):
    """A game in which worker 2 stands still amid an iteration, while the others make 100.

    Attributes:
        waited: the most rounds that have waited at it.
        copies: of parameters that were sent to it.
    """

    def __init__(self, pace: Pace) -> None:
        self.waited = self.copies = 0
        super().__init__(0, 3, pace, iterations=150, keep=pace.keep, even=True)
        self.lag = 0.01

    def at(self, when: float, what: Callable[[], None]) -> None:
        player = getattr(what, "__self__", None)
        if isinstance(player, Player) and player.rank == 2 and 60 <= when < 360:
            when = 360.0
        super().at(when, what)

    def post(self, player: Player, to: int, message: Any) -> None:
        self.copies += isinstance(message, Parameters)
        super().post(player, to, message)

    def flush(self, player: Player) -> None:
        super().flush(player)
        if player.rank == 2:
            self.waited = max(self.waited, player.machine.waiting)


@pytest.mark.parametrize("pace", [Pace(2, 2, 3), Pace(18, 2, 3), Pace(None, 3, 3)])
def test_rounds_beyond_the_bound_are_let_go_and_pulled_once(pace: Pace) -> None:
    played = Paused(pace)
    audit(played.play())
    late = played.living()[2]
    assert late.pulls == late.machine.pulls == played.copies == 1
    assert [player.pulls for player in played.living()[:2]] == [0, 0]
    assert played.waited <= pace.keep + 2  # the others have not applied the last ones yet


@pytest.mark.parametrize("pace", [Pace(2, 3, 3), Pace(0, 3, 3)])
def test_where_the_others_wait_nothing_is_let_go(pace: Pace) -> None:
    played = Paused(pace)
    audit(played.play())
    assert not any(player.pulls for player in played.living())
    assert played.waited <= pace.keep + 1  # one is not whole yet


@pytest.mark.parametrize("mode", ["BSP", "SSP"])
def test_who_waits_for_links_lets_nothing_go(mode: str) -> None:
    for seed in range(15):
        pace = game(mode, seed).pace
        played = Game(seed, 5, pace, iterations=12, keep=pace.keep).play()
        audit(played)
        assert not any(player.pulls for player in played.living())


def test_all_go_on_together_after_they_have_settled() -> None:
    played = Game(1, 3, Pace(2, 1, 2), iterations=4).play()
    audit(played)
    at = {player.machine.settled and player.machine.at for player in played.living()}
    for player in played.living():
        player.machine.resume()
        player.machine.posts.clear()
    assert len({player.machine.at for player in played.living()}) == 1
    assert played.living()[0].machine.at > max(at)


# -- other colayers amid training ------------------------------------------------------------


MOMENTS = ("settling", "settled", "told", "decided", "changed")


def change(mode: str, seed: int, dies: str = "", kills: int = 0) -> Game:
    """Play a game in which workers bundle anew, some of them dying at that moment, and audit it."""
    rng = random.Random(f"change {mode} {seed} {dies} {kills}")
    pace = MODES[mode](rng, rng.randrange(2, 5))
    if pace.s == 0:
        pace = dataclasses.replace(pace, s=1)
    pace = dataclasses.replace(pace, in_flight=rng.choice((1, 2, 3, None)))
    played = Game(
        seed, rng.randrange(3, 6), pace, iterations=rng.randrange(8, 16), kills=kills,
        keep=rng.choice((None, 2, 3)), first=rng.randrange(1, 4), dies=dies,
    ).play()  # fmt: skip
    if not played.stranded:
        audit(played)
        assert len(set(played.digests)) <= 1, "replicas differ where colayers change"
    assert not played.stranded or played.keep is not None
    return played


def changed(played: Game) -> bool:
    return any(player.epoch for player in played.living())


@pytest.mark.parametrize("mode", ["SSP", "PGE", "ASP"])
def test_colayers_change_amid_training_and_nothing_counts_twice_or_never(mode: str) -> None:
    played = [change(mode, seed) for seed in range(30)]
    assert sum(map(changed, played)) > 20
    assert len({p.pace.colayers for each in played for p in each.living()}) == 4


@pytest.mark.parametrize("dies", MOMENTS)
@pytest.mark.parametrize("mode", ["SSP", "PGE"])
def test_a_worker_dies_around_the_change_of_colayers(mode: str, dies: str) -> None:
    played = [change(mode, seed, dies) for seed in range(30)]
    assert sum(not each.dies for each in played) > 20
    assert sum(map(changed, played)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["SSP", "PGE", "ASP"])
def test_a_thousand_changes_of_colayers(mode: str) -> None:
    for seed in range(1000, 1400):
        change(mode, seed, (*MOMENTS, "")[seed % 6], kills=seed % 4)


def test_workers_die_and_come_back_while_colayers_change() -> None:
    played = [change("PGE", seed, MOMENTS[seed % 5], kills=1 + seed % 3) for seed in range(60)]
    came = [p for each in played for p in each.living() if p.life and p.epoch and p.begun]
    assert len(came) > 5
