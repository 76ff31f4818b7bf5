"""Throughput as a function of the bucket size: invented ones, and DeAR simulated on real shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from wingbeat.planning.plans import by_size
from wingbeat.types import TensorSpec
from wingbeat_lab import paced

MB = 2**20
GRID = [100 ** (i / 19) for i in range(20)]
"""20 sizes from 1 to 100 MB, evenly spaced in their logarithm."""

Curve = Callable[[float], float]
"""From a size in MB to iterations per second."""


def invented() -> dict[str, Curve]:
    """Latency a/x and waiting b*x in several mixtures, plateaus, steps, hills."""
    curves: dict[str, Curve] = {
        f"a={a} b={b}": functools.partial(lambda a, b, x: 1 / (0.3 + a / x + b * x), a, b)
        for a in (0.02, 0.1, 0.5, 2)
        for b in (0.0005, 0.002, 0.01, 0.03)
    }
    curves["flat"] = lambda x: 2.0
    curves["plateau from 5 MB"] = lambda x: min(1.0, 0.5 + 0.1 * x)
    curves["plateau from 70 MB"] = lambda x: min(1.0, 0.3 + 0.01 * x)
    curves["step down at 5 MB"] = lambda x: 1.3 if x < 5 else 1.0
    curves["step up at 60 MB"] = lambda x: 1.2 if x > 60 else 1.0
    curves["hill at 4 MB"] = lambda x: 0.6 + 0.4 * math.exp(-(math.log2(x / 4) ** 2))
    curves["two hills"] = lambda x: (
        0.6
        + 0.3 * math.exp(-((math.log2(x / 2) / 0.7) ** 2))
        + 0.4 * math.exp(-((math.log2(x / 60) / 0.7) ** 2))
    )
    curves["bad start"] = lambda x: 1 / (0.05 + 0.02 * x)
    curves["hopeless start"] = lambda x: 1 / (0.02 + 0.001 / x + 0.005 * x * x)
    return curves


def simulated() -> dict[str, Curve]:
    """DeAR's schedule on paced profiles, at two rates and latencies of a collective."""
    return {
        f"{name} {gbit} Gbit/s {1e3 * latency:g} ms": functools.partial(
            _simulate, name, gbit, latency
        )
        for name in ("resnet50", "densenet201", "inception_v4", "bert_base", "bert_large")
        for gbit, latency in ((1, 5e-3), (10, 1e-3))
    }


@functools.cache
def _simulate(name: str, gbit: float, latency: float, mb: float, workers: int = 4) -> float:
    """One DeAR iteration: scatters as buckets complete, gathers in forward order, then forward."""
    network = paced.load_profile(name).layers
    specs = [
        TensorSpec(f"{i}.{parameter.name}", parameter.shape, "float32", 4)
        for i, layer in enumerate(network)
        for parameter in layer.parameters
    ]
    layer_of = [int(spec.name.partition(".")[0]) for spec in specs]
    plan = by_size(specs, range(len(specs) - 1, -1, -1), int(mb * MB), MB, MB)
    sizes = [sum(specs[t].nbytes for t in bucket.tensors) for bucket in plan.buckets]
    takes = [latency + size * (workers - 1) / workers * 8 / (gbit * 1e9) for size in sizes]
    ready, now = [0.0] * len(network), 0.0
    for i in range(len(network) - 1, -1, -1):
        ready[i] = now = now + network[i].backward_ms / 1e3
    compute = link = now
    link = 0.0
    for bucket, seconds in zip(plan.buckets, takes, strict=True):
        link = max(link, *(ready[layer_of[t]] for t in bucket.tensors)) + seconds
    arrived = [0.0] * len(network)
    for bucket, seconds in reversed(list(zip(plan.buckets, takes, strict=True))):
        link += seconds
        for t in bucket.tensors:
            arrived[layer_of[t]] = max(arrived[layer_of[t]], link)
    for layer, at in zip(network, arrived, strict=True):
        compute = max(compute, at) + layer.forward_ms / 1e3
    return 1 / compute
