"""Trials of an optimizer's behaviour on test tensors.

DeAR steps on some parameters at a time, and ``shard_optimizer`` on parts of them. To support any
optimizer, a shadow of the user's runs on small tensors: on all of them at once and on one after the
other, or on whole tensors and on parts. The user's optimizer, its parameters and the state of
random number generators are not changed.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.utils._python_dispatch import TorchDispatchMode

from wingbeat.engine.gradients.placed import is_placed
from wingbeat.engine.updates.json_values import describe, encode
from wingbeat.errors import UsageError
from wingbeat.observe.log import log

LR = 0.01
"""Replaces a group's own learning rate, which a warm-up may have set to zero."""

_RTOL, _ATOL = 1e-4, 1e-6
_STEPS = 3
_KEEPS_GRADIENTS = "it keeps gradients themselves, whose memory is reused"

Optimizer = torch.optim.Optimizer
Step = Callable[[Any], Any]
_Shape = tuple[int, ...]


class TrialFailed(Exception):
    """The optimizer does not support the operation under trial; states why."""


# -- the shadow optimizer -----------------------------------------------------------------


def make_shadow(optimizer: Optimizer) -> Any:
    """Return a copy without parameters, state and hooks, also of a wrapped optimizer."""
    shadow = object.__new__(type(optimizer))
    params = [p for group in optimizer.__dict__["param_groups"] for p in group["params"]]
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().new_empty(0), p.requires_grad) for p in params
    }
    memo[id(optimizer)] = shadow
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            shadow.__dict__[key] = type(value)()
        elif key not in ("param_groups", "state", "step"):
            shadow.__dict__[key] = _copied(value, memo)
    shadow.__dict__["state"] = defaultdict(dict)
    return shadow


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # attributes that cannot be copied are shared
        return value


def bare_step(step: Step) -> Step:
    """Return an optimizer's ``step`` without global step hooks, which belong to user steps."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


class _NoCollectives(TorchDispatchMode):
    """Raises `TrialFailed` if an optimizer calls ``torch.distributed``: no peers take part."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.rstrip("_")
            raise TrialFailed(f"it exchanges tensors with other workers by itself ({name})")
        return func(*args, **(kwargs or {}))


def try_step(
    shadow: Any, step: Step, settings: Mapping[str, Any], params: Sequence[torch.nn.Parameter]
) -> list[str]:
    """Run one step on one group, in training mode; return the names of settings that changed."""
    group = {**copy.deepcopy(settings), "params": params}
    lr = group.get("lr")
    if lr is not None:
        group["lr"] = torch.full_like(lr, LR) if isinstance(lr, torch.Tensor) else LR
    before = dict(group)
    shadow.__dict__["param_groups"] = [group]
    with _NoCollectives():  # type: ignore[no-untyped-call]
        if callable(getattr(shadow, "train", None)):
            shadow.train()
        step(shadow)
    return [key for key, value in group.items() if key not in before or value is not before[key]]


def settings_of(group: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a group's settings, and a text that is equal for those that need the same trial."""
    settings = {key: value for key, value in group.items() if key != "params"}
    return settings, repr(
        sorted(kv for kv in settings.items() if kv[0] not in ("lr", "initial_lr"))
    )


def failure(error: Exception) -> str:
    """Describe the exception that has ended a trial."""
    if isinstance(error, TrialFailed):
        return str(error)
    reason = str(error).strip().splitlines() or [""]
    return f"a step on test tensors ends in {type(error).__name__}: {reason[0]}"


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results are equal but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    # Not bit for bit: an element at a vector's end may be computed with other instructions.
    return torch.allclose(a, b, _RTOL, _ATOL, equal_nan=True)


_RNG_LOCK = threading.Lock()


@contextlib.contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the state of torch's random number generators, on the CPU and on a GPU.

    One thread at a time: torch acquires a generator's lock while it holds the GIL, and may release
    the GIL while it holds the generator's lock, so two threads could deadlock.
    """
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with _RNG_LOCK, torch.random.fork_rng(devices=devices, device_type=kind):
        yield


def _draw(
    seed: int, shape: _Shape, scale: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    # Drawn on the host, so that the device's generator is not used.
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu") * scale
    return drawn.to(device, dtype)


def _keeps(tensors: Iterable[Any], grad: torch.Tensor) -> bool:
    """Whether one of the tensors has the gradient's memory."""
    where = grad.untyped_storage().data_ptr()
    return any(
        isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == where
        for each in tensors
    )


# -- steps on some parameters at a time ---------------------------------------------------

_LONGEST = 6
"""Maximum size of a test tensor in each dimension."""

_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD)
"""Optimizers that update each element by itself, so that shards need no communication."""

