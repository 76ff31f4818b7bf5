"""The HF Trainer with wingbeat beside the one with its own DDP, in real processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.amounts import slow_except
from helpers.pool import Pool
from helpers.refusals import assert_said
from integrations import transformers_cases as cases


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., list[Any]]]:
    """Two workers; the Trainer makes their group. Importing it takes seconds, so they stay."""
    pool = Pool(2, default_group=False)

    def run(case: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(case, *args, deadline=170.0)

    yield run
    pool.close()


@pytest.mark.parametrize(
    "case",
    slow_except(
        [cases.clips_parts, cases.averaged],
        [
            cases.exact,
            cases.clips_parts,
            cases.others,
            cases.sequences,
            cases.resumed,
            cases.best,
            cases.stopped,
            cases.averaged,
            cases.in_half,
        ],
    ),
)
def test_as_with_its_own_ddp(case: Any, run: Any, tmp_path: Path) -> None:
    run(case, str(tmp_path))


def test_what_cannot_work_is_refused_in_one_line(run: Any, tmp_path: Path) -> None:
    wanted = [
        "pass an instance, such as wingbeat.DeAR()",
        "strategy='dear'",
        "one process with 2 GPUs",
        "has no Trainer._save_checkpoint any more",
        "does not prepare models in Trainer._prepare_for_training any more",
        "broadcast_buffers=False",
    ]
    for said in run(cases.refusals, str(tmp_path)):
        assert_said(said, wanted)


def test_private_names_are_still_called_as_they_are_here() -> None:
    """A release that changes them is told here, by the name, before anybody trains with it."""
    from transformers import Trainer

    from wingbeat.integrations.transformers import PRIVATE, WingbeatTrainerMixin

    taken = {
        "_load_optimizer_and_scheduler": ["self", "checkpoint"],
        "_prepare_for_training": [
            *("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
        ],
        "_save_checkpoint": ["self", "model", "trial"],
        "_save_optimizer_and_scheduler": ["self", "output_dir"],
    }
    assert sorted(taken) == sorted(PRIVATE)
    overridden = {name for name in vars(WingbeatTrainerMixin) if hasattr(Trainer, name)}
    private = {n for n in overridden if n.startswith("_") and not n.startswith("__")}
    assert private == set(PRIVATE)
    for name, parameters in taken.items():
        found = list(inspect.signature(getattr(Trainer, name)).parameters)
        assert found == parameters, f"transformers has changed Trainer.{name}: {found}"
