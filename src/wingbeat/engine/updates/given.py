"""What a call of the user's ``optimizer.step`` was given: a closure, and arguments of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from wingbeat.errors import UsageError

_NAME = "closure"


class Given:
    """The arguments of one call of ``step``, for the optimizer's own.

    Args:
        step: the optimizer's own, as its class has it.
        args: the positional arguments, without the optimizer.
        kwargs: the arguments by name.

    Attributes:
        closure: what evaluates the loss; None where there is none.
    """

    def __init__(
        self,
        step: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._args, self._kwargs = args, dict(kwargs or {})
        self._place: int | str | None = None
        if _NAME in self._kwargs:
            self._place = _NAME
        elif args and step is not None:
            place = _place_of(step)
            self._place = place if place is not None and place < len(args) else None
        self.closure: Callable[[], Any] | None = None
        if self._place is not None:
            self.closure = self._at(self._place)
            if self.closure is not None and not callable(self.closure):
                self.closure = self._place = None  # an argument that stands where another may

    def _at(self, place: int | str) -> Any:
        return self._kwargs[place] if isinstance(place, str) else self._args[place]

    @property
    def others(self) -> bool:
        """Whether there are arguments other than a closure."""
        return len(self._args) + len(self._kwargs) > (self._place is not None)

    def passed(self, closure: Callable[[], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they were given, with ``closure`` in place of the closure."""
        args, kwargs = self._args, dict(self._kwargs)
        if isinstance(self._place, str):
            kwargs[self._place] = closure
        elif self._place is not None:
            args = (*args[: self._place], closure, *args[self._place + 1 :])
        elif closure is not None:
            args = (closure, *args)
        return args, kwargs

    def refuse_others(self, where: str, instead: str) -> None:
        """Refuse arguments where the optimizer's own step is not what is called.

        Args:
            where: under what they are refused.
            instead: the strategy to use.

        Raises:
            UsageError: there are arguments other than a closure.
        """
        if self.others:
            shown = [f"{value!r:.40}" for value in self._args]
            shown += [f"{name}={value!r:.40}" for name, value in self._kwargs.items()]
            text = ", ".join(shown).replace("\n", " ")
            raise UsageError(
                f"optimizer.step({text}) {where}: the optimizer is run on parts of parameters or "
                "at another time, without the arguments of this call; set them in its "
                f"param_groups, or use {instead}"
            )


def _place_of(step: Callable[..., Any]) -> int | None:
    """Return the position of the closure among ``step``'s arguments; None if it takes none."""
    params = list(inspect.signature(step).parameters.values())[1:]
    for place, param in enumerate(params):
        # What passes everything on is most likely called as torch's own steps are.
        if param.name == _NAME or param.kind is inspect.Parameter.VAR_POSITIONAL:
            return place
    return None
