"""A row made real inside a worker: a model that trains, and what is known of how."""

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
        model: call it as the user would.
        optimizer: step it as the user would.
        detach: undo everything, so that the next row finds the process as it was.
        settle: finish work that was put off into the next iteration.
        compression: the row's codec and whether it is on; None where the row is not wingbeat's.
        control: what is decided while the row trains; None where nothing is.
        applied: how many iterations' worth of all workers' gradients are in the parameters; None
            where workers are in lockstep, and every iteration's are.
        fired: how often the staleness bound has acted on this worker, by what it did; None where
            there is none.
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
        """Whether the row is still finding out how it will train, and cannot be timed yet."""
        return self.control is not None and self.control.deciding()

    def decisions(self) -> Decisions | None:
        """What was found out, once that is over; None where nothing is asked."""
        return None if self.control is None else self.control.decisions()

    def keep(self, known: Decisions) -> None:
        """Train as an earlier training of the same row has decided; on all workers, at once."""
        assert self.control is not None, "a row that decides has a control"
        self.control.keep(known)

    @property
    def merge(self) -> dict[str, Any] | None:
        """What the row's plan of merged gradients says of itself; None without one."""
        merging = None if self.control is None else self.control.merging
        return None if merging is None else merging.report()

    @property
    def coded(self) -> bool | None:
        """Whether gradients go through a codec; None where the row has none."""
        if self.compression is None or self.compression.coded is None:
            return None
        return self.compression.on
