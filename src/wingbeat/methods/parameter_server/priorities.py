"""In which class a bucket's gradients and their sum travel, however classes are found. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.tables import CoarseTable, Places, PriorityTable
from wingbeat.types import Serving


class Priorities:
    """The classes of a model's buckets, each named by its place in the order of forward.

    Args:
        serving: how classes are divided, and whether gradients are pushed in them.

    Attributes:
        table: the class of each bucket, 0 the most urgent.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._thresholds = serving.thresholds
        self.table: PriorityTable | CoarseTable = PriorityTable(Places((1,), 1), serving.thresholds)

    def planned(self, fully_connected: Sequence[bool], places: Places) -> None:
        """From now on there are these buckets.

        Args:
            fully_connected: of each, first needed first, whether it is of fully connected layers
                alone.
            places: where they lie among the layers.
        """
        if self._serving.coarse:
            self.table = CoarseTable(fully_connected)
        else:
            self.table = PriorityTable(places, self._thresholds)

    def change(self, thresholds: Sequence[float]) -> None:
        """Change the thresholds between the classes.

        Raises:
            UsageError: not one less than there are classes, or none that fall; or classes are by
                kind of layer.
        """
        levels = tuple(thresholds)
        if not isinstance(self.table, PriorityTable) or len(levels) != self._serving.classes - 1:
            raise UsageError(
                f"thresholds={levels!r}: there are {self._serving.classes} classes, "
                f"{'by kind of layer' if self._serving.coarse else 'with one less between them'}"
            )
        self.table.set(levels)
        self._thresholds = levels

    def of_sum(self, position: int) -> int:
        """Return the class in which a bucket's sum comes back."""
        return self.table[position]

    def of_push(self, position: int) -> int:
        """Return the class in which its gradients are pushed."""
        return self.table[position] if self._serving.pushes else self._serving.classes - 1
