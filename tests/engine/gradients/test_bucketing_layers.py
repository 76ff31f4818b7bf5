"""Which parameters belong to fully connected layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

from wingbeat.engine.gradients.bucketing import convolutional, fully_connected
from wingbeat_lab import paced


def named(model: nn.Module) -> set[str]:
    found = fully_connected(model)
    return {name for name, param in model.named_parameters() if param in found}


def everything(model: nn.Module, *but: str) -> set[str]:
    return {name for name, _ in model.named_parameters()} - set(but)


class Conv1D(nn.Module):
    """What GPT-2 calls so: a matrix and a bias, no convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.bias = nn.Parameter(torch.ones(4))


class Own(nn.Module):
    """A model with a table of positions of its own, and layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(5, 4))
        self.head = nn.Linear(4, 2)


class Scaled(nn.Linear):
    """A linear layer of the user's."""


class LowRank(nn.Module):
    """Computes a parameter from matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4, 1)), nn.Parameter(torch.ones(1, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.a @ self.b).view(x.shape)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 4),
        nn.Bilinear(3, 4, 5),
        Scaled(3, 4),
        nn.MultiheadAttention(4, 2),
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
        Conv1D(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_fully_connected_layers_are_recognised(layer: nn.Module) -> None:
    assert named(layer) == everything(layer)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3),
        nn.Conv1d(3, 4, 1),
        nn.Embedding(5, 4),
        nn.LayerNorm(4),
        nn.BatchNorm2d(4),
        nn.PReLU(3),
        nn.LSTM(3, 4),
        nn.GRUCell(3, 4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_are_not_fully_connected(layer: nn.Module) -> None:
    assert named(layer) == set()


def test_a_matrix_of_a_module_with_submodules_is_not_fully_connected() -> None:
    assert named(Own()) == {"head.weight", "head.bias"}


def test_a_materialised_lazy_layer_is_fully_connected() -> None:
    model = nn.Sequential(nn.LazyConv2d(2, 1), nn.Flatten(), nn.LazyLinear(3))
    model(torch.ones(1, 2, 2, 2))
    assert named(model) == {"2.weight", "2.bias"}


def test_a_weight_tied_to_another_kind_of_layer_is_not_fully_connected() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    assert named(model) == {"1.weight", "1.bias"}


def test_two_linear_layers_may_share_a_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert named(model) == everything(model)


def test_a_parameter_that_is_computed_counts_for_its_layer() -> None:
    for layer, dense in ((nn.Linear(9, 4), True), (nn.Conv2d(1, 4, 3), False)):
        model = nn.Sequential(layer)
        parametrize.register_parametrization(layer, "weight", LowRank())
        assert named(model) == (everything(model) if dense else set())
    normed = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        parametrizations.weight_norm(nn.Conv1d(3, 4, 1)),
    )
    assert named(normed) == {name for name in everything(normed) if name.startswith("0.")}
    old = nn.Sequential(weight_norm(nn.Linear(3, 4)))
    assert named(old) == everything(old)


def test_paced_layers_are_what_their_profiles_say() -> None:
    profile = paced.load_profile("alexnet")
    model = paced.PacedModel(profile)
    dense = {layer.name.replace(".", "_") for layer in profile.layers if layer.kind == "linear"}
    assert len(dense) == 3
    assert {name.split(".")[0] for name in named(model)} == dense


def test_convolutions_are_torchs_own_and_what_is_derived_from_them() -> None:
    class Mine(nn.Conv1d):
        """A convolution of somebody's own."""

    model = nn.ModuleDict(
        {"a": nn.Conv2d(1, 2, 3), "b": Mine(1, 1, 1), "c": nn.Linear(2, 2), "d": nn.BatchNorm2d(2)}
    )
    wanted = [param for key in "ab" for param in model[key].parameters()]
    assert convolutional(model) == set(wanted)
