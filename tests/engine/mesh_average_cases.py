"""What workers run in `test_mesh_averages`: models that are averaged between replicas."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_cases import batch, net, replicas, sharded, train, weights
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import wingbeat
import wingbeat.errors
from wingbeat.engine.upgrade import engine_of
from wingbeat.strategies import parse


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def put(model: nn.Module, values: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())


class OneProcess:
    """Replicas in one process, of ``ranks`` batches each, averaged every ``every`` steps.

    With an outer optimizer of this learning rate and momentum; an average is adopted ``delay``
    steps late.
    """

    def __init__(
        self,
        count: int,
        every: int,
        lr: float = 1.0,
        momentum: float = 0.0,
        delay: int = 0,
        ranks: int = 2,
    ) -> None:
        width = 8 if ranks == 1 else 7
        self.models, self.ranks = [net(width=width) for _ in range(count)], ranks
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in self.models
        ]
        self.every, self.lr, self.momentum, self.delay = every, lr, momentum, delay
        self.shared, self.velocity = flat(self.models[0]), torch.zeros_like(flat(self.models[0]))
        self.sent: list[torch.Tensor] = []

    def step(self, step: int) -> None:
        for number, model in enumerate(self.models):
            model.zero_grad()
            for part in range(self.ranks):
                x, y = batch(step, self.ranks * number + part)
                (F.mse_loss(model(x), y) / self.ranks).backward()
        if self.sent and (step + 1 - self.delay) % self.every == 0:
            self.adopt()
        for optimizer in self.optimizers:
            optimizer.step()
        if (step + 1) % self.every == 0:
            self.sent = [flat(model) for model in self.models]
            if not self.delay:
                self.adopt()

    def adopt(self) -> None:
        gradient = self.shared - torch.stack(self.sent).mean(0)
        self.velocity.mul_(self.momentum).add_(gradient)
        self.shared.sub_(self.lr * (gradient + self.momentum * self.velocity))
        for model, sent in zip(self.models, self.sent, strict=True):
            put(model, self.shared + flat(model) - sent)
        self.sent = []


def compared_with_one_process(strategy: str, steps: int, options: dict[str, Any]) -> list[float]:
    """Relative differences of weights to the process above, before and after a synchronization.

    Replicas with one batch each are divided by tensor parallelism.
    """
    wingbeat.init(timeout=60)
    try:
        mesh = replicas()
        one = OneProcess(mesh.shape[0], **options)
        model: Any = net(width=8 if one.ranks == 1 else 7)
        if one.ranks == 1:
            parts = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
            parallelize_module(model, mesh["dp_shard"], parts)
        else:
            sharded(model, mesh["dp_shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
        for step in range(steps):
            one.step(step)
        for step in range(steps):
            x, y = batch(step, dist.get_rank() * one.ranks // 2)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        found = []
        theirs = flat(one.models[dist.get_rank() // 2]).double()
        found.append(float((theirs - weights(model)).norm() / theirs.norm()))
        wingbeat.synchronize(model)
        if one.sent:
            one.adopt()
        theirs = torch.stack([flat(m).double() for m in one.models]).mean(0)
        found.append(float((theirs - weights(model)).norm() / theirs.norm()))
        wingbeat.release(model, optimizer)
        return found
    finally:
        wingbeat.shutdown()


class Normed(nn.Module):
    """With buffers, which each rank moves by batches of its own, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.inner(self.norm(x)))


