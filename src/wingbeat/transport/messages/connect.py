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
from wingbeat.transport.interfaces import (
    Host,
    Interface,
    bracketed,
    interface_pairs,
    listen_interfaces,
)
from wingbeat.transport.messages.carrier import MAX_CLASSES
from wingbeat.transport.messages.endpoint import Endpoint, Limits, Membership, Route
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.zeromq import (
    HEARTBEAT_S,
    Keys,
    PeerAddress,
    ZeroMQCarrier,
    descriptors_needed,
)

if TYPE_CHECKING:
    from wingbeat.transport.store import Store

_T = TypeVar("_T")

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public key in Z85."""

_ENDPOINT = re.compile(r"tcp://([0-9.]{7,15}|\[[0-9a-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a process publishes in the store: where it listens, and with which options.

    Attributes:
        host: its host and that host's interfaces.
        uses: addresses that it listens on, in the order of the interfaces' numbers.
        session: the random number in each of its headers.
        key: its public key in Z85; empty without encryption.
        listens: TCP endpoints by interface and class.
        message: limit of a payload, in bytes.
        window: limit of a flow, in bytes.
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
    def from_json(text: str) -> PeerInfo:
        """Check and rebuild what a peer published.

        Raises:
            ValueError: it is not the result of `to_json`.
        """
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
    """Return ``value`` if it has exactly this type: True is not a number."""
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _number(value: Any, least: int, most: int) -> int:
    if not least <= _typed(int, value) <= most:
        raise ValueError(f"{value!r:.40} is not from {least} to {most}")
    return int(value)


def _key(value: Any) -> str:
    """Check a public key: ZeroMQ fails in the middle of connecting if it is invalid."""
    if _typed(str, value):
        if _KEY.fullmatch(value) is None:
            raise ValueError(f"malformed key: {value!r:.60}")
        try:
            z85.decode(value.encode())
        except struct.error:  # five characters encode more than 32 bits
            raise ValueError(f"malformed key: {value!r:.60}") from None
    return str(value)


def _endpoint(value: Any) -> str:
    match = _ENDPOINT.fullmatch(_typed(str, value))
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ValueError(f"malformed endpoint: {value!r:.80}")
    address = ipaddress.ip_address(match[1].strip("[]"))
    return f"tcp://{bracketed(str(address))}:{int(match[2])}"


def open_mailbox(
    store: Store,
    number: int,
    peers: Iterable[int],
    *,
    namespace: str = "",
    interfaces: Sequence[str] | None = None,
    classes: int = 2,
    encrypted: bool = True,
    limits: Limits | None = None,
    seconds: float = 300.0,
    name: Callable[[int], str] = "rank {}".format,
    tolerate_silence: bool = False,
    incarnation: int = 0,
    announce: Callable[[float], Mapping[int, int]] | None = None,
) -> Mailbox:
    """Connect this process to other processes of the job; each of them has to name this one too.

    Args:
        store: the rendezvous store, as `World.store`.
        number: number of this process, 0 to 2**32 - 1, unique in the namespace.
        peers: numbers of the processes to connect to; this process's own number is ignored.
        namespace: separates mailboxes of one job. Each (namespace, number) is opened once.
        interfaces: names of the own interfaces to use; None: all.
        classes: number of traffic classes, 1 to 4, the same for all. The packets of the first
            ones carry the DSCP EF, AF41 and AF21, those of the last one none.
        encrypted: whether to encrypt (CURVE), with keys generated here; the same for all.
            Without it, whoever sees the traffic can forge frames.
        limits: limits of messages and windows, the same for all, and of silence.
        seconds: timeout of the connection setup.
        name: returns the name of the process of a number, for messages.
        tolerate_silence: do not count a silent peer as lost; the caller detects lost peers.
        incarnation: above 0 for a process that replaces one that has ended.
        announce: called with the remaining seconds when this process can be found; returns the
            peers to connect to and their incarnations, once they know of this process.

    Raises:
        UsageError: an invalid value, a value that differs from a peer's, a mailbox that was
            opened before, or too few file descriptors.
        RendezvousError: a peer did not come, or published something malformed.
        PeerError: a peer came but could not be reached over one of the interfaces.
    """
    limits = limits or Limits()
    others = sorted(set(peers) - {number})
    _check_arguments(number, others, classes, seconds)
    if store.has(_store_key(namespace, number, incarnation)):
        raise UsageError(
            f"{name(number)} has already opened a mailbox in namespace {namespace!r}: use a "
            "different namespace for each mailbox, the same on all processes"
        )
    deadline = time.monotonic() + seconds
    own, mine = _own_interfaces(interfaces)
    keys = Keys.make() if encrypted else None
    what, sockets = (
        f"{name(number)}: opening a mailbox in namespace {namespace!r}",
        len(mine) * classes,
    )
    descriptors.require(descriptors_needed(sockets, len(others), encrypted=encrypted), what)
    # A stopped process counts as lost after `limits.silence`. Its connections must not end before
    # that, unlike those of a dead process.
    heartbeat = HEARTBEAT_S if tolerate_silence else max(HEARTBEAT_S, limits.silence)
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
        raise descriptors.too_few_error(what) from None  # other threads have opened files since
    try:
        key = "" if keys is None else keys.public.decode()
        uses = tuple(i.address for i in mine)
        session = secrets.randbits(64)
        info = PeerInfo(
            own, uses, session, key, carrier.address.endpoints, limits.message, limits.window
        )
        store.set(_store_key(namespace, number, incarnation), info.to_json())
        incarnations: Mapping[int, int] = dict.fromkeys(others, 0)
        if announce is not None:
            incarnations = announce(max(0.0, deadline - time.monotonic()))
        infos = {}
        for peer, theirs in incarnations.items():
            left = max(0.0, deadline - time.monotonic())
            where = _store_key(namespace, peer, theirs)
            infos[peer] = _read_peer(store, where, number, peer, left, name, seconds)
            _check_same_options(name(number), info, name(peer), infos[peer])
        mailbox = _make_mailbox(
            number, info, infos, carrier, limits, name, tolerate_silence=tolerate_silence
        )
        mailbox.wait_connected(max(0.0, deadline - time.monotonic()))
    except BaseException:
        carrier.close()
        raise
    return mailbox


class Connector:
    """Makes and ends connections to peers while a mailbox is open.

    Args:
        number: number of this process.
        own: what this process published.
        carrier: carries frames.
    """

    def __init__(self, number: int, info: PeerInfo, carrier: ZeroMQCarrier) -> None:
        self._number, self._info, self._carrier = number, info, carrier

    def disconnect(self, endpoint: Endpoint, peer: int) -> None:
        """End all connections to a peer."""
        endpoint.remove_peer(peer)
        self._carrier.disconnect(peer)

    def connect(self, endpoint: Endpoint, peer: int, info: PeerInfo) -> None:
        """Make the flows to a new process of a peer, over each interface pair and in each class."""
        _check_same_options(f"process {self._number}", self._info, f"process {peer}", info)
        self.disconnect(endpoint, peer)
        self._carrier.allow_peer(peer, _address_of(info))
        endpoint.add_peer(peer, info.session)
        self.add_flows(endpoint, peer, info)

    def add_flows(self, endpoint: Endpoint, peer: int, theirs: PeerInfo) -> None:
        """Make the flows to a peer that carrier and endpoint know."""
        own = self._info
        for mine, other in interface_pairs(
            own.host, own.interfaces, theirs.host, theirs.interfaces
        ):
            for urgency in range(len(theirs.listens[0])):
                place = self._carrier.connect(peer, mine, urgency, theirs=other)
                endpoint.add(Route(peer, mine, urgency), place, time.monotonic())


def _address_of(info: PeerInfo) -> PeerAddress:
    return PeerAddress(info.listens, info.key.encode() or None)


def _make_mailbox(
    number: int,
    info: PeerInfo,
    infos: dict[int, PeerInfo],
    carrier: ZeroMQCarrier,
    limits: Limits,
    name: Callable[[int], str],
    *,
    tolerate_silence: bool,
) -> Mailbox:
    """Make all flows: a connection for each interface pair and class."""
    carrier.allow({n: _address_of(theirs) for n, theirs in infos.items()})
    sessions = {peer: theirs.session for peer, theirs in infos.items()}
    membership, own = Membership(number, info.session, sessions), info.interfaces

    def describe(interface: int) -> str:
        return f"interface {own[interface].name} ({own[interface].address})"

    endpoint = Endpoint(
        membership, limits, tolerate_silence=tolerate_silence, describe_interface=describe
    )
    connector = Connector(number, info, carrier)
    for peer, theirs in infos.items():
        connector.add_flows(endpoint, peer, theirs)
    if not tolerate_silence:  # peers may still come over the others
        carrier.close_other_interfaces({route.interface for route in endpoint.flows})
    return Mailbox(endpoint, carrier, name=name, connector=connector)


def _own_interfaces(named: Sequence[str] | None) -> tuple[nic.Host, list[nic.Interface]]:
    own = nic.local()
    mine = listen_interfaces(own, named)
    for wanted in named or ():
        if wanted not in [i.name for i in mine]:
            raise unknown("interface", wanted, [i.name for i in own.interfaces])
    if not mine:
        raise UsageError("this host has no interface that is up and has an address: bring one up")
    return own, mine


def _store_key(namespace: str, number: int, incarnation: int) -> str:
    """Return the key of a process's `PeerInfo`."""
    return f"messages/{namespace}/{number}" + (f".{incarnation}" if incarnation else "")


