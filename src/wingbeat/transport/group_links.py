"""How the members of a group come together: when one first needs the group's link.

That is in the thread that runs the group's collectives, so that opening a group waits for nobody,
and groups may be opened in another order on every member.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from wingbeat.transport.failures import Blame
from wingbeat.transport.link import Link, Pending
from wingbeat.types import Group

if TYPE_CHECKING:
    import torch


class NotMet(RuntimeError):
    """The members of a group have not come together; ``peer`` is the rank that was missed."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


def room_of(group: Group) -> str:
    """Return what all keys of a group in the store begin with."""
    return f"group/{group.epoch}/{'-'.join(map(str, group.ranks))}/"


def waits_for(rank: int, group: Group, blame: Blame) -> int | None:
    """Return a member that has failed while it waited for ``rank``; None if none says so."""
    others = (member for member in group.ranks if member != rank)
    return next((member for member in others if blame.whom(member) == rank), None)


def given_up_text(group: Group, rank: int, who: int, blame: Blame) -> str:
    """Return what ``rank`` says of a group that ``who`` has given up."""
    whom, doing = blame.whom(who), blame.doing(who)
    why = ""
    if whom is not None:
        named = "this rank" if whom == rank else f"rank {whom}"
        why = f", as it waited for {named}" + (f" in {doing}" if doing else "")
    return (
        f"rank {who} has given up {group}{why}: this group goes no further; those who go on open "
        "one of a later epoch"
    )


def refuse_given_up(group: Group, rank: int, blame: Blame) -> None:
    """Go on if no member has failed in this group.

    Raises:
        NotMet: one has, so that this group's sums will never be complete.
    """
    who = blame.given_up()
    if who is not None and who != rank and who in group.ranks:
        missed_by = waits_for(rank, group, blame)
        who = who if missed_by is None else missed_by
        raise NotMet(who, given_up_text(group, rank, who, blame))


class MeetingLink:
    """A group's link over one interface, made by ``meet`` when it is first used.

    ``called_off`` is set when it is closed, for a meeting that is under way.
    """

    def __init__(
        self, name: str, meet: Callable[[], Link], called_off: threading.Event | None = None
    ) -> None:
        self._called_off = called_off or threading.Event()
        self._name = name
        self._meet = meet
        self._link: Link | None = None
        self._closed = False
        self._changing = threading.Lock()

    @property
    def name(self) -> str:
        """The interface's name."""
        return self._name

    @property
    def met(self) -> bool:
        """Whether the members have met here."""
        return self._link is not None

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending to member ``peer``; the first time, meet all members."""
        return self._met().send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving from member ``peer``; the first time, meet all members."""
        return self._met().recv(tensor, peer, tag)

    def _met(self) -> Link:
        """Return the link. One thread alone asks for it; another may close it meanwhile.

        Raises:
            NotMet: somebody did not come.
            RuntimeError: the link is closed.
        """
        if self._link is None:
            self._refuse_closed()
            link = self._meet()
            with self._changing:
                self._link = link
        try:
            self._refuse_closed()
        except RuntimeError:
            self._link.close()  # again, if it was met after that
            raise
        return self._link

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the link is closed")

    def close(self) -> None:
        """Close the connections, if there are any; whoever waits for this member is told."""
        self._called_off.set()
        with self._changing:
            self._closed = True
            if self._link is not None:
                self._link.close()
