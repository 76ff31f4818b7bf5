"""`open_mailbox`: find the peers through the rendezvous store and connect to them."""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import zmq

from wingbeat.errors import RendezvousError, UsageError, unknown
from wingbeat.transport import descriptors
from wingbeat.transport import interfaces as nic
from wingbeat.transport.messages.endpoint import Endpoint, Limits, Membership
from wingbeat.transport.messages.frames import MAX_CLASSES
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.peers import (
    Connector,
    PeerInfo,
    address_of,
    check_same_options,
    store_key,
)
from wingbeat.transport.messages.zeromq import (
    HEARTBEAT_S,
    Keys,
    ZeroMQCarrier,
    descriptors_needed,
)

if TYPE_CHECKING:
    from wingbeat.transport.store import Store


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
    """Connect this process to other processes of the job; each of them must list this one too.

    Args:
        store: the rendezvous store, as `World.store`.
        number: number of this process, 0 to 2**32 - 1, unique in the namespace.
        peers: numbers of the processes to connect to; this process's own number is ignored.
        namespace: separates mailboxes of one job. Each (namespace, number) is opened once.
        interfaces: names of the interfaces to use on this host; None: all.
        classes: number of traffic classes, 1 to 4, equal on all processes. The first classes carry
            the DSCP EF, AF41 and AF21, the last one none.
        encrypted: whether to encrypt (CURVE) with keys generated here, equal on all processes.
            Without encryption, a process that observes the traffic can forge frames.
        limits: limits of messages and windows, equal on all processes, and of silence.
        seconds: timeout of the connection setup.
        name: returns the name of a process for messages, given its number.
        tolerate_silence: do not count a silent peer as lost; the caller detects lost peers.
        incarnation: above 0 for a process that replaces one that has exited.
        announce: called with the remaining seconds after this process has published its addresses;
            returns the peers to connect to, with their incarnations, once they have registered this
            process.

    Raises:
        UsageError: an invalid value, a value that differs from a peer's, a mailbox that was opened
            before, or too few file descriptors.
        RendezvousError: a peer published nothing in time, or something malformed.
        PeerError: a peer is present but unreachable over one of the interfaces.
    """
    limits = limits or Limits()
    others = sorted(set(peers) - {number})
    _check_arguments(number, others, classes, seconds)
    if store.has(store_key(namespace, number, incarnation)):
        raise UsageError(
            f"{name(number)} has already opened a mailbox in namespace {namespace!r}: use a "
            "different namespace for each mailbox, the same on all processes"
        )
    deadline = time.monotonic() + seconds
    own, mine = _own_interfaces(interfaces)
    keys = Keys.make() if encrypted else None
    what = f"{name(number)}: opening a mailbox in namespace {namespace!r}"
    sockets = len(mine) * classes
    descriptors.require(descriptors_needed(sockets, len(others), encrypted=encrypted), what)
    uses = tuple(i.address for i in mine)
    # A stopped process counts as lost after `limits.silence`. Its connections must not end before
    # that, unlike those of an exited process.
    heartbeat = HEARTBEAT_S if tolerate_silence else max(HEARTBEAT_S, limits.silence)
    try:
        carrier = ZeroMQCarrier(
            number, uses, classes, message=limits.message, keys=keys, heartbeat=heartbeat
        )
    except zmq.ZMQError as err:
        if err.errno != errno.EMFILE:
            raise
        raise descriptors.too_few_error(what) from None  # other threads have opened files meanwhile
    try:
        key = "" if keys is None else keys.public.decode()
        listens, session = carrier.address.endpoints, secrets.randbits(64)
        info = PeerInfo(own, uses, session, key, listens, limits.message, limits.window)
        store.set(store_key(namespace, number, incarnation), info.to_json())
        incarnations: Mapping[int, int] = dict.fromkeys(others, 0)
        if announce is not None:
            incarnations = announce(max(0.0, deadline - time.monotonic()))
        infos = {}
        for peer, theirs in incarnations.items():
            try:
                left = max(0.0, deadline - time.monotonic())
                text = store.get(store_key(namespace, peer, theirs), left)
                infos[peer] = PeerInfo.from_json(text)
            except TimeoutError:
                raise RendezvousError(
                    f"{name(number)}: {name(peer)} opened no mailbox within {seconds:g} s; check "
                    "that it is running and uses the same namespace"
                ) from None
            except ValueError as err:
                raise RendezvousError(f"{name(number)}: {name(peer)} sent a {err}") from None
            check_same_options(name(number), info, name(peer), infos[peer])
        mailbox = _make_mailbox(number, info, infos, carrier, limits, name, tolerate_silence)
        mailbox.wait_connected(max(0.0, deadline - time.monotonic()))
    except BaseException:
        carrier.close()
        raise
    return mailbox


def _make_mailbox(
    number: int,
    info: PeerInfo,
    infos: dict[int, PeerInfo],
    carrier: ZeroMQCarrier,
    limits: Limits,
    name: Callable[[int], str],
    tolerate_silence: bool,
) -> Mailbox:
    """Create all flows: a connection for each interface pair and class."""
    carrier.allow({n: address_of(theirs) for n, theirs in infos.items()})
    own = [f"interface {i.name} ({i.address})" for i in info.interfaces]
    endpoint = Endpoint(
        Membership(number, info.session, {n: theirs.session for n, theirs in infos.items()}),
        limits,
        tolerate_silence=tolerate_silence,
        describe_interface=own.__getitem__,
    )
    connector = Connector(number, info, carrier)
    for peer, theirs in infos.items():
        connector.add_flows(endpoint, peer, theirs)
    if not tolerate_silence:  # otherwise peers may still join over the others
        carrier.close_other_interfaces({route.interface for route in endpoint.flows})
    return Mailbox(endpoint, carrier, name=name, connector=connector)


def _own_interfaces(named: Sequence[str] | None) -> tuple[nic.Host, list[nic.Interface]]:
    own = nic.local()
    mine = nic.listen_interfaces(own, named)
    for wanted in named or ():
        if wanted not in [i.name for i in mine]:
            raise unknown("interface", wanted, [i.name for i in own.interfaces])
    if not mine:
        raise UsageError("this host has no interface that is up and has an address: bring one up")
    return own, mine


def _check_arguments(number: int, others: Sequence[int], classes: int, seconds: float) -> None:
    for each in (number, *others):
        if not isinstance(each, int) or not 0 <= each < 2**32:
            raise UsageError(f"process number {each!r}; allowed: 0 to 2**32 - 1")
    if classes not in range(1, MAX_CLASSES + 1):
        raise UsageError(f"classes={classes!r}; allowed: 1 to {MAX_CLASSES}")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"seconds={seconds!r}; allowed are seconds above 0")
