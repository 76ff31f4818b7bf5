"""An optimizer's state in a flat model: who has none gives none, and squares keep their roots."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wingbeat.methods.model_averaging.flat import ElementState, FlatModel


def made(values: list[float] | None, squares: list[float] | None = None) -> tuple[Any, Any, Any]:
    """A parameter of two elements, its optimizer, and the flat model of both."""
    param = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW([param])
    if values is not None:
        optimizer.state[param] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.tensor(values),
            "exp_avg_sq": torch.tensor(squares or [1.0, 1.0]),
        }
    state = ElementState(optimizer, {param: "param"})
    return param, optimizer, FlatModel([[param]], state=state)


def kept(param: Any, optimizer: Any, name: str = "exp_avg") -> list[float]:
    found: list[float] = optimizer.state[param][name].tolist()
    return found


def test_state_lies_behind_its_parameters_and_counts_as_trained() -> None:
    _, _, model = made([3.0, 4.0], [5.0, 6.0])
    model.number.fill_(9)
    model.read()
    assert model.flat.tolist() == [1, 2, 3, 4, 5, 6, 1, 1, 9]
    assert len(model.trained) == 8


def test_the_mean_is_over_the_workers_that_have_the_state() -> None:
    parties = [made([3.0, 6.0], [1.0, 4.0]), made(None), made([6.0, 0.0], [3.0, 0.0])]
    for _, _, model in parties:
        model.read()
    mean = sum(model.flat for _, _, model in parties) / 3
    for param, optimizer, model in parties:
        model.flat.copy_(mean)
        model.write_state()
        if optimizer.state:
            assert torch.allclose(optimizer.state[param]["exp_avg"], torch.tensor([4.5, 3.0]))
            assert torch.allclose(optimizer.state[param]["exp_avg_sq"], torch.tensor([2.0, 2.0]))
            assert optimizer.state[param]["step"] == 3
    assert not parties[1][1].state


def test_state_that_no_worker_has_is_not_changed() -> None:
    param, optimizer, model = made(None)
    model.read()
    model.flat.zero_()
    optimizer.state[param] = {"exp_avg": torch.ones(2)}  # it has come meanwhile
    model.write_state()
    assert kept(param, optimizer) == [1, 1]


def test_changes_made_meanwhile_are_kept() -> None:
    param, optimizer, model = made([3.0, -4.0])
    model.read()
    sent = model.flat[: len(model.trained)].clone()
    model.flat[2:4] = torch.tensor([5.0, 1.0])
    optimizer.state[param]["exp_avg"] += torch.tensor([0.5, 0.0])
    model.write_state(0, 1, sent)
    assert kept(param, optimizer) == [5.5, 1.0]


def test_unchanged_state_becomes_the_mean_bit_for_bit() -> None:
    param, optimizer, model = made([0.1, -0.3])
    model.read()
    sent = model.flat[: len(model.trained)].clone()
    model.flat[2:4] = torch.tensor([0.7, 1e-9])
    model.write_state(0, 1, sent)
    assert torch.equal(optimizer.state[param]["exp_avg"], torch.tensor([0.7, 1e-9]))


def test_a_mean_of_squares_stays_above_the_smaller_of_both() -> None:
    """One worker's decays while the mean, of others who saw no gradient, comes back small."""
    param, optimizer, model = made([0.0, 0.0], [1.0, 2.0])
    model.read()
    sent = model.flat[: len(model.trained)].clone()
    model.flat[4:6] = torch.tensor([0.0625, 3.0])
    optimizer.state[param]["exp_avg_sq"].mul_(0.5)
    model.write_state(0, 1, sent)
    assert kept(param, optimizer, "exp_avg_sq") == [0.0625, 2.0]


def test_state_that_came_or_went_while_its_average_was_made_is_the_workers_own() -> None:
    for before, after in ((None, [3.0, 3.0]), ([3.0, 3.0], None)):
        param, optimizer, model = made(before)
        model.read()
        sent = model.flat[: len(model.trained)].clone()
        optimizer.state.clear()
        if after:
            optimizer.state[param] = {"exp_avg": torch.tensor(after)}
        model.flat[2:8] = 1.0
        model.write_state(0, 1, sent)
        assert not after or kept(param, optimizer) == after
        assert bool(optimizer.state) == bool(after)


def test_fragments_have_their_own_state_and_float64_state_widens_the_buffer() -> None:
    params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    state = ElementState(optimizer, {p: str(i) for i, p in enumerate(params)})
    model = FlatModel([params[:1], params[1:]], lambda: [torch.full((1,), 7.0)], state=state)
    assert [len(span) for span in model.spans] == [5, 10]
    for number, param in enumerate(params):
        optimizer.state[param]["momentum_buffer"] = torch.full((2,), 2.0 + number).bfloat16()
    model.read()
    assert model.flat.tolist() == [1, 1, 2, 2, 1, *[1] * 4, 3, 3, 4, 4, 1, 1, 7, 0]
    sent = model.flat[5:15].clone()
    assert model.holds(sent, 1, 2)
    model.flat[5:15] *= 2
    model.flat[13:15] = 1
    model.write_state(1, 2, sent)
    assert [float(optimizer.state[p]["momentum_buffer"][0]) for p in params] == [2, 6, 8]
