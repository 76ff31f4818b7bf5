"""What a backward pass brings and what it costs to send it: all that merging has to know."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from wingbeat.errors import UsageError
from wingbeat.planning.costs.curve import NOTHING, Curve


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's backward pass: its tensors, first ready first.

    The paper counts the other way round: its layer L is the first here, its layer 1 the last.

    Attributes:
        tensors: index of each tensor in the model's list, each once.
        ready_s: seconds from the begin of backward until the tensor's gradient is ready, nothing
            but backward counted: ``tau_b + t_b`` without sparsification (OMGS-SGD, Eqs. 2, 7).
        numels: elements of each tensor, 0 or more.
        nbytes: what each adds to a payload, 0 or more.
        kinds: dtype and device of each; tensors of different kinds never share a bucket.

    Raises:
        UsageError: lengths differ, times fall, or a value is out of range.
    """

    tensors: tuple[int, ...]
    ready_s: tuple[float, ...]
    numels: tuple[int, ...]
    nbytes: tuple[float, ...]
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        columns = (self.tensors, self.ready_s, self.numels, self.nbytes, self.kinds)
        if len({len(column) for column in columns}) != 1:
            raise UsageError(
                "workload: tensors, ready_s, numels, nbytes and kinds have lengths "
                f"{', '.join(str(len(column)) for column in columns)}; allowed are equal ones"
            )
        if len(set(self.tensors)) != len(self.tensors):
            raise UsageError("workload: a tensor is there twice; allowed is each once")
        for name, values in (
            ("ready_s", self.ready_s),
            ("numels", self.numels),
            ("nbytes", self.nbytes),
        ):
            for value in values:
                if not (math.isfinite(value) and value >= 0):
                    raise UsageError(
                        f"workload: {name} has {value!r}; allowed are finite numbers, 0 or more"
                    )
        for earlier, later in pairwise(self.ready_s):
            if later < earlier:
                raise UsageError(
                    f"workload: ready_s falls from {earlier!r} to {later!r}; allowed is the order "
                    "in which gradients become ready"
                )

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a bucket costs.

    Attributes:
        encode: seconds to sparsify so many elements, ``t_s`` (OMGS-SGD, Eq. 10).
        exchange: seconds to exchange so many bytes, ``t_c`` (OMGS-SGD, Eq. 11).
        delay: seconds by which backward is held up while so many bytes are exchanged beside it, as
            both need the same processors; the paper has no such term. Nothing where there are
            processors for both.
        gather: seconds of the all-gather of so many bytes under the next forward, where an exchange
            is an all-reduce in two halves and ``exchange`` the first (DeAR); None where it is
            whole.
    """

    encode: Curve
    exchange: Curve
    delay: Curve = NOTHING
    gather: Curve | None = None
