"""The handshake of a connection: both ends prove that they have the job's key.

The accepting end sends a challenge with a nonce. The connecting end answers with its identity, a
nonce and HMAC-SHA256 over both nonces and the identity; the accepting end replies with another one.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from typing import NamedTuple

from wingbeat import _native
from wingbeat.transport import repair

MAGIC = b"wingbeat"
_NONCE_BYTES = _TAG_BYTES = 32
_CHALLENGE_BYTES = len(MAGIC) + _NONCE_BYTES

IDENTITY = struct.Struct("<IIII8s")
"""Rank of the connecting process, rank that it connects to, index of the interface, 1 if its
connection continues over this socket or 0 if it begins, and the incarnation of the connecting
process.
"""

PROOF_BYTES = len(MAGIC) + IDENTITY.size + _NONCE_BYTES + _TAG_BYTES
"""Bytes of the answer to a challenge."""


class Proof(NamedTuple):
    """The answer to a challenge: identity, what both ends have sent, whether the tag is valid."""

    identity: bytes
    handshake: bytes
    valid: bool


def new_challenge() -> bytes:
    """Return a challenge, which the accepting end sends first."""
    return MAGIC + secrets.token_bytes(_NONCE_BYTES)


def sign(key: bytes, role: bytes, handshake: bytes) -> bytes:
    """Return the proof of an end in ``role`` that it has the key."""
    return hmac.digest(key, role + handshake, "sha256")


def check_proof(challenge: bytes, data: bytes, key: bytes) -> Proof:
    """Parse and verify the answer to a challenge, of `PROOF_BYTES`."""
    magic, identity, nonce, proof = struct.unpack(
        f"<{len(MAGIC)}s{IDENTITY.size}s{_NONCE_BYTES}s{_TAG_BYTES}s", data
    )
    handshake = challenge + identity + nonce
    valid = hmac.compare_digest(proof, sign(key, b"connect", handshake))
    return Proof(identity, handshake, valid and magic == MAGIC)


def accept(connection: socket.socket, key: bytes) -> bytes:
    """Run the accepting side of the handshake; return the identity of the connecting process.

    An `OSError` if the peer lacks the key, or if the socket's timeout expires.
    """
    challenge = new_challenge()
    connection.sendall(challenge)
    proof = check_proof(challenge, read_exactly(connection, PROOF_BYTES), key)
    if not proof.valid:
        raise ConnectionError("the peer does not have this job's key")
    connection.sendall(sign(key, b"accept", proof.handshake))
    return proof.identity


def prove(connection: socket.socket, identity: bytes, key: bytes) -> tuple[bytes, list[int]]:
    """Run the connecting side of the handshake; an `OSError` if the peer lacks the key.

    Returns what both ends have sent, and the descriptors that came with the answer.
    """
    challenge = read_exactly(connection, _CHALLENGE_BYTES)
    if not challenge.startswith(MAGIC):
        raise ConnectionError("another program answers there")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    handshake = challenge + identity + nonce
    connection.sendall(MAGIC + identity + nonce + sign(key, b"connect", handshake))
    expected = sign(key, b"accept", handshake)
    answer, descriptors, _, _ = socket.recv_fds(
        connection, _TAG_BYTES, _native.Rings.DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    try:
        answer += read_exactly(connection, _TAG_BYTES - len(answer))
        if hmac.compare_digest(answer, sign(key, b"ended", handshake)):
            raise repair.EndedError("the peer has ended the connection")
        if not hmac.compare_digest(answer, expected):
            raise ConnectionError("the peer does not have this job's key")
    except BaseException:
        for each in descriptors:
            os.close(each)
        raise
    return handshake, descriptors


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Read ``count`` bytes; a `ConnectionError` if the peer closes the connection before.

    The socket's timeout limits all of it, as that of ``sendall``, and is the same afterwards.
    """
    data, seconds = bytearray(), connection.gettimeout()
    end = None if seconds is None else time.monotonic() + seconds
    try:
        while len(data) < count:
            more = receive(connection, count - len(data), end)
            if not more:
                raise ConnectionError("the peer closed the connection")
            data += more
    finally:
        connection.settimeout(seconds)
    return bytes(data)


def receive(connection: socket.socket, most: int, deadline: float | None) -> bytes:
    """Return the next bytes, at most ``most``; empty if the peer has closed the connection.

    A `TimeoutError` at the deadline, in the time of `time.monotonic`; None: the socket's timeout
    limits this. Changes the socket's timeout.
    """
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
    return connection.recv(most)
