"""A row set up inside a worker: the model that trains, and what controls its training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wingbeat.engine.gradients.compression import Compression
from wingbeat.planning.control import Control, Decisions


@dataclass
class Attached:
    """A model ready to train.

    Attributes:
        detach: undoes everything, so that the next row starts from a clean process.
        settle: finishes work that was deferred into the next iteration.
        compression: the row's codec and whether it is on; None for rows that are not wingbeat's.
        control: decisions made during training; None if there are none.
        applied: how many iterations' worth of all workers' gradients are in the parameters; None
            where workers are in lockstep and all are.
        fired: how often the staleness bound has acted on this worker, by action; None without one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    detach: Callable[[], None]
    settle: Callable[[], None]
    compression: Compression | None = None
    control: Control | None = None
    applied: Callable[[], float] | None = None
    fired: Callable[[], dict[str, int]] | None = None

    def deciding(self) -> bool:
        """Whether the row still tunes itself and cannot be timed yet."""
        return self.control is not None and self.control.deciding()

    def decisions(self) -> Decisions | None:
        """The decisions, once they are made; None if there are none."""
        return None if self.control is None else self.control.decisions()

    def keep(self, known: Decisions) -> None:
        """Apply the decisions of an earlier training of the same row; on all workers at once."""
        assert self.control is not None, "a row that decides has a control"
        self.control.keep(known)

    @property
    def merge(self) -> dict[str, Any] | None:
        """What the row's plan of merged gradients reports; None without one."""
        merging = None if self.control is None else self.control.merging
        return None if merging is None else merging.report()

    @property
    def coded(self) -> bool | None:
        """Whether gradients are encoded; None if the row has no codec."""
        if self.compression is None or self.compression.coded is None:
            return None
        return self.compression.on
