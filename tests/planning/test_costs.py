from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.errors import UsageError
from wingbeat.planning.costs import (
    ZERO,
    CostModel,
    Curve,
    Linear,
    Linearithmic,
    PiecewiseLinear,
    Workload,
)
from wingbeat.schema import MalformedMessage, from_json, to_json

AnyCurve: Any = Linear | Linearithmic | PiecewiseLinear
PIECES = PiecewiseLinear((10.0, 20.0, 40.0), (1.0, 2.0, 2.5))
CURVES: list[Curve] = [
    ZERO,
    Linear(1e-3, 2e-9),
    Linearithmic(3e-10, 0.001),
    Linearithmic(3e-10, 0.001, 5e-6),
    PIECES,
    PiecewiseLinear((3.0,), (0.5,)),
]


def test_curves_give_expected_values() -> None:
    assert Linear(1.0, 2.0)(3.0) == 7.0
    assert Linearithmic(2.0, 0.5, 1.0)(8.0) == pytest.approx(1.0 + 8 * math.log(8))
    assert Linearithmic(2.0, 0.5)(1.0) == 0.0
    assert Linearithmic(2.0, 0.5, 3.0)(0.25) == 3.0
    assert [PIECES(x) for x in (10.0, 15.0, 20.0, 30.0, 40.0)] == [1.0, 1.5, 2.0, 2.25, 2.5]


def test_piecewise_linear_extrapolates_but_not_below_zero() -> None:
    assert PIECES(5.0) == 0.5
    assert PIECES(80.0) == pytest.approx(3.5)
    steep = PiecewiseLinear((10.0, 20.0), (1.0, 5.0))
    assert steep(8.0) == pytest.approx(0.2)
    assert steep(1.0) == 0.0
    assert PiecewiseLinear((3.0,), (0.5,))(1e9) == 0.5


@pytest.mark.parametrize("curve", CURVES, ids=repr)
def test_curves_amount_zero_takes_no_time(curve: Curve) -> None:
    assert curve(0) == 0.0
    assert curve(np.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("curve", CURVES, ids=repr)
@given(amounts=st.lists(st.floats(0, 1e12), min_size=1, max_size=40))
@settings(deadline=None, max_examples=examples(50))
def test_curves_arrays_equal_single_values_and_never_fall(curve: Curve, amounts) -> None:
    amounts.sort()
    values = curve(np.array(amounts))
    assert values.dtype == np.float64
    assert values.tolist() == [curve(amount) for amount in amounts]
    assert np.isfinite(values).all()
    assert (values >= 0).all()
    assert (np.diff(values) >= 0).all()
    square = curve(np.array([amounts, amounts]))
    assert square.tolist() == [values.tolist()] * 2


@pytest.mark.parametrize("curve", CURVES, ids=repr)
def test_curve_json_round_trip_is_equal(curve: Curve) -> None:
    assert from_json(AnyCurve, json.loads(json.dumps(to_json(curve))), "here") == curve


LINE = {"kind": "linear", "alpha": 1.0, "beta": 2.0}
POINTS = {"kind": "piecewise linear", "amounts": [1, 2], "seconds": [1, 2]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "None"),
        ([], "[]"),
        ({}, "kind is None; allowed: linear, linearithmic, piecewise linear"),
        ({**LINE, "kind": "lin"}, "'lin'"),
        ({**LINE, "kind": ["linear"]}, "['linear']"),
        ({**LINE, "alpha": -1}, "alpha is -1"),
        ({**LINE, "alpha": "1"}, "alpha is '1'"),
        ({**LINE, "alpha": True}, "alpha is True"),
        ({**LINE, "alpha": math.nan}, "alpha is nan"),
        ({**LINE, "beta": math.inf}, "inf"),
        ({**LINE, "beta": 10**400}, "a number from -1e+15 to 1e+15"),
        ({"kind": "linear", "alpha": 1.0}, "beta is missing"),
        ({"kind": "linearithmic", "gamma": 1, "density": 2, "fixed": 0}, "density is 2.0"),
        ({"kind": "linearithmic", "gamma": 1, "density": 0, "fixed": 0}, "density is 0.0"),
        ({**POINTS, "amounts": 3}, "amounts is 3"),
        ({**POINTS, "amounts": [1, "2"]}, "amounts[1] is '2'"),
        ({**POINTS, "amounts": [1]}, "1 amounts and 2 seconds"),
        ({**POINTS, "amounts": [2, 1]}, "rising"),
        ({**POINTS, "amounts": [0, 1]}, "above 0"),
        ({**POINTS, "seconds": [2, 1]}, "not falling"),
        ({**POINTS, "seconds": [-2, 1]}, "-2"),
        ({"kind": "piecewise linear", "amounts": [], "seconds": []}, "at least one"),
    ],
)
def test_curve_damaged_json_is_one_line(data: Any, words: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        from_json(AnyCurve, data, "probe.exchange")
    assert words in str(caught.value)
    assert "probe.exchange" in str(caught.value)
    assert "\n" not in str(caught.value)


def workload(**changes: Any) -> Workload:
    columns: dict[str, Any] = {
        "tensors": (4, 1),
        "ready_s": (0.0, 1.0),
        "numels": (10, 20),
        "nbytes": (60.0, 120.0),
        "kinds": ("float32 cpu", "float32 cpu"),
    }
    return Workload(**{**columns, **changes})


def test_workload_has_length() -> None:
    assert len(workload()) == 2
    assert len(Workload((), (), (), (), ())) == 0
    assert CostModel(ZERO, Linear(1.0, 0.0)).exchange(1.0) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"numels": (1,)}, "2, 2, 1, 2, 2"),
        ({"tensors": (1, 1)}, "twice"),
        ({"ready_s": (1.0, 0.5)}, "falls from 1.0 to 0.5"),
        ({"ready_s": (-1.0, 0.5)}, "ready_s is -1.0"),
        ({"ready_s": (0.0, math.nan)}, "ready_s is nan"),
        ({"numels": (1, -2)}, "numels is -2"),
        ({"nbytes": (1.0, -2.0)}, "nbytes is -2.0"),
        ({"nbytes": (1.0, math.inf)}, "nbytes is inf"),
    ],
)
def test_workload_invalid_values_are_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        workload(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
