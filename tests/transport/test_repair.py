"""Connections that outlive their sockets: over several interfaces."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers import tcp as ranks
from helpers.frames import HEADER, frame
from wingbeat.transport import encryption, handshake, repair, tcp
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.repair import Returns, Silence
from wingbeat.transport.tcp import TcpLink
from wingbeat_lab import lab

RESUME = 4
"""The kind of the first frame over a further socket."""


def place(interface: int, rank: int) -> str:
    return f"127.0.{20 + interface}.{1 + rank}"


def connect(encrypted: bool | None = None) -> list[tuple[TcpLink, ...]]:
    """Connect two ranks over two interfaces."""
    found, store = ranks.exchanges(2), Switchboard()

    def connected(rank: int) -> tuple[TcpLink, ...]:
        mine = [
            ranks.Interface(f"eth{n}", place(n, rank), f"127.0.{20 + n}.0/24") for n in range(2)
        ]
        return tcp.connect(
            *(rank, mine, found[rank], None, 20.0, store), encrypted=encrypted, shared_memory=False
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(connected, range(2)))


def close(made: list[tuple[TcpLink, ...]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(TcpLink.close, [link for links in made for link in links]))


def cut(interface: int) -> int:
    """End all connected sockets at the addresses of an interface; return their number."""
    count = 0
    for copy, _, peer in ranks.connected_sockets():
        if peer in (place(interface, 0), place(interface, 1)):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def exchange(made: list[tuple[TcpLink, ...]], link: int, tag: int, size: int) -> None:
    """Exchange random messages in both directions and compare them."""
    generator = torch.Generator().manual_seed(tag)
    out = [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for _ in range(2)]
    right = [each.clone() for each in out]
    into = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    coming = [made[n][link].recv(into[n], 1 - n, tag) for n in range(2)]
    sent = [made[n][link].send(out[n], 1 - n, tag) for n in range(2)]
    for each in sent:
        each.wait(20.0)
    for one in out:
        one.zero_()  # its memory may be sent again all the same
    for each in coming:
        each.wait(20.0)
    assert torch.equal(into[0], right[1])
    assert torch.equal(into[1], right[0])


def ports(made: list[tuple[TcpLink, ...]], link: int) -> list[tcp._Port]:
    found = [links[link].port for links in made]
    assert all(found)
    return [port for port in found if port is not None]


def await_paths(made: list[tuple[TcpLink, ...]], link: int, path: int) -> None:
    deadline = time.monotonic() + 20.0
    while [port.paths.get(1 - n, link) for n, port in enumerate(ports(made, link))] != 2 * [path]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def made(request: pytest.FixtureRequest) -> Iterator[list[tuple[TcpLink, ...]]]:
    links = connect(request.param)
    yield links
    close(links)


def test_messages_arrive_once_although_sockets_are_lost(made: list[tuple[TcpLink, ...]]) -> None:
    generator, ends, cuts = random.Random(1), threading.Event(), 0

    def cutting() -> None:
        nonlocal cuts
        while not ends.wait(generator.uniform(0.05, 0.4)):
            cuts += cut(generator.randrange(2))

    thread = threading.Thread(target=cutting)
    thread.start()
    until, tag = time.monotonic() + 3.0, 0
    while time.monotonic() < until:
        exchange(made, tag % 2, tag, generator.choice([1, 5000, 3_000_000]))
        tag += 1
    ends.set()
    thread.join()
    assert cuts > 4


def test_frame_that_has_arrived_is_not_sent_again_after_a_socket_that_the_peer_had_left() -> None:
    link, size = TcpLink("lo", 1), HEADER.size + 4
    sent = [torch.tensor([n], dtype=torch.uint8) for n in range(2)]

    def continued() -> socket.socket:
        ours, peer = socket.socketpair()
        assert link.nic.resume(0, ours.detach())
        assert HEADER.unpack_from(handshake.read_exactly(peer, size))[1] == RESUME
        return peer

    ours, first = socket.socketpair()
    link.nic.add(0, ours.detach(), resumes=True)
    link.send(sent[0], 0, 0).wait(20.0)
    assert handshake.read_exactly(first, size + 1)[-1] == 0
    with continued() as left:
        left.shutdown(socket.SHUT_RD)  # what is sent again cannot be written
        left.sendall(frame(kind=RESUME, received=0))  # from before the message arrived
        deadline = time.monotonic() + 20.0
        while not (link.nic.health(0) or (True,))[0]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    with first, continued() as peer:
        peer.sendall(frame(kind=RESUME, received=1))
        link.send(sent[1], 0, 1).wait(20.0)
        peer.settimeout(20.0)
        assert handshake.read_exactly(peer, size + 1)[-1] == 1, "it has arrived before"
    link.close()


def test_connection_uses_another_interface_and_returns(
    made: list[tuple[TcpLink, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_FIRST_RETURN_S", 0.3)
    works = threading.Event()
    for port in ports(made, 0):
        dial = port._dial_over_tcp

        def dialed(*args: Any, dial: Any = dial) -> Any:
            if not works.is_set():
                raise TimeoutError("no cable")
            return dial(*args)

        monkeypatch.setattr(port, "_dial_over_tcp", dialed)
    exchange(made, 0, 0, 100_000)
    assert cut(0) > 0
    exchange(made, 0, 1, 3_000_000)
    await_paths(made, 0, 1)
    assert cut(0) == 0, "nothing uses the interface"
    exchange(made, 0, 2, 100_000)
    works.set()
    await_paths(made, 0, 0)
    exchange(made, 0, 3, 3_000_000)
    exchange(made, 1, 4, 1000)
    assert cut(0) > 0


@pytest.mark.parametrize("whole", [True, False], ids=["process", "link"])
def test_peer_that_has_ended_is_known_within_a_second(whole: bool) -> None:
    made = connect()
    coming = made[0][0].recv(torch.zeros(4), 1, 1)
    begin = time.monotonic()
    for link in made[1] if whole else made[1][:1]:
        link.abort_waits()
        if whole:
            link.close()
    with pytest.raises(RuntimeError, match="the connection was closed by the peer"):
        coming.wait(20.0)
    assert time.monotonic() - begin < 2.0  # on a busy machine
    if not whole:
        exchange(made, 1, 2, 1000)
    close(made)


def test_no_key_is_used_for_two_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bytes] = []
    keys = encryption.keys

    def recorded(*args: Any) -> bytes:
        found = keys(*args)
        used.extend((found[:16], found[16:]))
        return found

    monkeypatch.setattr(encryption, "keys", recorded)
    made = connect(True)
    before = len(used)
    for tag in range(6):
        cut(0)
        cut(1)
        exchange(made, tag % 2, tag, 100_000)
    close(made)
    assert before == 8
    assert len(used) >= before + 6 * 4
    assert max(Counter(used).values()) == 2, "both ends of a socket have its two keys"


def test_process_of_another_incarnation_continues_nothing(
    made: list[tuple[TcpLink, ...]],
) -> None:
    port = ports(made, 0)[0]
    address = port._listeners[0].getsockname()
    with socket.create_connection(address, 20.0, (place(0, 1), 0)) as stranger:
        identity = handshake.IDENTITY.pack(1, 0, 0, 1, b"another!")
        with pytest.raises(repair.EndedError):
            handshake.prove(stranger, identity, port._key)
    exchange(made, 0, 1, 1000)


def test_slow_peer_is_not_silent() -> None:
    one = Silence()
    for step in range(100):
        assert not one.update(step, True, 7, 0.5), "it acknowledges without progress"
    assert not any(one.update(100.0 + n, False, 7, n) for n in range(100)), "nothing is outstanding"
    assert not one.update(200.0, True, 7, 100.0), "it was not asked before"
    assert one.update(203.0, True, 7, 103.0)


def test_interface_that_fails_again_and_again_is_tried_less_often() -> None:
    one, now, pauses = Returns(), 0.0, []
    for _ in range(8):
        one.left(now)
        begin = now
        while not one.due(now):
            now += 0.5
        pauses.append(now - begin)
        one.returned(now)
        now += 5.0
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    now += 100.0
    one.left(now)
    assert one.due(now + 2.0)


TRAINS = """if True:
    import subprocess, sys, time, torch, wingbeat
    from wingbeat_lab.lab import counters
    torch.set_num_threads(1)
    cuts = sys.argv[1]
    world = wingbeat.init(timeout=60)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.AllReduce())
    torch.manual_seed(1 + world.rank)

    def sent():
        return counters.read()[cuts].tx_bytes if world.rank and cuts else 0

    def train(seconds):
        for _ in range(seconds):
            optimizer.zero_grad()
            model(torch.randn(8, 700)).pow(2).mean().backward()
            optimizer.step()

    def set_cable(state):
        if cuts and world.rank == 1:
            subprocess.run(["ip", "link", "set", cuts, state], check=True)

    train(5)
    set_cable("down")
    train(30)
    set_cable("up")
    if cuts and world.rank:
        time.sleep(5)  # the other rank waits
    before = sent()
    train(10)
    used = sent() - before > 1_000_000
    wingbeat.synchronize(model)
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    print("weights", f"{total:.9f}", used or not (world.rank and cuts))
    wingbeat.shutdown()
"""


@pytest.mark.slow
@pytest.mark.lab
def test_training_continues_around_a_cut_cable_with_the_same_weights() -> None:
    lines: dict[str, list[str]] = {"": [], "eth1": []}
    for cable, found in lines.items():
        result = lab.run(
            "star:2x2@500mbit",
            [sys.executable, "-c", TRAINS, cable],
            on_line=lambda _, line, found=found: found.append(line),
            timeout=120,
        )
        assert result.exit_code == 0, lines
    weights = [line for line in lines[""] if line.startswith("weights")]
    assert len(weights) == 2
    assert sorted(line for line in lines["eth1"] if line.startswith("weights")) == weights
    assert all(line.endswith("True") for line in weights), "the cable is used again"
    said = "rank 1: the connection of interface eth1 to rank 0 continues over "
    event = "[event={} rank=1 incarnation=0]".format
    assert f"{said}eth0 {event('path-cut')}" in lines["eth1"]
    assert f"{said}eth1 {event('path-restored')}" in lines["eth1"]
