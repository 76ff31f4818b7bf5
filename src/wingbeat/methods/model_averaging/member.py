"""A worker's side of the group generator: what it runs, and when it goes on. Pure."""

from __future__ import annotations

from wingbeat.methods.model_averaging.generator import Run, Unexpected
from wingbeat.methods.model_averaging.rules import Rules


class Member:
    """What a worker knows of its groups.

    Args:
        worker: its number.
        rules: the generator's.

    Attributes:
        waiting: whether it has asked, and the group that answers it is not done.
        running: the group that it takes part in now.
        last: the number of the last group that it was through with; -1 before the first.
    """

    def __init__(self, worker: int, rules: Rules) -> None:
        self._worker, self._buffer = worker, rules.buffer
        self._levelling = False
        self.waiting = False
        self.running: Run | None = None
        self.last = -1

    def ask(self, level: bool = False) -> None:
        """Note that it asks; with ``level`` for a group of all, before which it is in no other."""
        assert not self.waiting, "a worker asks once a step"
        self.waiting, self._levelling = True, level

    def hear(self, run: Run) -> bool:
        """Whether to run what the generator says, giving up what runs.

        It is not if this worker is done with the group already: then others were not, when one of
        them died, and they run it again among themselves.

        Raises:
            Unexpected: the generator does not say so to this worker now.
        """
        now = self.running
        if self._worker not in run.members:
            raise Unexpected(f"group {run.number} is without worker {self._worker}, who is told")
        if run.number <= self.last:
            return False
        if now is not None and (run.number != now.number or run.epoch <= now.epoch):
            raise Unexpected(f"group {run.number} is to run while group {now.number} does")
        self.running = run
        return True

    def done(self) -> Run:
        """Return what ran, to be acknowledged; `waiting` says whether the worker may go on."""
        run = self.running
        assert run is not None, "nothing runs"
        self.running, self.last = None, run.number
        # With a Group Buffer each request is answered by the worker's oldest group, otherwise by
        # the one that was made for it. Who levels is in one group only.
        if self._buffer or self._levelling or run.initiator == self._worker:
            self.waiting = self._levelling = False
        return run
