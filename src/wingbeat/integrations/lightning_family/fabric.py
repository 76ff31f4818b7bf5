"""The strategy for Fabric: a mixin in front of its DDPStrategy."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from wingbeat.engine.api import distribute, no_sync, synchronize
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.integrations.lightning_family import names, options, workers


class FabricStrategy:
    """Mixin in front of ``DDPStrategy`` for Fabric; `wingbeat_strategy` is its strategy."""

    # Attributes of DDPStrategy.
    precision: Any
    root_device: torch.device
    world_size: int

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
        self._wingbeat_alone: list[_Alone] = []
        super().__init__(**options.passed_on(ddp_kwargs))
        names.check_object(self, names.FABRIC_OBJECT)
        self._backward_sync_control = _NoSync()

    def setup_environment(self) -> None:
        """Start Fabric's process group, then initialise wingbeat in it."""
        super().setup_environment()  # type: ignore[misc]
        workers.join_workers(self.world_size, self._wingbeat_timeout, self._wingbeat_interfaces)

    # -- setting up -----------------------------------------------------------------------

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Any], Any]:
        """Distribute a model with the first of its optimizers; the others are not distributed."""
        distribute(module, optimizers[0], self.wingbeat_strategy)
        return module, optimizers, scheduler

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Broadcast rank 0's weights; the model is distributed later, with its optimizer."""
        workers.take_over_rank_zeros(module)
        if any(param.requires_grad for param in module.parameters()):
            self._wingbeat_alone.append(_Alone(module))
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Distribute an optimizer with the model of its parameters, which was set up before.

        A second optimizer of the same model is not distributed and steps on whole gradients. Raises
        UsageError if no such model was set up.
        """
        params = {param for group in optimizer.param_groups for param in group["params"]}
        for alone in self._wingbeat_alone:
            module = alone.module()
            if module is None or not params & set(module.parameters()):
                continue
            if engine_of(module) is None:
                alone.found_optimizer()
                distribute(module, optimizer, self.wingbeat_strategy)
            return optimizer
        raise UsageError(
            f"fabric.setup_optimizers({type(optimizer).__name__}): no model of its parameters was "
            "set up: call fabric.setup_module(model) before, or fabric.setup(model, optimizer)"
        )

    # -- training -------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the global norm, without gathering gradients.

        Raises RuntimeError if the norm is not finite and ``error_if_nonfinite`` is set.
        """
        clip = getattr(optimizer, "clip_grad_norm_", None)
        if clip is None:
            usual = super().clip_gradients_norm  # type: ignore[misc]
            whole: torch.Tensor = usual(module, optimizer, max_norm, norm_type, error_if_nonfinite)
            return whole
        self.precision.unscale_gradients(optimizer)
        norm: torch.Tensor = clip(max_norm, float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"The total norm of order {float(norm_type)} for gradients is non-finite, so it "
                "cannot be clipped. To disable this error and scale the gradients by the "
                "non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return norm

    # -- all the same model ---------------------------------------------------------------

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return a model's state, equal on all workers; all workers call this."""
        if engine_of(module) is not None:
            synchronize(module)
        state: dict[str, Any] = super().get_module_state_dict(module)  # type: ignore[misc]
        return state

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer, on rank 0 with all workers' residuals."""
        state: dict[str, Any] = super().get_optimizer_state(optimizer)  # type: ignore[misc]
        return workers.with_all_residuals(state, self.root_device)


class _NoSync:
    """Implements ``fabric.no_backward_sync``."""

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        if not enabled or engine_of(module) is None:
            return contextlib.nullcontext()
        return no_sync(module)


class _Alone:
    """A model that was set up without an optimizer and cannot train until it has one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self._hook = module.register_forward_pre_hook(_refuse_training)

    def found_optimizer(self) -> None:
        self._hook.remove()


def _refuse_training(module: torch.nn.Module, _args: Any) -> None:
    if module.training and torch.is_grad_enabled():
        raise UsageError(
            f"{type(module).__name__} was set up without an optimizer, so its gradients would not "
            "be averaged: call fabric.setup_optimizers(optimizer), or fabric.setup(model, "
            "optimizer); to evaluate it, model.eval() or torch.no_grad()"
        )
