"""The import of transformers, and the names of its Trainer on which this package depends."""

from __future__ import annotations

from typing import Any

from wingbeat.integrations.libraries import check_names, library

LEAST = "5.0.0"
"""The first supported version; constraints.txt has the tested one."""

PRIVATE = (
    "_load_optimizer_and_scheduler",
    "_prepare_for_training",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
)
"""Private methods of a Trainer that are overridden."""

USED = ("accelerator", "evaluation_loop", "floating_point_ops", "model_wrapped", "train")
"""Public names that are used; they are checked as well."""


def transformers() -> Any:
    """Import transformers; raises UsageError if it is missing or too old."""
    return library("transformers", LEAST)


def check(trainer: Any) -> None:
    """Raise UsageError if this Trainer lacks a name that is used."""
    title = f"transformers {transformers().__version__}"
    plain: Any = transformers().Trainer
    check_names(title, {plain: PRIVATE, trainer: USED})
