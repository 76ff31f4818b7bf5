"""The live view of a job in a terminal, with Textual. `top` formats its content."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from wingbeat.errors import WingbeatError
from wingbeat.observe.report import Job
from wingbeat.observe.top import cut, headline, tables


class Top(App[None]):
    """Calls ``query`` every ``every_s`` seconds and shows the last answer."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "#job { padding: 0 1; } #head { padding: 0 1; height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("tab", "turn(1)", "next table", priority=True),
        Binding("shift+tab", "turn(-1)", "table before", priority=True),
        Binding("a", "all", "all tables"),
        Binding("p", "pause", "pause"),
    ]

    def __init__(self, query: Callable[[], Job], every_s: float = 1.0) -> None:
        super().__init__()
        self._query, self._every_s = query, every_s
        self._job: Job | None = None
        self._error, self._answered = "", time.monotonic()
        self._chosen = ""
        self._paused = False
        self._drawn = Text(), Text()

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield Static(id="head")
        with VerticalScroll():
            yield Static(id="job")
        yield Footer()

    def on_mount(self) -> None:
        """Start to query."""
        self.set_interval(self._every_s, self._query_again)
        self._query_again()

    def on_resize(self) -> None:
        """Draw again with the new width."""
        self._draw()

    def _query_again(self) -> None:
        if not self._paused:
            # A late answer must not block the keyboard.
            self.run_worker(self._query_now, thread=True, exclusive=True, group="query")

    def _query_now(self) -> None:
        try:
            self.call_from_thread(self._show, self._query())
        except WingbeatError as error:
            self.call_from_thread(self._show, self._job, str(error))

    def _show(self, job: Job | None, error: str = "") -> None:
        self._job, self._error = job, error
        if not error:
            self._answered = time.monotonic()
        self._draw()

    def _draw(self) -> None:
        drawn = self._head(), self._body()
        if drawn != self._drawn:
            self._drawn = drawn
            for place, text in zip(("#head", "#job"), drawn, strict=True):
                self.query_one(place, Static).update(text)

    def _head(self) -> Text:
        width = max(1, self.size.width - 2)
        if self._job is None:
            return Text(cut(self._error or "asking...", width), style="bold")
        head = Text(cut(headline(self._job), width), style="bold")
        if self._error:
            ago = time.monotonic() - self._answered
            head.append(f"\n{cut(f'from {ago:.0f} s ago: {self._error}', width)}", style="bold red")
        return head

    def _body(self) -> Text:
        body = Text()
        # Leave room for the padding and the scroll bar.
        width = max(1, self.size.width - 4)
        listed = tables(self._job, width) if self._job is not None else []
        for table in [each for each in listed if each.title == self._chosen] or listed:
            title, headings, *rest = (cut(line, width) for line in table.lines())
            body.append(f"{title}\n", "bold underline").append(f"{headings}\n", "bold")
            body.append("\n".join([*rest, "", ""]))
        body.rstrip()
        return body

    def action_turn(self, step: int) -> None:
        """Show only the next or the previous table."""
        if self._job is not None:
            titles = ["", *(each.title for each in tables(self._job, 80))]
            place = titles.index(self._chosen) if self._chosen in titles else 0
            self._chosen = titles[(place + step) % len(titles)]
            self._draw()

    def action_all(self) -> None:
        """Show all tables."""
        self._chosen = ""
        self._draw()

    def action_pause(self) -> None:
        """Pause or resume updates."""
        self._paused = not self._paused
