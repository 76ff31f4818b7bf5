"""The live view of a job in a terminal, with Textual. `render` formats its content."""

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
from wingbeat.observe import render
from wingbeat.observe.snapshot import Job


class Top(App[None]):
    """Queries the job every ``every_s`` seconds by ``ask`` and shows the last answer."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "#job { padding: 0 1; } #head { padding: 0 1; height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("tab", "turn(1)", "next table", priority=True),
        Binding("shift+tab", "turn(-1)", "table before", priority=True),
        Binding("a", "all", "all tables"),
        Binding("p", "pause", "pause"),
    ]

    def __init__(self, ask: Callable[[], Job], every_s: float = 1.0) -> None:
        super().__init__()
        self._ask, self._every_s = ask, every_s
        self._job: Job | None = None
        self._trouble, self._heard = "", time.monotonic()
        self._chosen: str = ""
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
        self.set_interval(self._every_s, self._ask_again)
        self._ask_again()

    def on_resize(self) -> None:
        """Draw again with the new width."""
        self.show()

    def _ask_again(self) -> None:
        if not self._paused:
            # A late answer must not block the keyboard.
            self.run_worker(self._hear, thread=True, exclusive=True, group="ask")

    def _hear(self) -> None:
        try:
            self.call_from_thread(self.take, self._ask())
        except WingbeatError as error:
            self.call_from_thread(self.take, self._job, str(error))

    def take(self, job: Job | None, trouble: str = "") -> None:
        """Store and show this job and the error of the last query."""
        self._job, self._trouble = job, trouble
        if not trouble:
            self._heard = time.monotonic()
        self.show()

    def show(self) -> None:
        """Draw the last answer."""
        drawn = self._head(), self._body()
        if drawn != self._drawn:
            self._drawn = drawn
            for place, text in zip(("#head", "#job"), drawn, strict=True):
                self.query_one(place, Static).update(text)

    def _head(self) -> Text:
        width = max(1, self.size.width - 2)
        if self._job is None:
            return Text(render.cut(self._trouble or "asking...", width), style="bold")
        head = Text(render.cut(render.headline(self._job), width), style="bold")
        if self._trouble:
            ago = time.monotonic() - self._heard
            line = render.cut(f"from {ago:.0f} s ago: {self._trouble}", width)
            head.append(f"\n{line}", style="bold red")
        return head

    def _body(self) -> Text:
        body = Text()
        # Leave room for the padding and the scroll bar.
        width = max(1, self.size.width - 4)
        sheets = render.sheets(self._job, width) if self._job is not None else []
        for sheet in [each for each in sheets if each.title == self._chosen] or sheets:
            title, headings, *rest = (render.cut(line, width) for line in render.lines(sheet))
            body.append(f"{title}\n", "bold underline").append(f"{headings}\n", "bold")
            body.append("\n".join([*rest, "", ""]))
        body.rstrip()
        return body

    def action_turn(self, step: int) -> None:
        """Show only the next or the previous table."""
        if self._job is not None:
            titles = ["", *(each.title for each in render.sheets(self._job, 80))]
            place = titles.index(self._chosen) if self._chosen in titles else 0
            self._chosen = titles[(place + step) % len(titles)]
            self.show()

    def action_all(self) -> None:
        """Show all tables."""
        self._chosen = ""
        self.show()

    def action_pause(self) -> None:
        """Pause or resume updates."""
        self._paused = not self._paused
