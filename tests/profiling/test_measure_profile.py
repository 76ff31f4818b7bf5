"""Scripts and functions that are profiled."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wingbeat
from wingbeat.errors import UsageError
from wingbeat.profiling import decode, encode, measure, simulator_model
from wingbeat.profiling.measure import Measured
from wingbeat.profiling.recorder import WARMUP
from wingbeat.simulator import Links, simulate
from wingbeat.strategies import DeAR

COUNT = 2
TOTAL = WARMUP + 1 + 2 * COUNT

HEAD = """
import json, os, sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
LOOP = """
steps = 0
try:
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        steps += 1
except Exception:
    steps = -1
finally:
    said = {"steps": steps, "argv": sys.argv[1:], "rank": os.environ["RANK"], "name": __name__}
    open("said.json", "w").write(json.dumps(said))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def script(text: str, *arguments: str, batch_size: int | None = None) -> Measured:
    Path("train.py").write_text(text, encoding="utf-8")
    return measure.profile_script("train.py", arguments, COUNT, batch_size, lambda _: None)


def names(made: Measured) -> list[str]:
    return [x.name for x in made.profile.layers if not x.name.startswith("(")]


@pytest.mark.usefixtures("folder")
def test_script_runs_unchanged_and_ends_when_enough_is_measured() -> None:
    argv, path, environment = list(sys.argv), list(sys.path), dict(os.environ)
    made = script(HEAD + LOOP, "--lr", "1")
    said = json.loads(Path("said.json").read_text(encoding="utf-8"))
    # The last step does not return; it is no exception of the script.
    assert said["steps"] == TOTAL - 1
    assert said["argv"] == ["--lr", "1"]
    assert (said["rank"], said["name"]) == ("0", "__main__")
    assert (sys.argv, sys.path, dict(os.environ)) == (argv, path, environment)
    assert names(made) == ["0", "1", "2"]
    assert made.profile.name == "train"
    assert made.profile.batch_size == 4
    assert made.profile.source.startswith("measured: wingbeat profile train.py")


@pytest.mark.usefixtures("folder")
def test_layers_of_a_file_add_up_to_the_iterations_without_hooks() -> None:
    made = script(HEAD + LOOP, batch_size=6)
    read = decode(encode(made.profile), where="here")
    assert read == made.profile
    whole = read.forward_ms + read.backward_ms
    assert whole == pytest.approx(made.plain_ms, rel=1e-3)
    assert sum(made.parts.values()) == pytest.approx(made.hooked_ms)
    assert read.samples_per_second == pytest.approx(6e3 / whole)
    assert set(made.parts) == {"(optimizer)", "(data)", "(loss)", "forward", "backward"}


@pytest.mark.usefixtures("folder")
def test_simulator_takes_a_measured_profile() -> None:
    made = script(HEAD + LOOP)
    model = simulator_model(decode(encode(made.profile), where="here"))
    assert sum(tensor.numel for tensor in model.tensors) == 8 * 16 + 16 + 16 * 2 + 2
    run = simulate(model, DeAR(plan="fixed"), 2, Links(bytes_per_s=1e12, latency_s=0.0))
    # Each of the few chunks takes 0.06 ms of a processor in addition.
    assert 0.999 * made.plain_ms < 1e3 * run.median_s < made.plain_ms + 0.5


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            HEAD + LOOP.replace("100", "5"),
            f"after 5 iterations of backward() and step(); a profile needs {TOTAL}",
        ),
        (HEAD + "sys.exit(3)", "ended with exit code 3 after 0 iterations"),
        ("print()", "ended after 0 iterations"),
        ((HEAD + LOOP).replace("torch.ones(4, 8)", "torch.ones(steps + 1, 8)"), "samples, another"),
    ],
)
def test_script_that_cannot_be_profiled_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        script(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("folder")
def test_exception_of_a_script_is_its_own() -> None:
    before = torch.autograd.backward
    with pytest.raises(ZeroDivisionError):
        script(HEAD + "1 / 0")
    assert torch.autograd.backward is before


def test_script_under_torchrun_with_several_processes_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE is 2"):
        script(HEAD + LOOP)
    with pytest.raises(UsageError, match="no such file"):
        measure.profile_script(str(folder / "none.py"), [], COUNT, None, print)


DDP = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
"""
WINGBEAT = """
import wingbeat
wingbeat.init()
model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.DeAR(plan="fixed"))
"""
END_WINGBEAT = "\n    wingbeat.shutdown()\n"
END_DDP = "\n    dist.destroy_process_group()\n"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "text", [DDP + LOOP + END_DDP, WINGBEAT + LOOP + END_WINGBEAT], ids=["DDP", "wingbeat"]
)
def test_distributed_script_is_profiled_in_one_process(text: str) -> None:
    made = script(HEAD + text)
    assert names(made) == ["0", "1", "2"]
    assert made.profile.params == 8 * 16 + 16 + 16 * 2 + 2
    assert made.profile.batch_size == 4