_COUNTERS = frozenset({"_step_count", "_opt_called"})
"""Attributes in which torch counts steps, for its schedulers' warnings."""


def steps_independently(optimizer: Optimizer) -> bool:
    """Whether steps on one parameter after the other are equivalent to one step on all of them.

    False if the trial fails. Not equivalent are optimizers that count steps in an attribute, clip
    by a norm over all gradients, keep state in their param groups, or wrap another optimizer.
    """
    why_not = find_dependence(optimizer)
    if why_not:
        log.info(
            "optimizer %s cannot step on some of its parameters at a time (%s): gradients are "
            "gathered before each step, which is correct but overlaps less communication",
            type(optimizer).__name__,
            why_not,
        )
    return not why_not


def may_communicate(optimizer: Optimizer) -> bool:
    """Whether a step may call collectives, because the optimizer reads more of a `DTensor` than a
    rank has.
    """
    params = (p for group in optimizer.__dict__["param_groups"] for p in group["params"])
    return not isinstance(optimizer, _ELEMENTWISE) and any(map(is_placed, params))


def find_dependence(optimizer: Optimizer) -> str:
    """Return why `steps_independently` is false; empty if it is true."""
    tried: set[Any] = set()
    if may_communicate(optimizer):
        return "it may communicate to update a DTensor, in the order of its parameters"
    for group in optimizer.__dict__["param_groups"]:
        settings, key = settings_of(group)
        for kind in small_shapes(group["params"]):
            if (*kind, key) not in tried:
                tried.add((*kind, key))
                why_not = _compare_orders(optimizer, settings, *kind)
                if why_not:
                    return why_not
    return ""


def small_shapes(
    params: list[torch.Tensor],
) -> list[tuple[torch.device, torch.dtype, tuple[_Shape, ...]]]:
    """For each dtype and device: small shapes with as many dimensions as its parameters have."""
    shapes: dict[tuple[torch.device, torch.dtype], dict[int, _Shape]] = {}
    for p in params:
        if p.requires_grad:
            small = tuple(min(n, _LONGEST) for n in p.shape)
            shapes.setdefault((p.device, p.dtype), {}).setdefault(p.ndim, small)
    # Two of each: a dependence needs at least two tensors.
    return [(*kind, tuple(found.values()) * 2) for kind, found in shapes.items()]


def _compare_orders(
    optimizer: Optimizer,
    settings: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[_Shape, ...],
) -> str:
    """Return how steps on all tensors and on one after the other differ; empty if they do not."""
    step = bare_step(type(optimizer).step)
    try:
        with preserve_rng_state(device):
            runs = []
            for together in (True, False):
                # Another seed each time: an optimizer that draws random numbers does so in
                # parameter order.
                torch.default_generator.manual_seed(int(together))
                params = [
                    torch.nn.Parameter(_draw(seed, shape, 1.0, device, dtype))
                    for seed, shape in enumerate(shapes)
                ]
                batches = [params] if together else [[p] for p in params]
                state = _train_batches(make_shadow(optimizer), step, settings, batches)
                runs.append((params, [state[p] for p in params]))
    except Exception as err:
        return failure(err)
    (whole, whole_state), (apart, apart_state) = runs
    if not all(close(a.detach(), b.detach()) for a, b in zip(whole, apart, strict=True)):
        return "what it does to one parameter depends on the others, or on random numbers"
    for one, other in zip(whole_state, apart_state, strict=True):
        if one.keys() != other.keys() or not all(_same(one[k], other[k]) for k in one):
            return "the state of one parameter depends on the others"
    return ""


def _train_batches(
    shadow: Any, step: Step, settings: dict[str, Any], batches: list[list[torch.nn.Parameter]]
) -> Any:
    """Make some steps, on each batch separately; return the optimizer's state."""
    params = [p for batch in batches for p in batch]
    first = [p.detach().clone() for p in params]
    before: dict[str, str] = {}
    for number in range(1, _STEPS + 1):
        _set_gradients(params, number)
        for batch in batches:
            changed = try_step(shadow, step, settings, batch)
            if changed:
                raise TrialFailed(f"it keeps state in its param groups: {', '.join(changed)}")
        # Attributes set only in the first step are not compared: if they matter, results differ.
        before = before or _attributes(shadow)
    after = _attributes(shadow)
    changed = [key for key in after if after[key] != before.get(key)]
    if changed:
        raise TrialFailed(f"it keeps state outside of its state dict: {', '.join(changed)}")
    if any(p.numel() and torch.equal(p, old) for p, old in zip(params, first, strict=True)):
        raise TrialFailed("it does not update the parameters of its param groups")
    if not all(isinstance(key, torch.Tensor) for key in shadow.state):
        raise TrialFailed("it has state that belongs to no parameter")
    return shadow.state


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return close(a, b)
    return type(a) is type(b) and bool(repr(a) == repr(b))


