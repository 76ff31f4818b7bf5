"""Proof by trial that an optimizer treats each parameter alone, so that whole ones can be divided.

Muon, Adafactor and SOAP look at rows, columns or norms of a parameter, and at no other one: whoever
has a parameter's whole gradient can make its whole update. As for elements, no list can know every
optimizer, so the optimizer at hand is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from wingbeat.engine.updates import nested, separable
from wingbeat.engine.updates.chance import kept_random_state
from wingbeat.engine.updates.elementwise import SHARDS
from wingbeat.engine.updates.twin import bare_step, copied_settings, make_twin, try_step, why


def prove(optimizer: torch.optim.Optimizer) -> None:
    """Make sure that the update of each parameter depends on nothing of the others.

    The optimizer, its parameters and the random numbers stay as they are: a twin makes the steps.

    Raises:
        UsageError: it does, or state cannot be sent to other workers, or gradients are kept in it.
    """
    why_not = separable.dependence(optimizer) or _unfit_state(optimizer)
    if why_not:
        raise SHARDS.refusal(optimizer, why_not)


def _unfit_state(optimizer: torch.optim.Optimizer) -> str:
    """Say what is wrong with what is remembered after a step; empty if nothing is."""
    step = bare_step(type(optimizer).step)
    for group in optimizer.__dict__["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        for device, dtype, shapes in separable.kinds(group["params"]):
            cuda = [device] if device.type == "cuda" else []
            twin = make_twin(optimizer)
            params = [torch.nn.Parameter(torch.ones(shape).to(device, dtype)) for shape in shapes]
            try:
                with kept_random_state(cuda):
                    separable.set_gradients(params, 1)
                    try_step(twin, step, {**copied_settings(settings), "params": params})
                    for param in params:
                        kept = _state_of(twin, param)
                        if param.grad is not None and _same_memory(kept, param.grad):
                            return "it keeps gradients themselves, whose memory is used again"
            except TypeError as err:
                return f"its state: {err}"
            except Exception as err:
                return why(err)
    return ""


def _state_of(twin: Any, param: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in what is remembered of one parameter.

    Raises:
        TypeError: there is something in it that cannot be sent.
    """
    tensors: list[torch.Tensor] = []
    state: Mapping[str, Any] = twin.state.get(param, {})
    nested.describe(dict(state), tensors)
    return tensors


def _same_memory(kept: list[torch.Tensor], grad: torch.Tensor) -> bool:
    where = grad.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == where for tensor in kept)
