"""The side of wingbeat with its model on an accelerator; the reference is on the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import wingbeat
from helpers import accelerator
from helpers.sums import TINY_MB, Sums, given, step
from wingbeat.errors import UsageError
from wingbeat.transport import world
from wingbeat_lab import Ako
from wingbeat_lab.baselines import parse

from . import play
from .compare import Result
from .registry import SCENARIOS
from .sides import (
    INIT_TIMEOUT,
    WingbeatSide,
    bring_world_up,
    make_strategy,
    piece,
    rank_and_size,
)


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


@contextlib.contextmanager
def _named(seed: int) -> Iterator[None]:
    """Name the seed in an error."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"with seed {seed}: {type(error).__name__}: {error}") from error


def scenario_on_late_device(name: str, strategy: str, mb: float, seeds: range) -> None:
    """Run a scenario on the device of tests, with each seed of the order of streams."""
    late = accelerator.load()
    rank, size = rank_and_size()
    device = torch.device(accelerator.NAME, 0)
    for seed in seeds:
        late.late_seed(size * seed + rank)
        with _named(seed):
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


# -- methods in which workers differ -----------------------------------------------------------

STEPS = 6


def _weights_after(
    strategy: str, device: torch.device, rank: int, momentum: float = 0.5
) -> list[Tensor]:
    """Train `Sums`, whose gradients do not depend on its weights; return weights of each step."""
    bring_world_up()
    model: Any = Sums().to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    made = Ako(mb=TINY_MB) if strategy == "ako" else parse(strategy)
    model, optimizer = wingbeat.distribute(model, optimizer, made)
    found = []
    for number in range(STEPS):
        numbers = {name: value.to(device) for name, value in given(number, rank).items()}
        step(model, optimizer, numbers)
        found.append(_flat(model))
    wingbeat.synchronize(model)
    found.append(_flat(model))
    wingbeat.release(model, optimizer)
    return found


def _flat(model: Any) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()


def training_on_late_device(strategy: str, seeds: range) -> None:
    """Compare each step's weights with those of the same training on the CPU, bit for bit."""
    late, (rank, size) = accelerator.load(), rank_and_size()
    want = _weights_after(strategy, torch.device("cpu"), rank)
    for seed in seeds:
        late.late_seed(size * seed + rank)
        with _named(seed):
            got = _weights_after(strategy, torch.device(accelerator.NAME, 0), rank)
        for number, (mine, wanted) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(mine, wanted), f"step {number}, seed {seed}: {mine} not {wanted}"


def with_the_device_as_default(strategy: str) -> None:
    """Check that training ends alike where the script has called `torch.set_default_device`."""
    accelerator.load()
    device = torch.device(accelerator.NAME, 0)

    def state(default: torch.device | None) -> dict[str, Tensor]:
        model: Any = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        for number, value in enumerate(model.state_dict().values()):
            if value.is_floating_point():
                value.copy_(torch.arange(value.numel()).view(value.shape).sin() + number)
        model.to(device)
        batches = [piece(step, rank_and_size()[0], 4, 8)[0].to(device) for step in range(STEPS)]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.set_default_device(default)
        try:
            bring_world_up()
            model, optimizer = wingbeat.distribute(model, optimizer, parse(strategy))
            for x in batches:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
            wingbeat.synchronize(model)
            optimizer.load_state_dict(optimizer.state_dict())
            wingbeat.release(model, optimizer)
            return {name: value.cpu() for name, value in model.state_dict().items()}
        finally:
            torch.set_default_device(None)

    want, got = state(None), state(device)
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name}: {got[name]} not {value}"


def mean_on_late_device(strategy: str, momentum: float, seeds: range) -> None:
    """Check that what workers exchange at any time keeps the mean of all models."""
    late, (rank, size) = accelerator.load(), rank_and_size()
    want = torch.zeros(())
    for each in range(size):
        model, velocity = _flat(Sums()), 0
        for number in range(STEPS):
            gradient = torch.cat([value.reshape(-1) for value in given(number, each).values()])
            velocity = momentum * velocity + gradient
            model = model - 0.5 * velocity
        want = want + model / size
    for seed in seeds:
        late.late_seed(size * seed + rank)
        device = torch.device(accelerator.NAME, 0)
        with _named(seed):
            got = _weights_after(strategy, device, rank, momentum)[-1]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def waits_on_late_device(strategy: str) -> int:
    """Return how often the training thread waits for the device in some steps."""
    late, (rank, _) = accelerator.load(), rank_and_size()
    device = torch.device(accelerator.NAME, 0)
    bring_world_up()
    model: Any = Sums().to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    made = Ako(mb=TINY_MB) if strategy == "ako" else parse(strategy)
    model, optimizer = wingbeat.distribute(model, optimizer, made)
    batches = [{k: v.to(device) for k, v in given(n, rank).items()} for n in range(STEPS)]
    found = 0
    for number, numbers in enumerate(batches):
        before = late.late_synchronizations(threading.get_native_id())
        step(model, optimizer, numbers)
        if number >= 2:  # the first steps learn the order of gradients
            found += late.late_synchronizations(threading.get_native_id()) - before
    wingbeat.release(model, optimizer)
    return found
