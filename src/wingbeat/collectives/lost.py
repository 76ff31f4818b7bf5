"""What is said when a transfer has failed: who is to blame, and what everybody was doing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat.errors import PeerError
from wingbeat.transport.blame import Blame, finished_text
from wingbeat.transport.meeting import NotMet, given_up_text
from wingbeat.transport.text import first_line

if TYPE_CHECKING:
    from wingbeat.collectives.job import Job
    from wingbeat.collectives.program import Transfer
    from wingbeat.types import Group


class LostPeer(Exception):
    """A transfer failed after ``seconds``, with ``peer`` as it is numbered among all workers.

    Attributes:
        met: whether the members of the group had come together before.
        missed_by: a member of the group that had given up before, as it waited for this rank.
    """

    def __init__(
        self, job: Job, transfer: Transfer, peer: int, seconds: float, err: Exception | str
    ) -> None:
        self.job, self.transfer, self.seconds = job, transfer, seconds
        self.met = not isinstance(err, NotMet)
        self.peer = err.peer if isinstance(err, NotMet) else peer
        self.missed_by: int | None = None
        self.reason = err if isinstance(err, str) else first_line(err)
        super().__init__(self.reason)  # not with err, whose frames hold the transfer


def explain(blame: Blame, rank: int, lost: LostPeer, where: str, group: Group | None) -> PeerError:
    """Return what ``rank`` says about ``lost``, once the others have had time to say theirs.

    ``where`` is the collective and the interface; ``group`` is whose collective it is, if it is not
    the world's.
    """
    if group is not None:
        where = f"{where} in {group}"
    if not lost.met:
        return PeerError(f"rank {rank}: {lost.reason} (noticed in {where})")
    culprit = blame.culprit(lost.peer) if lost.missed_by is None else lost.missed_by
    through = "" if culprit == lost.peer else f" (noticed through rank {lost.peer})"
    if lost.missed_by is None and blame.finished(culprit):
        return PeerError(_finished(rank, culprit, where + through, group))
    if failure := blame.failure(culprit):
        return PeerError(
            f"rank {rank}: rank {culprit} failed with {failure}, noticed in {where} "
            f"after {lost.seconds:.1f} s{through}"
        )
    theirs = blame.doing(culprit)
    if theirs and theirs != str(lost.job):
        return PeerError(
            f"rank {rank}: rank {culprit} was in {theirs} while this rank waited for it "
            f"in {where} for {lost.seconds:.1f} s{through}: all {_MEMBERS[group is None]} must "
            f"make the same calls, in the same order ({lost.reason})"
        )
    if group is not None and lost.missed_by is not None:
        return PeerError(f"rank {rank}: {given_up_text(group, rank, culprit, blame)}")
    return PeerError(
        f"rank {rank}: rank {culprit} failed during {where} "
        f"after {lost.seconds:.1f} s{through}: {lost.reason}"
    )


_MEMBERS = {True: "ranks", False: "members"}


def _finished(rank: int, finished: int, waiting_in: str, group: Group | None) -> str:
    if group is None:
        return finished_text(rank, finished, waiting_in)
    return (
        f"rank {rank}: rank {finished} has finished (its script ended, or called sys.exit() or "
        f"wingbeat.shutdown()) while this rank waits for it in {waiting_in}"
    )
