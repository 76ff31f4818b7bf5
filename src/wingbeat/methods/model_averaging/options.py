"""The parts of model averaging: partners, local steps between averages, and their use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from wingbeat.compression import options_of
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.rules import (
    FILTERED,
    GROUP_SIZE,
    POLICIES,
    THRESHOLD,
    WEIGHTS,
    Rules,
    rules_of,
)
from wingbeat.parts.schedule import SchedulePart
from wingbeat.parts.update import UpdatePart
from wingbeat.settings import READ, Settings, count_of, number_of
from wingbeat.traits import LOCAL, MEANS, ExchangePart

if TYPE_CHECKING:
    import torch

    from wingbeat.compression import Coded
    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.runtime import Runtime
    from wingbeat.methods.model_averaging.flat import FlatModel
    from wingbeat.methods.model_averaging.group_all_reduce import ModelCompression
    from wingbeat.methods.model_averaging.group_averager import GroupAverager
    from wingbeat.methods.model_averaging.pair_averager import PairAverager
    from wingbeat.parts.strategy import Strategy
    from wingbeat.transport.world import World


GRACE_S = 1.0
"""Seconds for which a quorum waits for the others."""


class PartnersPart(Settings, ExchangePart):
    """Which workers average their models; a subclass is a frozen dataclass.

    Attributes:
        seed: seed of random choices.
        encrypted: whether messages are encrypted.
        averages_models: whether models travel, and not their differences.
    """

    exact: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False
    has: ClassVar[frozenset[str]] = frozenset({MEANS})
    lockstep: ClassVar[bool] = False
    averages_models: ClassVar[bool] = True

    seed: int
    encrypted: bool

    @property
    def everyone(self) -> bool:
        """Whether all workers average together, so that all share one model."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """A schedule with local steps between averages."""
        return frozenset({LOCAL})

    def codec(self, codec: Coded) -> Coded:
        """Return the codec for differences of models."""
        return codec.for_differences()

    def gradient_wire(self, wire: str | Coded, workers: int) -> str | Coded:
        """Return the codec, whose residuals are kept as those of gradients; else nothing."""
        return wire if options_of(wire).encodes and workers > 1 else ""

    def check(self, strategy: Strategy) -> None:
        """Raise a `UsageError` for parts that model averaging does not support."""
        where, wire = f"Strategy(exchange={self!r}", strategy.compression
        plan, update, codec = strategy.plan, strategy.update_part, strategy.codec
        outer = isinstance(update, Outer)
        if plan.tuning() is not None or plan.merging() is not None:
            raise UsageError(
                f"{where}, plan={plan!r}): parameters that are averaged together must not change "
                "during training; allowed: plan=OneBucket(), or another fixed plan, such as "
                "Layers()"
            )
        self._check_update(update)
        if codec is not None and not (self.everyone and outer):
            raise UsageError(
                f"{where}, compression={wire!r}, update={update!r}): models travel as they are, or "
                "rounded; through a codec, differences from the model that all share: allowed: "
                '"fp32", "bf16", or Groups(policy="all") and Outer(), as in LocalSGD and DiLoCo'
            )
        if wire == "bf16" and not self.everyone and outer:
            raise UsageError(
                f"{where}, compression={wire!r}, update={update!r}): what rounding takes from "
                'models is as much as they have moved; allowed: "fp32", or Groups(policy="all")'
            )
        if isinstance(self, Groups) and self.quorum is not None and not outer:
            raise UsageError(
                f"{where}, update={update!r}): a worker that is late keeps its steps by an outer "
                "optimizer; allowed: Outer(), as in DiLoCo, or quorum=None"
            )
        if isinstance(update, Outer) and update.weights != "equal" and not self.everyone:
            raise UsageError(
                f"{where}, update={update!r}): models have weights in averages of all workers; "
                'allowed: weights="equal", or Groups(policy="all"), as in DiLoCo'
            )
        if codec is not None:
            codec.check_differences(where)

    def _check_update(self, update: UpdatePart) -> None:
        """Raise a `UsageError` for an update that these partners do not support."""

    def build_averager(
        self, world: World, model: FlatModel, compression: ModelCompression
    ) -> GroupAverager | PairAverager:
        """Make what averages a worker's flat model with its partners'."""
        raise NotImplementedError

    def check_model(self, model: torch.nn.Module) -> None:
        """Raise a `UsageError` for a module that waits for all workers in each forward."""
        from wingbeat.methods.model_averaging.build import check_modules

        if not self.everyone:
            check_modules(model)

    def build(self, context: BuildContext) -> Runtime:
        """Make a runtime whose update averages models."""
        from wingbeat.methods.model_averaging.build import build_runtime

        return build_runtime(self, context)


@dataclass(frozen=True, kw_only=True, repr=False)
class Groups(PartnersPart):
    """Workers average within groups that a generator forms on request (Ripples, sections 4 and 5).

    Args:
        policy: ``"smart"``, the paper's smart groups with corrections. ``"paper"``, the same
            exactly as published. ``"random"``, the paper's random groups (4.1). ``"buffered"``,
            ``"divided"`` and ``"inter-intra"`` each add one step from ``"random"`` to ``"smart"``.
            ``"static"``, a schedule without a generator (4.2). ``"all"``, one group of all workers.
        size: number of members of a random group.
        threshold: C_thres of the slowdown filter (5.3), for ``"smart"`` and ``"paper"``. None
            (``none`` on the command line): no filter.
        seed: seed of random choices.
        quorum: with ``"all"``, an average of at least as many workers begins ``grace`` seconds
            after the last of them was there, without those that are late, or once all are there.
            None: it waits for all that are alive.
        grace: those seconds.
        encrypted: encrypt messages to and from the generator. Parameters use the connections of
            collectives (``encrypted`` of `wingbeat.init`).

    Raises:
        UsageError: a value is out of range.
    """

    policy: str = "smart"
    size: int = GROUP_SIZE
    threshold: int | None = field(default=THRESHOLD, metadata={READ: count_of})
    quorum: int | None = field(default=None, metadata={READ: count_of})
    grace: float = GRACE_S
    seed: int = 0
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_name("policy", POLICIES)
        self.check_count("size", 2, 100_000)
        self.check_count_if_any("threshold", 2, 1_000_000)
        if self.threshold != THRESHOLD and self.policy not in FILTERED:
            reason = 'only policy="smart" and "paper" have a filter; leave threshold out'
            raise self.refusal(reason, "policy", "threshold")
        self.check_count_if_any("quorum", 1, 1_000_000)
        self.check_number("grace", "0 to 86400 seconds", lambda value: 0 <= value <= 86400)
        if self.quorum is not None and not self.everyone:
            raise self.refusal('only policy="all" has rounds; leave quorum out', "policy", "quorum")
        if self.quorum is None and self.grace != GRACE_S:
            reason = "the seconds after a quorum; give quorum too, or leave grace out"
            raise self.refusal(reason, "grace")
        self.check_flag("encrypted")
        self.check_count("seed", 0, 2**31 - 1)

    @property
    def everyone(self) -> bool:
        """Whether all workers average together, so that all share one model."""
        return self.policy == "all"

    @property
    def rules(self) -> Rules | None:
        """The generator's rules; None for the static schedule, which has no generator."""
        if self.policy == "static":
            return None
        grace = 0.0 if self.quorum is None else self.grace
        return rules_of(self.policy, self.size, self.threshold, self.quorum, grace)

    @property
    def waits(self) -> bool:
        """Whether a worker averages with, and waits for, a subset of the others at a time."""
        return not self.everyone

    def build_averager(
        self, world: World, model: FlatModel, compression: ModelCompression
    ) -> GroupAverager:
        """Make what averages a worker's flat model with its groups'."""
        from wingbeat.methods.model_averaging.build import group_averager

        return group_averager(self, world, model, compression)

    @property
    def readmits(self) -> bool:
        """Whether there is a generator, which alone can admit a rejoining worker."""
        return self.policy != "static"


