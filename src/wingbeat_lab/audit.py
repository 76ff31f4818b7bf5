"""Audit of a run under bounded staleness: the journals of its workers against each other.

The audit checks that all workers that run to the end have applied the same rounds in order; that
each sent contribution counts once on all workers, or never if its sender died; that only the bound
has dropped what was not sent; that no contribution is older than the bound; that no iteration began
before the sums that it needs; and that workers that drained with the same rounds hold the same
bits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wingbeat.errors import UsageError

Key = tuple[int, int, int, int]
"""Iteration, worker, colayer and piece of a contribution."""

Rounds = dict[int, dict[tuple[int, int], list[tuple[int, int]]]]
"""By round, colayer and piece: the contributions as (iteration, worker)."""


@dataclass
class JournalRecord:
    """The contents of one journal, in the order of its lines.

    ``begun_at`` has by iteration the number of rounds applied when it began, ``changes`` the first
    iteration, colayers, p and mode of each change of colayers. ``at`` rounds are applied.
    ``complete`` is whether the worker ran to the end, ``findings`` are violations in this journal.
    """

    rank: int
    incarnation: int
    workers: int
    colayers: int
    s: int | None
    p: int
    mode: str
    in_flight: int | None = None
    changes: list[tuple[int, int, int, str]] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    begun_at: dict[int, int] = field(default_factory=dict)
    sent: set[tuple[int, int]] = field(default_factory=set)
    dropped: dict[int, int] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=dict)
    at: int = 0
    pulls: int = 0
    complete: bool = False
    findings: list[str] = field(default_factory=list)

    def thresholds(self, iteration: int) -> tuple[int, int, str]:
        """Return the colayers, p and mode of an iteration."""
        current = self.colayers, self.p, self.mode
        for first, colayers, p, mode in self.changes:
            if iteration >= first:
                current = colayers, p, mode
        return current

    def discard_empty_iteration(self) -> None:
        """Discard the last iteration that began if nothing of it was sent."""
        if self.began and not any(iteration == self.began[-1] for iteration, _ in self.sent):
            self.began.pop()

    def __str__(self) -> str:
        return f"worker {self.rank}, incarnation {self.incarnation}"


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit.

    Attributes:
        findings: violations, one line each; empty if there are none.
        incarnations: number of journals.
        rounds: number of applied rounds.
        counted: contributions, by iteration and worker, that are at least partly in the parameters.
        dropped: iterations that the bound has dropped.
        lost: colayers sent by workers that died, of which no part is in the parameters.
        pulls: how often parameters were pulled.
    """

    findings: tuple[str, ...]
    incarnations: int
    rounds: int
    counted: int
    dropped: int
    lost: int
    pulls: int


def audit(journals: Iterable[Iterable[str]]) -> Audit:
    """Check the journals of a run, the lines of each incarnation, against each other."""
    records = [read_journal(lines) for lines in journals]
    findings = [f"{record}: {finding}" for record in records for finding in record.findings]
    rounds, differing = _merged_rounds(records)
    findings += differing
    counted: Counter[Key] = Counter(
        (iteration, worker, colayer, piece)
        for entries in rounds.values()
        for (colayer, piece), found in entries.items()
        for iteration, worker in found
    )
    findings += [f"{_describe(key)} counts {n} times" for key, n in counted.items() if n > 1]
    findings += _check_senders(records, counted)
    lost = 0
    for record in records:
        missing = _missing(record, counted)
        if record.complete:
            findings += [f"{record}: {_describe(key)} was sent and not counted" for key in missing]
        lost += len({key[:3] for key in missing})
        findings += [f"{record}: {finding}" for finding in _check_drops(record)]
    findings += _check_ages(records, rounds)
    findings += _check_digests(records)
    return Audit(
        tuple(findings), len(records), len(rounds), len({key[:2] for key in counted}),
        sum(len(record.dropped) for record in records), lost,
        sum(record.pulls for record in records),
    )  # fmt: skip


def applied_delays(journals: Iterable[Iterable[str]]) -> Mapping[int, int]:
    """Count contributions (a piece of a colayer of a worker's iteration) by their delay.

    The delay is the number of rounds in the parameters when it was applied, minus those when its
    worker began the iteration; 0 in BSP.
    """
    records = [read_journal(lines) for lines in journals]
    begun = {(t, record.rank): at for record in records for t, at in record.begun_at.items()}
    delays: Counter[int] = Counter()
    # All workers have applied the same rounds, so the longest journal has all of them.
    longest = max(records, key=lambda record: len(record.rounds))
    for number, parts in longest.rounds.items():
        for entries in parts.values():
            delays.update(number - begun[entry] for entry in entries if entry in begun)
    return dict(sorted(delays.items()))


def read_journal(lines: Iterable[str]) -> JournalRecord:
    """Read one journal; ignore an unfinished last line.

    Raises:
        UsageError: these are not the lines of a journal.
    """
    number = 0
    try:
        events = (json.loads(line) for line in lines if line.endswith("\n"))
        record = JournalRecord(**next(events))
        for number, event in enumerate(events, 2):  # noqa: B007
            record.complete = "drained" in event
            if not _read_training(record, event):
                _read_applied(record, event)
    except (ValueError, TypeError, StopIteration, RecursionError) as err:
        why = str(err) or "it is empty"
        raise UsageError(f"not a journal: after line {number}: {why:.80}") from None
    return record


