"""How late contributions were, from journals of runs in virtual time."""

from __future__ import annotations

from helpers.stale import Game
from wingbeat.methods.bounded_staleness.lateness import delays
from wingbeat.methods.bounded_staleness.pace import Pace


def played(pace: Pace, kills: int = 0) -> Game:
    return Game(5, 3, pace, iterations=6, kills=kills).play()


def test_nothing_is_late_in_bsp() -> None:
    found = delays(player.lines for player in played(Pace(0, 2, 2)).living())
    assert found == {0: 6 * 3 * 2 * 3}  # iterations, workers, colayers, pieces


def test_each_contribution_counts_once_by_what_its_worker_had_applied() -> None:
    game = played(Pace(3, 2, 2))
    players = game.living()
    found = delays(player.lines for player in players)
    assert sum(found.values()) == players[0].machine.gei.counted
    assert max(found) > 0


def test_what_somebody_killed_has_sent_counts_as_well() -> None:
    game = played(Pace(2, 1, 2), kills=2)
    lines = [player.lines for player in [*game.living(), *game.dead]]
    assert game.dead
    assert 0 < sum(delays(lines).values()) <= game.living()[0].machine.gei.counted
