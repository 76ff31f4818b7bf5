from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.errors import UsageError
from wingbeat.planning.costs import NOTHING, Costs, Curve, Line, Pieces, Sorting, Workload, curve_of

PIECES = Pieces((10.0, 20.0, 40.0), (1.0, 2.0, 2.5))
CURVES: list[Curve] = [
    NOTHING,
    Line(1e-3, 2e-9),
    Sorting(3e-10, 0.001),
    Sorting(3e-10, 0.001, 5e-6),
    PIECES,
    Pieces((3.0,), (0.5,)),
]


def test_values() -> None:
    assert Line(1.0, 2.0)(3.0) == 7.0
    assert Sorting(2.0, 0.5, 1.0)(8.0) == pytest.approx(1.0 + 8 * math.log(8))
    assert Sorting(2.0, 0.5)(1.0) == 0.0
    assert Sorting(2.0, 0.5, 3.0)(0.25) == 3.0
    assert [PIECES(x) for x in (10.0, 15.0, 20.0, 30.0, 40.0)] == [1.0, 1.5, 2.0, 2.25, 2.5]


def test_the_first_and_the_last_piece_go_on_but_not_below_zero() -> None:
    assert PIECES(5.0) == 0.5
    assert PIECES(80.0) == pytest.approx(3.5)
    steep = Pieces((10.0, 20.0), (1.0, 5.0))
    assert steep(8.0) == pytest.approx(0.2)
    assert steep(1.0) == 0.0
    assert Pieces((3.0,), (0.5,))(1e9) == 0.5


@pytest.mark.parametrize("curve", CURVES, ids=repr)
def test_nothing_takes_no_time(curve: Curve) -> None:
    assert curve(0) == 0.0
    assert curve(np.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("curve", CURVES, ids=repr)
@given(amounts=st.lists(st.floats(0, 1e12), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
def test_arrays_hold_what_single_amounts_give_and_never_fall(curve: Curve, amounts) -> None:
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
def test_a_curve_survives_json(curve: Curve) -> None:
    assert curve_of(json.loads(json.dumps(curve.to_json())), "here") == curve


LINE = {"kind": "line", "alpha_s": 1.0, "beta_s_per_unit": 2.0}
POINTS = {"kind": "pieces", "amounts": [1, 2], "seconds": [1, 2]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "None"),
        ([], "[]"),
        ({}, "kind None; allowed are line, pieces, sorting"),
        ({**LINE, "kind": "lin"}, "'lin'"),
        ({**LINE, "kind": ["line"]}, "['line']"),
        ({**LINE, "alpha_s": -1}, "alpha=-1"),
        ({**LINE, "alpha_s": "1"}, "alpha_s is '1'"),
        ({**LINE, "alpha_s": True}, "alpha_s is True"),
        ({**LINE, "alpha_s": math.nan}, "alpha_s is nan"),
        ({**LINE, "beta_s_per_unit": math.inf}, "inf"),
        ({**LINE, "beta_s_per_unit": 10**400}, "finite numbers"),
        ({"kind": "line", "alpha_s": 1.0}, "beta_s_per_unit is None"),
        ({"kind": "sorting", "gamma_s": 1, "density": 2, "fixed_s": 0}, "density=2.0"),
        ({"kind": "sorting", "gamma_s": 1, "density": 0, "fixed_s": 0}, "density=0.0"),
        ({**POINTS, "amounts": 3}, "amounts is 3"),
        ({**POINTS, "amounts": [1, "2"]}, "amounts is '2'"),
        ({**POINTS, "amounts": [1]}, "1 amounts and 2 seconds"),
        ({**POINTS, "amounts": [2, 1]}, "rising"),
        ({**POINTS, "amounts": [0, 1]}, "above 0"),
        ({**POINTS, "seconds": [2, 1]}, "not falling"),
        ({**POINTS, "seconds": [-2, 1]}, "-2"),
        ({"kind": "pieces", "amounts": [], "seconds": []}, "at least one"),
    ],
)
def test_a_damaged_curve_is_one_line(data: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        curve_of(data, "probe.exchange")
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


def test_a_workload_knows_its_length() -> None:
    assert len(workload()) == 2
    assert len(Workload((), (), (), (), ())) == 0
    assert Costs(NOTHING, Line(1.0, 0.0)).exchange(1.0) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"numels": (1,)}, "2, 2, 1, 2, 2"),
        ({"tensors": (1, 1)}, "twice"),
        ({"ready_s": (1.0, 0.5)}, "falls from 1.0 to 0.5"),
        ({"ready_s": (-1.0, 0.5)}, "ready_s has -1.0"),
        ({"ready_s": (0.0, math.nan)}, "ready_s has nan"),
        ({"numels": (1, -2)}, "numels has -2"),
        ({"nbytes": (1.0, -2.0)}, "nbytes has -2.0"),
        ({"nbytes": (1.0, math.inf)}, "nbytes has inf"),
    ],
)
def test_a_wrong_workload_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        workload(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
