"""What the tests of Accelerate run in worker processes: its own DDP beside wingbeat."""

from __future__ import annotations

import contextlib
import gc
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import wingbeat
from helpers.refusals import said_by
from wingbeat.engine.upgrade import engine_of
from wingbeat.integrations.accelerate import prepare, register_comm_hook
from wingbeat.schedules.events import Phase

CLOSE = 1e-5
MB = 0.0004
"""Several buckets, even of a small model."""

EXACT = (
    wingbeat.AllReduce(mb=MB),
    wingbeat.DeAR(plan="fixed", mb=MB),
    wingbeat.DeAR(plan="fixed", mb=MB, shard_optimizer=True),
)


def net(seed: int = 0) -> nn.Sequential:
    # A bias before batch norm would have no gradient but rounding, of which Adam makes steps.
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)
    )


def samples(count: int = 48) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 6, generator=made), torch.randn(count, 4, generator=made)
    )


def flat(model: Any) -> torch.Tensor:
    """All weights of a bare model, a copy."""
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def accelerator(**options: Any) -> Any:
    """A new one: its state is kept in the class, and only its first maker decides the precision."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def ready(made: Any, strategy: Any, *objects: Any) -> Any:
    """Prepared by Accelerate itself (None), or by wingbeat."""
    if strategy is None:
        return made.prepare(*objects)
    return prepare(made, *objects, strategy=strategy)


class Training:
    """A model, its optimizer, loader and scheduler, and a loop as people write it."""

    def __init__(
        self, strategy: Any, *, lr: float = 0.05, order: str = "mols", adam: bool = True, **kw: Any
    ) -> None:
        self.accelerator = accelerator(**kw)
        self.bare = net()
        kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
        optimizer = kind(self.bare.parameters(), lr=lr)
        made = {
            "m": self.bare,
            "o": optimizer,
            "l": DataLoader(samples(), batch_size=4),
            "s": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        }
        found = ready(self.accelerator, strategy, *(made[key] for key in order))
        by_name = dict(zip(order, found, strict=True))
        self.model, self.optimizer = by_name["m"], by_name["o"]
        self.loader, self.scheduler = by_name["l"], by_name["s"]

    def train(self, clip: str = "", skip: int = 0, steps: int = 100) -> torch.Tensor:
        each = self.accelerator
        loader = each.skip_first_batches(self.loader, skip) if skip else self.loader
        for _, (x, y) in zip(range(steps), loader, strict=False):
            with each.accumulate(self.model):
                each.backward((self.model(x) - y).square().mean())
                if each.sync_gradients and clip == "norm":
                    self.norm = each.clip_grad_norm_(self.model.parameters(), 0.1)
                elif each.sync_gradients and clip == "list":
                    self.norm = each.clip_grad_norm_(list(self.model.parameters()), 0.1, 1.0)
                elif each.sync_gradients and clip == "some":
                    each.clip_grad_norm_(self.bare[0].parameters(), 0.01)
                elif each.sync_gradients and clip == "value":
                    each.clip_grad_value_(self.model.parameters(), 0.001)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return flat(self.bare)


def same(mine: torch.Tensor, theirs: torch.Tensor, why: Any) -> None:
    assert (mine - theirs).abs().max() <= CLOSE, (why, float((mine - theirs).abs().max()))


@contextlib.contextmanager
def clean() -> Any:
    """A world for one case."""
    try:
        yield
    finally:
        wingbeat.shutdown()


def exact() -> None:
    """The same weights as Accelerate's DDP, however the loop clips, accumulates and rounds."""
    with clean():
        for clip, options in (
            ("", {}),
            ("norm", {}),
            ("norm", {"gradient_accumulation_steps": 3}),
            ("list", {"gradient_accumulation_steps": 2}),
            ("some", {}),
            ("value", {}),
            ("norm", {"mixed_precision": "bf16"}),
        ):
            wanted = Training(None, **options).train(clip)
            for strategy in EXACT:
                training = Training(strategy, order="lsom", **options)
                found = training.train(clip)
                same(found, wanted, (clip, options, strategy))
                if options.get("mixed_precision"):
                    assert training.model(torch.ones(2, 6)).dtype == torch.float32


