"""Mailboxes over real sockets: cuts, strangers, classes, and what `open_mailbox` refuses."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.mailboxes import arrive, receive
from helpers.waiting import PATIENCE, until
from wingbeat import _native
from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.schema import parse_json
from wingbeat.transport.interfaces import Host, Interface
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits, Mailbox, open_mailbox
from wingbeat.transport.messages.peers import PeerInfo


class Relay:
    """A TCP relay that can be cut: what stands between two hosts."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.passed = 0
        self.recording: Recorded | None = None
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
            while data := self.changed(source.recv(1 << 16)):
                if self.recording is not None and target.getpeername() == self.target:
                    self.recording.sent += data
                target.sendall(data)
                self.passed += len(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def changed(self, data: bytes) -> bytes:
        return data

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

    def __init__(self, kind: type[Relay] = Relay) -> None:
        super().__init__()
        self.kind = kind
        self.relays: list[Relay] = []

    def set(self, key: str, value: str) -> None:
        card = json.loads(value)
        for of in card["ports"]:
            for i, port in enumerate(of):
                relay = self.kind(("127.0.0.1", port))
                self.relays.append(relay)
                of[i] = relay.address[1]
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


@pytest.mark.parametrize("encrypted", [False, True])
def test_interrupted_connection_loses_and_repeats_nothing(
    closing: list[Mailbox], encrypted: bool
) -> None:
    """Cut again and again while both sides stream; every message comes once and in order."""
    store = Diverted()
    boxes = opened(store=store, classes=1, encrypted=encrypted)
    closing += boxes
    count, payload = 300, random.Random(1).randbytes(50_000)

    def stream(own: int) -> list[int]:
        box, posted, got = boxes[own], [], []
        for n in range(count):
            posted.append(box.post(1 - own, n, payload))
            while (message := box.poll()) is not None:
                got.append(message.kind)
        while len(got) < count:
            message = receive(box)
            assert message.payload == payload
            got.append(message.kind)
        arrive(posted)
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
    until(lambda: 1 in a.lost)
    assert not sent.arrived
    with pytest.raises(
        PeerError, match=r"rank 0: rank 1 has been silent for 0.5 s; 1 messages to it"
    ):
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
    arrive([b.post(0, 7)])
    assert receive(a, 0).kind == 7
    assert time.monotonic() - begin < PATIENCE / 4
    for relay in store.relays:
        relay.close()


def sockets_of_this_process() -> list[socket.socket]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(socket.socket(fileno=os.dup(int(name))))
    return [each for each in found if each.family == socket.AF_INET]


def test_packets_carry_the_class(closing: list[Mailbox]) -> None:
    closing += opened(classes=3)
    sockets = sockets_of_this_process()
    ports = {port: urgency for box in closing for urgency, port in enumerate(ports_of(box))}
    seen = set()
    for each in sockets:
        with each, contextlib.suppress(OSError):
            ends = {each.getsockname()[1], each.getpeername()[1]} & ports.keys()
            seen |= {
                (ports[end], each.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)) for end in ends
            }
    assert seen == {(0, 0xB8), (1, 0x88), (2, 0)}


def test_a_payload_is_not_copied(closing: list[Mailbox]) -> None:
    """What changes before it has left has changed for the receiver: nobody made a copy."""
    _store, a, b = cut_once(closing, classes=1, encrypted=False)
    payload = np.zeros(1 << 20, np.uint8)
    sent = a.post(1, 1, payload)
    payload[:] = 7
    message = receive(b)
    arrive([sent])
    assert (np.frombuffer(message.payload, np.uint8) == 7).all()
    assert message.payload.readonly or message.payload.obj is not None


@pytest.mark.parametrize("encrypted", [False, True])
def test_payload_of_the_maximum_size_arrives(closing: list[Mailbox], encrypted: bool) -> None:
    a, b = opened(classes=1, encrypted=encrypted, limits=Limits(message=1 << 20))
    closing += [a, b]
    payload = bytes(range(256)) * (1 << 12)
    sent = [a.post(1, 1, payload), b.post(0, 1, payload)]
    assert bytes(receive(b).payload) == bytes(receive(a).payload) == payload
    arrive(sent[:1])
    arrive(sent[1:])


def test_a_process_that_computes_still_answers(closing: list[Mailbox]) -> None:
    """The other's payload is free, although this one's user does not call."""
    a, b = opened()
    closing += [a, b]
    sent = a.post(1, 1, bytes(100_000))
    deadline = time.monotonic() + PATIENCE
    while not sent.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert receive(b, 0).kind == 1


def threads_of_mailboxes() -> set[str]:
    found = set()
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (each / "comm").read_text() == "wingbeat-mail\n":
                found.add(each.name)
    return found


def test_unused_mailbox_is_collected() -> None:
    others = threads_of_mailboxes()  # those of earlier tests, if any are left
    boxes = opened()
    payload = np.zeros(1000)
    posted = boxes[0].post(1, 1, payload)
    references = sys.getrefcount(payload)
    until(lambda: len(threads_of_mailboxes() - others) == 2)
    del boxes
    gc.collect()
    until(lambda: not threads_of_mailboxes() - others)
    assert sys.getrefcount(payload) < references, "nothing refers to what was posted"
    assert posted.size


def ports_of(box: Mailbox) -> tuple[int, ...]:
    return box.info.ports[0]


def refused(box: Mailbox, reason: str, count: int = 1) -> bool:
    return box.refused_connections[reason] >= count


def test_connection_without_the_key_is_refused(closing: list[Mailbox]) -> None:
    a, b = opened()
    closing += [a, b]
    identity = struct.pack("<IIII", 0, 1, 0, 0)
    for answer, reason in (
        (b"wingbeat" + identity + bytes(64), "key"),
        (b"wingbeat" + struct.pack("<IIII", 9, 1, 0, 0) + bytes(64), "stranger"),
        (b"HTTP/1.1" + bytes(80), "handshake"),
        (b"wingbeat", "unfinished"),
    ):
        with socket.create_connection(("127.0.0.1", ports_of(b)[0])) as stranger:
            assert stranger.recv(8, socket.MSG_WAITALL) == b"wingbeat"
            stranger.sendall(answer)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionResetError):
                assert len(stranger.recv(1000)) <= 32, "the rest of the nonce"
        until(lambda reason=reason: refused(b, reason))
    assert not b.refused
    a.post(1, 5)
    assert receive(b).kind == 5


def test_strangers_that_hold_connections_do_not_use_up_descriptors(closing: list[Mailbox]) -> None:
    a, b = opened(classes=1)
    closing += [a, b]
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stranger = socket.create_connection(("127.0.0.1", ports_of(b)[0]))
            stack.enter_context(stranger)
        until(lambda: refused(b, "unfinished", 100 - 64 - 1))
        a.post(1, 5)
        assert receive(b).kind == 5
    until(lambda: refused(b, "unfinished", 100))


def test_replayed_handshake_is_refused(closing: list[Mailbox]) -> None:
    """The accepting end has drawn another nonce."""
    store = Recorded()
    a, b = opened(store=store, classes=1, encrypted=False)
    closing += [a, b]
    with socket.create_connection(store.target) as stranger:
        stranger.sendall(store.sent[:500])
        until(lambda: refused(b, "key"))


class Recorded(Diverted):
    """Keeps what the connecting process sends."""

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if key.endswith("1"):
            self.target = self.relays[-1].target
            self.relays[-1].recording = self

    sent = b""


def test_random_bytes_at_the_port_are_refused(closing: list[Mailbox]) -> None:
    a, b = opened()
    closing += [a, b]
    chance = random.Random(1)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", ports_of(b)[0])) as stranger:
            stranger.sendall(chance.randbytes(chance.randrange(1, 200)))
    a.post(1, 5)
    assert receive(b).kind == 5


class Flipping(Relay):
    """Changes a bit of what passes after so many bytes."""

    flip_at = -1

    def changed(self, data: bytes) -> bytes:
        if 0 <= self.flip_at < len(data):
            data = bytearray(data)
            data[self.flip_at] ^= 1
            self.flip_at = -1
            return bytes(data)
        return data


@pytest.mark.parametrize("place", [0, 10, 91, 92, 600])
def test_changed_bytes_of_an_encrypted_connection_end_it(
    closing: list[Mailbox], place: int
) -> None:
    """Header, tag and payload: nothing of them is used, and everything arrives afterwards."""
    store = Diverted(Flipping)
    a, b = opened(store=store, classes=1)
    closing += [a, b]
    time.sleep(0.05)  # acknowledgements of the handshake have passed
    for relay in store.relays:
        relay.flip_at = place
    payload = random.Random(1).randbytes(1000)
    arrive([a.post(1, 7, payload)])
    message = receive(b)
    assert (message.kind, message.payload) == (7, payload)
    assert (a.refused + b.refused)["sealed"] >= 1


@pytest.mark.parametrize(
    ("nbytes", "spans", "said"),
    [(1001, 0, "the payload is too large"), (10, 256, "too many spans")],
)
def test_refused_message_releases_its_payload(nbytes: int, spans: int, said: str) -> None:
    carrier = _native.Carrier(0, 1, 1000, 10_000, float("inf"), 60.0, False)
    payload = bytearray(nbytes)
    with pytest.raises(ValueError, match=said):
        carrier.post(1, 0, 0, 7, payload, (0, 0, 0, 0), 1, [(0, 1)] * spans)
    payload.append(0)  # a BufferError if the carrier still used it


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
    with pytest.raises(RendezvousError, match=r"rank 0: rank 1 sent malformed"):
        open_mailbox(store, 0, [1], interfaces=["lo"], seconds=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", -1),
        ("session", 1.5),
        ("session", 2**64),
        ("key", "short"),
        ("key", "1"),
        ("ports", []),
        ("ports", [[0]]),
        ("ports", [[99999]]),
        ("ports", [["80"]]),
        ("host", ["a", []]),
        ("window", "many"),
    ],
)
def test_peer_info_with_a_wrong_field_is_named(field: str, value: object) -> None:
    store = Switchboard()
    with pytest.raises(RendezvousError):
        open_mailbox(store, 1, [0], interfaces=["lo"], seconds=0.05)
    card = json.loads(store.get("messages//1", 1))
    store.set("messages//1", json.dumps({**card, field: value}))
    with pytest.raises(RendezvousError, match=r"rank 0: rank 1 sent malformed"):
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
    card = PeerInfo(host, 1, "3", True, ((5000,), (5001,)), 1000, 9000)
    again = parse_json(PeerInfo, card.to_json())
    assert again == card
    assert [i.address for i in again.host.interfaces] == ["10.0.0.1", "10.1.0.1"]


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
    assert receive(b).payload == b"x"
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


def test_process_that_left_is_not_listed_as_unconnected(closing: list[Mailbox]) -> None:
    for number in (0, 1):
        boxes = opened()
        closing += boxes
        threading.Thread(target=boxes[number].close).start()
        other = boxes[1 - number]
        until(lambda other=other: other.poll() is None and other.left and other._carrier.ended)
        assert other.unconnected() == {}


SUSPENDED = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits, open_mailbox
store, limits = Switchboard(), Limits(silence=1.5)
with ThreadPoolExecutor(2) as pool:
    open_one = lambda n: open_mailbox(store, n, [0, 1], interfaces=["lo"], limits=limits)
    a, b = pool.map(open_one, [0, 1])
a.post(1, 1, bytes(1 << 20))
print("ready", flush=True)
sys.stdin.readline()
b.next(0.3)
print(dict(a.lost), dict(b.lost), flush=True)
"""


def test_process_suspended_for_longer_than_silence_loses_no_peer() -> None:
    """Neither end has heard the other meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", SUSPENDED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)  # what the subject is
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("go\n", timeout=PATIENCE)
    assert said == "{} {}\n"


def test_forked_child_closes_its_copies_of_the_sockets(closing: list[Mailbox]) -> None:
    """Else a peer would not notice that the parent has exited."""
    a, b = opened()
    closing += [a, b]
    ports = {*ports_of(a), *ports_of(b)}
    child = os.fork()
    if child == 0:
        left = ports & {each.getsockname()[1] for each in sockets_of_this_process()}
        with contextlib.suppress(UsageError):
            a.poll()
            os._exit(1)
        os._exit(2 if left else 0)
    assert os.waitpid(child, 0)[1] == 0
    a.post(1, 5)
    assert receive(b).kind == 5


def test_application_counts_messages_that_it_refuses(closing: list[Mailbox]) -> None:
    a, b = opened()
    closing += [a, b]
    for _ in range(2):
        b.refused["content"] += 1
    assert b.refused == {"content": 2}


def test_threads_may_use_a_mailbox_at_the_same_time(closing: list[Mailbox]) -> None:
    """One waits for messages while others post and wait for arrivals."""
    a, b = opened(classes=1)
    closing += [a, b]
    count = 300

    def post(box: Mailbox, peer: int) -> None:
        arrive([box.post(peer, n, bytes(100)) for n in range(count)])

    def take(box: Mailbox) -> int:
        return sum(receive(box) is not None for _ in range(2 * count))

    with ThreadPoolExecutor(6) as pool:
        posting = [pool.submit(post, box, 1 - n) for n, box in enumerate((a, b)) for _ in range(2)]
        taking = [pool.submit(take, box) for box in (a, b)]
        assert [each.result(3 * PATIENCE) for each in taking] == [2 * count] * 2
        for each in posting:
            each.result(PATIENCE)


def test_wait_for_connections_ends_in_time_although_what_it_calls_meanwhile_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls = [100.0], []

    def wait_heard(seconds: float) -> bool:
        now[0] += seconds
        return False

    def watch() -> None:
        calls.append(now[0])
        now[0] += 5.0

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("wingbeat.transport.messages.mailbox.time", clock)
    carrier = SimpleNamespace(wait_heard=wait_heard, unheard=lambda: None)
    Mailbox.wait_connected(SimpleNamespace(_carrier=carrier), 8.0, watch)  # type: ignore[arg-type]
    assert calls == [101.0, 107.0]
