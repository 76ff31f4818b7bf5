"""Every name of Lightning's that is overridden or used here, in one place, and checked.

Lightning has no entry point for strategies of others, so a strategy of its own is a subclass of
its DDP's, and counts on methods that Lightning may rename.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.integrations.libraries import check_names, library

LEAST = "2.5"
"""The first release that this was written for."""

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
"""Of ``strategies.DDPStrategy``, for the Trainer."""

TRAINER_OBJECT = ("_forward_redirection", "_lightning_optimizers")
"""Of one that has been made."""

PRECISION = ("_wrap_closure", "clip_grad_by_norm", "optimizer_step", "train_step_context")
"""Of ``plugins.precision.Precision``, for the Trainer."""

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
"""Of ``strategies.DDPStrategy``, for Fabric."""

FABRIC_OBJECT = ("_backward_sync_control",)
"""Of one that has been made."""

FABRIC_PRECISION = ("unscale_gradients",)
"""Of ``plugins.precision.Precision``, for Fabric."""

_INSIDE = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", ""),
    "lightning_fabric": ("", "lightning_fabric"),
}
"""By package: where it has what is for the Trainer, and for Fabric."""


def trainer_of(package: str) -> Any:
    """Return the module with the Trainer's ``strategies``, once its names have been checked.

    Raises:
        UsageError: the package is missing, too old, or has other names.
    """
    title = _title(package)
    found: Any = importlib.import_module(_INSIDE[package][0])
    precision = importlib.import_module(f"{found.__name__}.plugins.precision").Precision
    check_names(title, {found.strategies.DDPStrategy: TRAINER, precision: PRECISION})
    check_names(title, {type(found.strategies.StrategyRegistry): ("register",)})
    return found


def fabric_of(package: str) -> Any:
    """Return the module with Fabric's ``strategies``, once its names have been checked.

    Raises:
        UsageError: as `trainer_of`.
    """
    title = _title(package)
    found: Any = importlib.import_module(_INSIDE[package][1])
    precision = importlib.import_module(f"{found.__name__}.plugins.precision").Precision
    check_names(title, {found.strategies.DDPStrategy: FABRIC, precision: FABRIC_PRECISION})
    check_names(title, {type(found.strategies.STRATEGY_REGISTRY): ("register",)})
    return found


def check_object(strategy: Any, names: tuple[str, ...]) -> None:
    """Make sure that a strategy that has been made has the attributes that are used here.

    Raises:
        UsageError: a release has moved one; names it.
    """
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