def clips_parts() -> None:
    """Clipping by ``model.parameters()`` gathers no gradient, and says the norm that DDP says."""
    with clean():
        theirs = Training(None)
        theirs.train("norm", steps=1)
        mine = Training(EXACT[1], lr=0.0)
        engine: Any = engine_of(mine.model)
        x, y = next(iter(mine.loader))
        for step in range(3):
            mine.optimizer.zero_grad()
            mine.accelerator.backward((mine.model(x) - y).square().mean())
            norm = mine.accelerator.clip_grad_norm_(mine.model.parameters(), 0.1)
            # DeAR begins to gather at the end of the first backward: it knows of no clipping yet.
            assert step == 0 or engine.phase is Phase.REDUCED, "gradients were gathered"
            assert abs(norm - theirs.norm) <= 1e-6
            mine.optimizer.step()
        # Whoever passes a list has gone through it, and gradients are whole; it is right as well.
        mine.optimizer.zero_grad()
        mine.accelerator.backward((mine.model(x) - y).square().mean())
        assert (
            abs(mine.accelerator.clip_grad_norm_([*mine.model.parameters()], 0.1) - theirs.norm)
            <= 1e-6
        )


def scaled() -> None:
    """A gradient scaler, as Accelerate has it on GPUs: unscaled before clipping, a step skipped."""

    def train(strategy: Any) -> Any:
        each = accelerator()
        each.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        each.native_amp = True  # so that clipping unscales, as it does on a GPU
        each.state._mixed_precision = "fp16"
        bare = net()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bare.forward = bare.forward  # type: ignore[method-assign]
            each.native_amp = False
            model, optimizer, loader, schedule = ready(
                each, strategy, bare, optimizer, DataLoader(samples(), batch_size=4), schedule
            )
            each.native_amp = True
        skipped = []
        for step, (x, y) in enumerate(loader):
            loss = (model(x) - y).square().mean() * (float("inf") if step == 2 else 1.0)
            each.backward(loss)
            each.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        return flat(bare), skipped, schedule.get_last_lr(), each.scaler.get_scale()

    with clean():
        wanted = train(None)
        assert wanted[1].count(True) == 1
        for strategy in EXACT:
            found = train(strategy)
            same(found[0], wanted[0], strategy)
            assert found[1:] == wanted[1:], strategy
    accelerator()


def several() -> None:
    """A GAN's two models, a frozen third one, and two optimizers of one model."""

    def gan(strategy: Any) -> torch.Tensor:
        each = accelerator()
        maker, judge, frozen = net(1), net(2), net(3).eval().requires_grad_(False)
        first = torch.optim.SGD(maker.parameters(), lr=0.05)
        second = torch.optim.Adam(judge.parameters(), lr=0.05)
        if strategy is None:
            m, j, o, p, loader = each.prepare(
                maker, judge, first, second, DataLoader(samples(), batch_size=4)
            )
            f = frozen
        else:
            o, j, m, loader, f, p = prepare(
                each, first, judge, maker, DataLoader(samples(), batch_size=4), frozen, second,
                strategy=strategy, device_placement=[None, True, None, None, True, False],
            )  # fmt: skip
            assert f is frozen
            assert engine_of(f) is None
        for x, y in loader:
            p.zero_grad()
            each.backward((j(x) - f(x)).square().mean())
            each.clip_grad_norm_(j.parameters(), 0.5)
            p.step()
            o.zero_grad()
            each.backward((m(x) - y).square().mean() + (j(x) - m(x)).square().mean())
            each.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
        return torch.cat([flat(maker), flat(judge)])

    def halves(strategy: Any) -> torch.Tensor:
        each = accelerator()
        bare = net(1)
        one = torch.optim.SGD(bare[0].parameters(), lr=0.05)
        other = torch.optim.SGD([*bare[1].parameters(), *bare[3].parameters()], lr=0.1)
        model, one, other, loader = ready(
            each, strategy, bare, one, other, DataLoader(samples(), batch_size=4)
        )
        for x, y in loader:
            one.zero_grad()
            other.zero_grad()
            each.backward((model(x) - y).square().mean())
            one.step()
            other.step()
        return flat(bare)

    with clean():
        for train in (gan, halves):
            wanted = train(None)
            for strategy in EXACT[: 3 if train is gan else 2]:
                same(train(strategy), wanted, (train.__name__, strategy))


