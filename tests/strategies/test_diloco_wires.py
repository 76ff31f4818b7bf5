"""DiLoCo's differences through codecs: nothing is lost, bytes are fewer, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import assert_same, engine, net, on, train, weights
from wingbeat import parts
from wingbeat.errors import UsageError
from wingbeat.strategies import parse

ROUNDS = 4


class Wide(nn.Module):
    """Enough elements for codecs to be smaller, and a matrix for low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(96, 64))
        self.rest = nn.Parameter(torch.zeros(700))

    def forward(self, matrix: Tensor, rest: Tensor) -> Tensor:
        return (self.matrix * matrix).sum() + (self.rest * rest).sum()


def gradients(step: int, rank: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(96, 64, generator=rng), torch.randn(700, generator=rng)


WIRES = [
    "sketch@4",
    "lowrank@2",
    "fp16",
    "bf16",
    "topk@0.05",
    wingbeat.TopK(density=0.05, bits=2),
]


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_received_and_residual_differences_add_up_to_all_moves(wire: Any) -> None:
    """With an outer optimizer that takes the mean as it is, on gradients of no weights."""
    size = 3

    def body(world: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        strategy = wingbeat.DiLoCo(
            every=2, outer_lr=1, outer_momentum=0, compression=wire, encrypted=False
        )
        model, optimizer = Wide(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        wingbeat.distribute(model, optimizer, strategy, world=world)
        for step in range(2 * ROUNDS):
            optimizer.zero_grad()
            model(*gradients(step, world.rank)).backward()
            optimizer.step()
        kept = optimizer.state_dict()["wingbeat"].get("residuals", {})
        return weights(model), kept

    found = on(size, body, timeout=60)
    for each, _ in found:
        assert_same(each, found[0][0])  # the same bits on all
    for number, name in enumerate(("matrix", "rest")):
        moved = sum(gradients(s, r)[number] for s in range(2 * ROUNDS) for r in range(size))
        waits = sum(kept.get(name, torch.zeros(())) for _, kept in found) / size
        # Half precision keeps nothing, and loses what it rounds.
        tolerance = 2e-2 if wire in ("fp16", "bf16") else 1e-4
        whole = found[0][0][name] - waits
        torch.testing.assert_close(whole, -0.125 * moved / size, rtol=tolerance, atol=tolerance)


def test_fragments_and_delays_keep_their_own_residuals() -> None:
    def body(world: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        strategy = wingbeat.DiLoCo(
            every=2,
            fragments=2,
            delay=1,
            outer_lr=1,
            outer_momentum=0,
            compression="topk@0.1",
            encrypted=False,
        )
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        wingbeat.distribute(model, optimizer, strategy, world=world)
        for step in range(6):
            optimizer.zero_grad()
            model(*gradients(step, world.rank)).backward()
            optimizer.step()
        wingbeat.synchronize(model)
        return weights(model), optimizer.state_dict()["wingbeat"]["residuals"]

    found = on(2, body, timeout=60)
    for number, name in enumerate(("matrix", "rest")):
        moved = sum(gradients(s, r)[number] for s in range(6) for r in range(2))
        waits = sum(kept[name] for _, kept in found) / 2
        torch.testing.assert_close(
            found[0][0][name] - waits, -0.125 * moved / 2, rtol=1e-4, atol=1e-4
        )


def test_local_sgd_supports_codecs() -> None:
    def body(world: Any) -> tuple[dict[str, Tensor], bool]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy = wingbeat.LocalSGD(every=2, compression="sketch", encrypted=False)
        wingbeat.distribute(model, optimizer, strategy, world=world)
        train(model, optimizer, range(6))
        codec = engine(model).compression.coded
        return weights(model), codec.auto_disable

    first, second = on(2, body)
    assert_same(first[0], second[0])
    assert first[1] is False  # nothing is on trial


def test_synchronization_is_not_rounded() -> None:
    def body(world: Any) -> float:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        wingbeat.distribute(
            model, optimizer, wingbeat.DiLoCo(compression="bf16", encrypted=False), world=world
        )
        model.weight.grad = torch.full((1, 1), 1e-4 * (1 + world.rank))
        optimizer.step()
        wingbeat.synchronize(model)
        return float(model.weight.detach())

    assert on(2, body) == [pytest.approx(1 - 1.5e-4, abs=1e-7)] * 2


def test_single_worker_ignores_residuals_of_others() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wingbeat.distribute(model, optimizer, wingbeat.DiLoCo(compression="topk@0.05"), world=world)
        train(model, optimizer, range(3))
        return weights(model)

    def plain(world: Any) -> dict[str, Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wingbeat.distribute(model, optimizer, wingbeat.AllReduce(), world=world)
        train(model, optimizer, range(3))
        return weights(model)

    assert_same(on(1, body), on(1, plain))


def test_command_line_accepts_codecs() -> None:
    made = parse("diloco:every=30,compression=topk@0.02:bits=2")
    assert made == wingbeat.DiLoCo(every=30, compression=wingbeat.TopK(density=0.02, bits=2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: wingbeat.DiLoCo(
                compression=wingbeat.Sketch(share=0.5, total=100, auto_disable=False)
            ),
            "leave share out",
        ),
        (lambda: wingbeat.DiLoCo(compression=wingbeat.TopK(warmup=100)), "leave warmup out"),
        (
            lambda: wingbeat.DiLoCo(compression=wingbeat.TopK(momentum=0.9)),
            "momentum correction is of gradients",
        ),
        (lambda: wingbeat.TopK(bits=9), "1 to 8, or 32"),
        (
            lambda: wingbeat.Strategy(
                exchange=parts.Groups(policy="all"), schedule="local", compression="topk"
            ),
            r"or Groups\(policy=\"all\"\) and Outer\(\)",
        ),
        (
            lambda: wingbeat.Strategy(
                exchange=parts.Groups(), schedule="local", update="outer", compression="sketch"
            ),
            "differences from the model that all share",
        ),
        (
            lambda: wingbeat.Strategy(
                exchange=parts.Groups(), schedule="local", update="outer", compression="bf16"
            ),
            "as much as they have moved",
        ),
    ],
)
def test_invalid_options_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()
