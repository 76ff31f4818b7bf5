from __future__ import annotations

import copy
import json
import math
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.planning import files
from wingbeat.planning.bucket_size import BucketSizeResult, Sample, untuned
from wingbeat.schema import to_json
from wingbeat.types import Tuning

MB = 2**20
KEY = {"parameters": "ab12", "workers": 4, "links": 2, "shapes": [["w", [3, 4], "float32"]]}
TUNED = BucketSizeResult(
    search="bo",
    low_bytes=MB,
    high_bytes=100 * MB,
    steps=10,
    samples=(Sample(25 * MB, 10.0), Sample(6 * MB + 1, 12.2), Sample(MB, 9.0)),
    expected=(10.0, 12.0, 9.1),
    chosen_bytes=6 * MB + 1,
    decision_s=(0.0011, 0.0024, 0.0),
)


def load(path: str | Path) -> files.Saved[BucketSizeResult]:
    return files.load(path, BucketSizeResult)


def test_plan_file_round_trip_is_equal(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.save(path, TUNED, KEY)
    known = load(path)
    assert known.record == TUNED
    assert known.key == KEY
    files.save(str(path), TUNED, {})
    assert load(str(path)).key == {}
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_plan_file_keeps_tuned_topologies(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    samples = (Sample(25 * MB, 10.0, "ring"), Sample(25 * MB, 12.0, "mesh"))
    found = replace(
        TUNED, samples=samples, expected=(10.0, 12.0), decision_s=(0.0, 0.0), chosen_bytes=25 * MB,
        chosen_topology="mesh",
    )  # fmt: skip
    files.save(path, found, KEY)
    assert load(path).record == found
    assert found.chosen_index == 1
    path.write_text(path.read_text().replace('"chosen_topology": "mesh"', '"chosen_topology": 7'))
    with pytest.raises(UsageError, match="chosen_topology is 7; allowed: a string"):
        load(path)


@given(
    samples=st.lists(
        st.builds(Sample, st.integers(1, 2**32), st.floats(1e-9, 1e9)), min_size=1, max_size=6
    ),
    data=st.data(),
)
def test_plan_file_any_result_round_trip_is_equal(tmp_path_factory, samples, data) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    count = len(samples)
    result = BucketSizeResult(
        search=data.draw(st.sampled_from(["bo", "random", "grid"])),
        low_bytes=1,
        high_bytes=2**32,
        steps=data.draw(st.integers(1, 10_000)),
        samples=tuple(samples),
        expected=tuple(data.draw(st.lists(st.floats(1e-9, 1e9), min_size=count, max_size=count))),
        chosen_bytes=data.draw(st.sampled_from(samples)).bucket_bytes,
        decision_s=tuple(data.draw(st.lists(st.floats(0, 10), min_size=count, max_size=count))),
    )
    files.save(path, result, KEY)
    assert load(path).record == result


def test_plan_file_keeps_untuned_result(tmp_path: Path) -> None:
    rule = Tuning(search="grid", low_bytes=MB, high_bytes=100 * MB)
    path = tmp_path / "plan.json"
    files.save(path, untuned(rule, 25 * MB, 1), KEY)
    assert load(path).record == untuned(rule, 25 * MB, 1)
    assert load(path).record.chosen_bytes == 25 * MB
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["summary"].startswith("nothing to tune")
    for buckets in (0, -1, "1", None):
        path.write_text(json.dumps({**data, "buckets": buckets}))
        with pytest.raises(UsageError, match=r"plan\.json.*damaged"):
            load(path)


def test_plan_file_is_readable(tmp_path: Path) -> None:
    files.save(tmp_path / "plan.json", TUNED, KEY)
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert data["chosen_bytes"] == 6 * MB + 1
    assert data["summary"] == TUNED.explain()
    assert (data["low_bytes"], data["high_bytes"]) == (MB, 100 * MB)
    assert [sample["bucket_bytes"] for sample in data["samples"]] == [25 * MB, 6 * MB + 1, MB]
    assert data["samples"][1]["iterations_per_s"] == 12.2
    assert data["key"]["workers"] == 4


def test_plan_file_matches_same_key_only(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.save(path, TUNED, KEY)
    known = load(path)
    assert known.matches(KEY)
    assert known.matches({**KEY, "shapes": [("w", (3, 4), "float32")]})
    assert not known.matches({**KEY, "workers": 8})
    assert not known.matches({k: v for k, v in KEY.items() if k != "links"})
    assert not known.matches({**KEY, "more": 1})


def test_plan_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    files.save(path, TUNED, KEY)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"plan\.json.*No space left"):
        files.save(path, TUNED, {})
    assert load(path).key == KEY
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_plan_file_planted_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the folder could have any file of this user's overwritten."""
    path, precious = tmp_path / "plan.json", tmp_path / "precious"
    precious.write_text("mine", encoding="utf-8")
    monkeypatch.setattr(secrets, "token_hex", lambda _nbytes: "guessed")
    for guess in (str(os.getpid()), "guessed"):
        (tmp_path / f".plan.json.{guess}.part").symlink_to(precious)
    with pytest.raises(UsageError, match=r"cannot write plan file .*plan\.json.*File exists"):
        files.save(path, TUNED, KEY)
    assert precious.read_text(encoding="utf-8") == "mine"
    assert len(list(tmp_path.iterdir())) == 3, "the links are somebody else's"


def test_plan_file_symbolic_link_stays_and_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    link, target = tmp_path / "plan.json", tmp_path / "shared" / "plan.json"
    link.symlink_to(target)
    for key in (KEY, {}):  # at first it points to untuned
        files.save(link, TUNED, key)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert load(target).key == key
    assert len(list(tmp_path.rglob("*"))) == 3


def test_plan_file_mode_is_that_of_new_files(tmp_path: Path) -> None:
    path, usual = tmp_path / "plan.json", tmp_path / "usual"
    usual.touch()
    files.save(path, TUNED, KEY)
    assert path.stat().st_mode == usual.stat().st_mode


def test_plan_file_name_too_long_is_named(tmp_path: Path) -> None:
    """What is written first has a longer name, so it can neither be written nor removed."""
    path = tmp_path / ("p" * 250)
    with pytest.raises(UsageError, match=r"cannot write plan file .*File name too long"):
        files.save(path, TUNED, KEY)


def test_plan_file_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "plan.json"
    with pytest.raises(UsageError, match=r"there is no folder '.*none'"):
        files.save(path, TUNED, KEY)
    with pytest.raises(UsageError, match="No such file"):
        load(path)


def test_plan_file_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        files.save(tmp_path, TUNED, KEY)
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)


CONTENT = {
    "format": files.FORMAT, "version": files.VERSION, **to_json(TUNED), "key": KEY,
}  # fmt: skip


def change(*path: Any, to: Any) -> dict[str, Any]:
    """A saved file's content with one value changed; ``...`` takes it away."""
    data = copy.deepcopy(CONTENT)
    where: Any = data
    for key in path[:-1]:
        where = where[key]
    if to is ...:
        del where[path[-1]]
    else:
        where[path[-1]] = to
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (change("version", to=2), "version 2; this wingbeat reads version 1"),
        (change("version", to=...), "version None"),
        (change("format", to="json"), "not a plan file"),
        (change("search", to="magic"), "'magic'; allowed: bo, random, grid"),
        (change("search", to=["bo"]), "allowed: a string"),
        (change("samples", to=[]), "one value for each sample"),
        (change("samples", 0, to=...), "one value for each sample"),
        (change("samples", to={}), "samples is {}"),
        (change("samples", 1, to=3), "samples[1] is 3"),
        (change("samples", 1, "iterations_per_s", to="fast"), "'fast'"),
        (change("samples", 1, "iterations_per_s", to=0), "iterations_per_s is 0"),
        (change("samples", 1, "iterations_per_s", to=math.nan), "nan"),
        (change("samples", 1, "iterations_per_s", to=10**400), "allowed: a number"),
        (change("samples", 1, "iterations_per_s", to=1e-300), "allowed: 1e-12 or more"),
        (change("chosen_bytes", to=7963.0), "7963.0"),
        (change("key", to={"parameters": "\ud800"}), "damaged"),
        (change("samples", 1, "iterations_per_s", to=True), "True"),
        (change("expected", to=...), "expected is missing"),
        (change("decision_s", 0, to=-1), "decision_s is -1"),
        (change("decision_s", to=[]), "one value for each sample"),
        (change("steps", to=0), "steps is 0"),
        (change("steps", to=2.5), "2.5"),
        (change("steps", to=True), "True"),
        (change("kind", to="probe"), "not 'bucket size'"),
        (change("chosen_bytes", to=5), "chosen_bytes is 5"),
        (change("chosen_bytes", to=...), "chosen_bytes is missing"),
        (change("samples", 0, "bucket_bytes", to=-1), "-1"),
        (change("samples", 0, "bucket_bytes", to=25.5), "25.5"),
        (change("low_bytes", to=0), "low_bytes is 0"),
        (change("high_bytes", to=1), "high_bytes is 1"),
        (change("key", to=[]), "key is []"),
        ([], "not a plan file"),
        (3, "not a plan file"),
    ],
)
def test_plan_file_invalid_value_is_one_line(tmp_path: Path, data: Any, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load(path)
    assert words in str(caught.value)
    assert "plan.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut off", "no text", "deep", "long number"],
)
def test_plan_file_damaged_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    words = r"plan\.json' is damaged: .*; name another, or delete the file"
    with pytest.raises(UsageError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_plan_file_truncated_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.save(path, TUNED, KEY)
    content = path.read_bytes().rstrip()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(UsageError):
            load(path)
