"""The progress of a bench: a live bar on a terminal, else one line for each turn."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from wingbeat_lab.bench import estimate
from wingbeat_lab.bench.config import Checked


class Progress:
    """Shows the expected duration, then strategy, round, iteration and the time left.

    Output goes to standard error. The time left is the estimate's, times the ratio of the elapsed
    time to its estimate.
    """

    def __init__(self, checked: Checked, *, quiet: bool = False) -> None:
        self._checked = checked
        self._estimate = estimate.of(checked)
        self._began = time.monotonic()
        self._view: _View
        if quiet:
            self._view = _Silent()
        elif sys.stderr.isatty():
            self._view = _Live(self._estimate.total_s)
        else:
            self._view = _Plain()
        self._turn: tuple[int, int] | None = None

    def __enter__(self) -> Progress:
        rows = ", ".join(row.text for row in self._checked.rows)
        self._view.say(
            f"{self._checked.model.name} on {self._checked.lab}, {self._checked.workers} workers: "
            f"{rows}; takes about {estimate.about(self._estimate.total_s)}"
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._view.close()

    def at(self, done: int, row: int, round_: int, iteration: int) -> None:
        """Report that ``done`` iterations are complete; ``iteration`` is below 0 in warm-up."""
        config = self._checked.config
        turn = f"{self._checked.rows[row].text}, round {round_ + 1}/{config.rounds}"
        if (row, round_) != self._turn:
            self._turn = (row, round_)
            left = estimate.about(self.left_s(row, round_, iteration))
            total = self._checked.total_iterations
            self._view.turn(f"{turn} ({done}/{total} iterations done, about {left} left)")
        what = "warm-up" if iteration < 0 else f"{iteration + 1}/{config.share(round_)}"
        self._view.at(self._estimate.done_s(row, round_, iteration), f"{turn}, {what}")

    def left_s(self, row: int, round_: int, iteration: int) -> float:
        """Seconds from the end of this iteration to the end of the bench, at the current pace."""
        over = self._estimate.done_s(row, round_, iteration)
        pace = (time.monotonic() - self._began) / over
        return pace * max(0.0, self._estimate.total_s - over)

    def phase(self, text: str) -> None:
        """Show a phase that consists of no iterations."""
        self._view.say(text)


class _View(Protocol):
    def say(self, text: str) -> None: ...

    def turn(self, text: str) -> None: ...

    def at(self, done_s: float, text: str) -> None: ...

    def close(self) -> None: ...


class _Silent:
    def say(self, text: str) -> None:
        pass

    def turn(self, text: str) -> None:
        pass

    def at(self, done_s: float, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Plain(_Silent):
    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    turn = say


class _Live(_Silent):
    def __init__(self, total_s: float) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("starting the workers", total=total_s)
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def at(self, done_s: float, text: str) -> None:
        self._bar.update(self._task, completed=done_s, description=text)

    def close(self) -> None:
        self._bar.stop()
