"""Small values cross as JSON and come back the same."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.training import assert_same
from wingbeat.engine.updates.json_values import LIMIT, decode, dtype_of, encode

CPU = torch.device("cpu")

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple), max_leaves=6
)


def _there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))), CPU)


@given(nested)
def test_encode_of_plain_values_round_trips(value: Any) -> None:
    found = _there_and_back(value)
    assert found == value
    assert type(found) is type(value)


@given(
    st.lists(st.floats(width=32), max_size=8),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_encode_of_tensors_round_trips_bit_for_bit(values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values).to(dtype)
    found = _there_and_back(tensor)
    assert_same(found.nan_to_num(7.0), tensor.nan_to_num(7.0))
    assert torch.equal(found.isnan(), tensor.isnan())


def test_encode_of_shapes_integers_and_nan() -> None:
    for tensor in (torch.tensor(3.0), torch.ones(2, 0), torch.tensor([[1], [2**60]])):
        assert_same(_there_and_back(tensor), tensor)
    assert_same(_there_and_back(torch.tensor([True, False])), torch.tensor([True, False]))
    assert math.isnan(_there_and_back(math.nan))


@pytest.mark.parametrize(
    "value", [object(), {"a": 1}, [set()], torch.zeros(LIMIT + 1), torch.zeros(2).cfloat(), 1j]
)
def test_encode_of_unsupported_value_raises(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"set": []},
        {"list": 3},
        {"list": [{"x": 1}]},
        [1],
        {"tensor": 1},
        {"tensor": ["float32", [2], [1.0], False]},
        {"tensor": ["float32", [1], ["a"], False]},
        {"tensor": ["nn", [1], [1.0], False]},
        {"tensor": ["float32", [1], [1.0], "yes"]},
        {"tensor": ["float32", [LIMIT + 1], [0.0] * (LIMIT + 1), False]},
        {"tensor": ["float32", [1], [1.0], False], "list": []},
    ],
)
def test_decode_of_malformed_value_raises(data: Any) -> None:
    with pytest.raises(ValueError, match="malformed"):
        decode(data, CPU)


def test_dtype_of_unknown_name_is_malformed() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    for name in ("nn", "float33", 3, None):
        with pytest.raises(ValueError, match="malformed"):
            dtype_of(name)
