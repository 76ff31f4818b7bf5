"""Peers of a mailbox: the information that processes publish, and connections to them."""

from __future__ import annotations

import ipaddress
import json
import re
import struct
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from zmq.utils import z85

from wingbeat.errors import UsageError
from wingbeat.transport.interfaces import (
    Host,
    Interface,
    bracketed,
    interface_pairs,
)
from wingbeat.transport.messages.endpoint import Endpoint, Route
from wingbeat.transport.messages.frames import MAX_CLASSES
from wingbeat.transport.messages.zeromq import (
    PeerAddress,
    ZeroMQCarrier,
)

if TYPE_CHECKING:
    from wingbeat.transport.store import Store

_T = TypeVar("_T")


_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public key in Z85."""


_ENDPOINT = re.compile(r"tcp://([0-9.]{7,15}|\[[0-9a-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Information that a process publishes in the store: where it listens, and its options.

    ``uses`` are the addresses on which it listens, in the order of the interfaces' numbers;
    ``listens`` are the TCP endpoints by interface and class. ``session`` is the random number in
    each of its headers. ``key`` is its public key in Z85, empty without encryption. ``message`` and
    ``window`` are the limits of a payload and of a flow, in bytes.
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
            listens = tuple(
                tuple(_endpoint(each) for each in _typed(list, of))
                for of in _typed(list, data["listens"])
            )
            info = PeerInfo(
                Host.from_json(data["host"]),
                uses,
                _number(data["session"], 0, 2**64 - 1),
                _key(data["key"]),
                listens,
                _number(data["message"], 1, 2**31 - 1),
                _number(data["window"], 1, 2**63 - 1),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as err:
            raise ValueError(f"malformed peer info: {err!r:.80}") from None
        addresses = {i.address for i in info.host.interfaces}
        fits = (
            addresses.issuperset(uses)
            and len(set(uses)) == len(uses) == len(listens) > 0
            and {len(of) for of in listens} <= {len(listens[0])}
            and 1 <= len(listens[0]) <= MAX_CLASSES
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
    """Check a public key: ZeroMQ fails during the connection setup if it is invalid."""
    if _typed(str, value):
        if _KEY.fullmatch(value) is None:
            raise ValueError(f"malformed key: {value!r:.60}")
        try:
            z85.decode(value.encode())
        except struct.error:  # five characters can encode more than 32 bits
            raise ValueError(f"malformed key: {value!r:.60}") from None
    return str(value)


def _endpoint(value: Any) -> str:
    match = _ENDPOINT.fullmatch(_typed(str, value))
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ValueError(f"malformed endpoint: {value!r:.80}")
    address = ipaddress.ip_address(match[1].strip("[]"))
    return f"tcp://{bracketed(str(address))}:{int(match[2])}"


class Connector:
    """Opens and closes connections to peers while a mailbox is open."""

    def __init__(self, number: int, info: PeerInfo, carrier: ZeroMQCarrier) -> None:
        self._number, self._info, self._carrier = number, info, carrier

    def disconnect(self, endpoint: Endpoint, peer: int) -> None:
        """Close all connections to a peer."""
        endpoint.remove_peer(peer)
        self._carrier.disconnect(peer)

    def connect(self, endpoint: Endpoint, peer: int, info: PeerInfo) -> None:
        """Create the flows to a new process of a peer, for each interface pair and class."""
        check_same_options(f"process {self._number}", self._info, f"process {peer}", info)
        self.disconnect(endpoint, peer)
        self._carrier.allow_peer(peer, address_of(info))
        endpoint.add_peer(peer, info.session)
        self.add_flows(endpoint, peer, info)

    def add_flows(self, endpoint: Endpoint, peer: int, theirs: PeerInfo) -> None:
        """Create the flows to a peer that carrier and endpoint have registered."""
        own = self._info
        for mine, other in interface_pairs(
            own.host, own.interfaces, theirs.host, theirs.interfaces
        ):
            for urgency in range(len(theirs.listens[0])):
                place = self._carrier.connect(peer, mine, urgency, theirs=other)
                endpoint.add(Route(peer, mine, urgency), place, time.monotonic())


def address_of(info: PeerInfo) -> PeerAddress:
    """Return a peer's endpoints and public key."""
    return PeerAddress(info.listens, info.key.encode() or None)


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
        ("classes", len(own.listens[0]), len(theirs.listens[0])),
        ("encrypted", bool(own.key), bool(theirs.key)),
        ("limits.message", own.message, theirs.message),
        ("limits.window", own.window, theirs.window),
    ):
        if a != b:
            raise UsageError(
                f"{me} opened its mailbox with {what}={a}, {them} with {what}={b}: use the same "
                "value on all processes"
            )
