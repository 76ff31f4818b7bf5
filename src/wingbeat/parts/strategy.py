"""A strategy: a composition of five parts, and the properties that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from wingbeat import compression as codecs
from wingbeat.compression import CodecOptions, Coded, Compression
from wingbeat.errors import UsageError
from wingbeat.parts import names
from wingbeat.parts.plan import PlanPart
from wingbeat.parts.schedule import SchedulePart
from wingbeat.parts.update import UpdatePart
from wingbeat.settings import Named, Settings, named
from wingbeat.topologies import Topology, name_of
from wingbeat.traits import HALVES, ONCE, ExchangePart, Part, Traits

T = TypeVar("T")


@dataclass(frozen=True, init=False, repr=False)
class Strategy(Settings):
    """A composition of parts for ``distribute``; each preset is a function that returns one.

    Each part is given as a value of `wingbeat.parts` or by its name, optionally with ``@`` and its
    main option: ``plan="merged@paper"``, ``compression="sketch@4"``.

    Args:
        plan: which tensors are sent together.
        compression: encoding of gradients: ``"fp32"`` (their own dtype), ``"bf16"``, or a codec.
        exchange: how gradients are exchanged: a topology, `wingbeat.parts.Servers` or
            `wingbeat.parts.Bounded`; or with which workers models are averaged:
            `wingbeat.parts.Groups` or `wingbeat.parts.Pairs`.
        schedule: when buckets are sent, relative to forward and backward.
        update: where and when the optimizer is applied; empty: the schedule's default.

    Raises:
        UsageError: a part does not exist, or parts are incompatible.
    """

    plan: PlanPart
    compression: Compression
    exchange: ExchangePart
    schedule: SchedulePart
    update: UpdatePart | str

    _call = ""
    """The call of the preset that has made it; a copy with other parts has none."""

    def __init__(
        self,
        *,
        plan: PlanPart | str = "fixed",
        compression: Compression = "fp32",
        exchange: ExchangePart | str = "ring",
        schedule: SchedulePart | str = "wfbp",
        update: UpdatePart | str = "",
    ) -> None:
        plain = isinstance(compression, str) and compression in codecs.DTYPES
        found: dict[str, Any] = {
            "plan": _part("plan", plan, PlanPart, names.PLANS),
            "compression": compression if plain else codecs.parse(compression),
            "exchange": _part("exchange", exchange, ExchangePart, names.EXCHANGES),
            "schedule": _part("schedule", schedule, SchedulePart, names.SCHEDULES),
        }
        if update != "":
            update = _part("update", update, UpdatePart, names.UPDATES)
        # The schedule's default equals an omitted update, so it does not outlive a change of it.
        found["update"] = "" if update == found["schedule"].update else update
        for key, part in found.items():
            object.__setattr__(self, key, part)
        _ = self.topology  # other workers must be able to name it
        self.exchange.check(self)
        self._check_needs()
        if self.plan.choosing() and not (self.exchange.collective and self.machine == "dear"):
            raise UsageError(
                f"Strategy(plan={self.plan!r}, exchange={self.exchange!r}, "
                f"schedule={self.schedule!r}, update={self.update_part!r}): schedules are chosen "
                "where collectives sum gradients and each worker has the whole optimizer; allowed: "
                "a topology, schedule=Decoupled(), update=Deferred()"
            )
        if self.plan.merging() and self.codec is not None and self.codec.selective:
            raise UsageError(
                f"Strategy(plan={self.plan!r}, compression={self.codec!r}): layers are merged by "
                "what one codec costs all of them, always; leave out groups and share, or take "
                "another plan, such as FixedBuckets()"
            )

    def called(self, call: str) -> Strategy:
        """Return the strategy itself, with the ``call`` of a preset as its repr."""
        object.__setattr__(self, "_call", call)
        return self

    def __repr__(self) -> str:
        if self._call:
            return self._call
        usual = Strategy()
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = [f"{key}={part!r}" for key, part in given.items() if part != getattr(usual, key)]
        return f"Strategy({', '.join(shown)})"

    @property
    def update_part(self) -> UpdatePart:
        """The update, which is the schedule's default if none was given."""
        return self.schedule.update if isinstance(self.update, str) else self.update

    @property
    def codec(self) -> CodecOptions | None:
        """The options of the codec, if ``compression`` is one."""
        return codecs.codec_of(self.compression)

    @property
    def wire(self) -> str | Coded:
        """The dtype or codec of what is sent; empty: its own dtype."""
        codec = self.codec
        return codecs.parse(self.compression) if codec is None else self.exchange.codec(codec)

    @property
    def topology(self) -> str:
        """The name of the topology of collectives."""
        exchange = self.exchange
        return name_of(exchange) if isinstance(exchange, Topology) else exchange.topology

    @property
    def machine(self) -> str:
        """The name of the state machine in `wingbeat.schedules.BY_NAME`."""
        return self.update_part.machine(self.schedule.machine)

    @property
    def traits(self) -> Traits:
        """Properties that follow from all parts together."""
        parts, codec = self._parts(), self.codec
        return Traits(
            # A dtype is not a `Part`, so it is not in the list.
            exact=all(part.exact for part in parts) and self.compression != "bf16",
            synchronous=all(part.synchronous for part in parts),
            bound=self.exchange.bound or self.schedule.bound,
            halves=HALVES in self.schedule.has,
            in_parts=self.update_part.in_parts,
            gathered=codec is not None and codec.gathers and ONCE in self.schedule.has,
        )

    def scaled(self, factor: float) -> Strategy:
        """Return the strategy for a model of ``factor`` the size; buckets and slices scale."""
        plan, exchange = self.plan.scaled(factor), self.exchange.scaled(factor)
        return replace(self, plan=plan, exchange=exchange)

    def _parts(self) -> list[Part]:
        parts = [self.plan, self.codec, self.exchange, self.schedule, self.update_part]
        return [part for part in parts if part is not None]

    def _check_needs(self) -> None:
        """Raise a `UsageError` if a part needs something that no other part provides."""
        parts = self._parts()
        offered = frozenset().union(*(part.has for part in parts))
        for part in parts:
            for need in sorted(part.needs - offered):
                having = [
                    f"schedule={one!r}, which {one.of} has"
                    for one in (entry.make() for entry in names.SCHEDULES.values())
                    if need in one.has
                ]
                others = (entry.make() for entry in names.EXCHANGES.values())
                having += [f"exchange={one!r}" for one in others if need in one.has]
                rest = ", ".join(repr(other) for other in parts if other is not part)
                raise UsageError(
                    f"{part!r} needs {need}, which none of {rest} has; allowed: {'; '.join(having)}"
                )


def _part(question: str, value: Any, kind: type[T], by_name: Mapping[str, Named[T]]) -> T:
    """Return the part itself, or the one of that name."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        return named(question, value, by_name)
    shown = value.__name__ if isinstance(value, type) else repr(value)
    instead = f"{shown}()" if isinstance(value, type) and issubclass(value, kind) else "a value"
    raise UsageError(
        f"Strategy({question}={shown}): pass {instead} of wingbeat.parts, or a name; allowed: "
        f"{', '.join(by_name)}"
    )
