"""Accelerate itself, and the private names of it that are used here."""

from __future__ import annotations

from typing import Any

from wingbeat.integrations.libraries import check_names, library

LEAST = "1.5.0"
"""The first version that this was written for; constraints.txt names the tested one."""

PRIVATE = ("_dataloaders",)
"""Of an Accelerator. Its prepared loaders, in which ``join_uneven_inputs`` changes even_batches."""

USED = (
    "clip_grad_norm_",
    "free_memory",
    "gradient_state",
    "join_uneven_inputs",
    "load_state",
    "no_sync",
    "prepare",
    "prepare_model",
    "save_state",
    "trigger_sync_in_backward",
    "unscale_gradients",
)
"""Public ones that are overridden or called; a release that renames one is told as well."""


def accelerate() -> Any:
    """Import Accelerate.

    Raises:
        UsageError: it is missing or too old.
    """
    return library("accelerate", LEAST)


def check(accelerator: Any) -> None:
    """Make sure that this Accelerator has all that is used of it.

    Raises:
        UsageError: a release has moved a name.
    """
    title = f"accelerate {accelerate().__version__}"
    check_names(title, {accelerator: (*PRIVATE, *USED)})
