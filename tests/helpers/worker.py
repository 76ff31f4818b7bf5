"""The other end of a `helpers.pool.Pool`: takes cases from a pipe until it closes."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from helpers import zygote

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this worker when the test run is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answer(module: str, name: str, args: tuple[Any, ...]) -> tuple[str, Any, str, str]:
    """Run one case: ``(kind, value, error, traceback)``."""
    try:
        known = module in sys.modules
        case = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        if not known:
            gc.freeze()  # a full collection would go through all of torch, for each case
        return "ok", case(*args), "", ""  # type: ignore[operator]
    except Exception as error:
        return "raised", None, f"{type(error).__name__}: {error}", traceback.format_exc()


def wait_for_all(env: dict[str, str]) -> None:
    """Wait until all workers have loaded torch, which takes a minute on a busy machine.

    The timeout of the group begins thereafter, as it is that of collectives too.
    """
    patience = timedelta(seconds=150)
    port = int(env["MASTER_PORT"])
    store = dist.TCPStore(env["MASTER_ADDR"], port, is_master=False, timeout=patience)
    store.set(f"loaded/{env['RANK']}", "")
    store.wait([f"loaded/{rank}" for rank in range(int(env["WORLD_SIZE"]))], patience)


def main(pipe: Connection, env: dict[str, str], log: str, join: bool) -> None:
    """Serve cases until the parent closes the pipe.

    Args:
        pipe: where cases come from and answers go.
        env: what torchrun would have set.
        log: file for all that is printed.
        join: begin in torch.distributed's default group, over gloo.
    """
    os.environ.update(env)
    with open(log, "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent()

    def of_zygote() -> None:
        pipe.close()  # the pool has to see when this worker ends
        die_with_parent()

    zygote.start(of_zygote)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*find_unused_parameters=True.*")
    if join:
        wait_for_all(env)
        dist.init_process_group("gloo", timeout=timedelta(seconds=45))
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            break
        pipe.send(answer(module, name, args))
    sys.stdout.flush()
    os._exit(0)  # the peers are leaving too: an orderly goodbye would only wait for them
