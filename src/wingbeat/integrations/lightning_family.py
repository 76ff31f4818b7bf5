"""Shared code of the integrations with Lightning's packages.

``lightning`` has a Trainer and Fabric; ``pytorch_lightning`` and ``lightning_fabric`` are copies of
them with classes of their own. Lightning has no entry point for external strategies, so wingbeat's
are mixins in front of its DDPStrategy and depend on methods that a release may rename.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wingbeat.engine.api import (
    abandon,
    begin_step,
    distribute,
    no_sync,
    release,
    synchronize,
)
from wingbeat.engine.checkpoint import PARTS
from wingbeat.engine.upgrade import EXTRA, engine_of
from wingbeat.errors import UsageError, unknown
from wingbeat.integrations import check_names, library
from wingbeat.methods.bounded_staleness.build import bounded_exchange
from wingbeat.strategies import PRESETS, DeAR, Strategy, parse
from wingbeat.transport import current, init

# -- the names of Lightning that are overridden or used, and their check --------------------------

LEAST = "2.5"
"""The first supported release."""

TRAINER = (
    *("all_gather", "barrier", "block_backward_sync", "broadcast", "configure_ddp"),
    *("lightning_module", "lightning_module_state_dict", "load_optimizer_state_dict", "model"),
    *("on_exception", "on_train_batch_start", "on_train_end", "on_validation_start"),
    *("optimizer_state", "optimizer_step", "optimizers", "precision_plugin", "reduce"),
    *("root_device", "setup", "setup_environment", "teardown", "training_step", "world_size"),
)
"""Names of ``strategies.DDPStrategy`` for the Trainer."""

TRAINER_OBJECT = ("_forward_redirection", "_lightning_optimizers")
"""Attributes of its instances."""

PRECISION = ("_wrap_closure", "clip_grad_by_norm", "optimizer_step", "train_step_context")
"""Names of ``plugins.precision.Precision`` for the Trainer."""

FABRIC = (
    *("clip_gradients_norm", "get_module_state_dict", "get_optimizer_state", "precision"),
    *("root_device", "setup_environment", "setup_module", "setup_module_and_optimizers"),
    *("setup_optimizer", "world_size"),
)
"""Names of ``strategies.DDPStrategy`` for Fabric."""

FABRIC_OBJECT = ("_backward_sync_control",)
"""Attributes of its instances."""

FABRIC_PRECISION = ("unscale_gradients",)
"""Names of ``plugins.precision.Precision`` for Fabric."""

_INSIDE = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", ""),
    "lightning_fabric": ("", "lightning_fabric"),
}
"""By package: its modules for the Trainer and for Fabric."""


MESH_TRAINER = (
    *("_reset_optimizers_and_schedulers", "device_mesh", "distributed_sampler_kwargs"),
    *("load_checkpoint", "num_processes", "save_checkpoint", "setup_environment"),
)
"""Further names of ``strategies.ModelParallelStrategy`` for the Trainer."""

MESH_FABRIC = (
    *("device_mesh", "distributed_sampler_kwargs", "load_checkpoint", "num_processes"),
    *("save_checkpoint", "setup_environment"),
)
"""The same for Fabric."""

MESH_OBJECT = ("_data_parallel_size", "_device_mesh", "_tensor_parallel_size", "num_nodes")
"""Attributes of the instances of both."""


def trainer_of(package: str) -> Any:
    """Return the Trainer's module after a check of its names.

    Raises UsageError if the package is missing, too old, or has other names.
    """
    return _checked(package, 0, "StrategyRegistry", TRAINER, PRECISION, MESH_TRAINER)


def fabric_of(package: str) -> Any:
    """Return Fabric's module after a check of its names; raises UsageError as `trainer_of`."""
    return _checked(package, 1, "STRATEGY_REGISTRY", FABRIC, FABRIC_PRECISION, MESH_FABRIC)


