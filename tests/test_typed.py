"""The type hints that a user's own type checker sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch

import wingbeat
from wingbeat import compression, parts, simulator

STRATEGIES: list[wingbeat.Strategy] = [
    wingbeat.AllReduce(compression=compression.Sketch(bits=4)),
    wingbeat.Auto(exact=False),
    wingbeat.Canary(),
    wingbeat.DiLoCo(every=30),
    wingbeat.Geryon(),
    wingbeat.OMGS(),
    wingbeat.Ripples(),
    wingbeat.Strategy(plan=parts.FixedBuckets(mb=5)),
]


def train(steps: int) -> float:
    wingbeat.init()
    module = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = wingbeat.distribute(module, sgd, wingbeat.DeAR(compression="sketch"))
    weights: torch.Tensor = model.weight
    loss = weights.sum()
    for _ in range(steps):
        optimizer.zero_grad()
        with wingbeat.no_sync(model):
            loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        wingbeat.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    wingbeat.synchronize(model)
    wingbeat.shutdown()
    return float(loss)


def predict(model: simulator.Model) -> float:
    links = simulator.Links(bytes_per_s=1e9)
    return simulator.simulate(model, wingbeat.DeAR(), 4, links).median_s
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", ""),
        ("wingbeat.DeAR(sizes=3)\n", 'Unexpected keyword argument "sizes" for "DeAR"'),
        ("wingbeat.Dear()\n", 'Module has no attribute "Dear"'),
        ("parts.Rinks()\n", 'Module has no attribute "Rinks"'),
    ],
)
def test_users_script_is_checked_strictly(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + line, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n", encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    if message:
        assert message in found.stdout
    else:
        assert found.stdout.startswith("Success"), found.stdout + found.stderr
