"""The environment variables that wingbeat reads, and a warning about others that look like them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from wingbeat.errors import nearest

VARIABLES = (
    "WINGBEAT_ENCRYPTED",
    "WINGBEAT_JOB_ID",
    "WINGBEAT_JOB_KEY",
    "WINGBEAT_JOB_KEY_FILE",
    "WINGBEAT_JOURNAL",
    "WINGBEAT_LAB",
    "WINGBEAT_LOG",
    "WINGBEAT_METRICS",
    "WINGBEAT_REPLICA",
    "WINGBEAT_REPLICAS",
    "WINGBEAT_RUNTIME_DIR",
    "WINGBEAT_SHARED_MEMORY",
    "WINGBEAT_STORE",
    "WINGBEAT_TOP",
)
"""All variables; ``docs/how-to/environment.md`` states what they do."""

_OF_OTHERS = re.compile(
    # Kubernetes sets these in all pods, for a service whose name begins with "wingbeat".
    r"WINGBEAT_(?:\w+_)?(?:SERVICE_(?:HOST|PORT\w*)|PORT(?:_\d+_(?:TCP|UDP|SCTP)\w*)?)"
    # Of this project's tests and benchmarks.
    r"|WINGBEAT_(?:TEST|BENCH)\w*"
)


_PREFIX = "WINGBEAT_"


def unknown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that begin with ``WINGBEAT_`` and are not read, each with the nearest name.

    >>> unknown_variables({"WINGBEAT_METRIC": "9400", "WINGBEAT_TOP": "off"})
    {'WINGBEAT_METRIC': 'WINGBEAT_METRICS'}
    """
    found = {}
    for name in sorted(env):
        known = name in VARIABLES or _OF_OTHERS.fullmatch(name)
        if name.startswith(_PREFIX) and not known:
            # A common prefix would make all names similar.
            names = [each.removeprefix(_PREFIX).lower() for each in VARIABLES]
            close = nearest(name.removeprefix(_PREFIX).lower(), names).upper()
            found[name] = f"{_PREFIX}{close}" if close else ""
    return found


def warning_of_unknown(env: Mapping[str, str]) -> str:
    """Return a warning about variables that are not read; or nothing.

    >>> warning_of_unknown({"WINGBEAT_METRIC": "9400"})
    'no effect: WINGBEAT_METRIC in the environment (did you mean WINGBEAT_METRICS?)'
    """
    shown = [
        f"{name} in the environment ({f'did you mean {near}?' if near else 'unset it'})"
        for name, near in unknown_variables(env).items()
    ]
    return f"no effect: {', '.join(shown)}" if shown else ""
