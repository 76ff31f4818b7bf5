"""Checks the journals of a whole run, of all lives of all workers, against each other. Pure.

What must hold: all that live to the end have applied the same rounds, one after the other; each
contribution that was sent counts once, on all, or never if its sender died; what was not sent was
dropped by the rule; no contribution is older than the bound, and no iteration began before the sums
that it had to see; and whoever has settled with the same rounds has the same bits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from wingbeat.errors import UsageError

Key = tuple[int, int, int, int]
"""Iteration, worker, colayer and piece of a contribution."""

Rounds = dict[int, dict[tuple[int, int], list[tuple[int, int]]]]
"""By number, colayer and piece: the contributions, each by iteration and worker."""


@dataclass
class Life:
    """What the journal of one life says.

    ``begun_at`` by iteration: the rounds it had applied; ``bundles``: from which iteration on there
    were other colayers, how many, p and mode.
    """

    rank: int
    life: int
    workers: int
    colayers: int
    s: int | None
    p: int
    mode: str
    in_flight: int | None = None
    bundles: list[tuple[int, int, int, str]] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    begun_at: dict[int, int] = field(default_factory=dict)
    sent: set[tuple[int, int]] = field(default_factory=set)
    dropped: dict[int, int] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=dict)
    at: int = 0
    pulls: int = 0
    whole: bool = False
    findings: list[str] = field(default_factory=list)

    def of(self, iteration: int) -> tuple[int, int, str]:
        """Return the colayers, p and mode of an iteration."""
        now = self.colayers, self.p, self.mode
        for first, colayers, p, mode in self.bundles:
            if iteration >= first:
                now = colayers, p, mode
        return now

    def entered(self) -> None:
        """Forget the last iteration that was begun if nothing of it was sent."""
        if self.began and not any(iteration == self.began[-1] for iteration, _ in self.sent):
            self.began.pop()

    def __str__(self) -> str:
        return f"worker {self.rank}, life {self.life}"


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit has found.

    Attributes:
        findings: what does not hold, one line each; empty if all does.
        lives: how many journals there were.
        rounds: how many rounds were applied.
        counted: contributions, by iteration and worker, that are in the parameters in part at
            least.
        dropped: iterations that the rule has ended.
        lost: colayers that were sent by those who died, and are in no parameters as a whole.
        pulls: how often parameters were pulled.
    """

    findings: tuple[str, ...]
    lives: int
    rounds: int
    counted: int
    dropped: int
    lost: int
    pulls: int


def audit(journals: Iterable[Iterable[str]]) -> Audit:
    """Check the journals of a run.

    Args:
        journals: the lines of each life's.
    """
    lives = [read(lines) for lines in journals]
    findings = [f"{life}: {finding}" for life in lives for finding in life.findings]
    rounds, others = _rounds(lives)
    findings += others
    counted: Counter[Key] = Counter(
        (iteration, worker, colayer, piece)
        for entries in rounds.values()
        for (colayer, piece), found in entries.items()
        for iteration, worker in found
    )
    findings += [f"{_named(key)} counts {n} times" for key, n in counted.items() if n > 1]
    findings += _strangers(lives, counted)
    lost = 0
    for life in lives:
        missing = _missing(life, counted)
        if life.whole:
            findings += [f"{life}: {_named(key)} was sent and does not count" for key in missing]
        lost += len({key[:3] for key in missing})
        findings += [f"{life}: {finding}" for finding in _drops(life)]
    findings += _ages(lives, rounds)
    findings += _digests(lives)
    return Audit(
        tuple(findings),
        len(lives),
        len(rounds),
        len({key[:2] for key in counted}),
        sum(len(life.dropped) for life in lives),
        lost,
        sum(life.pulls for life in lives),
    )


def _rounds(lives: Sequence[Life]) -> tuple[Rounds, list[str]]:
    """Return the rounds of a run, and who that lived to its end has applied others.

    What the dead alone had applied was summed anew by the others; or they have pulled it, and then
    nobody else has written it down.
    """
    rounds: Rounds = {}
    findings = []
    for life in sorted(lives, key=lambda life: (not life.whole, -life.at)):
        for number, entries in life.rounds.items():
            if rounds.setdefault(number, entries) != entries and life.whole:
                findings.append(f"{life}: round {number} is another one than elsewhere")
    last = max((life.at for life in lives if life.whole), default=len(rounds))
    return {number: rounds[number] for number in sorted(rounds) if number < last}, findings


def _named(key: Key) -> str:
    iteration, worker, colayer, piece = key
    return f"iteration {iteration} of worker {worker}, colayer {colayer}, piece {piece}"