def _checked(
    package: str,
    inside: int,
    registry: str,
    names: Sequence[str],
    precision: Sequence[str],
    of_mesh: Sequence[str],
) -> Any:
    title = _title(package)
    found: Any = importlib.import_module(_INSIDE[package][inside])
    plugin = importlib.import_module(f"{found.__name__}.plugins.precision").Precision
    check_names(title, {found.strategies.DDPStrategy: names, plugin: precision})
    check_names(title, {found.strategies.ModelParallelStrategy: of_mesh})
    check_names(title, {type(getattr(found.strategies, registry)): ("register",)})
    return found


def check_object(strategy: Any, names: Sequence[str]) -> None:
    """Raise UsageError if a strategy object lacks an attribute that is used here."""
    for each in type(strategy).__mro__:
        package = each.__module__.partition(".")[0]
        if package in _INSIDE:
            check_names(_title(package), {strategy: names})
            return


def _title(package: str) -> str:
    if package != "lightning" and importlib.util.find_spec(package) is None:
        short = package.replace("_", "-")
        raise UsageError(
            f"wingbeat.integrations.{package} needs {package}: pip install {short}; with the "
            "package lightning, import wingbeat.integrations.lightning or .fabric"
        )
    module = library(package, LEAST, extra="lightning")
    return f"{package} {module.__version__}"


# -- options: a strategy of wingbeat, and those of DDPStrategy ------------------------------------

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a wait may take, as in Lightning: rank 0 may work alone for long."""

PASSED_ON = (
    *("accelerator", "checkpoint_io", "cluster_environment", "parallel_devices", "precision"),
    *("precision_plugin", "process_group_backend", "start_method", "timeout"),
)
"""Options that are passed on to Lightning's strategy."""

NOT_NEEDED = (
    *("check_reduction", "dim", "find_unused_parameters", "gradient_as_bucket_view"),
    "static_graph",
)
"""DDP's options that have no effect here and are accepted."""

_HOOKS = (
    "give the strategy a compression (wingbeat.DeAR(compression='bf16'), or 'sketch@4'), or keep "
    "DDPStrategy with wingbeat.integrations.ddp's hooks"
)
REMEDIES = {
    "bucket_cap_mb": "give the size to wingbeat's strategy, wingbeat.AllReduce(mb=...)",
    "ddp_comm_hook": _HOOKS,
    "ddp_comm_state": _HOOKS,
    "ddp_comm_wrapper": _HOOKS,
    "device_mesh": "leave it out; gradients are averaged over all workers",
    "init_sync": "leave it out; all workers begin with rank 0's weights",
    "mixed_precision": "leave it out, and set the Trainer's or Fabric's precision",
    "model_averaging_period": "use wingbeat.LocalSGD(every=...), which averages models",
    "process_group": "leave it out; gradients are averaged over all workers",
}
"""DDP's options that are rejected, with the alternative."""


def strategy_of(given: Any) -> Any:
    """Return a strategy from an object or a command-line text; raises UsageError for others."""
    if given is None:
        return DeAR()
    if isinstance(given, str):
        return parse(given)
    if not isinstance(given, Strategy):
        raise UsageError(
            f"WingbeatStrategy({given!r}): pass one of wingbeat's strategies, such as "
            "wingbeat.DeAR(), or its name, such as 'dear:mb=10'"
        )
    return given


