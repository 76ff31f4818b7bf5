"""Codecs, staging and DeAR on one CUDA device; one line where there is none.

::

    python benchmarks/gpu.py

It prints the speed of codecs against a copy on the device, and for two processes on that device,
whose buckets travel through pinned host buffers: the time of all-reduces one after another and at
once, that of an iteration of DeAR over DDP's (gloo), and the share of a sketch in an iteration.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wingbeat
from wingbeat import compression, kernels
from wingbeat.codecs import make
from wingbeat.collectives import Collectives

NUMEL = 25_000_000
REPEATS = 10
WORKERS = 2


def median_s(run: Callable[[], object]) -> float:
    """Return the median seconds of a call, with the device idle before and after it."""
    times = []
    for _ in range(REPEATS + 1):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        run()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def codecs(device: torch.device) -> None:
    """Print the speed of encoding and decoding, and of a copy on the device."""
    x = torch.randn(NUMEL, device=device)
    out = torch.empty_like(x)
    copy_s = median_s(lambda: out.copy_(x))
    print(
        f"copy on the device: {2 * x.nbytes / copy_s / 1e9:.0f} GB/s; kernels: {kernels.of(device)}"
    )
    for options in (compression.Sketch(), compression.TopK()):
        codec, name = make(options), type(options).__name__
        payload = torch.empty(codec.nbytes(NUMEL), dtype=torch.uint8, device=device)
        encode_s = median_s(functools.partial(codec.encode, x, payload))
        decode_s = median_s(functools.partial(codec.decode, payload, out))
        print(
            f"{name}: encoding {encode_s / copy_s:.1f} and decoding {decode_s / copy_s:.1f} copies"
        )


def iteration_s(rank: int, strategy: wingbeat.Strategy | None) -> float:
    """Return the median seconds of an iteration; DDP for None."""
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if strategy is None:
        model = DistributedDataParallel(model)
    else:
        model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    x = torch.randn(64, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    taken = median_s(step)
    if strategy is not None:
        wingbeat.release(model, optimizer)
    return taken


def worker(rank: int, port: int) -> None:
    """Measure what takes two processes, on one device."""
    place = {"RANK": rank, "WORLD_SIZE": WORKERS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    dist.init_process_group("gloo")
    world = wingbeat.init(cuda="tcp")
    collectives = Collectives(world)
    buffers = [torch.randn(NUMEL // 8, device="cuda") for _ in range(8)]

    def one_after_another() -> None:
        for buffer in buffers:
            collectives.all_reduce(buffer).wait()
            torch.accelerator.synchronize()

    def at_once() -> None:
        for handle in [collectives.all_reduce(buffer) for buffer in buffers]:
            handle.wait()

    serial_s, overlapped_s = median_s(one_after_another), median_s(at_once)
    ddp_s, dear_s = iteration_s(rank, None), iteration_s(rank, wingbeat.DeAR())
    sketch = wingbeat.AllReduce(compression=wingbeat.Sketch(auto_disable=False))
    dense_s, sketch_s = iteration_s(rank, wingbeat.AllReduce()), iteration_s(rank, sketch)
    if rank == 0:
        print(f"8 all-reduces of {buffers[0].nbytes / 1e6:.0f} MB at once / one after another: "
              f"{overlapped_s / serial_s:.2f}")  # fmt: skip
        print(f"iteration of DeAR / DDP (gloo): {dear_s / ddp_s:.2f}")
        print(f"iteration with an 8-bit sketch / dense: {sketch_s / dense_s:.2f}")
    wingbeat.shutdown()


def main() -> int:
    """Print the figures; 0, also where there is no device."""
    if not torch.cuda.is_available():
        print("no figures: this machine has no CUDA device")
        return 0
    codecs(torch.device("cuda"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    mp.spawn(worker, (store.port,), nprocs=WORKERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
