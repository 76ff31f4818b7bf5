"""Proof by trial that an optimizer treats each element alone, so that its work can be divided.

SGD and Adam do; Adafactor, Muon or LAMB look at rows, columns or norms of whole parameters, and
would train differently on parts of them. No list can know every optimizer, so the optimizer at
hand is run: on test tensors whole, and on the same tensors in pieces, as two workers would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from wingbeat.engine.updates.chance import kept_random_state
from wingbeat.engine.updates.twin import (
    Unfit,
    bare_step,
    close,
    copied_settings,
    make_twin,
    same_settings,
    try_step,
    why,
)
from wingbeat.errors import UsageError
from wingbeat.servers.values import encode

_SHAPES = ((72, 64), (3, 2, 2, 2))
_CUTS = (1537, 7)
"""Where each test tensor is cut in two: amid a row, and at no multiple of a vector's width."""
_STEPS = 3

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Division:
    """How an optimizer is to be divided, and what to say if it cannot be.

    Attributes:
        option: what asks for it, as users write it.
        among: whom the work is divided among.
        instead: what to do.
        parts_by: another optimizer that is to do the same to parts of parameters; the optimizer
            itself if None.
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


def prove(
    optimizer: Optimizer, step: Callable[[Any], Any], division: Division = SHARDS
) -> dict[str, bool]:
    """Make sure that ``step`` does the same to parts of parameters as to whole ones.

    The optimizer and the random numbers stay as they are: a twin of it makes the steps.

    Args:
        optimizer: the user's.
        step: its class's.
        division: who is to make the steps on parts.

    Returns:
        For each name in the optimizer's state: whether it has one value for each element of the
        parameter (a momentum), rather than one for all of it (a step counter).

    Raises:
        UsageError: it does not.
    """
    bare = bare_step(step)
    each: dict[str, bool] = {}
    tried = set()
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        for like in _kinds(group["params"]):
            key = (like.device, like.dtype, same_settings(settings))
            if key not in tried:
                tried.add(key)
                each |= _Trial(optimizer, bare, settings, like, division).run()
    return each


def _kinds(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One trained parameter of each dtype and device."""
    return list({(p.dtype, p.device): p for p in params if p.requires_grad}.values())


class _Trial:
    """The optimizer with one group's settings, on test tensors like one of its parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Any], Any],
        settings: dict[str, Any],
        like: torch.Tensor,
        division: Division,
    ) -> None:
        self._optimizer = optimizer
        self._division = division
        self._step = step
        self._settings = settings
        self._device = like.device
        # Half precision would hide small differences.
        self._dtype = torch.promote_types(like.dtype, torch.float32)

    def run(self) -> dict[str, bool]:
        cuda = [self._device] if self._device.type == "cuda" else []
        try:
            with kept_random_state(cuda):
                wholes, [state] = self._train([[slice(None), slice(None)]])
                first, second = [slice(0, c) for c in _CUTS], [slice(c, None) for c in _CUTS]
                pieces, states = self._train([first, second])
        except Exception as err:
            raise self._refusal(why(err)) from None
        for whole, parts in zip(wholes, zip(*pieces, strict=True), strict=True):
            if not close(whole.reshape(-1), torch.cat(parts)):
                raise self._refusal("it does not treat each element of a parameter alone")
        return self._compare(state, states)

    def _refusal(self, reason: str) -> UsageError:
        return self._division.refusal(self._optimizer, reason)

    # -- the twin -------------------------------------------------------------------------

    def _train(self, workers: list[list[slice]]) -> tuple[Any, list[list[dict[str, Any]]]]:
        """Let each worker train its parts; return their values and the state, by worker.

        One worker has whole tensors and steps once for all. Several have a flat part of each,
        and step once for each, as for buckets.
        """
        values, states = [], []
        for parts in workers:
            whole = len(workers) == 1
            params = [
                torch.nn.Parameter(w if whole else w.reshape(-1)[part].clone())
                for w, part in zip(self._numbers(0, 1.0), parts, strict=True)
            ]
            others = self._division.parts_by
            twin = make_twin(self._optimizer if whole or others is None else others)
            for number in range(1, _STEPS + 1):
                for param, grad, part in zip(
                    params, self._numbers(number, 10.0 ** (2 - number)), parts, strict=True
                ):
                    param.grad = grad if whole else grad.reshape(-1)[part].clone()
                for batch in [params] if whole else [[p] for p in params]:
                    self._step_once(twin, batch)
            values.append([p.detach() for p in params])
            states.append([twin.state[p] for p in params])
        return values[0] if len(workers) == 1 else values, states

    def _step_once(self, twin: Any, params: list[torch.nn.Parameter]) -> None:
        group = {**copied_settings(self._settings), "params": params}
        changed = try_step(twin, self._step, group)
        if changed:
            raise Unfit(f"it keeps state in its param groups: {', '.join(changed)}")
        for param in params:
            state, grad = twin.state.get(param, {}), param.grad
            if grad is not None and any(_same_memory(v, grad) for v in state.values()):
                raise Unfit("it keeps gradients themselves, whose memory is used again")
        loose = [k for k in twin.state if not isinstance(k, torch.Tensor)]
        if loose:
            raise Unfit(f"it keeps state that belongs to no parameter: {loose[0]!r}")

    def _numbers(self, seed: int, scale: float) -> list[torch.Tensor]:
        """Test tensors whose norms differ by orders of magnitude from piece to piece."""
        out = []
        for shape in _SHAPES:
            count = torch.Size(shape).numel()
            drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed))
            # Large weights and small gradients at one end, the reverse at the other.
            slope = torch.logspace(-2, 1, count) if seed == 0 else torch.logspace(1, -2, count)
            tensor = (drawn * slope * scale).reshape(shape)
            out.append(tensor.to(self._device, self._dtype))
        return out

    # -- what it remembers ----------------------------------------------------------------

    def _compare(
        self, wholes: list[dict[str, Any]], pieces: list[list[dict[str, Any]]]
    ) -> dict[str, bool]:
        each: dict[str, bool] = {}
        for whole, shape, *parts in zip(wholes, _SHAPES, *pieces, strict=True):
            if any(list(part) != list(whole) for part in parts):
                raise self._refusal("parts of a parameter have other state than the whole")
            for key, value in whole.items():
                each[key] = isinstance(value, torch.Tensor) and value.shape == shape
                values = [part[key] for part in parts]
                same = _joined(value, values) if each[key] else self._equal(key, value, values)
                if not same:
                    raise self._refusal(f"state {key!r} of parts is other than that of the whole")
        return each

    def _equal(self, key: str, value: Any, others: list[Any]) -> bool:
        try:
            encode(value)
        except TypeError as err:
            raise self._refusal(f"state {key!r}: {err}") from None
        if not isinstance(value, torch.Tensor):
            return all(other == value for other in others)
        return all(other.shape == value.shape and close(value, other) for other in others)


def _same_memory(value: Any, grad: torch.Tensor) -> bool:
    where = grad.untyped_storage().data_ptr()
    return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == where


def _joined(whole: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    return close(whole.reshape(-1), torch.cat([part.reshape(-1) for part in parts]))
