"""What a call of ``step`` was given reaches the optimizer's own, with the closure in its place."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.engine.updates.given import Given
from wingbeat.errors import UsageError


def usual(self: Any, closure: Any = None, bs: int = 1) -> None:
    """As most optimizers have it."""


def behind(self: Any, bs: int, closure: Any = None) -> None:
    """The closure comes second."""


def without(self: Any, bs: Any) -> None:
    """No closure at all."""


def anything(self: Any, *args: Any, **kwargs: Any) -> None:
    """As a wrapper around another step."""


def evaluate() -> float:
    return 1.0


def other() -> float:
    return 2.0


@pytest.mark.parametrize(
    ("step", "args", "kwargs"),
    [
        (usual, (evaluate,), {}),
        (usual, (evaluate, 3), {}),
        (usual, (), {"closure": evaluate}),
        (usual, (), {"bs": 3, "closure": evaluate}),
        (behind, (3, evaluate), {}),
        (anything, (evaluate, 3), {"bs": 3}),
    ],
)
def test_a_closure_is_found_and_replaced_where_it_stands(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = Given(step, args, kwargs)
    assert given.closure is evaluate
    assert given.others == (len(args) + len(kwargs) > 1)
    assert given.passed(evaluate) == (args, kwargs)
    replaced, named = given.passed(other)
    assert [*replaced, *named.values()].count(other) == 1
    assert evaluate not in (*replaced, *named.values())


@pytest.mark.parametrize(
    ("step", "args", "kwargs"),
    [
        (usual, (None, 3), {}),
        (usual, (), {"bs": 3}),
        (behind, (3,), {}),
        (without, (evaluate,), {}),
        (anything, (3,), {}),
    ],
)
def test_arguments_without_a_closure_are_passed_as_they_are(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = Given(step, args, kwargs)
    assert given.closure is None
    assert given.others
    assert given.passed(None) == (args, kwargs)


def test_a_call_without_arguments_takes_a_closure_and_has_no_others() -> None:
    assert not Given().others
    assert not Given(usual, (None,)).others
    assert Given().passed(None) == ((), {})
    assert Given().passed(other) == ((other,), {})


def test_arguments_are_refused_by_their_text_in_one_line() -> None:
    given = Given(usual, (None,), {"bs": "two\nlines"})
    with pytest.raises(UsageError, match=r"step\(None, bs='two.*use wingbeat.DeAR\(\)") as caught:
        given.refuse_others("with shard_optimizer", "wingbeat.DeAR()")
    assert "\n" not in str(caught.value)
    Given(usual, (evaluate,)).refuse_others("with shard_optimizer", "wingbeat.DeAR()")
