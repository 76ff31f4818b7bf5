"""The strategy for Lightning's Trainer: a mixin in front of its DDPStrategy.

The model is its own wrapper: ``training_step`` is called through its ``forward``, as through DDP's,
which synchronizes buffers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from wingbeat.engine.api import (
    abandon,
    begin_step,
    distribute,
    no_sync,
    release,
    synchronize,
)
from wingbeat.errors import UsageError
from wingbeat.integrations.lightning_family import changing, names, options, workers
from wingbeat.methods.bounded_staleness.build import bounded_exchange
from wingbeat.parts import PartnersPart


class TrainerStrategy:
    """Mixin in front of ``DDPStrategy`` for the Trainer; `wingbeat_strategy` is its strategy."""

    # Attributes of DDPStrategy.
    lightning_module: Any
    model: Any
    optimizers: Any
    precision_plugin: Any
    root_device: torch.device
    world_size: int
    _forward_redirection: Callable[..., Any]

    def __init__(
        self,
        strategy: Any = None,
        *,
        interfaces: Sequence[str] | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        self.wingbeat_strategy = options.strategy_of(strategy)
        self._wingbeat_interfaces = interfaces
        self._wingbeat_timeout = options.seconds(ddp_kwargs)
        self._wingbeat_optimizer: torch.optim.Optimizer | None = None
        self._wingbeat_frozen: list[torch.nn.Parameter] = []
        self._wingbeat_failed = False
        self._wingbeat_stepping = self._wingbeat_moved = False
        super().__init__(**options.passed_on(ddp_kwargs))
        names.check_object(self, names.TRAINER_OBJECT)

    # -- before and after -----------------------------------------------------------------

    def setup_environment(self) -> None:
        """Start Lightning's process group, then initialise wingbeat in it."""
        super().setup_environment()  # type: ignore[misc]
        workers.join_workers(self.world_size, self._wingbeat_timeout, self._wingbeat_interfaces)

    def configure_ddp(self) -> None:
        """Do nothing: `setup` distributes the model once there are optimizers."""

    def setup(self, trainer: Any) -> None:
        """Set up as DDPStrategy does; for training, distribute the model and an optimizer.

        Raises UsageError if no optimizer has the model's parameters.
        """
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn.value == "fit":
            self._wingbeat_failed = False
            self._distribute()

    def _distribute(self) -> None:
        optimizer = _first_of(self.lightning_module, self.optimizers)
        distribute(self.lightning_module, optimizer, self.wingbeat_strategy)
        self._wingbeat_optimizer = optimizer
        self._distributed()
        _clip_through_optimizer(self.precision_plugin)

    def _distributed(self) -> None:
        module, optimizer = self.lightning_module, self._wingbeat_optimizer
        assert optimizer is not None
        self._wingbeat_frozen = [each for each in module.parameters() if not each.requires_grad]
        changing.let_grow(optimizer, self._change)
        # Wrap again: Lightning derives a wrapper's class from the optimizer's, which has changed.
        self.optimizers = self.optimizers

    def _change(self, what: Callable[[], object]) -> None:
        """Call ``what``, which adds parameters to the optimizer, on all workers.

        Raises UsageError inside a training step, where Lightning's wrappers are in use.
        """
        if self._wingbeat_stepping:
            raise UsageError(
                "add_param_group() in training_step is not possible: add the group in "
                "on_train_batch_start() or on_train_epoch_start()"
            )
        assert self._wingbeat_optimizer is not None
        changing.change(
            self.lightning_module, self._wingbeat_optimizer, self.wingbeat_strategy, what
        )
        self._distributed()

    def on_exception(self, exception: BaseException) -> None:
        """Record the failure, after which this worker does not wait for others."""
        self._wingbeat_failed = True
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Undo the distribution, then tear down as DDPStrategy does."""
        optimizer, self._wingbeat_optimizer = self._wingbeat_optimizer, None
        self._wingbeat_frozen = []
        if optimizer is not None:
            let_go = abandon if self._wingbeat_failed else release
            let_go(self.lightning_module, optimizer)
            vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        super().teardown()  # type: ignore[misc]

    # -- training -------------------------------------------------------------------------

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Distribute parameters that a callback has unfrozen."""
        super().on_train_batch_start(*args, **kwargs)  # type: ignore[misc]
        if any(param.requires_grad for param in self._wingbeat_frozen):
            self._change(lambda: None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's ``training_step`` through ``forward``, as DDP's wrapper does."""
        self._wingbeat_stepping = self._wingbeat_moved = True
        try:
            return self._training_step(*args, **kwargs)
        finally:
            self._wingbeat_stepping = False

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        with self.precision_plugin.train_step_context():
            if self._wingbeat_optimizer is None:
                return module.training_step(*args, **kwargs)
            if not module.automatic_optimization:  # each backward has its own exchange
                begin_step(module)
                return module.training_step(*args, **kwargs)
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step as DDPStrategy does; under bounded staleness, after the closure and without it.

        Gradients are sent during backward there, so a step must not repeat it (Canary).
        """
        module = self.lightning_module
        found = None if self._wingbeat_optimizer is None else bounded_exchange(module)
        bounded = found is not None and not found.synchronous
        if not bounded or getattr(self.precision_plugin, "scaler", None) is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        result = self.precision_plugin._wrap_closure(model or module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        if self._wingbeat_optimizer is None:
            yield
            return
        with no_sync(self.lightning_module):
            yield

    # -- all the same model ---------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Synchronize the models before validation."""
        self._level()
        super().on_validation_start()  # type: ignore[misc]

    def on_train_end(self) -> None:
        """Synchronize the models at the end of training."""
        self._level()
        super().on_train_end()  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state, equal on all workers; all workers call this."""
        self._level()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer, on rank 0 with all workers' residuals."""
        state: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
        return workers.with_all_residuals(state, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states; torch moves them to their parameters' devices."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def _level(self) -> None:
        if self._wingbeat_optimizer is not None and not self._wingbeat_failed:
            synchronize(self.lightning_module)
            self._wingbeat_moved = False

    # -- all workers at a time ------------------------------------------------------------

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce over all workers, as DDPStrategy does."""
        self._gather_all()
        return super().reduce(*args, **kwargs)  # type: ignore[misc]

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Gather from all workers, as DDPStrategy does."""
        self._gather_all()
        return super().all_gather(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """Broadcast to all workers, as DDPStrategy does."""
        self._gather_all()
        return super().broadcast(*args, **kwargs)  # type: ignore[misc]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers, as DDPStrategy does."""
        self._gather_all()
        super().barrier(*args, **kwargs)  # type: ignore[misc]

    def _gather_all(self) -> None:
        """Synchronize before a global collective, which would deadlock with a wait for a group.

        Raises UsageError inside a training step, where workers may wait for this one.
        """
        exchange = self.wingbeat_strategy.exchange
        if not isinstance(exchange, PartnersPart) or exchange.everyone:
            return
        if self._wingbeat_optimizer is None:
            return
        if self._wingbeat_stepping and not self._wingbeat_failed:
            # In pairwise averaging a worker also answers while it waits between its steps. It does
            # not inside a step, where LBFGS evaluates the loss.
            within = isinstance(self._wingbeat_optimizer, torch.optim.LBFGS)
            if not exchange.waits and not within:
                return
            raise UsageError(
                "self.log(sync_dist=True), all_gather or a barrier in training_step waits for all "
                "workers, while others wait for some (Ripples; ADPSGD with LBFGS): log with "
                "on_step=False, or leave sync_dist out"
            )
        if self._wingbeat_moved:
            self._level()


def _first_of(module: torch.nn.Module, optimizers: Sequence[Any]) -> torch.optim.Optimizer:
    """Return the first optimizer with a parameter of the model; only this one is distributed."""
    known = set(module.parameters())
    for optimizer in optimizers:
        if any(param in known for group in optimizer.param_groups for param in group["params"]):
            found: torch.optim.Optimizer = optimizer
            return found
    raise UsageError(
        f"{type(module).__name__}.configure_optimizers() has returned no optimizer of the model's "
        "parameters, and wingbeat distributes a model together with one: return one, or use "
        'strategy="ddp"'
    )


def _clip_through_optimizer(plugin: Any) -> None:
    """Make a precision plugin clip by the global norm, without gathering gradients.

    A class that overrides clipping is left unchanged.
    """
    base = next(
        each for each in reversed(type(plugin).__mro__) if hasattr(each, "clip_grad_by_norm")
    )
    usual = vars(base)["clip_grad_by_norm"]
    if type(plugin).clip_grad_by_norm is usual:
        plugin.clip_grad_by_norm = functools.partial(_clip_grad_by_norm, plugin)


def _clip_grad_by_norm(plugin: Any, optimizer: Any, clip_val: float) -> None:
    clip = getattr(optimizer, "clip_grad_norm_", None)
    if clip is None:
        type(plugin).clip_grad_by_norm(plugin, optimizer, clip_val)
    else:
        clip(clip_val)
