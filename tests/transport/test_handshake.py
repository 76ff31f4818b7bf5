"""Both ends of a handshake, with one key and with two."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from wingbeat.transport import handshake

KEY = b"k" * 32
IDENTITY = handshake.IDENTITY.pack(3, 1, 0, 0, b"12345678")


def ends() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for each in pair:
        each.settimeout(20.0)
    return pair


def test_ends_with_one_key_learn_the_identity_of_the_connecting_one() -> None:
    one, other = ends()
    with one, other, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(handshake.accept, other, KEY)
        handshake.prove(one, IDENTITY, KEY)
        assert accepted.result() == IDENTITY


def test_the_accepting_end_refuses_another_key_and_proves_nothing() -> None:
    one, other = ends()
    with one, other, ThreadPoolExecutor(1) as pool:
        proved = pool.submit(handshake.prove, one, IDENTITY, b"?" * 32)
        with pytest.raises(ConnectionError, match="does not have this job's key"):
            handshake.accept(other, KEY)
        other.close()
        with pytest.raises(ConnectionError):
            proved.result()


def test_a_peer_that_sends_a_byte_at_a_time_does_not_extend_the_timeout() -> None:
    one, other = ends()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.05):
            other.send(b"w")

    with one, other, ThreadPoolExecutor(1) as pool:
        one.settimeout(0.3)
        dripping = pool.submit(drip)
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            handshake.read_exactly(one, 200)  # 10 s at this rate
        took = time.monotonic() - begin
        ended.set()
        dripping.result()
        assert took < 5.0
        assert one.gettimeout() == 0.3


def test_nothing_is_received_after_the_deadline_although_bytes_wait() -> None:
    one, other = ends()
    with one, other:
        other.send(b"late")
        with pytest.raises(TimeoutError):
            handshake.receive(one, 4, time.monotonic() - 1.0)
        assert handshake.receive(one, 4, time.monotonic() + 20.0) == b"late"


@pytest.mark.parametrize("place", range(handshake.PROOF_BYTES))
def test_no_byte_of_a_proof_can_be_changed(place: int) -> None:
    challenge, nonce = handshake.new_challenge(), b"n" * 32
    tag = handshake.sign(KEY, b"connect", challenge + IDENTITY + nonce)
    data = bytearray(handshake.MAGIC + IDENTITY + nonce + tag)
    assert handshake.check_proof(challenge, bytes(data), KEY).valid
    data[place] ^= 1
    assert not handshake.check_proof(challenge, bytes(data), KEY).valid
