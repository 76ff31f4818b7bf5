"""Networks of the tests of Lightning, each trained as people train, and what they train with."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(seed: int = 0, count: int = 48) -> TensorDataset:
    made = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 8, generator=made), torch.randn(count, 4, generator=made)
    )


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


class Direct(Net):
    """Trains its parts, never through its own ``forward``; rank 0 changes buffers in between.

    What it adds to the output is rank 0's on all workers only if a forward of the whole begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("begun", torch.zeros(()))
        self.register_forward_pre_hook(_count)

    def on_train_batch_start(self, *_args: Any) -> None:
        if self.global_rank == 0:
            self.net[1].running_mean += 1.0
            self.shift += 0.3

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.head(self.net(batch[0])) + self.shift
        return nn.functional.mse_loss(out, batch[1])


def _count(module: Any, _args: Any) -> None:
    """A user's own hook, which has to run as often as with DDP."""
    if module.training:
        module.begun += 1


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


def compiled() -> Net:
    """Return a network as Lightning makes it of what ``torch.compile`` has returned."""
    found: Net = from_compiled(torch.compile(Silent(), backend="eager"))
    return found


class Silent(Net):
    """Logs nothing, as compiled code cannot."""

    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        self.loss(batch)


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
