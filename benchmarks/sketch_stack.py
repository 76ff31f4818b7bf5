"""Sketching's share of an iteration (Canary, Fig. 22b); `sketch.py` shows it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from wingbeat import compression
from wingbeat.codecs import Coding
from wingbeat.codecs.coding import regions
from wingbeat.compression import LowRank, Sketch
from wingbeat.errors import UsageError
from wingbeat.types import Span
from wingbeat_lab import paced


def coded(text: str) -> compression.Sketch | compression.LowRank:
    """Return the settings."""
    wire = compression.parse(text)
    if (
        not isinstance(wire, compression.Sketch | compression.LowRank)
        or wire.ends_after is not None
    ):
        raise UsageError(
            f"--wire {text}: allowed are sketch and lowrank, with any options but a share"
        )
    return wire


def layered(profile: paced.Profile) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter, as the paced model has them."""
    return [
        (f"{layer.attribute}.{each.name}", each.shape)
        for layer in profile.layers
        for each in layer.parameters
    ]


def timed(action: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def sketching_s(coding: Coding, numel: int, options: argparse.Namespace) -> list[float]:
    """Seconds of one worker's encoding and decoding in an iteration, in each round.

    All gradients are encoded once, the own block's sum among them. The own block of each other
    worker's payload is decoded and added, and all blocks are decoded at the end.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(numel, generator=generator)
    x.mul_(torch.randn(numel, generator=generator).exp_()).mul_(1e-3)
    x = x.to(options.device)
    residual = torch.zeros_like(x)
    whole, block = Span(0, numel), Span(0, numel // options.workers)
    payload = torch.empty(coding.room(whole), dtype=torch.uint8, device=options.device)
    part = torch.empty(coding.room(block), dtype=torch.uint8, device=options.device)
    coding.encode(x, block, part)
    out = torch.zeros_like(x)

    def iteration() -> None:
        coding.encode(x, whole, payload, residual)
        for _ in range(options.workers - 1):
            coding.decode(part, out, block, add=True)
        coding.decode(payload, out, whole)

    # The first round fills pages and caches and compiles.
    return [timed(iteration, options.device) for _ in range(options.rounds + 1)][1:]


def overhead(name: str, wire: Sketch | LowRank, options: argparse.Namespace) -> dict[str, Any]:
    """One profile's stack: compute, sketch, links."""
    profile = paced.load_profile(name).scaled(options.scale)
    coding = Coding(list(regions(wire, layered(profile))))
    numel = sum(layer.numel for layer in profile.layers)
    compute_s = (profile.forward_ms + profile.backward_ms) / 1e3 * options.scale
    away = 2 * (options.workers - 1) / options.workers * coding.room(Span(0, numel))
    links_s = 8 * away / (options.gbit * 1e9)
    samples_s = sketching_s(coding, numel, options)
    sketch_s = statistics.median(samples_s)
    total_s = compute_s + links_s + sketch_s
    return {
        "model": name,
        "parameters": numel,
        "compute_s": compute_s,
        "links_s": links_s,
        "sketch_s": sketch_s,
        "samples_s": samples_s,
        "share": sketch_s / total_s,
    }