@dataclass(frozen=True, kw_only=True, repr=False)
class Pairs(PartnersPart):
    """A worker of one half averages with one worker of the other half at a time (AD-PSGD).

    Args:
        seed: seed of random choices.
        encrypted: encrypt messages between workers, including parameters. `wingbeat.synchronize`
            uses the connections of collectives (``encrypted`` of `wingbeat.init`).

    Raises:
        UsageError: a value is out of range.
    """

    averages_models: ClassVar[bool] = False

    seed: int = 0
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_flag("encrypted")
        self.check_count("seed", 0, 2**31 - 1)

    def refusal_in_replicas(self, strategy: Strategy) -> str:  # noqa: ARG002
        """Return that pairs of ranks are not possible, which were not tested in columns."""
        return "it averages models of single processes; use LocalSGD(), DiLoCo() or Ripples()"

    def build_averager(
        self, world: World, model: FlatModel, compression: ModelCompression
    ) -> PairAverager:
        """Make what averages a worker's parameters with one other's."""
        from wingbeat.methods.model_averaging.build import pair_averager

        return pair_averager(self, world, model, compression)

    def _check_update(self, update: UpdatePart) -> None:
        """Raise a `UsageError` for an outer optimizer."""
        if isinstance(update, Outer):
            raise UsageError(
                f"Strategy(exchange={self!r}, update={update!r}): others average with a worker at "
                'any moment of its round; allowed: Groups(), or update="averaged"'
            )


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


