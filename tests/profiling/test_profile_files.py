"""Files of profiles: what is read, and what is refused."""

from __future__ import annotations

import json

import pytest

from helpers.profiles import TINY
from wingbeat.errors import UsageError
from wingbeat.profiling import decode, encode


def test_encode_and_decode_are_inverse() -> None:
    profile = decode(json.dumps(TINY), where="here")
    assert decode(encode(profile), where="here") == profile


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"name": None}, "'name' must be a str"),
        ({"batch_size": 0}, "must be > 0"),
        ({"batch_size": True}, "'batch_size' must be a int"),
        ({"samples_per_second": -1}, "'samples_per_second' must be a number >= 0"),
        ({"samples_per_second": 50.0}, "but its layers make 20.000 ms"),
        ({"params": 41}, "params is 41 but its layers make 40"),
        ({"layers": ["x"]}, "layer 0: must be a JSON object"),
        ({"layers": TINY["layers"] * 2, "samples_per_second": 50.0}, "more than once"),
        ({"layers": [{**TINY["layers"][0], "parameters": {"w": [0]}}]}, "positive sizes"),
        ({"layers": [{**TINY["layers"][0], "parameters": {"w.x": [1]}}]}, "without dots"),
        ({"layers": [{**TINY["layers"][0], "forward_ms": "6"}]}, "'forward_ms' must be a number"),
    ],
)
def test_a_broken_profile_is_refused_naming_the_field(change: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError, match=r"profile my\.json") as caught:
        decode(json.dumps({**TINY, **change}), where="my.json")
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5000], ids=["cut", "deep", "long"])
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"profile my\.json: not JSON"):
        decode(text, where="my.json")
