"""`open_mailbox`: find the peers through the rendezvous store, and connect to them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from wingbeat.errors import RendezvousError, UsageError, unknown
from wingbeat.transport import interfaces as nic
from wingbeat.transport.messages.card import Card
from wingbeat.transport.messages.carrier import CLASSES
from wingbeat.transport.messages.endpoint import Endpoint, Limits, Membership, Route
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.reach import pairs, usable
from wingbeat.transport.messages.zeromq import Keys, Reach, ZeroMQCarrier

if TYPE_CHECKING:
    from wingbeat.transport.store import Store


def open_mailbox(
    store: Store,
    number: int,
    peers: Iterable[int],
    *,
    room: str = "",
    interfaces: Sequence[str] | None = None,
    classes: int = 2,
    encrypted: bool = True,
    limits: Limits | None = None,
    seconds: float = 300.0,
    name: Callable[[int], str] = "rank {}".format,
) -> Mailbox:
    """Connect this process to others of the job; each of them has to name this one too.

    Args:
        store: where the processes find each other, as `World.store`.
        number: this process's, 0 to 2**32 - 1; no two of a room have the same.
        peers: the numbers of those to connect to; with this one's among them, it is left out.
        room: keeps the mailboxes of one job apart; each (room, number) is opened once.
        interfaces: names of the own interfaces to use; all if None.
        classes: how many classes, 1 to 4, the same for all; the first ones' packets carry the
            DSCP EF, AF41 and AF21, the last one's none.
        encrypted: whether to encrypt (CURVE), with keys made here and now; the same for all.
            Without it, whoever sees the traffic can send what looks like a peer's.
        limits: of messages and of windows, the same for all, and of silence.
        seconds: how long to wait for the others.
        name: what messages call a process of that number.

    Raises:
        UsageError: a value that cannot work, or not with what a peer has given, or a mailbox that
            was opened before.
        RendezvousError: a peer did not come, or sent something malformed.
        PeerError: a peer came, and could not be reached over one of the interfaces.
    """
    limits = limits or Limits()
    others = sorted(set(peers) - {number})
    _check(number, others, classes, seconds)
    if store.has(f"messages/{room}/{number}"):
        raise UsageError(
            f"{name(number)} has opened a mailbox in room {room!r} before: give each a room of its "
            "own, the same on all of them"
        )
    deadline = time.monotonic() + seconds
    own, mine = _own_interfaces(interfaces)
    keys = Keys.make() if encrypted else None
    carrier = ZeroMQCarrier(
        number, [i.address for i in mine], classes, message=limits.message, keys=keys
    )
    try:
        reach = carrier.reach
        key = "" if keys is None else keys.public.decode()
        uses = tuple(i.address for i in mine)
        session = secrets.randbits(64)
        card = Card(own, uses, session, key, reach.endpoints, limits.message, limits.window)
        store.set(f"messages/{room}/{number}", card.to_json())
        cards = {}
        for peer in others:
            left = max(0.0, deadline - time.monotonic())
            cards[peer] = _read(store, room, number, peer, left, name, seconds)
            _compare(name(number), card, name(peer), cards[peer])
        mailbox = _connect(number, card, cards, carrier, limits, name)
        mailbox.meet(max(0.0, deadline - time.monotonic()))
    except BaseException:
        carrier.close()
        raise
    return mailbox


def _connect(
    number: int,
    card: Card,
    cards: dict[int, Card],
    carrier: ZeroMQCarrier,
    limits: Limits,
    name: Callable[[int], str],
) -> Mailbox:
    """Make every flow: a connection for each interface and class that reach a peer."""
    carrier.admit({n: Reach(c.listens, c.key.encode() or None) for n, c in cards.items()})
    sessions = {peer: theirs.session for peer, theirs in cards.items()}
    endpoint = Endpoint(Membership(number, card.session, sessions), limits)
    for peer, theirs in cards.items():
        for own, other in pairs(card.host, card.interfaces, theirs.host, theirs.interfaces):
            for urgency in range(len(card.listens[0])):
                place = carrier.place(peer, own, urgency, theirs=other)
                endpoint.add(Route(peer, own, urgency), place, time.monotonic())
    carrier.keep({route.interface for route in endpoint.flows})
    return Mailbox(endpoint, carrier, name=name)


def _own_interfaces(named: Sequence[str] | None) -> tuple[nic.Host, list[nic.Interface]]:
    own = nic.local()
    mine = usable(own, named)
    for wanted in named or ():
        if wanted not in [i.name for i in mine]:
            raise unknown("interface", wanted, [i.name for i in own.interfaces])
    if not mine:
        raise UsageError("this host has no interface with an IPv4 address that is up")
    return own, mine


def _read(
    store: Store,
    room: str,
    number: int,
    peer: int,
    left: float,
    name: Callable[[int], str],
    seconds: float,
) -> Card:
    try:
        return Card.from_json(store.get(f"messages/{room}/{peer}", left))
    except TimeoutError:
        raise RendezvousError(
            f"{name(number)}: {name(peer)} opened no mailbox within {seconds:g} s; check that it "
            "is running, and that it opens one in the same room"
        ) from None
    except ValueError as err:
        raise RendezvousError(f"{name(number)}: {name(peer)} sent a {err}") from None


def _compare(me: str, own: Card, them: str, theirs: Card) -> None:
    """Refuse to connect ends that were opened differently."""
    for what, a, b in (
        ("classes", len(own.listens[0]), len(theirs.listens[0])),
        ("encrypted", bool(own.key), bool(theirs.key)),
        ("limits.message", own.message, theirs.message),
        ("limits.window", own.window, theirs.window),
    ):
        if a != b:
            raise UsageError(
                f"{me} opened its mailbox with {what}={a}, {them} with {what}={b}: give all the "
                "same"
            )


def _check(number: int, others: Sequence[int], classes: int, seconds: float) -> None:
    for each in (number, *others):
        if not isinstance(each, int) or not 0 <= each < 2**32:
            raise UsageError(f"process number {each!r}; allowed: 0 to 2**32 - 1")
    if classes not in range(1, CLASSES + 1):
        raise UsageError(f"classes={classes!r}; allowed: 1 to {CLASSES}")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"seconds={seconds!r}; allowed are seconds above 0")
