"""The duration of a bench's rows in virtual time, on the lab's links and processors."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

from wingbeat import simulator
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.model_averaging.options import Groups, Local, Outer, Pairs, PartnersPart
from wingbeat.parts import Bounded
from wingbeat.parts.strategy import Strategy
from wingbeat.simulator.codecs import Price, Prices
from wingbeat.types import Layout
from wingbeat_lab import paced
from wingbeat_lab.bench import results
from wingbeat_lab.bench.config import Checked
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.costs import Costs
from wingbeat_lab.bench.models import BenchModel
from wingbeat_lab.lab.spec import LabSpec

GOODPUT = 1448 / 1538
"""Payload share of a full frame on the wire: preamble, Ethernet, IP and TCP headers with time
stamps, checksum and the gap between frames are subtracted.
"""

LAB_WORK = simulator.Work(
    launch_s=85e-6,
    hook_s=15e-6,
    start_s=0.3e-3,
    step_s=0.45e-3,
    update_s=17e-6,
    update_s_per_byte=0.4e-9,
    wire_s_per_byte=0.4e-9,
    message_s=120e-6,
)
"""Processor time in a lab, where it differs from the simulator's defaults.

CPU time on an AMD EPYC (2026-11-27, load 7 to 30), the least of seven iterations. One process with
`PacedModel` and SGD, for resnet50, bert_base and vgg16 at scales of 0.002 to 0.25: 7.3 ms for the
forward of 107 layers and 11.2 ms for that of 118; 13.6 ms and 19.3 ms for the backward of 161 and
206 parameters; 2.7 and 4.1 ms for their update and 0.34 to 0.49 ns for each of its bytes.

Two workers in ``star:2@10gbit``, the training threads of resnet50 and vgg16 at scales of 0.01 and
0.002: in addition to a worker alone 3.9 and 1.8 ms for the hooks and starts of `AllReduce`, and 3.2
and 4.4 ms more for the steps by buckets of `DeAR`. Other threads, at 0.25 and 0.05: 20.4 ms for 51
MB in and out, 16.6 ms for 55 MB; the kernel's work for interfaces that is no process's is added, at
most 0.1 ns for each byte. Messages: servers of `Geryon` in ``star:4@4gbit``, resnet50 at 0.02 and
0.2: 28 ms for 172 messages, 53 ms for 354 and ten times the bytes.

Codecs take the simulator's seconds: in ``star:4@1gbit`` the lanes of resnet50, vgg16, alexnet and
bert_base packed a sketch in 0.42 to 0.48 ns for each byte, and unpacked it in 0.09 to 0.13 (one of
eight took longer).
"""


def work_inside(processes: int) -> simulator.Work:
    """Return the processor time of a replica of so many processes under FSDP2 over gloo, and AdamW.

    CPU time of a process of one replica alone with the feed-forward blocks of
    ``benchmarks/hsdp.py``, the least of nine iterations (2026-11-27, load 9): forward and backward,
    12 gathers and sums, take 13 ms with two processes and 26 ms with four for 0.5 MB of parameters,
    and 98 and 122 ms for 34 MB, computation included. AdamW: 4 ms for 16 parameters, and 15 ms for
    17 MB or 9 ms for 8 MB of them.
    """
    return replace(
        LAB_WORK,
        launch_s=0.0,
        inside_s=0.5e-3 * processes,
        inside_s_per_byte=0.85e-9,
        update_s_per_byte=0.6e-9,
    )


ROUNDING = 1e-6

AFTER = 3
"""Iterations after the timed ones, so that workers still train when the last timed one ends."""


def links_of(lab: LabSpec) -> simulator.Links:
    """Return the lab's links; UsageError if they cannot be simulated."""
    if lab.cross:
        raise UsageError(f"{lab}: cross-traffic cannot be simulated; leave cross out")
    rates: dict[int | tuple[int, int], float] = {}
    for override in lab.overrides:
        key = override.host if override.interface is None else (override.host, override.interface)
        rates[key] = override.rate / 8 * GOODPUT
    return simulator.Links(
        bytes_per_s=lab.rate / 8 * GOODPUT,
        count=lab.rails,
        priorities=lab.prio > 0,
        rates=rates,
        leaf=lab.leaf,
        trunk_bytes_per_s=lab.trunk / 8 * GOODPUT if lab.trunk else math.inf,
    )


LOW_RANK = (
    "Round.__init__",
    "Round.compute_second",
    "Round.keep_residual",
    "Round.write_result",
)
"""The four steps of low rank, in `results.Run.codec_prices`."""


def work_of(
    model: BenchModel, found: results.Prices | None = None, costs: Costs | None = None
) -> simulator.Work:
    """Return the processor time of a lab's workers with a paced model.

    As `wingbeat_lab.bench.pace` slows codecs, whose processors are idle for what is added, but for
    the fixed part of each call. With the prices that a row of the lab has ``found``, codecs have
    these; else those of the simulator. With the ``costs`` of this machine, training threads,
    messages and threads that wake have these, and codecs, which sleep after each call, occupy
    processors for longer by `Costs.cold`.
    """
    factor, work, cold = max(1.0, model.codec_factor), LAB_WORK, 1.0
    if costs is not None:
        cold = costs.cold
        work = replace(
            work,
            launch_s=costs.launch_s,
            wake_s=costs.wake_s,
            update_s=costs.update_s,
            update_s_per_byte=costs.update_s_per_byte,
            message_s=costs.message_s,
        )
    work = replace(work, codecs=factor, codecs_idle=max(0.0, 1 - cold / factor))
    return work if not found else replace(work, prices=_prices(found, model.stretch))


