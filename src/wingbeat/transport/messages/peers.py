"""Peers of a mailbox: the information that processes publish, and connections to them."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from wingbeat.errors import UsageError
from wingbeat.schema import Length, MalformedMessage, Range, parse_json, to_json
from wingbeat.transport.interfaces import Host
from wingbeat.transport.messages.frames import MAX_CLASSES

if TYPE_CHECKING:
    from wingbeat.transport.store import Store

_Port = Annotated[int, Range(1, 1 << 16)]

_PRIME = int(
    "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1D8B9C583CE2D3695A9E13641146433FBCC939DCE249B"
    "3EF97D2FE363630C75D8F681B202AEC4617AD3DF1ED5D5FD65612433F51F5F066ED0856365553DED1AF3B557135E"
    "7F57C935984F0C70E0E68B77E2A689DAF3EFE8721DF158A136ADE73530ACCA4F483A797ABC0AB182B324FB61D108"
    "A94BB2C8E3FBB96ADAB760D7F4681D4F42A3DE394DF4AE56EDE76372BB190B07A7C8EE0A6D709E02FCE1CDF7E2EC"
    "C03404CD28342F619172FE9CE98583FF8E4F1232EEF28183C3FE3B1B4C6FAD733BB5FCBC2EC22005C58EF1837D16"
    "83B2C6F34A26C1B2EFFA886B423861285C97FFFFFFFFFFFFFFFF",
    16,
)
"""The group ffdhe2048 of RFC 7919, a safe prime, with the generator 2."""

_KEY_DIGITS = _PRIME.bit_length() // 4
_SECRET_BITS = 256


def new_secret() -> int:
    """Return a secret exponent for `public_key` and `pair_key`."""
    return secrets.randbits(_SECRET_BITS) | 1 << _SECRET_BITS


def public_key(secret: int) -> str:
    """Return the public half of a secret, in hexadecimal."""
    return f"{pow(2, secret, _PRIME):x}"


def pair_key(secret: int, own: PeerInfo, theirs: PeerInfo) -> bytes:
    """Return the key of 32 bytes that only these two processes have (Diffie-Hellman)."""
    shared = pow(int(theirs.key, 16), secret, _PRIME).to_bytes(_PRIME.bit_length() // 8, "big")
    both = "/".join(sorted(f"{each.session}:{each.key}" for each in (own, theirs)))
    return hmac.new(hashlib.sha256(shared).digest(), both.encode(), hashlib.sha256).digest()


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Information that a process publishes in the store: where it listens, and its options.

    ``host`` has the interfaces on which it listens, in the order of their numbers; ``ports`` are
    the TCP ports by interface and class. ``session`` is the random number in each of
    its headers. ``key`` is its `public_key`. ``message`` and ``window`` are the limits of a payload
    and of a flow, in bytes.

    A `UsageError` if these contradict each other.
    """

    host: Host
    session: Annotated[int, Range(0, 1 << 64)]
    key: str
    encrypted: bool
    ports: tuple[Annotated[tuple[_Port, ...], Length(least=1, most=MAX_CLASSES)], ...]
    message: Annotated[int, Range(1, 1 << 31)]
    window: Annotated[int, Range(1, 1 << 63)]

    def describe(self, interface: int) -> str:
        """Return the name of one of these interfaces, for messages."""
        found = self.host.interfaces[interface]
        return f"interface {found.name} ({found.address})"

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(to_json(self))

    def __post_init__(self) -> None:
        if len(self.ports) != len(self.host.interfaces) or len(set(map(len, self.ports))) != 1:
            raise UsageError(f"ports is {self.ports!r:.60}; allowed: as many for each interface")
        try:
            key = int(self.key[:_KEY_DIGITS], 16)
        except ValueError:
            key = 0
        # 0, 1 and p - 1 would make the shared secret known.
        if not 1 < key < _PRIME - 1 or self.key != f"{key:x}":
            raise UsageError(f"key is {self.key!r:.60}; allowed: a public key in hexadecimal")


