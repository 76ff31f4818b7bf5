"""What people also do with Lightning's Trainer: each against Lightning's own DDP."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import wingbeat
from integrations.lightning_cases import (
    EXACT,
    QUIET,
    close,
    fitted,
    line,
    same_everywhere,
    torchrun,
)
from integrations.lightning_modules import Gan, Late, Net, data, loader
from wingbeat.integrations.lightning import WingbeatStrategy
from wingbeat.strategies import MGWFBP


class Rated(Net):
    """Says its learning rate where Lightning's tuner looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.05, 4

    def train_dataloader(self) -> Any:
        return DataLoader(data(count=160), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Still(Net):
    """Its batch norm does not learn, so that a synchronised one runs on CPUs."""

    def on_train_epoch_start(self) -> None:
        self.net[1].eval()


class Tuned(Still):
    """A backbone that is frozen at first, and trained later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=0.02)


class Thawing(Still):
    """Trains all of its parameters from the second epoch on; its optimizer has them all along."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)


class Adding(Still):
    """Adds what it has frozen to its optimizer, through Lightning's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.optimizers().add_param_group({"params": [*self.net[0].parameters()], "lr": 0.02})

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)


USES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "fast_dev_run": (Net, {"fast_dev_run": True}),
    "overfit_batches": (Net, {"overfit_batches": 2, "max_epochs": 3}),
    "limited": (Net, {"limit_train_batches": 0.5, "limit_val_batches": 1}),
    "detect_anomaly": (Net, {"detect_anomaly": True, "max_epochs": 1}),
    "sync_batchnorm": (Still, {"sync_batchnorm": True}),
    "late": (Late, {}),
    "no validation": (Net, {"limit_val_batches": 0}),
    "several epochs to one validation": (Net, {"check_val_every_n_epoch": 2}),
    "sanity": (Net, {"num_sanity_val_steps": 2}),
    "own sampler": (Net, {"use_distributed_sampler": False, "max_epochs": 1}),
    "inference mode": (Net, {"inference_mode": False, "max_epochs": 1}),
    "profiled": (Net, {"profiler": "simple", "max_epochs": 1}),
    "reloaded": (Net, {"reload_dataloaders_every_n_epochs": 1}),
    "timed": (Net, {"max_time": "00:01:00:00"}),
}


def used(names: list[str]) -> None:
    """Options of the Trainer: the same weights as with Lightning's DDP."""
    with torchrun():
        for name in names:
            kind, options = USES[name]
            expected = kind()
            # On CPUs DDP refuses it; what does not learn is the same without.
            usual = {key: value for key, value in options.items() if key != "sync_batchnorm"}
            fitted(expected, DDPStrategy(), **usual)
            for each in ("dear", "sharded"):
                module = kind()
                fitted(module, WingbeatStrategy(EXACT[each]), **options)
                same_everywhere(module)
                assert not any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
                close(dict(module.named_parameters()), dict(expected.named_parameters()))


def several_times(folder: str) -> None:
    """Validate before, fit twice, predict; weights alone are saved, and load anywhere."""

    def all_of(strategy: Any, where: str) -> tuple[Net, list[Any]]:
        module = Net()
        saving = ModelCheckpoint(where, filename="{epoch}", save_weights_only=True, save_top_k=-1)
        swa = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)
        options = {**QUIET, "enable_checkpointing": True, "callbacks": [saving, swa]}
        trainer = pl.Trainer(strategy=strategy, **{**options, "max_epochs": 3})
        found: list[Any] = [trainer.validate(module, loader(1, 16), verbose=False)]
        trainer.fit(module, loader(), loader(1, 16))
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, loader(), loader(1, 16))
        found.append(torch.cat(trainer.predict(module, loader(3, 16))))
        state = torch.load(f"{where}/epoch=0.ckpt")
        assert "optimizer_states" not in state
        again = Net()
        again.load_state_dict(state["state_dict"])
        found.append(torch.cat(trainer.predict(again, loader(3, 16))))
        return module, found

    with torchrun():
        expected, there = all_of(DDPStrategy(), f"{folder}/ddp")
        for each in ("dear", "sharded"):
            module, found = all_of(WingbeatStrategy(EXACT[each]), f"{folder}/{each}")
            close(dict(module.named_parameters()), dict(expected.named_parameters()))
            torch.testing.assert_close(found, there, rtol=1e-4, atol=1e-5)


def tuned(folder: str) -> None:
    """Lightning's tuner finds the learning rate that it finds with DDP, and no batch size."""

    def found(strategy: Any) -> Any:
        module = Rated()
        options = {**QUIET, "default_root_dir": folder, "enable_checkpointing": False}
        tuner = Tuner(pl.Trainer(strategy=strategy, **options))
        rates = tuner.lr_find(module, num_training=30, max_lr=0.5)
        with pytest.raises(ValueError, match="not supported with distributed strategies"):
            tuner.scale_batch_size(module)  # Lightning's own words
        return module.lr, rates.results["loss"], module

    with torchrun():
        rate, losses, expected = found(DDPStrategy())
        assert rate != Rated().lr
        for each in EXACT:
            mine, same_losses, module = found(WingbeatStrategy(EXACT[each]))
            assert mine == pytest.approx(rate)
            torch.testing.assert_close(same_losses, losses, rtol=1e-4, atol=1e-5)
            close(dict(module.named_parameters()), dict(expected.named_parameters()))


