"""Where classes change, as places in the order of forward: what thresholds come to.

With ``L`` layers the l-th has urgency ``1 - l/L``, so all thresholds between two neighbours make
the same classes. What is tried is therefore not a level but a cut: how many layers come before
the change. Classes only say who goes first, so one that is empty makes no difference, and the same
set of cuts is the same candidate, however many classes there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Cuts = tuple[int, ...]
"""Rising numbers of layers, above 0 and below all; none: one class for all layers."""


def cuts_of(levels: Sequence[float], layers: int) -> Cuts:
    """Return the cuts that thresholds make.

    >>> cuts_of((0.5,), 4), cuts_of((0.9, 0.8), 10), cuts_of((0.99, 0.98), 4)
    ((1,), (1,), ())

    Args:
        levels: thresholds of urgency; a layer of more is on the urgent side.
        layers: how many layers there are.
    """
    # As `servers.tables.urgency_level` divides, so that levels that are met exactly agree.
    counts = {
        sum((layers - place) / layers > level for place in range(1, layers + 1)) for level in levels
    }
    return tuple(sorted(counts - {0}))


def levels_of(cuts: Cuts, layers: int, classes: int) -> tuple[float, ...]:
    """Return thresholds that make these cuts: falling, midway between two levels of urgency.

    >>> levels_of((2,), 4, 2), levels_of((), 4, 2)
    ((0.375,), (0.875,))

    Args:
        cuts: fewer than there are classes; the urgent classes that are left over stay empty, so
            that what is not urgent has the last class whatever is tried.
        layers: how many layers there are.
        classes: how many classes there are.
    """
    first = cuts[0] if cuts else 0
    repeats = classes - 1 - len(cuts[1:])
    urgent = [(layers - first - (i + 1) / (repeats + 1)) / layers for i in range(repeats)]
    return (*urgent, *((layers - cut - 0.5) / layers for cut in cuts[1:]))


def fits(cuts: Sequence[int], layers: int, classes: int) -> bool:
    """Whether these are cuts of so many layers into at most so many classes."""
    rising = list(cuts) == sorted(set(cuts))
    return rising and len(cuts) < classes and all(0 < cut < layers for cut in cuts)


def divided(cuts: Cuts, layers: int) -> str:
    """Write how many layers are in each class that has some, the most urgent first.

    >>> divided((2, 5), 9)
    '2 + 3 + 4'
    """
    ends = (0, *cuts, layers)
    return " + ".join(str(stop - start) for start, stop in itertools.pairwise(ends))
