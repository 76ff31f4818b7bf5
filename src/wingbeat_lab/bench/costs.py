"""What the work of a lab's workers costs on this machine's processors.

Processors differ, and so does one processor by its state: a thread that has slept finds its caches
cold, and a virtual machine's processor that was idle resumes slowly. Both cost a paced model, which
sleeps after each layer, more than its operations take in a loop. So costs are measured where they
arise, before rows are predicted: on two workers that train alone, with few bytes and with many.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wingbeat_lab.bench import runner
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.results import WORKER

SMALL, LARGE = "paced:resnet50@0.01", "paced:resnet50@0.2"
"""Models that train alone: two points of each line in bytes."""

ITERATIONS, WARMUP = 8, 2

SLEPT_S, TURNS, COPIED = 1e-3, 400, 250_000
"""Seconds of sleep before half of the calls, pairs of calls, and elements of a call: 1 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Processor time of a worker on one machine.

    Attributes:
        launch_s: seconds for each layer in forward and each parameter in backward.
        update_s: seconds for each parameter updated.
        update_s_per_byte: seconds for each of its bytes.
        cold: time of an operation on memory after a sleep, over that of the same operation before.
    """

    launch_s: float
    update_s: float
    update_s_per_byte: float
    cold: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A worker's iteration without communication.

    Attributes:
        layers: of the model.
        parameters: of the model.
        nbytes: of all parameters.
        computed_s: seconds of forward and backward.
        iteration_s: seconds of an iteration.
        cpu_s: CPU seconds of an iteration.
    """

    layers: int
    parameters: int
    nbytes: int
    computed_s: float
    iteration_s: float
    cpu_s: float

    @property
    def updated_s(self) -> float:
        """Seconds of the optimizer: what is not computation."""
        return max(0.0, self.iteration_s - self.computed_s)


def measure() -> Costs:
    """Measure the costs of this machine, in about 20 seconds."""
    return costs_of(_alone(SMALL), _alone(LARGE), cold())


def costs_of(small: Alone, large: Alone, cold: float) -> Costs:
    """Return the costs of which the iterations of two models of different size consist.

    Raises:
        ValueError: the large model is not larger.
    """
    if large.nbytes <= small.nbytes:
        raise ValueError(f"{large.nbytes} bytes of the large model, {small.nbytes} of the small")
    per_byte = (large.updated_s - small.updated_s) / (large.nbytes - small.nbytes)
    per_byte = max(0.0, per_byte)
    fixed = max(0.0, small.updated_s - small.nbytes * per_byte)
    launched = max(0.0, small.cpu_s - small.updated_s)
    return Costs(
        launch_s=launched / (small.layers + small.parameters),
        update_s=fixed / small.parameters,
        update_s_per_byte=per_byte,
        cold=cold,
    )


def cold() -> float:
    """Return how much longer adding to 1 MB takes this thread after a sleep; at least 1."""
    values, total = torch.ones(COPIED), torch.zeros(COPIED)
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(TURNS):
        for slept, own in zip((0.0, SLEPT_S), seconds, strict=True):
            time.sleep(slept)
            began = time.thread_time()
            total.add_(values)
            own.append(time.thread_time() - began)
    warm, after = map(statistics.median, seconds)
    return max(1.0, after / warm)


def _alone(model: str) -> Alone:
    config = BenchConfig(
        lab="star:2@10gbit",
        model=model,
        strategies=("single",),
        measure=False,
        iterations=ITERATIONS,
        rounds=1,
        warmup=WARMUP,
    )
    run = runner.run(config, command=["wingbeat_lab.bench.costs"]).report.to_json()["runs"][0]
    return alone_of(config.check(), run["typical_s"], run["cpu_s_per_iteration"][WORKER])


def alone_of(checked: Checked, iteration_s: float, cpu_s: Sequence[float]) -> Alone:
    """Return the iteration of a paced model whose workers took so many CPU seconds each."""
    profile = checked.model.profile
    assert profile is not None, "it is paced"
    specs = [spec for layer in profile.layers for spec in layer.parameters]
    computed = checked.model.compute_s()
    assert computed is not None, "it is paced"
    return Alone(
        layers=len(profile.layers),
        parameters=len(specs),
        nbytes=profile.nbytes,
        computed_s=sum(computed),
        iteration_s=iteration_s,
        cpu_s=statistics.fmean(cpu_s),
    )