def fine_tuned() -> None:
    """Parameters that are trained later are averaged from then on, which DDP's are not.

    So it is compared with a training of the whole batch on one worker.
    """

    def train(kind: Any, strategy: Any) -> Any:
        module = kind()
        callbacks = [BackboneFinetuning(1, train_bn=False)] if kind is Tuned else []
        fitted(module, strategy, callbacks=callbacks, max_epochs=4)
        same_everywhere(module)
        return module

    kinds: dict[str, Any] = {
        **EXACT,
        "sketch": wingbeat.AllReduce(compression="sketch@8:auto_disable=false"),
        "diloco": wingbeat.DiLoCo(every=4),
    }
    with torchrun():
        for kind in (Tuned, Thawing, Adding):
            wanted = alone(kind)
            start = dict(kind().named_parameters())
            for name, strategy in kinds.items():
                module = train(kind, WingbeatStrategy(strategy))
                assert not torch.equal(module.net[0].weight, start["net.0.weight"])
                if name in EXACT:
                    close(dict(module.named_parameters()), wanted)


class Halves(Net):
    """Two optimizers of disjoint parameters, which step on gradients of one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(second, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9),
            torch.optim.AdamW(self.net.parameters(), lr=0.01),
        )


class Growing(Halves):
    """Gives its first optimizer more to train amid a step."""

    def training_step(self, batch: Any) -> None:
        first, _ = self.optimizers()
        first.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


OPTIMIZED: dict[str, Any] = {
    "merged": MGWFBP(),
    "servers": wingbeat.Geryon(mb=0.001, encrypted=False),
    "omgs": wingbeat.OMGS(density=0.2, warmup=0),
    "sketch": wingbeat.DeAR(plan="fixed", compression="sketch@4:auto_disable=false"),
    "localsgd": wingbeat.LocalSGD(every=2),
    "diloco": wingbeat.DiLoCo(every=4),
    "ripples": wingbeat.Ripples(encrypted=False),
    "adpsgd": wingbeat.ADPSGD(encrypted=False),
}


def several_optimizers(names: list[str]) -> None:
    """A second optimizer steps on the same gradients, or on a model that is averaged whole."""
    with torchrun():
        for kind in (Halves, Gan):
            expected = kind()
            unused = kind is Gan
            fitted(expected, DDPStrategy(find_unused_parameters=unused), max_epochs=1)
            for name in names:
                module = kind()
                begin = {key: value.detach().clone() for key, value in module.named_parameters()}
                fitted(module, WingbeatStrategy(OPTIMIZED[name]), max_epochs=1)
                same_everywhere(module)
                assert all(not torch.equal(v, begin[k]) for k, v in module.named_parameters())
                if name in ("merged", "servers"):
                    close(dict(module.named_parameters()), dict(expected.named_parameters()))


def refused_with_several() -> list[str]:
    """What cannot serve two optimizers, or one that grows amid a step, says so, and what to do."""
    with torchrun():
        return [
            line(lambda k=kind, s=strategy: fitted(k(), WingbeatStrategy(s)))
            for kind, strategy in (
                (Halves, wingbeat.Canary()),
                (Gan, wingbeat.Canary()),
                (Growing, wingbeat.AllReduce()),
            )
        ]


class Comparing(pl.Callback):
    """Adds what is frozen to the optimizer, and notes what is kept before and after."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 2:
            [optimizer] = trainer.optimizers
            self.before = optimizer.state_dict()["wingbeat"]
            module.net[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*module.net[0].parameters()]})
            self.after = optimizer.state_dict()["wingbeat"]


class Keeping(Adding):
    """Leaves adding to the callback."""

    on_train_epoch_start = Still.on_train_epoch_start


def carried() -> None:
    """Residuals, velocity and how many steps were made are not lost when parameters are added."""
    with torchrun():
        for strategy in (OPTIMIZED["sketch"], OPTIMIZED["diloco"]):
            seen = Comparing()
            fitted(Keeping(), WingbeatStrategy(strategy), callbacks=[seen], max_epochs=3)
            before, after = seen.before, seen.after
            if "averages" in before:
                before, after = before["averages"], after["averages"]
                assert after["steps"] == before["steps"] == 12
            else:
                assert after["step"] == before["step"] > 0
            kinds = [key for key, value in before.items() if isinstance(value, dict)]
            assert kinds
            for kind in kinds:
                added = after[kind].keys() - before[kind].keys()
                assert added == {"net.0.weight", "net.0.bias"}
                close(before[kind], {name: after[kind][name] for name in before[kind]})
                assert any(bool(value.any()) for value in before[kind].values())


def alone(kind: Any) -> dict[str, torch.Tensor]:
    """The weights that one worker trains with the batches of all workers."""
    module, size = kind(), dist.get_world_size()
    callback = BackboneFinetuning(1, train_bn=False)
    if kind is Tuned:
        callback.freeze_before_training(module)
    optimizer = module.configure_optimizers()
    for epoch in range(4):
        if kind is Tuned:
            callback.finetune_function(module, epoch, optimizer)
        elif epoch == 1:
            module.net[0].requires_grad_(True)
            if kind is Adding:
                optimizer.add_param_group({"params": [*module.net[0].parameters()], "lr": 0.02})
        module.net[1].eval()
        for batches in zip(*(batches_of(rank, size, epoch) for rank in range(size)), strict=True):
            optimizer.zero_grad()
            both = [torch.cat(parts) for parts in zip(*batches, strict=True)]
            nn.functional.mse_loss(module.head(module.net(both[0])), both[1]).backward()
            optimizer.step()
    return dict(module.named_parameters())


def batches_of(rank: int, size: int, epoch: int) -> Any:
    """What Lightning's sampler gives a worker in an epoch."""
    sampler = DistributedSampler(data(), size, rank, seed=int(os.environ.get("PL_GLOBAL_SEED", 0)))
    sampler.set_epoch(epoch)
    return DataLoader(data(), batch_size=4, sampler=sampler)
