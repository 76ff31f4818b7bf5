"""The side of wingbeat with its model on an accelerator; the reference is on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import wingbeat
from helpers import accelerator
from wingbeat.errors import UsageError
from wingbeat.transport import world

from . import play
from .compare import Result
from .registry import SCENARIOS
from .sides import INIT_TIMEOUT, WingbeatSide, make_strategy, rank_and_size


@dataclass
class DeviceSide(WingbeatSide):
    """As `WingbeatSide`, on ``device``."""

    device: torch.device | None = None

    def batch(self, step: int, rows: int = 4, width: int = 8) -> tuple[Tensor, Tensor]:
        x, y = super().batch(step, rows, width)
        return x.to(self.device), y.to(self.device)

    def note(self, what: str, value: Tensor | float) -> None:
        super().note(what, torch.as_tensor(value).detach().cpu())

    def clip(self, model: Any, optimizer: Any, limit: float, norm: float = 2.0) -> Tensor:
        return super().clip(model, optimizer, limit, norm).cpu()

    def _distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        swapping = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # the optimizer keeps them
        try:
            model.to(self.device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swapping)
        return super()._distribute(model, optimizer)


def _on_cpu(result: Result) -> Result:
    moved = {
        field: {name: value.cpu() for name, value in getattr(result, field).items()}
        for field in ("parameters", "buffers", "state")
    }
    return replace(result, **moved)


def load() -> None:
    """Have a worker load the device, before anything runs backward."""
    accelerator.load()


def scenario_on_late_device(name: str, strategy: str, mb: float, seeds: range) -> None:
    """Run a scenario on the device of tests, with each seed of the order of streams."""
    late = accelerator.load()
    rank, size = rank_and_size()
    device = torch.device(accelerator.NAME, 0)
    for seed in seeds:
        late.late_seed(size * seed + rank)
        run_on(device, name, strategy, mb)


def scenario_on_gpu(name: str, strategy: str, mb: float) -> None:
    """Run a scenario on a CUDA device, with pinned buffers and wingbeat's connections."""
    rank, _ = rank_and_size()
    try:
        world.current()
    except UsageError:
        wingbeat.init(timeout=INIT_TIMEOUT, cuda="tcp")
    run_on(torch.device("cuda", rank % torch.cuda.device_count()), name, strategy, mb)


def run_on(device: torch.device, name: str, strategy: str, mb: float) -> None:
    """Compare a scenario on a device with its reference on the CPU."""
    case = SCENARIOS[name]
    rank, size = rank_and_size()
    want = play._reference(name)
    side = DeviceSide(rank, size, strategy=make_strategy(strategy, mb), device=device)
    got = _on_cpu(play._outcome(side, case))
    play.judge(case, got, want, rank, size)
