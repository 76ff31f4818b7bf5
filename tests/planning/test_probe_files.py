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
from wingbeat.planning import files
from wingbeat.planning.measure import key_of
from wingbeat.planning.probe import Probe
from wingbeat.schema import MalformedMessage, from_json, to_json

KEY = key_of(SPECS, 16, ["eth0", "eth1"], WIRE, "payload all-gather")


def load(path: str | Path) -> files.Saved[Probe]:
    return files.load(path, Probe)


def test_probe_file_round_trip_is_equal(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    files.save(path, probe(), KEY)
    known = load(path)
    assert known.record == probe()
    assert known.key == KEY
    files.save(str(path), probe(1), {})
    assert load(str(path)).record == probe(1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["probe.json"]


def test_probe_json_round_trip_is_equal() -> None:
    assert from_json(Probe, json.loads(json.dumps(to_json(probe()))), "probe") == probe()
    for other in (None, [], "probe", 3):
        with pytest.raises(MalformedMessage, match="probe is"):
            from_json(Probe, other, "probe")


def test_probe_gather_is_kept_if_measured() -> None:
    found = replace(probe(), gather=probe().exchange, collective="reduce-scatter")
    text = to_json(found)
    assert from_json(Probe, json.loads(json.dumps(text)), "probe") == found
    assert any(line.startswith("all-gather in the next forward") for line in found.explain())
    del text["gather"]
    assert from_json(Probe, text, "probe").gather is None


def test_probe_file_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    files.save(path, probe(), KEY)
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    assert data["summary"] == probe().explain()
    assert data["rest_s"] == 0.031
    assert data["gradients"][1] == {"tensor": 2, "name": "fc.weight", "ready_s": 0.004}
    assert '\n    {"tensor": 2, "name": "fc.weight", "ready_s": 0.004},\n' in text
    assert max(map(len, text.splitlines())) < 400
    assert len(text.splitlines()) > 30
    assert all(isinstance(data[key], dict) for key in ("encode", "exchange", "key"))  # fmt: skip


def test_probe_file_matches_same_key_only(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    files.save(path, probe(), KEY)
    known = load(path)
    assert known.matches(KEY)
    assert known.matches({**KEY, "links": ("eth0", "eth1")})
    assert not known.matches({**KEY, "workers": 8})
    assert not known.matches({**KEY, "more": 1})
    assert not known.matches({})


def test_probe_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "probe.json"
    files.save(path, probe(), KEY)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"probe\.json.*No space left"):
        files.save(path, probe(1), {})
    assert load(path).key == KEY
    assert [entry.name for entry in tmp_path.iterdir()] == ["probe.json"]


def test_probe_file_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "probe.json"
    with pytest.raises(UsageError, match=r"there is no folder '.*none'"):
        files.save(path, probe(), KEY)
    with pytest.raises(UsageError, match="No such file"):
        load(path)
    with pytest.raises(UsageError, match="cannot write"):
        files.save(tmp_path, probe(), KEY)
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)


CONTENT = {"format": files.FORMAT, "version": files.VERSION, **to_json(probe()), "key": KEY}


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
        ([], "not a plan file"),
        (3, "not a plan file"),
        (change("format", to="wingbeat bucket plan"), "not a plan file"),
        (change("version", to=2), "version 2; this wingbeat reads version 1"),
        (change("version", to=...), "version None"),
        (change("workers", to=0), "workers is 0"),
        (change("workers", to=True), "workers is True"),
        (change("workers", to=2.0), "workers is 2.0"),
        (change("links", to="eth0"), "links is 'eth0'; allowed: a list"),
        (change("links", to=["eth0", 3]), "links[1] is 3"),
        (change("wire", to=None), "wire is None"),
        (change("collective", to="ring"), "collective is 'ring'; allowed: payload all-gather"),
        (change("collective", to=["all-reduce"]), "collective is"),
        (change("rest_s", to=-1), "rest_s is -1"),
        (change("rest_s", to=math.nan), "nan"),
        (change("rest_s", to=10**400), "rest_s is"),
        (change("rest_s", to=...), "rest_s is missing"),
        (change("key", to=[]), "key is []; allowed: an object"),
        (change("key", to={"wire": "\ud800"}), "damaged"),
        (change("gradients", to=...), "gradients is missing"),
        (change("gradients", to=[]), "each tensor once"),
        (change("gradients", to={}), "allowed: a list"),
        (change("gradients", 1, to=7), "gradients[1] is 7"),
        (change("gradients", 1, "ready_s", to="soon"), "'soon'"),
        (change("gradients", 1, "ready_s", to=9.0), "gradients.ready_s falls"),
        (change("gradients", 1, "ready_s", to=True), "ready_s is True"),
        (change("gradients", 1, "tensor", to=3), "each tensor once"),
        (change("gradients", 1, "tensor", to=-1), "each tensor once"),
        (change("gradients", 1, "tensor", to=10**9), "each tensor once"),
        (change("gradients", 1, "name", to=...), "name is missing"),
        (change("interfaces", to=...), "interfaces is missing"),
        (change("interfaces", 0, to="eth0"), "interfaces[0] is 'eth0'"),
        (change("interfaces", 0, "name", to=0), "interfaces[0].name is 0"),
        (change("interfaces", 0, "all_gather", to=...), "all_gather is missing"),
        (change("interfaces", 1, "all_reduce", to=[]), "all_reduce is []"),
        (change("encode", to=...), "encode is missing"),
        (change("encode", to={}), "encode.curve is missing"),
        (change("exchange", to=5), "exchange is 5"),
    ],
)  # fmt: skip
def test_probe_file_invalid_value_is_one_line(tmp_path: Path, data: Any, words: str) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load(path)
    assert words in str(caught.value)
    assert "probe.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, "x", -1, [], {}, math.nan, True, 10**400])
def test_probe_file_any_damage_in_fit_is_one_line(tmp_path: Path, value: Any) -> None:
    """Every value inside a fit, replaced: refused in one line, or no error at all."""
    path = tmp_path / "probe.json"
    for places in list(_places(CONTENT["exchange"])):
        path.write_text(json.dumps(change("exchange", *places, to=value)), "utf-8")
        said = ""
        try:
            known = load(path)
            known.record.explain()
            known.record.costs().exchange(1000.0)
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
def test_probe_file_damaged_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(content)
    words = r"probe\.json' is damaged: .*; name another, or delete the file"
    with pytest.raises(UsageError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_probe_file_truncated_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    files.save(path, probe(), KEY)
    content = path.read_bytes().rstrip()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(UsageError):
            load(path)
