"""How a worker under bounded staleness comes to the others: with all of them, or back alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from wingbeat.exchanges.attendance import Attendance, announce, arrive
from wingbeat.exchanges.lanes.lanes import Lanes
from wingbeat.stale.view import members
from wingbeat.transport import interfaces as nic
from wingbeat.transport.interfaces import listen_interfaces
from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.endpoint import Limits
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.store import AtomicStore


@dataclass(frozen=True, slots=True)
class Arrived:
    """A worker's ways to the others.

    Attributes:
        mailbox: to those whom its interfaces reach.
        lanes: to all.
        attendance: to the roll, which says who takes part.
        life: which of its lives this is, counted from 0; above it, parameters have to be pulled.
    """

    mailbox: Mailbox
    lanes: Lanes
    attendance: Attendance
    life: int


def come(
    store: AtomicStore,
    rank: int,
    workers: int,
    *,
    room: str,
    interfaces: Sequence[str] | None = None,
    joined: Sequence[Collection[int]] | None = None,
    encrypted: bool = True,
    limits: Limits | None = None,
    patience: float = 10.0,
    seconds: float = 300.0,
    name: Callable[[int], str] = "rank {}".format,
) -> Arrived:
    """Join the other workers, or come back to them if this one has been there before.

    Args:
        store: where they find each other; it must outlive whoever is to come back, and is best a
            connection of its own, as a wait of others would hold up what is said of who is gone.
        rank: this worker's.
        workers: how many there are.
        room: keeps those of one job apart; the same on all.
        interfaces: names of the own ones to use; all if None.
        joined: by rank, whom its interfaces reach (see `Lanes`); None if all reach all.
        encrypted: as for `open_mailbox`.
        limits: as for `open_mailbox`.
        patience: seconds without a sign, at least, after which a worker is missed.
        seconds: how long to wait for the others.
        name: what messages call the worker of a rank.

    Raises:
        UsageError: as `open_mailbox`.
        RendezvousError: somebody did not come, or cannot be come back to.
        PeerError: as `open_mailbox`.
    """
    roll, life = arrive(store, room, rank, workers)
    near = range(workers) if joined is None else joined[rank]

    def told(left: float) -> dict[int, int]:
        lives = announce(store, room, rank, life, roll, left)
        return {other: lives[other] for other in lives if other in near}

    mailbox = open_mailbox(
        store, rank, near, namespace=room,
        interfaces=interfaces, classes=1, encrypted=encrypted, limits=limits, seconds=seconds,
        name=name, tolerate_silence=True, incarnation=life,
        announce=told if life else None,
    )  # fmt: skip
    cards = [interface.name for interface in listen_interfaces(nic.local(), interfaces)]
    lanes = Lanes(
        mailbox, rank, workers, lives=[number // 2 for number in roll.view], joined=joined,
        patience=patience, begin=seconds, name=name, card=cards.__getitem__,
    )  # fmt: skip
    for gone in set(range(workers)) - set(members(roll.view)):
        lanes.forget(gone)
    return Arrived(mailbox, lanes, Attendance(store, room, rank, roll), life)
