"""torch.distributed.checkpoint: saved by four workers, loaded by three, or by torch alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.pool import Pool
from helpers.refusals import assert_said
from integrations import checkpoint_cases as cases

PoolOf = Callable[[int], Pool]


def same(a: Any, b: Any, rtol: float = 0.0) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=rtol, atol=0.1 * rtol)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], rtol) for key in a)
    return bool(a == b)


@pytest.mark.parametrize(
    ("kind", "size", "other"),
    [
        ("dear", 3, "sharded"),
        pytest.param("sharded", 3, "sharded", marks=pytest.mark.slow),
        ("sharded", 4, "dear"),
        pytest.param("sketch", 4, "sketch", marks=pytest.mark.slow),
        ("sketch", 3, "sketch"),
        ("diloco", 3, "diloco"),
    ],
)
def test_training_goes_on_with_what_it_had(
    kind: str, size: int, other: str, pool_of: PoolOf, tmp_path: Path
) -> None:
    saved = pool_of(4).run(cases.save, kind, str(tmp_path))
    loaded = pool_of(size).run(cases.load, other, str(tmp_path))
    for rank, each in enumerate(loaded):
        # A mean of three equal models may differ from them in the last bit.
        assert same(each["model"], saved[0]["model"], rtol=1e-6 * (kind == "diloco"))
        assert same(each["state"], saved[rank if kind == "diloco" else 0]["state"])
        assert same(each["averages"], saved[0]["averages"])
        if size == 4:
            assert same(each["residuals"], saved[rank]["residuals"])
    if kind == "sketch":
        before, after = (total(found) for found in (saved, loaded))
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert value.abs().max() > 0, "a lossless wire would not test it"
            torch.testing.assert_close(after[name], value)


def total(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: sum(one["residuals"][name] for one in found) for name in found[0]["residuals"]}


def test_torch_alone_loads_the_model(pool_of: PoolOf, tmp_path: Path) -> None:
    saved = pool_of(2).run(cases.save, "dear", str(tmp_path))
    state = cases.plain(str(tmp_path))
    assert same(state["model"], saved[0]["model"])
    assert state["epoch"] == 7


def test_what_was_not_saved_so_is_refused(pool_of: PoolOf, tmp_path: Path) -> None:
    for none, other, plain in pool_of(2).run(cases.refused, str(tmp_path)):
        assert "checkpoint.load(" in none
        assert "/none" in none
        assert "not saved from wingbeat.integrations.checkpoint.state()" in other
        assert plain.startswith("checkpoint.state(): pass a model and its optimizer")


@pytest.mark.slow
@pytest.mark.parametrize("files", [False, True])
def test_replicas_continue_with_their_residuals(
    files: bool, pool_of: PoolOf, tmp_path: Path
) -> None:
    saved = pool_of(4).run(cases.in_replicas, str(tmp_path), 2, True, files)
    again = pool_of(4).run(cases.in_replicas, str(tmp_path), 2, False, files)
    for one, other in zip(saved, again, strict=True):
        assert same(one, other)
        assert max(value.abs().max() for value in one["residuals"].values()) > 0
    for each in pool_of(4).run(cases.in_replicas, str(tmp_path), 4, False, files):
        assert same(each["before"], saved[0]["before"])
        assert not any(map(torch.any, each["residuals"].values())), "of other shards"


@pytest.mark.parametrize("files", [pytest.param(False, marks=pytest.mark.slow), True])
def test_residuals_of_replicas_are_shared_out_to_another_number_of_replicas(
    files: bool, pool_of: PoolOf, fresh_pool: Callable[..., Pool], tmp_path: Path
) -> None:
    saved = fresh_pool(6).run(cases.in_replicas, str(tmp_path), 3, True, files)
    loaded = pool_of(4).run(cases.in_replicas, str(tmp_path), 2, False, files)
    for position in range(2):
        before, after = total(saved[position::2]), total(loaded[position::2])
        for name, value in before.items():
            torch.testing.assert_close(after[name], value)
    assert same(loaded[0]["before"], saved[0]["before"])


def test_optimizer_in_parts_of_whole_models_is_refused_by_replicas(
    pool_of: PoolOf, tmp_path: Path
) -> None:
    pool_of(4).run(cases.save, "sharded", str(tmp_path))
    for said, same_weights in pool_of(4).run(cases.refused_by_replicas, str(tmp_path)):
        assert "parts of workers that divided the model in another way" in said
        assert same_weights


def test_save_without_residuals_removes_those_of_an_earlier_one(
    pool_of: PoolOf, tmp_path: Path
) -> None:
    """In replicas of several ranks or of one."""
    for name in ("1_of_2x0123456789abcdef_residuals_0_0_of_2", "residuals_0_1_of_2"):
        (tmp_path / f"wingbeat_{name}.pt").touch()
    (tmp_path / "wingbeat_residuals_1_0_of_1.pt").touch()
    pool_of(2).run(cases.without_residuals, str(tmp_path))
    assert os.listdir(tmp_path) == ["wingbeat_residuals_1_0_of_1.pt"]


def test_models_that_differ_between_replicas_are_not_saved(pool_of: PoolOf) -> None:
    for said in pool_of(4).run(cases.refused_averages):
        assert_said(said, ["models that differ between replicas of 2 ranks: call wingbeat.sync"])
