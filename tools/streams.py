"""Run the contract of strategies on the accelerator of tests with many orders of streams.

::

    python tools/streams.py --json out/streams.json

Each run of a scenario has a seed of its own, which draws how late each stream is and which runs
next. The suite is run with at least 1,000 seeds over all scenarios; then a short list of quick
scenarios, in which many streams meet, with 1,000 more. It prints failures as they come, ends with 1
if there is one, and writes counts, seconds and failures.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from contracts.strategies import devices, test_devices
from contracts.strategies.registry import TINY
from helpers.pool import CaseFailed, Pool

SEEDS = 1000
DEADLINE = 170.0
PER_CALL = 20

Case = tuple[str, Callable[..., Any], tuple[Any, ...], range]
"""Its name, the function with its arguments, and its seeds."""

_SCENARIOS = (
    ("no_sync_with_clipping", "dear"),
    ("clip_norm_2.0", "dear-sharded"),
    ("batch_norm_with_accumulation", "allreduce-coded"),
    ("two_backwards_without_no_sync", "geryon-start"),
)
_METHODS: tuple[tuple[str, Callable[..., Any], tuple[Any, ...]], ...] = (
    ("localsgd", devices.training_on_late_device, ("localsgd:every=2,encrypted=false",)),
    ("diloco", devices.training_on_late_device, ("diloco:every=2,delay=1,encrypted=false",)),
    ("adpsgd", devices.mean_on_late_device, ("adpsgd:encrypted=false", 0.5)),
    (
        "canary, sketch",
        devices.mean_on_late_device,
        ("canary:s=10,compression=sketch,encrypted=false", 0.0),
    ),
)


def suite(each: int) -> Iterator[Case]:
    """Yield every scenario with ``each`` seeds."""
    for number, (name, strategy) in enumerate(test_devices.all_pairs()):
        seeds = range(each * number, each * (number + 1))
        case = devices.scenario_on_late_device
        yield f"{name}, {strategy}", case, (name, strategy, TINY), seeds


def short_list(seeds: int) -> Iterator[Case]:
    """Yield the quick scenarios, which divide ``seeds`` seeds among them."""
    scenarios = [
        (f"{name}, {strategy}", devices.scenario_on_late_device, (name, strategy, TINY))
        for name, strategy in _SCENARIOS
    ]
    cases = [*scenarios, *_METHODS]
    each, first = -(-seeds // len(cases)), 100_000
    for name, case, arguments in cases:
        for start in range(first, first + each, PER_CALL):
            yield name, case, arguments, range(start, min(start + PER_CALL, first + each))
        first += each


def opened() -> Pool:
    """Return two workers with the accelerator."""
    pool = Pool(2)
    pool.run(devices.load, deadline=DEADLINE)
    return pool


def sweep(cases: Iterator[Case], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run cases; return counts, seconds and failures, which ``keep`` gets after each call too."""
    begin, pool, runs, failed = time.monotonic(), opened(), 0, list[dict[str, Any]]()
    names, found = set[str](), dict[str, Any]()
    for name, case, arguments, seeds in cases:
        names.add(name)
        runs += len(seeds)
        try:
            pool.run(case, *arguments, seeds, deadline=DEADLINE)
        except CaseFailed as error:
            failed.append({"name": name, "seeds": [seeds.start, seeds.stop], "error": str(error)})
            print(
                f"FAILED {name}, seeds {seeds.start} to {seeds.stop - 1}: {str(error)[:300]}",
                flush=True,
            )
            pool.close()
            pool = opened()
        found = {
            "scenarios": len(names),
            "seeds": runs,
            "failed": failed,
            "seconds": round(time.monotonic() - begin, 1),
            "load": [round(each, 1) for each in os.getloadavg()],
        }
        keep(found)
    pool.close()
    return found


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of each part")
    parser.add_argument("--part", choices=("suite", "short"), help="one part only")
    given = parser.parse_args()
    count = -(-given.seeds // len(test_devices.all_pairs()))
    parts = {"suite": suite(count), "short": short_list(given.seeds)}
    found: dict[str, Any] = {"torch": torch.__version__}
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)

    def keep(part: str, result: dict[str, Any]) -> None:
        found[part] = result
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=2) + "\n")

    for part, cases in parts.items():
        if given.part in (None, part):
            result = sweep(cases, functools.partial(keep, part))
            print(part, json.dumps({**result, "failed": len(result["failed"])}), flush=True)
    sys.exit(any(found[part]["failed"] for part in parts if part in found))


if __name__ == "__main__":
    main()
