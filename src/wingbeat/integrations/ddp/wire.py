"""A hook's state for any of the codecs."""

from __future__ import annotations

from typing import Any

from torch import nn

from wingbeat.compression import Compression, parse
from wingbeat.errors import UsageError
from wingbeat.integrations.ddp.state import CodedState


class WireState(CodedState):
    """State of `wire_hook`: gradients are sent with any of the strategies' codecs.

    Every rank constructs one at the same point of its program; it creates a process group.

    Args:
        model: the model, or the DistributedDataParallel around it. With the latter, the work for
            ``find_unused_parameters=True`` is skipped if that is off.
        wire: a `wingbeat.Sketch`, `wingbeat.TopK` or `wingbeat.LowRank`, or its text, such as
            ``"topk@0.01:bits=4"``; or ``"fp16"``, scaled so that no value overflows. Hooks run no
            trial, so ``auto_disable`` has no effect.
        process_group: the group of DistributedDataParallel; default: the default group. If it has
            only some of the ranks, every other rank must construct a state in a group of its own
            too, so that torch's numbering of groups is equal on all ranks.
        timeout: seconds until a collective fails; None: torch's default.

    Raises:
        UsageError: the encoding is none of these, ``torch.distributed`` is not initialised, the
            model has no trained parameters, or a group of the encoding matches none of them.
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
        # A trial would delay the warm-up, and hooks run no trial.
        coded = found.without_trial()
        super().__init__(model, coded, process_group=process_group, timeout=timeout)