def read(lines: Iterable[str]) -> Life:
    """Read one journal; a last line that was not finished is left out.

    Raises:
        UsageError: it is no journal.
    """
    number = 0
    try:
        words = _words(lines)
        life = Life(**next(words))
        for number, word in enumerate(words, 2):  # noqa: B007
            life.whole = "settled" in word
            if not _trained(life, word):
                _applied(life, word)
    except (ValueError, TypeError, StopIteration, RecursionError) as err:
        why = str(err) or "it is empty"
        raise UsageError(f"no journal: behind line {number}: {why:.80}") from None
    return life


def _trained(life: Life, word: dict[str, Any]) -> bool:
    """Read what training did; return whether it is that."""
    match word:
        case {"began": iteration}:
            life.began.append(iteration)
            life.begun_at[iteration] = life.at
            bounds = (bound for bound in (life.s, life.in_flight) if bound is not None)
            if life.at < iteration - min(bounds, default=iteration):
                life.findings.append(f"began iteration {iteration} with {life.at} rounds")
        case {"sent": [iteration, colayer]}:
            life.sent.add((iteration, colayer))
        case {"dropped": [iteration, colayers]}:
            life.dropped[iteration] = colayers
        case {"went_on": _}:
            life.entered()
        case {"first": first, "colayers": colayers, "p": p, "mode": mode}:
            if first != life.at:
                life.findings.append(f"has other colayers from {first} on, after {life.at} rounds")
            life.bundles.append((first, colayers, p, mode))
        case _:
            return False
    return True


def _applied(life: Life, word: dict[str, Any]) -> None:
    """Read what was put into the parameters."""
    match word:
        case {"pulled": applied}:
            life.at, life.pulls = applied, life.pulls + 1
        case {"round": number, "entries": entries}:
            if number != life.at:
                life.findings.append(f"applied round {number} after {life.at} rounds")
            life.at = number + 1
            life.rounds[number] = {(z, q): [(t, w) for t, w in all_] for z, q, all_ in entries}
        case {"settled": rounds, "digest": digest}:
            if digest is not None:
                life.digests[rounds] = digest
            life.entered()  # and then no batch was left
            if rounds != life.at:
                life.findings.append(f"settled at {rounds} with {life.at} rounds")
        case _:
            life.findings.append(f"says {word!s:.60}, which means nothing")


def _words(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.endswith("\n"):
            yield json.loads(line)


def _strangers(lives: Sequence[Life], counted: Iterable[Key]) -> Iterator[str]:
    """Yield what counts and was never sent."""
    sent = {(t, life.rank, z) for life in lives for t, z in life.sent}
    # Whoever is killed may have sent more than it could write down.
    killed = {life.rank for life in lives if not life.whole}
    for key in counted:
        if key[:3] not in sent and key[1] not in killed:
            yield f"{_named(key)} counts and was not sent"


def _missing(life: Life, counted: Counter[Key]) -> list[Key]:
    keys = ((t, life.rank, z, q) for t, z in sorted(life.sent) for q in range(life.workers))
    return [key for key in keys if not counted[key]]


def _drops(life: Life) -> Iterator[str]:
    """Yield what was neither sent nor dropped by the rule."""
    for iteration in life.began if life.whole else ():
        sent = sum(begun == iteration for begun, _ in life.sent)
        if sent != life.dropped.get(iteration, life.of(iteration)[0]):
            yield f"of iteration {iteration} it has sent {sent} colayers"
    for iteration, sent in life.dropped.items():
        _, p, mode = life.of(iteration)
        if sent >= p or mode != "PGE":
            yield f"dropped iteration {iteration}, of which it had sent {sent} colayers"


def _ages(lives: Sequence[Life], rounds: Rounds) -> Iterator[str]:
    s, mode = lives[0].s, lives[0].mode
    if s is None:
        return
    most = 0 if mode == "BSP" else s + 1
    for number, entries in rounds.items():
        for (colayer, piece), found in entries.items():
            for iteration, worker in found:
                if not 0 <= number - iteration <= most:
                    key = _named((iteration, worker, colayer, piece))
                    yield f"{key} is in round {number}, and at most {most} late are allowed"


def _digests(lives: Sequence[Life]) -> Iterator[str]:
    first: dict[int, tuple[str, Life]] = {}
    for life in lives:
        for rounds, digest in life.digests.items():
            before, other = first.setdefault(rounds, (digest, life))
            if before != digest:
                yield f"{life}: after {rounds} rounds its replica is another than that of {other}"
