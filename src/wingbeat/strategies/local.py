"""Presets whose workers step on their own gradients and average models: Ripples and its kin."""

from __future__ import annotations

from dataclasses import dataclass, field

from wingbeat import parts
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.rules import GROUP_SIZE, THRESHOLD
from wingbeat.parts.partners import check_groups, threshold_of
from wingbeat.parts.schedule import check_local
from wingbeat.parts.update import check_outer
from wingbeat.settings import READ
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.strategy import Strategy
from wingbeat.wires import DTYPES, Wire


@dataclass(frozen=True, kw_only=True, repr=False)
class Ripples(Preset):
    """Partial all-reduce: after a step, models are averaged in a group of the moment.

    Ripples (Luo et al., 2020). Each worker steps on its own gradients and asks a group generator
    with whom to average, so that slow workers hold nobody back. Not exact: models differ until
    `wingbeat.synchronize`.

    Args:
        policy: ``"smart"``, the paper's smart groups (section 5) with what was found missing;
            ``"paper"``, these exactly as published: whoever fell behind once stays out, and nothing
            keeps parts of the workers from going on without each other; ``"random"``, the paper's
            random groups (section 4.1); steps from there to ``"smart"``, ``"buffered"`` (+ Group
            Buffer), ``"divided"`` (+ Global Division) and ``"inter-intra"``, each with all before
            it; or ``"static"``, a schedule that needs no generator (section 4.2).
        size: members of a random group.
        threshold: C_thres of the slowdown filter (section 5.3), of ``"smart"`` and ``"paper"``;
            None (``none`` on the command line): no filter.
        every: steps from one average to the next.
        overlap: whether an average is made under the next forward and backward, and taken over in
            the next step; otherwise each step waits for its own.
        compression: what parameters travel as: ``"fp32"`` (as they are) or ``"bf16"``.
        average_state: whether what the optimizer remembers of each element of a parameter (a
            momentum, the two moments of Adam) is averaged with it; otherwise each worker keeps its
            own.
        encrypted: whether requests to the generator, and its answers, are. Parameters never are:
            they travel over links that are neither authenticated nor encrypted. Without effect for
            ``"static"``.

    Raises:
        UsageError: a value out of range.
    """

    policy: str = "smart"
    size: int = GROUP_SIZE
    threshold: int | None = field(default=THRESHOLD, metadata={READ: threshold_of})
    every: int = 1
    overlap: bool = False
    compression: Wire = "fp32"
    average_state: bool = False
    encrypted: bool = True

    def __post_init__(self) -> None:
        check_groups(self)
        self.check_count("every", 1, 1_000_000)
        for key in ("overlap", "average_state", "encrypted"):
            self.check_flag(key)
        self.compose()

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
        return Strategy(
            plan=parts.OneBucket(),
            compression=self.compression,
            exchange=parts.Groups(
                policy=self.policy,
                size=self.size,
                threshold=self.threshold,
                encrypted=self.encrypted,
            ),
            schedule=parts.Local(every=self.every, delay=int(self.overlap)),
            update=parts.Averaged(state=self.average_state),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class ADPSGD(Preset):
    """Asynchronous decentralised SGD: after a step, a worker averages with one other.

    AD-PSGD (Lian et al., 2018), as Ripples compares itself with it (sections 2.3 and 7). Workers of
    even rank choose a random one of odd rank, which averages at once, whatever it computes; without
    these two halves there are deadlocks (Fig. 2a). The same without halves, on groups of two, is
    ``Ripples(policy="random", size=2)``. Not exact: models differ until `wingbeat.synchronize`.

    Args:
        overlap: whether averages are made under the next forward and backward.
        compression: what parameters travel as: ``"fp32"`` (as they are) or ``"bf16"``.
        average_state: whether what the optimizer remembers of each element of a parameter (a
            momentum, the two moments of Adam) is averaged with it; otherwise each worker keeps its
            own.
        encrypted: whether messages between workers, parameters among them, are.
            `wingbeat.synchronize` is not: it goes over the links of collectives.

    Raises:
        UsageError: a value out of range.
    """

    overlap: bool = True
    compression: Wire = "fp32"
    average_state: bool = False
    encrypted: bool = True

    def __post_init__(self) -> None:
        for key in ("overlap", "average_state", "encrypted"):
            self.check_flag(key)
        self.compose()

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
        return Strategy(
            plan=parts.OneBucket(),
            compression=self.compression,
            exchange=parts.Pairs(encrypted=self.encrypted),
            schedule=parts.Local(delay=int(self.overlap)),
            update=parts.Averaged(state=self.average_state),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGD(Preset):
    """Steps on each worker's own gradients; every so many, all models become their mean.

    Local SGD (Stich, 2019). With ``every=1`` and SGD, with momentum or without, weights are those
    of DDP. Not exact otherwise.

    Args:
        every: steps from one average to the next, H.
        overlap: whether an average is made under the next forward and backward, and taken over in
            the next step; otherwise its step waits for it.
        compression: what parameters travel as: ``"fp32"`` (as they are) or ``"bf16"``; or a codec,
            through which goes how far each has come, and what that loses goes along the next time.
        average_state: whether what the optimizer remembers of each element of a parameter (a
            momentum, the two moments of Adam) is averaged with it; otherwise each worker keeps its
            own.
        encrypted: whether messages to the generator, which knows the workers that are there, are.
            Parameters never are: they travel over links that are neither authenticated nor
            encrypted.

    Raises:
        UsageError: a value out of range.
    """

    every: int = 8
    overlap: bool = False
    compression: Wire = "fp32"
    average_state: bool = False
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_count("every", 1, 1_000_000)
        for key in ("overlap", "average_state", "encrypted"):
            self.check_flag(key)
        self.compose()

    def compose(self) -> Strategy:
        """Return the parts that it stands for.

        Raises:
            UsageError: the optimizer's state cannot go through the codec of ``compression``.
        """
        update: parts.UpdatePart = parts.Averaged(state=self.average_state)
        if self.compression not in DTYPES:
            if self.average_state:
                raise UsageError(
                    f"LocalSGD(compression={self.compression!r}, average_state=True): differences "
                    "of parameters go through a codec, and the optimizer's state does not; "
                    'allowed: compression="fp32", or average_state=False'
                )
            update = parts.Outer(lr=1.0, momentum=0.0)
        return Strategy(
            plan=parts.OneBucket(),
            compression=self.compression,
            exchange=parts.Groups(policy="all", encrypted=self.encrypted),
            schedule=parts.Local(every=self.every, delay=int(self.overlap)),
            update=update,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class DiLoCo(Preset):
    """Local steps; how far workers have come is averaged, and is an outer optimizer's gradient.

    DiLoCo (Douillard et al., 2023); with ``fragments`` and ``delay`` Streaming DiLoCo (Douillard et
    al., 2025): fragments of the model take turns, each averaged under training. The inner
    optimizer is the user's, of any kind. Not exact.

    Args:
        every: steps from one average of a fragment to its next, H.
        fragments: into how many the model's layers are put.
        delay: steps after which a fragment's average is taken over, under which it is made; 0: its
            step waits for it.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        compression: what differences travel as: ``"fp32"`` (as they are), ``"bf16"``, or a codec,
            such as ``"sketch@4"`` or ``TopK(density=0.02, bits=2)`` (SparseLoCo, Sarfi et al.,
            2025); what that loses goes along the next time.
        encrypted: whether messages to the generator, which knows the workers that are there, are.
            Parameters never are: they travel over links that are neither authenticated nor
            encrypted.

    Raises:
        UsageError: a value out of range.
    """

    every: int = 30
    fragments: int = 1
    delay: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    compression: Wire = "fp32"
    encrypted: bool = True

    def __post_init__(self) -> None:
        check_local(self)
        check_outer(self, "outer_")
        self.check_count("fragments", 1, 10_000)
        self.check_flag("encrypted")
        self.compose()

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
        plan = parts.OneBucket() if self.fragments == 1 else parts.Colayers(count=self.fragments)
        return Strategy(
            plan=plan,
            compression=self.compression,
            exchange=parts.Groups(policy="all", encrypted=self.encrypted),
            schedule=parts.Local(every=self.every, delay=self.delay),
            update=parts.Outer(lr=self.outer_lr, momentum=self.outer_momentum),
        )
