"""Hooks on modules where the forward is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import TINY_MB, engine
from wingbeat.transport import loopback


class Layers(nn.Module):
    """With a forward of its own: that of ``nn.Sequential`` is never compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(
    "strategy", [wingbeat.AllReduce(mb=TINY_MB), wingbeat.DeAR(plan="fixed", mb=TINY_MB)]
)
def test_a_compiled_forward_is_one_graph(strategy: Any) -> None:
    """Hooks of the modules inside would cut it in pieces."""

    def body(world: Any) -> Any:
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return wingbeat.distribute(model, optimizer, strategy, world=world)

    (model, _), _ = made = loopback.run(loopback.worlds(2), body)
    graphs = []

    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append([node.op for node in graph.graph.nodes].count("call_function"))
        return graph.forward

    torch.compiler.reset()
    try:
        run = torch.compile(model, backend=counting)
        for _ in range(2):  # nothing travels before a backward
            run(torch.ones(2, 4))
    finally:
        torch.compiler.reset()
    assert graphs == [6]
    assert not engine(model).hooks._inner
    assert made
