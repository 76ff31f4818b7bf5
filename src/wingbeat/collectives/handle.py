"""What a caller holds of a collective that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.collectives.executor import Job
    from wingbeat.collectives.native import NativeJob


class Handle:
    """A collective under way on one or more links."""

    __slots__ = ("jobs",)

    def __init__(self, jobs: Sequence[Job | NativeJob]) -> None:
        self.jobs = jobs

    def wait(self) -> None:
        """Block until the collective is done on this worker.

        Raises:
            PeerError: a peer failed or was silent for too long; names it and the collective.
        """
        for job in self.jobs:
            job.wait()

    def wait_received(self) -> None:
        """Block until the result can be read. It may be written to only after `wait`.

        Raises:
            PeerError: as for `wait`.
        """
        for job in self.jobs:
            job.wait_received()
