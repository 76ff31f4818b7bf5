"""`open_mailbox`: find the peers through the rendezvous store and connect to them."""

from __future__ import annotations

import errno
import ipaddress
import json
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import zmq
from zmq.utils import z85

from wingbeat.errors import RendezvousError, UsageError, unknown
from wingbeat.transport import descriptors
from wingbeat.transport import interfaces as nic
from wingbeat.transport.interfaces import Host, Interface, in_brackets, pairs, usable
from wingbeat.transport.messages.carrier import CLASSES
from wingbeat.transport.messages.endpoint import Endpoint, Limits, Membership, Route
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.zeromq import HEARTBEAT_S, Keys, Reach, ZeroMQCarrier, opens

if TYPE_CHECKING:
    from wingbeat.transport.store import Store

_T = TypeVar("_T")

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public key in Z85."""

_ENDPOINT = re.compile(r"tcp://([0-9.]{7,15}|\[[0-9a-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Card:
    """Where a process is and how to speak to it.

    Attributes:
        host: its host and that host's interfaces.
        uses: the addresses that it listens on, in the order of the interfaces' numbers.
        session: the random number in each of its headers.
        key: its public key in Z85; empty if it sends in the clear.
        listens: TCP endpoints by interface and class.
        message: bytes that a payload may have.
        window: bytes that a flow may hold.
    """

    host: Host
    uses: tuple[str, ...]
    session: int
    key: str
    listens: tuple[tuple[str, ...], ...]
    message: int
    window: int

    @property
    def interfaces(self) -> list[Interface]:
        """The interfaces that it listens on."""
        by_address = {i.address: i for i in self.host.interfaces}
        return [by_address[address] for address in self.uses]

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(
            {
                "host": self.host.to_json(),
                "uses": self.uses,
                "session": self.session,
                "key": self.key,
                "listens": self.listens,
                "message": self.message,
                "window": self.window,
            }
        )

    @staticmethod
    def from_json(text: str) -> Card:
        """Check and rebuild what a peer has published.

        Raises:
            ValueError: it is not what `to_json` makes.
        """
        try:
            data = _of(dict, json.loads(text))
            uses = tuple(_of(str, address) for address in _of(list, data["uses"]))
            listens = tuple(
                tuple(_endpoint(each) for each in _of(list, of))
                for of in _of(list, data["listens"])
            )
            card = Card(
                Host.from_json(data["host"]),
                uses,
                _number(data["session"], 0, 2**64 - 1),
                _key(data["key"]),
                listens,
                _number(data["message"], 1, 2**31 - 1),
                _number(data["window"], 1, 2**63 - 1),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as err:
            raise ValueError(f"malformed card: {err!r:.80}") from None
        addresses = {i.address for i in card.host.interfaces}
        fits = (
            addresses.issuperset(uses)
            and len(set(uses)) == len(uses) == len(listens) > 0
            and {len(of) for of in listens} <= {len(listens[0])}
            and 1 <= len(listens[0]) <= CLASSES
        )
        if not fits:
            raise ValueError(f"malformed card: {data!s:.80}")
        return card


def _of(kind: type[_T], value: Any) -> _T:
    """Return ``value``, which has to be of that very type: true is no number."""
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _number(value: Any, least: int, most: int) -> int:
    if not least <= _of(int, value) <= most:
        raise ValueError(f"{value!r:.40} is not from {least} to {most}")
    return int(value)


def _key(value: Any) -> str:
    """Check a public key, which ZeroMQ refuses in the midst of connecting if it is none."""
    if _of(str, value):
        if _KEY.fullmatch(value) is None:
            raise ValueError(f"malformed key: {value!r:.60}")
        try:
            z85.decode(value.encode())
        except struct.error:  # five characters that are more than 32 bits
            raise ValueError(f"malformed key: {value!r:.60}") from None
    return str(value)


def _endpoint(value: Any) -> str:
    match = _ENDPOINT.fullmatch(_of(str, value))
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ValueError(f"malformed endpoint: {value!r:.80}")
    address = ipaddress.ip_address(match[1].strip("[]"))
    return f"tcp://{in_brackets(str(address))}:{int(match[2])}"


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
    forgiving: bool = False,
    life: int = 0,
    announce: Callable[[float], Mapping[int, int]] | None = None,
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
        forgiving: whether a peer that falls silent on an interface is not lost: whoever posts
            finds out itself who is.
        life: above 0 for a process that comes in the place of one that has ended.
        announce: called with the seconds that are left when this process can be found; returns the
            peers that are to be connected to, each with its life, once they know of it.

    Raises:
        UsageError: a value that cannot work, or not with what a peer has given, or a mailbox that
            was opened before, or too few file descriptors.
        RendezvousError: a peer did not come, or sent something malformed.
        PeerError: a peer came, and could not be reached over one of the interfaces.
    """
    limits = limits or Limits()
    others = sorted(set(peers) - {number})
    _check(number, others, classes, seconds)
    if store.has(_place(room, number, life)):
        raise UsageError(
            f"{name(number)} has opened a mailbox in room {room!r} before: give each a room of its "
            "own, the same on all of them"
        )
    deadline = time.monotonic() + seconds
    own, mine = _own_interfaces(interfaces)
    keys = Keys.make() if encrypted else None
    what, sockets = f"{name(number)}: opening a mailbox in room {room!r}", len(mine) * classes
    descriptors.require(opens(sockets, len(others), encrypted=encrypted), what)
    # A process that is stopped is lost when it has been silent for as long as `limits` say: its
    # connections must not end, as those of a dead process do, before that.
    heartbeat = HEARTBEAT_S if forgiving else max(HEARTBEAT_S, limits.silence)
    try:
        carrier = ZeroMQCarrier(
            number,
            [i.address for i in mine],
            classes,
            message=limits.message,
            keys=keys,
            heartbeat=heartbeat,
        )
    except zmq.ZMQError as err:
        if err.errno != errno.EMFILE:
            raise
        raise descriptors.too_few(what) from None  # other threads have opened the rest since
    try:
        reach = carrier.reach
        key = "" if keys is None else keys.public.decode()
        uses = tuple(i.address for i in mine)
        session = secrets.randbits(64)
        card = Card(own, uses, session, key, reach.endpoints, limits.message, limits.window)
        store.set(_place(room, number, life), card.to_json())
        lives: Mapping[int, int] = dict.fromkeys(others, 0)
        if announce is not None:
            lives = announce(max(0.0, deadline - time.monotonic()))
        cards = {}
        for peer, theirs in lives.items():
            left = max(0.0, deadline - time.monotonic())
            where = _place(room, peer, theirs)
            cards[peer] = _read(store, where, number, peer, left, name, seconds)
            _compare(name(number), card, name(peer), cards[peer])
        mailbox = _connect(number, card, cards, carrier, limits, name, forgiving=forgiving)
        mailbox.meet(max(0.0, deadline - time.monotonic()))
    except BaseException:
        carrier.close()
        raise
    return mailbox


