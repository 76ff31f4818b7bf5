"""What was measured of one model on one cluster, and what planning makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from wingbeat.compression import DTYPES, Coded, LowRank, TopK, for_parameter, least_bytes
from wingbeat.costs import NOTHING, Costs, Workload
from wingbeat.costs.fit import Fit, best_fit, fit_line
from wingbeat.errors import UsageError
from wingbeat.plans.planfile import digest
from wingbeat.probe.exchange import Samples
from wingbeat.probe.links import LinkSamples
from wingbeat.probe.matrices import Matrix, payload_of, weight
from wingbeat.types import TensorSpec

_SHOWN = 5
_FLAG_BYTES = 4
"""Beside what a codec writes, each parameter's flag travels as float32."""


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Plain collectives on one network interface, or on several together (OMGS-SGD, Eq. 11).

    Attributes:
        name: the interface's, or all names.
        all_gather: seconds by the bytes that each worker brings.
        all_reduce: seconds by the bytes of the buffer.
    """

    name: str
    all_gather: Fit
    all_reduce: Fit


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan of merged layers with which whole iterations were timed.

    Attributes:
        rules: names of the rules that make it.
        stops: before which gradients its buckets end, first ready first; rising.
        seconds: median of its iterations, each the mean of all workers.
    """

    rules: tuple[str, ...]
    stops: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The backward pass, what encoding and exchanging take, and the rest of an iteration.

    Attributes:
        workers: how many took part.
        links: rank 0's names of the network interfaces in use.
        wire: what gradients travel as, in words.
        way: ``"gather"``, ``"reduce"`` or ``"scatter"``, as in
            `wingbeat.probe.exchange.measure_wire`.
        tensors: index of each tensor in the model's list, first ready first.
        names: their names.
        ready_s: when each gradient is ready on the slowest worker, in seconds from the first,
            nothing but backward counted (Eqs. 2 and 7); never falls.
        encode: seconds by elements, on the thread that runs backward (Eq. 10).
        exchange: seconds by bytes of one worker's payload, decoding included (Eq. 11).
        interfaces: each network interface by itself, then all together if there are several.
        rest_s: seconds of an iteration outside of backward and exchange, and of the next forward
            with its all-gathers where there are such.
        cpu: seconds of processors that an exchange takes in all threads, by bytes of a payload;
            None where that was not measured.
        gather: seconds of the all-gather under the next forward, by bytes of a payload, where
            ``way`` is ``"scatter"``; None otherwise, and where it was not measured.
        contention: seconds by which backward is held up for each of those, beside it.
        matrices: what shapes cost that travel as factors.
        tried: plans that a trial has compared, the chosen one first; none where there was no trial.
    """

    workers: int
    links: tuple[str, ...]
    wire: str
    way: str
    tensors: tuple[int, ...]
    names: tuple[str, ...]
    ready_s: tuple[float, ...]
    encode: Fit
    exchange: Fit
    interfaces: tuple[LinkFit, ...]
    rest_s: float
    cpu: Fit | None = None
    gather: Fit | None = None
    contention: float = 0.0
    matrices: tuple[Matrix, ...] = ()
    tried: tuple[Tried, ...] = ()

    @property
    def backward_s(self) -> float:
        """Seconds from the first gradient to the last."""
        return self.ready_s[-1] if self.ready_s else 0.0

    def costs(self) -> Costs:
        """Return what a bucket of so many elements, or bytes, costs."""
        delay = NOTHING if self.cpu is None else self.cpu.curve.times(self.contention)
        gather = None if self.gather is None else self.gather.curve
        return Costs(self.encode.curve, self.exchange.curve, delay, gather)

    def workload(self, specs: Sequence[TensorSpec], nbytes: Sequence[float]) -> Workload:
        """Return the backward pass as `wingbeat.plans.merge` wants it.

        Args:
            specs: all tensors of the model.
            nbytes: what each of ``specs`` adds to a payload, as `payload_bytes` says.

        Raises:
            UsageError: the probe is of another model.
        """
        known = [specs[t].name if t < len(specs) else None for t in self.tensors]
        if known != list(self.names) or len(self.tensors) != len(specs):
            raise UsageError(
                f"the probe has {len(self.names)} tensors, the model {len(specs)} or others by "
                "name; measure this model anew"
            )
        return Workload(
            tensors=self.tensors,
            ready_s=self.ready_s,
            numels=tuple(specs[t].numel for t in self.tensors),
            nbytes=tuple(
                weight(specs[t].shape, float(nbytes[t]), self.matrices, self.exchange.curve)
                for t in self.tensors
            ),
            kinds=tuple(specs[t].kind for t in self.tensors),
        )

    def explain(self) -> list[str]:
        """Return what was found, in lines for people."""
        seconds = [0.0, *(b - a for a, b in pairwise(self.ready_s))]
        slowest = sorted(zip(seconds, self.names, strict=True), key=lambda pair: -pair[0])
        shown = ", ".join(f"{name} {1e3 * s:.3g} ms" for s, name in slowest[:_SHOWN] if s > 0)
        lines = [
            f"{self.workers} workers over {' + '.join(self.links)}, gradients as {self.wire}",
            f"backward: {1e3 * self.backward_s:.4g} ms from the first of {len(self.names)} "
            f"gradients to the last; the rest of an iteration: {1e3 * self.rest_s:.4g} ms",
            f"encoding, by elements: {self.encode.explain()}",
            f"exchange, by bytes: {self.exchange.explain()}",
        ]
        for each in self.matrices:
            lines.append(
                f"a matrix of {each.rows} x {each.cols} as factors: {each.nbytes:g} bytes, "
                f"{1e3 * each.exchange_s:.4g} ms"
            )
        if self.cpu is not None:
            lines.append(
                f"processors that an exchange takes, by bytes: {self.cpu.explain()}; each second "
                f"of them holds backward up by {self.contention:.3g} s"
            )
        if self.gather is not None:
            lines.append(f"all-gather under the next forward, by bytes: {self.gather.explain()}")
        for link in self.interfaces:
            lines.append(f"all-gather on {link.name}, by bytes: {link.all_gather.explain()}")
            lines.append(f"all-reduce on {link.name}, by bytes: {link.all_reduce.explain()}")
        if shown:
            lines.append(f"slowest gradients: {shown}")
        return lines + ([f"plans tried: {told(self.tried)}"] if self.tried else [])


def told(tried: Sequence[Tried]) -> str:
    """Say in one line which plans were compared, and how fast they are.

    >>> told([Tried(("paper",), (1, 3), 0.48), Tried(("exact", "one"), (3,), 0.5)])
    'paper (2 buckets) 480 ms, exact = one (1 bucket) 500 ms'
    """
    return ", ".join(
        f"{' = '.join(each.rules)} ({len(each.stops)} bucket{'s' * (len(each.stops) > 1)}) "
        f"{1e3 * each.seconds:.4g} ms"
        for each in tried
    )


def fitted(samples: Samples, wire: str | Coded) -> tuple[Fit, Fit]:
    """Return the fits of encoding and exchange; encoding top-k may follow Eq. 10."""
    density = wire.density if isinstance(wire, TopK) else None
    return best_fit(samples.encode, density=density), best_fit(samples.exchange)


def fitted_cpu(samples: Samples) -> Fit | None:
    """Return the fit of what exchanges take of processors; None where it was not measured."""
    return best_fit(samples.cpu) if samples.cpu else None


def fitted_links(links: Sequence[LinkSamples]) -> tuple[LinkFit, ...]:
    """Return alpha and beta of each interface."""
    return tuple(
        LinkFit(link.name, fit_line(link.all_gather), fit_line(link.all_reduce)) for link in links
    )


def wire_text(wire: str | Coded) -> str:
    """Return the words for a wire that files and people see: ``fp32`` is the gradients' own dtype.

    The density always stands there, whatever its default; a warm-up never: what is measured is what
    travels after it.

    >>> wire_text("bfloat16"), wire_text(TopK(density=0.01, warmup=9, momentum=0.9))
    ('bf16', 'TopK(density=0.01, momentum=0.9)')
    """
    if isinstance(wire, TopK):
        others = repr(replace(wire, density=TopK.density, warmup=TopK.warmup))
        density = f"TopK(density={wire.density!r}"
        return others.replace("TopK(", f"{density}, ").replace(", )", ")")
    spelling = {dtype: name for name, dtype in DTYPES.items()}
    return spelling.get(wire, wire) if isinstance(wire, str) else str(wire)


def payload_bytes(specs: Sequence[TensorSpec], wire: str | Coded) -> list[float]:
    """Return about how many bytes each tensor adds to a bucket's payload, its flag included.

    A group's density counts; that top-k sends a value at least does not.
    """
    each = []
    for spec in specs:
        mine = for_parameter(wire, spec.name)
        flag = least_bytes(mine, (1,), spec.itemsize) if isinstance(wire, str) else _FLAG_BYTES
        if isinstance(mine, LowRank) and not mine.summed:  # some matrices are not worth factors
            each.append(payload_of(spec, mine) + flag)
        else:
            each.append(float(least_bytes(mine, spec.shape, spec.itemsize) + flag))
    return each


def key_of(
    specs: Sequence[TensorSpec], workers: int, links: Sequence[str], wire: str | Coded, way: str
) -> dict[str, Any]:
    """Return what tells this model on this cluster from others, as JSON knows it.

    A digest of the parameters (names, shapes, dtypes, kind of device), the number of workers,
    the names of the network interfaces, the wire, and the way in which that is exchanged.
    """
    shapes = [
        [spec.name, list(spec.shape), spec.dtype, spec.device.partition(":")[0]] for spec in specs
    ]
    return {
        "parameters": digest(shapes),
        "workers": workers,
        "links": list(links),
        "wire": wire_text(wire),
        "way": way,
    }
