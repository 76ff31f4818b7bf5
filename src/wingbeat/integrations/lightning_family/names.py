"""The names of Lightning that are overridden or used here, and their check.

Lightning has no entry point for external strategies, so wingbeat's are subclasses of its
DDPStrategy and depend on methods that a release may rename.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.integrations.libraries import check_names, library

LEAST = "2.5"
"""The first supported release."""

TRAINER = (
    "all_gather",
    "barrier",
    "block_backward_sync",
    "broadcast",
    "configure_ddp",
    "lightning_module",
    "lightning_module_state_dict",
    "load_optimizer_state_dict",
    "model",
    "on_exception",
    "on_train_batch_start",
    "on_train_end",
    "on_validation_start",
    "optimizer_state",
    "optimizer_step",
    "optimizers",
    "precision_plugin",
    "reduce",
    "root_device",
    "setup",
    "setup_environment",
    "teardown",
    "training_step",
    "world_size",
)
"""Names of ``strategies.DDPStrategy`` for the Trainer."""

TRAINER_OBJECT = ("_forward_redirection", "_lightning_optimizers")
"""Attributes of its instances."""

PRECISION = ("_wrap_closure", "clip_grad_by_norm", "optimizer_step", "train_step_context")
"""Names of ``plugins.precision.Precision`` for the Trainer."""

FABRIC = (
    "clip_gradients_norm",
    "get_module_state_dict",
    "get_optimizer_state",
    "precision",
    "root_device",
    "setup_environment",
    "setup_module",
    "setup_module_and_optimizers",
    "setup_optimizer",
    "world_size",
)
"""Names of ``strategies.DDPStrategy`` for Fabric."""

FABRIC_OBJECT = ("_backward_sync_control",)
"""Attributes of its instances."""

FABRIC_PRECISION = ("unscale_gradients",)
"""Names of ``plugins.precision.Precision`` for Fabric."""

_INSIDE = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", ""),
    "lightning_fabric": ("", "lightning_fabric"),
}
"""By package: its modules for the Trainer and for Fabric."""


def trainer_of(package: str) -> Any:
    """Return the Trainer's module after a check of its names.

    Raises UsageError if the package is missing, too old, or has other names.
    """
    title = _title(package)
    found: Any = importlib.import_module(_INSIDE[package][0])
    precision = importlib.import_module(f"{found.__name__}.plugins.precision").Precision
    check_names(title, {found.strategies.DDPStrategy: TRAINER, precision: PRECISION})
    check_names(title, {type(found.strategies.StrategyRegistry): ("register",)})
    return found


def fabric_of(package: str) -> Any:
    """Return Fabric's module after a check of its names; raises UsageError as `trainer_of`."""
    title = _title(package)
    found: Any = importlib.import_module(_INSIDE[package][1])
    precision = importlib.import_module(f"{found.__name__}.plugins.precision").Precision
    check_names(title, {found.strategies.DDPStrategy: FABRIC, precision: FABRIC_PRECISION})
    check_names(title, {type(found.strategies.STRATEGY_REGISTRY): ("register",)})
    return found


def check_object(strategy: Any, names: tuple[str, ...]) -> None:
    """Raise UsageError if a strategy object lacks an attribute that is used here."""
    for each in type(strategy).__mro__:
        package = each.__module__.partition(".")[0]
        if package in _INSIDE:
            check_names(_title(package), {strategy: names})
            return


def _title(package: str) -> str:
    if package != "lightning" and importlib.util.find_spec(package) is None:
        short = package.replace("_", "-")
        raise UsageError(
            f"wingbeat.integrations.{package} needs {package}: pip install {short}; with the "
            "package lightning, import wingbeat.integrations.lightning or .fabric"
        )
    module = library(package, LEAST, extra="lightning")
    return f"{package} {module.__version__}"
