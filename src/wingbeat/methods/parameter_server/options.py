"""The parts of parameter servers: where sums are made, when they come, and who updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from wingbeat.errors import UsageError, unknown
from wingbeat.parts.schedule import SchedulePart
from wingbeat.parts.update import Deferred, UpdatePart
from wingbeat.settings import READ, SIZE, Settings, is_number
from wingbeat.traits import KEPT, LATE, ONCE, ExchangePart

if TYPE_CHECKING:
    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.runtime import Runtime
    from wingbeat.parts.strategy import Strategy
    from wingbeat.simulator.exchange import SimulatedExchanges, SimulationContext

ASKED = ("forward", "random")
"""Orders of sums that workers request; sums that are sent unrequested have none."""

ORDERS = ("ready", "urgent", *ASKED)
BACKS = ("wire", "dense")
PLACEMENTS = ("sharded", "whole")
PULLS = ("ready", "start")
CLASSES = 4
"""The largest number of traffic classes."""

COARSE, TUNED = "coarse", "tuned"
Threshold = float | tuple[float, ...] | str
THRESHOLD: Threshold = 0.5
"""The default threshold between traffic classes, also of the presets."""

STEPS = 5


def threshold_of(text: str) -> Threshold:
    """Parse a threshold of the command line: a name, a number, or several numbers with ``+``.

    >>> threshold_of("tuned"), threshold_of("0.5"), threshold_of("0.8+0.4")
    ('tuned', 0.5, (0.8, 0.4))

    Raises:
        UsageError: the text is none of these.
    """
    if text in (COARSE, TUNED):
        return text
    try:
        levels = tuple(map(float, text.split("+")))
    except ValueError:
        raise UsageError(
            f"threshold={text!r}: allowed are a number from 1 to 0, several that fall, such as "
            f"0.8+0.4, {COARSE} and {TUNED}"
        ) from None
    return levels if len(levels) > 1 else levels[0]


@dataclass(frozen=True, kw_only=True, repr=False)
class Servers(Settings, ExchangePart):
    """Parameter servers sum the gradients of all workers (Geryon, sections III and IV).

    wingbeat starts the servers with the job and stops them with it.

    Args:
        count: number of servers; 0: one on each host, next to the workers.
        placement: ``"sharded"``, a part of every bucket on each server; or ``"whole"``, each bucket
            on one server, in turn.
        slice: largest number of elements that a server sums at a time; 0: shards are not cut. Whole
            buckets (``placement="whole"``) are not cut either.
        classes: number of traffic classes, 1 to 4, each with a priority in the network (DSCP); 1:
            no priorities.
        threshold: a bucket is sent in a more urgent class if the urgency of its first layer,
            ``1 - l/L`` for the ``l``-th of ``L`` layers in forward order, exceeds this; decreasing
            numbers for more than two classes. ``"tuned"``: tuned during training (section III-C).
            ``"coarse"``: two classes, fully connected layers in the second (section III-B).
        steps: iterations for which each threshold is tried, with ``"tuned"``.
        file: file in which rank 0 stores tuned thresholds; a run that finds the file does not tune.
        pushes: send gradients to the servers in these classes too, instead of in the last class.
        order: which sum is sent first. ``"ready"``: in order of completion. ``"urgent"``: by the
            time at which forward needs it, with few bytes in flight (P3). With ``pull="start"``,
            where workers request sums, also ``"forward"``: strictly in forward order (TICTAC), or
            ``"random"``: in the order of requests (TensorFlow).
        back: encoding of sums if ``compression`` is not ``"fp32"``: ``"wire"``, as the gradients;
            or ``"dense"``, float32 (float64 for sums in float64).
        encrypted: encrypt messages. Without encryption, anyone who can observe the traffic can
            forge them.

    Raises:
        UsageError: a value is out of range.
    """

    has: ClassVar[frozenset[str]] = frozenset({KEPT})

    count: int = 0
    placement: str = "sharded"
    slice: int = field(default=1 << 20, metadata=SIZE)
    classes: int = 2
    threshold: Threshold = field(default=THRESHOLD, metadata={READ: threshold_of})
    steps: int = STEPS
    file: str = ""
    pushes: bool = True
    order: str = "ready"
    back: str = "wire"
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_count("count", 0, 1024)
        self.check_name("placement", PLACEMENTS)
        self.check_count("slice", 0, 2**40)
        self.check_count("classes", 1, CLASSES)
        self.check_flag("pushes")
        self.check_name("order", ORDERS)
        self.check_name("back", BACKS)
        self.check_flag("encrypted")
        self.check_count("steps", 1, 10_000)
        self.check_file("file")
        _ = self.levels
        if self.file and self.threshold != TUNED:
            reason = (
                "only thresholds that are tuned have a file; allowed is "
                f"threshold={TUNED!r}, or no file"
            )
            raise self.refusal(reason, "threshold", "file")

    @property
    def needs(self) -> frozenset[str]:
        """A schedule that sums each bucket in one operation."""
        return frozenset({ONCE})

    @property
    def whole(self) -> bool:
        """Whether each bucket is placed on one server instead of a shard on each."""
        return self.placement == "whole"

    @property
    def coarse(self) -> bool:
        """Whether there are two classes, with fully connected layers in the second."""
        return self.threshold == COARSE

    @property
    def tuned(self) -> bool:
        """Whether thresholds are tuned, starting at `levels`."""
        return self.threshold == TUNED

    @property
    def shuffled(self) -> bool:
        """Whether sums are pulled in a random order."""
        return self.order == "random"

    @property
    def sending(self) -> str:
        """The order in which servers send, see `methods.parameter_server.protocol.Order`."""
        return "ready" if self.shuffled else self.order

    @property
    def dense(self) -> bool:
        """Whether sums of encoded gradients are returned in float32, or float64."""
        return self.back == "dense"

    @property
    def levels(self) -> tuple[float, ...]:
        """The initial thresholds between the classes; empty for classes by kind of layer.

        Raises:
            UsageError: the threshold does not fit the number of classes.
        """
        given = self.threshold
        if isinstance(given, str):
            return self._named_levels(given)
        levels = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if self.classes == 1:
            if given != THRESHOLD:
                raise self.refusal(
                    "a threshold divides two classes or more; allowed are classes from 2 to "
                    f"{CLASSES}, or no threshold",
                    "classes",
                    "threshold",
                )
            return ()
        fine = len(levels) == self.classes - 1 and all(is_number(v) and 0 <= v <= 1 for v in levels)
        if not fine or list(levels) != sorted(set(levels), reverse=True):
            raise self.refusal(
                f"allowed are {self.classes - 1} falling numbers from 1 to 0, {TUNED!r}, and with "
                f"two classes {COARSE!r}",
                "classes",
                "threshold",
            )
        return levels

    def _named_levels(self, name: str) -> tuple[float, ...]:
        if name not in (COARSE, TUNED):
            raise unknown("threshold", name, (COARSE, TUNED), where=f"Servers(threshold={name!r})")
        fine = self.classes == 2 if name == COARSE else self.classes > 1
        if not fine:
            few = "classes=2" if name == COARSE else f"classes from 2 to {CLASSES}"
            raise self.refusal(f"allowed with it are {few}", "classes", "threshold")
        if name == COARSE:
            return ()
        return tuple(1 - (i + 1) / self.classes for i in range(self.classes - 1))

    def key(self) -> dict[str, Any]:
        """Return the options for which sizes and thresholds in a plan file are valid."""
        return {
            "back": self.back,
            "encrypted": self.encrypted,
            "servers": self.count,
            "classes": self.classes,
            "order": self.sending,
            "slice": self.slice,
            "placement": self.placement,
            "pushes": self.pushes,
        }

    def check(self, strategy: Strategy) -> None:
        """Raise a `UsageError` for parts that parameter servers do not support."""
        where = f"Strategy(exchange={self!r}"
        wire, schedule, plan = strategy.compression, strategy.schedule, strategy.plan
        if strategy.codec is not None and strategy.codec.gathers:
            raise UsageError(
                f"{where}, compression={wire!r}): each worker sends other elements, and servers "
                'sum all; allowed: Sketch(), LowRank(), Half(), "bf16", "fp32", or a topology as '
                'the exchange, as in AllReduce(compression="topk") and OMGS()'
            )
        if self.dense and wire == "fp32":
            raise UsageError(
                f'{where}, compression={wire!r}): sums are dense as it is; back="dense" is for '
                'another compression, such as "bf16" or Sketch()'
            )
        if self.order in ASKED and KEPT not in schedule.needs:
            raise UsageError(
                f"{where}, schedule={schedule!r}): sums come by themselves, and "
                f"order={self.order!r} is one of sums that are asked for; allowed: "
                'order="ready" or "urgent", or pull="start"'
            )
        if plan.merging() is not None:
            raise UsageError(
                f"{where}, plan={plan!r}): layers are merged by what collectives cost, and servers "
                "are none; allowed: another plan, such as FixedBuckets(), or a topology as the "
                "exchange"
            )

    def refusal_in_replicas(self, strategy: Strategy) -> str:  # noqa: ARG002
        """Return why tuned thresholds in a file are not possible: each column tunes its own."""
        if not self.file:
            return ""
        return (
            "it keeps its thresholds in a file, and each column of the mesh tunes its own; leave "
            "the file out"
        )

    def build(self, context: BuildContext) -> Runtime:
        """Make a runtime with servers that sum, and apply the optimizer if its update is theirs."""
        from wingbeat.methods.parameter_server.build import build_runtime

        return build_runtime(self, context)

    def build_simulated(self, context: SimulationContext) -> SimulatedExchanges:
        """Make servers and clients in virtual time."""
        from wingbeat.methods.parameter_server.simulated import build_exchanges

        return build_exchanges(self, context)


@dataclass(frozen=True, kw_only=True, repr=False)
class Served(SchedulePart):
    """Gradients are pushed during backward; the next forward awaits the sums (Geryon, section II).

    Args:
        pull: when a sum is sent to the workers: ``"ready"``, as soon as it is complete; or
            ``"start"``, requested when the next iteration starts, as in the paper's Eqs. 1 to 5.

    Raises:
        UsageError: ``pull`` has another value.
    """

    name: ClassVar[str] = "served"
    bound: ClassVar[str] = "late"
    update: ClassVar[UpdatePart] = Deferred()
    of: ClassVar[str] = "Geryon"
    has: ClassVar[frozenset[str]] = frozenset({ONCE, LATE})

    pull: str = "ready"

    def __post_init__(self) -> None:
        self.check_name("pull", PULLS)

    @property
    def machine(self) -> str:
        """The name of the state machine in `wingbeat.schedules.BY_NAME`."""
        return "served" if self.pull == "ready" else "served_at_start"

    @property
    def needs(self) -> frozenset[str]:
        """With ``pull="start"``, an exchange that keeps sums until they are pulled."""
        return frozenset() if self.pull == "ready" else frozenset({KEPT})


@dataclass(frozen=True, kw_only=True, repr=False)
class OnServers(UpdatePart):
    """Servers apply the optimizer to their slices and hold its state (Geryon, section II-A)."""

    on_servers: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Servers, and parameters that may arrive after the next forward has begun."""
        return frozenset({KEPT, LATE})

    def machine(self, schedule: str) -> str:
        """Return the machine that awaits parameters in place of sums."""
        return schedule.replace("served", "served_updates")
