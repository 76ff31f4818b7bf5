"""Complex parameters, whose gradients travel as real and imaginary parts in turn."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.errors import UsageError
from wingbeat.types import Choices
from wingbeat.wires import Coded


def check_complex(model: torch.nn.Module, choices: Choices, strategy: str) -> None:
    """Refuse complex parameters where gradients are not just added, and whole on each worker.

    Raises:
        UsageError: the model has one, and the strategy (``strategy``, as its users write it) keeps,
            divides or encodes gradients element by element.
    """
    if not choices.lockstep or choices.divides or choices.partitions is not None:
        what = "where each worker has gradients or parameters of its own, or a part of them"
    elif choices.servers is not None:
        what = "with parameter servers"
    elif isinstance(choices.wire, Coded):
        what = f"with wire={str(choices.wire)!r}"
    else:
        return
    found = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if found is not None:
        raise UsageError(
            f"parameter {found!r} is complex, which is not possible {what} ({strategy}): use "
            'wingbeat.AllReduce() or wingbeat.DeAR(), with or without wire="bf16"'
        )


def norm_of_parts(buckets: Iterable[Bucket], norm_type: float) -> bool:
    """Whether a norm of real and imaginary parts is that of the numbers that they are of."""
    return norm_type == 2 or not any(slot.param.is_complex() for b in buckets for slot in b.slots)
