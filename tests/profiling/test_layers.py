"""From marks of iterations, in stated milliseconds, to layers."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.profiling import layers
from wingbeat.profiling.layers import Call, Description, Mark, Named, Timed, layers_of, timed

A, B, A2 = Call("a", 1), Call("b", 1), Call("a", 2)
MODEL = Description(
    {
        "a.weight": Named(("a",), "weight", (4, 2)),
        "a.bias": Named(("a",), "bias", (4,)),
        "b.weight": Named(("b",), "weight", (3,)),
        "net.token": Named(("net",), "token", (5,)),
    },
    {"a": "linear", "b": "bn", "net": "net"},
)


def iteration(*marks: tuple[object, ...], batch: int = 8) -> Timed:
    """From (kind, milliseconds since the mark before, call or name)."""
    made, now = [Mark(layers.START, 0.0)], 0.0
    for kind, ms, *what in marks:
        assert isinstance(kind, str)
        assert isinstance(ms, (int, float))
        now += ms
        call = what[0] if what and isinstance(what[0], Call) else None
        name = what[0] if what and isinstance(what[0], str) else ""
        made.append(Mark(kind, now, call, name))
    return timed(made, batch)


def rows(found: Timed, model: Description = MODEL) -> list[tuple[object, ...]]:
    return [
        (x.name, [p.name for p in x.parameters], round(x.forward_ms, 9), round(x.backward_ms, 9))
        for x in layers_of(found, model)
    ]


FORWARD = (("forward", 3), ("layer", 1, A), ("layer", 2, B))
BACKWARD = (
    ("backward", 4),
    ("output", 5, B),
    ("gradient", 6, "b.weight"),
    ("output", 7, A),
    ("gradient", 8, "a.bias"),
    ("gradient", 0.5, "a.weight"),
    ("backward end", 9),
)
STEP = (("step", 10), ("step end", 11))
UNREADY = ("net", ["token"], 0.0, 0.0)


def test_iteration_of_two_layers_is_divided_without_gaps() -> None:
    found = iteration(*FORWARD, *BACKWARD, *STEP)
    assert rows(found) == [
        ("(optimizer)", [], 21, 0),
        ("(data)", [], 3, 0),
        UNREADY,
        ("a", ["weight", "bias"], 1, 17.5),
        ("b", ["weight"], 2, 13),
        ("(loss)", [], 4, 5),
    ]
    assert found.total_ms == pytest.approx(66.5)
    assert [x.kind for x in layers_of(found, MODEL)][-3:] == ["linear", "bn", "loss"]


def test_steps_of_other_optimizers_after_the_first_count_as_optimizer() -> None:
    found = iteration(("step", 1), ("step end", 2), *FORWARD, *BACKWARD, *STEP)
    assert rows(found)[:2] == [("(optimizer)", [], 23, 0), ("(data)", [], 4, 0)]


def test_accumulated_passes_stand_between_the_first_forward_and_the_last_backward() -> None:
    first = (("backward", 1), ("output", 1, A), ("gradient", 1, "a.weight"), ("backward end", 1))
    between = (("forward", 1), ("layer", 1, A), ("layer", 1, B))
    found = iteration(*FORWARD, *first, *between, *BACKWARD, *STEP)
    assert rows(found)[3:] == [
        ("a", ["weight", "bias"], 1, 17.5),
        ("b", ["weight"], 2, 13),
        ("(loss)", [], 1 + 3 + 3 + 4, 5),
    ]
    assert layers_of(found, MODEL)[-1].kind == "accumulation"


def test_gradient_complete_before_the_last_backward_is_ready_at_its_start() -> None:
    first = (("backward", 1), ("gradient", 1, "net.token"), ("backward end", 1))
    found = iteration(*FORWARD, *first, *BACKWARD, *STEP)
    assert rows(found)[-1] == ("net", ["token"], 0, 0)


def test_module_called_twice_has_its_parameters_at_the_first_call() -> None:
    found = iteration(
        ("forward", 0),
        ("layer", 1, A),
        ("layer", 2, B),
        ("layer", 3, A2),
        ("backward", 0),
        ("output", 0, A2),
        ("output", 4, B),
        ("gradient", 5, "b.weight"),
        ("output", 0, A),
        ("gradient", 6, "a.weight"),
        ("gradient", 0, "a.bias"),
        ("backward end", 0),
        *STEP,
    )
    assert rows(found)[2:] == [
        ("a", ["bias", "weight"], 1, 6),
        ("b", ["weight"], 2, 5),
        ("a#2", [], 3, 4),
    ]


@pytest.mark.parametrize("after", [True, False], ids=["after its layer's", "before its layer's"])
def test_parameter_used_directly_is_a_layer_where_its_gradient_is_ready(after: bool) -> None:
    own, direct = ("gradient", 6, "b.weight"), ("gradient", 2, "net.token")
    found = iteration(
        *FORWARD,
        ("backward", 4),
        ("output", 5, B),
        *((own, direct) if after else (direct, own)),
        ("output", 1, A),
        ("backward end", 1),
        *STEP,
    )
    b, net = ("b", ["weight"], 2, 6), ("net", ["token"], 0, 2)
    # The rest of the segment follows the gradient that is ready last.
    last = {True: net, False: b}[after]
    expected = [(*x[:3], x[3] + 1) if x is last else x for x in ((net, b) if after else (b, net))]
    at = [row for row in rows(found) if row[0] in ("b", "net")]
    assert at == expected


def test_shared_parameter_belongs_to_the_call_that_is_first_in_forward() -> None:
    shared = Named(("b", "a"), "weight", (4,))
    model = Description({"b.weight": shared}, {"a": "embedding", "b": "linear"})
    found = iteration(
        *FORWARD,
        ("backward", 0),
        ("output", 0, B),
        ("output", 3, A),
        ("gradient", 4, "b.weight"),
        ("backward end", 0),
        *STEP,
    )
    assert rows(found, model)[2:] == [("a", ["weight"], 1, 4), ("b", [], 2, 3)]


def test_composite_module_is_divided_where_gradients_are_apart() -> None:
    names = ("w1", "w2", "b2")
    model = Description(
        {f"a.{n}": Named(("a",), n, (1,)) for n in names}, {"a": "net"}, frozenset({"a"})
    )
    found = iteration(
        ("forward", 0),
        ("layer", 8, A),
        ("backward", 0),
        ("output", 0, A),
        ("gradient", 2, "a.b2"),
        ("gradient", 0.1, "a.w2"),
        ("gradient", 6, "a.w1"),
        ("backward end", 0),
        *STEP,
    )
    whole = 8.1
    assert rows(found, model)[1:] == [
        ("a", ["w1"], round(8 * 6 / whole, 9), 6),
        ("a#2", ["w2", "b2"], round(8 * 2.1 / whole, 9), 2.1),
    ]
    assert rows(found, Description(model.parameters, model.kinds))[1:] == [
        ("a", ["w1", "w2", "b2"], 8, whole)
    ]


def test_typical_iteration_has_medians_of_those_that_are_alike() -> None:
    def one(ms: float, batch: int = 8) -> Timed:
        return iteration(("forward", ms), *FORWARD[1:], *BACKWARD, *STEP, batch=batch)

    found = layers.typical([one(1), one(100, batch=3), one(5), one(2)])
    assert rows(found)[1] == ("(data)", [], 2, 0)
    assert found.batch == 8


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (iteration(*FORWARD, *BACKWARD, *STEP, batch=3), "one has 8 samples, another 3"),
        (iteration(*FORWARD[:2], *BACKWARD, *STEP), "not all run module 'b'"),
        (
            iteration(*FORWARD, *BACKWARD[:-2], BACKWARD[-1], *STEP),
            "gradients are ready, in different orders",
        ),
    ],
)
def test_iterations_that_differ_are_refused_with_the_difference(other: Timed, words: str) -> None:
    with pytest.raises(UsageError, match="only 1 of 2 measured iterations are alike") as caught:
        layers.typical([iteration(*FORWARD, *BACKWARD, *STEP), other])
    assert words in str(caught.value)


def test_names_are_unique_as_attributes() -> None:
    kinds = {"a.b": "x", "a_b": "x", "a_b#2": "x"}
    parameters = {name: Named((name,), "w", (1,)) for name in kinds}
    found = iteration(*FORWARD, *STEP[:0], ("backward", 0), ("backward end", 1), *STEP)
    found.calls.clear()
    names = [x.attribute for x in layers_of(found, Description(parameters, kinds))]
    assert len(set(names)) == len(names) == 3 + 3