def read_peer_info(
    store: Store, namespace: str, number: int, incarnation: int, seconds: float
) -> PeerInfo:
    """Return what a restarted process published.

    Raises:
        TimeoutError: nothing was published within ``seconds``.
        ValueError: it is malformed; names its key.
    """
    where = _store_key(namespace, number, incarnation)
    text = store.get(where, seconds)
    try:
        return PeerInfo.from_json(text)
    except ValueError as error:
        raise ValueError(f"the rendezvous store has under {where!r} a {error}") from None


def _read_peer(
    store: Store,
    where: str,
    number: int,
    peer: int,
    left: float,
    name: Callable[[int], str],
    seconds: float,
) -> PeerInfo:
    try:
        return PeerInfo.from_json(store.get(where, left))
    except TimeoutError:
        raise RendezvousError(
            f"{name(number)}: {name(peer)} opened no mailbox within {seconds:g} s; check that it "
            "is running and uses the same namespace"
        ) from None
    except ValueError as err:
        raise RendezvousError(f"{name(number)}: {name(peer)} sent a {err}") from None


def _check_same_options(me: str, own: PeerInfo, them: str, theirs: PeerInfo) -> None:
    """Refuse to connect processes that opened their mailboxes with different options."""
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


def _check_arguments(number: int, others: Sequence[int], classes: int, seconds: float) -> None:
    for each in (number, *others):
        if not isinstance(each, int) or not 0 <= each < 2**32:
            raise UsageError(f"process number {each!r}; allowed: 0 to 2**32 - 1")
    if classes not in range(1, MAX_CLASSES + 1):
        raise UsageError(f"classes={classes!r}; allowed: 1 to {MAX_CLASSES}")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"seconds={seconds!r}; allowed are seconds above 0")
