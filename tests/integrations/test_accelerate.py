"""Accelerate with wingbeat beside Accelerate with its own DDP, in real processes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.amounts import slow_except
from helpers.pool import Pool
from helpers.refusals import assert_said
from integrations import accelerate_cases as cases
from wingbeat import testing
from wingbeat.errors import UsageError
from wingbeat.integrations import library
from wingbeat.integrations.accelerate import warn_of_one

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PAGE = Path(__file__).parents[2] / "docs/integrations/accelerate.md"
WIRES = [
    "sketch@2",
    "topk@0.2:warmup=0",
    "topk@0.2:warmup=2:bits=4",
    "topk@0.2:warmup=0:momentum=0.5",
    "lowrank@2:bits=4",
    "fp16",
    "sketch@4:groups=*.bias@fp32",
    "sketch@1:share=0.5:total=6:auto_disable=false",
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two workers; Accelerate makes their group. Importing it takes seconds, so they stay."""
    made = Pool(2, default_group=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(pool: Pool) -> Callable[..., list[Any]]:
    def run(case: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(case, *args, deadline=150.0)

    return run


@pytest.mark.parametrize(
    "case",
    slow_except(
        [cases.clips_parts, cases.uneven, cases.local_sgd],
        [
            cases.exact,
            cases.clips_parts,
            cases.scaled,
            cases.several,
            cases.uneven,
            cases.local_sgd,
            cases.loaders,
        ],
    ),
)
def test_as_with_its_own_ddp(case: Any, run: Any) -> None:
    run(case)


@pytest.mark.parametrize(
    "case", slow_except([cases.resumed], [cases.resumed, cases.utilities, cases.compiled])
)
def test_what_is_saved(case: Any, run: Any, tmp_path: Path) -> None:
    run(case, str(tmp_path))


@pytest.mark.slow
def test_residuals_of_another_number_of_workers(
    run: Any, tmp_path: Path, fresh_pool: Callable[..., Pool]
) -> None:
    saved = run(cases.other_size, str(tmp_path), True)
    loaded = fresh_pool(3).run(cases.other_size, str(tmp_path), False, deadline=150.0)
    assert saved[0] == pytest.approx(loaded[0], rel=1e-5)
    assert saved[0] > 0.01


@pytest.mark.parametrize(
    "wires", [WIRES[:2], pytest.param(WIRES[2:], marks=pytest.mark.slow)], ids=["first", "others"]
)
def test_every_wire_as_a_hook(wires: list[str], run: Any, tmp_path: Path) -> None:
    run(cases.hooks, str(tmp_path), wires)


def test_what_cannot_work_is_refused_in_one_line(run: Any) -> None:
    wanted = [
        "the first argument must be an accelerate.Accelerator",
        "it is set up for DEEPSPEED",
        "Sequential has parameters to train and no optimizer here",
        "SGD has parameters of none of the models given with it",
        "SGD has parameters of Sequential and Sequential",
        "2 values for 1 objects",
        "comm_hook='fp16'",
        "Sequential has '1.running_mean'",
        "mixed_precision='fp8'",
        "pass the bare optimizer",
        "its gradient scaler would continue with the step that SGD has now",
        "is distributed already, with another model or as AllReduce(mb=",
        "trigger_sync_in_backward()",
        "2 models, of which a worker",
        "write `with model.join():`",
        "has no Accelerator._dataloaders any more",
        "the model must be the DistributedDataParallel",
        "bf16_compress_hook",
        "is wrapped in DistributedDataParallel",
    ]
    for said in run(cases.refusals):
        assert_said(said, wanted)


def test_one_worker_alone(fresh_pool: Callable[..., Pool]) -> None:
    fresh_pool(1).run(cases.single, deadline=150.0)


@pytest.mark.parametrize(
    ("changed", "warned"),
    [
        ({}, True),
        ({"ACCELERATE_USE_CPU": "False"}, False),
        ({"WORLD_SIZE": "1"}, False),  # torchrun has started one, as it was told
        ({"MASTER_ADDR": None}, False),  # --num_processes 1
    ],
)
def test_one_process_in_place_of_several_is_said(
    changed: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    usual = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    env = {name: value for name, value in {**usual, **changed}.items() if value is not None}
    [world] = testing.worlds(1)
    with caplog.at_level("WARNING", logger="wingbeat"):
        warn_of_one(world, env)
    assert ("accelerate launch --cpu starts one process" in caplog.text) is warned


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["-m", "torch.distributed.run", "--nproc-per-node=2"], "2 workers"),
        (["-m", "accelerate.commands.launch", "--cpu", "--num_processes=2"], "starts one process"),
        (["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"], "2 workers"),
    ],
)
def test_the_commands_of_the_page(command: list[str], said: str, tmp_path: Path) -> None:
    """The page's program, started by each launcher, on CPUs."""
    block, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(block)
    usual = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER"))}
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        cwd=tmp_path, env={**usual, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert (tmp_path / "checkpoint/model.safetensors").exists()


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_library_that_is_missing_or_old(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = re.escape(f"pip install 'wingbeat[{name}]'")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"^wingbeat.integrations.{name} needs {name}: {remedy}$"):
        library(name, "1.0")
    old = types.ModuleType(name)
    old.__version__ = "0.9.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, old)
    with pytest.raises(UsageError, match=f"1.0 or newer, and 0.9.1 is installed: {remedy}$"):
        library(name, "1.0")
    old.__version__ = "10.0.dev1+cpu"  # type: ignore[attr-defined]
    assert library(name, "9.5") is old


def test_something_that_a_library_needs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself is there, so its own error says what is not."""

    def fail(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        library("accelerate", "1.0")
