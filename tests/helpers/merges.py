"""Small workloads, and plans as the tests read them."""

from __future__ import annotations

from wingbeat.costs import Workload
from wingbeat.types import Plan, PlannedBucket

F32 = "float32 cpu"


def work(
    ready: list[float], numels: list[int], nbytes: list[float] | None = None, kinds: str = ""
) -> Workload:
    """A workload of tensors 0, 1, 2, ...; each letter of ``kinds`` is a kind."""
    return Workload(
        tensors=tuple(range(len(ready))),
        ready_s=tuple(ready),
        numels=tuple(numels),
        nbytes=tuple(nbytes if nbytes is not None else [6e-3 * n for n in numels]),
        kinds=tuple(kinds) if kinds else (F32,) * len(ready),
    )


def groups(plan: Plan) -> list[tuple[int, ...]]:
    return [bucket.tensors for bucket in plan.buckets]


def plan_of(*buckets: tuple[int, ...]) -> Plan:
    return Plan(tuple(PlannedBucket(bucket) for bucket in buckets))
