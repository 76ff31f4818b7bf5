from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.disk import room_for
from wingbeat.errors import UsageError
from wingbeat.observe import trace
from wingbeat.observe.events import WHATS, Event


def event(
    what: str,
    begin: int,
    end: int,
    worker: int = 0,
    lane: str = "compute",
    group: tuple[int, ...] = (),
) -> Event:
    return Event(worker, -1 if group else 4, what, begin, end, 8, lane, group)


@pytest.fixture
def part(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A valid part on disk and its content, for tests to spoil."""
    path = tmp_path / "part.json"
    trace.save([event("forward", 1, 2), event("all_reduce", 2, 9, lane="eth0")], path)
    return path, json.loads(path.read_text())


def test_a_part_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    events = [
        event(what, i, 2 * i, worker=i, group=tuple(range(i % 4))) for i, what in enumerate(WHATS)
    ]
    trace.save(events, tmp_path / "new" / "part.json")
    assert trace.load(tmp_path / "new" / "part.json") == events
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["part.json"]


def test_part_cut_short_leaves_the_old_one(part: tuple[Path, dict[str, Any]]) -> None:
    path, content = part
    with room_for(1000), pytest.raises(UsageError, match=r"cannot write .*part\.json.*too large"):
        trace.save([event("forward", i, i + 1) for i in range(1000)], path)
    assert json.loads(path.read_text()) == content


SPOILED_EVENTS = [
    ("not a list", {"worker": 0}),
    ("too short", [0, 4, "forward", 1, 2, 8, "compute"]),
    ("a bool for a number", [True, 4, "forward", 1, 2, 8, "compute", []]),
    ("a float time", [0, 4, "forward", 1.5, 2, 8, "compute", []]),
    ("a number beyond 64 bits", [0, 4, "forward", 1, 1 << 70, 8, "compute", []]),
    ("a number for a lane", [0, 4, "forward", 1, 2, 8, 0, []]),
    ("an unknown event", [0, 4, "foward", 1, 2, 8, "compute", []]),
    ("an end before the begin", [0, 4, "forward", 3, 2, 8, "compute", []]),
    ("a negative worker", [-1, 4, "forward", 1, 2, 8, "compute", []]),
    ("a negative size", [0, 4, "forward", 1, 2, -8, "compute", []]),
    ("an empty lane", [0, 4, "forward", 1, 2, 8, "", []]),
    ("a lane with control characters", [0, 4, "forward", 1, 2, 8, "a\x1b[31m", []]),
    ("a lane without end", [0, 4, "forward", 1, 2, 8, "x" * 1000, []]),
    ("a text for a group", [0, 4, "average", 1, 2, 8, "averages", "0 1"]),
    ("a group of floats", [0, 4, "average", 1, 2, 8, "averages", [0.5]]),
    ("a negative rank", [0, 4, "average", 1, 2, 8, "averages", [0, -1]]),
]


@pytest.mark.parametrize("row", [r for _, r in SPOILED_EVENTS], ids=[n for n, _ in SPOILED_EVENTS])
def test_a_spoiled_event_is_refused_in_one_line(
    part: tuple[Path, dict[str, Any]], row: Any
) -> None:
    path, content = part
    content["events"][1] = row
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"event 1 of .*part\.json") as caught:
        trace.load(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_the_nearest_event_name_is_offered(part: tuple[Path, dict[str, Any]]) -> None:
    path, content = part
    content["events"][0][2] = "foward"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="did you mean 'forward'"):
        trace.load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "is not an event file"),
        ('{"format": "other"}', "is not an event file"),
        ('{"format": "wingbeat-events", "version": 9}', "has version 9; allowed: 2"),
        ('{"format": "wingbeat-events", "version": 2}', "has other keys"),
    ],
)
def test_what_is_not_a_part_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "part.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        trace.load(path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not JSON"):
        trace.load(path)


@pytest.mark.parametrize(
    ("key", "value"), [("boot", 3), ("wall_offset_ns", "1"), ("events", {}), ("extra", 1)]
)
def test_a_spoiled_header_is_refused(
    part: tuple[Path, dict[str, Any]], key: str, value: Any
) -> None:
    path, content = part
    content[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"wrong type|other keys"):
        trace.load(path)


def test_a_missing_file_and_an_oversized_one_are_refused(
    part: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = part
    with pytest.raises(UsageError, match=r"cannot read .*nothing"):
        trace.load(path.with_name("nothing.json"))
    monkeypatch.setattr(trace, "MAX_BYTES", 10)
    with pytest.raises(UsageError, match="allowed: up to 10"):
        trace.load(path)


def test_a_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        trace.save([], tmp_path / "file" / "part.json")


def test_merge_orders_parts_of_one_machine_by_begin(tmp_path: Path) -> None:
    trace.save([event("forward", 5, 6), event("backward", 7, 8)], tmp_path / "0")
    trace.save([event("forward", 4, 9, worker=1)], tmp_path / "1")
    merged = trace.merge([tmp_path / "0", tmp_path / "1"])
    assert [(e.worker, e.begin_ns) for e in merged] == [(1, 4), (0, 5), (0, 7)]


def test_merge_moves_another_machines_clock_onto_the_first(tmp_path: Path) -> None:
    for number, (boot, offset) in enumerate([("a", 1_000), ("b", 400), ("a", 990)]):
        path = tmp_path / str(number)
        trace.save([event("forward", 2_000, 2_100, worker=number)], path)
        content = json.loads(path.read_text())
        content.update(boot=boot, wall_offset_ns=offset)
        path.write_text(json.dumps(content))
    merged = {e.worker: e for e in trace.merge([tmp_path / str(n) for n in range(3)])}
    assert (merged[0].begin_ns, merged[0].end_ns) == (2_000, 2_100)
    # Worker 1's clock reads 2,000 when the wall shows 2,400: the first machine's 1,400.
    assert (merged[1].begin_ns, merged[1].end_ns) == (1_400, 1_500)
    assert merged[2].begin_ns == 2_000  # the same boot: the clock is shared, whatever NTP did


def _perfetto(events: list[Event], folder: Path) -> tuple[list[Any], list[Any]]:
    trace.write_perfetto(events, folder / "trace.json")
    written = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [e for e in written if e["ph"] == "M"], [e for e in written if e["ph"] == "X"]


def test_perfetto_gets_workers_lanes_and_microseconds(tmp_path: Path) -> None:
    names, slices = _perfetto(
        [
            event("forward", 1_000_000, 3_000_000, worker=1),
            event("all_gather", 2_000_000, 2_500_000, worker=1, lane="eth0"),
        ],
        tmp_path,
    )
    assert {"worker 1", "compute", "eth0"} == {
        n["args"]["name"] for n in names if "name" in n["args"]
    }
    gather = next(s for s in slices if s["cat"] == "all_gather")
    assert (gather["pid"], gather["ts"], gather["dur"]) == (1, 1000.0, 500.0)
    assert gather["args"] == {"bucket": 4, "bytes": 8, "lane": "eth0"}
    assert gather["name"] == "all_gather 4"


def test_groups_are_named_by_their_first_members(tmp_path: Path) -> None:
    _, slices = _perfetto(
        [
            event("average", 1, 2, lane="averages", group=(2, 0)),
            event("left", 2, 2, lane="averages", group=(3,)),
            event("average", 3, 4, lane="averages", group=tuple(range(9))),
        ],
        tmp_path,
    )
    assert [s["name"] for s in slices] == ["average 2 0", "left 3", "average 0 1 2 3 4 5 ..."]
    assert slices[2]["args"]["group"] == list(range(9))


def test_an_empty_trace_can_be_written(tmp_path: Path) -> None:
    assert _perfetto([], tmp_path) == ([], [])


spans = st.tuples(st.integers(0, 40), st.integers(0, 20))


@given(st.lists(st.tuples(spans, st.sampled_from(["forward", "wait", "all_reduce"])), max_size=25))
def test_no_two_slices_of_a_row_cross(
    tmp_path_factory: pytest.TempPathFactory, given_: list[tuple[tuple[int, int], str]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    events = [event(what, begin, begin + length) for (begin, length), what in given_]
    _, slices = _perfetto(events, folder)
    assert len(slices) == len(events)
    placed = [
        (s["pid"], s["tid"], round(s["ts"] * 1e3), round((s["ts"] + s["dur"]) * 1e3))
        for s in slices
    ]
    for pid, tid, begin, end in placed:
        for other_pid, other_tid, other_begin, other_end in placed:
            if (pid, tid) == (other_pid, other_tid) and begin < other_begin < end:
                assert other_end <= end
