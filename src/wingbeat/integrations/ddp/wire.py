"""A hook's state for any of the codecs that strategies have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from wingbeat.codecs.coding import Region
from wingbeat.codecs.dense import Dense
from wingbeat.codecs.regions import regions
from wingbeat.errors import UsageError
from wingbeat.integrations.ddp.exchange import HookBucket, HookExchange
from wingbeat.integrations.ddp.state import HookState, check_groups
from wingbeat.types import Span
from wingbeat.wires import Coded, Wire, of


class WireState(HookState):
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
        wire: Wire,
        *,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> None:
        found = of(wire)
        if isinstance(found, str):
            raise UsageError(
                f"WireState(wire={wire!r}): allowed are sketch, topk, lowrank and fp16; for bf16 "
                "torch has a hook, torch.distributed.algorithms.ddp_comm_hooks.default_hooks."
                "bf16_compress_hook"
            )
        # What is to be tried first warms up later; here nothing is tried.
        self.wire: Coded = replace(found, auto_disable=False)
        check_groups("WireState", self.wire, model)
        self._momentum = float(getattr(self.wire, "momentum", 0.0))
        velocity = self._momentum > 0
        super().__init__(model, velocity=velocity, process_group=process_group, timeout=timeout)

    @property
    def coding(self) -> bool:
        """Whether the coming iteration is encoded: its share of the training is not over."""
        ends = self.wire.ends_after
        return ends is None or self._steps < ends

    def _exchange(self, bucket: HookBucket) -> HookExchange:
        found = [Region(Span(0, bucket.buffer.numel()), Dense())]
        if self.coding:
            lying = list(zip(bucket.names, bucket.shapes, strict=True))
            found = list(regions(self.wire, lying, self._steps))
        return HookExchange(
            bucket,
            self._group,
            self._residuals,
            found,
            gathered=self.wire.gathers,
            momentum=self._momentum > 0,
        )
