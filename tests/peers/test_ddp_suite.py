"""PyTorch's own tests of DDP, run with wingbeat; docs/developers/ddp-suite.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from helpers.pool import CaseFailed, Pool

from . import page, play, torch_suite
from .table import DDP_ITSELF_HANGS, ROWS, STRATEGIES, Verdict

SIZE = 2
DEADLINE = 240.0
"""Seconds; two busy cores compile slowly."""

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Workers of these tests only: torch's tests change what they find."""
    made = Pool(SIZE)
    yield made
    made.close()


def _points() -> list[ParameterSet]:
    """The quick run has what passes: after a failure the workers have to be started anew."""
    rows = []
    for name, row in ROWS.items():
        for strategy in STRATEGIES if row.applies else ():
            verdict = row.verdict(strategy)
            marks = [pytest.mark.slow] if row.slow or verdict.kind != "passes" else []
            if verdict.kind == "fails":
                marks.append(
                    pytest.mark.xfail(strict=True, raises=CaseFailed, reason=verdict.words)
                )
            rows.append(pytest.param(name, strategy, id=f"{name}-{strategy}", marks=marks))
    return rows


def _skip_if_absent(name: str) -> None:
    if name not in torch_suite.names():
        pytest.skip(f"torch {torch.__version__} has no such test")


@pytest.mark.parametrize(("name", "strategy"), _points())
def test_as_the_table_says(name: str, strategy: str, pool: Pool) -> None:
    _skip_if_absent(name)
    verdict: Verdict = ROWS[name].verdict(strategy)
    if verdict.kind != "refused":
        pool.run(play.run, name, strategy, deadline=DEADLINE)
        return
    for outcome in pool.outcomes(play.run, name, strategy, deadline=DEADLINE):
        assert outcome.kind == "raised", outcome
        assert verdict.words in outcome.error, outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.applies])
def test_ddp_itself_passes_what_applies(name: str, pool: Pool) -> None:
    _skip_if_absent(name)
    if torch.__version__.startswith(DDP_ITSELF_HANGS.get(name, "never")):
        pytest.skip(f"the DDP of torch {torch.__version__} hangs in it")
    pool.run(play.run, name, "ddp", deadline=DEADLINE)


def test_every_test_of_this_torch_is_in_the_table() -> None:
    found = torch_suite.names()
    assert len(found) > 60, "the rule finds torch's tests"
    unknown = [name for name in found if name not in ROWS]
    assert not unknown, (
        f"torch {torch.__version__} has tests of DDP that the table does not know: {unknown}; "
        "run them with DDP and with each strategy, and write down in tests/peers/table.py what came"
    )


def test_the_page_shows_the_table() -> None:
    text = (DOCS / "developers" / "ddp-suite.md").read_text()
    assert text == page.text(), "write it anew: PYTHONPATH=tests .venv/bin/python -m peers.page"


def test_a_failure_in_one_of_torchs_tests_is_seen(fresh_pool: Callable[..., Pool]) -> None:
    """The harness itself: a wrong average must not pass for a right one."""
    outcomes = fresh_pool(SIZE, default_group=True).outcomes(
        play.run_wrongly, "test_ddp_grad_div_uneven_inputs", "allreduce"
    )
    assert [outcome.kind for outcome in outcomes] == ["raised"] * SIZE, outcomes
    assert "not close" in outcomes[0].error, outcomes[0]
