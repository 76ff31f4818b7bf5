"""Trainers with sharded models: wingbeat between replicas beside the trainers' own HSDP."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import wingbeat
from helpers.refusals import said_by
from integrations import transformers_cases
from wingbeat.engine.upgrade import engine_of
from wingbeat.integrations import accelerate, fabric, lightning

CLOSE = 1e-6
NAMES = ("dp_replicate", "dp_shard")
STRATEGIES = {
    "allreduce": wingbeat.AllReduce(mb=0.0004, first_mb=0.0004),
    "dear": wingbeat.DeAR(plan="fixed", mb=0.0004, edge_mb=0),
}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 4,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


def samples() -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(96, 8, generator=made), torch.randn(96, 4, generator=made))


def loader() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=4)


def network(width: int = 15) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    layers.append(nn.Linear(width, 4))
    return nn.Sequential(*layers)


def sharded(net: Any, mesh: Any) -> Any:
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def hsdp() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)


def weights(model: Any) -> torch.Tensor:
    """All parameters, whole, in double precision."""
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()]).double()


def same(mine: torch.Tensor, theirs: torch.Tensor, why: Any) -> None:
    by = float((mine - theirs).norm() / theirs.norm())
    assert by < CLOSE, (why, by)
    assert float(theirs.norm()) > 0, why


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """A world for one case."""
    try:
        yield
    finally:
        wingbeat.shutdown()


# -- Lightning's Trainer ------------------------------------------------------------------


class Module(pl.LightningModule):
    """As people write it for ModelParallelStrategy; ``own`` makes it a mesh for HSDP."""

    def __init__(self, own: bool, adam: bool = False) -> None:
        super().__init__()
        self.own, self.adam = own, adam
        self.net = network()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        mesh = hsdp() if self.own else self.device_mesh["data_parallel"]
        sharded(self.net, mesh)

    def training_step(self, batch: Any) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.losses.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class ByHand(Module):
    """Manual optimisation."""

    def __init__(self, own: bool) -> None:
        super().__init__(own)
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


class Parallel(Module):
    """FSDP2 over tensor parallelism, on Lightning's own mesh."""

    def __init__(self, own: bool) -> None:
        super().__init__(own)
        self.net = network(16)

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        sharded(self.net, self.device_mesh["data_parallel"])


