"""Presets that average models between local steps: Ripples, AD-PSGD, local SGD and DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass, field

from wingbeat import parts
from wingbeat.compression import DTYPES, Compression
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.rules import GROUP_SIZE, THRESHOLD
from wingbeat.parts.partners import check_groups, threshold_of
from wingbeat.parts.schedule import check_local
from wingbeat.parts.update import check_outer
from wingbeat.settings import READ
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True, repr=False)
class Ripples(Preset):
    """Partial all-reduce: after a local step, models are averaged within dynamic groups.

    Ripples (Luo et al., 2020). Each worker updates its model with its own gradients and requests a
    group from the group generator, so that slow workers do not delay the others. Not exact: models
    differ until `wingbeat.synchronize`.

    Args:
        policy: ``"smart"``, the paper's smart groups (section 5) with corrections. ``"paper"``, the
            same exactly as published: a worker that has fallen behind once stays excluded, and
            subsets of workers may train without exchanging models with the rest. ``"random"``, the
            paper's random groups (section 4.1). ``"buffered"`` (+ Group Buffer), ``"divided"`` (+
            Global Division) and ``"inter-intra"`` each add one step from ``"random"`` to
            ``"smart"``. ``"static"``, a schedule without a generator (section 4.2).
        size: number of members of a random group.
        threshold: C_thres of the slowdown filter (section 5.3), for ``"smart"`` and ``"paper"``.
            None (``none`` on the command line): no filter.
        every: steps from one average to the next.
        overlap: compute an average during the next forward and backward and apply it in the next
            step; otherwise each step waits for its average.
        compression: encoding of parameters: ``"fp32"`` (unchanged) or ``"bf16"``.
        average_state: average the optimizer's state per element (momentum, the two moments of Adam)
            together with the parameters; otherwise each worker keeps its own.
        encrypted: encrypt messages to and from the generator. Parameters are sent over connections
            that are neither authenticated nor encrypted. No effect with ``"static"``.

    Raises:
        UsageError: a value is out of range.
    """

    policy: str = "smart"
    size: int = GROUP_SIZE
    threshold: int | None = field(default=THRESHOLD, metadata={READ: threshold_of})
    every: int = 1
    overlap: bool = False
    compression: Compression = "fp32"
    average_state: bool = False
    encrypted: bool = True

    def __post_init__(self) -> None:
        check_groups(self)
        self.check_count("every", 1, 1_000_000)
        for key in ("overlap", "average_state", "encrypted"):
            self.check_flag(key)
        self.compose()

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
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
    """Asynchronous decentralised SGD: after a local step, a worker averages with one other worker.

    AD-PSGD (Lian et al., 2018), as compared in the Ripples paper (sections 2.3 and 7). A worker of
    even rank selects a random worker of odd rank, which averages at once, independent of its
    computation; without these two halves there are deadlocks (Fig. 2a). For pairs without halves,
    use ``Ripples(policy="random", size=2)``. Not exact: models differ until
    `wingbeat.synchronize`.

    Args:
        overlap: compute averages during the next forward and backward.
        compression: encoding of parameters: ``"fp32"`` (unchanged) or ``"bf16"``.
        average_state: average the optimizer's state per element (momentum, the two moments of Adam)
            together with the parameters; otherwise each worker keeps its own.
        encrypted: encrypt messages between workers, including parameters. `wingbeat.synchronize` is
            not encrypted: it uses the connections of collectives.

    Raises:
        UsageError: a value is out of range.
    """

    overlap: bool = True
    compression: Compression = "fp32"
    average_state: bool = False
    encrypted: bool = True

    def __post_init__(self) -> None:
        for key in ("overlap", "average_state", "encrypted"):
            self.check_flag(key)
        self.compose()

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
        return Strategy(
            plan=parts.OneBucket(),
            compression=self.compression,
            exchange=parts.Pairs(encrypted=self.encrypted),
            schedule=parts.Local(delay=int(self.overlap)),
            update=parts.Averaged(state=self.average_state),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGD(Preset):
    """Local steps; all models are averaged periodically.

    Local SGD (Stich, 2019). With ``every=1`` and SGD, with or without momentum, the weights equal
    DDP's. Otherwise not exact.

    Args:
        every: steps from one average to the next, H.
        overlap: compute an average during the next forward and backward and apply it in the next
            step; otherwise the step waits for it.
        compression: encoding of parameters: ``"fp32"`` (unchanged), ``"bf16"``, or a codec. A codec
            encodes each worker's change since the last average and adds its error to the next
            change.
        average_state: average the optimizer's state per element (momentum, the two moments of Adam)
            together with the parameters; otherwise each worker keeps its own.
        encrypted: encrypt messages to and from the generator, which tracks the membership.
            Parameters are sent over connections that are neither authenticated nor encrypted.

    Raises:
        UsageError: a value is out of range.
    """

    every: int = 8
    overlap: bool = False
    compression: Compression = "fp32"
    average_state: bool = False
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_count("every", 1, 1_000_000)
        for key in ("overlap", "average_state", "encrypted"):
            self.check_flag(key)
        self.compose()

    def compose(self) -> Strategy:
        """Return the strategy's parts.

        Raises:
            UsageError: ``compression`` is a codec, and ``average_state`` is set.
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
    """Local steps; the average change of the models is the gradient of an outer optimizer.

    DiLoCo (Douillard et al., 2023). With ``fragments`` and ``delay`` it is Streaming DiLoCo
    (Douillard et al., 2025): fragments of the model are averaged in turn, each during training. Any
    inner optimizer can be used. Not exact.

    Args:
        every: steps from one average of a fragment to its next, H.
        fragments: number of fragments into which the model's layers are divided.
        delay: steps during which an average is computed before it is applied; 0: the step waits for
            it.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        compression: encoding of the changes: ``"fp32"`` (unchanged), ``"bf16"``, or a codec, such
            as ``"sketch@4"`` or ``TopK(density=0.02, bits=2)`` (SparseLoCo, Sarfi et al., 2025),
            whose error is added to the next change.
        encrypted: encrypt messages to and from the generator, which tracks the membership.
            Parameters are sent over connections that are neither authenticated nor encrypted.

    Raises:
        UsageError: a value is out of range.
    """

    every: int = 30
    fragments: int = 1
    delay: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    compression: Compression = "fp32"
    encrypted: bool = True

    def __post_init__(self) -> None:
        check_local(self)
        check_outer(self, "outer_")
        self.check_count("fragments", 1, 10_000)
        self.check_flag("encrypted")
        self.compose()

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
        plan = parts.OneBucket() if self.fragments == 1 else parts.Colayers(count=self.fragments)
        return Strategy(
            plan=plan,
            compression=self.compression,
            exchange=parts.Groups(policy="all", encrypted=self.encrypted),
            schedule=parts.Local(every=self.every, delay=self.delay),
            update=parts.Outer(lr=self.outer_lr, momentum=self.outer_momentum),
        )
