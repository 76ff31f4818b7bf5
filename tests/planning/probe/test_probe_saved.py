"""A probe's file: people can read it, and nothing damaged comes back from it."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from probe_made import SPECS, WIRE, probe

from wingbeat.errors import UsageError
from wingbeat.planning.plans import planfile
from wingbeat.planning.probe import saved
from wingbeat.planning.probe.model import key_of

KEY = key_of(SPECS, 16, ["eth0", "eth1"], WIRE, "gather")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    saved.save(path, probe(), KEY)
    known = saved.load(path)
    assert known.probe == probe()
    assert known.key == KEY
    saved.save(str(path), probe(1), {})
    assert saved.load(str(path)).probe == probe(1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["probe.json"]


def test_it_travels_as_json() -> None:
    assert saved.from_json(json.loads(json.dumps(saved.to_json(probe())))) == probe()
    for other in (None, [], "probe", 3):
        with pytest.raises(UsageError, match="a probe is"):
            saved.from_json(other)


def test_an_all_gather_that_forward_hides_is_kept_where_there_is_one() -> None:
    found = replace(probe(), gather=probe().exchange, way="scatter")
    text = saved.to_json(found)
    assert saved.from_json(json.loads(json.dumps(text))) == found
    assert any(line.startswith("all-gather under the next forward") for line in text["what"])
    del text["gather_s_by_bytes"]
    assert saved.from_json(text).gather is None


def test_people_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    saved.save(path, probe(), KEY)
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    assert data["what"] == probe().explain()
    assert data["rest_s"] == 0.031
    assert data["backward"][1] == {"ready_s": 0.004, "tensor": 2, "name": "fc.weight"}
    assert '\n    {"ready_s": 0.004, "tensor": 2, "name": "fc.weight"},\n' in text
    assert max(map(len, text.splitlines())) < 400
    assert len(text.splitlines()) > 30
    assert all(isinstance(data[key], dict) for key in ("encode_s_by_elements",
               "exchange_s_by_bytes", "key"))  # fmt: skip


def test_it_matches_the_same_model_and_cluster_only(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    saved.save(path, probe(), KEY)
    known = saved.load(path)
    assert planfile.same_key(known.key, KEY)
    assert planfile.same_key(known.key, {**KEY, "links": ("eth0", "eth1")})
    assert not planfile.same_key(known.key, {**KEY, "workers": 8})
    assert not planfile.same_key(known.key, {**KEY, "more": 1})
    assert not planfile.same_key(known.key, {})


def test_the_file_is_replaced_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "probe.json"
    saved.save(path, probe(), KEY)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"probe\.json.*No space left"):
        saved.save(path, probe(1), {})
    assert saved.load(path).key == KEY
    assert [entry.name for entry in tmp_path.iterdir()] == ["probe.json"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "probe.json"
    with pytest.raises(UsageError, match=r"there is no folder '.*none'"):
        saved.save(path, probe(), KEY)
    with pytest.raises(UsageError, match="No such file"):
        saved.load(path)
    with pytest.raises(UsageError, match="cannot write"):
        saved.save(tmp_path, probe(), KEY)
    with pytest.raises(UsageError, match="cannot read"):
        saved.load(tmp_path)


CONTENT = {**saved.to_json(probe()), "key": KEY}


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
        ([], "no probe file"),
        (3, "no probe file"),
        (change("format", to="wingbeat bucket plan"), "no probe file"),
        (change("version", to=2), "version 2; this wingbeat reads version 1"),
        (change("version", to=...), "version None"),
        (change("workers", to=0), "workers holds 0"),
        (change("workers", to=True), "workers holds True"),
        (change("workers", to=2.0), "workers holds 2.0"),
        (change("links", to="eth0"), "'links' is missing or no list"),
        (change("links", to=["eth0", 3]), "links holds 3"),
        (change("wire", to=None), "wire holds None"),
        (change("way", to="ring"), "way='ring'; allowed are gather, reduce"),
        (change("way", to=["gather"]), "way="),
        (change("rest_s", to=-1), "rest_s holds -1"),
        (change("rest_s", to=math.nan), "nan"),
        (change("rest_s", to=10**400), "rest_s holds"),
        (change("rest_s", to=...), "rest_s holds None"),
        (change("key", to=[]), "'key' is missing or no dict"),
        (change("key", to={"wire": "\ud800"}), "damaged"),
        (change("backward", to=...), "'backward' is missing"),
        (change("backward", to=[]), "each tensor once"),
        (change("backward", to={}), "no list"),
        (change("backward", 1, to=7), "'backward' is no list of dicts"),
        (change("backward", 1, "ready_s", to="soon"), "'soon'"),
        (change("backward", 1, "ready_s", to=9.0), "backward.ready_s falls"),
        (change("backward", 1, "ready_s", to=True), "backward.ready_s holds True"),
        (change("backward", 1, "tensor", to=3), "each tensor once"),
        (change("backward", 1, "tensor", to=-1), "backward.tensor holds -1"),
        (change("backward", 1, "tensor", to=10**9), "each tensor once"),
        (change("backward", 1, "name", to=...), "backward.name holds None"),
        (change("interfaces", to=...), "'interfaces' is missing"),
        (change("interfaces", 0, to="eth0"), "'interfaces' is no list of dicts"),
        (change("interfaces", 0, "name", to=0), "interfaces.name holds 0"),
        (change("interfaces", 0, "all_gather_s_by_bytes", to=...), "all_gather_s_by_bytes"),
        (change("interfaces", 1, "all_reduce_s_by_bytes", to=[]), "all_reduce_s_by_bytes"),
        (change("encode_s_by_elements", to=...), "encode_s_by_elements"),
        (change("encode_s_by_elements", to={}), "encode_s_by_elements"),
        (change("exchange_s_by_bytes", to=5), "exchange_s_by_bytes"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_right_is_one_line(tmp_path: Path, data: Any, words: str) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        saved.load(path)
    assert words in str(caught.value)
    assert "probe.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, "x", -1, [], {}, math.nan, True, 10**400])
def test_nothing_but_one_line_whatever_stands_in_a_fit(tmp_path: Path, value: Any) -> None:
    """Every value inside a fit, replaced: refused in one line, or no error at all."""
    path = tmp_path / "probe.json"
    for places in list(_places(CONTENT["exchange_s_by_bytes"])):
        path.write_text(json.dumps(change("exchange_s_by_bytes", *places, to=value)), "utf-8")
        said = ""
        try:
            known = saved.load(path)
            known.probe.explain()
            known.probe.costs().exchange(1000.0)
        except UsageError as err:
            said = str(err)
        assert "\n" not in said


def _places(value: Any, path: tuple[Any, ...] = ()):
    if path:
        yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _places(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value[:3]):
            yield from _places(each, (*path, index))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut off", "no text", "deep", "long number"],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(content)
    words = r"probe\.json' is damaged: .*; name another, or delete the file"
    with pytest.raises(UsageError, match=words) as caught:
        saved.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    saved.save(path, probe(), KEY)
    content = path.read_bytes().rstrip()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(UsageError):
            saved.load(path)