class Connector:
    """Connects this process to others, whose cards it has.

    Args:
        number: this process's.
        card: its own.
        carrier: what carries frames.
    """

    def __init__(self, number: int, card: Card, carrier: ZeroMQCarrier) -> None:
        self._number, self._card, self._carrier = number, card, carrier

    def part(self, endpoint: Endpoint, peer: int) -> None:
        """End all connections to a peer."""
        endpoint.forget(peer)
        self._carrier.forget(peer)

    def join(self, endpoint: Endpoint, peer: int, card: Card) -> None:
        """Make the flows to a peer, over each interface and in each class that reach it."""
        _compare(f"process {self._number}", self._card, f"process {peer}", card)
        self.part(endpoint, peer)
        self._carrier.know(peer, _reach(card))
        endpoint.know(peer, card.session)
        self.add(endpoint, peer, card)

    def add(self, endpoint: Endpoint, peer: int, theirs: Card) -> None:
        """Make the flows to a peer that carrier and endpoint know."""
        own = self._card
        for mine, other in pairs(own.host, own.interfaces, theirs.host, theirs.interfaces):
            for urgency in range(len(theirs.listens[0])):
                place = self._carrier.place(peer, mine, urgency, theirs=other)
                endpoint.add(Route(peer, mine, urgency), place, time.monotonic())


def _reach(card: Card) -> Reach:
    return Reach(card.listens, card.key.encode() or None)


def _connect(
    number: int,
    card: Card,
    cards: dict[int, Card],
    carrier: ZeroMQCarrier,
    limits: Limits,
    name: Callable[[int], str],
    *,
    forgiving: bool,
) -> Mailbox:
    """Make every flow: a connection for each interface and class that reach a peer."""
    carrier.admit({n: _reach(theirs) for n, theirs in cards.items()})
    sessions = {peer: theirs.session for peer, theirs in cards.items()}
    membership, own = Membership(number, card.session, sessions), card.interfaces

    def called(interface: int) -> str:
        return f"interface {own[interface].name} ({own[interface].address})"

    endpoint = Endpoint(membership, limits, forgiving=forgiving, card=called)
    joints = Connector(number, card, carrier)
    for peer, theirs in cards.items():
        joints.add(endpoint, peer, theirs)
    if not forgiving:  # else somebody may come over the others
        carrier.keep({route.interface for route in endpoint.flows})
    return Mailbox(endpoint, carrier, name=name, joints=joints)


def _own_interfaces(named: Sequence[str] | None) -> tuple[nic.Host, list[nic.Interface]]:
    own = nic.local()
    mine = usable(own, named)
    for wanted in named or ():
        if wanted not in [i.name for i in mine]:
            raise unknown("interface", wanted, [i.name for i in own.interfaces])
    if not mine:
        raise UsageError("this host has no interface that is up and has an address: bring one up")
    return own, mine


def _place(room: str, number: int, life: int) -> str:
    """Return the key of a process's card."""
    return f"messages/{room}/{number}" + (f".{life}" if life else "")


def card_of(store: Store, room: str, number: int, life: int, seconds: float) -> Card:
    """Return the card of a process that has come again.

    Raises:
        TimeoutError: there is none within ``seconds``.
        ValueError: it is malformed; names its key.
    """
    where = _place(room, number, life)
    text = store.get(where, seconds)
    try:
        return Card.from_json(text)
    except ValueError as error:
        raise ValueError(f"the rendezvous store has under {where!r} a {error}") from None


def _read(
    store: Store,
    where: str,
    number: int,
    peer: int,
    left: float,
    name: Callable[[int], str],
    seconds: float,
) -> Card:
    try:
        return Card.from_json(store.get(where, left))
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
