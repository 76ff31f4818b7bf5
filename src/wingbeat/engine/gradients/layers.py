"""Which parameters belong to which kind of layer: what coarse priorities and colayers go by."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

_DENSE = (nn.Linear, nn.Bilinear, nn.MultiheadAttention)
"""What is fully connected of torch's own, with all that is derived from it: a `LazyLinear` with
values is a `Linear`, and so is one whose parameters are computed from others."""


def fully_connected(model: nn.Module) -> set[torch.Tensor]:
    """Return the parameters that none but fully connected layers have.

    One that is tied to another kind of layer, as an output layer is to an embedding, is needed
    when that one runs, and does not count.
    """
    dense: set[torch.Tensor] = set()
    others: set[torch.Tensor] = set()
    computing = {
        inner
        for module in model.modules()
        if isinstance(module, parametrize.ParametrizationList)
        for inner in module.modules()
    }
    for module in model.modules():
        if module not in computing:  # else it counts for the layer whose parameter it computes
            (dense if is_fully_connected(module) else others).update(_own(module))
    return dense - others


def convolutional(model: nn.Module) -> set[torch.Tensor]:
    """Return the parameters that torch's convolutions, and layers derived from them, have."""
    convolutions = (module for module in model.modules() if isinstance(module, _ConvNd))
    return {param for module in convolutions for param in _own(module)}


def is_fully_connected(module: nn.Module) -> bool:
    """Whether a layer multiplies all that comes in with a matrix, for all that goes out.

    Of torch's layers, and those derived from them, it is known. Others are judged by their own
    parameters: one is fully connected if it has no modules inside, and its parameter of most
    dimensions is a matrix, as in the ``Conv1D`` of GPT-2, which is no convolution.
    """
    if isinstance(module, _DENSE):
        return True
    bases = [base for base in type(module).__mro__ if base is not nn.Module]
    if any(base.__module__.startswith("torch.nn.") for base in bases) or any(module.children()):
        return False
    return max((param.dim() for param in _own(module)), default=0) == 2


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module but not of those inside it; also what they are made from."""
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]
