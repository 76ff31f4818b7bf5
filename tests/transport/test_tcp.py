"""Links over TCP: authentication of connections, and what malformed bytes lead to."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers import tcp as ranks
from helpers.frames import MAGIC, frame
from wingbeat import _native
from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport import handshake, tcp
from wingbeat.transport.failures import LivenessListener, publish_failure
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.tcp import GroupLink, TcpLink
from wingbeat.types import Group

BOTH = pytest.mark.parametrize("shared_memory", [False, True], ids=["tcp", "shared memory"])

KEY = b"k" * 16


class Peer:
    """A link to one peer, whose bytes the test writes."""

    def __init__(self, ends: tuple[socket.socket, socket.socket] | None = None) -> None:
        ours, self.socket = ends or socket.socketpair()
        self.link = TcpLink("lo", 1)
        self.link.nic.add(0, ours.detach())

    def failure(self) -> str:
        """Return the reason for which the connection failed."""
        with pytest.raises(RuntimeError) as caught:
            self.link.recv(torch.zeros(3, dtype=torch.uint8), 0, 99).wait(20.0)
        return str(caught.value)


class Relay:
    """Passes on the bytes of a connection and keeps them, once the handshake is over."""

    def __init__(self, descriptor: int, change: Callable[[bytes], bytes]) -> None:
        self.outer = socket.socket(fileno=descriptor)
        self.outer.setblocking(True)
        self.inner, self.given = socket.socketpair()
        self.seen, self._change = bytearray(), change
        self.threads = [
            threading.Thread(target=self._pass, args=ends, daemon=True)
            for ends in ((self.outer, self.inner), (self.inner, self.outer))
        ]
        for thread in self.threads:
            thread.start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self._change(data))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def watch(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes] = bytes
) -> Callable[[], bytes]:
    """Have connecting ranks use relays; the function returns all bytes of ended connections."""
    relays: list[Relay] = []
    dial = tcp._Port._dial_over_tcp

    def dialed(*args: Any) -> tuple[int, bytes]:
        descriptor, keys = dial(*args)
        relays.append(Relay(descriptor, change))
        return relays[-1].given.detach(), keys

    def seen() -> bytes:
        for relay in relays:
            for thread in relay.threads:
                thread.join(20.0)
        return b"".join(relay.seen for relay in relays)

    monkeypatch.setattr(tcp._Port, "_dial_over_tcp", dialed)
    return seen


def close(made: list[tuple[TcpLink, ...]]) -> None:
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(lambda links: links[0].close(), made))


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.socket.close()
    made.link.close()


class TcpPeer(Peer):
    """The same over TCP: the kernel counts the bytes that are awaited."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs = listener.accept()[0]
        self._observed = ours.dup()
        super().__init__((ours, theirs))

    def awaits(self, more: bool) -> bool:
        """Wait until the link awaits more than one byte, or one; False if it does not."""
        end = time.monotonic() + 20.0
        while time.monotonic() < end:
            least = self._observed.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
            assert least <= 128 << 10
            if (least > 1) == more:
                return True
            time.sleep(0.001)
        return False

    def close(self) -> None:
        self._observed.close()
        self.socket.close()
        self.link.close()


@pytest.fixture
def tcp_peer() -> Iterator[TcpPeer]:
    made = TcpPeer()
    yield made
    made.close()


LARGE = bytes(range(256)) * 1000


def test_rest_of_a_frame_is_awaited_as_a_whole_and_what_follows_as_before(
    tcp_peer: TcpPeer,
) -> None:
    sent, into, small = frame(7, LARGE), torch.zeros(len(LARGE), dtype=torch.uint8), torch.zeros(3)
    wait = tcp_peer.link.recv(into, 0, 7)
    tcp_peer.socket.sendall(sent[:100_000])
    assert tcp_peer.awaits(more=True)
    tcp_peer.socket.sendall(sent[100_000:])
    wait.wait(20.0)
    assert bytes(into.tolist()) == LARGE
    assert tcp_peer.awaits(more=False)
    tcp_peer.socket.sendall(frame(8, bytes(12)))
    tcp_peer.link.recv(small, 0, 8).wait(20.0)


