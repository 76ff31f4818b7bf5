"""Peers of a mailbox: the information that processes publish, and connections to them."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.transport.interfaces import (
    Host,
    Interface,
    interface_pairs,
)
from wingbeat.transport.messages.frames import MAX_CLASSES
from wingbeat.transport.messages.mailbox import Route

if TYPE_CHECKING:
    from wingbeat.transport.store import Store

_T = TypeVar("_T")

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

    ``uses`` are the addresses on which it listens, in the order of the interfaces' numbers;
    ``ports`` are the TCP ports by interface and class. ``session`` is the random number in each of
    its headers. ``key`` is its `public_key`. ``message`` and ``window`` are the limits of a payload
    and of a flow, in bytes.
    """

    host: Host
    uses: tuple[str, ...]
    session: int
    key: str
    encrypted: bool
    ports: tuple[tuple[int, ...], ...]
    message: int
    window: int

    @property
    def interfaces(self) -> list[Interface]:
        """The interfaces on which it listens."""
        by_address = {i.address: i for i in self.host.interfaces}
        return [by_address[address] for address in self.uses]

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> PeerInfo:
        """Parse a peer's `to_json`; a `ValueError` if it is malformed."""
        try:
            data = _typed(dict, json.loads(text))
            uses = tuple(_typed(str, address) for address in _typed(list, data["uses"]))
            ports = tuple(
                tuple(_number(each, 1, 2**16 - 1) for each in _typed(list, of))
                for of in _typed(list, data["ports"])
            )
            info = PeerInfo(
                Host.from_json(data["host"]),
                uses,
                _number(data["session"], 0, 2**64 - 1),
                _key(data["key"]),
                _typed(bool, data["encrypted"]),
                ports,
                _number(data["message"], 1, 2**31 - 1),
                _number(data["window"], 1, 2**63 - 1),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as err:
            raise ValueError(f"malformed peer info: {err!r:.80}") from None
        addresses = {i.address for i in info.host.interfaces}
        fits = (
            addresses.issuperset(uses)
            and len(set(uses)) == len(uses) == len(ports) > 0
            and {len(of) for of in ports} <= {len(ports[0])}
            and 1 <= len(ports[0]) <= MAX_CLASSES
        )
        if not fits:
            raise ValueError(f"malformed peer info: {data!s:.80}")
        return info


def _typed(kind: type[_T], value: Any) -> _T:
    """Return ``value`` if it has exactly this type; a bool is not accepted as an int."""
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _number(value: Any, least: int, most: int) -> int:
    if not least <= _typed(int, value) <= most:
        raise ValueError(f"{value!r:.40} is not from {least} to {most}")
    return int(value)


def _key(value: Any) -> str:
    """Check a public key: 0, 1 and p - 1 would make the shared secret known."""
    if len(_typed(str, value)) > _PRIME.bit_length() // 4 or not (
        1 < int(value, 16) < _PRIME - 1 and value == f"{int(value, 16):x}"
    ):
        raise ValueError(f"malformed key: {value!r:.60}")
    return str(value)


class Connector:
    """Opens and closes connections to peers while a mailbox is open. ``routes`` are its flows."""

    def __init__(
        self,
        number: int,
        info: PeerInfo,
        secret: int,
        carrier: _native.Carrier,
        name: Callable[[int], str],
    ) -> None:
        self._me, self._name = name(number), name
        self._info, self._secret, self._carrier = info, secret, carrier
        self.routes: list[Route] = []

    def disconnect(self, peer: int) -> None:
        """Close all connections to a peer."""
        self.routes = [route for route in self.routes if route.peer != peer]
        self._carrier.remove_peer(peer)

    def connect(self, peer: int, theirs: PeerInfo) -> None:
        """Create the flows to a process, for each interface pair and class."""
        own = self._info
        check_same_options(self._me, own, self._name(peer), theirs)
        self.disconnect(peer)
        self._carrier.allow(peer, theirs.session, pair_key(self._secret, own, theirs))
        for mine, other in interface_pairs(
            own.host, own.interfaces, theirs.host, theirs.interfaces
        ):
            for urgency, port in enumerate(theirs.ports[other]):
                route = Route(peer, mine, urgency)
                self._carrier.add_route(*route, theirs.uses[other], port, other)
                self.routes.append(route)


def store_key(namespace: str, number: int, incarnation: int) -> str:
    """Return the store key of a process's `PeerInfo`."""
    return f"messages/{namespace}/{number}" + (f".{incarnation}" if incarnation else "")


def read_peer_info(
    store: Store, namespace: str, number: int, incarnation: int, seconds: float
) -> PeerInfo:
    """Return the `PeerInfo` of a restarted process; a `ValueError` with its key if malformed."""
    where = store_key(namespace, number, incarnation)
    text = store.get(where, seconds)
    try:
        return PeerInfo.from_json(text)
    except ValueError as error:
        raise ValueError(f"the rendezvous store has under {where!r} a {error}") from None


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
