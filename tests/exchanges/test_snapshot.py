"""Snapshots that are loaded by a worker whose parameters are on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import accelerator
from wingbeat.exchanges.snapshot import Snapshot, encode_snapshot

pytestmark = pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"capturable": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.ASGD, {}),  # has numbers besides `step`
]


def ids(value: Any) -> str | None:
    return "-".join(value) or "plain" if isinstance(value, dict) else None


def devices(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, str]:
    state = optimizer.state[param].items()
    return {key: value.device.type for key, value in state if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=ids)
def test_loaded_state_is_on_the_device_on_which_torch_loads_it(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    accelerator.load().late_seed(0)
    sent = torch.nn.Parameter(torch.ones(4))
    sender: Any = kind([sent])
    sent.grad = torch.ones(4)
    sender.step()
    param = torch.nn.Parameter(torch.zeros(4, device=torch.device(accelerator.NAME, 0)))
    reference: Any = kind([param], **options)
    saved = sender.state_dict()
    reference.load_state_dict({**saved, "param_groups": reference.state_dict()["param_groups"]})
    loaded: Any = kind([param], **options)
    Snapshot(encode_snapshot([sent], [sent], sender, []), [param], [param]).load_into(loaded)
    assert devices(loaded, param) == devices(reference, param)
    assert param.tolist() == sent.tolist()
