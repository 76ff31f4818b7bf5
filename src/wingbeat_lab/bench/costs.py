"""What the work of a lab's workers costs on this machine's processors.

Processors differ, and so does one processor by its state: one that was idle resumes slowly, above
all in a virtual machine, and a thread that has slept finds its caches cold. Both cost a paced
model, which sleeps after most layers, more than its operations take in a loop. So costs are
measured where they arise, before rows are predicted: on two workers that train alone, and with
parameter servers, with few bytes and with many, and once with so little time for layers that
threads hardly sleep.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.simulated import planner_of
from wingbeat.simulator.cluster import coding_of
from wingbeat.simulator.model import ITEMSIZE, buckets_of
from wingbeat_lab import paced
from wingbeat_lab.bench import runner
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.results import SERVER, WORKER
from wingbeat_lab.paced.model import SHORTEST_SLEEP

SMALL, LARGE = "paced:resnet50@0.01", "paced:resnet50@0.2"
"""Models of two sizes: two points of each line in bytes."""

ROUNDS, ITERATIONS, WARMUP = 3, 10, 2
"""CPU seconds of processes are counted in steps of 10 ms, so some iterations are needed; and a
pause of the machine spoils a round, so the medians of three count.
"""

HURRIED, MANY = 0.02, 60
"""Factor of the layers' times with which workers hardly sleep, and iterations; links are faster,
too.
"""

SLEPT_S, TURNS, COPIED = 1e-3, 400, 250_000
"""Seconds of sleep before half of the calls, pairs of calls, and elements of a call: 1 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Processor time of a worker on one machine.

    Attributes:
        launch_s: seconds for each layer in forward and each parameter in backward.
        wake_s: seconds for each time that a thread continues after a wait, on an idle processor.
        update_s: seconds for each parameter updated.
        update_s_per_byte: seconds for each of its bytes.
        message_s: seconds for each message that a client or server sends or receives.
        cold: time of an operation on memory after a sleep, over that of the same operation before.
    """

    launch_s: float
    wake_s: float
    update_s: float
    update_s_per_byte: float
    message_s: float
    cold: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A worker's iteration without communication.

    Attributes:
        layers: of the model.
        parameters: of the model.
        nbytes: of all parameters.
        computed_s: seconds of forward and backward.
        sleeps: of the emulated device in forward and backward.
        iteration_s: seconds of an iteration.
        cpu_s: CPU seconds of an iteration.
    """

    layers: int
    parameters: int
    nbytes: int
    computed_s: float
    sleeps: int
    iteration_s: float
    cpu_s: float

    @property
    def updated_s(self) -> float:
        """Seconds of the optimizer: what is not computation."""
        return max(0.0, self.iteration_s - self.computed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a parameter server does in an iteration.

    Attributes:
        messages: that it receives and sends.
        nbytes: of these messages.
        cpu_s: CPU seconds.
    """

    messages: float
    nbytes: float
    cpu_s: float


def measure() -> Costs:
    """Measure the costs of this machine, in about two minutes."""
    found = [asdict(_measure_round()) for _ in range(ROUNDS)]
    return Costs(**{name: statistics.median(each[name] for each in found) for name in found[0]})


def _measure_round() -> Costs:
    small, large = (_measure(model) for model in (SMALL, LARGE))
    few, many = (_measure(model, HURRIED).served for model in (SMALL, LARGE))
    return costs_of(small.alone, large.alone, messages_of(small.served, few, many), cold())


class Messages(NamedTuple):
    """What messages cost a server, see `Costs`."""

    message_s: float
    wake_s: float


def costs_of(small: Alone, large: Alone, messages: Messages, cold: float) -> Costs:
    """Return the costs of which the iterations of two models of different size consist.

    Raises:
        ValueError: the large model is not larger.
    """
    if large.nbytes <= small.nbytes:
        raise ValueError(f"{large.nbytes} bytes of the large model, {small.nbytes} of the small")
    per_byte = (large.updated_s - small.updated_s) / (large.nbytes - small.nbytes)
    per_byte = max(0.0, per_byte)
    fixed = max(0.0, small.updated_s - small.nbytes * per_byte)
    launched = max(0.0, small.cpu_s - small.updated_s - small.sleeps * messages.wake_s)
    return Costs(
        launch_s=launched / (small.layers + small.parameters),
        wake_s=messages.wake_s,
        update_s=fixed / small.parameters,
        update_s_per_byte=per_byte,
        message_s=messages.message_s,
        cold=cold,
    )


def messages_of(small: Served, few: Served, many: Served) -> Messages:
    """Return what messages cost a server.

    Args:
        small: of a model; the server waits before each message that it receives.
        few: of the same model in a hurry: the server waits seldom.
        many: of a larger model in a hurry.
    """
    # CPU seconds are messages * message_s + nbytes * s_per_byte, in both cases.
    both = few.messages * many.nbytes - many.messages * few.nbytes
    message_s = (few.cpu_s * many.nbytes - many.cpu_s * few.nbytes) / both
    waits = small.messages / 2  # the other half are answers
    return Messages(max(0.0, message_s), max(0.0, (small.cpu_s - few.cpu_s) / waits))


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


class _Measured(NamedTuple):
    alone: Alone
    served: Served


def _measure(model: str, stretch: float = 1.0) -> _Measured:
    config = BenchConfig(
        lab="star:2@10gbit",
        model=model,
        strategies=("single", "geryon"),
        measure=False,
        iterations=ITERATIONS if stretch == 1.0 else MANY,
        rounds=1,
        warmup=WARMUP,
        stretch=stretch,
    )
    runs = runner.run(config, command=["wingbeat_lab.bench.costs"]).report.to_json()["runs"]
    alone, served = (run["cpu_s_per_iteration"] for run in runs)
    checked = config.check()
    return _Measured(
        alone_of(checked, runs[0]["typical_s"], alone[WORKER]),
        served_of(checked, served[SERVER]),
    )


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
        sleeps=sleeps_of(profile, checked.model.stretch),
        iteration_s=iteration_s,
        cpu_s=statistics.fmean(cpu_s),
    )


def served_of(checked: Checked, cpu_s: Sequence[float]) -> Served:
    """Return what each server of a config's last row did, which took so many CPU seconds each."""
    strategy, profile = checked.rows[-1].strategy, checked.model.profile
    assert strategy is not None, "it is a preset"
    assert isinstance(strategy.exchange, Servers), "it has servers"
    assert profile is not None, "it is paced"
    buckets = buckets_of(paced.simulator_model(profile), strategy.plan.fusion())
    coding = coding_of(strategy.wire)
    slices = planner_of(strategy.exchange, len(cpu_s), 0, buckets, 1, coding).slices()
    # Each worker pushes each slice to its server, and receives its sum.
    share = 2 * checked.workers / len(cpu_s)
    return Served(
        messages=share * len(slices),
        nbytes=share * ITEMSIZE * sum(map(len, slices)),
        cpu_s=statistics.fmean(cpu_s),
    )


def sleeps_of(profile: paced.Profile, stretch: float) -> int:
    """Return how often a paced model sleeps in an iteration, if nothing else takes time."""
    forward = [layer.forward_ms for layer in profile.layers]
    backward = [
        layer.backward_ms * spec.numel / layer.numel
        for layer in profile.layers
        for spec in layer.parameters
    ]
    count = 0
    for times_ms in (forward, backward):
        ahead_s = 0.0
        for each in times_ms:
            ahead_s += stretch * each / 1e3
            if ahead_s > SHORTEST_SLEEP:
                count, ahead_s = count + 1, 0.0
        count += ahead_s > 0.0  # at the end of a pass
    return count
