"""Methods that the user's model and optimizer gain in place.

Their classes are replaced by subclasses, as in torch's ``fully_shard``: objects, attributes and
keys of state dicts stay the same, so one line of a training script changes. Copies and pickles are
plain objects.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from wingbeat.engine import checkpoint
from wingbeat.engine.engine import Engine
from wingbeat.engine.gradients.bucketing import IGNORED
from wingbeat.engine.gradients.compression import no_residuals
from wingbeat.engine.gradients.views import PendingGradient
from wingbeat.engine.hooks import ModuleHook
from wingbeat.engine.join_context import joined
from wingbeat.engine.model_checks import (
    refuse_conversion,
    refuse_ddp_wrapping,
    refuse_loading,
    refuse_new_layout,
)
from wingbeat.engine.updates.stepper import StepArguments
from wingbeat.errors import MissingAttributeError, UsageError

_KEY = "_wingbeat"

_PLAIN = "_wingbeat_plain"

_ADDED = frozenset(
    {"no_sync", "join", "synchronize", "require_backward_grad_sync", "will_sync_module_buffers"}
    | {"_set_static_graph", "find_unused_parameters", "broadcast_buffers"}
    | {"require_forward_param_sync"}
)

_OF_DDP = {
    "module": "the model is distributed in place, and is the module",
    "reducer": "a strategy has none; wingbeat.AllReduce() and others have mb=",
    "logger": "wingbeat.observe and `wingbeat top` show what is sent and waited for",
    "_get_ddp_logging_data": "wingbeat.observe and `wingbeat top` show what is sent and waited for",
    "process_group": "the workers are those of wingbeat.init()",
    "register_comm_hook": "choose what gradients travel as by the strategy's compression=",
    "_register_builtin_comm_hook": "choose what gradients travel as by the strategy's compression=",
    "_register_fused_optim": "wingbeat.DeAR() updates parameters as they are needed",
}
"""Attributes of DistributedDataParallel that distributed models lack, and the replacements."""

EXTRA = "wingbeat"
"""The key of `checkpoint.export_extra` in an optimizer's state dict."""


class _Upgraded(type):
    """The metaclass of upgraded classes: ``extra``'s methods precede those of the user's class.

    The user's class is still the first base: an object's class can only be exchanged for one of the
    same layout in memory, which is that of the first base.
    """

    def mro(cls) -> list[type]:
        first, *others = super().mro()
        if _PLAIN not in cls.__dict__:
            return [first, *others]
        added = [each for each in cls.__bases__[1].__mro__ if each is not object]
        return [first, *added, *(each for each in others if each not in added)]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain object by ``type(model)(...)``, as a method ``clone`` does."""
        plain = cls.__dict__.get(_PLAIN)
        return super().__call__(*args, **kwargs) if plain is None else plain(*args, **kwargs)


class _Distributed:
    """An object with an engine, which its copies and pickles do not have."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # The user's class must not register this subclass as one of its own.
        if _PLAIN not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A method such as ``__deepcopy__`` calls this, and expects a plain object.
        plain = cls.__dict__.get(_PLAIN)
        if plain is not None:
            return plain.__new__(plain, *args, **kwargs)
        return super().__new__(cls)

    @property
    def _engine(self) -> Engine:
        # Not from __dict__: a subclass may store its attributes elsewhere.
        engine: Engine = getattr(self, _KEY)
        return engine

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As the plain object does: pickles then do not need this library, and self-references stay
        # intact.
        self._engine.before_state_dict()
        with self._whole():
            made: Any = super().__reduce_ex__(max(2, int(protocol)))
            make, args, *rest = made
            plain = plain_class(self)
            args = tuple(plain if arg is type(self) else arg for arg in args)
            if make is copyreg.__newobj__ and len(args) == 1:  # type: ignore[attr-defined]
                # Pickle would refuse the other form for an object of another class.
                make, args = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
            if rest and isinstance(rest[0], dict):
                rest[0] = {key: value for key, value in rest[0].items() if key != _KEY}
            return (make, args, *rest)

    def _whole(self) -> contextlib.AbstractContextManager[None]:
        """Make the whole state present inside; a model's always is."""
        return contextlib.nullcontext()


