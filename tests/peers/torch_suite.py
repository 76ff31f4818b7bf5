"""PyTorch's own tests of DDP, as they lie in the installed package: found, loaded, run here.

Nothing of them is copied. They are written for one GPU a process; what is about semantics runs on
the CPU, where a rank's device is the CPU.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

MODULE = "torch.testing._internal.distributed.distributed_test"

_IN_NAME = re.compile("ddp|join|DistributedDataParallel", re.IGNORECASE)
_IN_BODY = re.compile(r"DistributedDataParallel|\bDDP\b|Join")

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


def source() -> str:
    """The text of torch's file."""
    root = Path(torch.__file__).parent
    return (root.parent / (MODULE.replace(".", "/") + ".py")).read_text()


@functools.cache
def names() -> tuple[str, ...]:
    """Every test whose name has ``ddp`` or ``join`` in it, or whose body names DDP or Join."""
    text = source()
    lines = text.splitlines()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if _IN_NAME.search(node.name) or _IN_BODY.search(body):
                found.append(node.name)
    return tuple(found)


def load() -> Any:
    """Import torch's tests; they read the environment when they are imported."""
    if importlib.util.find_spec("expecttest") is None and "expecttest" not in sys.modules:
        stub: Any = types.ModuleType("expecttest")  # a base class is all they need of it here
        stub.TestCase = unittest.TestCase
        stub.__spec__ = importlib.util.spec_from_loader("expecttest", None)
        sys.modules["expecttest"] = stub
    os.environ["BACKEND"] = "gloo"
    return importlib.import_module(MODULE)


def case(name: str) -> Callable[[], None]:
    """Test ``name`` without its decorators, which are about GPUs and torch's own CI."""
    suite = load()
    base: Any = suite.DistributedTest._DistTestBase
    plain = inspect.unwrap(getattr(base, name))
    from torch.testing._internal.common_utils import TestCase

    class Case(base, TestCase):  # type: ignore[misc]
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        file_name = ""

        def runTest(self) -> None:
            """What unittest wants of a case."""

        def _barrier(self, *_args: Any, **_kwargs: Any) -> None:
            dist.barrier()

    return functools.partial(plain, Case())


def on_cpu(device: Any) -> Any:
    """``device``, with the CPU for what would be a GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return "cpu" if str(device).startswith("cuda") else device


def _mapped(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` for which every GPU among its arguments is the CPU."""

    def is_device(value: Any) -> bool:
        return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")

    @functools.wraps(call)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return call(*[on_cpu(a) if is_device(a) else a for a in args], **kwargs)

    return mapped


def _to(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return call(self, *[on_cpu(a) for a in args], **kwargs)

    return to


def _same(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


class CpuBatchNorm(nn.modules.batchnorm._BatchNorm):
    """In place of `torch.nn.SyncBatchNorm`, which only works on GPUs: each worker for itself."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, _group: Any = None) -> nn.Module:
        return module


@contextlib.contextmanager
def without_gpus(suite: Any) -> Iterator[None]:
    """Let the CPU be every rank's device."""
    gpus = {rank: [rank] for rank in range(dist.get_world_size())}
    with contextlib.ExitStack() as stack:

        def put(where: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, value))

        for name in _FACTORIES:
            put(torch, name, _mapped(getattr(torch, name)))
        for cls in (torch.Tensor, nn.Module):
            put(cls, "to", _to(cls.to))
            put(cls, "cuda", _same)
        for name in ("set_device", "synchronize", "manual_seed"):
            put(torch.cuda, name, lambda *_args, **_kwargs: None)
        put(torch.cuda, "current_device", lambda: 0)
        put(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        put(nn, "SyncBatchNorm", CpuBatchNorm)
        # Older ones load hooks that they saved themselves without saying that they trust the file.
        loading = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        stack.enter_context(mock.patch.dict(os.environ, loading))
        put(suite, "init_multigpu_helper", lambda *_: gpus)
        yield


@contextlib.contextmanager
def with_ddp(suite: Any, kind: type) -> Iterator[None]:
    """Let ``kind`` be DDP, by every name the tests know it by."""
    with contextlib.ExitStack() as stack:
        for where in (suite, nn.parallel):
            stack.enter_context(mock.patch.object(where, "DistributedDataParallel", kind))
        yield