def _read_training(record: JournalRecord, event: dict[str, Any]) -> bool:
    """Read a line about training; return False for other lines."""
    match event:
        case {"began": iteration}:
            record.began.append(iteration)
            record.begun_at[iteration] = record.at
            bounds = (bound for bound in (record.s, record.in_flight) if bound is not None)
            if record.at < iteration - min(bounds, default=iteration):
                record.findings.append(f"began iteration {iteration} with {record.at} rounds")
        case {"sent": [iteration, colayer]}:
            record.sent.add((iteration, colayer))
        case {"dropped": [iteration, colayers]}:
            record.dropped[iteration] = colayers
        case {"resumed": _}:
            record.discard_empty_iteration()
        case {"first": first, "colayers": colayers, "p": p, "mode": mode}:
            if first != record.at:
                record.findings.append(
                    f"changed colayers from round {first} on, after {record.at} rounds"
                )
            record.changes.append((first, colayers, p, mode))
        case _:
            return False
    return True


def _read_applied(record: JournalRecord, event: dict[str, Any]) -> None:
    match event:
        case {"pulled": applied}:
            record.at, record.pulls = applied, record.pulls + 1
        case {"round": number, "entries": entries}:
            if number != record.at:
                record.findings.append(f"applied round {number} after {record.at} rounds")
            record.at = number + 1
            record.rounds[number] = {(z, q): [(t, w) for t, w in all_] for z, q, all_ in entries}
        case {"drained": rounds, "digest": digest}:
            if digest is not None:
                record.digests[rounds] = digest
            record.discard_empty_iteration()  # the worker had run out of batches
            if rounds != record.at:
                record.findings.append(f"drained at {rounds} with {record.at} rounds")
        case _:
            record.findings.append(f"has an unknown line: {event!s:.60}")


def _merged_rounds(records: Sequence[JournalRecord]) -> tuple[Rounds, list[str]]:
    """Return the rounds of a run, and findings about workers that have applied other rounds.

    A round that only dead workers had applied was summed again, or pulled by another worker.
    """
    rounds: Rounds = {}
    findings = []
    for record in sorted(records, key=lambda record: (not record.complete, -record.at)):
        for number, entries in record.rounds.items():
            if rounds.setdefault(number, entries) != entries and record.complete:
                findings.append(f"{record}: round {number} differs from that of other workers")
    last = max((record.at for record in records if record.complete), default=len(rounds))
    return {number: rounds[number] for number in sorted(rounds) if number < last}, findings


def _describe(key: Key) -> str:
    iteration, worker, colayer, piece = key
    return f"iteration {iteration} of worker {worker}, colayer {colayer}, piece {piece}"


def _check_senders(records: Sequence[JournalRecord], counted: Iterable[Key]) -> Iterator[str]:
    sent = {(t, record.rank, z) for record in records for t, z in record.sent}
    # A killed worker may have sent more than it recorded.
    killed = {record.rank for record in records if not record.complete}
    for key in counted:
        if key[:3] not in sent and key[1] not in killed:
            yield f"{_describe(key)} is counted and was not sent"


def _missing(record: JournalRecord, counted: Counter[Key]) -> list[Key]:
    sent = sorted(record.sent)
    keys = ((t, record.rank, z, q) for t, z in sent for q in range(record.workers))
    return [key for key in keys if not counted[key]]


def _check_drops(record: JournalRecord) -> Iterator[str]:
    """Yield iterations that were neither fully sent nor dropped by the bound."""
    for iteration in record.began if record.complete else ():
        sent = sum(begun == iteration for begun, _ in record.sent)
        if sent != record.dropped.get(iteration, record.thresholds(iteration)[0]):
            yield f"sent {sent} colayers of iteration {iteration}"
    for iteration, sent in record.dropped.items():
        _, p, mode = record.thresholds(iteration)
        if sent >= p or mode != "PGE":
            yield f"dropped iteration {iteration} after {sent} colayers were sent"


def _check_ages(records: Sequence[JournalRecord], rounds: Rounds) -> Iterator[str]:
    s, mode = records[0].s, records[0].mode
    if s is None:
        return
    most = 0 if mode == "BSP" else s + 1
    for number, entries in rounds.items():
        for (colayer, piece), found in entries.items():
            for iteration, worker in found:
                if not 0 <= number - iteration <= most:
                    key = _describe((iteration, worker, colayer, piece))
                    yield f"{key} is in round {number}; allowed: at most {most} rounds late"


def _check_digests(records: Sequence[JournalRecord]) -> Iterator[str]:
    first: dict[int, tuple[str, JournalRecord]] = {}
    for record in records:
        for rounds, digest in record.digests.items():
            before, other = first.setdefault(rounds, (digest, record))
            if before != digest:
                yield f"{record}: after {rounds} rounds its replica differs from that of {other}"
