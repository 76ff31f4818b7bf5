"""What a server has to be told of the user's optimizer, and the proof that it suffices.

Nothing is pickled. A server imports the optimizer's class by its name, and is told attributes and
settings as numbers and text. Whether what it makes of them does what the user's optimizer does is
tried, on test tensors, as is whether that treats each element alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import torch

from wingbeat.engine.updates.deferred import refuse_evaluating
from wingbeat.engine.updates.stepper import GroupSnapshot
from wingbeat.engine.updates.trials import Division, prove_elementwise
from wingbeat.errors import UsageError
from wingbeat.servers.applying import HOOKS, rebuilt
from wingbeat.servers.values import encode

OPTION = 'update="server"'

_INSTEAD = 'use update="worker"'

_LEFT_OUT = {*HOOKS, "defaults", "param_groups", "state", "step"}
"""What every optimizer has, and a server makes by itself."""


class Described(NamedTuple):
    """An optimizer as a server is told of it.

    Attributes:
        text: in JSON, for `wingbeat.servers.applying.Applier`.
        each: by the names of its state: whether there is a value for each element.
    """

    text: str
    each: dict[str, bool]

    def room(self, numel: int, nbytes: int) -> int:
        """Return the bytes that parameters and state may take on all servers together.

        Twice, as both are there under two plans while buckets are made anew; and 8 for each
        element of the state, whose dtype is the optimizer's to choose.

        Args:
            numel: elements of all parameters.
            nbytes: of them.
        """
        return 2 * (nbytes + 8 * numel * (sum(self.each.values()) + 1))


def describe(optimizer: torch.optim.Optimizer, snapshot: GroupSnapshot) -> Described:
    """Describe the optimizer, and try whether it can be applied on servers.

    Args:
        optimizer: the user's, before its class is changed.
        snapshot: its groups' settings.

    Raises:
        UsageError: it cannot.
    """
    refuse_evaluating(optimizer)
    kind = type(optimizer)
    _check_found(kind)
    settings_of(snapshot)
    inside = vars(optimizer)
    description = {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "path": [place for place in sys.path if place],
        "attributes": _encoded({k: v for k, v in inside.items() if k not in _LEFT_OUT}),
        "defaults": _encoded(inside.get("defaults", {})),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    replica = rebuilt(json.loads(json.dumps(description)))
    division = Division(OPTION, "the servers", _INSTEAD, replica)
    each = prove_elementwise(optimizer, kind.step, division)
    return Described(json.dumps({**description, "each": each}), each)


def settings_of(snapshot: GroupSnapshot) -> list[dict[str, Any]]:
    """Return the groups' settings as the servers are told of them.

    Raises:
        UsageError: one that cannot travel.
    """
    out: list[dict[str, Any]] = []
    for number, group in enumerate(snapshot):
        out.append({})
        for key, value in group.items():
            try:
                out[-1][key] = encode(value)
            except TypeError as error:
                raise UsageError(
                    f"{OPTION}: setting {key!r} of the optimizer's group {number}: {error}; "
                    "allowed are numbers, text, None, small tensors, and lists and tuples of them; "
                    f"{_INSTEAD}"
                ) from None
    return out


def _encoded(values: dict[str, Any]) -> dict[str, Any]:
    """Encode what can be; whether the rest is needed is seen when the optimizer is tried."""
    out = {}
    for key, value in values.items():
        try:
            out[key] = encode(value)
        except TypeError:
            continue
    return out


def _check_found(kind: type) -> None:
    """Make sure that a server can import the class.

    Raises:
        UsageError: it cannot.
    """
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if kind.__module__ == "__main__" or found is not kind:
        raise UsageError(
            f"{OPTION}: optimizer {kind.__name__} is defined in {kind.__module__} as "
            f"{kind.__qualname__}, from where a server cannot import it: move the class to the top "
            f"level of a module that the script imports, or {_INSTEAD}"
        )
