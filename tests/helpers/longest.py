"""Begin with the files that take longest, so that none is left to one worker at the end."""

from __future__ import annotations

from typing import TypeVar

FILES = (
    "engine/test_mesh.py",
    "contracts/strategies/test_contract.py",
    "engine/test_mesh_averages.py",
    "transport/test_rendezvous.py",
    "engine/test_mesh_methods.py",
    "transport/test_graceful_shutdown.py",
    "integrations/test_mesh_trainers.py",
    "integrations/test_lightning_uses.py",
)
"""Files that take longest. Of four workers two have those of meshes, which start four processes
each: with four such workers, other tests take ten times as long. One worker has the contract of
strategies, so that its pools start once."""

Item = TypeVar("Item")


def first(items: list[tuple[str, Item]], workers: int) -> list[Item]:
    """Return the items in an order for xdist's ``worksteal``.

    It gives each worker a contiguous part of the list. The files are dealt to the fronts of these
    parts, each as a whole.

    Args:
        items: each with its file, relative to the folder of tests, in the order of collection.
        workers: how many there are.
    """
    files: dict[str, list[Item]] = {name: [] for name in FILES}
    rest: list[Item] = []
    for name, item in items:
        files.get(name, rest).append(item)
    fronts: list[list[Item]] = [[] for _ in range(workers)]
    for number, found in enumerate(files.values()):
        fronts[number % workers] += found
    ordered: list[Item] = []
    for number, front in enumerate(fronts):
        part = (len(items) - len(ordered)) // (workers - number)
        filling = max(0, part - len(front))
        ordered += [*front, *rest[:filling]]
        rest = rest[filling:]
    return ordered + rest
