"""What is said when a transfer has failed: who is to blame, and what everybody was doing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat.errors import PeerError
from wingbeat.transport.blame import Blame, finished_text

if TYPE_CHECKING:
    from wingbeat.collectives.executor import Job
    from wingbeat.collectives.program import Transfer


class LostPeer(Exception):
    """A transfer failed after ``seconds``."""

    def __init__(self, job: Job, transfer: Transfer, seconds: float, reason: str) -> None:
        self.job, self.transfer, self.seconds, self.reason = job, transfer, seconds, reason


def explain(blame: Blame, rank: int, lost: LostPeer, where: str) -> PeerError:
    """Return what ``rank`` says about ``lost``, once the others have had time to say theirs.

    ``where`` is the collective and the interface.
    """
    peer = lost.transfer.peer
    culprit = blame.culprit(peer)
    through = "" if culprit == peer else f" (noticed through rank {peer})"
    if blame.finished(culprit):
        return PeerError(finished_text(rank, culprit, where + through))
    theirs = blame.doing(culprit)
    if theirs and theirs != str(lost.job):
        return PeerError(
            f"rank {rank}: rank {culprit} was in {theirs} while this rank waited for it "
            f"in {where} for {lost.seconds:.1f} s{through}: all ranks must make the same "
            f"calls, in the same order ({lost.reason})"
        )
    return PeerError(
        f"rank {rank}: rank {culprit} failed during {where} "
        f"after {lost.seconds:.1f} s{through}: {lost.reason}"
    )
