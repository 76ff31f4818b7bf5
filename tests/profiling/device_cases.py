"""What a worker runs in `test_device`: models on the accelerator of tests."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from helpers import accelerator
from wingbeat.profiling import layers
from wingbeat.profiling.recorder import Recorder, Stop


def synchronizations() -> int:
    found: int = accelerator.load().late_synchronizations(threading.get_native_id())
    return found


class Net(nn.Module):
    """The second of its layers has many kernels, which the host enqueues before they run."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(8, 8), Long()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(self.short(x).mean()).sum()  # type: ignore[no-any-return]


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(400_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x * self.weight
        return x


def marks_are_times_of_the_device_and_do_not_wait_for_it() -> None:
    accelerator.load().late_seed(0)
    device = torch.device(accelerator.NAME, 0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.ones(1, 8, device=device)
    made = Recorder(3, lambda _: None)

    def train() -> None:
        for _ in range(made.total):
            model(batch).backward()
            optimizer.step()

    before = synchronizations()
    train()
    without_recorder = synchronizations() - before
    before = synchronizations()
    with made, pytest.raises(Stop):
        train()
    assert synchronizations() - before <= without_recorder
    hooked, plain = made.finish()
    assert made.device == device
    assert min(plain) > 0
    found = {x.name: x for x in layers.layers_of(layers.typical(hooked), made.description)}
    whole = sum(x.forward_ms + x.backward_ms for x in found.values())
    assert found["long"].forward_ms + found["long"].backward_ms > 0.5 * whole


def parameters_on_two_devices_are_refused() -> None:
    accelerator.load().late_seed(0)
    device = torch.device(accelerator.NAME, 0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[1].to(device)
    optimizer = torch.optim.SGD(model.parameters())

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = model[0], model[1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).to(device)).sum()  # type: ignore[no-any-return]

    split, batch = Split(), torch.ones(4, 8)

    def train() -> None:
        while True:
            split(batch).backward()
            optimizer.step()

    with Recorder(2, lambda _: None), pytest.raises(Stop) as stopped:
        train()
    text = str(stopped.value.error)
    assert text.startswith("parameter second.weight is on late:0, others on cpu")
