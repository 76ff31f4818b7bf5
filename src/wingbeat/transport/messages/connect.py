"""`open_mailbox`: find the peers through the rendezvous store and connect to them."""

from __future__ import annotations

import errno
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from wingbeat import _native
from wingbeat.errors import RendezvousError, UsageError
from wingbeat.schema import MalformedMessage
from wingbeat.transport import descriptors
from wingbeat.transport import interfaces as nic
from wingbeat.transport.messages.frames import MAX_CLASSES, NEVER, Limits, tos_of
from wingbeat.transport.messages.mailbox import Mailbox
from wingbeat.transport.messages.peers import (
    PeerInfo,
    Routes,
    new_secret,
    public_key,
    read_peer_info,
    store_key,
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
    watch: Callable[[], None] = lambda: None,
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
        encrypted: whether to encrypt, with keys generated here; equal on all processes.
            Without encryption, a process that observes the traffic can forge frames.
        limits: limits of messages and windows, equal on all processes, and of silence.
        seconds: timeout of the connection setup.
        name: returns the name of a process for messages, given its number.
        tolerate_silence: do not count a silent peer as lost; the caller detects lost peers.
        incarnation: above 0 for a process that replaces one that has exited.
        announce: called with the remaining seconds after this process has published its addresses;
            returns the peers to connect to, with their incarnations, once they have registered this
            process.
        watch: called every second while it waits for the connections; may raise.

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
    own = nic.listening(nic.local(), interfaces)
    what = f"{name(number)}: opening a mailbox in namespace {namespace!r}"
    sockets = len(own.interfaces) * classes
    descriptors.require(_CARRIER_DESCRIPTORS + sockets * (1 + len(others)), what)
    session, secret = secrets.randbits(64), new_secret()
    silence = NEVER if tolerate_silence else limits.silence
    carrier = _make_carrier(number, session, limits, silence, encrypted, what)
    try:
        ports = _listen(carrier, [each.address for each in own.interfaces], classes, what)
        info = PeerInfo(
            own, session, public_key(secret), encrypted, ports, limits.message, limits.window
        )
        store.set(store_key(namespace, number, incarnation), info.to_json())
        incarnations: Mapping[int, int] = dict.fromkeys(others, 0)
        if announce is not None:
            incarnations = announce(max(0.0, deadline - time.monotonic()))
        routes = Routes(number, name)
        mailbox = Mailbox(routes, info, secret, carrier, limits)
        for peer, theirs in incarnations.items():
            try:
                left = max(0.0, deadline - time.monotonic())
                found = read_peer_info(store, namespace, peer, theirs, left)
            except TimeoutError:
                raise RendezvousError(
                    f"{name(number)}: {name(peer)} opened no mailbox within {seconds:g} s; check "
                    "that it is running and uses the same namespace"
                ) from None
            except MalformedMessage as error:
                raise RendezvousError(f"{name(number)}: {name(peer)} sent {error}") from None
            mailbox.join(peer, found)
        if incarnations and not tolerate_silence:  # otherwise peers may join over the others
            carrier.close_listeners_except({n for p in routes.peers for n in routes.interfaces(p)})
        carrier.start()
        mailbox.wait_connected(max(0.0, deadline - time.monotonic()), watch)
    except BaseException:
        carrier.abandon()
        raise
    return mailbox


HEARTBEAT_S = 60.0
"""Seconds without a reply of the peer's host after which a connection ends."""

_CARRIER_DESCRIPTORS = 2
"""Descriptors of a carrier without sockets: the event queue and the one that ends its waits."""


def _make_carrier(
    number: int, session: int, limits: Limits, silence: float, encrypted: bool, what: str
) -> _native.Carrier:
    # A stopped process counts as lost after `silence`. Its connections must not end before that.
    heartbeat = HEARTBEAT_S if silence == NEVER else max(HEARTBEAT_S, silence)
    try:
        return _native.Carrier(
            number, session, limits.message, limits.window, silence, heartbeat, encrypted
        )
    except OSError:  # other threads have opened files meanwhile
        raise descriptors.too_few_error(what) from None
    except RuntimeError as error:
        raise UsageError(f"{what} with encrypted=True: {error}; use encrypted=False") from None


def _listen(
    carrier: _native.Carrier, addresses: Sequence[str], classes: int, what: str
) -> tuple[tuple[int, ...], ...]:
    """Listen on each address in each class; return the ports."""
    ports = [[0] * classes for _ in addresses]
    for (interface, address), urgency in itertools.product(enumerate(addresses), range(classes)):
        try:
            port = carrier.listen(interface, urgency, address, tos_of(urgency, classes))
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise descriptors.too_few_error(what) from None
            raise UsageError(
                f"cannot listen on {address}: {error.strerror}; name interfaces that are up: "
                "init(interfaces=[...])"
            ) from None
        ports[interface][urgency] = port
    return tuple(map(tuple, ports))


def _check_arguments(number: int, others: Sequence[int], classes: int, seconds: float) -> None:
    for each in (number, *others):
        if not isinstance(each, int) or not 0 <= each < 2**32:
            raise UsageError(f"process number {each!r}; allowed: 0 to 2**32 - 1")
    if classes not in range(1, MAX_CLASSES + 1):
        raise UsageError(f"classes={classes!r}; allowed: 1 to {MAX_CLASSES}")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"seconds={seconds!r}; allowed are seconds above 0")