def passed_on(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``options`` for Lightning's strategy; raises UsageError for unsupported ones."""
    for name, value in options.items():
        if name in REMEDIES and value is not None:
            raise UsageError(
                f"WingbeatStrategy({name}=...): there is no DDP here; {REMEDIES[name]}"
            )
        if name == "broadcast_buffers" and not value:
            raise UsageError(
                "WingbeatStrategy(broadcast_buffers=False): rank 0's buffers are taken over by "
                "all; name those that are to differ by torch's "
                "_set_params_and_buffers_to_ignore_for_model"
            )
        if name not in (*PASSED_ON, *NOT_NEEDED, *REMEDIES, "broadcast_buffers"):
            raise unknown("option of WingbeatStrategy", name, (*PASSED_ON, *NOT_NEEDED))
    return {name: options[name] for name in PASSED_ON if name in options}


def register(registry: Any, strategy: type) -> None:
    """Register the names of all presets, such as ``strategy="wingbeat_dear"``."""
    for name, preset in PRESETS.items():
        made = functools.partial(strategy, name)
        registry.register(f"wingbeat_{name}", made, f"wingbeat.{preset.__name__}()", override=True)


def seconds(options: Mapping[str, Any]) -> float:
    """Return the seconds that a wait may take, from the option ``timeout``."""
    timeout = options.get("timeout")
    return timeout.total_seconds() if isinstance(timeout, timedelta) else DEFAULT_TIMEOUT


# -- wingbeat among Lightning's workers -----------------------------------------------------------


class WingbeatMixin:
    """Options and workers of both mixins; `wingbeat_strategy` is the strategy."""

    # Attributes of DDPStrategy.
    root_device: torch.device
    world_size: int

    def __init__(
        self,
        strategy: Any = None,
        *,
        interfaces: Sequence[str] | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        self.wingbeat_strategy = strategy_of(strategy)
        self._wingbeat_interfaces = interfaces
        self._wingbeat_timeout = seconds(ddp_kwargs)
        super().__init__(**self._lightning_options(ddp_kwargs))

    def _lightning_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return passed_on(options)

    def _distribute(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        distribute(module, optimizer, self.wingbeat_strategy)

    def setup_environment(self) -> None:
        """Start Lightning's process group, then initialise wingbeat in it, unless it was before.

        Raises UsageError if it was with other workers, and RendezvousError if workers are missing.
        """
        super().setup_environment()  # type: ignore[misc]
        try:
            world = current()
        except UsageError:
            init(timeout=self._wingbeat_timeout, interfaces=self._wingbeat_interfaces)
            return
        if world.size != self.world_size:
            raise UsageError(
                f"wingbeat.init() was called among {world.size} workers, and Lightning trains with "
                f"{self.world_size}: leave it out, or call wingbeat.shutdown() first"
            )


def _with_all_residuals(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Add all workers' residuals to an optimizer's state dict; every worker calls this.

    Lightning saves rank 0's state dict, so it is complete only there: float32 on the CPU, 4 bytes
    per parameter and worker. States of other optimizers stay unchanged.
    """
    mine = state.get(EXTRA)
    if not isinstance(mine, dict) or "residuals" not in mine or mine["world_size"] == 1:
        return state
    rank, size = int(mine["rank"]), int(mine["world_size"])
    divided = ("residuals", "velocity")
    own = (*divided, "format", "rank", "world_size", "step")
    kept = {key: value for key, value in mine.items() if key not in own}
    steps = _gathered(
        torch.tensor(mine["step"], dtype=torch.int64, device="cpu"), device, rank, size
    )
    parts: list[dict[str, Any]] = [
        {"format": mine["format"], "rank": r, "world_size": size, "step": int(step)}
        for r, step in enumerate(steps)
    ]
    for kind in (kind for kind in divided if kind in mine):
        for part in parts:
            part[kind] = {}
        for name, value in mine[kind].items():
            for part, one in zip(parts, _gathered(value, device, rank, size), strict=True):
                part[kind][name] = one
    return {**state, EXTRA: {**kept, PARTS: parts}} if rank == 0 else state


def _gathered(
    value: torch.Tensor, device: torch.device, rank: int, size: int
) -> list[torch.Tensor]:
    """Return all workers' values on rank 0, and nothing on the others."""
    sent = value.to(device).contiguous()
    found = [torch.empty_like(sent) for _ in range(size)] if rank == 0 else None
    dist.gather(sent, found, dst=0)
    return [each.cpu() for each in found or ()]


# -- the Trainer ---------------------------------------------------------------------------------


class TrainerStrategy(WingbeatMixin):
    """Mixin in front of ``DDPStrategy`` for the Trainer.

    The model is its own wrapper: ``training_step`` is called through its ``forward``, as through
    DDP's, which synchronizes buffers.
    """

    # Attributes of DDPStrategy.
    lightning_module: Any
    model: Any
    optimizers: Any
    precision_plugin: Any
    _forward_redirection: Callable[..., Any]

    def __init__(self, strategy: Any = None, **options: Any) -> None:
        self._wingbeat_optimizer: torch.optim.Optimizer | None = None
        self._wingbeat_frozen: list[torch.nn.Parameter] = []
        self._wingbeat_failed = False
        self._wingbeat_stepping = self._wingbeat_moved = False
        super().__init__(strategy, **options)
        check_object(self, TRAINER_OBJECT)

    # -- before and after -----------------------------------------------------------------

    def configure_ddp(self) -> None:
        """Do nothing: `setup` distributes the model once there are optimizers."""

    def setup(self, trainer: Any) -> None:
        """Set up as DDPStrategy does; for training, distribute the model and an optimizer.

        Raises UsageError if no optimizer has the model's parameters.
        """
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn.value == "fit":
            self._wingbeat_failed = False
            optimizer = _first_of(self.lightning_module, self.optimizers)
            self._distribute(self.lightning_module, optimizer)
            self._wingbeat_optimizer = optimizer
            self._after_distribution()
            _clip_through_optimizer(self.precision_plugin)

    def _after_distribution(self) -> None:
        module, optimizer = self.lightning_module, self._wingbeat_optimizer
        assert optimizer is not None
        self._wingbeat_frozen = [each for each in module.parameters() if not each.requires_grad]
        engine = engine_of(optimizer)
        assert engine is not None
        # Wrappers of the optimizer add groups by this attribute too.
        engine.add_group = lambda group: self._change(lambda: optimizer.add_param_group(group))
        # Wrap again: Lightning derives a wrapper's class from the optimizer's, which has changed.
        self.optimizers = self.optimizers

    def _change(self, what: Callable[[], object]) -> None:
        """Call ``what``, which adds trained parameters, while nothing is distributed.

        Every worker calls this. Residuals and averages are kept; tuning of the bucket size starts
        again. Raises UsageError inside a training step, where Lightning's wrappers are in use, or
        if `wingbeat.distribute` rejects the changed model.
        """
        if self._wingbeat_stepping:
            raise UsageError(
                "add_param_group() in training_step is not possible: add the group in "
                "on_train_batch_start() or on_train_epoch_start()"
            )
        module, optimizer = self.lightning_module, self._wingbeat_optimizer
        assert optimizer is not None
        before = optimizer.state_dict().get(EXTRA)
        release(module, optimizer)
        what()
        self._distribute(module, optimizer)
        if before:
            state = optimizer.state_dict()
            state[EXTRA] = _merged(state.get(EXTRA) or {}, before)
            optimizer.load_state_dict(state)
        self._after_distribution()

    def on_exception(self, exception: BaseException) -> None:
        """Record the failure, after which this worker does not wait for others."""
        self._wingbeat_failed = True
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Undo the distribution, then tear down as DDPStrategy does."""
        optimizer, self._wingbeat_optimizer = self._wingbeat_optimizer, None
        self._wingbeat_frozen = []
        if optimizer is not None:
            undo = abandon if self._wingbeat_failed else release
            undo(self.lightning_module, optimizer)
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
        module = self.lightning_module
        try:
            with self.precision_plugin.train_step_context():
                if self._wingbeat_optimizer is None:
                    return module.training_step(*args, **kwargs)
                if not module.automatic_optimization:  # each backward has its own exchange
                    begin_step(module)
                    return module.training_step(*args, **kwargs)
                return self._forward_redirection(module, module, "training_step", *args, **kwargs)
        finally:
            self._wingbeat_stepping = False

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
        self._synchronize()
        super().on_validation_start()  # type: ignore[misc]

    def on_train_end(self) -> None:
        """Synchronize the models at the end of training."""
        self._synchronize()
        super().on_train_end()  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state, equal on all workers; all workers call this."""
        self._synchronize()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer, on rank 0 with all workers' residuals."""
        state: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
        return _with_all_residuals(state, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states; torch moves them to their parameters' devices."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def _synchronize(self) -> None:
        if self._wingbeat_optimizer is not None and not self._wingbeat_failed:
            synchronize(self.lightning_module)
            self._wingbeat_moved = False

    # -- all workers at a time ------------------------------------------------------------

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce over all workers, as DDPStrategy does."""
        self._synchronize_before_collective()
        return super().reduce(*args, **kwargs)  # type: ignore[misc]

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Gather from all workers, as DDPStrategy does."""
        self._synchronize_before_collective()
        return super().all_gather(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """Broadcast to all workers, as DDPStrategy does."""
        self._synchronize_before_collective()
        return super().broadcast(*args, **kwargs)  # type: ignore[misc]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers, as DDPStrategy does."""
        self._synchronize_before_collective()
        super().barrier(*args, **kwargs)  # type: ignore[misc]

    def _synchronize_before_collective(self) -> None:
        """Synchronize before a global collective, which would deadlock with a wait for a group.

        Raises UsageError inside a training step, where workers may wait for this one.
        """
        exchange = self.wingbeat_strategy.exchange
        if exchange.everyone:
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
            self._synchronize()


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


def _merged(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``now`` with the values of ``before``, recursively."""
    inner = {
        key: _merged(now.get(key) or {}, value)
        for key, value in before.items()
        if isinstance(value, Mapping)
    }
    return {**now, **before, **inner}


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


# -- Fabric ---------------------------------------------------------------------------------------


class FabricStrategy(WingbeatMixin):
    """Mixin in front of ``DDPStrategy`` for Fabric."""

    precision: Any  # an attribute of DDPStrategy

    def __init__(self, strategy: Any = None, **options: Any) -> None:
        self._wingbeat_alone: list[_ModelAlone] = []
        super().__init__(strategy, **options)
        check_object(self, FABRIC_OBJECT)
        self._backward_sync_control = _NoSync()

    # -- setting up -----------------------------------------------------------------------

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Any], Any]:
        """Distribute a model with the first of its optimizers; the others are not distributed."""
        self._distribute(module, optimizers[0])
        return module, optimizers, scheduler

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Broadcast rank 0's weights; the model is distributed later, with its optimizer."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), 0)
        return self._refuse_training_alone(module)

    def _refuse_training_alone(self, module: torch.nn.Module) -> torch.nn.Module:
        if any(param.requires_grad for param in module.parameters()):
            self._wingbeat_alone.append(_ModelAlone(module))
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
                alone.hook.remove()
                self._distribute(module, optimizer)
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
        return _with_all_residuals(state, self.root_device)


class _NoSync:
    """Implements ``fabric.no_backward_sync``."""

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        if not enabled or engine_of(module) is None:
            return contextlib.nullcontext()
        return no_sync(module)


class _ModelAlone:
    """A model that was set up without an optimizer and cannot train until it has one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self.hook = module.register_forward_pre_hook(_refuse_training)


def _refuse_training(module: torch.nn.Module, _args: Any) -> None:
    if module.training and torch.is_grad_enabled():
        raise UsageError(
            f"{type(module).__name__} was set up without an optimizer, so its gradients would not "
            "be averaged: call fabric.setup_optimizers(optimizer), or fabric.setup(model, "
            "optimizer); to evaluate it, model.eval() or torch.no_grad()"
        )
