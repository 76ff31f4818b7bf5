"""What is recommended among predictions that overlap."""

from __future__ import annotations

from wingbeat.prediction.predict import EXACT, FEEDBACK, LOCAL_STEPS, Prediction
from wingbeat.prediction.recommendation import Choice, Recommendation, recommend

ORDER = ("ddp", "ddp+hook", "simple", "second", "third", "sketch", "local")
BASELINES = frozenset({"ddp", "ddp+hook", "ddp+unsure"})
KINDS = {"ddp+hook": FEEDBACK, "ddp+unsure": FEEDBACK, "sketch": FEEDBACK, "local": LOCAL_STEPS}


def choose(**milliseconds: float) -> Recommendation:
    """Return what is recommended for predictions with an error of 5%, and 30% of the unsure one."""
    times = {name.replace("_", "+"): ms for name, ms in milliseconds.items()}
    found = {
        name: Prediction(
            iteration_s=ms,
            low_s=0.95 * ms,
            high_s=(1.3 if name == "ddp+unsure" else 1.05) * ms,
            exposed_s=0.0,
            bytes_per_host=0.0,
            memory_bytes=0,
            convergence=KINDS.get(name, EXACT),
        )
        for name, ms in sorted(times.items(), key=lambda item: item[1])
    }
    return recommend(found, ORDER, BASELINES)


def test_recommend_simplest_of_those_within_the_error_of_the_fastest() -> None:
    found = choose(ddp=200, third=100, second=104, simple=108).exact
    assert found == Choice("simple", ("third", "second"), "ddp", faster=True, slower=False)


def test_recommend_slower_beyond_the_error_is_no_tie() -> None:
    found = choose(ddp=200, third=100, second=104, simple=112).exact
    assert found == Choice("second", ("third",), "ddp", faster=True, slower=False)


def test_recommend_tie_that_does_not_beat_ddp_gives_way_to_one_that_does() -> None:
    found = choose(ddp=115, third=100, simple=106).exact
    assert found == Choice("third", ("simple",), "ddp", faster=True, slower=False)


def test_recommend_nothing_faster_beyond_the_error_stays_with_ddp() -> None:
    found = choose(ddp=104, second=100, simple=103).exact
    assert found == Choice("simple", ("second",), "ddp", faster=False, slower=False)
    assert found.used == "ddp"


def test_recommend_tie_that_is_slower_than_ddp_gives_way_to_one_that_is_not() -> None:
    found = choose(ddp=96, second=100, simple=108).exact
    assert found == Choice("second", ("simple",), "ddp", faster=False, slower=False)


def test_recommend_slower_than_ddp_is_marked() -> None:
    found = choose(ddp=80, simple=100).exact
    assert found == Choice("simple", (), "ddp", faster=False, slower=True)


def test_recommend_other_only_if_faster_than_the_exact_one_beyond_the_error() -> None:
    assert choose(ddp=200, simple=100, sketch=92).other is None
    assert choose(ddp=100, simple=200, sketch=92).other is None
    found = choose(ddp=200, simple=100, sketch=88, local=60).other
    assert found == Choice("local", (), "", faster=True, slower=False)
    assert choose(ddp=200, simple=100, sketch=64, local=60).other == Choice(
        "sketch", ("local",), "", faster=True, slower=False
    )


def test_recommend_hook_that_is_as_fast_is_kept() -> None:
    found = choose(ddp=200, ddp_hook=62, simple=100, sketch=60).other
    assert found == Choice("sketch", (), "ddp+hook", faster=False, slower=False)
    found = choose(ddp=200, ddp_hook=50, simple=100, sketch=98).other
    assert found == Choice("sketch", (), "ddp+hook", faster=False, slower=True)


def test_recommend_hook_that_is_no_faster_than_the_exact_one_is_no_rival() -> None:
    found = choose(ddp=200, ddp_hook=98, simple=100, sketch=60).other
    assert found == Choice("sketch", (), "", faster=True, slower=False)


def test_recommend_hook_that_is_surely_faster_is_the_rival_and_not_an_unsure_faster_one() -> None:
    found = choose(ddp=200, ddp_hook=89, ddp_unsure=88, simple=100, sketch=91).other
    assert found == Choice("sketch", (), "ddp+hook", faster=False, slower=False)


def test_recommend_without_exact_strategies_compares_with_the_hook() -> None:
    found = choose(ddp=200, ddp_hook=100, sketch=60)
    assert found.exact is None
    assert found.other == Choice("sketch", (), "ddp+hook", faster=True, slower=False)
    assert found.others == 1
    assert choose(ddp=64, ddp_hook=100, sketch=60).other is None


def test_recommend_rival_is_the_fastest_of_the_hooks() -> None:
    found = choose(ddp=200, ddp_hook=55, ddp_unsure=60, simple=100, sketch=60).other
    assert found == Choice("sketch", (), "ddp+hook", faster=False, slower=False)
