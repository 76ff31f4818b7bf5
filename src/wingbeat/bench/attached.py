"""A row made real inside a worker: a model that trains, and what is known of how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from wingbeat.control.control import Control
from wingbeat.gradients.compression import Compression


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
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    detach: Callable[[], None]
    settle: Callable[[], None]
    compression: Compression | None = None
    control: Control | None = None

    def deciding(self) -> bool:
        """Whether the row is still finding out how it will train, and cannot be timed yet."""
        return self.control is not None and self.control.deciding()

    @property
    def coded(self) -> bool | None:
        """Whether gradients go through a codec; None where the row has none."""
        if self.compression is None or self.compression.coded is None:
            return None
        return self.compression.on