def _attributes(shadow: Any) -> dict[str, str]:
    """Return the optimizer's own attributes, as text that changes with them."""
    return {
        key: repr(value)
        for key, value in vars(shadow).items()
        if key not in ("param_groups", "state") and key not in _COUNTERS
    }


def _set_gradients(params: list[torch.nn.Parameter], number: int) -> None:
    # Large at first and small later, on both sides of any threshold.
    for seed, param in enumerate(params):
        scale = 10.0 ** (2 - number)
        param.grad = _draw(100 * number + seed, param.shape, scale, param.device, param.dtype)


# -- steps on parts of parameters ---------------------------------------------------------

_SHAPES = ((72, 64), (3, 2, 2, 2))
_CUTS = (1537, 7)
"""Where each test tensor is cut in two: inside a row, at no multiple of a vector's width."""


@dataclass(frozen=True, slots=True)
class Division:
    """How an optimizer is to be divided, and the error text if it cannot be.

    Attributes:
        option: the user's option that divides it.
        among: the processes that share the work.
        instead: the alternative to suggest.
        parts_by: another optimizer that must have the same effect on parts of parameters; None for
            the optimizer itself.
    """

    option: str
    among: str
    instead: str
    parts_by: Any = None

    def refusal(self, optimizer: Any, reason: str) -> UsageError:
        """Return the error for an optimizer that cannot be divided."""
        return UsageError(
            f"{self.option}: the work of optimizer {type(optimizer).__name__} cannot be divided "
            f"among {self.among}: {reason}; {self.instead}"
        )


SHARDS = Division("DeAR(shard_optimizer=True)", "the workers", "leave shard_optimizer out")


def prove_elementwise(
    optimizer: Optimizer, step: Step, division: Division = SHARDS
) -> dict[str, bool]:
    """Check that ``step`` has the same effect on parts of parameters as on whole ones.

    True for SGD and Adam. Adafactor, Muon and LAMB read rows, columns or norms of whole parameters.
    Returns for each name of state whether it has one value per element of the parameter (a
    momentum), or one for all of it (a step counter).
    """
    each: dict[str, bool] = {}
    tried = set()
    for group in optimizer.param_groups:
        settings, key = settings_of(group)
        for like in {(p.dtype, p.device): p for p in group["params"] if p.requires_grad}.values():
            if (like.device, like.dtype, key) in tried:
                continue
            tried.add((like.device, like.dtype, key))
            try:
                trial = _ElementwiseTrial(bare_step(step), settings, like)
                each |= trial.run(optimizer, division.parts_by or optimizer)
            except Exception as err:
                raise division.refusal(optimizer, failure(err)) from None
    return each


