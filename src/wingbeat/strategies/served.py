"""The presets with parameter servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from wingbeat import parts
from wingbeat.compression import Compression
from wingbeat.parts.exchange import STEPS, THRESHOLD, Threshold, threshold_of
from wingbeat.settings import READ
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.strategy import Strategy

UPDATES = ("worker", "server")


@dataclass(frozen=True, kw_only=True, repr=False)
class ParameterServer(Preset):
    """Servers sum the gradients and return the sums before the layers that need them run.

    Geryon (Wang et al., 2020). wingbeat starts the servers next to the workers and stops them with
    the job. Parameters of a layer are updated just before the layer runs, by each worker or by the
    servers. Exact with ``compression="fp32"``: the weights equal DDP's.

    Args:
        servers: number of servers; 0: one on each host.
        placement: ``"sharded"``, a part of every bucket on each server; or ``"whole"``, each bucket
            on one server.
        slice: largest number of elements that a server sums at a time; 0: shards are not cut. Whole
            buckets are not cut either.
        update: where the optimizer runs. ``"worker"``: on each worker, for the parameters that it
            needs next. ``"server"``, as in the paper: on the servers, which hold its state and
            return parameters in place of sums; for element-wise optimizers.
        pull: when a sum is sent to the workers: ``"ready"``, as soon as it is complete; or
            ``"start"``, when the next iteration starts, as in the paper.
        classes: number of traffic classes that the network distinguishes (DSCP), 1 to 4; 1: no
            priorities.
        threshold: a bucket is sent in a more urgent class if the urgency of its first layer,
            ``1 - l/L`` for the ``l``-th of ``L`` layers in forward order, exceeds this; decreasing
            numbers for several classes. ``"tuned"``: tuned during training. ``"coarse"``: fully
            connected layers in the second of two classes, all others in the first.
        steps: iterations for which each threshold is tried, with ``threshold="tuned"``.
        plan_file: file in which rank 0 stores tuned thresholds; a run that finds the file does not
            tune.
        pushes: send gradients to the servers in these classes too.
        order: which sum is sent first: ``"ready"``, ``"urgent"``, and with ``pull="start"`` also
            ``"forward"`` or ``"random"``; see `wingbeat.parts.Servers`.
        mb: bucket size in MB (1 MB = 2**20 bytes); a larger parameter is sent alone.
        compression: encoding of gradients: ``"fp32"`` (their own dtype), ``"bf16"``, ``"fp16"``,
            ``"sketch"`` or ``"lowrank"``, or a codec's settings, such as
            ``wingbeat.Sketch(bits=4)``. All but fp32 are not exact.
        back: encoding of the sums: ``"wire"``, as the gradients; or ``"dense"``, float32. With
            ``update="server"`` parameters are returned, always in their own dtype.
        encrypted: encrypt all messages between workers and servers.

    Raises:
        UsageError: a value is out of range.
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
    compression: Compression = "fp32"
    back: str = "wire"
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_size("mb")
        self.check_name("update", UPDATES)
        self.compose()

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
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
    """Parameter servers whose urgent sums are sent in prioritised network flows (section III)."""

    classes: int = 2
