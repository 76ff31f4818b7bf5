"""Which flow a slice travels in: by how urgent it is, and to whom it goes. Pure.

Geryon (Wang et al., 2020), section IV: ``map_table`` gives a parameter's priority, and is filled by
urgency where an entry is missing; ``channel_table`` gives the flow of a peer and a priority.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from wingbeat.errors import UsageError


def urgency_level(position: int, layers: int) -> float:
    """Return ``1 - l/L``: how urgent the parameters of layer ``position`` are (section III-C).

    Args:
        position: the layer's place in the order of forward, 1 to ``layers``.
        layers: how many there are.
    """
    # Not 1 - l / L, which rounds twice: a threshold of 0.3 is met by layer 7 of 10.
    return (layers - position) / layers


class Places(NamedTuple):
    """Where buckets lie among the layers of a model.

    Attributes:
        first: of each bucket, first needed first, its layer that forward needs first; the first
            layer is 1.
        layers: how many layers there are.
    """

    first: tuple[int, ...]
    layers: int


def places_of(buckets: Sequence[Sequence[str]]) -> Places:
    """Return where buckets lie; layers are counted as forward needs them.

    >>> places_of([["conv1.weight", "conv1.bias", "conv2.weight"], ["conv2.bias"], ["fc.weight"]])
    Places(first=(1, 2, 3), layers=3)

    Args:
        buckets: of each, first needed first, the names of its parameters, in the order of forward.
            ``fc.weight`` and ``fc.bias`` are of the layer ``fc``.
    """
    number: dict[str, int] = {}
    first = []
    for names in buckets:
        layers = [name.rpartition(".")[0] for name in names]
        first.append(min(number.setdefault(layer, len(number) + 1) for layer in layers))
    return Places(tuple(first), len(number))


class CoarseTable:
    """The class of each bucket by its kind of layer: two (section III-B).

    Args:
        fully_connected: for each bucket, first needed first, whether it holds nothing but
            parameters of fully connected layers: these have class 1.
    """

    def __init__(self, fully_connected: Sequence[bool]) -> None:
        self._classes = tuple(map(int, fully_connected))

    @property
    def divides(self) -> bool:
        """Whether there are buckets of both classes."""
        return len(set(self._classes)) > 1

    def __getitem__(self, position: int) -> int:
        """Return the class of the bucket that forward needs in that place, 0 the first."""
        return self._classes[position]


class PriorityTable:
    """The class of each bucket, 0 the most urgent: the paper's ``map_table``.

    An entry is made when it is first asked for, and all are made anew when thresholds change.

    A bucket is as urgent as its layer that forward needs first.

    Args:
        places: where buckets lie among the layers.
        thresholds: falling levels of urgency, one less than there are classes: a bucket that is
            more urgent than the first has class 0, one that is not more urgent than any the last.

    Raises:
        UsageError: thresholds that do not fall, or are no levels.
    """

    def __init__(self, places: Places, thresholds: Sequence[float]) -> None:
        self._places = places
        self.set(thresholds)

    def set(self, thresholds: Sequence[float]) -> None:
        """Change the thresholds; the entries are forgotten.

        Raises:
            UsageError: they do not fall from 1 to 0.
        """
        levels = tuple(thresholds)
        fall = all(a > b for a, b in itertools.pairwise(levels))
        if not fall or not all(0 <= level <= 1 for level in levels):
            raise UsageError(f"thresholds={levels!r}: allowed are falling numbers from 1 to 0")
        self.thresholds = levels
        self._classes: dict[int, int] = {}

    def __getitem__(self, position: int) -> int:
        """Return the class of the bucket that forward needs in that place, 0 the first."""
        found = self._classes.get(position)
        if found is None:
            level = urgency_level(self._places.first[position], self._places.layers)
            found = sum(level <= threshold for threshold in self.thresholds)
            self._classes[position] = found
        return found