class _Model(_Distributed):
    """Overrides of a model's own methods."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As `torch.nn.Module.named_parameters`, with current values and gradients."""
        self._engine.settle()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc,no-any-return]

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.nn.Module.zero_grad`, without waiting for exchanges."""
        self._engine.zero_grad(set_to_none)
        modules: Any = self.modules()
        params = (param for module in modules for param in module._parameters.values())
        _zero((param for param in params if param is not None), set_to_none)
        if plain_class(self).zero_grad is not torch.nn.Module.zero_grad:
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As `torch.nn.Module._apply`, if ``fn`` keeps parameters' dtype, device and layout."""
        engine = self._engine
        params = [slot.param for slot in engine.slots]
        refuse_conversion(params, fn)
        refuse_new_layout(params, engine.optimizer, fn)
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def __prepare_scriptable__(self) -> Any:
        """Return the plain model, with current parameters, to `torch.jit.script`."""
        self._engine.settle()
        return _without_hooks(self, {})

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_DDP:
            return super().__getattr__(name)  # type: ignore[misc]
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            raise MissingAttributeError(
                f"model.{name} is an attribute of DistributedDataParallel, which wingbeat has not: "
                f"{_OF_DDP[name]}"
            ) from None

    def join_hook(self, **_options: Any) -> Any:
        """Raise a `UsageError`: torch's ``Join([model])`` calls this."""
        raise UsageError(
            "torch.distributed.algorithms.Join([model]) is for DistributedDataParallel: write "
            "`with model.join():`, which takes the same options"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        found = self.__dict__.get(IGNORED)
        if found is None:
            refuse_ddp_wrapping()
        return found


def _always_synchronised(name: str) -> property:
    def refuse_false(_model: Any, sync: bool) -> None:
        if not sync:
            raise UsageError(
                f"model.{name} = {sync!r}: buffers stay synchronised; to leave some out, name them "
                "by DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, "
                "names) before distribute()"
            )

    text = "As in DDP: whether buffers are synchronised. Always True; cannot be set to False."
    return property(lambda _model: True, refuse_false, doc=text)


class DistributedModel(_Model):
    """The methods that `distribute` adds to a model's class.

    A model that defines one of these attributes keeps its own; `wingbeat.no_sync(model)`,
    `wingbeat.join(model)` and `wingbeat.synchronize(model)` are equivalent.
    """

    find_unused_parameters = True
    """As in DDP: parameters without a gradient are always detected."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without communication, as DDP's ``no_sync``."""
        return self._engine.no_sync()

    @property
    def require_backward_grad_sync(self) -> bool:
        """As in DDP: whether the next forward's gradients are synchronised; may be set."""
        return self._engine.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._engine.sync = bool(sync)

    require_forward_param_sync = _always_synchronised("require_forward_param_sync")
    broadcast_buffers = _always_synchronised("broadcast_buffers")

    def will_sync_module_buffers(self) -> bool:
        """As in DDP: whether the model has buffers that are synchronised."""
        return bool(self._engine.buffer_sync.tensors())

    def _set_static_graph(self) -> None:
        """As in DDP; has no effect, because any graph is supported."""

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Train with uneven numbers of batches per worker, as DDP's ``join``.

        A worker that leaves the context early takes part in the others' exchanges with gradients of
        zero. Afterwards all workers have the parameters and the optimizer state of a worker that
        stayed in the context to the end.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all workers; with
                False, by the number of those that still have batches.
            enable: with False the context does nothing.
            throw_on_early_termination: all workers raise an `UnevenBatchesError` as soon as one has
                run out of batches.
        """
        return joined(
            self._engine, divide_by_initial_world_size, enable, throw_on_early_termination
        )

    def synchronize(self) -> None:
        """Complete pending operations, and make the models of all workers equal.

        As `wingbeat.synchronize`: call it on all ranks.
        """
        self._engine.level()


class DistributedOptimizer(_Distributed):
    """The methods that `distribute` adds to an optimizer's class.

    `torch.compile` does not compile them: it may run compiled code twice, or not at all.
    """

    def _whole(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.update.whole_state(self._engine)

    @torch._disable_dynamo
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; with `DeAR`, parameters are updated as the next forward needs them.

        A ``closure`` is called to evaluate the loss: once under `DeAR`, otherwise as in the
        optimizer's own step. Its value is returned. With other arguments of the optimizer's own
        ``step``, the same on all workers, the step is made at once, on whole gradients; a
        `UsageError` if the strategy does not call the optimizer's ``step`` at this moment.
        """
        engine = self._engine
        # A scheduler made before `distribute` has wrapped the old step to detect calls.
        engine.optimizer.__dict__["_opt_called"] = True
        return engine.step(StepArguments(plain_class(self).step, args, kwargs))

    # Schedulers patch `step` unless they find this mark; `_opt_called` replaces the patch.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    # The optimizer's own step, which the engine calls, runs its hooks.
    step.hooked = True  # type: ignore[attr-defined]

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`, without waiting for exchanges."""
        self._engine.zero_grad(set_to_none)
        groups = self._engine.optimizer.__dict__["param_groups"]
        _zero((p for group in groups for p in group["params"]), set_to_none)
        if plain_class(self).zero_grad is not torch.optim.Optimizer.zero_grad:
            super().zero_grad(set_to_none)  # type: ignore[misc]

    @torch._disable_dynamo
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the averaged gradients of all the optimizer's parameters by their global norm.

        Returns the norm before clipping, a scalar, equal on every worker. A `UsageError` if
        ``max_norm`` is negative, or ``norm_type`` is not a positive number.
        """
        if not max_norm >= 0:
            raise UsageError(f"clip_grad_norm_(max_norm={max_norm!r}): allowed are 0 and above")
        if not norm_type > 0:
            raise UsageError(
                f"clip_grad_norm_(norm_type={norm_type!r}): allowed are numbers above 0 and inf"
            )
        return self._engine.clip_grad_norm_(float(max_norm), float(norm_type))

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`: the whole state, in torch's own format.

        With ``shard_optimizer`` the workers gather it: every rank must call this, or it raises a
        `RendezvousError`. The key ``"wingbeat"`` contains this worker's residuals, if the
        compression keeps any; and, if models are averaged, the number of steps, and the outer
        optimizer of `DiLoCo`.
        """
        with self._engine.update.whole_state(self._engine):
            state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        extra = checkpoint.export_extra(self._engine)
        return {**state, EXTRA: extra} if extra else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.load_state_dict`, with the extra state of `state_dict`.

        A `UsageError` if that is damaged or of another model; then no state was changed.
        """
        extra = state_dict.get(EXTRA) if isinstance(state_dict, dict) else None
        checkpoint.check_extra(self._engine, extra)
        super().load_state_dict(state_dict)  # type: ignore[misc]
        checkpoint.load_extra(self._engine, extra)

    def residual_state_dict(self) -> dict[str, Any]:
        """Return this worker's residuals, its unsent gradients, without communication.

        `state_dict` contains them too. Save those of all workers, and load them all with
        `load_residuals` in a run with another number of workers. A `UsageError` if the strategy
        keeps no residuals.
        """
        self._engine.settle()
        residuals = self._engine.compression.state_dict()
        if residuals is None:
            raise no_residuals("residual_state_dict()")
        return residuals

    def load_residuals(self, parts: list[dict[str, Any]]) -> None:
        """Load the residuals of all workers of an earlier run, with any number of workers.

        ``parts`` are the results of ``residual_state_dict()`` on every worker, in any order. A
        `UsageError` if one is missing, occurs twice, or is of another model; or if this worker was
        just restarted.
        """
        refuse_loading(self._engine, "load_residuals()")
        self._engine.settle()
        self._engine.compression.load_parts(parts)

    def shard_state_dict(self) -> dict[str, Any]:
        """Return this worker's part of the state, with ``shard_optimizer``, without communication.

        Save the parts of all workers, and load them all with `load_shards`. As in torch's own state
        dict, tensors are not copies. A `UsageError` if the strategy does not divide the state.
        """
        return checkpoint.export_shard(self._engine)

    def load_shards(self, parts: list[dict[str, Any]]) -> None:
        """Load the state that a run of any number of workers has saved in parts.

        ``parts`` are the results of ``shard_state_dict()`` on every worker, in any order. Raises as
        `load_residuals`.
        """
        refuse_loading(self._engine, "load_shards()")
        checkpoint.load_shards(self._engine, parts, super().load_state_dict)  # type: ignore[misc]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a param group where a trainer distributes the model again (Lightning).

        A `UsageError` elsewhere: the plan has been made.
        """
        if self._engine.add_group is not None:
            self._engine.add_group(group)
            return
        raise UsageError(
            "add_param_group() after distribute() is not possible: add the group before, or call "
            "wingbeat.release(model, optimizer), add it, and distribute() again"
        )


