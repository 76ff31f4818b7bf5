"""P-Reduce: the mean of one flat buffer over the members of a group (Ripples, section 3.2)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from wingbeat.collectives import Collectives, Encoded
from wingbeat.errors import PeerError
from wingbeat.exchanges.lossy import Lossy
from wingbeat.groups.averages import GIVEN_UP, Coming
from wingbeat.observe.events import AVERAGES, stream
from wingbeat.transport.blame import Blame
from wingbeat.transport.meeting import room_of
from wingbeat.types import Group, Span

if TYPE_CHECKING:
    from wingbeat.collectives import Handle
    from wingbeat.groups.generator import Run
    from wingbeat.transport.world import World

_LOOK_S = 0.5
"""Seconds between two looks at whether members that have not come may still do."""

GRACE_S = 5.0
"""Seconds, beside twice what the longest average has taken, in which what was sent arrives."""


class GroupAverage:
    """Averages this worker's parameters with those of groups, for `wingbeat.groups.client.Client`.

    Connections are kept for as long as the group generator says. If a group fails, the buffer is as
    it was.

    Args:
        world: of all workers, on CPUs.
        buffer: all parameters: flat, contiguous, of floating point numbers, on the CPU.
        wire: what they travel as; as they are if None.
        first: the epoch of the group whose meeting has number 0: another one for each buffer of
            a world.

    Attributes:
        part: of the buffer, which is averaged; all of it to begin with.
        plain: whether it travels as it is now, whatever the wire.
        wire: what parts travel as otherwise, and what that loses.
        members: of the group that is being averaged with now, or was last.
        made: how many averages were.
    """

    def __init__(
        self,
        world: World,
        buffer: torch.Tensor,
        wire: Lossy | torch.dtype | None = None,
        *,
        first: int = 0,
    ) -> None:
        self._world, self._buffer = world, buffer
        self.wire = wire if isinstance(wire, Lossy) else Lossy(wire)
        self.plain = False
        self._first = first
        self.part = Span(0, buffer.numel())
        self.members: tuple[int, ...] = ()
        self.made = 0
        # A collective that fails leaves nothing of its buffer.
        self._sum = torch.empty_like(buffer)
        self._longest_s = 0.0
        self._kept: dict[int, tuple[Group, World, Collectives]] = {}

    @property
    def kept(self) -> int:
        """How many groups' connections are kept."""
        return len(self._kept)

    def average(self, run: Run, meeting: int, coming: Callable[[], Coming]) -> int | None:
        """Replace the buffer's part by its mean over the members, with the same bits on each.

        Args:
            run: the group, of two members at least.
            meeting: its number, the same on all members; that of before if connections are kept.
            coming: whether members that have not come will.

        Returns:
            None; or a member that was lost, or `GIVEN_UP`, and the buffer is as it was.
        """
        if meeting not in self._kept:
            group = Group(run.members, epoch=self._first + meeting)
            inner = self._world.open_group(group)
            self._kept[meeting] = group, inner, Collectives(inner)
        group, inner, collectives = self._kept[meeting]
        self.members = run.members
        inside = slice(self.part.start, self.part.stop)
        begin = time.monotonic_ns() if stream.on else 0
        total = self._sum[inside].copy_(self._buffer[inside])
        try:
            handle = self._start(collectives, total)
            if not self._over(handle, coming):
                collectives.abandon()
                self.close([meeting])
                self._sum = torch.empty_like(self._sum)  # what is under way may still write to it
                return GIVEN_UP
            handle.wait()
        except PeerError:
            lost = self._lost(group, inner)
            self.close([meeting])
            return lost
        self._buffer[inside].copy_(total.div_(len(run.members)))
        if not self.plain:
            self.wire.made(self.part)
        self.made += 1
        if begin:
            stream.record(
                "average", begin, time.monotonic_ns(), nbytes=total.nbytes, lane=AVERAGES,
                group=run.members,
            )  # fmt: skip
        return None

    def close(self, meetings: Iterable[int] | None = None) -> None:
        """Close the connections of these meetings; of all if None."""
        for meeting in list(self._kept) if meetings is None else meetings:
            kept = self._kept.pop(meeting, None)
            if kept is not None:
                kept[1].close()

    def _start(self, collectives: Collectives, total: torch.Tensor) -> Handle:
        # Members that are at different parts of one size are not to add these up.
        number = self.part.start or -1
        wire = None if self.plain else self.wire.begin(self.part)
        if isinstance(wire, Encoded) and self.wire.gathers:
            return collectives.all_gather_sum(total, wire=wire, bucket=number)
        return collectives.all_reduce(total, wire=wire, bucket=number)

    def _over(self, handle: Handle, coming: Callable[[], Coming]) -> bool:
        """Wait for a collective; False if members have not come and will not.

        Who has been there and is gone may have sent all that is needed. If this one is given up in
        the midst of it, the others lose this member.
        """
        over = threading.Event()
        handle.add_done_callback(lambda _: over.set())
        begun = time.monotonic()
        dead: float | None = None
        while not over.wait(_LOOK_S):
            now, expected = time.monotonic(), coming()
            if expected is Coming.NEVER:
                return over.is_set()
            if expected:
                dead = None
            elif dead is None:
                dead = now
            elif now - dead > GRACE_S + 2 * self._longest_s:
                return False
        self._longest_s = max(self._longest_s, time.monotonic() - begun)
        return True

    def _lost(self, group: Group, inner: World) -> int:
        """Return which member has failed; this worker itself, if the others have not waited."""
        rank = self._world.rank
        blame = Blame(inner.store, rank, self._world.size, inner.timeout, room_of(group))
        waited_for = blame.whom(rank)
        return rank if waited_for is None else blame.culprit(waited_for)
