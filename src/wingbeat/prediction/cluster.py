"""The cluster of a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wingbeat.simulator.cluster import Links
from wingbeat.types import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts, their workers, and the links between them.

    Attributes:
        links: network interfaces of the hosts, with payload rates.
        layout: hosts of the workers.
        slow: by host, factor of the compute times of its workers, if they differ.
    """

    links: Links
    layout: Layout
    slow: Mapping[int, float] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.layout.workers

    @property
    def slow_workers(self) -> dict[int, float]:
        """The factors of compute times by worker."""
        return {
            worker: factor
            for host, factor in self.slow.items()
            for worker in self.layout.hosts[host]
        }