def uneven() -> None:
    """Workers with different numbers of batches, beside torch's Join around DDP."""

    def batches(rank: int) -> list[Any]:
        x, y = samples().tensors
        return [(x[i : i + 4], y[i : i + 4]) for i in range(0, 12 + 8 * rank, 4)]

    def train(model: Any, optimizer: Any, joined: Any) -> None:
        with joined:
            for x, y in batches(dist.get_rank()):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()

    with clean():
        accelerator()
        bare = net()
        ddp = DistributedDataParallel(bare)
        train(ddp, torch.optim.SGD(bare.parameters(), lr=0.1), Join([ddp]))
        wanted = flat(bare)
        for strategy in EXACT:
            each = accelerator()
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = prepare(
                each, model, optimizer, DataLoader(samples(), batch_size=4), strategy=strategy
            )
            even = loader.batch_sampler.even_batches
            with each.join_uneven_inputs([model], even_batches=False):
                assert loader.batch_sampler.even_batches is False
            assert loader.batch_sampler.even_batches is even
            train(model, optimizer, each.join_uneven_inputs([model], even_batches=False))
            same(flat(model), wanted, strategy)
            # With batches that are even already it does nothing, as Accelerate's own.
            with each.join_uneven_inputs([model]):
                model(torch.ones(2, 6)).sum().backward()


def loaders() -> None:
    """Batches that are split, uneven, dispatched; two backwards before a step."""

    def train(strategy: Any, **options: Any) -> torch.Tensor:
        each = accelerator(dataloader_config=DataLoaderConfiguration(**options))
        bare = net()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
        made = DataLoader(samples(44), batch_size=8)
        model, optimizer, loader = ready(each, strategy, bare, optimizer, made)
        for x, y in loader:
            each.backward((model(x) - y).square().mean())
            each.backward(model(-x).abs().mean())
            optimizer.step()
            optimizer.zero_grad()
        return flat(bare)

    with clean():
        for options in (
            {"split_batches": True},
            {"dispatch_batches": True},
            {"even_batches": True, "use_seedable_sampler": True},
        ):
            wanted = train(None, **options)
            for strategy in EXACT:
                same(train(strategy, **options), wanted, (options, strategy))


def resumed(folder: str) -> None:
    """A run that is saved and goes on in new objects is the run that was not."""
    strategies = (
        *EXACT,
        wingbeat.AllReduce(mb=MB, compression=wingbeat.Sketch(bits=2, auto_disable=False)),
        wingbeat.DeAR(plan="fixed", mb=MB, compression="topk@0.1:auto_disable=false:warmup=0"),
        wingbeat.LocalSGD(every=2),
        wingbeat.DiLoCo(every=2),
    )
    with clean():
        for number, strategy in enumerate(strategies):
            home = f"{folder}/{number}"
            # Where models are averaged, each worker's optimizer has a state of its own.
            adam = number < 5
            whole = Training(strategy, adam=adam)
            extra = Counter()
            whole.accelerator.register_for_checkpointing(extra)
            whole.train("norm" if number < 3 else "", steps=3)
            extra.count = 3
            whole.accelerator.save_state(home)
            whole.accelerator.wait_for_everyone()
            wanted = whole.train(skip=3)
            again = Training(strategy, adam=adam, lr=1.0)
            again.accelerator.register_for_checkpointing(extra)
            extra.count = 0
            again.accelerator.load_state(home)
            assert extra.count == 3
            found = again.train(skip=3)
            if number >= 5:
                wingbeat.synchronize(whole.model)
                wingbeat.synchronize(again.model)
                wanted, found = flat(whole.bare), flat(again.bare)
            assert torch.equal(found, wanted), (strategy, float((found - wanted).abs().max()))
            kept = sorted(Path(home).glob("wingbeat_*.pt"))
            assert len(kept) == (dist.get_world_size() if number in (3, 4) else 0), kept


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def other_size(folder: str, saving: bool) -> float:
    """Residuals of another number of workers are all taken over: their sum stays."""
    with clean():
        training = Training(_sketched())
        if saving:
            training.train(steps=3)
            training.accelerator.save_state(folder)
            training.accelerator.wait_for_everyone()
        else:
            training.accelerator.load_state(folder)
        kept = training.optimizer.optimizer.residual_state_dict()["residuals"]
        total = torch.cat([value.flatten() for _, value in sorted(kept.items())]).double()
        dist.all_reduce(total)
        return float(total.abs().sum())


def _sketched() -> Any:
    return wingbeat.AllReduce(mb=MB, compression=wingbeat.Sketch(bits=2, auto_disable=False))


