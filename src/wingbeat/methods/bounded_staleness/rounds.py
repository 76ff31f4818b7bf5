"""Rounds that have come, of all pieces of all colayers: complete ones are applied in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wingbeat.methods.bounded_staleness.messages import Marks, Round

Table = list[list[list[int]]]


class Rounds:
    """What a worker has received and not yet applied.

    A round is complete when all pieces of all colayers have it. It is applied as a whole: so an
    optimizer of any kind makes one step a round, on the same gradients on every worker.

    Args:
        workers: how many there may be; as many are the pieces.
        colayers: k.
        first: number of the first round; of all before, everything is in the parameters.

    Attributes:
        complete: rounds of which everything is here, or in the parameters.
        applied: rounds that are in the parameters.
        lacking: how many rounds parameters must have for the rest to be here; None if these do, and
            while it is not known from where on pieces come.
    """

    def __init__(self, workers: int, colayers: int, first: int = 0) -> None:
        self._workers, self._colayers = workers, colayers
        self.complete = self.applied = first
        self.lacking: int | None = None
        self._held = False
        self._marks = [[[-1] * workers for _ in range(colayers)] for _ in range(workers)]
        self._next: list[list[int] | None] = [[first] * colayers for _ in range(workers)]
        self._have: dict[int, dict[tuple[int, int], Round]] = {}

    def know_nothing(self) -> None:
        """Expect no piece: whoever is new is told from where on it gets them."""
        self._next = [None] * self._workers

    def expect(self, piece: int, numbers: Sequence[int]) -> None:
        """Expect a piece's rounds from ``numbers`` on, one a colayer."""
        self._next[piece] = list(numbers)
        self._look()

    def expects(self, part: Round) -> bool:
        """Whether this is the next of its piece and colayer."""
        numbers = self._next[part.piece]
        return numbers is not None and numbers[part.colayer] == part.number

    def hold(self) -> None:
        """Let no more rounds be complete than have been told, while a view is agreed on."""
        self._held = True

    def go_on(self) -> None:
        """Let rounds be complete again."""
        self._held = False
        self._see()

    def add(self, part: Round) -> None:
        """Take in the round of a piece that is expected.

        What is older than the parameters was pulled with them, and is not kept.
        """
        numbers = self._next[part.piece]
        assert numbers is not None
        numbers[part.colayer] += 1
        if part.number >= self.applied:
            self._have.setdefault(part.number, {})[part.colayer, part.piece] = part
        self._see()

    def _see(self) -> None:
        if self._held:
            return
        whole = self._workers * self._colayers
        while len(self._have.get(self.complete, ())) == whole:
            self.complete += 1

    def restart(self, piece: int, number: int) -> None:
        """Forget what came of a piece from round ``number`` on: it is going to be summed anew.

        Args:
            piece: whose owner has changed.
            number: the first round of the new owner; all before are complete somewhere, and none
                after it have been applied here.
        """
        self._next[piece] = [number] * self._colayers
        for later in (n for n in self._have if n >= number):
            for colayer in range(self._colayers):
                self._have[later].pop((colayer, piece), None)
        self.complete = max(min(self.complete, number), self.applied)
        self._look()

    def _look(self) -> None:
        """See from where on all rounds are here, or are going to be."""
        self.lacking = None
        if not self.knows_all:
            return
        first = self.applied
        for piece, numbers in enumerate(self._next):
            for colayer, number in enumerate(numbers or ()):
                while number > first and (colayer, piece) in self._have.get(number - 1, ()):
                    number -= 1
                first = max(first, number)
        if first > self.applied:
            self.lacking = first

    @property
    def knows_all(self) -> bool:
        """Whether it is known of each piece from where on it comes."""
        return None not in self._next

    @property
    def waiting(self) -> int:
        """How many rounds are held, whole or in part."""
        return len(self._have)

    def take(self) -> tuple[Round, ...] | None:
        """Return the next complete round's parts, by colayer and piece, and count it as applied."""
        if self.applied == self.complete:
            return None
        have = self._have.pop(self.applied)
        self.applied += 1
        _count(self._marks, have.values())
        return tuple(have[key] for key in sorted(have))

    def skip(self, applied: int, marks: Sequence[Marks]) -> None:
        """Go on from parameters that have ``applied`` rounds, which have counted ``marks``."""
        for number in [number for number in self._have if number < applied]:
            del self._have[number]
        self.applied = applied
        self.complete = max(self.complete, applied)
        self._marks = [[list(row) for row in piece] for piece in marks]
        self._see()
        self._look()

    def drop(self, end: int) -> None:
        """Let go of the rounds before ``end``, which pulled parameters will have.

        Parts of them that are still on their way come later, and go with the next call.
        """
        for number in [number for number in self._have if number < end]:
            del self._have[number]
        self.complete = self.applied
        self._look()

    def counted(self, colayer: int, worker: int) -> int:
        """Return the last iteration of a worker of which all pieces are in the parameters."""
        return min(piece[colayer][worker] for piece in self._marks)

    def touched(self, worker: int) -> int:
        """Return the last iteration of a worker of which any piece is in the parameters."""
        return max(row[worker] for piece in self._marks for row in piece)

    def marks(self, *, complete: bool) -> tuple[Marks, ...]:
        """Return what the rounds have counted that are in the parameters, or ``complete``."""
        table: Table = [[list(row) for row in piece] for piece in self._marks]
        if complete:
            for number in range(self.applied, self.complete):
                _count(table, self._have[number].values())
        return tuple(tuple(tuple(row) for row in piece) for piece in table)


def _count(marks: Table, parts: Iterable[Round]) -> None:
    for part in parts:
        row = marks[part.piece][part.colayer]
        for iteration, worker in part.entries:
            row[worker] = max(row[worker], iteration)
