"""Which dtype a buffer's elements have on the links.

Pure functions. A cast rounds to the nearest value of the wire's dtype. What is too large for it
becomes infinite and NaN stays NaN, so that an overflow is seen by whoever looks for one, such as
``torch.amp.GradScaler``; it never becomes a finite number.
"""

from __future__ import annotations

import torch

from wingbeat.errors import UsageError, unknown

WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that gradients may travel in, other than their own."""


def wire_dtype(name: str) -> torch.dtype | None:
    """Return the dtype called ``name`` in `Choices.wire`; None for the buffer's own (empty).

    Raises:
        UsageError: gradients cannot travel in a dtype of that name.
    """
    if not name:
        return None
    if name not in WIRES:
        raise unknown("wire dtype", name, WIRES)
    return WIRES[name]


def narrower(wire: torch.dtype | None, buffer: torch.Tensor) -> torch.dtype | None:
    """Return ``wire`` where casting ``buffer`` to it saves bytes; None where nothing is cast.

    Raises:
        UsageError: ``wire`` is none of `WIRES`.
    """
    if wire is None:
        return None
    if wire not in WIRES.values():
        allowed = ", ".join(WIRES)
        raise UsageError(f"wire = {wire}: allowed are {allowed}, and None for the buffer's own")
    saves = buffer.is_floating_point() and wire.itemsize < buffer.element_size()
    return wire if saves else None
