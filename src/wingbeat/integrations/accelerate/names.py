"""The import of Accelerate, and its names on which this package depends."""

from __future__ import annotations

from typing import Any

from wingbeat.integrations.libraries import check_names, library

LEAST = "1.5.0"
"""The first supported version; constraints.txt has the tested one."""

PRIVATE = ("_dataloaders",)
"""Private attributes of an Accelerator: its prepared loaders, for ``join_uneven_inputs``."""

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
"""Public names that are overridden or called; they are checked as well."""


def accelerate() -> Any:
    """Import Accelerate; raises UsageError if it is missing or too old."""
    return library("accelerate", LEAST)


def check(accelerator: Any) -> None:
    """Raise UsageError if this Accelerator lacks a name that is used."""
    title = f"accelerate {accelerate().__version__}"
    check_names(title, {accelerator: (*PRIVATE, *USED)})