_SUPPORTS = "_step_supports_amp_scaling"


class DeferringOptimizer(DistributedOptimizer):
    """The methods of an optimizer whose gradients and updates are deferred.

    Other optimizers keep plain attributes, because steps read them often.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups. A read between backward and step gathers gradients first.

        A GradScaler's read does not: placeholders suffice.
        """
        # The optimizer's own code, on some of its parameters, has whole gradients.
        if not self._engine.scaled and not self._engine.stepper.in_parts:
            self._engine.settle_gradients()
        groups: list[dict[str, Any]] = self._engine.optimizer.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if not self._engine.stepper.stepping:
            self._engine.flush()
        self._engine.optimizer.__dict__["param_groups"] = groups

    @property
    def state(self) -> Any:
        """The optimizer's state by parameter, after deferred updates; settable if undivided.

        With ``shard_optimizer`` it is on different workers, with ``update="server"`` on the
        servers, and `state_dict` gathers it.
        """
        return self._engine.visible_state()

    @state.setter
    def state(self, state: Any) -> None:
        if self._engine.update.option and not self._engine.stepper.stepping:
            raise UsageError(
                f"optimizer.state = ... with {self._engine.update.option}: no worker has all of "
                "it; call optimizer.load_state_dict() on every rank"
            )
        self._engine.visible_state()
        self._engine.optimizer.__dict__["state"] = state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step`` unscales gradients itself; a GradScaler reads it in each of its steps.

        If False, the scaler unscales the blocks that each worker has reduced.
        """
        if self._engine.recovery is not None:
            raise UsageError(
                "GradScaler.step() with min_replicas=: workers would scale differently after a "
                "step that is dropped; train in bfloat16, which needs no scaler"
            )
        usual = getattr(plain_class(self), _SUPPORTS, False)
        supports = bool(vars(self._engine.optimizer).get(_SUPPORTS, usual))
        self._engine.scaled, self._engine.asked = not supports, True
        return supports

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self._engine.optimizer)[_SUPPORTS] = supports

    def __setattr__(self, key: str, value: Any) -> None:
        # Deferred updates must not see attributes set after their step. Derived classes
        # (Lightning's) set attributes in each batch, which updates do not read.
        if key != "__class__":
            engine = self._engine
            inner: object = engine.optimizer
            if inner is self and not engine.stepper.stepping:
                engine.flush()
        super().__setattr__(key, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        with self._engine.stepper.inside():
            super().__setstate__(state)  # type: ignore[misc]


def upgrade(target: Any, extra: type, engine: Engine) -> None:
    """Replace ``target``'s class by a subclass with the methods of ``extra``."""
    plain = type(target)
    target.__dict__[_KEY] = engine
    # A scheduler's wrapper around the old step would hide the new one.
    target.__dict__.pop("step", None)
    # The name stays: libraries choose a loss, or the content of a checkpoint, by it.
    qualified = f"Distributed{plain.__name__}"
    namespace = {"__doc__": plain.__doc__, "__qualname__": qualified, _PLAIN: plain}
    bases = (plain, _without_taken(extra, target))
    meta = type("Upgraded", (_Upgraded, type(plain)), {})
    target.__class__ = meta(plain.__name__, bases, namespace)


