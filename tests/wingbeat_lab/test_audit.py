"""Audits of correct and of edited journals of simulated runs."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from helpers.staleness_simulation import Simulation
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.journal import Journal
from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.transport.membership import initial_view
from wingbeat_lab.audit import audit

Journals = list[list[str]]


def journals(kills: int = 0, seed: int = 3, bound: StalenessBound | None = None) -> Journals:
    simulation = Simulation(
        seed, 3, bound or StalenessBound(1, 1, 2), iterations=4, kills=kills, returns=True
    ).run()
    return [list(worker.lines) for worker in [*simulation.alive_workers(), *simulation.dead]]


def test_audit_of_run_counts_rounds_and_contributions() -> None:
    found = audit(journals())
    assert found.findings == ()
    assert found.incarnations == 3
    assert found.rounds > 4
    assert found.counted >= 4
    assert found.lost == found.pulls == 0


def test_audit_of_killed_workers_has_no_findings() -> None:
    results = [audit(journals(kills=2, seed=seed)) for seed in range(20)]
    assert not any(found.findings for found in results)
    assert max(found.incarnations for found in results) > 3
    assert sum(found.pulls for found in results) > 3
    assert sum(found.lost for found in results) > 3


def test_audit_ignores_unfinished_last_line() -> None:
    made = journals(kills=2, seed=4)
    made[-1].append('{"sent":[99,')
    assert audit(made).findings == ()


def edited(made: Journals, which: str, edit: Callable[[dict], object]) -> Journals:
    """Edit the first line of this kind in the first journal that has one."""
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
        (lambda m: edited(m, "round", twice), "differs from that of other workers"),
        (lambda m: removed(m, "round", 1), "applied round 2 after 1 rounds"),
        (lambda m: removed(m, "sent"), "is counted and was not sent"),
        (lambda m: removed(m, "sent"), "sent 1 colayers of iteration"),
        (lambda m: edited(m, "sent", lambda w: w.update(sent=[77, 0])), "was sent and not counted"),
        (lambda m: edited(m, "began", lambda w: w.update(began=9)), "began iteration 9 with 0 rou"),
        (lambda m: edited(m, "drained", lambda w: w.update(digest="x")), "its replica differs"),
        (lambda m: edited(m, "drained", lambda w: w.update(drained=99)), "drained at 99 with"),
        (lambda m: edited(m, "began", lambda w: w.update(what=1) or w.pop("began")), "unknown"),
        (lambda m: [[*m[0][:-1], '{"dropped":[1,2]}\n', m[0][-1]], *m[1:]], "dropped iteration 1"),
    ],
)  # fmt: skip
def test_audit_of_edited_journal_reports_finding(
    change: Callable[[Journals], Journals], said: str
) -> None:
    findings = audit(change(journals())).findings
    assert any(said in finding for finding in findings), findings


def everywhere(made: Journals, edit: Callable[[dict], object]) -> Journals:
    return [
        [json.dumps(edit(json.loads(line)) or json.loads(line)) + "\n" for line in lines]
        for lines in made
    ]


def test_audit_reports_duplicate_and_late_contributions() -> None:
    def again(words: dict) -> dict:
        if words.get("round") == 4:
            words["entries"].append([0, 0, [[0, 0]]])
        return words

    findings = audit(everywhere(journals(), again)).findings
    assert any("iteration 0 of worker 0, colayer 0, piece 0 counts 2 times" in f for f in findings)
    assert any("is in round 4; allowed: at most 2 rounds late" in f for f in findings)


def test_audit_of_iteration_without_batch_has_no_findings() -> None:
    made = journals()
    last = made[0].pop()
    assert "drained" in last
    at = max(json.loads(line).get("began", 0) for line in made[0]) + 1
    made[0] += [f'{{"began":{at}}}\n', last, f'{{"began":{at + 2}}}\n', last]
    assert audit(made).findings == ()
    made[0].insert(
        -3, f'{{"began":{at + 1}}}\n'
    )  # an iteration that is followed by another had a batch
    assert any("sent 0 colayers of iteration" in line for line in audit(made).findings)


def test_audit_reports_iteration_beyond_in_flight() -> None:
    made = journals(bound=StalenessBound(18, 1, 2))
    assert audit(made).findings == ()
    found = audit(edited(made, "began", lambda words: words.update(began=4)))
    assert any("began iteration 4 with 0 rounds" in line for line in found.findings)


def changed(first: int, sent: int) -> list[str]:
    """Return the journal of a single worker with one more colayer from ``first`` on."""
    lines: list[str] = []
    journal = Journal(lines.append, 0, 0, 1, StalenessBound(2, 1, 1))
    for number, colayers in ((0, 1), (1, sent)):
        if number:
            journal.drained(1, "bits")
            journal.changed_colayers(StalenessBound(2, 2, 2), first)
        journal.began(number)
        for z in range(colayers):
            journal.sent(number, z)
        entries = ((number, 0),)
        journal.applied(
            [PieceSum(z, 0, number, entries, (0,), initial_view(1)) for z in range(colayers)]
        )
    journal.drained(2, "bits")
    return lines


def test_audit_uses_colayers_of_each_iteration() -> None:
    assert not audit([changed(1, 2)]).findings
    assert "sent 1 colayers of iteration 1" in str(audit([changed(1, 1)]).findings)
    assert "changed colayers from round 2 on, after 1 rounds" in str(
        audit([changed(2, 2)]).findings
    )


def test_audit_of_resume_without_drain_discards_begun_iteration() -> None:
    lines = changed(1, 2)
    begun = lines.index('{"began":1}\n')
    assert "sent 0 colayers of iteration 3" in str(
        audit([[*lines[:begun], '{"began":3}\n', *lines[begun:]]]).findings
    )
    went = ['{"began":3}\n', '{"resumed":3}\n']
    assert not audit([[*lines[:begun], *went, *lines[begun:]]]).findings
