"""The transformers library, and the private names of its Trainer that are overridden here."""

from __future__ import annotations

from typing import Any

from wingbeat.integrations.libraries import check_names, library

LEAST = "5.0.0"
"""The first version that this was written for; constraints.txt names the tested one."""

PRIVATE = (
    "_load_optimizer_and_scheduler",
    "_prepare_for_training",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
)
"""Methods of a Trainer that are overridden."""

USED = ("accelerator", "evaluation_loop", "floating_point_ops", "model_wrapped", "train")
"""Public ones; a release that renames one is told as well."""


def transformers() -> Any:
    """Import transformers.

    Raises:
        UsageError: it is missing or too old.
    """
    return library("transformers", LEAST)


def check(trainer: Any) -> None:
    """Make sure that this Trainer has all that is overridden.

    Raises:
        UsageError: a release has moved a name.
    """
    title = f"transformers {transformers().__version__}"
    plain: Any = transformers().Trainer
    check_names(title, {plain: PRIVATE, trainer: USED})
