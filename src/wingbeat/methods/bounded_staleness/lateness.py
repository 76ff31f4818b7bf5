"""How late gradients were applied, from the journals of a run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from wingbeat.methods.bounded_staleness.audit import Life, read


def delays(journals: Iterable[Iterable[str]]) -> Mapping[int, int]:
    """Return by how many rounds parameters had gone on, how many contributions.

    Of each contribution (one piece of one colayer of one worker's iteration): the rounds that the
    parameters had when it was applied, less those that its worker had applied when it computed it;
    0 in BSP.

    Args:
        journals: the lines of each life's, as for `wingbeat.methods.bounded_staleness.audit.audit`.
    """
    lives = [read(lines) for lines in journals]
    begun = {(t, life.rank): at for life in lives for t, at in life.begun_at.items()}
    found: Counter[int] = Counter()
    for number, entries in _longest(lives).rounds.items():
        for each in entries.values():
            found.update(number - begun[entry] for entry in each if entry in begun)
    return dict(sorted(found.items()))


def _longest(lives: Sequence[Life]) -> Life:
    """Return whoever has written down most rounds: all have applied the same ones."""
    return max(lives, key=lambda life: len(life.rounds))
