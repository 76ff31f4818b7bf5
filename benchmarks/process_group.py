"""Time of all_reduce over a backend of torch.distributed, on all hosts of a lab.

wingbeat lab run star:2x2@200mbit -- python benchmarks/process_group.py wingbeat
export GLOO_SOCKET_IFNAME=eth0,eth1
wingbeat lab run star:2x2@200mbit -- python benchmarks/process_group.py gloo --json out/pg.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import write

import wingbeat.integrations.process_group  # noqa: F401  (registers the backend)

REPEATS = 5


def main() -> None:
    """Measure as one rank; rank 0 prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=("wingbeat", "gloo"))
    parser.add_argument("--mb", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="where rank 0 writes the seconds")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("RANK is not set: start it with torchrun or `wingbeat lab run`")
    dist.init_process_group(args.backend)
    tensor = torch.ones(int(args.mb * 250_000))
    dist.all_reduce(tensor)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(
            f"{args.backend}: all_reduce of {args.mb:g} MB in {statistics.median(seconds):.3f} s "
            f"({min(seconds):.3f} to {max(seconds):.3f}, {REPEATS} repeats)"
        )
        if args.json is not None:
            write(args.json, {"backend": args.backend, "mb": args.mb, "seconds": seconds})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
