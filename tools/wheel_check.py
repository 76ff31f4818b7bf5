"""Train a step with the installed wingbeat, in one process and in two workers.

    python tools/wheel_check.py

It fails if wingbeat is not the one of this environment, if it has no compiled kernels, or if
training does not change the weights. `wheel_test.py` and cibuildwheel run it.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys
from typing import TYPE_CHECKING

import torch

import wingbeat
import wingbeat_lab
from wingbeat import _native, compression, kernels, testing
from wingbeat_lab import paced

if TYPE_CHECKING:
    from wingbeat.transport.world import World


def main() -> None:
    """Check where the packages are, then train."""
    here = pathlib.Path(sys.prefix).resolve()
    for module in (wingbeat, wingbeat_lab, _native):
        assert here in pathlib.Path(str(module.__file__)).resolve().parents, module.__file__
    for package in (wingbeat, wingbeat_lab):
        assert pathlib.Path(str(package.__file__)).with_name("py.typed").exists(), package
    assert wingbeat.__version__ == importlib.metadata.version("wingbeat")
    assert kernels.of(torch.device("cpu")).__name__.endswith(".native")
    assert paced.load_profile("resnet50").params

    wingbeat.init()  # one process, as a script without torchrun
    train(torch.nn.Linear(300, 400), wingbeat.DeAR())
    wingbeat.shutdown()
    torch.manual_seed(0)
    twins = [torch.nn.Linear(300, 400) for _ in range(2)]
    codec = wingbeat.AllReduce(compression=compression.Sketch(bits=8, auto_disable=False))
    first, second = testing.run(
        testing.worlds(2), lambda world: train(twins[world.rank], codec, world)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    python = ".".join(map(str, sys.version_info[:3]))
    extension = pathlib.Path(str(_native.__file__)).name
    print(f"trained a step: Python {python}, torch {torch.__version__}, {extension}")


def train(
    model: torch.nn.Module, strategy: wingbeat.Strategy, world: World | None = None
) -> list[torch.Tensor]:
    """Return the parameters after a step, which has changed all of them."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
    model(torch.ones(4, 300)).square().sum().backward()
    optimizer.step()
    wingbeat.synchronize(model)
    after = [p.detach().clone() for p in model.parameters()]
    for old, new in zip(before, after, strict=True):
        assert new.isfinite().all()
        assert not torch.equal(old, new)
    return after


if __name__ == "__main__":
    main()
