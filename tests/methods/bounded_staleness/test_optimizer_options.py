"""Options of an optimizer: serialized, parsed, and used for a round."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.replica import OptimizerOptions


def adam(lr: float | np.floating[Any] | torch.Tensor = 0.1) -> torch.optim.Adam:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.Adam([{"params": params[:1], "lr": lr}, {"params": params[1:]}], lr=0.3)


def test_serialized_options_are_parsed() -> None:
    mine, other = adam(lr=0.1), adam(lr=0.7)
    mine.param_groups[1]["betas"] = (0.5, 0.25)
    found = OptimizerOptions(other).schema.parse(OptimizerOptions(mine).serialize(), "rank 1")
    assert [group["lr"] for group in found] == [0.1, 0.3]
    assert found[1]["betas"] == (0.5, 0.25)
    assert found[0]["betas"] == (0.9, 0.999)


def test_numpy_options_are_sent_as_python_values() -> None:
    """Schedules compute them with NumPy, and settings files have lists."""
    mine = adam(lr=np.float64(0.25))
    mine.param_groups[1] |= {"lr": np.float32(0.5), "betas": [np.float64(0.5), 0.25]}
    other = adam()
    other.param_groups[1]["betas"] = [0.1, 0.2]
    found = OptimizerOptions(other).schema.parse(OptimizerOptions(mine).serialize(), "rank 1")
    assert [group["lr"] for group in found] == [0.25, 0.5]
    assert [type(group["lr"]) for group in found] == [float, float]
    assert found[1]["betas"] == [0.5, 0.25]


def test_schedule_state_is_not_sent() -> None:
    mine, other = adam(), adam()
    torch.optim.lr_scheduler.StepLR(mine, 1)
    assert "initial_lr" in mine.param_groups[0]
    found = OptimizerOptions(other).schema.parse(OptimizerOptions(mine).serialize(), "rank 1")
    assert set(found[0]) == set(other.defaults)


def test_use_restores_own_options() -> None:
    optimizer = adam(lr=0.1)
    options = OptimizerOptions(optimizer)
    theirs = options.schema.parse(OptimizerOptions(adam(lr=0.7)).serialize(), "rank 1")
    with options.use(theirs):
        assert optimizer.param_groups[0]["lr"] == 0.7
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(KeyError), options.use(theirs):
        raise KeyError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_tensor_option_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"Adam: lr=tensor.* of group 0 .*such as lr=0.1"):
        OptimizerOptions(adam(lr=torch.tensor(0.1)))


def changed(**values: object) -> bytes:
    groups = json.loads(OptimizerOptions(adam()).serialize())
    groups[0] |= values
    return json.dumps(groups).encode()


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "other than 2 groups"),
        (b"\xff", "other than 2 groups"),
        (b"[" * 100_000, "other than 2 groups"),
        (b"{}", "other than 2 groups"),
        (b"[{}]", "other than 2 groups"),
        (b"[{}, {}]", "options other than lr, betas"),
        (b"[1, 2]", "options other than lr, betas"),
        (changed(other=1), "options other than lr, betas"),
        (changed(lr="x"), "lr='x', and this worker has 0.1"),
        (changed(lr=True), "lr=True, and"),
        (changed(lr=[1]), "lr=.1., and"),
        (changed(betas=[0.9]), "betas=.0.9., and"),
        (changed(betas=[0.9, "x"]), "betas='x', and"),
        (changed(amsgrad=1), "amsgrad=1, and"),
    ],
    ids=range(14),
)
def test_malformed_options_name_sender(payload: bytes, said: str) -> None:
    with pytest.raises(PeerError, match=f"rank 1 sent optimizer options with {said}"):
        OptimizerOptions(adam()).schema.parse(payload, "rank 1")


def test_option_may_change_from_and_to_none() -> None:
    found = OptimizerOptions(adam()).schema.parse(
        changed(foreach=True, weight_decay=None), "rank 1"
    )
    assert found[0]["foreach"] is True
    assert found[0]["weight_decay"] is None
    adafactor = torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(2))])
    options = OptimizerOptions(adafactor)
    adafactor.param_groups[0]["eps"] = (1e-30, None)
    assert options.schema.parse(options.serialize(), "rank 1")[0]["eps"] == (1e-30, None)
