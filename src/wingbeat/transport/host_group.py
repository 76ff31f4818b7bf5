"""torch's process group of the devices of a host, such as NCCL's."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from wingbeat.observe.log import log
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World


@dataclass(frozen=True, eq=False)
class HostGroup:
    """The devices of one host, one of each of its workers.

    Attributes:
        handle: torch's process group.
        backend: its name, such as ``"nccl"``.
        place: of this worker on its host, by which a reduce-scatter assigns the parts.
        size: number of workers on the host.
    """

    handle: Any
    backend: str
    place: int
    size: int

    def reduce_scatter(self, part: torch.Tensor, buffer: torch.Tensor) -> dist.Work:
        """Sum into this worker's part of the buffer, which may be in the buffer."""
        return dist.reduce_scatter_tensor(part, buffer, group=self.handle, async_op=True)

    def all_gather(self, buffer: torch.Tensor, part: torch.Tensor) -> dist.Work:
        """Send this worker's part, which may be in the buffer, to all workers of the host."""
        return dist.all_gather_into_tensor(buffer, part, group=self.handle, async_op=True)

    def close(self) -> None:
        """Destroy the group, unless the script has destroyed it."""
        if dist.is_initialized() and self.handle in dist.distributed_c10d._world.pg_map:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self.handle)


class _Answer(NamedTuple):
    """What a worker can offer: its kind of device, the backend for it, and why there is none."""

    device: str
    backend: str
    why: str


def open_host_group(world: World, device: torch.device) -> HostGroup | None:
    """Create the groups of all hosts, and return that of this host. Every worker must call it.

    None on all workers, with a line in the log, if one of them cannot take part, or if the group of
    one host does not work. A `RendezvousError` as in `World.exchange`.
    """
    sizes = {len(host) for host in world.layout.hosts}
    if len(sizes) > 1:
        _report(world, device, f"hosts have different numbers of workers, {_listed(sizes)}")
        return None
    answers = world.exchange("host group", _answer(world, device), _Answer)
    for rank, each in enumerate(answers):
        why = each.why
        if each[:2] != answers[0][:2]:
            why = f"its device is {each.device!r} and that of {world.name(0)} {answers[0].device!r}"
        if why:
            _report(world, device, f"{world.name(rank)}: {why}")
            return None
    group, failed = _create(world, device, answers[0].backend)
    for rank, why in enumerate(world.exchange("host group works", failed, str)):
        if why:
            _report(world, device, f"{world.name(rank)}: {why}")
            if group is not None:
                group.close()
            return None
    return group


def _answer(world: World, device: torch.device) -> _Answer:
    own = world.ranks[world.rank]
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:
        backend = ""
    why = ""
    if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != (own, world.size):
        why = "torch's default group does not have the ranks of the job"
    elif backend in ("", dist.Backend.GLOO):
        why = f"this torch has no process group for {device.type!r}"
    elif backend == dist.Backend.NCCL and not dist.is_nccl_available():
        why = "this torch has no NCCL"
    return _Answer(device.type, backend, why)


def _create(world: World, device: torch.device, backend: str) -> tuple[HostGroup | None, str]:
    """Create the groups and try that of this host; return it, or None with the reason."""
    layout, mine = world.layout, None
    try:
        # Each rank creates the groups of all hosts, in one order: `new_group` counts its calls.
        for host in layout.hosts:
            timeout = timedelta(seconds=world.timeout)
            handle = dist.new_group(list(host), backend=backend, timeout=timeout)
            if world.rank in host:
                mine = HostGroup(handle, backend, host.index(world.rank), len(host))
        assert mine is not None
        # NCCL connects in its first collective, and refuses two ranks with one device there.
        tried = torch.full((mine.size,), float(mine.place), device=device)
        mine.all_gather(tried, tried[mine.place : mine.place + 1]).wait()
        if tried.tolist() != list(range(mine.size)):
            return mine, f"a gather in {backend} returned {tried.tolist()}"
    except (RuntimeError, ValueError) as error:
        return mine, first_line(error)
    return mine, ""


def _report(world: World, device: torch.device, why: str) -> None:
    if world.leads:
        log.warning(
            "tensors on %s are not summed inside hosts, and each process copies whole buckets to "
            "its host, because %s",
            *(device.type, why),
        )


def _listed(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))
