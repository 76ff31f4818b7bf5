"""Runs a registered scenario or check inside a worker process."""

from __future__ import annotations

import functools
import gc

import torch

from . import cases
from .compare import Result, assert_same_on_every_rank, collect, compare_notes, compare_tensors
from .registry import CHECKS, SCENARIOS, Rig, Scenario
from .sides import DDPSide, PlainSide, Side, WingbeatSide, make_strategy, rank_and_size

assert cases, "importing the package registers the cases"

SEED = 20


def _outcome(side: Side, case: Scenario) -> Result:
    torch.manual_seed(SEED)
    case.play(side)
    result = collect(side)
    side.leave()
    return result


@functools.cache
def _reference(name: str) -> Result:
    """The reference's result; the same for every strategy and bucket size, so kept."""
    case = SCENARIOS[name]
    rank, size = rank_and_size()
    side: Side
    if case.reference == "ddp":
        side = DDPSide(rank, size, find_unused=case.find_unused)
    else:
        side = PlainSide(rank, size)
    result = _outcome(side, case)
    assert result.parameters, f"scenario {name} trained nothing"
    return result


def scenario(name: str, strategy: str, mb: float) -> None:
    """Run scenario ``name`` under its reference and under wingbeat; fail where they differ."""
    case = SCENARIOS[name]
    rank, size = rank_and_size()
    want = _reference(name)
    got = _outcome(WingbeatSide(rank, size, strategy=make_strategy(strategy, mb)), case)
    gc.collect()
    gc.freeze()  # modules that were imported since: a fifth of a second, each time
    judge(case, got, want, rank, size)


def judge(case: Scenario, got: Result, want: Result, rank: int, size: int) -> None:
    """Compare with the reference, then between ranks."""
    limits = case.tolerance, case.floor
    lines = compare_notes(got.notes, want.notes, *limits)
    lines += compare_tensors("parameter", got.parameters, want.parameters, *limits)
    if rank == 0:  # DDP leaves the others with their own until the next forward
        lines += compare_tensors("buffer", got.buffers, want.buffers, *limits)
    if case.state_of == "every" or (case.state_of == "last" and rank == size - 1):
        lines += compare_tensors("optimizer state", got.state, want.state, *limits)
    assert not lines, f"rank {rank} differs from {case.reference}:\n  " + "\n  ".join(lines)
    assert_same_on_every_rank(got.parameters | got.buffers | got.state, "after training")


def check(name: str, strategy: str, mb: float) -> None:
    """Run check ``name``."""
    rank, size = rank_and_size()
    torch.manual_seed(SEED)
    CHECKS[name].play(Rig(make_strategy(strategy, mb), strategy, mb, rank, size))
