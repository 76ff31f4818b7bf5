"""Time of all_reduce over a backend of torch.distributed, on all hosts of a lab.

wingbeat lab run star:2x2@200mbit -- python benchmarks/process_group.py wingbeat
export GLOO_SOCKET_IFNAME=eth0,eth1; wingbeat lab run ... python benchmarks/process_group.py gloo
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

import wingbeat.integrations.process_group  # noqa: F401  (registers the backend)

REPEATS = 5


def main(backend: str, nbytes: int = 10_000_000) -> None:
    dist.init_process_group(backend)
    tensor = torch.ones(nbytes // 4)
    dist.all_reduce(tensor)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(
            f"{backend}: all_reduce of {nbytes / 1e6:g} MB in {statistics.median(seconds):.3f} s "
            f"({min(seconds):.3f} to {max(seconds):.3f}, {REPEATS} repeats)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
