"""Lightning's Trainer in worker processes: what it saves, what comes after, what it refuses."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

import wingbeat
import wingbeat_lab
from integrations.lightning_cases import (
    EXACT,
    Adamed,
    Bfgs,
    Gan,
    Gathering,
    Net,
    alike,
    close,
    fitted,
    line,
    loader,
    same_everywhere,
    torchrun,
)
from wingbeat.integrations.lightning import WingbeatStrategy


class Plain(Net):
    """Without momentum, so that nothing of the optimizer differs between workers."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


QUICK = timedelta(seconds=40)
EXTRA: dict[str, Any] = {
    **EXACT,
    "sketch": wingbeat.AllReduce(compression="sketch@2:auto_disable=false"),
    "topk": wingbeat.DeAR(plan="fixed", compression="topk@0.1:auto_disable=false"),
    "diloco": wingbeat.DiLoCo(every=4),
    "localsgd": wingbeat.LocalSGD(every=4),
    "ako": wingbeat_lab.Ako(partitions=2),
}


def resumed(kind: str, folder: str) -> None:
    """Training that goes on from a checkpoint is as one without a stop."""
    make = Plain if kind in ("diloco", "localsgd") else Adamed
    path = Path(folder) / f"{kind}.ckpt"
    with torchrun():
        whole, first, second = make(), make(), make()
        saving = ModelCheckpoint(folder, filename=f"{kind}-at-{{epoch}}", save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": 3}
        fitted(whole, WingbeatStrategy(EXTRA[kind]), **options)
        trainer = fitted(first, WingbeatStrategy(EXTRA[kind]), max_epochs=1)
        assert not path.exists()
        at = Path(folder) / f"{kind}-at-epoch=0.ckpt"
        dist.barrier()
        saved = torch.load(at, weights_only=False)
        beside = saved["optimizer_states"][0].get("wingbeat", {})
        assert ("parts" in beside) == (kind in ("sketch", "topk", "ako"))
        assert ("averages" in beside) == (kind in ("diloco", "localsgd"))
        trainer = pl.Trainer(
            strategy=WingbeatStrategy(EXTRA[kind]), accelerator="cpu", devices=2, max_epochs=3,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(second, loader(), loader(1, 16), ckpt_path=str(at), weights_only=False)
        assert trainer.global_step == 18
        tolerance = 1e-5 if kind in EXACT else 1e-4
        if kind != "ako":
            same_everywhere(second)
            close(dict(second.named_parameters()), dict(whole.named_parameters()), tolerance)


def parts_are_each_workers(folder: str) -> None:
    """A checkpoint has what each worker has kept back, and gives it back to each."""
    with torchrun():
        module = Adamed()
        strategy = WingbeatStrategy(EXTRA["sketch"])
        seen: list[Any] = []

        class Looking(pl.Callback):
            def on_train_end(self, trainer: pl.Trainer, _module: Any) -> None:
                trainer.save_checkpoint(Path(folder) / "parts.ckpt")
                seen.append(trainer.optimizers[0].residual_state_dict())

            def on_train_start(self, trainer: pl.Trainer, _module: Any) -> None:
                seen.append(trainer.optimizers[0].residual_state_dict())

        fitted(module, strategy, callbacks=[Looking()], max_epochs=1)
        rank = dist.get_rank()
        parts = torch.load(Path(folder) / "parts.ckpt")["optimizer_states"][0]["wingbeat"]["parts"]
        assert [part["rank"] for part in parts] == [0, 1]
        close(parts[rank]["residuals"], seen[-1]["residuals"])
        name = "head.weight"
        assert not torch.equal(parts[0]["residuals"][name], parts[1]["residuals"][name])
        trainer = pl.Trainer(
            strategy=WingbeatStrategy(EXTRA["sketch"]), accelerator="cpu", devices=2, max_epochs=2,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            callbacks=[Looking()],
        )  # fmt: skip
        trainer.fit(Adamed(), loader(), ckpt_path=str(Path(folder) / "parts.ckpt"))
        close(seen[-2]["residuals"], parts[rank]["residuals"])
        # The checkpoint is one of Lightning's own too.
        plain = pl.Trainer(
            strategy="ddp", accelerator="cpu", devices=2, max_epochs=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False,
        )  # fmt: skip
        plain.fit(Adamed(), loader(), ckpt_path=str(Path(folder) / "parts.ckpt"))


def after_fit(kind: str) -> None:
    """Validate, test, predict and another fit come right after a fit, as with DDP."""

    def used(strategy: Any) -> tuple[Net, list[Any]]:
        module = Net()
        trainer = fitted(module, strategy, max_epochs=1)
        found = [trainer.validate(module, loader(1, 16), verbose=False)]
        found += [trainer.test(module, loader(2, 16), verbose=False)]
        found += [torch.cat(trainer.predict(module, loader(3, 16)))]
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader())
        found += [trainer.test(module, loader(2, 16), verbose=False)]
        return module, found

    with torchrun():
        expected, there = used(DDPStrategy())
        module, found = used(WingbeatStrategy(EXACT[kind]))
        assert type(module) is Net
        close(dict(module.named_parameters()), dict(expected.named_parameters()))
        torch.testing.assert_close(found, there, rtol=1e-4, atol=1e-5)


def local_until_the_last(kind: str, manual: bool) -> None:
    """While gradients are accumulated, nothing travels: each worker has its own."""
    seen: list[bool] = []

    class Looking(Gathering if manual else Net):  # type: ignore[misc]
        def on_after_backward(self) -> None:
            seen.append(alike(self))

    with torchrun():
        options = {} if manual else {"accumulate_grad_batches": 3}
        fitted(Looking(), WingbeatStrategy(EXACT[kind]), max_epochs=1, **options)
    assert seen == [False, False, True] * 2


class Watched(Plain):
    """Makes sure that all workers have the same model where it is looked at."""

    looks = 0

    def training_step(self, batch: Any) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        same_everywhere(self)
        self.looks += 1

    def on_save_checkpoint(self, _checkpoint: Any) -> None:
        same_everywhere(self)
        self.looks += 1


def averaged(kind: str, folder: str) -> None:
    """Models that part between averages are one where they are validated, saved and used."""
    strategies: dict[str, Any] = {
        "ripples": wingbeat.Ripples(encrypted=False),
        "adpsgd": wingbeat.ADPSGD(),
        "localsgd": wingbeat.LocalSGD(every=5),
        "diloco": wingbeat.DiLoCo(every=5),
        "canary": wingbeat.Canary(),
    }
    with torchrun():
        module = Watched()
        saving = ModelCheckpoint(folder, filename=kind)
        trainer = fitted(
            module, WingbeatStrategy(strategies[kind]), enable_checkpointing=True,
            callbacks=[saving],
        )  # fmt: skip
        assert module.looks >= 4
        same_everywhere(module)
        trainer.test(module, loader(2, 16), verbose=False)


class Talking(Plain):
    """Waits for all in each step, in its closure and after it."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch: Any) -> Any:
        loss = self.loss(batch)
        self.log("before", loss, sync_dist=True, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("after", loss, sync_dist=True)
        gathered = self.all_gather(loss.detach())
        assert gathered.shape == (dist.get_world_size(),)
        return loss


def waits_for_all() -> None:
    """In pairs, a training step may wait for all workers: those who are asked answer meanwhile."""
    with torchrun():
        for manual in (False, True):
            module = Talking(manual)
            trainer = fitted(module, WingbeatStrategy(wingbeat.ADPSGD(), timeout=QUICK))
            assert trainer.global_step == 2 * (48 // 4 // dist.get_world_size())
            same_everywhere(module)


def refused() -> None:
    """What cannot be served is refused in one line, and the trainer can be used again."""

    class WithoutOne(Net):
        def configure_optimizers(self) -> Any:
            return None

    with torchrun():
        said = line(lambda: fitted(WithoutOne(), WingbeatStrategy(EXACT["dear"])))
        assert "has returned no optimizer of the model's parameters" in said
        said = line(lambda: fitted(Gan(), WingbeatStrategy(EXACT["sharded"])))
        assert said.startswith("a gradient was read: with shard_optimizer"), said
        for kind, averaging in (
            (Net, wingbeat.Ripples(encrypted=False)), (Bfgs, wingbeat.ADPSGD()),
        ):  # fmt: skip
            said = line(lambda k=kind, a=averaging: fitted(k(), WingbeatStrategy(a)))
            assert said.startswith("self.log(sync_dist=True), all_gather or a barrier in train")
        clipped = {"gradient_clip_val": 0.1}
        said = line(lambda: fitted(Net(), WingbeatStrategy(wingbeat.Canary()), **clipped))
        assert "Canary" in said, said
        bare = fitted(Net(), WingbeatStrategy(EXACT["dear"])).lightning_module
        assert type(bare) is Net


def one_fails() -> str:
    """Whoever fails says so at once; the others learn it and end."""

    class Failing(Net):
        def log(self, *args: Any, **kwargs: Any) -> None:
            """Log nothing: that would wait in torch's default group, which these workers keep."""

        def training_step(self, batch: Any, number: int) -> Any:
            if number == 3 and dist.get_rank() == 1:
                raise ArithmeticError("mine")
            return super().training_step(batch)

    module = Failing()
    try:
        with torchrun():
            # A step of DeAR returns earlier, and Lightning then waits in torch's default group.
            fitted(module, WingbeatStrategy(EXACT["allreduce"]))
    except Exception as error:
        assert not re.match("Distributed", type(module).__name__)
        return f"{type(error).__name__}: {error}"
    return "nothing"
