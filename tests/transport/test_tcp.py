"""Links over TCP: authentication of connections, and what malformed bytes lead to."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers import tcp as ranks
from wingbeat.errors import RendezvousError
from wingbeat.transport import tcp
from wingbeat.transport.tcp import TcpLink

BOTH = pytest.mark.parametrize("shared_memory", [False, True], ids=["tcp", "shared memory"])

HEADER = struct.Struct("<IBBHIIQQQI")
MAGIC = 0x74424E57


def frame(
    tag: int = 7,
    payload: bytes = b"",
    *,
    magic: int = MAGIC,
    kind: int = 1,
    channel: int = 0,
    length: int | None = None,
    offset: int = 0,
    total: int | None = None,
    consumed: int = 0,
    check: int | None = None,
) -> bytes:
    """A frame as `native/src/net/frame.h` describes it."""
    size = len(payload) if length is None else length
    whole = size if total is None else total
    head = HEADER.pack(magic, kind, 0, channel, tag, size, offset, whole, consumed, 0)
    return head + struct.pack("<I", zlib.crc32(head) if check is None else check) + payload


class Peer:
    """A link to one peer, whose bytes the test writes."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.link = TcpLink("lo")
        self.link.nic.add(0, ours.detach())

    def failure(self) -> str:
        """Return the reason for which the connection failed."""
        with pytest.raises(RuntimeError) as caught:
            self.link.recv(torch.zeros(3, dtype=torch.uint8), 0, 99).wait(20.0)
        return str(caught.value)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.socket.close()
    made.link.close()


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
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda links: links[0].close(), made))


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
        made.socket.send(generator.randbytes(generator.randrange(48, 4000)))
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


def test_rank_with_another_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RendezvousError, match=r"rank \d .*(did not reach|did not connect)"):
        ranks.links(2, keys=[b"a" * 16, b"b" * 16], timeout=0.5)
    assert "does not have this job's key" in caplog.text


def bother(stranger: socket.socket, number: int) -> socket.socket:
    """Hold a connection, send garbage, or send a correct answer with a wrong tag."""
    if number % 3:
        stranger.send(b"\0" * (tcp._ANSWER_BYTES if number % 3 == 1 else 5))
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
    for address in addresses:  # nothing listens any more
        with pytest.raises(OSError):  # noqa: PT011
            dial(address)
    for stranger in strangers:
        stranger.close()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda links: links[0].close(), made))


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
        link = TcpLink("lo")
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

    before = threads()
    closed = TcpLink("lo")
    dropped = TcpLink("lo")
    assert threads() == before + 2
    closed.close()
    del dropped
    deadline = time.monotonic() + 20.0
    while threads() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_peer_without_a_connection_is_refused() -> None:
    link = TcpLink("lo")
    with pytest.raises(RuntimeError, match="no connection"):
        link.send(torch.zeros(1), 3, 1).wait(1.0)
    link.close()