@pytest.mark.parametrize(
    ("linger", "expected"), [(False, "closed by the peer"), (True, "Connection reset by peer")]
)
def test_peer_that_ends_within_an_awaited_frame_fails_the_connection(
    tcp_peer: TcpPeer, linger: bool, expected: str
) -> None:
    tcp_peer.socket.sendall(frame(7, LARGE)[:100_000])
    assert tcp_peer.awaits(more=True)
    if linger:
        off = struct.pack("ii", 1, 0)
        tcp_peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, off)
    tcp_peer.socket.close()
    assert expected in tcp_peer.failure()


def test_frame_written_by_hand_arrives(peer: Peer) -> None:
    out = torch.zeros(3, dtype=torch.uint8)
    for byte in frame(7, b"abc"):
        peer.socket.send(bytes([byte]))
    peer.link.recv(out, 0, 7).wait(20.0)
    assert bytes(out.tolist()) == b"abc"


def test_message_in_several_frames_arrives_before_and_after_its_receive_is_posted(
    peer: Peer,
) -> None:
    out = torch.zeros(6, dtype=torch.uint8)
    peer.socket.send(frame(7, b"ab", total=6))
    time.sleep(0.05)
    coming = peer.link.recv(out, 0, 7)
    peer.socket.send(frame(7, b"cd", total=6, offset=2))
    peer.socket.send(frame(7, b"ef", total=6, offset=4))
    coming.wait(20.0)
    assert bytes(out.tolist()) == b"abcdef"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(magic=1), "magic"),
        (frame(check=1), "checksum"),
        (frame(kind=9), "kind"),
        (frame(length=1 << 20, total=1 << 20), "too long"),
        (frame(length=1, total=1 << 50), "too long"),
        (frame(length=4, total=3), "exceeds its message"),
        (frame(offset=1 << 63, length=1, total=1 << 30), "exceeds its message"),
        (frame(length=0, total=3), "empty"),
        (frame(payload=b"x", consumed=1), "acknowledges more than was sent"),
        (frame(payload=b"x", received=1), "received more frames than were sent"),
        (frame(kind=4), "a resume is not expected"),
        (frame(payload=b"x", offset=1, total=2), "does not continue"),
        (frame(payload=b"x", total=2) + frame(payload=b"x", total=2), "begins within another"),
        (frame(payload=b"x", total=2) + frame(8, b"x", offset=1, total=2), "does not continue"),
        (frame(kind=2, payload=b"x"), "credit has a payload"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_frame_fails_the_connection(peer: Peer, sent: bytes, why: str) -> None:
    peer.socket.send(sent)
    text = peer.failure()
    assert "malformed" in text
    assert why in text


def test_peer_that_exceeds_its_window_is_cut_off(peer: Peer) -> None:
    part = bytes(256 << 10)
    with contextlib.suppress(OSError):
        for tag in range(1000):
            peer.socket.sendall(frame(tag, part))
    assert "exceeds its window" in peer.failure()


@BOTH
def test_message_behind_a_larger_one_than_the_window_can_be_received_first(
    shared_memory: bool,
) -> None:
    made = ranks.links(2, shared_memory=shared_memory)
    large, small = torch.randn(4_000_000), torch.ones(3)
    sent = [made[0][0].send(large, 1, 0), made[0][0].send(small, 1, 1)]
    first, second = torch.zeros(3), torch.zeros(4_000_000)
    made[1][0].recv(first, 0, 1).wait(20.0)
    made[1][0].recv(second, 0, 0).wait(20.0)
    for each in sent:
        each.wait(20.0)
    assert torch.equal(first, small)
    assert torch.equal(second, large)
    close(made)


def test_message_of_another_size_fails_its_receive_alone(peer: Peer) -> None:
    out = torch.zeros(3, dtype=torch.uint8)
    coming = peer.link.recv(out, 0, 7)
    peer.socket.send(frame(7, b"abcd") + frame(8, b"xyz"))
    with pytest.raises(RuntimeError, match="sent 4 bytes where 3 were expected"):
        coming.wait(20.0)
    peer.link.recv(out, 0, 8).wait(20.0)
    assert bytes(out.tolist()) == b"xyz"


def test_random_bytes_fail_the_connection_and_nothing_else() -> None:
    generator = random.Random(3)
    for _ in range(50):
        made = Peer()
        made.socket.send(generator.randbytes(generator.randrange(60, 4000)))
        assert "malformed" in made.failure()
        made.socket.close()
        made.link.close()


def test_dropped_receive_leaves_the_connection_usable(peer: Peer) -> None:
    out = torch.zeros(3, dtype=torch.uint8)
    coming = peer.link.recv(out, 0, 7)
    del coming
    peer.socket.send(frame(7, b"abc") + frame(8, b"xyz"))
    peer.link.recv(out, 0, 8).wait(20.0)
    assert bytes(out.tolist()) == b"xyz"


def test_message_of_another_size_fails_alone_on_an_encrypted_connection() -> None:
    made = ranks.links(2, shared_memory=False, encrypted=True)
    wrong, right = torch.zeros(3, dtype=torch.uint8), torch.zeros(3)
    first, second = made[1][0].recv(wrong, 0, 7), made[1][0].recv(right, 0, 8)
    sent = [
        made[0][0].send(torch.ones(4, dtype=torch.uint8), 1, 7),
        made[0][0].send(right + 1, 1, 8),
    ]
    with pytest.raises(RuntimeError, match="sent 4 bytes where 3 were expected"):
        first.wait(20.0)
    second.wait(20.0)
    for each in sent:
        each.wait(20.0)
    assert torch.equal(right, torch.ones(3))
    close(made)


@pytest.mark.parametrize("encrypted", [True, False, None])
def test_bytes_of_an_encrypted_connection_are_not_readable(
    encrypted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends of a loopback connection have one address: by default it is plain."""
    secret = b"what nobody else may read".ljust(64, b".")
    seen = watch(monkeypatch)
    made = ranks.links(2, shared_memory=False, encrypted=encrypted)
    out = torch.zeros(len(secret), dtype=torch.uint8)
    coming = made[1][0].recv(out, 0, 1)
    made[0][0].send(torch.tensor(list(secret), dtype=torch.uint8), 1, 1).wait(20.0)
    coming.wait(20.0)
    assert bytes(out.tolist()) == secret
    close(made)
    assert (secret in seen()) == (not encrypted)
    assert (struct.pack("<I", MAGIC) in seen()) == (not encrypted)


def test_connections_between_addresses_are_encrypted_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [ranks.Interface("lo", f"127.0.0.{n}", "127.0.0.0/8") for n in (1, 2, 2)]
    seen = watch(monkeypatch)
    made = ranks.links(3, shared_memory=False, places=places)
    values = [torch.full((16,), 7 + rank, dtype=torch.uint8) for rank in range(3)]
    for source, target in ((0, 1), (1, 2)):
        out = torch.zeros(16, dtype=torch.uint8)
        coming = made[target][0].recv(out, source, 1)
        made[source][0].send(values[source], target, 1).wait(20.0)
        coming.wait(20.0)
        assert torch.equal(out, values[source])
    close(made)
    assert bytes(values[0].tolist()) not in seen()
    assert bytes(values[1].tolist()) in seen()


def test_bytes_changed_on_their_way_fail_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch, change=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    made = ranks.links(2, shared_memory=False, encrypted=True)
    coming = made[1][0].recv(torch.zeros(4), 0, 1)
    made[0][0].send(torch.ones(4), 1, 1)
    with pytest.raises(RuntimeError, match="an authentication tag is wrong"):
        coming.wait(20.0)
    close(made)


def test_ranks_with_different_choices_of_encryption_are_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"rank \d has encrypted=(True|None) and rank \d encrypted=(True|None): set the same",
    ):
        ranks.links(2, choices=[True, None])


def test_rank_with_another_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RendezvousError, match=r"rank \d .*(did not reach|did not connect)"):
        ranks.links(2, keys=[b"a" * 16, b"b" * 16], timeout=0.5)
    assert "do not have this job's key" in caplog.text


def test_rank_that_connects_asks_the_store_rarely_whether_the_other_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(tcp._Ranks, "how_ended", lambda _, peer: asked.append(peer) or "")
    with pytest.raises(RendezvousError):
        ranks.links(2, keys=[b"a" * 16, b"b" * 16], timeout=1.5)
    # Rank 1 tries 20 times per second, and rank 0 waits for it.
    for peer in (0, 1):
        assert 1 <= asked.count(peer) <= 1.5 / tcp._ENDED_CHECK_S + 1


def bother(stranger: socket.socket, number: int) -> socket.socket:
    """Hold a connection, send garbage, or send a correct answer with a wrong tag."""
    if number % 3:
        stranger.send(b"\0" * (handshake.PROOF_BYTES if number % 3 == 1 else 5))
    return stranger


def dial(address: Any) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, 20.0)
    made = socket.socket(socket.AF_UNIX)
    made.connect(address)
    return made


@BOTH
def test_strangers_neither_connect_nor_delay_the_ranks(
    monkeypatch: pytest.MonkeyPatch, shared_memory: bool
) -> None:
    addresses: list[Any] = []
    strangers: list[socket.socket] = []

    def watched(listen: Callable[..., socket.socket]) -> Callable[..., socket.socket]:
        def wrapper(*args: Any) -> socket.socket:
            made = listen(*args)
            name = made.getsockname()
            addresses.append(name.decode() if isinstance(name, bytes) else name)
            strangers.extend(bother(dial(addresses[-1]), n) for n in range(100))
            return made

        return wrapper

    monkeypatch.setattr(tcp, "_listen", watched(tcp._listen))
    monkeypatch.setattr(tcp, "_listen_locally", watched(tcp._listen_locally))
    begin = time.monotonic()
    made = ranks.links(3, shared_memory=shared_memory)
    assert time.monotonic() - begin < 5.0
    assert len(addresses) == (6 if shared_memory else 3)
    out = torch.zeros(4)
    coming = made[2][0].recv(out, 0, 1)
    made[0][0].send(torch.ones(4), 2, 1).wait(20.0)
    coming.wait(20.0)
    held = sum(len(port._pending) for port in (each[0].port for each in made) if port is not None)
    assert 0 < held <= 3 * (3 + tcp._MAX_STRANGERS)
    for stranger in strangers:
        stranger.close()
    close(made)
    for each in made:
        assert each[0].port is not None
        each[0].port.join(20.0)
    for address in addresses:  # nothing listens any more
        with pytest.raises(OSError):  # noqa: PT011
            dial(address)


def test_flood_from_one_host_closes_no_handshake_of_another(job: Job) -> None:
    port = job.links[0].port
    assert port is not None
    address = port._listeners[0].getsockname()
    with contextlib.ExitStack() as stack:
        connect = functools.partial(socket.create_connection, address, 20.0)
        member = stack.enter_context(connect(("127.0.0.2", 0)))
        for _ in range(3 * tcp._MAX_STRANGERS):
            stranger = stack.enter_context(connect(("127.0.0.1", 0)))
        assert stranger.recv(8) == b"wingbeat", "all were accepted"
        handshake.prove(member, handshake.IDENTITY.pack(1, 0, 0, 0, bytes(8)), port._key)


class Job:
    """Connected ranks, and what their restarted processes find in the store."""

    def __init__(self, size: int, shared_memory: bool) -> None:
        self.store, self.answers = Switchboard(), [None] * size
        self.shared_memory = shared_memory
        exchanges = ranks.exchanges(size)

        def connect(rank: int) -> TcpLink:
            def exchange(what: str, value: object) -> list[object]:
                self.answers = exchanges[rank](what, value)
                return self.answers

            return tcp.connect(
                *(rank, [ranks.LO], exchange, KEY, 20.0, self.store), shared_memory=shared_memory
            )[0]

        with ThreadPoolExecutor(size) as pool:
            self.links = list(pool.map(connect, range(size)))
        self.epochs = itertools.count()

    def cut(self, rank: int) -> None:
        """Lose all connections of a rank."""
        self.links[rank].abort_waits()
        deadline = time.monotonic() + 20.0
        while any(link.nic.connected(rank) for link in self.links):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def restart(self, rank: int, key: bytes = KEY) -> None:
        self.cut(rank)
        self.links[rank].close()
        self.links[rank] = tcp.rejoin(
            *(rank, [ranks.LO], self.answers, key, self.store), shared_memory=self.shared_memory
        )[0]

    def exchange(self, *members: int) -> list[str]:
        """Have all members of a new group send to each other at once; return their errors."""
        group = Group(members, next(self.epochs))
        begin = threading.Barrier(len(members))

        def work(rank: int) -> str:
            link, own = GroupLink(self.links[rank], group), group.ranks.index(rank)
            begin.wait(20.0)
            try:
                out = {peer: torch.zeros(4) for peer in range(len(members)) if peer != own}
                pending = [link.recv(into, peer, 3) for peer, into in out.items()]
                pending += [link.send(torch.full((4,), float(own)), peer, 3) for peer in out]
                for each in pending:
                    each.wait(20.0)
                assert all(into.tolist() == [peer] * 4 for peer, into in out.items())
            except RuntimeError as error:
                return str(error)
            finally:
                link.close()
            return ""

        with ThreadPoolExecutor(len(members)) as pool:
            return list(pool.map(work, group.ranks))

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.links)) as pool:
            list(pool.map(TcpLink.close, self.links))


@pytest.fixture(params=[False, True], ids=["tcp", "shared memory"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(3, request.param)
    yield made
    made.close()


def test_restarted_ranks_connect_when_a_group_needs_them(job: Job) -> None:
    for restarted in [(2,), (0,), (0, 1), (0, 1, 2)]:
        for rank in restarted:
            job.restart(rank)
        assert job.exchange(0, 1, 2) == ["", "", ""], restarted
        assert job.exchange(0, 2) == ["", ""]


def test_lost_connection_is_restored_by_the_next_group(job: Job) -> None:
    for rank in (0, 1, 2):
        job.cut(rank)
        assert job.exchange(0, 1, 2) == ["", "", ""]


def test_ranks_that_connect_at_the_same_time_use_the_same_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The higher one begins when it has answered the lower one, which uses the answer last."""
    job = Job(2, shared_memory=False)
    low, high = (link.port for link in job.links)
    assert low is not None
    assert high is not None
    answered, begun, used, ended = (threading.Event() for _ in range(4))
    dial_low, dial_high, add_high = low._dial_over_tcp, high._dial_over_tcp, high._add

    def low_dials(*args: Any) -> tuple[int, bytes]:
        made = dial_low(*args)
        ended.wait(20.0)
        return made

    def high_dials(*args: Any) -> tuple[int, bytes]:
        begun.set()
        used.wait(20.0)
        return dial_high(*args)

    def high_adds(*args: Any) -> None:
        answered.set()
        begun.wait(0.5)  # it waits for this connection instead
        add_high(*args)
        used.set()

    def high_reaches() -> _native.Group:
        answered.wait(20.0)
        high.reach(0)
        ended.set()
        return _native.Group(high.nic, 1, [0, 1])

    job.cut(1)
    monkeypatch.setattr(low, "_dial_over_tcp", low_dials)
    monkeypatch.setattr(high, "_dial_over_tcp", high_dials)
    monkeypatch.setattr(high, "_add", high_adds)
    with ThreadPoolExecutor(1) as pool:
        reaching = pool.submit(high_reaches)
        low.reach(1)
        sender, receiver = _native.Group(low.nic, 1, [0, 1]), reaching.result()
    given, out = torch.ones(4), torch.zeros(4)
    coming = receiver.receive(out, out.data_ptr(), out.nbytes, 0, 0, 1)
    sender.send(given, given.data_ptr(), given.nbytes, 1, 0, 1).wait(20.0)
    coming.wait(20.0)
    assert torch.equal(out, given)
    job.close()


def test_group_with_a_dead_rank_fails_at_once_and_others_do_not(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.cut(1)
    job.links[1].close()
    begin = time.monotonic()
    said = GroupLink(job.links[2], Group((1, 2), 100))
    with pytest.raises(RuntimeError, match=r"closed by the peer|lost"):
        said.recv(torch.zeros(1), 0, 1).wait(20.0)
    assert time.monotonic() - begin < 5.0
    assert "rank 2 at 127.0.0.1 on interface lo did not reach rank 1 at 127.0.0.1" in caplog.text
    assert job.exchange(0, 2) == ["", ""]


def test_group_names_the_ranks_that_have_ended_before_its_first_message(job: Job) -> None:
    job.cut(1)
    assert GroupLink(job.links[0], Group((0, 1, 2), 100)).connect() == [], "it was only cut off"
    job.links[1].close()
    assert GroupLink(job.links[2], Group((0, 1, 2), 101)).connect() == [1]
    assert GroupLink(job.links[2], Group((0, 2), 102)).connect() == []


def test_restarted_rank_with_another_key_is_refused(job: Job) -> None:
    job.restart(1, key=b"another key here")
    with pytest.raises(RuntimeError, match="no connection"):
        GroupLink(job.links[1], Group((0, 1), 100)).recv(torch.zeros(1), 0, 1).wait(20.0)
    assert job.exchange(0, 2) == ["", ""]


@pytest.mark.parametrize(
    "text", ["", "[", "7", '["secret", ""]', '["secret", "", ["127.0.0.1", 0, ""]]']
)
def test_malformed_address_of_a_restarted_rank_is_not_used(
    job: Job, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    job.cut(1)
    job.links[1].close()
    job.store.set("connections/1", text)
    with pytest.raises(RuntimeError, match=r"closed by the peer|lost"):
        GroupLink(job.links[2], Group((1, 2), 100)).recv(torch.zeros(1), 0, 1).wait(20.0)
    assert "rank 2: the new address of rank 1 is not used: " in caplog.text


@BOTH
def test_forked_child_keeps_no_connection_open(shared_memory: bool) -> None:
    made = ranks.links(2, shared_memory=shared_memory)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        pending = made[1][0].recv(torch.zeros(1), 0, 1)
        closing = threading.Thread(target=made[0][0].close)
        closing.start()
        with pytest.raises(RuntimeError, match="closed"):
            pending.wait(20.0)
        closing.join(20.0)
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    made[1][0].close()


def test_forked_child_of_a_process_that_ends_keeps_no_connection_open() -> None:
    """A data loader may outlive a killed worker, whose peers have to notice."""
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    worker = os.fork()
    if worker == 0:
        link = TcpLink("lo", 1)
        link.nic.add(0, theirs.detach())
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)
        os._exit(0)
    os.waitpid(worker, 0)
    theirs.close()
    ours.settimeout(20.0)
    try:
        assert ours.recv(1) == b""
    finally:
        os.write(writer, b"x")
        for each in (reader, writer):
            os.close(each)
        ours.close()


@BOTH
def test_closing_waits_until_the_peer_has_read_everything(shared_memory: bool) -> None:
    made = ranks.links(2, shared_memory=shared_memory)
    given, out = torch.randn(500_000), torch.zeros(500_000)
    coming = made[1][0].recv(out, 0, 1)
    made[0][0].send(given, 1, 1).wait(20.0)
    made[0][0].close()
    coming.wait(20.0)
    assert torch.equal(out, given)
    made[1][0].close()


def test_interface_ends_its_thread_when_it_is_closed_or_collected() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()  # those of earlier tests may still be ending
    closed = TcpLink("lo", 1)
    dropped = TcpLink("lo", 1)
    assert threads() <= before + 2
    closed.close()
    del dropped
    deadline = time.monotonic() + 20.0
    while threads() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_peer_without_a_connection_is_refused() -> None:
    link = TcpLink("lo", 4)
    with pytest.raises(RuntimeError, match="no connection"):
        link.send(torch.zeros(1), 3, 1).wait(1.0)
    link.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_connection_to_a_process_that_has_ended_is_not_awaited(rank: int) -> None:
    """The ranks of a column of a mesh are named by their ranks in the job."""
    store = Switchboard()
    listener = LivenessListener("127.0.0.1")
    store.set(f"here/{7 - rank}", listener.address.to_text())
    publish_failure(store, 7 - rank, KeyError("mine"))
    listener.close()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        place = [*closed.getsockname(), ""]

    def exchange(_: str, own: Any) -> list[Any]:
        other = ["a" * 64, "", None, place]
        return [own, other] if rank == 0 else [other, own]

    members = (6, 7)
    with pytest.raises(
        RendezvousError, match=rf"rank {6 + rank} at .* rank {7 - rank} .* failed with KeyError: 'm"
    ):
        tcp.connect(
            rank, [ranks.LO], exchange, None, 600.0, store, members=members, shared_memory=False
        )