TRAINED: dict[str, Any] = {
    "plain": (Module, {}),
    "accumulated": (Module, {"accumulate_grad_batches": 3}),
    "clipped": (Module, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "clipped by value": (Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (Module, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "manual": (ByHand, {}),
}


def trained(strategy: Any, kind: Any, options: dict[str, Any], **how: Any) -> Any:
    trainer = pl.Trainer(strategy=strategy, **{**QUIET, **options})
    module = kind(not isinstance(strategy, lightning.WingbeatModelParallelStrategy))
    trainer.fit(module, loader(), loader(), **how)
    assert isinstance(trainer.train_dataloader.sampler, torch.utils.data.DistributedSampler)
    return module


def ours(name: str, **options: Any) -> Any:
    return lightning.WingbeatModelParallelStrategy(STRATEGIES[name], replicas=2, **options)


def theirs(**options: Any) -> Any:
    return ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1, **options)


def as_hsdp(name: str) -> None:
    """Weights and validation losses of Lightning's own HSDP."""
    kind, options = TRAINED[name]
    with clean():
        usual = trained(theirs(), kind, options)
        wanted = weights(usual.net)
        for strategy in STRATEGIES:
            module = trained(ours(strategy), kind, options)
            same(weights(module.net), wanted, (name, strategy))
            assert module.losses == pytest.approx(usual.losses, rel=1e-5)
            assert len(module.losses) == 2
            assert engine_of(module) is None


def tensor_parallel_as_lightnings() -> None:
    """Two replicas of two columns, beside Lightning's two shards of each column."""
    with clean():
        usual = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
        wanted = weights(trained(usual, Parallel, {}).net)
        made = ours("dear", tensor_parallel_size=2)
        same(weights(trained(made, Parallel, {}).net), wanted, "tensor parallel")


def one_file_warnings(folder: str) -> list[str]:
    """What is logged about residuals when a checkpoint is one file."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wingbeat").addHandler(handler)
    try:
        with clean():
            made = lightning.WingbeatModelParallelStrategy(
                wingbeat.AllReduce(compression="sketch@2:auto_disable=false"),
                replicas=2,
                save_distributed_checkpoint=False,
            )
            watch = _Watch(Path(folder) / "saved.ckpt")
            trained(made, Module, {"max_epochs": 1, "callbacks": [watch]})
    finally:
        logging.getLogger("wingbeat").removeHandler(handler)
    return [line for line in lines if "is one file" in line]


def resumed(kind: str, folder: str, distributed: bool) -> None:
    """An interrupted run continues, from Lightning's checkpoint of either kind."""
    compressed = wingbeat.AllReduce(compression="sketch@2:auto_disable=false", mb=0.0004)
    strategy = {**STRATEGIES, "sketch": compressed}[kind]
    path = Path(folder) / "saved.ckpt"

    def fit(epochs: int, watch: _Watch, **how: Any) -> Any:
        made = lightning.WingbeatModelParallelStrategy(
            strategy, replicas=2, save_distributed_checkpoint=distributed
        )
        trainer = pl.Trainer(strategy=made, **{**QUIET, "max_epochs": epochs}, callbacks=[watch])
        trainer.fit(module := Module(own=False), loader(), loader(), **how)
        return module

    with clean():
        saving, loading = _Watch(path), _Watch()
        whole = fit(2, _Watch())
        module = fit(1, saving)
        again = fit(2, loading, ckpt_path=path)
        if kind == "sketch":  # which depends on buckets, and a new run learns their order again
            assert saving.ended.keys() == loading.began.keys()
            for name, residual in saving.ended.items():
                assert residual.any(), name
                assert torch.equal(residual, loading.began[name]), name
        else:
            same(weights(again.net), weights(whole.net), (kind, distributed))
        tested = pl.Trainer(strategy=theirs(save_distributed_checkpoint=distributed), **QUIET)
        tested.validate(other := Module(own=True), loader(), ckpt_path=path, verbose=False)
        same(weights(other.net), weights(module.net), "validated")


class _Watch(pl.Callback):
    """Residuals when training begins, and when an epoch ends; saves while it is distributed."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.began: dict[str, torch.Tensor] = {}
        self.ended: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = _residuals(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended = _residuals(trainer)
        if self.path is not None:
            trainer.save_checkpoint(self.path)


def _residuals(trainer: Any) -> dict[str, torch.Tensor]:
    extra = trainer.optimizers[0].state_dict().get("wingbeat", {})
    return {name: value.clone() for name, value in extra.get("residuals", {}).items()}


# -- Fabric -------------------------------------------------------------------------------


def parallelized(model: Any, mesh: Any) -> Any:
    return sharded(model, mesh["data_parallel"])


def fabric_of(strategy: str | None, **options: Any) -> Any:
    made: Any
    if strategy is None:
        made = FabricModelParallel(
            lambda model, _: sharded(model, hsdp()), data_parallel_size=4, tensor_parallel_size=1
        )
    else:
        made = fabric.WingbeatModelParallelStrategy(parallelized, STRATEGIES[strategy], replicas=2)
    found = Fabric(strategy=made, accelerator="cpu", devices=4, **options)
    found.launch()
    return found


def fabric_steps(made: Any, model: Any, optimizer: Any, clip: dict[str, float]) -> None:
    for number, (x, y) in enumerate(made.setup_dataloaders(loader())):
        last = number % 2 == 1
        with made.no_backward_sync(model, enabled=not last):
            made.backward(nn.functional.mse_loss(model(x), y))
        if last:
            made.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()


def fabric_trained(strategy: str | None, clip: dict[str, float], folder: str) -> torch.Tensor:
    """Weights after training, saving, and continuing with a new model."""
    for part in range(2):
        made = fabric_of(strategy, precision="bf16-mixed" if "clip_val" in clip else "32-true")
        bare = network()
        if part:  # what is loaded must replace these
            nn.init.zeros_(bare[0].weight)
        model = made.setup(bare)
        optimizer = made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
        state = {"model": model, "optimizer": optimizer, "steps": part}
        path = Path(folder) / f"{strategy}"
        if part:
            made.load(path, state)
            assert state["steps"] == 7
        fabric_steps(made, model, optimizer, clip)
        if not part:
            made.save(path, {**state, "steps": 7})
    assert (strategy is None) == (engine_of(bare) is None)
    return weights(bare)


def fabric_as_hsdp(clip: dict[str, float], folder: str) -> None:
    with clean():
        wanted = fabric_trained(None, clip, folder)
        for strategy in STRATEGIES:
            same(fabric_trained(strategy, clip, folder), wanted, (strategy, clip))


def lightning_refusals() -> list[str]:
    """What both strategies say to wrong use."""
    strategy = lightning.WingbeatModelParallelStrategy
    with clean():
        made = fabric_of("dear")
        bare = network()
        return said_by(
            [
                lambda: strategy(process_group="gloo"),
                lambda: trained(strategy(replicas=3), Module, {}),
                lambda: trained(strategy(replicas="all"), Module, {}),
                lambda: trained(strategy(tensor_parallel_size=0), Module, {}),
                lambda: trained(strategy(), Module, {}),
                lambda: made.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1)),
                lambda: trained(strategy(wingbeat.ADPSGD(), replicas=2), Module, {}),
            ]
        )


# -- Accelerate and the HF Trainer --------------------------------------------------------


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def own_shards(folder: str) -> list[str]:
    """A model that the user has sharded, in Accelerate on CPUs; what saving it says."""
    with clean():
        wanted, _ = _own_shards(None)
        for strategy in STRATEGIES:
            found, each = _own_shards(strategy)
            same(found, wanted, strategy)
        return said_by([lambda: each.save_state(folder), lambda: each.load_state(folder)])


def _own_shards(strategy: str | None) -> tuple[torch.Tensor, Any]:
    _forget()
    each = Accelerator(cpu=True, gradient_accumulation_steps=2)
    mesh = hsdp()
    model = sharded(network(), mesh if strategy is None else mesh["dp_shard"])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    batches: Any
    if strategy is None:
        batches, optimizer = each.prepare(loader(), optimizer)
    else:
        model, optimizer, batches = accelerate.prepare(
            each, model, optimizer, loader(), strategy=STRATEGIES[strategy], mesh=mesh
        )
    for x, y in batches:
        if strategy is None:  # no model that Accelerate knows
            each._do_sync()
            model.set_requires_gradient_sync(each.sync_gradients)
        with each.accumulate(model) if strategy else contextlib.nullcontext():
            each.backward(nn.functional.mse_loss(model(x), y))
            if each.sync_gradients:
                each.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), each


def _on_gpus(kind: Any) -> Any:
    """A class of Accelerator that is of a type which GPUs have."""
    return type("OnGpus", (Accelerator,), {"distributed_type": kind})


def fsdp_refusals(folder: str) -> list[str]:
    """What is said to FSDP of Accelerate and of the HF Trainer, and to loaders beside ``tp``."""

    def prepared(kind: Any = Accelerator, **options: Any) -> Any:
        _forget()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return accelerate.prepare(kind(cpu=True, **options), model, optimizer)

    def configured(**sizes: int) -> Any:
        several = _on_gpus(DistributedType.MULTI_GPU)
        return prepared(several, parallelism_config=ParallelismConfig(**sizes))

    def trainer() -> Any:
        args = transformers_cases.arguments(folder, fsdp=True, fsdp_config={"version": 2})
        return transformers_cases.made(STRATEGIES["dear"], transformers_cases.llama(), args)

    def with_loader(divide: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=(*NAMES, "tp"))
        _forget()
        model = divide(network(16), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return accelerate.prepare(Accelerator(cpu=True), model, optimizer, loader(), mesh=mesh)

    def by_tp(model: Any, mesh: Any) -> Any:
        return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})

    cases = [
        lambda: configured(dp_replicate_size=2, dp_shard_size=2),
        lambda: configured(tp_size=4),
        lambda: prepared(_on_gpus(DistributedType.FSDP)),
        lambda: with_loader(by_tp),
        lambda: with_loader(lambda model, mesh: sharded(by_tp(model, mesh), mesh["dp_shard"])),
        trainer,
        lambda: prepared(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)),
    ]
    before = dict(os.environ)
    try:
        with clean():
            return said_by(cases)
    finally:
        os.environ.clear()
        os.environ.update(before)
        _forget()
