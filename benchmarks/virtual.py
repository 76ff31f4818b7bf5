"""Predictions in virtual time: a job under bounded staleness, and its baselines.

Shared by `canary_virtual.py` and the programs that compare predictions with measurements.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from wingbeat import simulator
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.simulated import bundled
from wingbeat.parts import Servers
from wingbeat.simulator.run import Sleeps
from wingbeat_lab import baselines, paced
from wingbeat_lab.bench import slow

GOODPUT = 1448 / 1538
BASELINES = {
    "bml": "bml",
    "ring": "allreduce:topology=ring",
    "ako": "ako",
    "ps": "vanillaps:servers=1,encrypted=false",
}
CODINGS = {
    "dense": simulator.Coding(),
    "sketch": simulator.SKETCH,
    "sketch, free": simulator.Coding(ratio=simulator.SKETCH.ratio),
}
"""Encodings of gradients; ``free`` has no encoding cost."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on workers with interfaces.

    Attributes:
        profile: of the model, and of the device.
        workers: number of workers.
        gbit: of each interface.
        interfaces: of each worker.
        slows: as for ``wingbeat bench --slow``.
        seed: draws the workers of ``random:``.
        stretch: factor on the profile's times.
        work: CPU costs of communication; gradients are copied, and parameters updated, on other
            devices.
        quantum: bytes of a message that a NIC sends before it switches to another one.
    """

    profile: str
    workers: int
    gbit: float = 10.0
    interfaces: int = 2
    slows: tuple[str, ...] = ()
    seed: int = 1
    stretch: float = 1.0
    work: simulator.Work = field(
        default_factory=lambda: simulator.Work(fill_s_per_byte=0.0, update_s_per_byte=0.0)
    )
    quantum: int = 1 << 20

    @cached_property
    def model(self) -> simulator.Model:
        return paced.simulator_model(paced.load_profile(self.profile), self.stretch)

    @property
    def batch(self) -> int:
        return paced.load_profile(self.profile).batch_size

    @cached_property
    def alone_s(self) -> float:
        """An iteration of a worker that does not wait."""
        return bundled(self.model, 1).seconds

    def links(self, interfaces: int | None = None) -> simulator.Links:
        return simulator.Links(
            bytes_per_s=self.gbit * 1e9 / 8 * GOODPUT,
            count=interfaces or self.interfaces,
            quantum=self.quantum,
        )

    @property
    def sleeps(self) -> Sleeps | None:
        if not self.slows:
            return None
        found = slow.parse(self.slows, workers=self.workers, iterations=10**9)

        def seconds(rank: int, iteration: int) -> float:
            factor = slow.factor(
                found, rank=rank, iteration=iteration, workers=self.workers, seed=self.seed
            )
            return factor * self.alone_s

        return seconds


@dataclass(frozen=True)
class Predicted:
    """The prediction of a row.

    Attributes:
        seconds: until all replicas have the contributions.
        contributions: of one worker and one iteration each.
        sent: mean bytes by worker, and the part of them that was forwarded in a BCube.
        traffic: over time.
        run: additional results under bounded staleness.
        took_s: seconds of this machine.
    """

    seconds: float
    contributions: float
    sent: float
    traffic: simulator.Traffic
    run: simulator.StaleRun | None = None
    took_s: float = 0.0

    def plain(self, setting: Setting) -> dict[str, Any]:
        """Return the row for JSON."""
        rounds = self.contributions / setting.workers
        row: dict[str, Any] = {
            "seconds": self.seconds,
            "iterations_s": self.seconds / rounds,
            "images_per_s": self.contributions * setting.batch / self.seconds,
            "speedup": self.contributions * setting.alone_s / self.seconds,
            "mb_sent_per_iteration": self.sent / rounds / 1e6,
            "took_s": self.took_s,
        }
        if self.run is not None:
            row |= {
                "begun": sum(self.run.iterations),
                "dropped": sum(self.run.dropped),
                "lost": self.run.lost,
                "rounds": self.run.rounds,
                "waited": statistics.fmean(self.run.waited_s) / self.seconds,
                "lags": self.run.lags,
                "delays": self.run.delays,
                "mean_delay": mean(self.run.delays),
            }
        return row


def mean(counts: Mapping[int, float]) -> float:
    """Return the mean of the counters."""
    return sum(value * count for value, count in counts.items()) / sum(counts.values())


def canary(
    setting: Setting,
    bound: StalenessBound,
    rounds: int,
    *,
    coding: str = "dense",
    network: str = "star",
    pool: bool = False,
    span_s: float = 0.5,
) -> Predicted:
    """Predict bounded staleness until all replicas have ``rounds`` contributions of each worker."""
    traffic, began = simulator.Traffic(span_s), time.perf_counter()
    run = simulator.simulate_bounded(
        setting.model,
        bound,
        setting.workers,
        setting.links(),
        gradients=rounds * setting.workers,
        network=network,
        coding=CODINGS[coding],
        work=setting.work,
        sleeps=setting.sleeps,
        traffic=traffic,
        pool=pool,
    )
    return Predicted(
        run.seconds,
        rounds * setting.workers,
        statistics.fmean(traffic.sent.values()),
        traffic,
        run,
        time.perf_counter() - began,
    )


def baseline(setting: Setting, name: str, rounds: int, *, span_s: float = 0.5) -> Predicted:
    """Predict one of `BASELINES`; each of its iterations is the same contributions.

    Servers have one interface, as in the paper's tree; the others all of them.
    """
    traffic, began = simulator.Traffic(span_s), time.perf_counter()
    strategy = baselines.parse(BASELINES[name])
    iterations = rounds
    run = simulator.simulate(
        setting.model,
        strategy,
        setting.workers,
        setting.links(1 if isinstance(strategy.exchange, Servers) else None),
        work=setting.work,
        sleeps=setting.sleeps,
        iterations=iterations,
        traffic=traffic,
    )
    return Predicted(
        math.fsum(run.iterations_s),
        iterations * setting.workers,
        statistics.fmean(traffic.sent.values()),
        traffic,
        took_s=time.perf_counter() - began,
    )
