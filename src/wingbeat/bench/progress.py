"""Where a bench is: a live bar on a terminal, one line for each turn elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from wingbeat.bench.config import Checked


class Progress:
    """Shows strategy, round, iteration and the time left on standard error.

    The time left takes every iteration as equally long, so it jumps where rows differ much.
    """

    def __init__(self, checked: Checked, *, quiet: bool = False) -> None:
        self._checked = checked
        self._view: _View
        if quiet:
            self._view = _Silent()
        elif sys.stderr.isatty():
            self._view = _Live(checked)
        else:
            self._view = _Plain()
        self._turn: tuple[int, int] | None = None

    def __enter__(self) -> Progress:
        rows = ", ".join(row.text for row in self._checked.rows)
        self._view.say(
            f"{self._checked.model.name} on {self._checked.lab}, {self._checked.workers} workers: "
            f"{rows}"
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
        """``done`` iterations of all are over; ``iteration`` is below 0 while warming up."""
        config = self._checked.config
        turn = f"{self._checked.rows[row].text}, round {round_ + 1}/{config.rounds}"
        if (row, round_) != self._turn:
            self._turn = (row, round_)
            self._view.turn(f"{turn} ({done}/{self._checked.total_iterations} iterations done)")
        what = "warm-up" if iteration < 0 else f"{iteration + 1}/{config.share(round_)}"
        self._view.at(done, f"{turn}, {what}")

    def phase(self, text: str) -> None:
        """Something else than iterations is going on."""
        self._view.say(text)


class _View(Protocol):
    def say(self, text: str) -> None: ...

    def turn(self, text: str) -> None: ...

    def at(self, done: int, text: str) -> None: ...

    def close(self) -> None: ...


class _Silent:
    def say(self, text: str) -> None:
        pass

    def turn(self, text: str) -> None:
        pass

    def at(self, done: int, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Plain(_Silent):
    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    turn = say


class _Live(_Silent):
    def __init__(self, checked: Checked) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("starting the workers", total=checked.total_iterations)
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def at(self, done: int, text: str) -> None:
        self._bar.update(self._task, completed=done, description=text)

    def close(self) -> None:
        self._bar.stop()