def uses(strategy: str, steps: int) -> list[Any]:
    """What the ranks have in common after training, a forward alone and a synchronization.

    The weights, the buffers, the moments where these are averaged too, and the result of a forward;
    then what training goes on to after its state was loaded into other objects.
    """
    wingbeat.init(timeout=60)
    try:
        mesh, x = replicas(), batch(1000, 0)[0]

        def made() -> tuple[Any, Any]:
            torch.manual_seed(5)
            model: Any = Normed()
            sharded(model.inner, mesh["dp_shard"])
            fully_shard(model, mesh=mesh["dp_shard"])
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.01, foreach=False)
            return wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)

        model, optimizer = made()
        with torch.no_grad():  # as a teacher that follows each replica's model
            for param in model.frozen.parameters():
                param.to_local().add_(dist.get_rank() // 2)
        train(model, optimizer, range(steps))
        with torch.no_grad():
            model.eval()(x)  # leaves parameters gathered
            wingbeat.synchronize(model)
            result = model(x)
        model.train()
        buffers = torch.cat([b.flatten() for b in model.buffers() if b.is_floating_point()])
        moments = [v.full_tensor() for s in optimizer.state.values() for v in s.values() if v.dim()]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        found = [weights(model), buffers, torch.cat([m.flatten() for m in moments]), result]
        train(model, optimizer, range(steps, 2 * steps))
        wingbeat.synchronize(model)
        on = weights(model)
        wingbeat.release(model, optimizer)
        again, optimizer = made()
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(again, optimizer, range(steps, 2 * steps))
        wingbeat.synchronize(again)
        found.append(float((weights(again) - on).norm() / on.norm()))
        wingbeat.release(again, optimizer)
        return [each if isinstance(each, float) else each.tolist() for each in found]
    finally:
        wingbeat.shutdown()


def groups(strategy: str, across: int, steps: int, slow: float) -> list[Any]:
    """Weights after steps of which one replica's last ``slow`` seconds each.

    Other replicas make more of them.
    """
    wingbeat.init(timeout=60)
    try:
        mesh = replicas(across)
        model: Any = sharded(net(), mesh["dp_shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
        last = dist.get_rank() // 2 == across - 1
        for step in range(steps // 3 if last and slow else steps):
            if "weights" in strategy:
                wingbeat.count_tokens(model, 1 + dist.get_rank())
            train(model, optimizer, range(step, step + 1))
            if last:
                time.sleep(slow)
        own = weights(model)
        wingbeat.synchronize(model)
        found = weights(model)
        wingbeat.release(model, optimizer)
        return [own.tolist(), found.tolist()]
    finally:
        wingbeat.shutdown()


def killed(strategy: str, dying: int, at: int, steps: int) -> list[Any]:
    """One rank is killed at a step: how the others end, and after how many seconds each.

    The ranks of its replica fail; the others make all steps.
    """
    wingbeat.init(timeout=30)
    mesh = replicas(dist.get_world_size() // 2)
    model: Any = sharded(net(), mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
    begun = 0.0
    try:
        for step in range(steps):
            if step == at:
                begun = time.monotonic()
                if dist.get_rank() == dying:
                    time.sleep(0.5)  # the others wait for it by now
                    os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, range(step, step + 1))
        wingbeat.synchronize(model)
        how = ""
    except (wingbeat.errors.PeerError, RuntimeError) as error:
        how = f"{type(error).__name__}: {error}"
        return [how, time.monotonic() - begun, []]
    finally:
        wingbeat.shutdown()
    return [how, time.monotonic() - begun, weights_of_shards(model)]


def without_generator(strategy: str, at: int, steps: int) -> list[Any]:
    """The group generator is killed at a step: seconds until all have ended, parts of weights."""
    wingbeat.init(timeout=30)
    try:
        mesh = replicas(dist.get_world_size() // 2)
        model: Any = sharded(net(), mesh["dp_shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        wingbeat.distribute(model, optimizer, parse(strategy), mesh=mesh)
        train(model, optimizer, range(at))
        dist.barrier()
        begun = time.monotonic()
        update: Any = engine_of(model).update  # type: ignore[union-attr]
        service = update._averager.session._service  # of one rank
        if service is not None:
            service.kill()
        train(model, optimizer, range(at, steps))
        wingbeat.synchronize(model)
        found = [service is not None, time.monotonic() - begun, weights_of_shards(model)]
        wingbeat.release(model, optimizer)
        return found
    finally:
        wingbeat.shutdown()


def weights_of_shards(model: nn.Module) -> list[float]:
    """The sums of this rank's parts."""
    return [float(p.to_local().double().sum()) for p in model.parameters()]
