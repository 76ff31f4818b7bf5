"""What the tests of Lightning's Trainer run in worker processes: each against Lightning's own DDP."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wingbeat
from wingbeat.errors import UsageError
from wingbeat.integrations.lightning import WingbeatStrategy

EXACT = {
    "allreduce": wingbeat.AllReduce(mb=0.001, first_mb=0.001),
    "dear": wingbeat.DeAR(plan="fixed", mb=0.001, edge_mb=0),
    "sharded": wingbeat.DeAR(plan="fixed", mb=0.001, edge_mb=0, shard_optimizer=True),
}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


def data(seed: int = 0, count: int = 48) -> TensorDataset:
    made = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=made), torch.randn(count, 4, generator=made))


def loader(seed: int = 0, count: int = 48) -> DataLoader[Any]:
    return DataLoader(data(seed, count), batch_size=4)


class Net(pl.LightningModule):
    """A network with buffers, trained as most are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.net(x))
        return out

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Adamed(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        made = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}


class OnPlateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "monitor": "val"}}


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)


class Late(Net):
    """Builds its layers where Lightning asks for it, and has a layer of a name that is ours."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            self.net, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)
            self.join = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.join(self.head(self.net(x)))
        return out


class Bfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnStep(Net):
    """Overrides the hooks that are often overridden."""

    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + batch)
        optimizer.step(closure=closure)

    def optimizer_zero_grad(self, epoch: int, batch: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def configure_gradient_clipping(self, optimizer: Any, **_kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())


class Manual(Net):
    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: Any, number: int) -> None:
        optimizer = self.optimizers()
        last = (number + 1) % self.every == 0
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch) / self.every)
        if last:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Gathering(Manual):
    def __init__(self) -> None:
        super().__init__(every=3)


class Gan(pl.LightningModule):
    """Two networks with an optimizer each."""

    zeroes = False

    def __init__(self, toggles: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.toggles = toggles
        self.maker = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any) -> None:
        noise, real = batch
        of_maker, of_judge = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(of_maker)
        loss = -self.judge(self.maker(noise)).mean()
        of_maker.zero_grad()
        self.manual_backward(loss)
        of_maker.step()
        if self.zeroes:
            of_maker.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(of_maker)
            self.toggle_optimizer(of_judge)
        loss = self.judge(self.maker(noise).detach()).mean() - self.judge(real).tanh().mean()
        of_judge.zero_grad()
        self.manual_backward(loss)
        of_judge.step()
        if self.toggles:
            self.untoggle_optimizer(of_judge)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.maker.parameters(), lr=0.01),
            torch.optim.SGD(self.judge.parameters(), lr=0.05, momentum=0.5),
        )


class Untoggled(Gan):
    def __init__(self) -> None:
        super().__init__(toggles=False)


class Zeroing(Gan):
    zeroes = True


def mixed(**_kwargs: Any) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler)


CASES: dict[str, Any] = {
    "plain": (Net, lambda: {}),
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
        torch.testing.assert_close(value, b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


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
        assert any(not torch.equal(v, begin.get(k, v * 0)) for k, v in expected.state_dict().items())
        for each in kinds:
            module = kind()
            trainer = fitted(module, WingbeatStrategy(EXACT[each]), **options())
            assert type(module) is kind, "released"
            assert trainer.global_step == ddp.global_step
            same_everywhere(module)
            if torch.distributed.get_rank() == 0:  # buffers of DDP are rank 0's at forwards only
                close(module.state_dict(), expected.state_dict())
            close(dict(module.named_parameters()), dict(expected.named_parameters()))
            # Where DDP is used by hand, or skips backwards, it leaves others' buffers as they were.
            compared = () if name.startswith(("manual", "averaged")) else ddp.callback_metrics
            for key in compared:
                value = ddp.callback_metrics[key]
                torch.testing.assert_close(trainer.callback_metrics[key], value, rtol=1e-4, atol=1e-5)
