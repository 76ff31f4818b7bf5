"""Where the optimizer is applied, to which parameters, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from wingbeat.settings import Named, Settings
from wingbeat.traits import HALVES, KEPT, LATE, LOCAL, OWN, WHOLE, Part


class UpdatePart(Part, Settings):
    """Where the optimizer is applied; a subclass is a frozen dataclass.

    Attributes:
        in_parts: whether the optimizer runs on some parameters at a time instead of in one call.
        shards: whether each worker updates only its own blocks, and parameters are gathered.
        on_servers: whether the servers update, and workers pull parameters.
    """

    in_parts: ClassVar[bool] = True
    shards: ClassVar[bool] = False
    on_servers: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Whole(UpdatePart):
    """``optimizer.step()`` updates all parameters on every worker, as under DDP."""

    in_parts: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """Gradients that are complete when ``step()`` is called."""
        return frozenset({WHOLE})


@dataclass(frozen=True, kw_only=True, repr=False)
class Deferred(UpdatePart):
    """Every worker updates a bucket just before the layer that needs its parameters."""

    @property
    def needs(self) -> frozenset[str]:
        """Sums that may arrive after the next forward has begun."""
        return frozenset({LATE})


@dataclass(frozen=True, kw_only=True, repr=False)
class Sharded(UpdatePart):
    """Each worker updates the blocks that it has reduced, and parameters are gathered.

    The optimizer's state and arithmetic are divided among the workers.
    """

    shards: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Blocks of the sum that each worker owns."""
        return frozenset({HALVES})


@dataclass(frozen=True, kw_only=True, repr=False)
class OnServers(UpdatePart):
    """Servers apply the optimizer to their slices and hold its state (Geryon, section II-A)."""

    on_servers: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Servers, and parameters that may arrive after the next forward has begun."""
        return frozenset({KEPT, LATE})


@dataclass(frozen=True, kw_only=True, repr=False)
class InRounds(UpdatePart):
    """``step()`` applies the sums that have arrived, one round at a time, on every worker."""

    in_parts: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """Steps that do not wait for all workers."""
        return frozenset({OWN})


@dataclass(frozen=True, kw_only=True, repr=False)
class Averaged(UpdatePart):
    """The averages replace the parameters (Ripples, section 3.2; local SGD).

    Args:
        state: average the optimizer's state per element (momentum, the two moments of Adam)
            together with the parameters; otherwise each worker keeps its own.

    Raises:
        UsageError: ``state`` is neither True nor False.
    """

    in_parts: ClassVar[bool] = False

    state: bool = False

    def __post_init__(self) -> None:
        self.check_flag("state")

    @property
    def needs(self) -> frozenset[str]:
        """Local steps between averages."""
        return frozenset({LOCAL})


@dataclass(frozen=True, kw_only=True, repr=False)
class Outer(UpdatePart):
    """The average change of the models since the last average is an outer optimizer's gradient.

    DiLoCo (Douillard et al., 2023): SGD with Nesterov momentum. ``Outer(lr=1, momentum=0)`` applies
    the average unchanged.

    Args:
        lr: the outer learning rate.
        momentum: the Nesterov momentum; 0: none.

    Raises:
        UsageError: a number is out of range.
    """

    in_parts: ClassVar[bool] = False

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_outer(self)

    @property
    def needs(self) -> frozenset[str]:
        """Local steps between averages."""
        return frozenset({LOCAL})


def check_outer(options: Any, prefix: str = "") -> None:
    """Raise a `UsageError` unless ``lr`` and ``momentum`` are in range."""
    options.check_number(f"{prefix}lr", "numbers above 0", lambda value: value > 0)
    options.check_number(f"{prefix}momentum", "0 to below 1", lambda value: 0 <= value < 1)


BY_NAME: Mapping[str, Named[UpdatePart]] = {
    "whole": Named(Whole),
    "deferred": Named(Deferred),
    "sharded": Named(Sharded),
    "servers": Named(OnServers),
    "rounds": Named(InRounds),
    "averaged": Named(Averaged),
    "outer": Named(Outer, "lr", float),
}