def utilities(folder: str) -> None:
    """What else people call on an accelerator, on what `prepare` has returned."""
    with clean():
        each = Training(EXACT[1])
        made, rank = each.accelerator, dist.get_rank()
        each.train(steps=2)
        assert made.unwrap_model(each.model) is each.model
        state = made.get_state_dict(each.model)
        assert list(state) == list(net().state_dict())
        made.save_model(each.model, folder)
        made.wait_for_everyone()
        assert (Path(folder) / "model.safetensors").exists()
        seen = [made.gather_for_metrics(y) for _, y in each.loader]
        assert sum(map(len, seen)) == len(samples())
        total = made.reduce(torch.tensor(float(rank)))
        assert float(total) == sum(range(dist.get_world_size()))
        with made.no_sync(each.model):
            each.model(torch.ones(2, 6) * rank).sum().backward()
        each.optimizer.zero_grad()
        # Prepared once more, as for a second training, it is the same.
        model, optimizer = prepare(made, each.model, each.optimizer, strategy=EXACT[1])
        assert (model, optimizer) == (each.model, each.optimizer)
        bf16 = Training(EXACT[0], mixed_precision="bf16")
        plain = bf16.accelerator.unwrap_model(bf16.model, keep_fp32_wrapper=False)
        assert plain is bf16.bare
        assert "_original_forward" not in vars(plain)
        each.model, each.optimizer = made.free_memory(each.model, each.optimizer)
        assert each.model is None
        made.save_state(f"{folder}/empty")
        # A model with a layer that is called like a method that distribute adds.
        odd = nn.ModuleDict({"no_sync": nn.Linear(2, 2)})
        odd.forward = lambda x: odd["no_sync"](x)  # type: ignore[method-assign]
        model, optimizer = prepare(
            made, odd, torch.optim.SGD(odd.parameters(), lr=0.1), strategy=EXACT[0]
        )
        with made.no_sync(model):
            model(torch.ones(1, 2) * (rank + 1)).sum().backward()
        assert float(odd["no_sync"].weight.grad[0, 0]) == rank + 1


def local_sgd() -> None:
    """Accelerate's own LocalSGD around a distributed model does what it does around DDP."""

    def train(strategy: Any) -> torch.Tensor:
        each = Training(strategy)
        with AccelerateLocalSGD(each.accelerator, each.model, 2) as local:
            for x, y in each.loader:
                each.accelerator.backward((each.model(x) - y).square().mean())
                each.optimizer.step()
                each.optimizer.zero_grad()
                local.step()
        return flat(each.bare)

    with clean():
        wanted = train(None)
        for strategy in EXACT[:2]:
            same(train(strategy), wanted, strategy)


def compiled(folder: str) -> None:
    """Accelerate's dynamo plugin: the compiled model is distributed, and saved once."""
    with clean():
        wanted = Training(None).train("norm", steps=3)
        for number, strategy in enumerate(EXACT):
            each = Training(strategy, dynamo_backend="eager")
            assert each.model is not each.bare
            same(each.train("norm", steps=3), wanted, strategy)
            each.accelerator.save_state(f"{folder}/{number}")
            each.accelerator.wait_for_everyone()
            assert not (Path(folder) / f"{number}/model_1.safetensors").exists()
            again = Training(strategy, dynamo_backend="eager")
            again.accelerator.load_state(f"{folder}/{number}")
            assert torch.equal(flat(again.bare), flat(each.bare))


def hooks(folder: str, wires: list[str]) -> None:
    """wingbeat's hooks in Accelerate's DDP: saved and loaded, training goes on where it was."""
    for number, wire in enumerate(wires):
        home = f"{folder}/{number}"

        def begin(wire: str = wire) -> Any:
            each = Training(None, lr=0.01)
            return each, register_comm_hook(each.accelerator, each.model, wire)

        whole, state = begin()
        whole.train(steps=3)
        whole.accelerator.save_state(home)
        whole.accelerator.wait_for_everyone()
        saved = state.state_dict()
        whole.train(skip=3)
        again, other = begin()
        again.accelerator.load_state(home)
        loaded = other.state_dict()
        assert loaded["step"] == saved["step"] == 3
        for kind in ("residuals", "velocity"):
            for name, value in saved.get(kind, {}).items():
                assert torch.equal(loaded[kind][name], value), (wire, name)
        # DDP makes its buckets anew after its first iteration, and a code depends on the bucket.
        found = again.train(skip=3)
        assert (found - flat(whole.bare)).abs().max() < 0.05
        everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, found)
        assert all(torch.equal(each, everyone[0]) for each in everyone)
        plain = Training(None, lr=0.01).train()
        assert not torch.equal(found, plain), f"{wire} has encoded nothing"
        assert (found - plain).abs().max() < 0.2
        state.close()
        other.close()
        # The Accelerator's own functions remain, and not DDP with its buckets.
        ddp = weakref.ref(again.model)
        del again.model
        again.accelerator.free_memory()
        gc.collect()
        assert ddp() is None
        if dist.get_rank() == 0:
            shutil.rmtree(home)
        dist.barrier()


