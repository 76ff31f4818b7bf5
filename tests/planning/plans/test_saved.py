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
from wingbeat.planning.plans import planfile, saved
from wingbeat.planning.plans.result import Result, nothing
from wingbeat.planning.plans.sample import Sample
from wingbeat.types import Tuning

MB = 2**20
KEY = {"parameters": "ab12", "workers": 4, "links": 2, "shapes": [["w", [3, 4], "float32"]]}
TUNED = Result(
    search="bo",
    low_bytes=MB,
    high_bytes=100 * MB,
    steps=10,
    samples=(Sample(25 * MB, 10.0), Sample(6 * MB + 1, 12.2), Sample(MB, 9.0)),
    expected=(10.0, 12.0, 9.1),
    chosen_bytes=6 * MB + 1,
    costs_s=(0.0011, 0.0024, 0.0),
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved.save(path, TUNED, KEY)
    known = saved.load(path)
    assert known.result == TUNED
    assert known.key == KEY
    assert known.chosen_bytes == 6 * MB + 1
    saved.save(str(path), TUNED, {})
    assert saved.load(str(path)).key == {}
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_topologies_are_saved_where_they_were_tuned(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    samples = (Sample(25 * MB, 10.0, "ring"), Sample(25 * MB, 12.0, "mesh"))
    found = replace(
        TUNED, samples=samples, expected=(10.0, 12.0), costs_s=(0.0, 0.0), chosen_bytes=25 * MB,
        chosen_topology="mesh",
    )  # fmt: skip
    saved.save(path, found, KEY)
    assert saved.load(path).result == found
    assert found.chosen_index == 1
    path.write_text(path.read_text().replace('"chosen_topology": "mesh"', '"chosen_topology": 7'))
    with pytest.raises(UsageError, match="chosen_topology=7 has to be a name"):
        saved.load(path)


@given(
    samples=st.lists(
        st.builds(Sample, st.integers(1, 2**32), st.floats(1e-9, 1e9)), min_size=1, max_size=6
    ),
    data=st.data(),
)
def test_every_result_survives(tmp_path_factory, samples, data) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    count = len(samples)
    result = Result(
        search=data.draw(st.sampled_from(["bo", "random", "grid"])),
        low_bytes=1,
        high_bytes=2**32,
        steps=data.draw(st.integers(1, 10_000)),
        samples=tuple(samples),
        expected=tuple(data.draw(st.lists(st.floats(1e-9, 1e9), min_size=count, max_size=count))),
        chosen_bytes=data.draw(st.sampled_from(samples)).nbytes,
        costs_s=tuple(data.draw(st.lists(st.floats(0, 10), min_size=count, max_size=count))),
    )
    saved.save(path, result, KEY)
    assert saved.load(path).result == result


def test_that_there_was_nothing_to_tune_is_kept(tmp_path: Path) -> None:
    rule = Tuning(search="grid", low_bytes=MB, high_bytes=100 * MB)
    path = tmp_path / "plan.json"
    saved.save(path, nothing(rule, 25 * MB, 1), KEY)
    assert saved.load(path).result == nothing(rule, 25 * MB, 1)
    assert saved.load(path).chosen_bytes == 25 * MB
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["why"].startswith("nothing to tune")
    for buckets in (0, -1, "1", None):
        path.write_text(json.dumps({**data, "buckets_of_every_size": buckets}))
        with pytest.raises(UsageError, match=r"plan\.json.*damaged"):
            saved.load(path)


def test_people_can_read_it(tmp_path: Path) -> None:
    saved.save(tmp_path / "plan.json", TUNED, KEY)
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert data["chosen_mb"] == 6.0
    assert data["why"] == TUNED.explain()
    assert data["range_mb"] == [1.0, 100.0]
    assert [sample["mb"] for sample in data["samples"]] == [25.0, 6.0, 1.0]
    assert data["samples"][1]["iterations_per_s"] == 12.2
    assert data["key"]["workers"] == 4


def test_it_matches_the_same_model_and_cluster_only(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved.save(path, TUNED, KEY)
    known = saved.load(path)
    assert planfile.same_key(known.key, KEY)
    assert planfile.same_key(known.key, {**KEY, "shapes": [("w", (3, 4), "float32")]})
    assert not planfile.same_key(known.key, {**KEY, "workers": 8})
    assert not planfile.same_key(known.key, {k: v for k, v in KEY.items() if k != "links"})
    assert not planfile.same_key(known.key, {**KEY, "more": 1})


def test_the_file_is_replaced_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    saved.save(path, TUNED, KEY)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"plan\.json.*No space left"):
        saved.save(path, TUNED, {})
    assert saved.load(path).key == KEY
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_laid_in_the_way_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the folder could have any file of this user's overwritten."""
    path, precious = tmp_path / "plan.json", tmp_path / "precious"
    precious.write_text("mine", encoding="utf-8")
    monkeypatch.setattr(secrets, "token_hex", lambda _nbytes: "guessed")
    for guess in (str(os.getpid()), "guessed"):
        (tmp_path / f".plan.json.{guess}.part").symlink_to(precious)
    with pytest.raises(UsageError, match=r"cannot write plan file .*plan\.json.*File exists"):
        saved.save(path, TUNED, KEY)
    assert precious.read_text(encoding="utf-8") == "mine"
    assert len(list(tmp_path.iterdir())) == 3, "the links are somebody else's"


def test_a_link_to_a_plan_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    link, target = tmp_path / "plan.json", tmp_path / "shared" / "plan.json"
    link.symlink_to(target)
    for key in (KEY, {}):  # at first it points to nothing
        saved.save(link, TUNED, key)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert saved.load(target).key == key
    assert len(list(tmp_path.rglob("*"))) == 3


def test_others_may_read_the_file_as_any_new_one(tmp_path: Path) -> None:
    path, usual = tmp_path / "plan.json", tmp_path / "usual"
    usual.touch()
    saved.save(path, TUNED, KEY)
    assert path.stat().st_mode == usual.stat().st_mode


def test_a_file_that_cannot_even_be_begun_is_named(tmp_path: Path) -> None:
    """What is written first has a longer name, so it can neither be written nor removed."""
    path = tmp_path / ("p" * 250)
    with pytest.raises(UsageError, match=r"cannot write plan file .*File name too long"):
        saved.save(path, TUNED, KEY)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "plan.json"
    with pytest.raises(UsageError, match=r"there is no folder '.*none'"):
        saved.save(path, TUNED, KEY)
    with pytest.raises(UsageError, match="No such file"):
        saved.load(path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        saved.save(tmp_path, TUNED, KEY)
    with pytest.raises(UsageError, match="cannot read"):
        saved.load(tmp_path)


def change(*path: Any, to: Any) -> dict[str, Any]:
    """A saved file's content with one value changed; ``...`` takes it away."""
    data = copy.deepcopy(saved._to_json(TUNED, KEY))
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
        (change("format", to="json"), "no plan file"),
        (change("search", to="magic"), "'magic'; allowed are bo, random, grid"),
        (change("search", to=["bo"]), "allowed are bo"),
        (change("samples", to=[]), "equally long"),
        (change("samples", 0, to=...), "equally long"),
        (change("samples", to={}), "'samples'"),
        (change("samples", 1, to=3), "'samples'"),
        (change("samples", 1, "iterations_per_s", to="fast"), "'fast'"),
        (change("samples", 1, "iterations_per_s", to=0), "iterations_per_s holds 0"),
        (change("samples", 1, "iterations_per_s", to=math.nan), "nan"),
        (change("samples", 1, "iterations_per_s", to=10**400), "allowed are numbers"),
        (change("samples", 1, "iterations_per_s", to=1e-300), "allowed are numbers"),
        (change("bytes", "chosen", to=7963.0), "7963.0"),
        (change("key", to={"parameters": "\ud800"}), "damaged"),
        (change("samples", 1, "iterations_per_s", to=True), "True"),
        (change("samples", 1, "expected_iterations_per_s", to=...), "expected_iterations_per_s"),
        (change("decision_s", 0, to=-1), "decision_s holds -1"),
        (change("decision_s", to=[]), "equally long"),
        (change("steps_per_trial", to=0), "steps_per_trial holds 0"),
        (change("steps_per_trial", to=2.5), "2.5"),
        (change("steps_per_trial", to=True), "True"),
        (change("bytes", to=...), "'bytes'"),
        (change("bytes", "chosen", to=5), "chosen=5"),
        (change("bytes", "chosen", to=...), "chosen holds None"),
        (change("bytes", "samples", 0, to=-1), "-1"),
        (change("bytes", "samples", 0, to=25.5), "25.5"),
        (change("bytes", "range", to=[1]), "range=[1]"),
        (change("bytes", "range", to=[9, 1]), "range=[9, 1]"),
        (change("key", to=[]), "'key'"),
        ([], "no plan file"),
        (3, "no plan file"),
    ],
)
def test_a_file_that_is_not_right_is_one_line(tmp_path: Path, data: Any, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        saved.load(path)
    assert words in str(caught.value)
    assert "plan.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut off", "no text", "deep", "long number"],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    words = r"plan\.json' is damaged: .*; name another, or delete the file"
    with pytest.raises(UsageError, match=words) as caught:
        saved.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved.save(path, TUNED, KEY)
    content = path.read_bytes().rstrip()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(UsageError):
            saved.load(path)
