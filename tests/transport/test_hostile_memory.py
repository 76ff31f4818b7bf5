"""Shared memory of two ranks, one of which passes anything on or writes anything into it."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from helpers import other_user
from helpers import tcp as ranks
from helpers.waiting import until
from wingbeat import _native
from wingbeat.collectives import Collectives
from wingbeat.errors import PeerError
from wingbeat.transport.world import World

NBYTES = 4096 + (2 << 20)
"""Bytes of the memory of a connection: docs/developers/network.md."""

STATES = 512
"""Bytes of its positions and flags."""

DENIED = "PermissionError"

Send = Callable[[socket.socket, list[bytes], Sequence[int]], int]


def usage() -> tuple[int, int]:
    """Return the mapped memories of connections, and the descriptors, of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:wingbeat")
    return maps, len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = usage()
    yield
    until(lambda: all(now <= then for now, then in zip(usage(), before, strict=True)))


def memory(nbytes: int, seals: bool = True) -> int:
    """Create memory of another size, or that can shrink."""
    made = os.memfd_create("odd", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(made, nbytes)
    if seals:
        every = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, every)
    return made


def broken_pipe() -> int:
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(reading)
    return writing


def file() -> int:
    return os.open("/dev/null", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


# What a rank passes on in place of memory and two doorbells.
PASSED: dict[str, Callable[[list[int]], list[int]]] = {
    "nothing": lambda good: [],
    "memory alone": lambda good: good[:1],
    "too little": lambda good: good[:2],
    "another order": lambda good: good[::-1],
    "a doorbell as memory": lambda good: [good[1], *good[1:]],
    "memory as a doorbell": lambda good: [good[0], good[0], good[2]],
    "memory that can shrink": lambda good: [memory(NBYTES, seals=False), *good[1:]],
    "memory that is too small": lambda good: [memory(NBYTES - 1), *good[1:]],
    "memory that is too large": lambda good: [memory(NBYTES + 1), *good[1:]],
    "empty memory": lambda good: [memory(0), *good[1:]],
    "a file": lambda good: [file(), *good[1:]],
    "a broken pipe as a doorbell": lambda good: [*good[:2], broken_pipe()],
    "a file as a doorbell": lambda good: [good[0], file(), good[2]],
    "a doorbell that blocks": lambda good: [*good[:2], os.eventfd(0, os.EFD_CLOEXEC)],
}


@pytest.mark.parametrize("passed", PASSED)
def test_rank_that_passes_on_other_descriptors_is_named_and_reached_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nothing_left: None,
    passed: str,
) -> None:
    original: Send = socket.send_fds

    def send(connection: socket.socket, parts: list[bytes], good: Sequence[int]) -> int:
        chosen = PASSED[passed](list(good))
        sent = original(connection, parts, chosen)
        for each in set(chosen) - set(good):
            os.close(each)
        return sent

    monkeypatch.setattr(socket, "send_fds", send)
    made = ranks.links(2)
    [line] = [each.getMessage() for each in caplog.records]
    assert line == (
        "rank 1 shares no memory with rank 0, which is on the same host: the peer sent no memory "
        "of a connection; they use TCP"
    )
    given, out = torch.randn(100_000), torch.zeros(100_000)
    coming = made[1][0].recv(out, 0, 1)
    made[0][0].send(given, 1, 1).wait(20.0)
    coming.wait(20.0)
    assert torch.equal(given, out)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda links: links[0].close(), made))


def test_rank_that_passes_on_more_descriptors_leaves_none_open(
    monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    original: Send = socket.send_fds

    def send(connection: socket.socket, parts: list[bytes], good: Sequence[int]) -> int:
        return original(connection, parts, [*good, *[good[0]] * 200])

    monkeypatch.setattr(socket, "send_fds", send)
    made = ranks.links(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda links: links[0].close(), made))


class Scribbler:
    """Writes to the positions, flags and bytes of all connections in shared memory."""

    def __init__(self, seed: int, everywhere: bool) -> None:
        self.chance, self.everywhere = random.Random(seed), everywhere
        self.maps: list[mmap.mmap] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Map the memory of each connection that is made from now on."""
        original: Send = socket.send_fds

        def send(connection: socket.socket, parts: list[bytes], fds: Sequence[int]) -> int:
            self.maps.append(mmap.mmap(fds[0], NBYTES))
            return original(connection, parts, fds)

        monkeypatch.setattr(socket, "send_fds", send)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for each in self.maps:
            each.close()

    def _run(self) -> None:
        while not self._end.is_set():
            target = self.chance.choice(self.maps)
            place = 64 * self.chance.randrange(STATES // 64)
            if self.everywhere and self.chance.random() < 0.5:
                place = 4096 + self.chance.randrange(NBYTES - 4096 - 8)
            (found,) = struct.unpack_from("<Q", target, place)
            near = found + self.chance.randrange(-(1 << 21), 1 << 21)
            value = self.chance.choice((near, self.chance.getrandbits(64), found + 8, 0))
            struct.pack_into("<Q", target, place, value & (1 << 64) - 1)


def sums(world: World) -> str:
    """Sum tensors until something fails; return the error."""
    try:
        collectives = Collectives(world)
        while True:
            collectives.all_reduce(torch.ones(300_000)).wait()
    except PeerError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(4))
def test_rank_that_writes_anything_into_the_memory_ends_the_sums_with_a_name(
    monkeypatch: pytest.MonkeyPatch, nothing_left: None, seed: int
) -> None:
    scribbler = Scribbler(seed, everywhere=seed % 2 == 1)
    scribbler.watch(monkeypatch)
    worlds = [
        # As processes, whose waits are watched, unlike those of threads.
        dataclasses.replace(each, threads=False)
        for each in ranks.worlds(2, timeout=2.0)
    ]
    assert scribbler.maps
    try:
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(sums, each) for each in worlds]
            scribbler.start()
            said = [each.result(60.0) for each in running]
    finally:
        ranks.close(worlds)
        scribbler.close()
    for own, other in ((0, 1), (1, 0)):
        assert len(said[own].splitlines()) == 1
        assert f"rank {other}" in said[own], said


@other_user.needs_root
def test_memory_of_ranks_has_no_name_and_no_other_user_can_open_it(nothing_left: None) -> None:
    places = [Path("/dev/shm"), Path("/tmp")]
    before = [set(place.iterdir()) for place in places if place.is_dir()]
    made = ranks.links(2)
    after = [set(place.iterdir()) for place in places if place.is_dir()]
    named = [path for old, new in zip(before, after, strict=True) for path in new - old]
    assert not [path for path in named if "wingbeat" in path.name]
    lines = Path("/proc/self/maps").read_text().splitlines()
    [area, *_] = (line.split()[0] for line in lines if "memfd:wingbeat" in line)
    own = f"/proc/{os.getpid()}"
    assert other_user.run(lambda: os.open(f"{own}/map_files/{area}", os.O_RDWR)) == DENIED
    assert other_user.run(lambda: os.listdir(f"{own}/fd")) == DENIED
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda links: links[0].close(), made))


def test_descriptors_of_a_connection_are_not_inherited() -> None:
    rings = _native.Rings()
    assert not any(os.get_inheritable(each) for each in rings.descriptors)
