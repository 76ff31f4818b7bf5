"""An optimizer's options as they travel under bounded staleness: the same for a round everywhere.

A learning rate's schedule goes by each worker's own iterations, and workers apply a round in
different ones. So options travel as a colayer without gradients, behind all others, and a round is
applied with those of its latest entry.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from wingbeat.errors import PeerError, UsageError

_SIMPLE = (bool, int, float, str, type(None))

Groups = list[dict[str, Any]]


class Form:
    """What another worker's options must be like; refers to no optimizer.

    Args:
        groups: this worker's, at some moment.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def read(self, payload: Any, worker: str) -> Groups:
        """Return what another worker has written, or this one.

        Args:
            payload: bytes.
            worker: who sent them, for messages.

        Raises:
            PeerError: these are no options of this optimizer.
        """
        own = self._groups
        try:
            found = json.loads(bytes(payload))
        except (ValueError, RecursionError):
            found = None
        if type(found) is not list or len(found) != len(own):
            raise _malformed(worker, f"no {len(own)} groups")
        return [_merged(worker, mine, theirs) for mine, theirs in zip(own, found, strict=True)]


class Options:
    """The options of an optimizer's groups of parameters: those that have a default.

    Args:
        optimizer: whose.

    Attributes:
        form: what all workers' are like.

    Raises:
        UsageError: it has an option that is no number, name or flag; names it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = tuple(optimizer.defaults)
        self._members = self._grouped()
        self.form = Form(self._sent())

    def _own(self) -> Groups:
        groups = self._optimizer.param_groups
        return [{name: group[name] for name in self._names} for group in groups]

    def _grouped(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self._optimizer.param_groups]

    def written(self) -> bytes:
        """Return them as they are now, for the other workers.

        Raises:
            UsageError: as the class; or the groups have other parameters than they had, which
                workers would find in different rounds.
        """
        if self._grouped() != self._members:
            raise UsageError(
                "the optimizer's param groups hold other parameters than at distribute(), which is "
                "not possible under bounded staleness (Canary): call wingbeat.release(model, "
                "optimizer), change them, and distribute() again"
            )
        return json.dumps(self._sent()).encode()

    def _sent(self) -> Groups:
        own = [{name: _plain(value) for name, value in group.items()} for group in self._own()]
        for number, group in enumerate(own):
            for name, value in group.items():
                if not _is_simple(value):
                    raise UsageError(
                        f"{type(self._optimizer).__name__}: {name}={value!r:.60} of group {number} "
                        "is the same on all workers only if it is sent: allowed under bounded "
                        "staleness are numbers, names and flags, such as lr=0.1 in place of a "
                        "tensor"
                    )
        return own

    @contextlib.contextmanager
    def using(self, groups: Groups) -> Iterator[None]:
        """Have the optimizer use these; afterwards it has its own again, as schedules know them.

        Raises:
            UsageError: its step has changed one, which the next round would put back.
        """
        own = self._own()
        self._set(groups)
        try:
            yield
            self._refuse_moved(groups)
        finally:
            self._set(own)

    def _refuse_moved(self, groups: Groups) -> None:
        for now, given in zip(self._own(), groups, strict=True):
            name = next((name for name in self._names if now[name] != given[name]), None)
            if name is not None:
                kind = type(self._optimizer).__name__
                raise UsageError(
                    f"{kind}.step() changes its option {name} (from {given[name]!r} to "
                    f"{now[name]!r:.60}), and under bounded staleness (Canary) options are those "
                    "that came with a round: use another optimizer, or wingbeat.AllReduce()"
                )

    def _set(self, groups: Groups) -> None:
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(values)


def _plain(value: Any) -> Any:
    """Return a number as Python has it, also if it is NumPy's, as many schedules compute them."""
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _is_simple(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(type(item) in _SIMPLE for item in value)
    return type(value) in _SIMPLE


def _merged(worker: str, mine: dict[str, Any], theirs: Any) -> dict[str, Any]:
    if type(theirs) is not dict or set(theirs) != set(mine):
        raise _malformed(worker, f"options other than {', '.join(mine)}")
    return {name: _value(worker, name, value, theirs[name]) for name, value in mine.items()}


def _value(worker: str, name: str, mine: Any, theirs: Any) -> Any:
    """Return another worker's value of an option, of the same kind as this one's."""
    if type(mine) in (tuple, list) and type(theirs) is list and len(theirs) == len(mine):
        both = zip(mine, theirs, strict=True)
        return type(mine)(_value(worker, name, a, b) for a, b in both)
    number = type(mine) in (int, float) and type(theirs) in (int, float)
    # What is not chosen may be later, and what is chosen may be given up.
    either = None in (mine, theirs) and type(theirs) in _SIMPLE
    if number or either or (type(mine) in (bool, str) and type(theirs) is type(mine)):
        return theirs
    raise _malformed(worker, f"{name}={theirs!r:.40}, where this worker has {mine!r:.40}")


def _malformed(worker: str, what: str) -> PeerError:
    return PeerError(
        f"{worker} sent {what}, as options of the optimizer; check that it trains with the same one"
    )
