"""The strategies that are ranked, in their textual form, and the code that uses one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import wingbeat
from wingbeat import parts, strategies
from wingbeat.parts.strategy import Strategy
from wingbeat.strategies.spelling import parse

_CLASS = re.compile(r"\b([A-Z]\w*)\(")

EXACT = (
    "dear:plan=fixed",
    "allreduce",
    "dear:plan=fixed,mb=5",
    "dear:plan=layers@1",
    "dear:plan=fixed,topology=mesh",
    "dear:plan=fixed,shard_optimizer=true",
    "omgs:merge=wfbp,compression=fp32",
    "parameterserver",
)
LOSSY = (
    "dear:plan=fixed,compression=bf16",
    "dear:plan=fixed,compression=sketch",
    "dear:plan=fixed,compression=sketch@4",
    "allreduce:compression=lowrank@1",
    "allreduce:compression=lowrank@4",
    "omgs",
)
LOCAL = (
    "localsgd",
    "diloco:every=30",
    "diloco:every=30,compression=sketch@4",
)
ASYNCHRONOUS = ("ripples", "adpsgd", "canary")

CANDIDATES = (*EXACT, *LOSSY, *LOCAL, *ASYNCHRONOUS)
"""What is ranked by default, the simplest of each kind first. Codecs are on, whatever their trial
would decide in training.
"""


def candidates(texts: Sequence[str] = (), codecs: Sequence[str] = ()) -> dict[str, Strategy]:
    """Return strategies by their textual form.

    Args:
        texts: strategies; by default `CANDIDATES`.
        codecs: encodings with which `AllReduce` and `DeAR` are ranked too.

    Raises:
        UsageError: a text is not a strategy.
    """
    all_texts = list(texts or CANDIDATES)
    for codec in codecs:
        all_texts += [f"allreduce:compression={codec}", f"dear:plan=fixed,compression={codec}"]
    return {text: parse(text) for text in all_texts}


def code_of(strategy: Strategy, inside: int = 1, device: str = "cpu") -> str:
    """Return the lines of a program that train with a strategy.

    Args:
        strategy: the strategy.
        inside: processes of each replica, which FSDP2 divides; 1: each worker has a whole model.
        device: what a divided model is on, ``"cpu"`` or ``"cuda"``.
    """
    call, found = repr(strategy), dict[str, set[str]]()
    for name in _CLASS.findall(call):
        module = next(each for each in (wingbeat, parts, strategies) if hasattr(each, name))
        found.setdefault(module.__name__, set()).add(name)
    imports = [f"from {module} import {', '.join(sorted(found[module]))}" for module in found]
    train = f"model, optimizer = wingbeat.distribute(model, optimizer, {call}"
    if inside == 1:
        return "\n".join(["import wingbeat", *imports, f"{train})"])
    on_gpu = device == "cuda"
    lines = ["import os"] * on_gpu + ["import torch", "import wingbeat"]
    lines += [
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import fully_shard",
        *imports,
    ]
    if on_gpu:
        lines += [
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")',
        ]
    shape = f"(world.size // {inside}, {inside})"
    lines += [
        "world = wingbeat.init()",
        f'mesh = init_device_mesh("{device}", {shape}, mesh_dim_names=("replicate", "shard"))',
        '# each block of the model first: fully_shard(block, mesh=mesh["shard"])',
        'fully_shard(model, mesh=mesh["shard"])',
        "optimizer = torch.optim.AdamW(model.parameters())  # or another, made here",
        f"{train}, mesh=mesh)",
    ]
    return "\n".join(lines)