class Route(NamedTuple):
    """The route of a flow: the peer, this process's interface, and the class."""

    peer: int
    interface: int
    urgency: int


class Routes:
    """The routes of one process; ``me`` is its name in messages, ``name`` formats other names."""

    def __init__(self, own: int, name: Callable[[int], str]) -> None:
        self.name, self.me = name, name(own)
        self._by_peer: dict[int, list[Route]] = {}
        self._default: dict[int, Route] = {}
        self._interfaces: dict[int, tuple[int, ...]] = {}

    @property
    def peers(self) -> tuple[int, ...]:
        """The peers to which there are routes."""
        return tuple(self._by_peer)

    def set(self, peer: int, routes: list[Route]) -> None:
        """Replace the routes to a peer, by interface and class."""
        self._default[peer] = max(
            (route for route in routes if route.interface == routes[0].interface),
            key=lambda route: route.urgency,
        )
        self._interfaces[peer] = tuple(dict.fromkeys(route.interface for route in routes))
        self._by_peer[peer] = routes

    def remove(self, peer: int) -> None:
        """Remove the routes to a peer."""
        for each in (self._by_peer, self._default, self._interfaces):
            each.pop(peer, None)

    def to(self, peer: int) -> list[Route]:
        """Return the routes to ``peer``; a `UsageError` if there is none."""
        routes = self._by_peer.get(peer)
        if routes is None:
            raise UsageError(
                f"{self.me} has no connection to {self.name(peer)}; allowed: "
                f"{self.names(self.peers) or 'none'}"
            )
        return routes

    def interfaces(self, peer: int) -> tuple[int, ...]:
        """Return this process's interfaces that reach ``peer``; stored, as servers ask for each
        message.
        """
        return self._interfaces.get(peer) or tuple(route.interface for route in self.to(peer))

    def choose(self, peer: int, interface: int | None, urgency: int | None) -> Route:
        """Return a route, by default the first interface and the last class; or a `UsageError`."""
        usual = self._default.get(peer) or self.to(peer)[0]
        if interface is None and urgency is None:
            return usual
        route = Route(
            peer,
            usual.interface if interface is None else interface,
            usual.urgency if urgency is None else urgency,
        )
        routes = self.to(peer)
        if route not in routes:
            raise UsageError(
                f"interface={interface!r}, urgency={urgency!r} to {self.name(peer)}: allowed are "
                f"interfaces {sorted({r.interface for r in routes})} and classes "
                f"{sorted({r.urgency for r in routes})}"
            )
        return route

    def names(self, peers: Iterable[int]) -> str:
        """Return the names of these processes."""
        return ", ".join(self.name(peer) for peer in sorted(peers))


def store_key(namespace: str, number: int, incarnation: int) -> str:
    """Return the store key of a process's `PeerInfo`."""
    return f"messages/{namespace}/{number}" + (f".{incarnation}" if incarnation else "")


def read_peer_info(
    store: Store, namespace: str, number: int, incarnation: int, seconds: float
) -> PeerInfo:
    """Return the `PeerInfo` of a process; a `MalformedMessage` with its key if malformed.

    A `TimeoutError` if the process has published none after ``seconds``.
    """
    where = store_key(namespace, number, incarnation)
    text = store.get(where, seconds)
    try:
        return parse_json(PeerInfo, text)
    except MalformedMessage as error:
        what = f"malformed peer info, {where!r} in the rendezvous store: {error}"
        raise MalformedMessage(what) from None


def check_same_options(me: str, own: PeerInfo, them: str, theirs: PeerInfo) -> None:
    """Raise a `UsageError` if two processes opened their mailboxes with different options."""
    for what, a, b in (
        ("classes", len(own.ports[0]), len(theirs.ports[0])),
        ("encrypted", own.encrypted, theirs.encrypted),
        ("limits.message", own.message, theirs.message),
        ("limits.window", own.window, theirs.window),
    ):
        if a != b:
            raise UsageError(
                f"{me} opened its mailbox with {what}={a}, {them} with {what}={b}: use the same "
                "value on all processes"
            )
