"""A probe as it might have been measured, for the tests beside this file."""

from __future__ import annotations

import random

from wingbeat.compression import TopK
from wingbeat.planning.costs import fit_linear
from wingbeat.planning.measure import Samples, fit_samples
from wingbeat.planning.probe import Gradient, LinkFit, Probe
from wingbeat.types import TensorSpec

WIRE = TopK(density=0.001)
SPECS = [
    TensorSpec("conv.weight", (64, 3, 7, 7), "float32", 4),
    TensorSpec("conv.bias", (64,), "float32", 4),
    TensorSpec("fc.weight", (1000, 64), "float32", 4),
    TensorSpec("fc.bias", (1000,), "bfloat16", 2),
]
SIZES = [1024 * 2**i for i in range(11)]


def line(alpha: float, beta: float, noise: random.Random, sizes=SIZES):
    return tuple((float(n), (alpha + beta * n) * noise.uniform(0.98, 1.02)) for n in sizes)


def samples() -> Samples:
    noise = random.Random(1)
    return Samples(line(4e-5, 2e-9, noise), line(2e-3, 9e-8, noise, [6 * n for n in SIZES]))


def probe(interfaces: int = 2) -> Probe:
    noise = random.Random(2)
    names = [f"eth{i}" for i in range(interfaces)]
    named = [*names, " + ".join(names)] if interfaces > 1 else names
    links = [
        LinkFit(
            name,
            fit_linear(line(1e-3, 4e-8 / (i + 1), noise)),
            fit_linear(line(2e-3, 1e-8 / (i + 1), noise)),
        )
        for i, name in enumerate(named)
    ]
    encode, exchange = fit_samples(samples(), WIRE)
    return Probe(
        workers=16,
        links=tuple(names),
        wire=str(WIRE),
        collective="payload all-gather",
        gradients=(
            Gradient(3, "fc.bias", 0.0),
            Gradient(2, "fc.weight", 0.004),
            Gradient(1, "conv.bias", 0.0041),
            Gradient(0, "conv.weight", 0.06),
        ),
        encode=encode,
        exchange=exchange,
        interfaces=tuple(links),
        rest_s=0.031,
    )
