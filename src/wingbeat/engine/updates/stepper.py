"""Run any torch optimizer on some of its parameters, with the settings of an earlier moment."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wingbeat.engine.updates.given import Given
from wingbeat.engine.updates.twin import bare_step
from wingbeat.errors import UsageError

GroupSnapshot = list[dict[str, Any]]
"""Each param group's settings (learning rate and so on) at the moment of ``step()``."""

State = defaultdict[Any, dict[str, Any]]
"""What an optimizer remembers, by tensor and name, as ``torch.optim.Optimizer.state``."""


class Stepper:
    """Splits one ``step()`` into several, one for each bucket whose gradients have arrived.

    Right for every optimizer that updates each parameter from its own gradient and state, which
    `separable` finds out.

    Attributes:
        stepping: whether the optimizer's own code is running, with all that it calls.
        in_parts: whether it runs on some of its parameters, in groups made for that.
        given: what the call of the user's ``step`` that is being served has for the optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plain_step: Any) -> None:
        self._optimizer = optimizer
        self._plain_step = plain_step
        self._group_of: dict[torch.Tensor, int] = {}
        self.stepping = False
        self.in_parts = False
        self.given = Given()
        self.refresh()

    def refresh(self) -> None:
        """Read again which group each parameter belongs to."""
        groups: list[dict[str, Any]] = self._optimizer.__dict__["param_groups"]
        self._group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}

    def refuse_regrouped(self) -> None:
        """Make sure that the groups have the parameters that they had when they were read.

        Raises:
            UsageError: they have others, which an optimizer that is divided cannot follow.
        """
        groups: list[dict[str, Any]] = self._optimizer.__dict__["param_groups"]
        now = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        if now != {id(p): i for p, i in self._group_of.items()}:
            raise UsageError(
                "the optimizer's param groups hold other parameters than at distribute(), which "
                'is not possible with a divided optimizer (shard_optimizer, update="server"): call '
                "wingbeat.release(model, optimizer), change them, and distribute() again"
            )

    def owns(self, param: torch.Tensor) -> bool:
        """Whether the optimizer updates ``param``."""
        return param in self._group_of

    def group_of(self, param: torch.Tensor) -> int | None:
        """Return the number of the optimizer's group that has ``param``; None if none has."""
        return self._group_of.get(param)

    def params(self) -> list[torch.Tensor]:
        """Return all the optimizer's parameters."""
        return list(self._group_of)

    def snapshot(self) -> GroupSnapshot:
        """Copy the groups' settings, because a scheduler may change them before the update."""
        self.refresh()  # somebody may have moved parameters between groups, or removed them
        groups: list[dict[str, Any]] = self._optimizer.__dict__["param_groups"]
        return [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in groups
        ]

    def whole_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the optimizer's own step, on all its parameters, with what it was called with."""
        args, kwargs = self.given.passed(closure)
        with self.inside():
            return self._plain_step(self._optimizer, *args, **kwargs)

    @contextlib.contextmanager
    def calling(self, given: Given) -> Iterator[None]:
        """Serve a call of the user's ``step`` inside, which was given this."""
        outer, self.given = self.given, given
        try:
            yield
        finally:
            self.given = outer

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Tell that it is the optimizer's own code that runs inside."""
        outer, self.stepping = self.stepping, True
        try:
            yield
        finally:
            self.stepping = outer

    @property
    def hooked(self) -> bool:
        """Whether the user has hooks that run before or after a step."""
        own = [self._optimizer.__dict__[f"_optimizer_step_{when}_hooks"] for when in _WHEN]
        return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))

    def run_hooks(self, when: str) -> None:
        """Run the user's step hooks, ``"pre"`` or ``"post"``, once for a step in parts.

        Those of all optimizers too; in torch's order, in which these are the outermost.
        """
        own = list(self._optimizer.__dict__[f"_optimizer_step_{when}_hooks"].values())
        if when == "pre":
            hooks = [*_global_optimizer_pre_hooks.values(), *own]
        else:
            hooks = [*own, *_global_optimizer_post_hooks.values()]
        for hook in hooks:
            hook(self._optimizer, (), {})

    def step(self, params: Iterable[torch.Tensor], snapshot: GroupSnapshot) -> None:
        """Update ``params`` from their ``grad`` with the settings in ``snapshot``."""
        state: State = self._optimizer.__dict__["state"]
        self.step_on(((param, param) for param in params), snapshot, state)

    def step_on(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        snapshot: GroupSnapshot,
        state: State,
    ) -> None:
        """Update stand-ins for parameters, with ``state`` as the optimizer's state.

        Args:
            pairs: a parameter, which says what group's settings count, and what is updated in
                its place, from its own ``grad``.
            snapshot: the groups' settings.
            state: what the optimizer remembers of each stand-in; filled by the first step.
        """
        members: dict[int, list[torch.Tensor]] = {}
        for param, stand_in in pairs:
            group = self._group_of.get(param)
            if group is not None:
                members.setdefault(group, []).append(stand_in)
        groups = [{**snapshot[i], "params": chosen} for i, chosen in sorted(members.items())]
        inside = self._optimizer.__dict__
        saved = {k: inside[k] for k in _SWAPPED}
        # The user's hooks and groups belong to the whole step, not to each part of it; and only
        # where there are hooks of all optimizers, nothing but the bare step leaves them out.
        everyones = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        step = bare_step(self._plain_step) if everyones else self._plain_step
        inside.update(
            param_groups=groups,
            state=state,
            _optimizer_step_pre_hooks={},
            _optimizer_step_post_hooks={},
        )
        outer, self.in_parts = self.in_parts, True
        try:
            with self.inside():
                step(self._optimizer)
        finally:
            self.in_parts = outer
            inside.update(saved)


def _copied(value: Any) -> Any:
    """A setting as it is now, whatever is written to it in place later."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, dict)) else value


_SWAPPED = (
    "param_groups",
    "state",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
_WHEN = ("pre", "post")


def step_outside(
    slotted: Container[torch.Tensor], stepper: Stepper, snapshot: GroupSnapshot
) -> None:
    """Update at once what is in no bucket, being frozen, but has got a gradient from somewhere."""
    others = [p for p in stepper.params() if p not in slotted and p.grad is not None]
    if others:
        stepper.step(others, snapshot)
