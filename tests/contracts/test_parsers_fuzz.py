"""Every parser of files and messages raises what its docstring says, whatever it is given.

The rows are those of `helpers.parsers`. Inputs are arbitrary, or valid ones that are spoilt
(`helpers.mutants`).
"""

from __future__ import annotations

import contextlib
import json
import reprlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from helpers import mutants, saved_states
from helpers.parsers import (
    ADDRESSES,
    LIKE,
    PIECES,
    PROFILE,
    RAW,
    SPACE,
    TARGETS,
    TEXTS,
    Target,
    from_bytes,
)

FEW, MANY = 40, 2000
"""Inputs of each parser: in every run, and in the slow one."""

MEMORY = 1 << 30
"""Bytes that a parser may take for inputs that are smaller than a megabyte."""


class Input:
    """What a parser is given, which is shown in one line if it fails."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return reprlib.repr(self.value)


NAMES = [target.name for target in TARGETS]


def changed(document: str, **values: Any) -> str:
    return json.dumps({**json.loads(document), **values})


def changed_layer(**values: Any) -> str:
    return changed(PROFILE, layers=[{**json.loads(PROFILE)["layers"][0], **values}])


def changed_part(**values: Any) -> Any:
    """Residuals of two workers, of which one part has other values."""
    first, second = saved_states.residual_parts("sketch")["list"]
    return {"list": [{"dict": {**first["dict"], **values}}, second]}


def changed_residual(tensor: Any) -> Any:
    first = saved_states.residual_parts("sketch")["list"][0]["dict"]["residuals"]["dict"]
    return changed_part(residuals={"dict": {**first, "scale": tensor}})


def changed_shard(**values: Any) -> Any:
    [part] = saved_states.shard_parts()["list"]
    return {"list": [{"dict": {**part["dict"], **values}}]}


def changed_addresses(**values: str) -> list[Any]:
    secret, host, encrypted, [address, port, name] = ADDRESSES
    own = {"secret": secret, "address": address, "name": name, **values}
    return [own["secret"], host, encrypted, [own["address"], port, own["name"]]]


HUGE = 10**400
ONCE: list[tuple[str, Any]] = [
    (
        "interfaces that join hosts",
        {"identity": "a", "interfaces": [{"name": "e", "address": "x", "subnet": "10.0.0.0/8"}]},
    ),
    ("profile", changed(PROFILE, params="15")),
    ("profile", changed(PROFILE, forward_ms=[])),
    ("profile", changed(PROFILE, batch_size=HUGE)),
    ("profile", changed(PROFILE, samples_per_second=HUGE)),
    ("profile", changed(LIKE, batch_size=HUGE)),
    ("profile", changed_layer(forward_ms=HUGE)),
    ("profile", changed_layer(parameters={"weight": [HUGE]})),
    ("profile", changed_layer(parameters={"weight": [2**50] * 50})),
    ("profile file", b"\xff\xfe"),
    ("values", {"tensor": ["float32", [float("inf")], [1.0], False]}),
    ("parameters on a server", {**PIECES, "numel": float("inf")}),
    ("parameters on a server", {**PIECES, "pieces": [[0, 0, 0, float("inf")], [1, 1, 4, 2]]}),
    ("statuses", "[" * mutants.DEEP),
    ("requests of services", "[" * mutants.DEEP),
    ("metrics address", {"WINGBEAT_METRICS": "9" * 5000}),
    ("address of a job", "node7:" + "9" * 5000),
    ("launchers", {**SPACE, "SLURM_JOB_ID": "9" * 5000}),
    ("first node", "[" * mutants.DEEP),
    ("lab counters", {"spec": "x", "hosts": [], "trunks": {}}),
    ("wires as JSON", ["Half"]),
    ("journals", "[]\n"),
    ("journals", ""),
    ("residuals, sketch", lambda: changed_part(world_size=2**62)),
    ("residuals, sketch", lambda: changed_part(world_size=HUGE * HUGE**20)),
    ("residuals, sketch", lambda: changed_part(step=HUGE)),
    ("residuals, sketch", lambda: changed_residual({"tensor": ["float64", [], [1e300], False]})),
    ("residuals, sketch", lambda: changed_residual({"odd": ["meta", "float32", []]})),
    ("residuals, sketch", lambda: changed_residual({"odd": ["sparse", "float32", []]})),
    ("shards", lambda: changed_shard(world_size=2**62)),
    ("shards", lambda: changed_shard(steps=-1)),
    ("parts of checkpoints", b"PK"),
    ("addresses of a rank", changed_addresses(secret="\ud800")),
    ("addresses of a rank", changed_addresses(address="a" * 64 + ".b")),
    ("addresses of a rank", changed_addresses(address="10.0.0.1\0")),
    ("addresses of a rank", changed_addresses(name="\ud800")),
]
"""Inputs for which parsers raised something else, or took minutes; functions make those of states
that are trained first."""


def attack(target: Target, examples: int) -> None:
    """Give a parser so many inputs."""

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(target.inputs(target.examples).map(Input))
    def run(given_: Input) -> None:
        try:
            target.parse(given_.value)
        except target.errors:
            pass

    with mutants.memory_for(MEMORY):
        run()


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_valid_input_is_read(target: Target) -> None:
    """Else nothing of it would be spoilt, but all refused at its first character."""
    for each in target.examples:
        target.parse(each)


@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_any_input_is_read_or_refused_as_documented(target: Target) -> None:
    attack(target, FEW)


@pytest.mark.parametrize(
    ("name", "given_"), ONCE, ids=[f"{n} {i}" for i, (n, _) in enumerate(ONCE)]
)
def test_input_that_once_got_through_is_read_or_refused(name: str, given_: Any) -> None:
    [target] = (each for each in TARGETS if each.name == name)
    with contextlib.suppress(*target.errors):
        target.parse(given_() if callable(given_) else given_)


def test_inputs_that_were_found_by_coverage_are_read_or_refused() -> None:
    """Those that `tools/fuzz.py parsers --keep` has written."""
    paths = sorted((Path(__file__).parents[1] / "corpus/parsers").iterdir())
    assert len(paths) > 50
    for path in paths:
        name, _, body = path.read_bytes().partition(b"\n")
        [target] = (each for each in TARGETS if each.name == name.decode())
        with contextlib.suppress(*target.errors):
            target.parse(from_bytes(target, body))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_thousands_of_inputs_are_read_or_refused_as_documented(target: Target) -> None:
    attack(target, MANY)


def test_parser_that_lets_another_error_out_is_found() -> None:
    lax = Target("lax", TEXTS, lambda text: json.loads(text)["a"], ('{"a": 1}',), (ValueError,))
    with pytest.raises((TypeError, KeyError, RecursionError)):
        attack(lax, FEW)


def test_parser_that_believes_a_length_is_found() -> None:
    greedy = Target("greedy", RAW, lambda data: bytearray(1 << 40), (b"x",), (ValueError,))
    with pytest.raises(MemoryError):
        attack(greedy, FEW)
