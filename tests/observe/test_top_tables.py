"""What a job looks like as text, at several widths."""

from __future__ import annotations

import itertools

import pytest

from helpers.reports import add, job, report
from wingbeat.observe import top
from wingbeat.observe.meter import Section
from wingbeat.observe.report import Job, Watch

GEI = Section("gei", {"c0": "1101", "c1": "0111", "behind": 2})
CLASSES = Section("classes", {"0 out": 0, "1 out": 0}, "B/s")


def text(made: Job, width: int, *only: str) -> list[str]:
    """The lines of these tables, or of all."""
    return [
        line
        for table in top.tables(made, width)
        if not only or table.title.split(" ")[0] in only
        for line in table.lines()
    ]


def test_the_headline() -> None:
    assert top.headline(job(2)) == (
        "train-4711: iteration 40, 2 iterations/s; 2 workers; watched for 20 s; DeAR()"
    )


def test_the_headline_says_when_workers_differ() -> None:
    watch = Watch("gan-1", 0.0)
    add(watch, report(0, 3, size=3), 0.0)
    add(watch, report(1, 5, size=3), 0.0)
    made = watch.job(2.0, 0.0)
    assert top.headline(made) == (
        "gan-1: iteration 6 to 10; 3 workers, 2 running; watched for 2 s; DeAR()"
    )


def test_the_headline_before_anything_is_known() -> None:
    assert "no worker has reported yet" in top.headline(Watch("x", 0.0).job(1.0, 0.0))


def test_all_columns_where_there_is_room() -> None:
    assert text(job(2), 200, "workers") == [
        "workers",
        "rank  host   iteration  it/s  exchange ms  forward ms  backward ms  update ms  codec ms"
        "  other ms  sent/s    recv/s  state",
        "   0  node0         40     2           50         100          200         10        20"
        "         5  1 MB/s  500 kB/s  running",
        "   1  node1         40     2           50         100          200         10        20"
        "         5  1 MB/s  500 kB/s  running",
    ]


def test_the_most_important_columns_where_there_is_less() -> None:
    assert text(job(2), 64, "workers") == [
        "workers",
        "rank  host   iteration  it/s  sent/s    recv/s  state",
        "   0  node0         40     2  1 MB/s  500 kB/s  running",
        "   1  node1         40     2  1 MB/s  500 kB/s  running",
        "wider terminals also show: exchange ms, forward ms, backward ms…",
    ]


def test_a_few_columns_in_the_narrowest_terminal() -> None:
    assert text(job(2), 24, "workers")[:3] == [
        "workers",
        "rank  iteration  state",
        "   0         40  running",
    ]
    assert text(job(2), 1, "workers")[1:4] == ["rank", "   0", "   1"]


@pytest.mark.parametrize("width", [10, 24, 40, 64, 80, 100, 132, 200])
def test_no_table_is_wider_than_the_terminal(width: int) -> None:
    made = job(3, sections=(GEI, CLASSES), counts={"dropped": 1}, host="h" * 100)
    tables = top.tables(made, width)
    for table in (tables[0], *tables[2:]):
        columns = list(zip(table.headings, *table.rows, strict=True))
        if len(columns) > 2:
            assert sum(max(map(len, column)) + 2 for column in columns) - 2 <= width


def test_a_strategys_grid_and_rates() -> None:
    assert text(job(2, sections=(GEI, CLASSES)), 80, "gei", "classes") == [
        "gei",
        "rank  c0    c1    behind",
        "   0  1101  0111       2",
        "   1  1101  0111       2",
        "classes (B/s)",
        "rank  0 out  1 out",
        "   0  0 B/s  0 B/s",
        "   1  0 B/s  0 B/s",
    ]


def test_a_grid_that_is_too_wide_says_how_much_is_left_out() -> None:
    wide = Section("gei", {f"c{i}": "1" * 9 for i in range(30)})
    lines = text(job(1, sections=(wide,)), 60, "gei")
    assert lines[-1] == "25 of 30 columns have no room here"
    assert max(map(len, lines)) <= 60


def test_workers_that_show_different_columns() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(0, 0, sections=(Section("groups", {"group": "0, 2"}),)), 0.0)
    add(watch, report(1, 0, sections=(Section("groups", {"epoch": 3}),)), 0.0)
    assert text(watch.job(0.0, 0.0), 80, "groups") == [
        "groups",
        "rank  group  epoch",
        "   0  0, 2       -",
        "   1  -          3",
    ]


def test_only_what_has_happened_is_a_column() -> None:
    assert "dropped" not in text(job(1, counts={"dropped": 0}), 200)[1]
    assert "dropped" in text(job(1, counts={"dropped": 3}), 200)[1]


def test_interfaces() -> None:
    assert text(job(1), 80, "interfaces") == [
        "interfaces",
        "rank  interface  sent/s    recv/s   sent  received",
        "   0  eth0       1 MB/s  500 kB/s  20 MB     10 MB",
        "all traffic of the worker's host, by the kernel's counters",
    ]


def test_a_worker_that_has_said_nothing_is_there() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(1, 0), 0.0)
    lines = text(watch.job(9.0, 0.0), 80, "workers")
    assert lines[2].split() == ["0", *"------", *["no", "report", "for", "9", "s"]]
    assert lines[3].endswith("silent for 9 s")


def test_sixty_four_workers_with_long_names() -> None:
    made = job(64, 3, host="rack17-node-with-a-very-long-name.example.org")
    lines = text(made, 80, "workers")
    assert len([line for line in lines if line.endswith("running")]) == 64
    assert "rack17-node-wit…" in lines[2]


def test_names_are_no_markup_and_no_colour() -> None:
    odd = Section("gei", {"[red]c0[/red]": "[bold]x"})
    lines = text(job(1, sections=(odd,), host="[blink]h"), 100)
    assert any("[red]c0[/red]" in line for line in lines)
    assert any("[bold]x" in line for line in lines)
    assert any("[blink]h" in line for line in lines)


def test_sizes_and_numbers_have_three_digits() -> None:
    sizes = [top.size(10.0**power * 1.2345) for power in range(17)]
    assert len(set(sizes)) == len(sizes)
    assert all(len(size) <= 8 for size in sizes)
    for less, more in itertools.pairwise(["999 B", "1 kB"]):
        assert (top.size(999.4), top.size(999.6)) == (less, more)