def in_python(text: str) -> None:
    """Refuse the textual form of an option that is a function by a `UsageError`."""
    raise UsageError(
        f"outer_optimizer={text}: a function cannot be written here; pass "
        "DiLoCo(outer_optimizer=...) in Python, or write outer_lr and outer_momentum"
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Outer(UpdatePart):
    """The average change of the models since the last average is an outer optimizer's gradient.

    DiLoCo (Douillard et al., 2023): SGD with Nesterov momentum. ``Outer(lr=1, momentum=0)`` applies
    the average unchanged.

    Args:
        lr: the outer learning rate.
        momentum: the Nesterov momentum; 0: none.
        optimizer: makes another outer optimizer of a list of parameters, such as
            ``functools.partial(torch.optim.Adam, lr=0.1)``; None: SGD with ``lr`` and ``momentum``.
            There is one flat parameter for each fragment, so it must update each element by itself.
            The gradient is the shared model minus the mean of the models.
        alpha: the share of a worker's own parameters when it adopts an average; the rest is the
            shared model (Streaming DiLoCo, Douillard et al., 2025, section 2.2; torchft's
            ``fragment_update_alpha``). None: the shared model plus all that the worker has moved
            since it sent.
        weights: of workers in the average. ``"equal"``. ``"tokens"``: by the tokens that a worker
            has counted since its last merge (`wingbeat.count_tokens`). ``"decoupled"``: by its
            tokens times its tokens per step (Decoupled DiLoCo, Douillard et al., 2026).

    Raises:
        UsageError: a value is out of range, or ``lr`` or ``momentum`` are given too.
    """

    in_parts: ClassVar[bool] = False

    lr: float = 0.7
    momentum: float = 0.9
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = field(
        default=None, metadata={READ: in_python}
    )
    alpha: float | None = field(default=None, metadata={READ: number_of})
    weights: str = "equal"

    def __post_init__(self) -> None:
        self.check_number("lr", "numbers above 0", lambda value: value > 0)
        self.check_number("momentum", "0 to below 1", lambda value: 0 <= value < 1)
        self.check_number_if_any("alpha", "0 to 1", lambda value: 0 <= value <= 1)
        self.check_name("weights", WEIGHTS)
        given: Any = self.optimizer
        if given is None:
            return
        if not callable(given):
            reason = "pass a function of a list of parameters that returns a torch.optim.Optimizer"
            raise self.refusal(reason, "optimizer")
        for key, usual in {"lr": 0.7, "momentum": 0.9}.items():
            if getattr(self, key) != usual:
                reason = "the optimizer has settings of its own; leave one of the two out"
                raise self.refusal(reason, "optimizer", key)

    @property
    def needs(self) -> frozenset[str]:
        """Local steps between averages."""
        return frozenset({LOCAL})


@dataclass(frozen=True, kw_only=True, repr=False)
class Local(SchedulePart):
    """Steps on each worker's own gradients, with averages of models between them (Ripples, 3.2).

    Args:
        every: steps from one average to the next. If the plan has several fragments, each is
            averaged once in that time.
        delay: steps during which an average is computed before it is applied; 0: the step that
            starts it waits for it.

    Raises:
        UsageError: a number is out of range.
    """

    name: ClassVar[str] = "local"
    bound: ClassVar[str] = "local"
    update: ClassVar[UpdatePart] = Averaged()
    of: ClassVar[str] = "Ripples"
    has: ClassVar[frozenset[str]] = frozenset({LOCAL})

    every: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        self.check_count("every", 1, 1_000_000)
        self.check_count("delay", 0, 1_000_000)
        if self.delay > self.every:
            reason = "an average is taken over before the next begins; allowed is delay=0 to"
            raise self.refusal(f"{reason} {self.every}", "every", "delay")

    @property
    def needs(self) -> frozenset[str]:
        """An exchange that averages models."""
        return frozenset({MEANS})
