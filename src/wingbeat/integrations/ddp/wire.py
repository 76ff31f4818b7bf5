"""A hook's state for any of the codecs that strategies have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from wingbeat.compression import Compression, parse
from wingbeat.errors import UsageError
from wingbeat.integrations.ddp.state import CodedState


class WireState(CodedState):
    """For `wire_hook`: gradients travel by any codec that strategies have.

    Every rank makes one, at the same point of its program; it makes a process group of its own.

    Args:
        model: the model, or the DistributedDataParallel around it. Given the latter, what only
            ``find_unused_parameters=True`` needs is left out where it is off.
        wire: a `wingbeat.Sketch`, `wingbeat.TopK` or `wingbeat.LowRank`, or its text, such as
            ``"topk@0.01:bits=4"``; or ``"fp16"``, scaled so that nothing is too large for it. A
            hook has no trial: ``auto_disable`` means nothing here.
        process_group: the one given to DistributedDataParallel, if not the default. If it has only
            some of the ranks, every other rank must make a state in a group of its own too, so
            that torch's numbering of groups stays the same everywhere.
        timeout: seconds until a collective gives up; None: torch's usual time.

    Raises:
        UsageError: the wire is none of these, ``torch.distributed`` is not initialised, or the
            model has nothing to train, or nothing of what a group is for.
    """

    def __init__(
        self,
        model: nn.Module,
        wire: Compression,
        *,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> None:
        found = parse(wire)
        if isinstance(found, str):
            raise UsageError(
                f"WireState(wire={wire!r}): allowed are sketch, topk, lowrank and fp16; for bf16 "
                "torch has a hook, torch.distributed.algorithms.ddp_comm_hooks.default_hooks."
                "bf16_compress_hook"
            )
        # What is to be tried first warms up later; here nothing is tried.
        coded = replace(found, auto_disable=False)
        super().__init__(model, coded, process_group=process_group, timeout=timeout)