class _ElementwiseTrial:
    """The optimizer with one group's settings, on test tensors like one of its parameters."""

    def __init__(self, step: Step, settings: dict[str, Any], like: torch.Tensor) -> None:
        self._step, self._settings, self._device = step, settings, like.device
        # Half precision would hide small differences.
        self._dtype = torch.promote_types(like.dtype, torch.float32)

    def run(self, optimizer: Optimizer, parts_by: Optimizer) -> dict[str, bool]:
        with preserve_rng_state(self._device):
            # The whole tensors, updated by one step for all.
            wholes, state = self._train(optimizer, [slice(None)] * 2, together=True)
            # A flat part of each for each of two workers, updated one by one, as for buckets.
            cuts = [slice(0, cut) for cut in _CUTS], [slice(cut, None) for cut in _CUTS]
            runs = [self._train(parts_by, parts, together=False) for parts in cuts]
        for whole, *parts in zip(wholes, *(values for values, _ in runs), strict=True):
            if not close(whole.reshape(-1), torch.cat(parts)):
                raise TrialFailed("it does not treat each element of a parameter alone")
        return _compare_states(state, [states for _, states in runs])

    def _train(
        self, optimizer: Optimizer, parts: list[slice], *, together: bool
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """Train a part of each test tensor; return their values and state."""

        def draw(seed: int, scale: float) -> list[torch.Tensor]:
            numbers = zip(self._numbers(seed, scale), parts, strict=True)
            return [n if together else n.reshape(-1)[part].clone() for n, part in numbers]

        params = [torch.nn.Parameter(values) for values in draw(0, 1.0)]
        shadow = make_shadow(optimizer)
        for number in range(1, _STEPS + 1):
            for param, grad in zip(params, draw(number, 10.0 ** (2 - number)), strict=True):
                param.grad = grad
            for batch in [params] if together else [[p] for p in params]:
                self._step_once(shadow, batch)
        return [p.detach() for p in params], [shadow.state[p] for p in params]

    def _step_once(self, shadow: Any, params: list[torch.nn.Parameter]) -> None:
        changed = try_step(shadow, self._step, self._settings, params)
        if changed:
            raise TrialFailed(f"it keeps state in its param groups: {', '.join(changed)}")
        for param in params:
            if param.grad is not None and _keeps(shadow.state.get(param, {}).values(), param.grad):
                raise TrialFailed(_KEEPS_GRADIENTS)
        loose = [k for k in shadow.state if not isinstance(k, torch.Tensor)]
        if loose:
            raise TrialFailed(f"it keeps state that belongs to no parameter: {loose[0]!r}")

    def _numbers(self, seed: int, scale: float) -> list[torch.Tensor]:
        """Return test tensors whose norms differ by orders of magnitude between pieces."""
        out = []
        for shape in _SHAPES:
            count = torch.Size(shape).numel()
            drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed), device="cpu")
            # Large weights and small gradients at one end, the reverse at the other.
            slope = (
                torch.logspace(-2, 1, count, device="cpu")
                if seed == 0
                else torch.logspace(1, -2, count, device="cpu")
            )
            tensor = (drawn * slope * scale).reshape(shape)
            out.append(tensor.to(self._device, self._dtype))
        return out


def _compare_states(
    wholes: list[dict[str, Any]], pieces: list[list[dict[str, Any]]]
) -> dict[str, bool]:
    each: dict[str, bool] = {}
    for whole, shape, *parts in zip(wholes, _SHAPES, *pieces, strict=True):
        if any(list(part) != list(whole) for part in parts):
            raise TrialFailed("parts of a parameter have other state than the whole")
        for key, value in whole.items():
            each[key] = isinstance(value, torch.Tensor) and value.shape == shape
            values = [part[key] for part in parts]
            if each[key]:
                same = close(value.reshape(-1), torch.cat([part.reshape(-1) for part in values]))
            else:
                same = _equals_all(key, value, values)
            if not same:
                raise TrialFailed(f"state {key!r} of parts is other than that of the whole")
    return each


def _equals_all(key: str, value: Any, others: list[Any]) -> bool:
    try:
        encode(value)
    except TypeError as err:
        raise TrialFailed(f"state {key!r}: {err}") from None
    if not isinstance(value, torch.Tensor):
        return all(other == value for other in others)
    return all(other.shape == value.shape and close(value, other) for other in others)


# -- steps on whole parameters by different workers ---------------------------------------


def prove_tensorwise(optimizer: Optimizer) -> None:
    """Check that the update of each parameter is independent of all others.

    True for Muon, Adafactor and SOAP, which read rows, columns or norms of one parameter: the
    worker that has a parameter's whole gradient can compute its whole update.
    """
    why_not = find_dependence(optimizer) or _find_unfit_state(optimizer)
    if why_not:
        raise SHARDS.refusal(optimizer, why_not)


def _find_unfit_state(optimizer: Optimizer) -> str:
    """Return why the state after a step cannot be sent to other workers; empty if it can."""
    for group in optimizer.__dict__["param_groups"]:
        settings, _ = settings_of(group)
        for device, dtype, shapes in small_shapes(group["params"]):
            shadow = make_shadow(optimizer)
            params = [
                torch.nn.Parameter(torch.ones(shape, device="cpu").to(device, dtype))
                for shape in shapes
            ]
            try:
                with preserve_rng_state(device):
                    _set_gradients(params, 1)
                    try_step(shadow, bare_step(type(optimizer).step), settings, params)
                for param in params:
                    tensors: list[torch.Tensor] = []
                    describe(dict(shadow.state.get(param, {})), tensors)
                    if param.grad is not None and _keeps(tensors, param.grad):
                        return _KEEPS_GRADIENTS
            except TypeError as err:
                return f"its state: {err}"
            except Exception as err:
                return failure(err)
    return ""
