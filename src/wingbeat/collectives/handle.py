"""What a caller holds of a collective that is under way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from wingbeat.collectives.callbacks import run_callback
from wingbeat.errors import PeerError

if TYPE_CHECKING:
    from wingbeat.collectives.job import Job
    from wingbeat.collectives.native import NativeJob


class Handle:
    """A collective under way on one or more links."""

    __slots__ = ("jobs",)

    def __init__(self, jobs: Sequence[Job | NativeJob]) -> None:
        self.jobs = jobs

    def done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting."""
        return all(job.done() for job in self.jobs)

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Have ``callback(handle)`` called once, when the collective is done or has failed.

        It runs in the thread that finishes the collective, so it must be short and wait for
        nothing; at once, in this one, if all is done already. What it raises is logged.

        Raises:
            UsageError: a library runs the collective by itself, and it is not done yet.
        """
        if not self.jobs:
            run_callback(lambda: callback(self))
            return
        finished = itertools.count(1)

        def one_more() -> None:
            if next(finished) == len(self.jobs):
                callback(self)

        for job in self.jobs:
            job.add_done_callback(one_more)

    def wait(self) -> None:
        """Block until the collective is done on this worker, or has failed on all links.

        Either way nothing reads or writes the buffer any more.

        Raises:
            PeerError: a peer failed or was silent for too long; names it and the collective.
        """
        wait_for_all(job.wait for job in self.jobs)

    def wait_received(self) -> None:
        """Block until the result can be read. It may be written to only after `wait`.

        Raises:
            PeerError: as for `wait`.
        """
        wait_for_all(job.wait_received for job in self.jobs)


def wait_for_all(waits: Iterable[Callable[[], None]]) -> None:
    """Call each, whatever the others raise; then raise what the first has raised, if one has."""
    first: PeerError | None = None
    for wait in waits:
        try:
            wait()
        except PeerError as error:
            first = first or error
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback holds this frame