def _prices(found: results.Prices, stretch: float) -> Prices:
    def price(*names: str) -> Price:
        each = next((found[name] for name in names if name in found), None)
        return Price() if each is None else Price(stretch * each["fixed_s"], each["s_per_byte"])

    # Chunks of codecs that only Python has are packed as whole buckets are.
    first, between, keep, end = map(price, LOW_RANK)
    return Prices(
        pack=price("pack", "Coding.encode"),
        unpack=price("unpack", "Coding.decode"),
        encode=price("Coding.encode"),
        decode=price("Coding.decode"),
        factors=(first, between, keep, end),
    )


def machine_cores() -> int:
    """Return the processors that all hosts of a lab share."""
    return len(os.sched_getaffinity(0))


def iteration_s(
    checked: Checked,
    row: Contender,
    *,
    cores: int | None = None,
    prices: results.Prices | None = None,
    costs: Costs | None = None,
) -> float:
    """Seconds of the row's iteration: the median, or the mean of rows without lockstep.

    Plan, schedule and machine are those of the lab, links have the same rate less headers, and
    all hosts share the processors of this machine, or so many ``cores``. ``prices`` are those of
    the row's codec in a bench, ``costs`` those of the machine.

    UsageError if the model or the strategy cannot be simulated.
    """
    if checked.model.profile is None or row.strategy is None:
        raise UsageError(
            f"{row.text} with {checked.config.model}: only wingbeat's strategies on paced models "
            "can be simulated"
        )
    model = paced.simulator_model(checked.model.profile, checked.model.stretch)
    work, cores = work_of(checked.model, prices, costs), cores or machine_cores()
    links, strategy = links_of(checked.lab), row.strategy
    layout = Layout.even(checked.lab.hosts, checked.config.per_host)
    if isinstance(strategy.exchange, Bounded):
        return _bounded_s(checked, model, strategy, links, work, cores)
    if isinstance(strategy.exchange, PartnersPart):
        return _averaged_s(checked, model, strategy, links, work, layout)
    return simulator.simulate(
        model,
        strategy,
        checked.workers,
        links,
        layout=layout,
        work=work,
        cores=cores,
        one_machine=True,
    ).median_s


def _bounded_s(
    checked: Checked,
    model: simulator.Model,
    strategy: Strategy,
    links: simulator.Links,
    work: simulator.Work,
    cores: int,
) -> float:
    """Seconds of a mean iteration under bounded staleness."""
    bounded = strategy.exchange
    assert isinstance(bounded, Bounded), "it was asked for"
    lead, count = min(1, checked.config.warmup), checked.config.share(0)
    run = simulator.simulate_bounded(
        model,
        bound_of(strategy),
        checked.workers,
        links,
        gradients=(lead + count + AFTER) * checked.workers,
        network="bcube" if checked.lab.kind == "bcube" else "star",
        coding=simulator.coding_of(strategy.wire),
        work=work,
        cores=cores,
        encrypted=bounded.encrypted,
    )
    begin, end = timed(run.begun, lead, count)
    return (end - begin) / count


def bound_of(strategy: Strategy) -> StalenessBound:
    """Return the thresholds of a strategy of bounded staleness."""
    bounded = strategy.exchange
    assert isinstance(bounded, Bounded), "it was asked for"
    return bounded.thresholds(strategy.plan.fusion().layers)


def timed(
    begun: Sequence[Sequence[tuple[float, float]]], lead: int, count: int
) -> tuple[float, float]:
    """Return when so many iterations began and ended, as in a bench.

    Each worker starts to count after ``lead`` iterations of its own. It has ``count`` of them once
    as many more are in its weights, between two of its own; the last worker counts.

    Args:
        begun: by worker and iteration: when, and what was applied, from `simulator.StaleRun`.
    """
    begins = [each[lead] for each in begun]
    ends = [
        next(when for when, applied in each if applied - before > count - ROUNDING)
        for each, (_, before) in zip(begun, begins, strict=True)
    ]
    return max(when for when, _ in begins), max(ends)


def _averaged_s(
    checked: Checked,
    model: simulator.Model,
    strategy: Strategy,
    links: simulator.Links,
    work: simulator.Work,
    layout: Layout,
) -> float:
    """Seconds of a mean iteration with averages of models."""
    groups, local = strategy.exchange, strategy.schedule
    assert isinstance(local, Local), "the strategy has checked it"
    assert isinstance(groups, PartnersPart), "it was asked for"
    if isinstance(strategy.update_part, Outer) or strategy.update_part.in_parts:
        raise UsageError(f"{strategy}: an outer optimizer is not simulated; simulate Ripples()")
    iterations = checked.config.iterations
    if isinstance(groups, Pairs):
        if not local.delay:
            raise UsageError(f"{strategy}: averages of pairs are simulated with overlap only")
        return simulator.simulate_pairs(
            model,
            layout,
            links,
            work=work,
            iterations=iterations,
            seed=groups.seed,
            encrypted=groups.encrypted,
        ).iteration_s
    assert isinstance(groups, Groups), "there are no other partners"
    return simulator.simulate_groups(
        model,
        groups.rules,
        layout,
        links,
        work=work,
        overlap=local.delay > 0,
        every=local.every,
        compression=strategy.compression,
        iterations=iterations,
        seed=groups.seed,
    ).iteration_s
