"""Wrong use of DDP's hooks is told in a line; lost workers are told, and nothing hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.pool import Pool
from integrations import cases
from wingbeat.errors import UsageError
from wingbeat.integrations import ddp

PoolOf = Callable[[int], Pool]
SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from wingbeat.integrations import ddp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(3, 3))
state = ddp.SketchState(model, bits=1)
model.register_comm_hook(state, ddp.sketch_hook)
model(torch.ones(2, 3)).sum().backward()
assert model.module.weight.grad.tolist() == [[2.0] * 3] * 3  # nothing is lost with one worker
{last}
print("end")
"""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: ddp.SketchState(m, bits=0), "bits=0"),
        (lambda m: ddp.SketchState(m, bits=9), "from 1 to 8"),
        (lambda m: ddp.SketchState(m, bits=4.0), "bits=4.0"),
        (lambda m: ddp.SketchState(m, wire="topk"), "wire='topk'"),
        (lambda m: ddp.SketchState(m, wire="fp32"), "allowed are bits alone, or as wire"),
        (lambda m: ddp.SketchState(m, 4, wire="sketch"), "bits=4, wire='sketch'"),
        (lambda m: ddp.SketchState(m, wire="sketch@9"), "Sketch(bits=9)"),
        (lambda m: ddp.SketchState(m, wire="sketch:groups=fc*@4"), "'fc*' matches no trained"),
        (lambda m: ddp.TopKState(m, density=0), "density=0"),
        (lambda m: ddp.TopKState(m, density=1.5), "up to 1"),
        (lambda m: ddp.TopKState(m, density=True), "density=True"),
        (lambda m: ddp.TopKState(m, warmup=-1), "warmup=-1"),
        (lambda m: ddp.TopKState(m, momentum=1.0), "momentum=1.0"),
        (lambda m: ddp.SketchState(m, timeout=0), "timeout=0"),
        (lambda m: ddp.SketchState(m.parameters()), "must be the model"),
        (lambda m: ddp.SketchState(nn.ReLU()), "ReLU has no parameter"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[nn.Module], Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(nn.Linear(2, 2))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_process_group_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(UsageError, match="init_process_group"):
        ddp.SketchState(nn.Linear(2, 2))


def test_misuse_of_the_hooks_is_refused(pool_of: PoolOf) -> None:
    for said in pool_of(2).run(cases.misuse):
        wanted = [
            "topk_hook: the state is of type SketchState",
            "sketch_hook: the state is of type TopKState",
            "topk_hook: the state is of type NoneType",
            "of bucket 0",
            "close() was called",
            "sparse",
            "join()",
        ]
        assert len(said) == len(wanted), said
        for line, part in zip(said, wanted, strict=True):
            assert part in line
            assert "\n" not in line
        assert "'weight' to 'bias'" in said[3]


def test_the_thread_ends_with_its_state(pool_of: PoolOf) -> None:
    pool_of(2).run(cases.thread_ends)


@pytest.mark.parametrize("kind", ["sketch", pytest.param("topk", marks=pytest.mark.slow)])
def test_a_worker_that_dies_is_told_by_the_others(
    kind: str, fresh_pool: Callable[..., Pool]
) -> None:
    outcomes = fresh_pool(3, default_group=True).outcomes(
        cases.victim, kind, deadline=150.0, grace=20.0
    )
    assert outcomes[1].kind == "died"
    for rank in (0, 2):
        assert outcomes[rank].kind == "ok", outcomes[rank]
        first, then = outcomes[rank].value
        assert f"rank {rank}: the all-" in first
        assert f"rank {rank}: the all-" in then
        assert "bucket" in then


def test_nonsense_from_a_worker_names_it(pool_of: PoolOf) -> None:
    for first, then in pool_of(2).run(cases.malformed):
        for said in (first, then):
            assert re.search(r"bucket 0 \(.*\): rank 1 sent a malformed payload: ", said)


@pytest.mark.parametrize(
    "last", [pytest.param("", marks=pytest.mark.slow), "dist.destroy_process_group()"]
)
def test_a_program_ends_with_the_state_still_there(last: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "end\n"


def test_the_warm_up_falls_exponentially() -> None:
    state = ddp.TopKState.__new__(ddp.TopKState)
    state.density, state.warmup = 0.001, 4
    found = []
    for step in range(6):
        state._steps = step
        found.append(state.density_now)
    want = [0.25, 0.0628717, 0.0158114, 0.00397635, 0.001, 0.001]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want))


def test_a_checkpoint_of_one_worker_takes_the_warm_up_along() -> None:
    with alone():
        model = nn.Linear(3, 3)
        state = ddp.TopKState(model, density=0.001, warmup=4)
        saved = {**state.state_dict(), "step": 3}
        assert state.density_now == 0.25
        state.load_state_dict(saved)
        assert state.density_now == pytest.approx(0.00397635, rel=1e-4)
        state.load_state_dicts([{**saved, "step": 2}])
        assert state.density_now == pytest.approx(0.0158114, rel=1e-4)
        state.close()


def test_closing_after_the_groups_are_destroyed_is_silent() -> None:
    with alone():
        state, later = (ddp.SketchState(nn.Linear(3, 3)) for _ in range(2))
        dist.destroy_process_group()
        state.close()
        state.close()
    with alone():
        later.close()
        assert dist.is_initialized()


@contextmanager
def alone() -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