class Faked(Accelerator):
    @property
    def distributed_type(self) -> Any:
        return type("Kind", (), {"value": "DEEPSPEED"})


def fp8() -> Any:
    each = accelerator()
    each.state._mixed_precision = "fp8"
    return prepare(each, net(), torch.optim.SGD(net().parameters()))


def prepared_before() -> Any:
    each = accelerator()
    each.scaler = torch.amp.GradScaler("cpu")
    bare = net()
    return prepare(each, bare, each.prepare(torch.optim.SGD(bare.parameters(), lr=0.1)))


def wrapped_before() -> Any:
    each = accelerator()
    each.scaler = torch.amp.GradScaler("cpu")
    bare = net()
    return wingbeat.distribute(
        bare, each.prepare(torch.optim.SGD(bare.parameters(), lr=0.1)), EXACT[0]
    )


def twice() -> Any:
    bare = net()
    pair = bare, torch.optim.SGD(bare.parameters(), lr=0.1)
    prepare(accelerator(), *pair, strategy=EXACT[0])
    return prepare(accelerator(), *pair, strategy=EXACT[1])


def triggered() -> None:
    bare = net()
    made: Any = accelerator()
    prepare(made, bare, torch.optim.SGD(bare.parameters(), lr=0.1), strategy=EXACT[0])
    with made.trigger_sync_in_backward(bare):
        pass


def joined(*others: Any) -> None:
    bare = net()
    made: Any = accelerator()
    prepare(made, bare, torch.optim.SGD(bare.parameters(), lr=0.1), strategy=EXACT[0])
    with made.join_uneven_inputs([bare, *others]):
        pass


def torchs_join() -> None:
    bare = net()
    made: Any = accelerator()
    prepare(made, bare, torch.optim.SGD(bare.parameters(), lr=0.1), strategy=EXACT[0])
    with Join([bare]):
        pass


def missing_name() -> None:
    each = accelerator()
    del each._dataloaders
    prepare(each, net())


def refusals() -> list[str]:
    """What each misuse says; ranks say the same."""
    made: Any = accelerator()
    optimizer = torch.optim.SGD
    model, both = net(), [net(1), net(2)]
    hooked = DistributedDataParallelKwargs(comm_hook="fp16")
    fixed = DistributedDataParallelKwargs(broadcast_buffers=False)
    cases = [
        lambda: prepare(model, optimizer(model.parameters())),
        lambda: prepare(Faked(cpu=True), model),
        lambda: prepare(made, model),
        lambda: prepare(made, optimizer(model.parameters())),
        lambda: prepare(made, *both, optimizer([p for m in both for p in m.parameters()])),
        lambda: prepare(made, model, device_placement=[True, False]),
        lambda: prepare(accelerator(kwargs_handlers=[hooked]), model),
        lambda: prepare(accelerator(kwargs_handlers=[fixed]), model),
        fp8,
        prepared_before,
        wrapped_before,
        twice,
        triggered,
        lambda: joined(net()),
        torchs_join,
        missing_name,
        lambda: register_comm_hook(made, model, "sketch"),
        lambda: register_comm_hook(made, DistributedDataParallel(net()), "bf16"),
        lambda: prepare(
            made, DistributedDataParallel(model), optimizer(model.parameters()), strategy=EXACT[0]
        ),
    ]

    def anew() -> None:
        nonlocal made
        AcceleratorState._reset_state()
        made = accelerator()

    with clean():
        return said_by(cases, anew)


def single() -> None:
    """Without a launcher: one worker, the same lines."""
    with clean():
        for clip in ("", "norm"):
            wanted = Training(None).train(clip)
            for strategy in EXACT:
                same(Training(strategy).train(clip), wanted, strategy)
