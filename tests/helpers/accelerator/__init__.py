"""An accelerator for tests, ``late``, on which a missing wait is a wrong number; see late.cpp."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "late"
"""Type of the device."""

_SOURCE = Path(__file__).with_name("late.cpp")
_BUILD_S = 300


def why_not() -> str:
    """Return why the device cannot be built here; empty if it can."""
    return "" if shutil.which("g++") else "the accelerator of the tests needs g++"


@functools.cache
def load() -> ctypes.CDLL:
    """Build the device unless it is built, and register it. Once per process."""
    library = ctypes.CDLL(str(_build()), mode=ctypes.RTLD_GLOBAL)
    library.late_synchronizations.restype = ctypes.c_uint64
    library.late_ignore_waits.restype = library.late_jobs.restype = ctypes.c_uint64
    library.late_seed.argtypes = [ctypes.c_uint64]
    library.late_synchronizations.argtypes = [ctypes.c_long]
    library.late_gate.restype = ctypes.c_void_p
    library.late_gate_wait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    library.late_gate_open.argtypes = [ctypes.c_void_p]
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(NAME))
    library.late_register()
    atexit.register(library.late_stop)
    return library


def _build() -> Path:
    text = _SOURCE.read_bytes() + torch.__version__.encode()
    digest = hashlib.sha256(text).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"wingbeat-late-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / "late.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            root = Path(torch.__file__).parent
            includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
            libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
            draft = folder / "late.so.draft"
            options = ["-std=c++20", "-O1", "-g0", "-w", "-shared", "-fPIC", "-pthread"]
            command = ["g++", *options, *includes, str(_SOURCE), "-o", str(draft), *libraries]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_S, check=False
            )
            if done.returncode:
                raise RuntimeError(f"late.cpp does not build:\n{done.stderr[-4000:]}")
            draft.rename(made)
    return made


class _Module(ModuleType):
    """What torch looks up as ``torch.late``."""

    Stream, Event = torch.Stream, torch.Event

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @staticmethod
    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(device)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    @staticmethod
    def device(device: torch.device) -> Any:
        return torch.accelerator.device_index(device.index)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 8

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Kernels draw from the generator of the CPU."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)
