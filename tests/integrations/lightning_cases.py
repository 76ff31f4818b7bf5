"""Cases of Lightning's Trainer for worker processes: each against Lightning's own DDP."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import wingbeat
from integrations.lightning_modules import (
    Adamed,
    Bfgs,
    Direct,
    Frozen,
    Gan,
    Gathering,
    Late,
    Manual,
    Net,
    OnPlateau,
    OwnStep,
    Scheduled,
    Untoggled,
    Unused,
    Zeroing,
    compiled,
    loader,
)
from wingbeat.errors import UsageError
from wingbeat.integrations.lightning import WingbeatStrategy

EXACT = {
    "allreduce": wingbeat.AllReduce(mb=0.001, first_mb=0.001),
    "dear": wingbeat.DeAR(plan="fixed", mb=0.001, edge_mb=0),
    "sharded": wingbeat.DeAR(plan="fixed", mb=0.001, edge_mb=0, shard_optimizer=True),
}
BOUND = {"canary": wingbeat.Canary(s=0, encrypted=False)}
"""Bounded staleness with a bound of 0."""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": int(os.environ.get("WORLD_SIZE", "2")),
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


def mixed(**_kwargs: Any) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler)


CASES: dict[str, Any] = {
    "plain": (Net, lambda: {}),
    # Without validation, after which DDP leaves buffers as they are for one forward.
    "direct": (Direct, lambda: {"limit_val_batches": 0}),
    "adamw": (Adamed, lambda: {}),
    "accumulation": (Net, lambda: {"accumulate_grad_batches": 4}),
    "accumulation by epoch": (
        Net,
        lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]},
    ),
    "clipped by norm": (Net, lambda: {"gradient_clip_val": 0.1}),
    "clipped by value": (
        Net,
        lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "clipped accumulation": (
        Net,
        lambda: {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    ),
    "bf16-mixed": (Net, lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "16-mixed": (Net, lambda: {"plugins": [mixed()]}),
    "16-mixed, clipped": (Net, lambda: {"plugins": [mixed()], "gradient_clip_val": 0.1}),
    "64-true": (Net, lambda: {"precision": "64-true"}),
    "a scheduler": (Scheduled, lambda: {}),
    "a scheduler on a plateau": (OnPlateau, lambda: {"max_epochs": 3}),
    "averaged exponentially": (Net, lambda: {"callbacks": [EMAWeightAveraging(decay=0.8)]}),
    "averaged at last": (
        Net,
        lambda: {
            "max_epochs": 3,
            "callbacks": [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)],
        },
    ),
    "frozen": (Frozen, lambda: {}),
    "late": (Late, lambda: {}),
    "unused": (Unused, lambda: {}),
    "own step": (OwnStep, lambda: {}),
    "manual": (Manual, lambda: {}),
    "manual accumulation": (Gathering, lambda: {}),
    "gan": (Gan, lambda: {}),
    "gan, untoggled": (Untoggled, lambda: {}),
    "gan, zeroing": (Zeroing, lambda: {}),
    "stopped early": (
        Net,
        lambda: {"max_epochs": 9, "callbacks": [EarlyStopping("val", patience=1, min_delta=9.0)]},
    ),
    "within an epoch": (Net, lambda: {"val_check_interval": 2, "accumulate_grad_batches": 3}),
    "lbfgs": (Bfgs, lambda: {}),
    "compiled": (compiled, lambda: {"max_epochs": 1}),
    "by steps": (Net, lambda: {"max_steps": 7, "max_epochs": -1}),
}


@contextlib.contextmanager
def torchrun() -> Iterator[None]:
    """Let Lightning find that these workers were started by torchrun."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    try:
        yield
    finally:
        wingbeat.shutdown()


def fitted(module: pl.LightningModule, strategy: Any, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(strategy=strategy, **{**QUIET, **options})
    trainer.fit(module, loader(), loader(1, 16))
    return trainer


def close(a: dict[str, Any], b: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(
            value, b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def alike(model: nn.Module) -> bool:
    """Whether all workers have the same gradients."""
    found = []
    for param in model.parameters():
        mine = torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
        first = mine.clone()
        torch.distributed.broadcast(first, 0)
        found.append(torch.equal(first, mine))
    apart = torch.tensor(float(not all(found)))
    torch.distributed.all_reduce(apart)
    return not bool(apart)


def line(call: Callable[[], Any]) -> str:
    """Return in which words a call is refused: one line."""
    with pytest.raises(UsageError) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def same_everywhere(module: nn.Module) -> None:
    for name, value in module.named_parameters():
        first = value.detach().clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(first, value.detach()), name


def as_ddp(name: str, kinds: tuple[str, ...]) -> None:
    """Weights and buffers are those that Lightning's DDP trains."""
    kind, options = CASES[name]
    with torchrun():
        expected = kind()
        begin = {k: v.clone() for k, v in expected.state_dict().items()}
        unused = name in ("unused", "frozen") or name.startswith("gan")
        ddp = fitted(expected, DDPStrategy(find_unused_parameters=unused), **options())
        assert any(
            not torch.equal(v, begin.get(k, v * 0)) for k, v in expected.state_dict().items()
        )
        for each in kinds:
            module = kind()
            trainer = fitted(module, WingbeatStrategy({**EXACT, **BOUND}[each]), **options())
            assert not type(module).__name__.startswith("Distributed"), "released"
            assert trainer.global_step == ddp.global_step
            same_everywhere(module)
            if torch.distributed.get_rank() == 0:  # buffers of DDP are rank 0's at forwards only
                close(module.state_dict(), expected.state_dict())
            close(dict(module.named_parameters()), dict(expected.named_parameters()))
            # Where DDP is used by hand, or skips backwards, it leaves others' buffers as they were.
            compared = () if name.startswith(("manual", "averaged")) else ddp.callback_metrics
            for key in compared:
                value = ddp.callback_metrics[key]
                torch.testing.assert_close(
                    trainer.callback_metrics[key], value, rtol=1e-4, atol=1e-5
                )
