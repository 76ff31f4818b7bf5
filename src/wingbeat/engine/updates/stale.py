"""Parameters whose update is due: whoever reads one gets it updated first.

While an update is due, a parameter's class is a subclass that intercepts every operation on it
(``__torch_function__``), brings the parameter up to date, takes its old class again, and lets the
operation go on. So it does not matter who reads it: a module's forward, another method, a list
that was made long ago, or a person at a prompt. While nothing is due it is an ordinary parameter.

Not intercepted: compiled code that was handed the parameter before (a ``torch.jit`` function), and
views of its values that somebody has kept; the engine knows the former (`engine.attach`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from wingbeat.engine.gradients.reading import reads_values, tensors_in

Refresh = Callable[[list[torch.Tensor]], None]


class StaleParameters:
    """Marks parameters as stale, and calls ``refresh`` with those that somebody is about to read.

    ``refresh`` must `clear` them.
    """

    def __init__(self, refresh: Refresh) -> None:
        self._refresh = refresh
        self._classes: dict[type, type] = {}
        self._plain: dict[type, type] = {}

    def can_mark(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether all these can be marked: a class of someone's own may not allow it."""
        params = list(params)
        try:
            self.mark(params)
        except TypeError:
            return False
        finally:
            self.clear(params)
        return True

    def mark(self, params: Iterable[torch.Tensor]) -> None:
        """Have the next operation that reads one of ``params`` refresh it.

        Raises:
            TypeError: its class cannot be exchanged.
        """
        for param in params:
            kind = type(param)
            if kind not in self._plain:
                param.__class__ = self._classes.get(kind) or self._make(kind)

    def clear(self, params: Iterable[torch.Tensor]) -> None:
        """Give ``params`` their own class back."""
        for param in params:
            plain = self._plain.get(type(param))
            if plain is not None:
                param.__class__ = plain

    def _make(self, plain: Any) -> Any:
        me = weakref.ref(self)

        def __torch_function__(
            _cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if not reads_values(func, args, kwargs):
                return plain.__torch_function__(func, types, args, kwargs)
            _refresh_those_in(me(), stale, plain, (args, kwargs))
            return func(*args, **kwargs)

        def __deepcopy__(param: Any, memo: Any) -> Any:
            _refresh_those_in(me(), stale, plain, param)
            return copy.deepcopy(param, memo)

        def __reduce_ex__(param: Any, protocol: Any) -> Any:
            _refresh_those_in(me(), stale, plain, param)
            return param.__reduce_ex__(protocol)

        methods = {
            "__torch_function__": classmethod(__torch_function__),
            "__deepcopy__": __deepcopy__,
            "__reduce_ex__": __reduce_ex__,
            "__doc__": plain.__doc__,
            "__module__": plain.__module__,
        }
        stale = type(f"Stale{plain.__name__}", (plain,), methods)
        self._classes[plain] = stale
        self._plain[stale] = plain
        return stale

    def refresh(self, params: list[torch.Tensor]) -> None:
        """Have ``params`` brought up to date; if nobody can any more, take them as they are."""
        self._refresh(params)
        self.clear(params)


def _refresh_those_in(owner: StaleParameters | None, stale: type, plain: type, value: Any) -> None:
    found = [tensor for tensor in tensors_in(value) if type(tensor) is stale]
    if owner is not None:
        owner.refresh(found)
    for param in found:
        param.__class__ = plain
