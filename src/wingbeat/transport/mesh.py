"""Replicas of a `torch.distributed.device_mesh.DeviceMesh`: which ranks exchange with which.

A *replica* is what exchanges: ranks that hold one model together, in all dimensions of a mesh but
one. Along that one, each rank exchanges with the ranks that have its other coordinates, which are
its *column*: they hold the same part of the model. Without a mesh each process is a replica.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from wingbeat.errors import MismatchError, UsageError
from wingbeat.transport.rendezvous import connect_column
from wingbeat.transport.store import AtomicStore
from wingbeat.transport.torch_store import TorchStore
from wingbeat.transport.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Replica:
    """The ranks that hold one model together, as seen by one of them.

    Attributes:
        number: of this replica, which is this worker's rank in its column.
        place: of this rank in the replica, which is the number of its column.
        ranks: of the job, ascending.
        names: of the dimensions inside that have several ranks.
        groups: torch's process group of each of these, which this rank is in.
        device: the device type of the mesh, whose tensors the groups reduce.
        replicas: the ranks of each replica of the job.
        mesh_store: a part of the job's store, for all ranks of the mesh.
        leader: the rank of the job that decides for the replica. The leaders are one column.
        first: rank in the job of rank 0 of torch's default group.
        life: distinguishes the processes of a restarted replica from its former ones.
    """

    number: int
    place: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    groups: tuple[Any, ...]
    device: str
    replicas: tuple[tuple[int, ...], ...]
    mesh_store: AtomicStore
    leader: int
    first: int = 0
    life: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def name(self, number: int) -> str:
        """Return the name of a replica in messages."""
        return f"replica {number} (ranks {_listed(self.replicas[number])})"

    def group_ranks(self, name: str) -> list[int]:
        """Return the ranks along a dimension, of the job."""
        ranks = dist.get_process_group_ranks(self.groups[self.names.index(name)])
        return [self.first + rank for rank in ranks]

    def mesh_ranks(self, mesh: DeviceMesh) -> torch.Tensor:
        """Return the ranks of a mesh of torch, of the job."""
        ranks: torch.Tensor = mesh.mesh + self.first
        return ranks

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of the replica, which must all call this."""
        return self._reduce(tensor, dist.ReduceOp.SUM, self.groups)

    def max(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """Return the elementwise maximum over all ranks, or over those along dimension ``name``."""
        groups = self.groups if not name else (self.groups[self.names.index(name)],)
        return self._reduce(tensor, dist.ReduceOp.MAX, groups)

    def _reduce(self, tensor: torch.Tensor, op: Any, groups: Sequence[Any]) -> torch.Tensor:
        # A group for both kinds reduces a tensor of the host without waiting for the accelerator.
        kind = tensor.device.type
        device = kind if all(_carries(group, kind) for group in groups) else self.device
        found = tensor.detach().to(device, copy=True)
        for group in groups:  # one dimension after the other reduces over all of them
            dist.all_reduce(found, op=op, group=group)
        return found.to(tensor.device)


def describe(mesh: Any, across: str | None) -> dict[str, Any]:
    """Return what must be equal on all ranks, for `World.exchange`; a `UsageError` for no mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"distribute(mesh={type(mesh).__name__}): pass a torch DeviceMesh, such as "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))'
        )
    if across is not None and not isinstance(across, str):
        raise UsageError(f"distribute(across={across!r}): pass the name of a dimension of the mesh")
    return {
        "shape": list(mesh.mesh.shape),
        "names": list(mesh.mesh_dim_names or ()),
        "device": mesh.device_type,
        "ranks": mesh.mesh.flatten().tolist(),
        "across": across,
    }


def _carries(group: Any, kind: str) -> bool:
    """Whether a process group of torch has a backend for tensors on a type of device."""
    try:
        group._get_backend(torch.device(kind))
    except RuntimeError:
        return False
    return True


def check_groups(kind: str, names: Sequence[str], groups: Sequence[Any]) -> None:
    """Raise a `UsageError` for a dimension whose process group does not carry the mesh's tensors.

    ``kind`` is the device type of the mesh.
    """
    for name, group in zip(names, groups, strict=True):
        if not _carries(group, kind):
            raise UsageError(
                f"distribute(mesh=...): torch's process group of dimension {name!r} carries no "
                f"{kind!r} tensors: start the default group for both kinds of tensors, as by "
                'torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), before wingbeat.init()'
            )


_TITLES = {"shape": "shape", "names": "dimensions", "device": "device type", "ranks": "ranks"}


def refuse_unequal(first: Any, other: Any, rank: int) -> None:
    """Raise a `MismatchError` if rank 0 and another give unequal results of `describe`, or None."""
    if first == other:
        return
    if not (isinstance(first, dict) and isinstance(other, dict)):
        with_mesh, without = (rank, 0) if first is None else (0, rank)
        raise MismatchError(
            f"rank {with_mesh} gives distribute() a mesh and rank {without} none; all ranks must "
            "pass the same mesh"
        )
    key = next(key for key in first if first[key] != other.get(key))
    if key == "across":
        raise MismatchError(
            f"rank 0 has across={first[key]!r}, rank {rank} has across={other[key]!r}; all ranks "
            "must name the same dimension"
        )
    raise MismatchError(
        f"rank 0's mesh has {_TITLES[key]} {first[key]}, rank {rank}'s has {other.get(key)}; all "
        "ranks must pass the same mesh, of all ranks of the job"
    )


_columns: weakref.WeakKeyDictionary[World, dict[str, World]] = weakref.WeakKeyDictionary()
"""The columns of each job, by mesh: two models of one mesh share the connections."""


def _torch_ranks(job: World) -> tuple[int, int]:
    """Return the first rank of torch's default group, in the job, and the number of its ranks."""
    return (0, job.size) if job.torch_job is None else job.torch_job[:2]


def _check_mesh(job: World, told: dict[str, Any], across: str | None) -> None:
    """Raise a `UsageError` for a mesh that is impossible in the job; ``told``: see `describe`."""
    if job.threads or job.members or job.group is not None:
        raise UsageError("distribute(mesh=...): the world must be that of wingbeat.init()")
    if across is not None and across not in told["names"]:
        raise UsageError(
            f"distribute(across={across!r}): the mesh has no such dimension; it has "
            f"{', '.join(map(repr, told['names'])) or 'no names: give init_device_mesh names'}"
        )
    part = job.torch_job
    if part is not None and across is not None:
        raise UsageError(
            f"distribute(across={across!r}): this torch job is one replica (WINGBEAT_REPLICA), and "
            "its mesh has no dimension across replicas: leave across out"
        )
    first, size = _torch_ranks(job)
    if sorted(told["ranks"]) != list(range(size)):
        raise UsageError(
            f"distribute(mesh=...): the mesh has ranks {_listed(told['ranks'])}, and "
            f"{'the job' if part is None else 'the torch job of this replica'} ranks "
            f"{_listed(range(size))}: pass the whole mesh, of all ranks, not a part of it"
        )
    of_torch = first + dist.get_rank() if dist.is_initialized() else job.rank
    if of_torch != job.rank:
        raise UsageError(
            f"distribute(mesh=...): rank {job.rank - first} of wingbeat.init() is rank "
            f"{of_torch - first} of torch's default group: start both from the same variables RANK "
            "and WORLD_SIZE"
        )


def replicas_of(job: World, mesh: Any, across: str | None) -> torch.Tensor:
    """Return the ranks of each replica, one row each. Arguments are those of `column_of`.

    Each column of the result is one of ranks that exchange with each other. A `UsageError` for the
    meshes that `column_of` refuses.
    """
    told = describe(mesh, across)
    _check_mesh(job, told, across)
    if job.torch_job is not None:
        return torch.arange(job.size, device="cpu").reshape(-1, job.torch_job[1])
    replicas: torch.Tensor = mesh.mesh.movedim(_place_of(told, across), 0).flatten(1)
    _, position = (replicas == job.rank).nonzero()[0].tolist()
    members = replicas[:, position].tolist()
    if members != sorted(members):
        raise UsageError(
            "distribute(mesh=...): the dimension across replicas has ranks "
            f"{_listed(members)}: number them in ascending order, as init_device_mesh() does"
        )
    return replicas


def _place_of(told: dict[str, Any], across: str | None) -> int:
    """Return the dimension across replicas; ``told``: see `describe`."""
    return 0 if across is None else told["names"].index(across)


def column_of(job: World, mesh: Any, across: str | None) -> World:
    """Return the world of the ranks with which this rank exchanges. Every rank must call it.

    Args:
        job: the world that `init` returned.
        mesh: of all ranks of the job, or of torch's default group if that is a replica; equal on
            all ranks of the job.
        across: the dimension across replicas; None: the first, or none if the group is a replica.

    Raises:
        UsageError: the mesh has no such dimension, or not all of these ranks.
        RendezvousError: ranks are missing.
    """
    replicas, told = replicas_of(job, mesh, across), describe(mesh, across)
    names: list[str] = told["names"] or [str(i) for i in range(len(told["shape"]))]
    first, _ = _torch_ranks(job)
    known = _columns.setdefault(job, {})
    # A torch job that is a replica has no dimension across replicas.
    place = _place_of(told, across) if job.torch_job is None else None
    key = f"{told['device']}{told['shape']}{told['ranks']}{place}"
    if key not in known:
        # Processes of a replica that was restarted connect to each other again.
        life = "" if job.torch_job is None else job.torch_job.life
        number, position = (replicas == job.rank).nonzero()[0].tolist()
        members = replicas[:, position].tolist()
        inner = [i for i, size in enumerate(mesh.mesh.shape) if i != place and size > 1]
        inner_names, groups = [names[i] for i in inner], [mesh.get_group(i) for i in inner]
        check_groups(mesh.device_type, inner_names, groups)
        assert isinstance(job.store, TorchStore)
        world = connect_column(job, members, f"{len(known)}")
        world.inside = Replica(
            number,
            position,
            tuple(sorted(replicas[number].tolist())),
            tuple(inner_names),
            tuple(groups),
            mesh.device_type,
            tuple(tuple(sorted(row)) for row in replicas.tolist()),
            job.store.under(f"mesh/{len(known)}"),
            int(replicas[number, 0]),
            first,
            life,
        )
        known[key] = world
    return known[key]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
