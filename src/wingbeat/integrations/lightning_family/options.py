"""Options of the strategies: a strategy of wingbeat, and the options of DDPStrategy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from wingbeat.errors import UsageError, unknown
from wingbeat.strategies import PRESETS, DeAR, Strategy, parse

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a wait may take, as in Lightning: rank 0 may work alone for long."""

PASSED_ON = (
    "accelerator",
    "checkpoint_io",
    "cluster_environment",
    "parallel_devices",
    "precision",
    "precision_plugin",
    "process_group_backend",
    "start_method",
    "timeout",
)
"""Options that are passed on to Lightning's strategy."""

NOT_NEEDED = (
    "check_reduction",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
"""DDP's options that have no effect here and are accepted."""

_HOOKS = (
    "give the strategy a compression (wingbeat.DeAR(compression='bf16'), or 'sketch@4'), or keep "
    "DDPStrategy with wingbeat.integrations.ddp's hooks"
)
REMEDIES = {
    "bucket_cap_mb": "give the size to wingbeat's strategy, wingbeat.AllReduce(mb=...)",
    "ddp_comm_hook": _HOOKS,
    "ddp_comm_state": _HOOKS,
    "ddp_comm_wrapper": _HOOKS,
    "device_mesh": "leave it out; gradients are averaged over all workers",
    "init_sync": "leave it out; all workers begin with rank 0's weights",
    "mixed_precision": "leave it out, and set the Trainer's or Fabric's precision",
    "model_averaging_period": "use wingbeat.LocalSGD(every=...), which averages models",
    "process_group": "leave it out; gradients are averaged over all workers",
}
"""DDP's options that are rejected, with the alternative."""


def strategy_of(given: Any) -> Any:
    """Return a strategy from an object or a command-line text; raises UsageError for others."""
    if given is None:
        return DeAR()
    if isinstance(given, str):
        return parse(given)
    if not isinstance(given, Strategy):
        raise UsageError(
            f"WingbeatStrategy({given!r}): pass one of wingbeat's strategies, such as "
            "wingbeat.DeAR(), or its name, such as 'dear:mb=10'"
        )
    return given


def passed_on(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``options`` for Lightning's strategy; raises UsageError for unsupported ones."""
    for name, value in options.items():
        if name in REMEDIES and value is not None:
            raise UsageError(
                f"WingbeatStrategy({name}=...): there is no DDP here; {REMEDIES[name]}"
            )
        if name == "broadcast_buffers" and not value:
            raise UsageError(
                "WingbeatStrategy(broadcast_buffers=False): rank 0's buffers are taken over by "
                "all; name those that are to differ by torch's "
                "_set_params_and_buffers_to_ignore_for_model"
            )
        if name not in (*PASSED_ON, *NOT_NEEDED, *REMEDIES, "broadcast_buffers"):
            raise unknown("option of WingbeatStrategy", name, (*PASSED_ON, *NOT_NEEDED))
    return {name: options[name] for name in PASSED_ON if name in options}


def register(registry: Any, strategy: type) -> None:
    """Register the names of all presets, such as ``strategy="wingbeat_dear"``."""
    for name, preset in PRESETS.items():
        made = functools.partial(strategy, name)
        registry.register(f"wingbeat_{name}", made, f"wingbeat.{preset.__name__}()", override=True)


def seconds(options: Mapping[str, Any]) -> float:
    """Return the seconds that a wait may take, from the option ``timeout``."""
    timeout = options.get("timeout")
    return timeout.total_seconds() if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT
