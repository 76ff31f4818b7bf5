"""Mailboxes over real sockets: cuts, strangers, classes, and what `open_mailbox` refuses."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zmq

from helpers.waiting import PATIENCE, until
from wingbeat.errors import PeerError, RendezvousError, UsageError, WingbeatError
from wingbeat.transport.interfaces import Host, Interface
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits, Mailbox, open_mailbox, zeromq
from wingbeat.transport.messages.frames import Header, Type
from wingbeat.transport.messages.peers import PeerInfo
from wingbeat.transport.messages.zeromq import Keys, ZeroMQCarrier


class Relay:
    """A TCP relay that can be cut: what stands between two hosts."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.passed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self.server.accept()[0]
                far = socket.create_connection(self.target)
            except OSError:
                return
            self.pairs.append((near, far))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
                self.passed += len(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def cut(self) -> None:
        """Break every connection, whatever is under way."""
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):  # the copying threads close them too
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept would keep it open
        self.server.close()
        self.cut()


class Diverted(Switchboard):
    """A store whose cards lead through relays."""

    def __init__(self) -> None:
        super().__init__()
        self.relays: list[Relay] = []

    def set(self, key: str, value: str) -> None:
        card = json.loads(value)
        for of in card["listens"]:
            for i, endpoint in enumerate(of):
                host, _, port = endpoint.removeprefix("tcp://").partition(":")
                relay = Relay((host, int(port)))
                self.relays.append(relay)
                of[i] = "tcp://{}:{}".format(*relay.address)
        super().set(key, json.dumps(card))


def opened(
    size: int = 2, store: Switchboard | None = None, each: Any = None, **options: Any
) -> list[Mailbox]:
    """Open the mailboxes of some processes, each in a thread as if it were one."""
    store = store or Switchboard()
    values = {"interfaces": ["lo"], "seconds": PATIENCE, **options}
    with ThreadPoolExecutor(size) as pool:
        made = [
            pool.submit(
                open_mailbox, store, n, range(size), **{**values, **(each or {}).get(n, {})}
            )
            for n in range(size)
        ]
        errors = [m.exception() for m in made]
    for box in made:
        if box.exception() is None and any(errors):
            box.result().abandon()
    for error in errors:
        if error is not None:
            raise error
    return [m.result() for m in made]


@pytest.fixture
def closing() -> Iterator[list[Mailbox]]:
    boxes: list[Mailbox] = []
    yield boxes
    for box in boxes:
        box.abandon()


def keep_cutting(relays: list[Relay], ended: threading.Event) -> int:
    """Cut after every 2 MB; return how often."""
    cuts, seen = 0, 0
    while not ended.wait(0.001):
        passed = sum(relay.passed for relay in relays)
        if passed - seen > 2_000_000:
            seen = passed
            cuts += 1
            for relay in relays:
                relay.cut()
    return cuts


def test_interrupted_connection_loses_and_repeats_nothing(closing: list[Mailbox]) -> None:
    """Cut again and again while both sides stream; every message comes once and in order."""
    store = Diverted()
    boxes = opened(store=store, classes=1, encrypted=False)
    closing += boxes
    count, payload = 300, bytes(50_000)

    def stream(own: int) -> list[int]:
        box, posted, got = boxes[own], [], []
        for n in range(count):
            posted.append(box.post(1 - own, n, payload))
            while (message := box.poll()) is not None:
                got.append(message.kind)
        while len(got) < count:
            got.append(box.receive(PATIENCE).kind)
        box.wait(posted, PATIENCE)
        return got

    ended = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        cuts = pool.submit(keep_cutting, store.relays, ended)
        both = [pool.submit(stream, own) for own in range(2)]
        try:
            assert [each.result(2 * PATIENCE) for each in both] == 2 * [list(range(count))]
        finally:
            ended.set()
        assert cuts.result() >= 5
    for relay in store.relays:
        relay.close()


def test_permanently_unreachable_peer_is_named(closing: list[Mailbox]) -> None:
    store = Diverted()
    a, b = opened(store=store, limits=Limits(silence=0.5))
    closing += [a, b]
    for relay in store.relays:
        relay.close()
    sent = a.post(1, 1, b"lost")
    with pytest.raises(
        PeerError, match=r"rank 0: rank 1 has been silent for 0.5 s; 1 messages to it"
    ):
        a.wait([sent], PATIENCE)
    with pytest.raises(PeerError, match="rank 1 has been silent for"):
        a.post(1, 2)


def cut_once(closing: list[Mailbox], **options: Any) -> tuple[Diverted, Mailbox, Mailbox]:
    """Two mailboxes whose connections have just been cut, and may be made anew."""
    store = Diverted()
    a, b = opened(store=store, **options)
    closing += [a, b]
    for relay in store.relays:
        relay.cut()
    return store, a, b


def test_accepting_process_reaches_the_peer_after_an_interruption(closing: list[Mailbox]) -> None:
    """The one that has connected has nothing to send, and must introduce itself all the same."""
    store, a, b = cut_once(closing)
    begin = time.monotonic()
    b.wait([b.post(0, 7)], PATIENCE)
    assert a.receive(0).kind == 7
    assert time.monotonic() - begin < PATIENCE / 4
    for relay in store.relays:
        relay.close()


def test_packets_carry_the_class(closing: list[Mailbox]) -> None:
    boxes = opened(classes=3)
    closing += boxes
    for box in boxes:
        sockets = box._carrier._sockets
        assert {u: s.get(zmq.TOS) for (_, u), s in sockets.items()} == {0: 0xB8, 1: 0x88, 2: 0}


def test_a_payload_is_not_copied(closing: list[Mailbox]) -> None:
    """What changes before it has left has changed for the receiver: nobody made a copy."""
    _store, a, b = cut_once(closing, classes=1, encrypted=False)
    payload = np.zeros(1 << 20, np.uint8)
    sent = a.post(1, 1, payload)
    payload[:] = 7
    message = b.receive(PATIENCE)
    a.wait([sent], PATIENCE)
    assert (np.frombuffer(message.payload, np.uint8) == 7).all()
    assert message.payload.readonly or message.payload.obj is not None


@pytest.mark.parametrize("encrypted", [False, True])
def test_payload_of_the_maximum_size_arrives(closing: list[Mailbox], encrypted: bool) -> None:
    """Encryption makes a part larger, and ZeroMQ ends connections on which larger ones come."""
    a, b = opened(classes=1, encrypted=encrypted, limits=Limits(message=1 << 20))
    closing += [a, b]
    payload = bytes(range(256)) * (1 << 12)
    sent = [a.post(1, 1, payload), b.post(0, 1, payload)]
    assert bytes(b.receive(PATIENCE).payload) == bytes(a.receive(PATIENCE).payload) == payload
    a.wait(sent[:1], PATIENCE)
    b.wait(sent[1:], PATIENCE)


def test_a_process_that_computes_still_answers(closing: list[Mailbox]) -> None:
    """The other's payload is free, although this one's user does not call."""
    a, b = opened()
    closing += [a, b]
    sent = a.post(1, 1, bytes(100_000))
    deadline = time.monotonic() + PATIENCE
    while not sent.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert b.receive(0).kind == 1


def test_sockets_linger_only_in_close() -> None:
    """ZeroMQ's own default waits without end for a peer that has gone: one close of 300 hung."""
    carrier = ZeroMQCarrier(0, ["127.0.0.1"], 2, message=1 << 20, keys=Keys.make())
    try:
        assert [each.linger for each in carrier._sockets.values()] == [0, 0]
    finally:
        carrier.close()


def test_close_that_does_not_end_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    carrier = ZeroMQCarrier(0, ["127.0.0.1"], 1, message=1 << 20, keys=None)
    kept = carrier._context.socket(zmq.PAIR)  # a context ends when its last socket is closed
    monkeypatch.setattr(zeromq, "CLOSE_S", 0.05)
    carrier.close()
    assert "connections are not closed after" in caplog.text
    kept.close()


def test_failure_of_the_authentication_thread_is_raised_by_the_mailbox(
    closing: list[Mailbox],
) -> None:
    """Nobody could connect any more, and all who try would wait in vain."""
    a, b = opened()
    closing += [a, b]

    def broken(_watched: object) -> None:
        raise KeyError("no such event")

    b._carrier._zap._count = broken
    a.abandon()  # an event for the other's zap
    until(lambda: b._broken is not None)
    with pytest.raises(WingbeatError, match="thread wingbeat-zap has ended by KeyError"):
        b.poll()


def test_unused_mailbox_is_collected() -> None:
    import gc

    before = {t.name for t in threading.enumerate()}
    a, b = opened()
    assert {t.name for t in threading.enumerate()} - before >= {"wingbeat-mail"}
    del a, b
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while any(t.name.startswith("wingbeat-mail") for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ports(box: Mailbox) -> list[str]:
    return [end for of in box._carrier.address.endpoints for end in of]


def test_unknown_keys_are_refused(closing: list[Mailbox]) -> None:
    a, b = opened()
    closing += [a, b]
    with zmq.Context() as context:
        wrong = context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        wrong.curve_publickey, wrong.curve_secretkey = public, secret
        wrong.curve_serverkey = b._carrier._keys.public
        wrong.connect(ports(b)[0])
        plain = context.socket(zmq.DEALER)
        plain.connect(ports(b)[0])
        for stranger in (wrong, plain):
            stranger.linger = 0
            stranger.send(b"let me in", zmq.DONTWAIT)
        until(lambda: b.refused_connections["key"] and sum(b.refused_connections.values()) >= 2)
        context.destroy(linger=0)
    assert not b.refused
    a.post(1, 5)
    assert b.receive(PATIENCE).kind == 5


def test_random_bytes_at_the_port_are_refused(closing: list[Mailbox]) -> None:
    a, b = opened()
    closing += [a, b]
    chance = random.Random(1)
    host, _, port = ports(b)[0].removeprefix("tcp://").partition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(chance.randbytes(chance.randrange(1, 200)))
    a.post(1, 5)
    assert b.receive(PATIENCE).kind == 5


def test_without_keys_strangers_are_refused_frame_by_frame(closing: list[Mailbox]) -> None:
    a, b = opened(encrypted=False, limits=Limits(message=1000))
    closing += [a, b]
    session = a._endpoint.membership.session
    hello = Header(Type.HELLO, 0, 0, 1).pack()
    data = Header(Type.DATA, session, 0, 1, 1).pack()
    with zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.connect(ports(b)[0])
        for parts in ([b"junk" * 30], [hello], [data], [b"a", b"b", b"c"], [hello[:40]]):
            stranger.send_multipart(parts)
        wanted = {"magic": 1, "session": 1, "stranger": 1, "parts": 1, "size": 1}
        until(lambda: b.poll() is None and b.refused == wanted)
        huge = context.socket(zmq.DEALER)
        huge.linger = 0
        huge.connect(ports(b)[0])
        huge.send(bytes(10**6))
        context.destroy(linger=0)
    a.post(1, 5)
    assert b.receive(PATIENCE).kind == 5
    assert b.refused == wanted


@pytest.mark.parametrize(
    ("each", "options", "error", "said"),
    [
        ({}, {"classes": 5}, UsageError, "classes=5; allowed: 1 to 4"),
        ({}, {"seconds": 0}, UsageError, "seconds=0; allowed"),
        ({}, {"interfaces": ["eth99"]}, UsageError, "unknown interface 'eth99'"),
        ({1: {"classes": 3}}, {}, UsageError, r"classes=2, rank 1 with classes=3"),
        ({1: {"encrypted": False}}, {}, UsageError, r"encrypted=True, rank 1 with encrypted=False"),
        ({1: {"limits": Limits(message=1000)}}, {}, UsageError, r"limits.message=4194304, rank 1"),
        (
            {1: {"limits": Limits(window=1 << 24)}},
            {},
            UsageError,
            r"limits.window=33554432, rank 1",
        ),
        ({1: {"namespace": "other"}}, {"seconds": 0.3}, RendezvousError, "opened no mailbox"),
    ],
)
def test_invalid_arguments_are_refused(
    each: dict, options: dict, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        opened(each=each, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "card",
    ["", "[]", "{}", "null", '"x"', "[" * 5000],
)
def test_malformed_peer_info_is_named(card: str) -> None:
    store = Switchboard()
    store.set("messages//1", card)
    with pytest.raises(RendezvousError, match=r"rank 0: rank 1 sent a malformed"):
        open_mailbox(store, 0, [1], interfaces=["lo"], seconds=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", -1),
        ("session", 1.5),
        ("session", 2**64),
        ("key", "short"),
        ("key", "ä" * 40),
        ("listens", []),
        ("listens", [["ipc:///tmp/x"]]),
        ("listens", [["tcp://127.0.0.1:99999"]]),
        ("listens", [["tcp://999.0.0.1:80"]]),
        ("uses", ["10.99.0.1"]),
        ("window", "many"),
    ],
)
def test_peer_info_with_a_wrong_field_is_named(field: str, value: object) -> None:
    store = Switchboard()
    with pytest.raises(RendezvousError):
        open_mailbox(store, 1, [0], interfaces=["lo"], seconds=0.05)
    card = json.loads(store.get("messages//1", 1))
    store.set("messages//1", json.dumps({**card, field: value}))
    with pytest.raises(RendezvousError, match=r"rank 0: rank 1 sent a malformed"):
        open_mailbox(store, 0, [1], interfaces=["lo"], seconds=1.0)


def test_namespace_is_opened_once(closing: list[Mailbox]) -> None:
    store = Switchboard()
    closing += opened(store=store)
    with pytest.raises(UsageError, match=r"rank 0 has already opened a mailbox in namespace ''"):
        open_mailbox(store, 0, [1], interfaces=["lo"], seconds=1.0)
    closing += opened(store=store, namespace="second")


def test_an_interface_with_two_addresses_is_two() -> None:
    """Each has a network of its own, and both the card's name for it."""
    host = Host("a", (eth("eth0", "10.0.0.1"), eth("eth0", "10.1.0.1")))
    listens = (("tcp://10.0.0.1:5000",), ("tcp://10.1.0.1:5001",))
    card = PeerInfo(host, ("10.0.0.1", "10.1.0.1"), 1, "", listens, 1000, 9000)
    again = PeerInfo.from_json(card.to_json())
    assert again == card
    assert [i.address for i in again.interfaces] == ["10.0.0.1", "10.1.0.1"]


def test_failure_of_the_poller_is_raised_by_the_next_call(closing: list[Mailbox]) -> None:
    a, b = opened()
    closing += [a, b]

    def broken(seconds: float) -> None:
        raise RuntimeError("the card was pulled")

    b._carrier.receive = broken
    until(lambda: b._broken is not None)
    with pytest.raises(RuntimeError, match="the card was pulled"):
        b.poll()


def eth(name: str, address: str) -> Interface:
    return Interface(name, address, address.rpartition(".")[0] + ".0/24")


def test_renewed_connection_is_no_loss(closing: list[Mailbox]) -> None:
    store, a, b = cut_once(closing)
    begin = time.monotonic()
    for box in (a, b):  # who has connected, and who was connected to
        while not box._carrier.ended or box.unconnected():
            assert time.monotonic() < begin + PATIENCE
            box.next(0.01)
    assert a.unconnected() == b.unconnected() == {}
    a.post(1, 7, b"x")
    assert b.receive(PATIENCE).payload == b"x"
    for relay in store.relays:
        relay.close()


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("dead", [0, 1])
def test_exited_process_is_unconnected(dead: int, encrypted: bool, closing: list[Mailbox]) -> None:
    """To who has connected to it as to who was connected to; and it may come again."""
    boxes = opened(classes=2, encrypted=encrypted)
    closing += boxes
    left = boxes[1 - dead]
    assert left.unconnected() == {}
    boxes[dead].abandon()
    until(lambda: left.unconnected().get(dead, 0.0) > 0.05)
    left.drop(dead)
    assert left.unconnected() == {}


@pytest.mark.parametrize(
    ("silence", "tolerate_silence", "milliseconds"),
    [(5.0, False, 60_000), (240.0, False, 240_000), (240.0, True, 60_000)],
)
def test_connections_of_a_stopped_process_last_until_it_counts_as_silent(
    silence: float, tolerate_silence: bool, milliseconds: int, closing: list[Mailbox]
) -> None:
    """Else a pause of a minute would look like the end of the process."""
    boxes = opened(limits=Limits(silence=silence), tolerate_silence=tolerate_silence)
    closing += boxes
    sockets = boxes[0]._carrier._sockets.values()
    assert {socket.get(zmq.HEARTBEAT_TIMEOUT) for socket in sockets} == {milliseconds}


def test_process_that_left_is_not_listed_as_unconnected(closing: list[Mailbox]) -> None:
    for number in (0, 1):
        boxes = opened()
        closing += boxes
        threading.Thread(target=boxes[number].close).start()
        other = boxes[1 - number]
        until(lambda other=other: other.poll() is None and other.left and other._carrier.ended)
        assert other.unconnected() == {}


@pytest.mark.parametrize("encrypted", [False, True])
def test_routing_ids_of_connections_cannot_be_guessed(encrypted: bool) -> None:
    """A peer that has claimed one before would end the process."""
    with contextlib.ExitStack() as stack:
        keys = [Keys.make() if encrypted else None for _ in range(2)]
        ends = [
            ZeroMQCarrier(number, ["127.0.0.1"], 2, message=1000, keys=key)
            for number, key in enumerate(keys)
        ]
        for end in ends:
            stack.callback(end.close)
        ends[0].allow({1: ends[1].address})
        names = set()
        for _ in range(3):
            for urgency in range(2):
                place = ends[0].connect(1, 0, urgency, theirs=0)
                assert place is not None
                names.add(place.name)
            ends[0].disconnect(1)
            ends[0].allow_peer(1, ends[1].address)
        assert len(names) == 6
        assert all(len(name) == 16 for name in names)


def test_peer_that_reads_nothing_has_a_bounded_queue() -> None:
    """It asks without end; what answers it is dropped when so much waits."""
    with contextlib.ExitStack() as stack:
        ends = [
            ZeroMQCarrier(number, ["127.0.0.1"], 1, message=1 << 20, keys=None)
            for number in range(2)
        ]
        for end in ends:
            stack.callback(end.close)
        ends[0].allow({1: ends[1].address})
        place = ends[0].connect(1, 0, 0, theirs=0)
        assert place is not None
        deadline = time.monotonic() + PATIENCE
        while not ends[0].send(place, [b"x"]):
            assert time.monotonic() < deadline
        taken, payload = 0, bytes(1 << 16)
        while not ends[0]._warned_full and taken < 20 * zeromq.MAX_QUEUED_FRAMES:
            assert ends[0].send(place, [b"head", payload])
            taken += 1
        assert ends[0]._warned_full
        assert taken < 3 * zeromq.MAX_QUEUED_FRAMES
