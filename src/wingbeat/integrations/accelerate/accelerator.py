"""The methods of an Accelerator that `prepare` overrides, by a change of its class."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from wingbeat.engine.api import join, no_sync, synchronize
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.integrations import residuals
from wingbeat.integrations.accelerate import names

_PAIRS = "_wingbeat_pairs"

Pair = tuple[nn.Module, torch.optim.Optimizer]


class DistributedAccelerator:
    """Mixin for the class of an Accelerator that has prepared models with wingbeat.

    Calls that do not concern distributed models go to the Accelerator's own methods.
    """

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip as Accelerate does; a distributed model's gradients are not gathered.

        Returns the norm before clipping, a scalar that is equal on all workers.
        """
        parameters, optimizer = _whose(parameters, self._wingbeat_live())
        if optimizer is None or not norm_type > 0:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]
        self.unscale_gradients()  # type: ignore[attr-defined]
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As Accelerate's, also for a model with an attribute ``no_sync`` of its own."""
        context = super().no_sync if engine_of(model) is None else no_sync  # type: ignore[misc]
        with context(model):
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """As Accelerate's; raises UsageError for a distributed model."""
        if engine_of(model) is not None:
            raise UsageError(
                "trigger_sync_in_backward(): whether gradients are averaged is decided by the "
                "forward; run the last forward outside of no_sync()"
            )
        with names.accelerate().Accelerator.trigger_sync_in_backward(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """As Accelerate's; for a distributed model by its ``join``, on CPUs too.

        Raises UsageError for several models of which one is distributed.
        """
        joinables = list(joinables)
        ours = [each for each in joinables if engine_of(each) is not None]
        if not ours:
            with super().join_uneven_inputs(joinables, even_batches):  # type: ignore[misc]
                yield
            return
        if len(joinables) > 1:
            raise UsageError(
                f"join_uneven_inputs(): {len(joinables)} models, of which a worker without batches "
                "could stand in for one only: distribute one module that contains all of them "
                "(torch.nn.ModuleDict, say)"
            )
        even = self.even_batches if even_batches is None else even_batches  # type: ignore[attr-defined]
        loaders = self._dataloaders  # type: ignore[attr-defined]
        with _even_batches(loaders, even_batches), join(ours[0], enable=not even):
            yield

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, with each worker's residuals; every worker calls it.

        Models that differ between workers (Ripples, LocalSGD, ...) are synchronized first.
        """
        pairs = self._wingbeat_live()
        for model, _ in pairs:
            synchronize(model)
        folder = super().save_state(output_dir, *args, **kwargs)  # type: ignore[misc]
        for number, (_, optimizer) in enumerate(pairs):
            residuals.save(optimizer, folder, number)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's, with each worker's residuals; every worker calls it.

        Raises UsageError if the files of residuals are not from the same run.
        """
        seen: list[str] = []
        hook = self.register_load_state_pre_hook(  # type: ignore[attr-defined]
            lambda _models, folder: seen.append(folder)
        )
        try:
            super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
        finally:
            hook.remove()
        for number, (_, optimizer) in enumerate(self._wingbeat_live()):
            residuals.load(optimizer, seen[0], number)

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's."""
        vars(self)[_PAIRS] = []
        return super().free_memory(*objects)  # type: ignore[misc]

    def _wingbeat_live(self) -> list[Pair]:
        """Return the distributed models that are still in use, in the order of preparation."""
        found = [(model(), optimizer()) for model, optimizer in vars(self)[_PAIRS]]
        return [
            (model, optimizer)
            for model, optimizer in found
            if model is not None and optimizer is not None and engine_of(model) is not None
        ]


def upgrade_accelerator(accelerator: Any, pairs: Iterable[Pair]) -> None:
    """Add the methods above to an Accelerator, for these models and their optimizers too."""
    kept = vars(accelerator).setdefault(_PAIRS, [])
    known = {id(model()) for model, _ in kept}
    kept += [(weakref.ref(m), weakref.ref(o)) for m, o in pairs if id(m) not in known]
    plain = type(accelerator)
    if not issubclass(plain, DistributedAccelerator):
        namespace = {"__doc__": plain.__doc__, "__qualname__": f"Distributed{plain.__name__}"}
        accelerator.__class__ = type(plain.__name__, (DistributedAccelerator, plain), namespace)


# -- whose parameters ---------------------------------------------------------------------


def _whose(parameters: Any, pairs: list[Pair]) -> tuple[Any, Any]:
    """Return the parameters, and the optimizer with exactly these; None if there is none.

    An unstarted ``model.parameters()`` is identified by its model, because starting the generator
    gathers gradients.
    """
    model = _unbegun(parameters)
    if model is not None and engine_of(model) is not None:
        given = [param for _, param in nn.Module.named_parameters(model)]
    else:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = parameters
    with torch._C.DisableTorchFunctionSubclass():
        wanted = {param for param in given if param.requires_grad}
        for _, optimizer in pairs:
            groups = vars(optimizer)["param_groups"]
            if wanted == {p for group in groups for p in group["params"] if p.requires_grad}:
                return parameters, optimizer
    return parameters, None


def _unbegun(parameters: Any) -> nn.Module | None:
    """Return the model of an unstarted ``model.parameters()`` generator."""
    if not inspect.isgenerator(parameters) or parameters.gi_code is not _PARAMETERS:
        return None
    if inspect.getgeneratorstate(parameters) != inspect.GEN_CREATED:
        return None
    found = inspect.getgeneratorlocals(parameters)
    model = found.get("self") if found.get("recurse") is True else None
    return model if isinstance(model, nn.Module) else None


_PARAMETERS = nn.Module.parameters.__code__


@contextlib.contextmanager
def _even_batches(loaders: list[Any], even: bool | None) -> Iterator[None]:
    """Set ``even_batches`` of the loaders inside the block."""
    samplers = [loader.batch_sampler for loader in loaders if even is not None]
    before = [(s, s.even_batches) for s in samplers if hasattr(s, "even_batches")]
    for sampler, _ in before:
        sampler.even_batches = even
    try:
        yield
    finally:
        for sampler, was in before:
            sampler.even_batches = was
