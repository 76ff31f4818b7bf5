"""The live view, driven without a terminal; what is on the screen is compared as text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from helpers.reports import job
from wingbeat.observe.meter import Section
from wingbeat.observe.report import Job
from wingbeat.observe.screen import Top
from wingbeat.observe.top import JobLost

GEI = Section("gei", {"c0": "1101", "c1": "0111"})

Play = Callable[[Pilot[None], Top], Awaitable[None]]


class Source:
    """A job that is asked how it is."""

    def __init__(self, made: Job) -> None:
        self.job: Job | None = made
        self.asked = 0

    def __call__(self) -> Job:
        self.asked += 1
        if self.job is None:
            raise JobLost("job train-4711 has ended")
        return self.job


def play(source: Source, visit: Play, *, size: tuple[int, int] = (100, 24)) -> None:
    async def run() -> None:
        top = Top(source, every_s=0.05)
        async with top.run_test(size=size) as pilot:
            await until(pilot, lambda: "\n rank " in text(top))
            await visit(pilot, top)

    asyncio.run(run())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await pilot.pause(0.01)
    raise AssertionError(text(pilot.app))


def text(app: object) -> str:
    """What stands on the screen, line by line."""
    strips = app.screen._compositor.render_strips()  # type: ignore[attr-defined]
    return "\n".join("".join(part.text for part in strip).rstrip() for strip in strips)


def test_it_shows_the_job_as_the_tables_do() -> None:
    async def visit(pilot: Pilot[None], top: Top) -> None:
        await until(pilot, lambda: "q quit" in text(top).splitlines()[-1])
        lines = text(top).splitlines()
        assert lines[:8] == [
            " train-4711: iteration 40, 2 iterations/s; 2 workers; watched for 20 s; DeAR()",
            " workers",
            " rank  host   iteration  it/s  exchange ms  forward ms  backward ms  sent/s    recv/s"
            "  state",
            "    0  node0         40     2           50         100          200  1 MB/s  500 kB/s"
            "  running",
            "    1  node1         40     2           50         100          200  1 MB/s  500 kB/s"
            "  running",
            " wider terminals also show: update ms, codec ms, other ms",
            "",
            " interfaces",
        ]
        assert "   0  1101  0111" in text(top)

    play(Source(job(2, sections=(GEI,))), visit)


def test_it_follows_the_job() -> None:
    source = Source(job(1, 3))

    async def visit(pilot: Pilot[None], top: Top) -> None:
        assert "iteration 6," in text(top)
        source.job = job(1, 30)
        await until(pilot, lambda: "iteration 60," in text(top))

    play(source, visit)


def test_when_the_job_has_ended_its_last_state_stays_and_that_is_said() -> None:
    source = Source(job(1))

    async def visit(pilot: Pilot[None], top: Top) -> None:
        source.job = None
        await until(pilot, lambda: "s ago: job train-4711 has ended" in text(top))
        assert "iteration 40," in text(top)
        source.job = job(1, 2)  # torchrun has started it again, under the same name
        await until(pilot, lambda: "has ended" not in text(top))
        assert "iteration 4," in text(top)

    play(source, visit)


def test_tables_one_by_one_and_all() -> None:
    async def visit(pilot: Pilot[None], top: Top) -> None:
        whole = ["workers", "interfaces", "gei"]
        for expected in (["workers"], ["interfaces"], ["gei"], whole, ["workers"]):
            await pilot.press("tab")
            await until(pilot, lambda expected=expected: _titles(top) == expected)  # type: ignore[misc]
        for keys, expected in (("shift+tab", whole), ("shift+tab", ["gei"]), ("a", whole)):
            await pilot.press(keys)
            await until(pilot, lambda expected=expected: _titles(top) == expected)  # type: ignore[misc]

    play(Source(job(2, sections=(GEI,))), visit)


def _titles(top: Top) -> list[str]:
    lines = [line.strip() for line in text(top).splitlines()]
    return [name for name in ("workers", "interfaces", "gei") if name in lines]


def test_pause_lets_everything_stand() -> None:
    source = Source(job(1))

    async def visit(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("p")
        await pilot.pause(0.1)
        asked = source.asked
        source.job = job(1, 99)
        await pilot.pause(0.2)
        assert source.asked == asked
        await pilot.press("p")
        await until(pilot, lambda: "iteration 198," in text(top))

    play(source, visit)


def test_q_ends_it() -> None:
    async def visit(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("q")
        await until(pilot, lambda: not top.is_running)

    play(Source(job(1)), visit)


@pytest.mark.parametrize("size", [(20, 5), (40, 10), (80, 24), (200, 60)])
def test_more_workers_than_lines_can_be_scrolled_in_any_terminal(size: tuple[int, int]) -> None:
    async def visit(pilot: Pilot[None], top: Top) -> None:
        assert "train-4711" in text(top).splitlines()[0]
        await pilot.press("tab")  # the workers alone
        await until(pilot, lambda: _titles(top) == ["workers"])
        await pilot.press("end")
        await until(pilot, lambda: " 63 " in text(top))

    play(Source(job(64, 2)), visit, size=size)


def test_a_terminal_that_becomes_wider_shows_more() -> None:
    async def visit(pilot: Pilot[None], top: Top) -> None:
        assert "exchange ms  " not in text(top)
        await pilot.resize_terminal(160, 24)
        await until(pilot, lambda: "exchange ms  forward ms" in text(top))

    play(Source(job(1)), visit, size=(70, 24))


def test_names_are_no_markup() -> None:
    async def visit(pilot: Pilot[None], top: Top) -> None:
        assert "[red]node" in text(top)

    play(Source(job(1, host="[red]node")), visit)
