"""Three ways of running one scenario: PyTorch's DDP, wingbeat, or one process on all the data."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import wingbeat
import wingbeat_lab
from wingbeat import parts
from wingbeat.compression import TopK
from wingbeat.errors import UsageError
from wingbeat.planning import control
from wingbeat.planning.controllers import StrategyController
from wingbeat.planning.trials import Rows
from wingbeat.strategies import MGWFBP
from wingbeat.transport import world

INIT_TIMEOUT = 60.0
"""Seconds, of which no case waits out as many: servers load torch, on busy cores."""


def bring_world_up() -> None:
    """Call `wingbeat.init` unless a case before has left this process initialised."""
    try:
        world.current()
    except UsageError:
        wingbeat.init(timeout=INIT_TIMEOUT)


def take_world_down() -> None:
    """Call `wingbeat.shutdown`; the next scenario initialises again."""
    wingbeat.shutdown()


class EachIteration(StrategyController):
    """Uses another candidate in each iteration, whatever the times are."""

    def boundary(self, _seconds: float, _rows: Rows | None) -> bool:
        if not self._bucketing.learning:
            place = self._possible.index(self._current) + 1
            self._use(self._possible[place % len(self._possible)])
        return True


def make_strategy(name: str, mb: float) -> Any:
    """The strategy a test parameter stands for: ``dear``, ``dear-mesh``, ``dear-sharded``, ..."""
    kind, *options = name.split("-")
    if kind == "canary":
        return wingbeat.Canary(s=0, encrypted=False)
    topology = "mesh" if "mesh" in options else "ring"
    # All of the largest are all: everything goes through the codec's machinery, and exactly.
    coded = "coded" in options and kind != "geryon"
    wire: Any = TopK(density=1.0, auto_disable=False) if coded else "fp32"
    if kind == "auto":
        control.StrategyController = EachIteration  # type: ignore[misc]
        return wingbeat.Strategy(plan=parts.Chosen(mb=mb), schedule="dear")
    if kind == "mgwfbp":
        return MGWFBP(steps=1)
    if kind == "geryon":
        pull = "start" if "start" in options else "ready"
        if "coded" in options:  # sketches of so few values are the values themselves
            wire = wingbeat.Sketch(auto_disable=False)
            return wingbeat.Geryon(mb=mb, servers=1, slice=300, encrypted=False, compression=wire)
        update = "server" if "server" in options else "worker"
        return wingbeat.Geryon(mb=mb, servers=2, pull=pull, update=update, encrypted=False)
    if kind == "bytescheduler":  # partitions of 100 elements
        size = 100 * 4 / 2**20
        return wingbeat_lab.ByteScheduler(mb=mb, partition_mb=size, credit=2)
    if kind == "allreduce":
        return wingbeat.AllReduce(mb=mb, topology=topology, compression=wire)
    sharded = "sharded" in options
    return wingbeat.DeAR(
        plan="fixed", mb=mb, shard_optimizer=sharded, topology=topology, compression=wire
    )


def piece(step: int, rank: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Rank ``rank``'s batch of iteration ``step``: ``rows`` inputs of ``width``, 3 classes."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(rows, width, generator=rng),
        torch.randint(0, 3, (rows,), generator=rng),
    )


@dataclass
class Side:
    """What a scenario may ask of whoever runs it."""

    rank: int
    size: int
    notes: list[tuple[str, Tensor]] = field(default_factory=list)
    trained: list[tuple[Any, Any]] = field(default_factory=list)

    def setup(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Make the pair data parallel."""
        model, optimizer = self._distribute(model, optimizer)
        self.trained.append((model, optimizer))
        return model, optimizer

    def note(self, what: str, value: Tensor | float) -> None:
        """Remember a value that both sides must agree on."""
        self.notes.append((what, torch.as_tensor(value).detach().clone()))

    def batch(self, step: int, rows: int = 4, width: int = 8) -> tuple[Tensor, Tensor]:
        """This side's inputs and classes for one iteration."""
        return piece(step, self.rank, rows, width)

    @property
    def is_subject(self) -> bool:
        """Whether this is wingbeat rather than what it is compared with."""
        return False

    @property
    def sees_everything(self) -> bool:
        """Whether its batches are those of all ranks together."""
        return False

    def bare(self, model: Any) -> Any:
        """The user's own module."""
        return model

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Accumulate gradients without communication."""
        raise NotImplementedError

    def join(self, model: Any, **options: Any) -> AbstractContextManager[Any]:
        """Allow a different number of batches on every rank."""
        raise NotImplementedError

    def clip(self, model: Any, optimizer: Any, limit: float, norm: float = 2.0) -> Tensor:
        """Clip by global norm in the side's recommended way."""
        return nn.utils.clip_grad_norm_(model.parameters(), limit, norm)

    def leave(self) -> None:
        """Give up what `setup` made."""
        self.trained.clear()

    def _distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        raise NotImplementedError


@dataclass
class DDPSide(Side):
    """The reference: torch's DistributedDataParallel on the default gloo group."""

    find_unused: bool = True
    bucket_cap_mb: float = 25.0

    def _distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        ddp = DistributedDataParallel(
            model, find_unused_parameters=self.find_unused, bucket_cap_mb=self.bucket_cap_mb
        )
        return ddp, optimizer

    def bare(self, model: Any) -> Any:
        return getattr(model, "module", model)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = model.no_sync()
        return context

    def join(self, model: Any, **options: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = Join([model], **options)
        return context


@dataclass
class PlainSide(Side):
    """The reference where DDP itself falls short: one process that sees every rank's batch."""

    @property
    def sees_everything(self) -> bool:
        return True

    def batch(self, step: int, rows: int = 4, width: int = 8) -> tuple[Tensor, Tensor]:
        pieces = [piece(step, rank, rows, width) for rank in range(self.size)]
        return torch.cat([x for x, _ in pieces]), torch.cat([y for _, y in pieces])

    def _distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        return model, optimizer


@dataclass
class WingbeatSide(Side):
    """What is tested."""

    strategy: Any = None

    @property
    def is_subject(self) -> bool:
        return True

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = model.no_sync()
        return context

    def join(self, model: Any, **options: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = model.join(**options)
        return context

    def clip(self, model: Any, optimizer: Any, limit: float, norm: float = 2.0) -> Tensor:
        total: Tensor = optimizer.clip_grad_norm_(limit, norm_type=norm)
        return total

    def leave(self) -> None:
        for model, optimizer in self.trained:
            wingbeat.release(model, optimizer)
        self.trained.clear()

    def _distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        bring_world_up()
        kept = model, optimizer
        model, optimizer = wingbeat.distribute(model, optimizer, self.strategy)
        assert model is kept[0], "distribute must return the model it was given"
        assert optimizer is kept[1], "distribute must return the optimizer it was given"
        return model, optimizer


def rank_and_size() -> tuple[int, int]:
    """This worker's place in the default group."""
    return dist.get_rank(), dist.get_world_size()
