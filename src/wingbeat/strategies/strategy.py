"""A strategy: a composition of five parts, and the properties that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from wingbeat import compression, topologies
from wingbeat.compression import CodecOptions, Compression, LowRank, Sketch, TopK
from wingbeat.errors import UsageError
from wingbeat.parts import exchange as exchanges
from wingbeat.parts import partners
from wingbeat.parts import plan as plans
from wingbeat.parts import schedule as schedules
from wingbeat.parts import update as updates
from wingbeat.parts.exchange import Bounded, Partial, Servers
from wingbeat.parts.partners import Groups, Pairs, PartnersPart
from wingbeat.parts.plan import PlanPart
from wingbeat.parts.schedule import Local, SchedulePart
from wingbeat.parts.update import Averaged, Outer, UpdatePart
from wingbeat.settings import Named, Settings, named
from wingbeat.topologies import BCube, Topology
from wingbeat.traits import HALVES, KEPT, ONCE, Part, Traits
from wingbeat.types import Averaging, Choices

T = TypeVar("T")


def _bcube(size: tuple[int, int] = (0, 0)) -> BCube:
    return BCube(*size)


_EXCHANGES: Mapping[str, Named[Topology | Servers | Partial | Bounded | PartnersPart]] = {
    **{name: Named(type(topology)) for name, topology in topologies.BY_NAME.items()},
    "bcube": Named(_bcube, "size", topologies.parse_size),
    **exchanges.BY_NAME,
    **partners.BY_NAME,
}

_ANY_EXCHANGE = (Topology, Servers, Partial, Bounded, PartnersPart)


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(Settings):
    """A composition of parts for ``distribute``; ``compose()`` of a preset returns one.

    Each part is given as a value of `wingbeat.parts` or by its name, optionally with ``@`` and its
    main option: ``plan="merged@paper"``, ``compression="sketch@4"``.

    Args:
        plan: which tensors are sent together.
        compression: encoding of gradients: ``"fp32"`` (their own dtype), ``"bf16"``, or a codec.
        exchange: how gradients are exchanged: a topology, `wingbeat.parts.Servers`,
            `wingbeat.parts.Partial` or `wingbeat.parts.Bounded`; or with which workers models are
            averaged: `wingbeat.parts.Groups` or `wingbeat.parts.Pairs`.
        schedule: when buckets are sent, relative to forward and backward.
        update: where and when the optimizer is applied; empty: the schedule's default.

    Raises:
        UsageError: a part does not exist, or parts are incompatible.
    """

    plan: PlanPart | str = "fixed"
    compression: Compression = "fp32"
    exchange: Topology | Servers | Partial | Bounded | PartnersPart | str = "ring"
    schedule: SchedulePart | str = "wfbp"
    update: UpdatePart | str = ""

    def __post_init__(self) -> None:
        schedule = _part("schedule", self.schedule, SchedulePart, schedules.BY_NAME)
        coded = self.compression
        found: dict[str, Any] = {
            "plan": _part("plan", self.plan, PlanPart, plans.BY_NAME),
            "compression": coded if coded in compression.DTYPES else compression.parse(coded),
            "exchange": _part("exchange", self.exchange, _ANY_EXCHANGE, _EXCHANGES),
            "schedule": schedule,
        }
        if self.update != "":
            update = _part("update", self.update, UpdatePart, updates.BY_NAME)
            # The schedule's default equals an omitted update, and does not outlive a change of
            # schedule.
            found["update"] = "" if update == schedule.update else update
        for key, part in found.items():
            object.__setattr__(self, key, part)
        if isinstance(self.exchange, Servers):
            _check_served(self)
        elif isinstance(self.exchange, Partial):
            _check_partial(self)
        elif isinstance(self.exchange, Bounded):
            _check_bounded(self)
        elif isinstance(self.exchange, PartnersPart):
            _check_averaged(self)
        else:
            topologies.name_of(found["exchange"])
            _check_spanning(self)
        _check_needs(self._parts())
        _check_merged(self)

    def __repr__(self) -> str:
        usual = Strategy()
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = [f"{key}={part!r}" for key, part in given.items() if part != getattr(usual, key)]
        return f"Strategy({', '.join(shown)})"

    @property
    def _update(self) -> UpdatePart:
        schedule = cast(SchedulePart, self.schedule)
        return cast(UpdatePart, self.update) if self.update else schedule.update

    def _parts(self) -> list[Part]:
        parts = [self.plan, self.compression, self.exchange, self.schedule, self._update]
        return [part for part in parts if isinstance(part, Part)]

    @property
    def traits(self) -> Traits:
        """Properties that follow from all parts together."""
        parts, schedule = self._parts(), cast(SchedulePart, self.schedule)
        codec = self.compression if isinstance(self.compression, CodecOptions) else None
        return Traits(
            # A dtype is not a `Part`, so it is not in the list.
            exact=all(part.exact for part in parts)
            and (codec is not None or not compression.parse(self.compression)),
            synchronous=all(part.synchronous for part in parts),
            bound=getattr(self.exchange, "bound", schedule.bound),
            halves=HALVES in schedule.has,
            in_parts=self._update.in_parts,
            gathered=codec is not None and codec.gathers and ONCE in schedule.has,
        )

    def choices(self) -> Choices:
        """Return the strategy in the form that the engine reads."""
        plan, schedule = cast(PlanPart, self.plan), cast(SchedulePart, self.schedule)
        exchange = self.exchange
        served = exchange.serving() if isinstance(exchange, Servers) else None
        partial = exchange if isinstance(exchange, Partial) else None
        return Choices(
            schedule=schedule.machine,
            topology=_topology_of(exchange),
            servers=served,
            fusion=plan.fusion(),
            tuning=plan.tuning(),
            merging=plan.merging(),
            wire=_wire_of(self.compression, exchange),
            shard_optimizer=self._update.shards,
            server_updates=self._update.on_servers,
            partitions=None if partial is None else partial.partitions,
            staleness=exchange.staleness() if isinstance(exchange, Bounded) else None,
            averaging=self._averaging(),
        )

    def _averaging(self) -> Averaging | None:
        if not isinstance(self.exchange, PartnersPart):
            return None
        local, update = cast(Local, self.schedule), self._update
        return Averaging(
            every=local.every,
            delay=local.delay,
            outer=(update.lr, update.momentum) if isinstance(update, Outer) else None,
            state=isinstance(update, Averaged) and update.state,
            **self.exchange.averaging(),
        )

    def compose(self) -> Strategy:
        """Return this strategy, so that presets and strategies have the same interface."""
        return self

    def scaled(self, factor: float) -> Strategy:
        """Return the strategy for a model of ``factor`` the size; buckets and slices scale."""
        plan, exchange = cast(PlanPart, self.plan).scaled(factor), self.exchange
        if isinstance(exchange, Servers):
            exchange = exchange.scaled(factor)
        return replace(self, plan=plan, exchange=exchange)


def _part(question: str, value: Any, kind: Any, by_name: Mapping[str, Named[T]]) -> T:
    """Return the part itself, or the one of that name."""
    if isinstance(value, kind):
        part: T = value
        return part
    if isinstance(value, str):
        return named(question, value, by_name)
    shown = value.__name__ if isinstance(value, type) else repr(value)
    instead = f"{shown}()" if isinstance(value, type) and issubclass(value, kind) else "a value"
    raise UsageError(
        f"Strategy({question}={shown}): pass {instead} of wingbeat.parts, or a name; allowed: "
        f"{', '.join(by_name)}"
    )


def _check_needs(parts: list[Part]) -> None:
    """Raise a `UsageError` if a part needs something that no other part provides."""
    offered = frozenset().union(*(part.has for part in parts))
    for part in parts:
        for need in sorted(part.needs - offered):
            fit = [entry.make() for entry in schedules.BY_NAME.values()]
            having = [f"schedule={one!r}, which {one.of} has" for one in fit if need in one.has]
            if need in Servers.has:
                having.append("exchange=Servers()")
            if need in Bounded.has:
                having.append("exchange=Bounded()")
            if need in PartnersPart.has:
                having += ["exchange=Groups()", "exchange=Pairs()"]
            others = ", ".join(repr(other) for other in parts if other is not part)
            raise UsageError(
                f"{part!r} needs {need}, which none of {others} has; allowed: {'; '.join(having)}"
            )


def _check_spanning(strategy: Strategy) -> None:
    """Raise a `UsageError` for a codec whose payloads cannot be sent along the topology."""
    topology, wire = cast(Topology, strategy.exchange), compression.parse(strategy.compression)
    codec = isinstance(wire, CodecOptions) and not wire.summed
    if topology.spans_links and codec and not strategy.traits.gathered:
        raise UsageError(
            f"Strategy(exchange={topology!r}, compression={strategy.compression!r}): what is "
            "encoded goes straight to the worker that sums it, and most are no neighbours there; "
            'allowed: "bf16", "fp32", TopK() with whole all-reduces, or exchange="mesh"'
        )


def _check_merged(strategy: Strategy) -> None:
    """Raise a `UsageError` for a compression whose cost a measured plan cannot model."""
    wire, plan = strategy.compression, cast(PlanPart, strategy.plan)
    if plan.merging() is None or not isinstance(wire, Sketch | LowRank):
        return
    if wire.ends_after is not None or wire.groups:
        raise UsageError(
            f"Strategy(plan={plan!r}, compression={wire!r}): layers are merged by what one codec "
            "costs all of them, always; leave out groups and share, or take another plan, such as "
            "FixedBuckets()"
        )


def _topology_of(exchange: Any) -> str:
    if isinstance(exchange, Partial):
        return exchange.topology
    other = isinstance(exchange, Servers | Bounded | PartnersPart)
    return "ring" if other else topologies.name_of(exchange)


def _check_partial(strategy: Strategy) -> None:
    """Raise a `UsageError` for parts that partial exchange does not support."""
    where = f"Strategy(exchange={strategy.exchange!r}"
    if strategy.compression not in compression.DTYPES:
        raise UsageError(
            f"{where}, compression={strategy.compression!r}): parts of gradients travel as they "
            'are, or rounded; allowed: "fp32", "bf16", or a topology as the exchange'
        )
    plan = cast(PlanPart, strategy.plan)
    if plan.merging() is not None:
        raise UsageError(
            f"{where}, plan={plan!r}): layers are merged by what whole all-reduces cost; allowed: "
            "another plan, such as FixedBuckets(), or a topology as the exchange"
        )


def _wire_of(wire: Compression, exchange: Any) -> str | compression.Coded:
    """Return the encoding of gradients; only workers in lockstep can disable a codec together."""
    found = compression.parse(wire)
    if isinstance(found, str) or not isinstance(exchange, Bounded | PartnersPart):
        return found
    if isinstance(found, TopK) and isinstance(exchange, PartnersPart):
        return replace(found, auto_disable=False, warmup=0)
    return found.without_trial()


def _check_bounded(strategy: Strategy) -> None:
    """Raise a `UsageError` for parts that require lockstep or cannot be summed in pieces."""
    where, wire = f"Strategy(exchange={strategy.exchange!r}", strategy.compression
    if wire == "bf16" or isinstance(wire, TopK):
        raise UsageError(
            f"{where}, compression={wire!r}): pieces are summed by their owners and sent on in the "
            'same form; allowed: Sketch(), LowRank(), Half(), "fp32", or a topology as the exchange'
        )
    if isinstance(wire, CodecOptions) and wire.ends_after is not None:
        raise UsageError(
            f"{where}, compression={wire!r}): the first part of a training ends in another "
            "iteration on each worker; leave share out, or take a topology as the exchange"
        )
    plan = cast(PlanPart, strategy.plan)
    if plan.tuning() is not None or plan.merging() is not None:
        raise UsageError(
            f"{where}, plan={plan!r}): what is tried or measured while training goes on is decided "
            "by all workers at once, who make iterations of their own here; allowed: "
            "plan=Colayers(), or another fixed plan, such as Layers()"
        )
    if plan.fusion().measured and cast(Bounded, strategy.exchange).exact:
        raise UsageError(
            f"{where}, plan={plan!r}): colayers are made anew where workers settle, and with s=0 "
            "gradients stay in their buckets; leave measured out, or take s=1 or more"
        )


def _check_averaged(strategy: Strategy) -> None:
    """Raise a `UsageError` for parts that model averaging does not support."""
    exchange, wire = strategy.exchange, strategy.compression
    where = f"Strategy(exchange={exchange!r}"
    plan, update = cast(PlanPart, strategy.plan), strategy._update
    if plan.tuning() is not None or plan.merging() is not None:
        raise UsageError(
            f"{where}, plan={plan!r}): what is averaged together does not change while training "
            "goes on; allowed: plan=OneBucket(), or another fixed plan, such as Layers()"
        )
    alike = isinstance(exchange, Groups) and exchange.policy == "all"
    if isinstance(update, Outer) and isinstance(exchange, Pairs):
        raise UsageError(
            f"{where}, update={update!r}): others average with a worker at any moment of its "
            'round; allowed: Groups(), or update="averaged"'
        )
    if wire not in compression.DTYPES and not (alike and isinstance(update, Outer)):
        raise UsageError(
            f"{where}, compression={wire!r}, update={update!r}): models travel as they are, or "
            'rounded; through a codec, differences from the model that all share: allowed: "fp32", '
            '"bf16", or Groups(policy="all") and Outer(), as in LocalSGD and DiLoCo'
        )
    if wire == "bf16" and not alike and isinstance(update, Outer):
        raise UsageError(
            f"{where}, compression={wire!r}, update={update!r}): what rounding takes from models "
            'is as much as they have moved; allowed: "fp32", or Groups(policy="all")'
        )
    if isinstance(wire, CodecOptions):
        _check_differences(where, wire)


def _check_differences(where: str, wire: CodecOptions) -> None:
    """Raise a `UsageError` for options of a codec that apply to gradients only."""
    if wire.ends_after is not None:
        raise UsageError(
            f"{where}, compression={wire!r}): iterations are not counted by averages; leave share "
            "out"
        )
    if isinstance(wire, TopK) and wire.momentum:
        raise UsageError(
            f"{where}, compression={wire!r}): momentum correction is of gradients, and here the "
            "outer optimizer has momentum; write momentum=0, and Outer(momentum=...)"
        )
    if isinstance(wire, TopK) and wire.warmup not in (0, TopK.warmup):
        raise UsageError(
            f"{where}, compression={wire!r}): differences of many steps travel at one density from "
            "the first on; leave warmup out"
        )


def _check_served(strategy: Strategy) -> None:
    """Raise a `UsageError` for parts that parameter servers do not support."""
    if isinstance(strategy.compression, TopK):
        raise UsageError(
            f"Strategy(exchange={strategy.exchange!r}, compression={strategy.compression!r}): each "
            "worker sends other elements, and servers sum all; allowed: Sketch(), LowRank(), "
            'Half(), "bf16", "fp32", or a topology as the exchange, as in '
            'AllReduce(compression="topk") and OMGS()'
        )
    exchange = cast(Servers, strategy.exchange)
    if exchange.back == "dense" and not compression.parse(strategy.compression):
        raise UsageError(
            f"Strategy(exchange={exchange!r}, compression={strategy.compression!r}): sums are "
            'dense as it is; back="dense" is for another compression, such as "bf16" or Sketch()'
        )
    schedule = cast(SchedulePart, strategy.schedule)
    if exchange.order in exchanges.ASKED and KEPT not in schedule.needs:
        raise UsageError(
            f"Strategy(exchange={exchange!r}, schedule={schedule!r}): sums come by themselves, and "
            f"order={exchange.order!r} is one of sums that are asked for; allowed: "
            'order="ready" or "urgent", or pull="start"'
        )
    plan = cast(PlanPart, strategy.plan)
    if plan.merging() is not None:
        raise UsageError(
            f"Strategy(exchange={strategy.exchange!r}, plan={plan!r}): layers are merged by what "
            "collectives cost, and servers are none; allowed: another plan, such as "
            "FixedBuckets(), or a topology as the exchange"
        )
