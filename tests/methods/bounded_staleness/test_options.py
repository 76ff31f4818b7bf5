"""An optimizer's options: written, read from others, and used for one round."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.options import Options


def adam(lr: float | np.floating[Any] | torch.Tensor = 0.1) -> torch.optim.Adam:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.Adam([{"params": params[:1], "lr": lr}, {"params": params[1:]}], lr=0.3)


def test_what_one_writes_another_reads() -> None:
    mine, other = adam(lr=0.1), adam(lr=0.7)
    mine.param_groups[1]["betas"] = (0.5, 0.25)
    found = Options(other).form.read(Options(mine).written(), "rank 1")
    assert [group["lr"] for group in found] == [0.1, 0.3]
    assert found[1]["betas"] == (0.5, 0.25)
    assert found[0]["betas"] == (0.9, 0.999)


def test_numbers_of_numpy_and_lists_are_sent_as_pythons() -> None:
    """As schedules compute them with NumPy, and as settings come out of a file."""
    mine = adam(lr=np.float64(0.25))
    mine.param_groups[1] |= {"lr": np.float32(0.5), "betas": [np.float64(0.5), 0.25]}
    other = adam()
    other.param_groups[1]["betas"] = [0.1, 0.2]
    found = Options(other).form.read(Options(mine).written(), "rank 1")
    assert [group["lr"] for group in found] == [0.25, 0.5]
    assert [type(group["lr"]) for group in found] == [float, float]
    assert found[1]["betas"] == [0.5, 0.25]


def test_what_a_schedule_keeps_beside_them_does_not_travel() -> None:
    mine, other = adam(), adam()
    torch.optim.lr_scheduler.StepLR(mine, 1)
    assert "initial_lr" in mine.param_groups[0]
    found = Options(other).form.read(Options(mine).written(), "rank 1")
    assert set(found[0]) == set(other.defaults)


def test_used_for_a_round_and_then_its_own_again() -> None:
    optimizer = adam(lr=0.1)
    options = Options(optimizer)
    theirs = options.form.read(Options(adam(lr=0.7)).written(), "rank 1")
    with options.using(theirs):
        assert optimizer.param_groups[0]["lr"] == 0.7
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(KeyError), options.using(theirs):
        raise KeyError
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Adam: lr=tensor.* of group 0 .*such as lr=0.1"):
        Options(adam(lr=torch.tensor(0.1)))


def changed(**values: object) -> bytes:
    groups = json.loads(Options(adam()).written())
    groups[0] |= values
    return json.dumps(groups).encode()


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "no 2 groups"),
        (b"\xff", "no 2 groups"),
        (b"[" * 100_000, "no 2 groups"),
        (b"{}", "no 2 groups"),
        (b"[{}]", "no 2 groups"),
        (b"[{}, {}]", "options other than lr, betas"),
        (b"[1, 2]", "options other than lr, betas"),
        (changed(other=1), "options other than lr, betas"),
        (changed(lr="x"), "lr='x', where this worker has 0.1"),
        (changed(lr=True), "lr=True, where"),
        (changed(lr=[1]), "lr=.1., where"),
        (changed(betas=[0.9]), "betas=.0.9., where"),
        (changed(betas=[0.9, "x"]), "betas='x', where"),
        (changed(amsgrad=1), "amsgrad=1, where"),
    ],
    ids=range(14),
)
def test_nonsense_is_refused_and_its_sender_named(payload: bytes, said: str) -> None:
    with pytest.raises(PeerError, match=f"rank 1 sent {said}"):
        Options(adam()).form.read(payload, "rank 1")


def test_what_was_left_open_may_be_chosen_and_given_up() -> None:
    found = Options(adam()).form.read(changed(foreach=True, weight_decay=None), "rank 1")
    assert found[0]["foreach"] is True
    assert found[0]["weight_decay"] is None
    adafactor = torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(2))])
    options = Options(adafactor)
    adafactor.param_groups[0]["eps"] = (1e-30, None)
    assert options.form.read(options.written(), "rank 1")[0]["eps"] == (1e-30, None)
