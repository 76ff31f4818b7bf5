"""The Triton kernels without a GPU: under Triton's interpreter, and compiled for one.

The interpreter must be chosen before triton is imported, so it runs in processes of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]

# Of the contract, what takes different ways through the kernels: it is slow there.
CONTRACT = (
    "gpu and not cuda and (of_equal_magnitudes or order_is or velocity or malformed or neighbour"
    " or gone_the_round_after or cannot_overflow or lengths_around)"
)

WAYS = """
import torch
from wingbeat.kernels import gpu, gpu_kernels, layout, reference

torch.set_num_threads(1)
# So few that 9000 values are many.
gpu_kernels.SAMPLES, gpu_kernels.LEAST_ROOM = 1024, 0
SELECT = gpu_kernels.sampling


def same(x, k, residual=None, velocity=None):
    payloads, kept = [], []
    for kernels in (reference, gpu):
        # Not at a multiple of 4 bytes: as it may lie in a message.
        payload = torch.zeros(layout.topk_bytes(x.numel(), k) + 1, dtype=torch.uint8)[1:]
        left = [None if t is None else t.clone() for t in (residual, velocity)]
        kernels.topk_encode(x, payload, k=k, residual=left[0], velocity=left[1], momentum=0.9)
        payloads.append(payload)
        kept.append([t.view(torch.int32) for t in left if t is not None])
    assert torch.equal(*payloads)
    assert all(torch.equal(a, b) for a, b in zip(*kept))


normal = torch.randn(9_000)
broken = normal.clone()
broken[::700], broken[5::900] = torch.nan, -torch.inf
for way in ("candidates", "all values"):
    if way == "all values":
        gpu_kernels.sampling = lambda n, k: (*SELECT(n, k)[:2], 1)
    same(normal, 90)
    same(broken, 12, torch.randn(9_000), torch.randn(9_000))
gpu_kernels.sampling = SELECT
# Not all ways are the same way: here the guess was good.
chosen = gpu._Selection(normal, 90, None, None, 0.0)
chosen.write(torch.empty(layout.topk_bytes(9_000, 90), dtype=torch.uint8))
assert 90 <= int(chosen._state[gpu_kernels.CANDIDATES.value]) <= SELECT(9_000, 90)[2]
# Alike: more candidates than there is room for. Few: hardly a sample is not zero.
assert SELECT(9_000, 90)[2] < 9_000
same(torch.full((9_000,), -0.3), 90)
same(torch.zeros(9_000).index_fill_(0, torch.tensor([3, 8_999]), 1.0), 90)
"""


def interpreted(*command: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_contract_is_kept_by_the_interpreter() -> None:
    tests = ("tests/contracts/kernels", "-k", CONTRACT, "-q", "-p", "no:cacheprovider")
    summary = interpreted("-m", "pytest", *tests).splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_the_contract_is_kept_by_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    tests = ("tests/contracts/kernels", "-k", "gpu", "-q", "-p", "no:cacheprovider")
    done = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment)
    assert done.returncode == 0


@pytest.mark.slow
def test_candidates_and_all_values_select_the_same() -> None:
    interpreted("-c", WAYS)


@pytest.mark.gpu
def test_the_contract_is_kept_on_a_device() -> None:
    tests = ("tests/contracts/kernels", "-k", "gpu", "-q", "-p", "no:cacheprovider")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment)
    assert done.returncode == 0


INTEGERS, FLOATS = "*i32", "*fp32"
POINTERS = {
    **dict.fromkeys(("x", "residual", "velocity", "table", "out"), FLOATS),
    **dict.fromkeys(("codes", "lut"), "*u8"),
    **dict.fromkeys(("offsets",), "*i16"),
    **dict.fromkeys(("ends",), "*i64"),
    **dict.fromkeys(("counts", "state", "candidates", "places", "starts", "lengths"), INTEGERS),
    **dict.fromkeys(("values", "shares", "through", "left", "wrong", "sent"), INTEGERS),
    "momentum": "fp32",
}
BOTH = {"RESIDUAL": True, "VELOCITY": True}
SIZES = {"BLOCK": 4096, "STEP": 256}
KERNELS: list[tuple[str, str, dict[str, Any]]] = [
    ("sketch", "histogram", {"RESIDUAL": True, "BLOCK": 4096}),
    ("sketch", "encode", {"BITS": 8, "RESIDUAL": True, "GROUPS": 512}),
    ("sketch", "encode", {"BITS": 3, "RESIDUAL": False, "GROUPS": 512}),
    ("sketch", "decode", {"BITS": 8, "ADD": False, "GROUPS": 512}),
    ("sketch", "decode", {"BITS": 5, "ADD": True, "GROUPS": 512}),
    ("topk", "guess", {**BOTH, "BLOCK": 8192}),
    ("topk", "sweep", {**BOTH, "BLOCK": 4096}),
    ("topk", "histogram", {"PASS": 0, "BLOCK": 8192, "BINS": 2048}),
    ("topk", "histogram", {"PASS": 1, "BLOCK": 8192, "BINS": 2048}),
    ("topk", "histogram", {"PASS": 2, "BLOCK": 8192, "BINS": 2048}),
    ("topk", "settle", {"BINS": 2048}),
    ("topk", "tally", SIZES),
    ("topk", "emit", {**BOTH, **SIZES}),
    ("topk", "scrub", {"BLOCK": 8192}),
    ("topk", "locate", {"BLOCK": 1024}),
    ("topk", "scatter", {"ADD": True, "BLOCK": 1024}),
]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
@pytest.mark.parametrize(("module", "name", "constants"), KERNELS)
def test_it_compiles_for_a_gpu_that_is_not_here(
    module: str,
    name: str,
    constants: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the interpreter takes, the compiler may not: annotations, types that change."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from wingbeat.kernels import gpu_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(gpu_kernels, name if module == "topk" else f"sketch_{name}")
    signature = {
        argument: "constexpr" if argument in constants else POINTERS.get(argument, "i32")
        for argument in kernel.arg_names
    }
    options = {"num_warps": 32 if module == "sketch" else 8, "enable_fp_fusion": False}
    source = ASTSource(kernel, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # A velocity has the same bits as on the CPU only if product and sum are rounded apart.
    assert "fma.rn.f32" not in made.asm["ptx"]
    assert made.metadata.shared <= 96 * 1024


def test_room_and_target_of_the_guess() -> None:
    from wingbeat.kernels import gpu_kernels

    # All values are samples: the threshold is the kth value's bin, and all have room.
    assert gpu_kernels.sampling(1000, 10) == (1000, 10, 1000)
    samples, target, room = gpu_kernels.sampling(100_000_000, 100_000)
    assert samples == gpu_kernels.SAMPLES
    # 65.5 samples are to be expected, and 8.1 more or less.
    assert 65.5 + 4 * 8 < target < 2 * 65.5
    assert 4 * 100_000 < room < 1_000_000
    # A third of the values: there is no use in copying them.
    assert gpu_kernels.sampling(100_000_000, 33_000_000)[2] == 1
