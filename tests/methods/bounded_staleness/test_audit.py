"""An audit finds what somebody has done wrong, in journals of a run in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from helpers.stale import Game
from wingbeat.methods.bounded_staleness.audit import audit
from wingbeat.methods.bounded_staleness.journal import Journal
from wingbeat.methods.bounded_staleness.messages import Round
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.methods.bounded_staleness.view import whole

Journals = list[list[str]]


def journals(kills: int = 0, seed: int = 3, pace: Pace | None = None) -> Journals:
    game = Game(seed, 3, pace or Pace(1, 1, 2), iterations=4, kills=kills, returns=True).play()
    return [list(player.lines) for player in [*game.living(), *game.dead]]


def test_a_run_is_counted() -> None:
    found = audit(journals())
    assert found.findings == ()
    assert found.lives == 3
    assert found.rounds > 4
    assert found.counted >= 4
    assert found.lost == found.pulls == 0


def test_lives_that_ended_early_are_no_finding() -> None:
    results = [audit(journals(kills=2, seed=seed)) for seed in range(20)]
    assert not any(found.findings for found in results)
    assert max(found.lives for found in results) > 3
    assert sum(found.pulls for found in results) > 3
    assert sum(found.lost for found in results) > 3


def test_an_unfinished_last_line_is_left_out() -> None:
    made = journals(kills=2, seed=4)
    made[-1].append('{"sent":[99,')
    assert audit(made).findings == ()


def edited(made: Journals, which: str, edit: Callable[[dict], object]) -> Journals:
    """Change the first such line of the first journal that has one."""
    for lines in made:
        for place, line in enumerate(lines):
            words = json.loads(line)
            if which in words and edit(words) is not False:
                lines[place] = json.dumps(words) + "\n" if words else "\n"
                return made
    raise AssertionError(f"no {which}")


def removed(made: Journals, which: str, index: int = 0) -> Journals:
    places = [place for place, line in enumerate(made[0]) if which in json.loads(line)]
    del made[0][places[index]]
    return made


def twice(words: dict) -> object:
    if len(words["entries"]) < 2 or words["round"] < 1:
        return False
    words["entries"][0][2] = [[0, 0], *words["entries"][0][2]]
    return None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: edited(m, "round", twice), "is another one than elsewhere"),
        (lambda m: removed(m, "round", 1), "applied round 2 after 1 rounds"),
        (lambda m: removed(m, "sent"), "counts and was not sent"),
        (lambda m: removed(m, "sent"), "it has sent"),
        (lambda m: edited(m, "sent", lambda w: w.update(sent=[77, 0])), "does not count"),
        (lambda m: edited(m, "began", lambda w: w.update(began=9)), "began iteration 9 with 0 rou"),
        (lambda m: edited(m, "settled", lambda w: w.update(digest="x")), "its replica is another"),
        (lambda m: edited(m, "settled", lambda w: w.update(settled=99)), "settled at 99 with"),
        (lambda m: edited(m, "began", lambda w: w.update(what=1) or w.pop("began")), "means noth"),
        (lambda m: [[*m[0][:-1], '{"dropped":[1,2]}\n', m[0][-1]], *m[1:]], "dropped iteration 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(change: Callable[[Journals], Journals], said: str) -> None:
    findings = audit(change(journals())).findings
    assert any(said in finding for finding in findings), findings


def everywhere(made: Journals, edit: Callable[[dict], object]) -> Journals:
    return [
        [json.dumps(edit(json.loads(line)) or json.loads(line)) + "\n" for line in lines]
        for lines in made
    ]


def test_what_all_have_counted_twice_or_too_late_is_found() -> None:
    def again(words: dict) -> dict:
        if words.get("round") == 4:
            words["entries"].append([0, 0, [[0, 0]]])
        return words

    findings = audit(everywhere(journals(), again)).findings
    assert any("iteration 0 of worker 0, colayer 0, piece 0 counts 2 times" in f for f in findings)
    assert any("is in round 4, and at most 2 late are allowed" in f for f in findings)


def test_an_iteration_that_was_entered_and_had_no_batch_is_no_finding() -> None:
    made = journals()
    last = made[0].pop()
    assert "settled" in last
    at = max(json.loads(line).get("began", 0) for line in made[0]) + 1
    made[0] += [f'{{"began":{at}}}\n', last, f'{{"began":{at + 2}}}\n', last]
    assert audit(made).findings == ()
    made[0].insert(-3, f'{{"began":{at + 1}}}\n')  # but one that another follows had one
    assert any("it has sent 0 colayers" in line for line in audit(made).findings)


def test_who_runs_further_ahead_of_the_sums_than_is_in_flight_is_found() -> None:
    made = journals(pace=Pace(18, 1, 2))
    assert audit(made).findings == ()
    found = audit(edited(made, "began", lambda words: words.update(began=4)))
    assert any("began iteration 4 with 0 rounds" in line for line in found.findings)


def changed(first: int, sent: int) -> list[str]:
    """Return the journal of a worker alone, which has one more colayer from ``first`` on."""
    lines: list[str] = []
    journal = Journal(lines.append, 0, 0, 1, Pace(2, 1, 1))
    for number, colayers in ((0, 1), (1, sent)):
        if number:
            journal.settled(1, "bits")
            journal.rebundled(Pace(2, 2, 2), first)
        journal.began(number)
        for z in range(colayers):
            journal.sent(number, z)
        entries = ((number, 0),)
        journal.applied([Round(z, 0, number, entries, (0,), whole(1)) for z in range(colayers)])
    journal.settled(2, "bits")
    return lines


def test_colayers_that_change_are_those_of_their_iterations() -> None:
    assert not audit([changed(1, 2)]).findings
    assert "of iteration 1 it has sent 1 colayers" in str(audit([changed(1, 1)]).findings)
    assert "other colayers from 2 on, after 1 rounds" in str(audit([changed(2, 2)]).findings)


def test_who_goes_on_without_having_settled_has_not_computed_what_it_had_begun() -> None:
    lines = changed(1, 2)
    begun = lines.index('{"began":1}\n')
    assert "of iteration 3 it has sent 0" in str(
        audit([[*lines[:begun], '{"began":3}\n', *lines[begun:]]]).findings
    )
    went = ['{"began":3}\n', '{"went_on":3}\n']
    assert not audit([[*lines[:begun], *went, *lines[begun:]]]).findings
