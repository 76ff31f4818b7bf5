"""A rank with the job's key sends anything after a valid handshake: the others end with its name.

Ranks 0 and 1 sum tensors with rank 2, whose frames are changed on their way; their checksums are
valid. Payloads are not: a member may send any gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers import tcp as ranks
from helpers.frames import HEADER
from wingbeat.collectives import Collectives
from wingbeat.errors import PeerError
from wingbeat.transport import tcp
from wingbeat.transport.world import World

LENGTH, CHECKED = 5, HEADER.size + 4
FIELDS = ("magic", "kind", "zero", "channel", "tag", "length", "offset", "total", "consumed",
          "group", "received")  # fmt: skip
WIDTHS = (32, 8, 8, 16, 32, 32, 64, 64, 64, 64, 64)
KINDS = (*FIELDS, "random bytes", "cut short", "twice", "late", "large claim", "after the end",
         "checksum")  # fmt: skip
TIMEOUT_S = 2.0
CALLS = 12


class Hostile:
    """Passes on the bytes of a connection, one frame of the hostile end's of which is changed."""

    def __init__(self, descriptor: int, kind: str, chance: random.Random) -> None:
        self.kind, self.chance, self.at = kind, chance, chance.randrange(1, 10)
        self.outer = socket.socket(fileno=descriptor)
        self.outer.setblocking(True)
        self.inner, self.given = socket.socketpair()
        self.changed = threading.Event()
        for target in (self._to_hostile, self._from_hostile):
            threading.Thread(target=target, daemon=True).start()

    def close(self) -> None:
        """End both connections and the threads."""
        self._end(self.outer, socket.SHUT_RDWR)
        self._end(self.inner, socket.SHUT_RDWR)

    def _to_hostile(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.outer.recv(1 << 16):
                self.inner.sendall(data)
        self._end(self.inner)

    def _from_hostile(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            for number in range(1 << 30):
                head = self._exactly(CHECKED)
                fields = list(HEADER.unpack(head[: HEADER.size]))
                payload = self._exactly(fields[LENGTH])
                if number == self.at:
                    self.changed.set()
                    for part in self._change(fields, head, payload):
                        self.outer.sendall(part)
                else:
                    self.outer.sendall(head + payload)
        self._end(self.outer)

    def _change(self, fields: list[int], head: bytes, payload: bytes) -> list[bytes]:
        chance, frame = self.chance, head + payload
        match self.kind:
            case "random bytes":
                return [chance.randbytes(500)]
            case "cut short":
                return [frame[: chance.randrange(len(frame))]]
            case "twice":
                return [frame, frame]
            case "late":
                return [b"".join((self._exactly(CHECKED), frame))]
            case "after the end":
                return [_head([*fields[:1], 3, *fields[2:5], 0, 0, 0, *fields[8:]]), frame]
            case "large claim":
                fields[LENGTH] = 0xFFFFFFFF
                fields[7] = 1 << 62
            case "checksum":
                return [head[:-1] + bytes([head[-1] ^ 1]) + payload]
            case name:
                place = FIELDS.index(name)
                most = (1 << WIDTHS[place]) - 1
                ends = (0, 1, most, most >> 1, (most >> 1) + 1, chance.randint(0, most))
                fields[place] = chance.choice([each for each in ends if each != fields[place]])
        return [_head(fields) + payload]

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (more := self.inner.recv(count - len(data))):
                raise EOFError
            data += more
        return data

    def _end(self, target: socket.socket, how: int = socket.SHUT_WR) -> None:
        with contextlib.suppress(OSError):
            target.shutdown(how)


def _head(fields: list[int]) -> bytes:
    head = HEADER.pack(*fields)
    return head + struct.pack("<I", zlib.crc32(head))


def sums(world: World) -> str:
    """Sum some tensors; return the error, or nothing if all sums are right."""
    try:
        collectives = Collectives(world)
        for call in range(CALLS):
            tensor = torch.full((1 + 3000 * (call % 3),), float(world.rank + call))
            collectives.all_reduce(tensor).wait()
            assert torch.equal(tensor, torch.full_like(tensor, 3.0 + 3 * call)), "another sum"
    except PeerError as error:
        return str(error)
    return ""


def attack(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let three ranks sum, of which rank 2 is hostile; return what the others say."""
    chance, made = random.Random(f"{kind} {seed}"), []
    dial = tcp._Port._dial_over_tcp

    def dialed(port: Any, peer: int, *args: Any) -> tuple[int, bytes]:
        descriptor, keys = dial(port, peer, *args)
        if port._rank != 2:
            return descriptor, keys
        made.append(Hostile(descriptor, kind, chance))
        return made[-1].given.detach(), keys

    monkeypatch.setattr(tcp._Port, "_dial_over_tcp", dialed)
    worlds = [
        # As processes, whose waits are watched, unlike those of threads.
        dataclasses.replace(each, threads=False)
        for each in ranks.worlds(3, timeout=TIMEOUT_S, shared_memory=False, encrypted=False)
    ]
    begin = time.monotonic()
    try:
        with ThreadPoolExecutor(3) as pool:
            said = list(pool.map(sums, worlds))
    finally:
        ranks.close(worlds)
        for each in made:
            each.close()
    took = time.monotonic() - begin
    assert took < 15 * TIMEOUT_S, f"{took:.1f} s"
    assert len(made) == 2
    assert any(each.changed.is_set() for each in made), "nothing was changed"
    return said[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_rank_that_sends_anything_ends_the_others_with_its_name(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list(filter(None, attack(kind, 0, monkeypatch)))
    # A reserved byte is ignored. Of two ranks, one may learn of the end from the other.
    assert said or kind == "zero"
    assert not said or any("rank 2 failed" in text for text in said), said
    assert all(len(text.splitlines()) == 1 for text in said), said
