"""A script under bounded staleness that ends without `wingbeat.release` or `wingbeat.shutdown`."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch, wingbeat
from wingbeat import testing

def train(world):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = wingbeat.Canary(s=2, p=1, colayers=1, encrypted=False)
    model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    model.synchronize()

for _ in range(3):
    testing.run(testing.worlds(3, timeout=60), train)
print("trained")
"""


def test_canary_process_without_release_exits_cleanly() -> None:
    """The interpreter ends daemon threads within C++ calls on sockets."""
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "trained\n", "")
