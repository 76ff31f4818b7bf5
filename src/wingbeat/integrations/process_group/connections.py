"""The connections of process groups, and the backends for other devices than the CPU."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from wingbeat.errors import UsageError
from wingbeat.transport.failures import publish_exit, publish_failure
from wingbeat.transport.link import TAG_BITS, Link
from wingbeat.transport.rendezvous import connect
from wingbeat.transport.world import World
from wingbeat.types import Group

_MIN_STRIPED_BYTES = 256 << 10
"""Messages between two ranks use several links from this size on."""

USER_TAG_BITS = 16
NUMBER_BITS = TAG_BITS - 1 - USER_TAG_BITS
"""A message's tag: whether it is of a collective, the number of its group, the user's tag."""


class Connections:
    """The connections between the ranks of a group, shared by all groups of some of these ranks."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        self.store = store
        self.world = connect(store, rank, size, timeout, names.split(",") if names else None)
        self._opened: Counter[tuple[int, ...]] = Counter()
        self._closed = False

    def open(self, ranks: tuple[int, ...], timeout: float) -> World:
        """Return the world of a group of these ranks."""
        group = Group(ranks, self._opened[ranks])
        self._opened[ranks] += 1
        world = self.world.open_group(group)
        world.timeout = timeout
        return world

    def open_default(self) -> World:
        """Return the world of all ranks, on the connections that exist."""
        if self.world.size == 1:
            return self.open((0,), self.world.timeout)
        return self.world.open_channel()

    def number(self, group: Group) -> int:
        """Return the number of a group in the tags of its messages; its first rank assigns it.

        A `UsageError` if there were too many groups.
        """
        key = f"number/{group.epoch}/{'-'.join(map(str, group.ranks))}"
        store = self.world.store
        if group.ranks[0] == self.world.rank and not store.has(key):
            store.set(key, str(self.store.add("numbers", 1)))
        number = int(store.get(key, self.world.timeout))
        if not 0 < number < 1 << NUMBER_BITS:
            raise UsageError(
                f"{group} is the {number}th process group of this job: allowed are "
                f"{(1 << NUMBER_BITS) - 1}; reuse groups"
            )
        return number

    def close(self, error: BaseException | None) -> None:
        """Publish how this process leaves, and close all connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        world = self.world
        if error is not None:
            publish_failure(world.store, world.rank, error)
        world.on_close(lambda: publish_exit(world.store, world.rank, error is None))
        world.close()


def striped(world: World, data: torch.Tensor) -> list[tuple[Link, torch.Tensor]]:
    """Divide bytes among the links by their speeds, equally on both ranks."""
    if data.numel() < _MIN_STRIPED_BYTES or len(world.links) == 1:
        return [(world.links[0], data)]
    ends = [round(data.numel() * share) for share in itertools.accumulate(world.weights)]
    ends[-1] = data.numel()
    parts = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return [(link, part) for link, part in zip(world.links, parts, strict=True) if part.numel()]


class OtherDevices:
    """The groups of torch for tensors on other devices, such as NCCL's; created on first use.

    torch replaces its own group by one that is written in Python, and leaves the other devices of
    ``cpu:wingbeat,cuda:nccl`` to it. ``ranks`` are the members' ranks in the default group, empty
    for the default group itself; ``options`` is the argument of ``init_process_group``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store,
        timeout: timedelta,
        ranks: Sequence[int] = (),
        options: Any = None,
    ) -> None:
        self._group, self._store, self._timeout = weakref.ref(group), store, timeout
        self._ranks, self._options = list(ranks), options
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._lock = threading.Lock()

    def backends(self) -> dict[str, str]:
        """Return the backend of each device, as given to ``init_process_group``."""
        config = str(c10d._world.pg_backend_config.get(self._group(), ""))
        pairs = (pair.partition(":")[::2] for pair in config.split(",") if ":" in pair)
        return {device: backend for device, backend in pairs if device != "cpu"}

    def adopt(self, former: dist.ProcessGroup) -> None:
        """Use the backends that torch has created in the group that this one replaces."""
        for device in former._device_types:
            self._groups[device.type] = former

    def get(self, device: str) -> dist.ProcessGroup:
        """Return the group for a device; a `RuntimeError` if it has no backend."""
        with self._lock:
            if device not in self._groups:
                backends = self.backends()
                if self._group() not in c10d._world.pg_backend_config:
                    # torch asks for the device of ``device_id`` before it stores the names.
                    backends = c10d.Backend.default_device_backend_map
                if device not in backends:
                    raise RuntimeError(
                        f"no backend for tensors on {device}: the backend wingbeat carries CPU "
                        'tensors; call init_process_group("cpu:wingbeat,cuda:nccl")'
                    )
                self._groups[device] = self._create(f"{device}:{backends[device]}")
            return self._groups[device]

    def call(self, method: str, *args: Any) -> None:
        """Call a method of each group."""
        for group in set(self._groups.values()):
            getattr(group, method)(*args)

    def _create(self, backend: str) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None
        name = f"{group.group_name}/{backend}"
        made, _ = c10d._new_process_group_helper(
            group.size(), group.rank(), self._ranks, backend, self._store, name,
            backend_options=self._options, timeout=self._timeout, pg_tag=name,
        )  # fmt: skip
        members = self._ranks or range(group.size())
        c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(members)}
        return made
