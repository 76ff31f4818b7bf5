"""Averages of parameters in groups of the moment, beside training (Ripples, section 3.2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from wingbeat.errors import UsageError
from wingbeat.exchanges.grouping import Grouping
from wingbeat.observe.meter import Section
from wingbeat.transport import leaving
from wingbeat.types import Span

if TYPE_CHECKING:
    import torch

    from wingbeat.transport.world import World


class GroupAverager:
    """Has a thread meet the groups that this worker is in, while training goes on.

    Args:
        grouping: this worker's way to groups; closed with it.
        buffer: all parameters: flat, contiguous, of floating point, on the CPU.
        world: of all workers.
    """

    def __init__(self, grouping: Grouping, buffer: torch.Tensor, world: World) -> None:
        self.buffer = buffer
        self.grouping, self._threads, self._closed = grouping, world.threads, False
        self._rank = world.rank
        self._whole = Span(0, buffer.numel())
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._over = threading.Event()
        self._over.set()
        self._failed: BaseException | None = None
        self._averages = self._waits = self._before = 0
        self._thread = threading.Thread(target=self._serve, name="wingbeat-averages", daemon=True)
        self._thread.start()

    @property
    def members(self) -> tuple[int, ...]:
        """Of the last group that `begin` has led to; this worker, if it was left to itself."""
        averages = self.grouping.averages
        return averages.members if averages.made > self._before else (self._rank,)

    def begin(self, part: Span) -> None:
        """Have the part averaged in the next groups; leave it alone until `end`.

        Raises:
            UsageError: it was closed.
        """
        self._start(part, self.grouping.step)

    def end(self) -> None:
        """Wait until this worker's groups are done.

        Raises:
            PeerError: no group came in time, or the generator has sent what it never sends.
        """
        self._waits += not self._over.is_set()
        self._over.wait()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def taken(self) -> None:
        """The average was taken over: what it lacks on account of a codec is sent the next time."""
        self.grouping.averages.wire.taken()

    def level(self, part: Span | None = None) -> None:
        """Make the buffer the mean over all workers that take part, who all call this.

        It travels as it is, whatever averages travel as; what these have rounded off it has back.

        Args:
            part: of it; all if None.

        Raises:
            PeerError: a worker did not; names it.
            UsageError: it was closed.
        """
        self.grouping.averages.wire.settle(self.buffer)
        self._start(part or self._whole, self.grouping.level)
        self.end()

    def sections(self) -> Sequence[Section]:
        """Return how often it has averaged and waited, with whom last, and who takes no part."""
        client = self.grouping.client
        return [
            Section(
                "groups",
                {
                    "averages": self._averages,
                    "waits": self._waits,
                    "group": " ".join(map(str, sorted(self.grouping.averages.members))),
                    "absent": " ".join(map(str, sorted(client.absent))),
                    "generator": "gone" if client.fallen else "",
                },
            )
        ]

    def close(self) -> None:
        """Leave; nobody waits for this worker any more."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._threads:
            # Whoever closes worlds of one process closes one after the other.
            threading.Thread(target=self._end, name="wingbeat-ending").start()
        else:
            self._end()

    def _end(self) -> None:
        if not leaving.failing():
            self._thread.join()
        self.grouping.close()

    def _start(self, part: Span, step: Callable[[], None]) -> None:
        if self._closed:  # its thread would never answer
            raise UsageError(
                f"rank {self._rank}: wingbeat was shut down, and models are averaged no more: call "
                "wingbeat.shutdown() after the last step and wingbeat.synchronize()"
            )
        averages = self.grouping.averages
        averages.part, averages.plain = part, step == self.grouping.level
        self._before = averages.made
        self._over.clear()
        self._jobs.put(step)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
                self._averages += 1
            except BaseException as error:  # for the thread that trains
                self._failed = error
            self._over.set()
