"""The presets with parameter servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from wingbeat import parts
from wingbeat.parts.exchange import STEPS, THRESHOLD, Threshold, threshold_of
from wingbeat.settings import READ
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.strategy import Strategy
from wingbeat.wires import Wire

UPDATES = ("worker", "server")


@dataclass(frozen=True, kw_only=True, repr=False)
class ParameterServer(Preset):
    """Servers sum the gradients; sums come back in time for the layers that need them.

    Geryon (Wang et al., 2020). wingbeat starts the servers next to the workers, and ends them with
    the job. Each worker updates a layer's parameters just before the layer runs, or the servers do.
    Exact with ``compression="fp32"``: the weights equal DDP's.

    Args:
        servers: how many; 0: one on each host.
        placement: ``"sharded"``, a part of every bucket on each server; or ``"whole"``.
        slice: the most elements of what a server sums at a time; 0: shards are not cut. Whole
            buckets are not cut either.
        update: who applies the optimizer: ``"worker"``, each worker to what it needs next; or
            ``"server"``, as in the paper: servers to their slices, with its state there alone, and
            parameters come back in place of sums. For optimizers that treat each element alone.
        pull: ``"ready"``, a sum comes back as soon as it is complete; or ``"start"``, when the next
            iteration starts, as in the paper.
        classes: of flows, 1 to 4, which the network tells apart (DSCP); 1: none.
        threshold: a bucket is in a more urgent class if the urgency of its first layer, ``1 - l/L``
            for the ``l``-th of ``L`` in the order of forward, is above this; falling numbers for
            several classes.
            ``"tuned"`` finds them out while training goes on; ``"coarse"`` has fully connected
            layers in the second of two classes, and all others in the first.
        steps: iterations in which each threshold is tried, with ``threshold="tuned"``.
        plan_file: where rank 0 keeps thresholds that were found; a run that finds it there does
            not tune.
        pushes: whether gradients go to the servers in these classes too.
        order: which sum a sender sends first: ``"ready"``, ``"urgent"``, and with
            ``pull="start"`` also ``"forward"`` or ``"random"``; see `wingbeat.parts.Servers`.
        mb: bucket size in MB (1 MB = 2**20 bytes); a parameter that is larger travels alone.
        compression: what gradients travel as: ``"fp32"`` (their own dtype); ``"bf16"`` or
            ``"fp16"``, ``"sketch"`` or ``"lowrank"``; or such a codec with its settings, as
            ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        back: what sums come back as then: ``"wire"``, the same; or ``"dense"``, in float32. With
            ``update="server"`` parameters do, always in their own dtype.
        encrypted: whether messages between workers and servers, gradients and what comes back
            among them, are.

    Raises:
        UsageError: a value out of range.
    """

    servers: int = 0
    placement: str = "sharded"
    slice: int = 1 << 20
    update: str = "worker"
    pull: str = "ready"
    classes: int = 1
    threshold: Threshold = field(default=THRESHOLD, metadata={READ: threshold_of})
    steps: int = STEPS
    plan_file: str = ""
    pushes: bool = True
    order: str = "ready"
    mb: float = 1.0
    compression: Wire = "fp32"
    back: str = "wire"
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_size("mb")
        self.check_name("update", UPDATES)
        self.compose()

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
        return Strategy(
            plan=parts.FixedBuckets(mb=self.mb, first_mb=0.0),
            compression=self.compression,
            exchange=parts.Servers(
                count=self.servers,
                placement=self.placement,
                slice=self.slice,
                classes=self.classes,
                threshold=self.threshold,
                steps=self.steps,
                file=self.plan_file,
                pushes=self.pushes,
                order=self.order,
                back=self.back,
                encrypted=self.encrypted,
            ),
            schedule=parts.Served(pull=self.pull),
            update=parts.OnServers() if self.update == "server" else "",
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Geryon(ParameterServer):
    """Servers whose urgent sums travel in flows that the network itself prefers (section III)."""

    classes: int = 2
