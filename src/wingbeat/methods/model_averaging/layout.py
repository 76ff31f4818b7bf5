"""Which worker is on which host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wingbeat.errors import UsageError


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """Workers, by host. Hosts may have different numbers of workers.

    Attributes:
        hosts: the workers of each host, in ascending order: the k-th is the host's local worker k.
        host_of: the host of each worker.

    Raises:
        UsageError: there is no worker, or a host has none.

    >>> Layout([0, 0, 1, 1]).hosts
    ((0, 1), (2, 3))
    """

    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...] = field(compare=False, repr=False)

    def __init__(self, host_of: Sequence[int]) -> None:
        hosts: list[list[int]] = [[] for _ in range(max(host_of, default=-1) + 1)]
        for worker, host in enumerate(host_of):
            if host < 0:
                raise UsageError(f"Layout: worker {worker} is on host {host}: allowed are 0 and up")
            hosts[host].append(worker)
        if not hosts:
            raise UsageError("Layout: there are no workers: name the host of one at least")
        if not all(hosts):
            raise UsageError(f"Layout: host {hosts.index([])} has no worker: leave no number out")
        object.__setattr__(self, "hosts", tuple(map(tuple, hosts)))
        object.__setattr__(self, "host_of", tuple(host_of))

    @classmethod
    def even(cls, hosts: int, workers: int) -> Layout:
        """Return the layout of ``hosts`` hosts with ``workers`` workers each, as torchrun's is.

        Raises:
            UsageError: there are no hosts, or no workers.
        """
        if hosts < 1 or workers < 1:
            raise UsageError(f"Layout.even(hosts={hosts}, workers={workers}): 1 or more of each")
        return cls([host for host in range(hosts) for _ in range(workers)])

    @classmethod
    def by_name(cls, names: Iterable[object]) -> Layout:
        """Return the layout of workers that each name their host, by any value.

        >>> Layout.by_name(["a", "b", "a"]).hosts
        ((0, 2), (1,))
        """
        numbers: dict[object, int] = {}
        return cls([numbers.setdefault(name, len(numbers)) for name in names])

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.host_of)
