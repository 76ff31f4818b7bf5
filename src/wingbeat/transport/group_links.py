"""Links of groups, which connect on first use.

The members of a group connect in the thread that runs the group's collectives. Opening a group
therefore does not block, and members may open groups in different orders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from wingbeat.transport.failures import FailureAttribution
from wingbeat.transport.link import Link, Pending
from wingbeat.types import Group

if TYPE_CHECKING:
    import torch


class GroupSetupError(RuntimeError):
    """The members of a group did not connect; ``peer`` is the rank that was missing."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


def group_prefix(group: Group) -> str:
    """Return the prefix of all keys of a group in the store."""
    return f"group/{group.epoch}/{'-'.join(map(str, group.ranks))}/"


def member_waiting_for(rank: int, group: Group, attribution: FailureAttribution) -> int | None:
    """Return a member that failed while it waited for ``rank``, or None."""
    others = (member for member in group.ranks if member != rank)
    return next((member for member in others if attribution.awaited_by(member) == rank), None)


def aborted_text(group: Group, rank: int, who: int, attribution: FailureAttribution) -> str:
    """Return the error text of ``rank`` for a group that rank ``who`` aborted."""
    awaited, operation = attribution.awaited_by(who), attribution.operation(who)
    why = ""
    if awaited is not None:
        peer = "this rank" if awaited == rank else f"rank {awaited}"
        why = f", as it waited for {peer}" + (f" in {operation}" if operation else "")
    return (
        f"rank {who} has aborted {group}{why}: open a group of a later epoch to continue "
        "without the failed member"
    )


def check_not_aborted(group: Group, rank: int, attribution: FailureAttribution) -> None:
    """Raise a `GroupSetupError` if a member has aborted this group."""
    who = attribution.aborted_by()
    if who is not None and who != rank and who in group.ranks:
        missed_by = member_waiting_for(rank, group, attribution)
        who = who if missed_by is None else missed_by
        raise GroupSetupError(who, aborted_text(group, rank, who, attribution))


class LazyLink:
    """A group's link over one interface; ``connect`` creates it on first use.

    Closing it sets ``cancelled``, to cancel a connection setup in progress.
    """

    def __init__(
        self, name: str, connect: Callable[[], Link], cancelled: threading.Event | None = None
    ) -> None:
        self._cancelled = cancelled or threading.Event()
        self._name = name
        self._connect = connect
        self._link: Link | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the interface."""
        return self._name

    @property
    def connected(self) -> bool:
        """Whether the members are connected."""
        return self._link is not None

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending to member ``peer``. The first call connects all members."""
        return self._connected().send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving from member ``peer``. The first call connects all members."""
        return self._connected().recv(tensor, peer, tag)

    def _connected(self) -> Link:
        """Return the link. Only one thread calls this; another one may close it meanwhile."""
        if self._link is None:
            self._check_open()
            link = self._connect()
            with self._lock:
                self._link = link
        try:
            self._check_open()
        except RuntimeError:
            self._link.close()  # it connected after close() was called
            raise
        return self._link

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the link is closed")

    def close(self) -> None:
        """Close the connections, if any, and cancel a connection setup."""
        self._cancelled.set()
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()