SHARDED = """
import wingbeat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
wingbeat.init()
mesh = init_device_mesh("cpu", (1,))
fully_shard(model[0], mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""


@pytest.mark.usefixtures("folder")
def test_script_with_a_sharded_model_is_refused() -> None:
    try:
        with pytest.raises(UsageError) as caught:
            script(HEAD + SHARDED + LOOP)
    finally:
        wingbeat.shutdown()
    assert str(caught.value).startswith("parameter 0.weight is a DTensor (fully_shard(), ")
    assert str(caught.value).endswith("; profile the model before it is sharded")
    assert json.loads(Path("said.json").read_text(encoding="utf-8"))["steps"] == WARMUP


MODULE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
def tensor(): return model, torch.ones(4, 8)
def arguments(): return model, (torch.ones(5, 8),)
def keywords(): return model, {"input": torch.ones(6, 8)}
def step(): return model, lambda: model(torch.ones(7, 8)).square().mean()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x, apart=False):
        if apart: return {"logits": self.inner(x).detach()}
        return {"loss": self.inner(x).sum(), "logits": x}
def with_loss(): return Net(), torch.ones(8, 8)
def vector(): return model, lambda: model(torch.ones(7, 8))
def alone(): return model
def number(): return model, 3
def detached(): return Net(), (torch.ones(4, 8), True)
def frozen(): return nn.Linear(2, 2).requires_grad_(False), torch.ones(2, 2)
value = 3
"""


@pytest.fixture
def module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Measured]:
    (folder / "profiled_module.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "profiled_module", raising=False)

    def profiled(name: str) -> Measured:
        return measure.profile_function(f"profiled_module:{name}", COUNT, None, lambda _: None)

    return profiled


@pytest.mark.parametrize(
    ("name", "batch"),
    [("tensor", 4), ("arguments", 5), ("keywords", 6), ("step", 7), ("with_loss", 8)],
)
def test_function_returns_model_and_batch_or_step(
    module: Callable[[str], Measured], name: str, batch: int
) -> None:
    made = module(name)
    prefix = "inner." if name == "with_loss" else ""
    assert names(made) == [f"{prefix}0", f"{prefix}1"]
    assert made.profile.batch_size == batch
    assert made.profile.name == name
    assert "(optimizer)" not in made.parts


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alone", "returned a Sequential; it has to return (model, batch) or (model, step)"),
        ("number", "returned a model and a int; the second has to be"),
        ("vector", "returned a Tensor; it has to return the loss"),
        ("detached", "returned a dict without gradients"),
        ("frozen", "no parameter that requires gradients"),
        ("value", "has no function 'value'"),
        ("none", "has no function 'none'"),
    ],
)
def test_function_that_returns_something_else_is_refused(
    module: Callable[[str], Measured], name: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        module(name)
    assert words in str(caught.value)


@pytest.mark.usefixtures("folder")
def test_module_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="no module 'none_such'"):
        measure.profile_function("none_such:f", COUNT, None, print)


def test_device_of_a_profile_is_named() -> None:
    device: Any = torch.device("cpu")
    assert measure.device_name(device).endswith(f"{torch.get_num_threads()} threads, float32")