def _without_taken(extra: type, target: Any) -> type:
    """Leave out names that the model defines, such as a layer ``join``."""
    taken = [name for name in _ADDED if hasattr(target, name)]
    if extra is not DistributedModel or not taken:
        return extra
    return type("DistributedModel", (_Model,), {k: vars(extra)[k] for k in _ADDED - {*taken}})


def downgrade(target: Any) -> None:
    """Restore ``target``'s class."""
    plain = plain_class(target)
    del target.__dict__[_KEY]
    target.__class__ = plain


def engine_of(target: Any) -> Engine | None:
    """Return the engine of a distributed model or optimizer, None for a plain one."""
    engine: Engine | None = target.__dict__.get(_KEY)
    return engine


def plain_class(target: Any) -> Any:
    """Return the class that a distributed model or optimizer had before."""
    return type(target)._wingbeat_plain


def _without_hooks(module: Any, made: dict[int, Any]) -> Any:
    """Return plain modules with the same tensors and attributes, without the engine's hooks."""
    if id(module) in made or isinstance(module, torch.jit.ScriptModule):
        return made.get(id(module), module)
    plain: Any = plain_class(module) if isinstance(module, _Model) else type(module)
    same = made[id(module)] = plain.__new__(plain)
    same.__dict__.update({k: v for k, v in vars(module).items() if k != _KEY})
    hooks = module._forward_pre_hooks.items()
    same._forward_pre_hooks = OrderedDict((k, v) for k, v in hooks if not isinstance(v, ModuleHook))
    inside = module._modules.items()
    same._modules = {name: each and _without_hooks(each, made) for name, each in inside}
    return same


def _zero(params: Iterable[torch.Tensor], set_to_none: bool) -> None:
    # No operation here reads a parameter, so deferred updates stay deferred.
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            if set_to_none:
                param.grad = None
            elif isinstance(grad, PendingGradient):  # of another parameter, or an old one
                param.grad = torch.zeros_like(param)
            elif grad.grad_fn:
                grad.detach_().zero_()
            else:
                grad.requires_grad_(False).zero_()
