"""DistributedDataParallel's face, over `wingbeat.distribute` and over DDP itself on the CPU."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

import wingbeat
import wingbeat.engine.api  # before torch's name for DDP is that of what is here
from wingbeat.errors import UsageError

_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)


class ControlDDP(DistributedDataParallel):
    """DDP itself, told nothing of devices: what passes with it says something about the face."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(_SIGNATURE.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        given |= {"device_ids": None, "output_device": None}
        super().__init__(**given)


class Nothing(torch.optim.Optimizer):
    """What `distribute` gets until the test has made its own optimizer, if it ever does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave parameters and gradients alone."""


class Face(nn.Module, Joinable):
    """What DDP's callers see of it. ``strategy`` is set by whoever runs a test.

    DDP is made before the optimizer, so the model is distributed with one that does nothing, and
    anew with the test's own before the first forward or join after that was made: see `_adopt`.
    """

    strategy: Any = None
    alive: ClassVar[list[Face]] = []
    made: ClassVar[list[torch.optim.Optimizer]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        bound = _SIGNATURE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        self._unknown = _without_counterpart(given)
        self.module: Any = given["module"]
        self.process_group = given.get("process_group") or dist.group.WORLD
        self.device_ids = self.output_device = None
        self._batches = 0
        self._join_config = _JoinConfig.construct_disabled_join_config()
        self._options: dict[str, Any] = {}
        if isinstance(given.get("bucket_cap_mb"), (int, float)):
            self._options["mb"] = given["bucket_cap_mb"]
        self._optimizer: Any = None
        self._distribute(Nothing)

    def _distribute(self, make: Any) -> None:
        for other in [face for face in Face.alive if face.module is self.module]:
            other.leave()
        params = [p for p in self.module.parameters() if p.requires_grad]
        try:
            optimizer = make(params or [nn.Parameter(torch.zeros(1))])
            strategy = Face.strategy(**self._options)
            _, self._optimizer = wingbeat.distribute(
                self.module, optimizer, strategy, **self._unknown
            )
        except UsageError as error:
            raise RuntimeError(str(error)) from error  # which DDP raises for the like
        Face.alive.append(self)

    def leave(self) -> None:
        """Give the module back as it was."""
        Face.alive.remove(self)
        wingbeat.release(self.module, self._optimizer)
        self._optimizer = None

    def _adopt(self) -> None:
        """Train with the optimizer that the test has made meanwhile for these parameters."""
        if not isinstance(self._optimizer, Nothing):
            return
        wanted = {p for p in self.module.parameters() if p.requires_grad}
        for optimizer in Face.made:
            if wanted == {p for group in optimizer.param_groups for p in group["params"]}:
                Face.made.remove(optimizer)
                self._distribute(lambda _, mine=optimizer: mine)
                return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._adopt()
        self._batches += 1
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.module.no_sync()
        return context

    @contextlib.contextmanager
    def join(self, **options: Any) -> Iterator[None]:
        self._adopt()
        enable = options.get("enable", True)
        throw = options.get("throw_on_early_termination", False)
        self._join_config = _JoinConfig(enable, throw, is_first_joinable=True)
        self._batches = 0
        with self.module.join(**options):
            yield
        counts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([float(self._batches)]))
        self._authoritative_rank = max((n.item(), rank) for rank, n in enumerate(counts))[1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        next(self.module.named_parameters(), None)  # for somebody looks
        return super().named_parameters(*args, **kwargs)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Take those hooks that are an option of the strategies."""
        if hook is powerSGD_hook.powerSGD_hook:
            rank = state.matrix_approximation_rank
            self._options["compression"] = wingbeat.LowRank(rank=rank, feedback=False)
        elif hook is not default_hooks.allreduce_hook:
            raise NotImplementedError("the face has no place for hooks")
        self._distribute(Nothing)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizer": None, "process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = dist.group.WORLD
        self._distribute(Nothing)

    # -- what torch's tests ask beside what they are about ---------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {"join_uneven_inputs": self._join_config.enable}

    def _set_static_graph(self) -> None:
        """Nothing is assumed of the graph, and nothing has to be told."""

    def _set_ddp_sink_clone(self, _value: bool) -> None:
        """Nothing is cloned in any case."""

    def _remove_autograd_hooks(self) -> None:
        self.leave()

    # -- Join's protocol -------------------------------------------------------------------

    def join_hook(self, **_options: Any) -> JoinHook:
        raise NotImplementedError("with Join([model]): is with model.join():")

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.process_group


def _without_counterpart(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that differ from their defaults and that `distribute` does not know.

    They are passed to it all the same: what it says to that is what a user would read.
    """
    group = given.get("process_group")
    assert group is None or dist.get_world_size(group) == dist.get_world_size()
    names = ["device_mesh", "mixed_precision", "delay_all_reduce_named_params"]
    found = {name: given[name] for name in names if given.get(name) is not None}
    if any(True for _ in given["module"].buffers()):
        names = ["broadcast_buffers", "forward_sync_buffers"]
        found |= {name: False for name in names if given.get(name) is False}
    return found
