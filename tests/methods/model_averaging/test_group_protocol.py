"""Encoding of messages of the group generator."""

from __future__ import annotations

import struct

import pytest

from wingbeat.methods.model_averaging.generator import (
    ProtocolError,
    Run,
    RunMessage,
    decode_run,
    encode_members,
    run_ids,
)


def test_run_message_is_decoded_as_it_was_encoded() -> None:
    run = Run(number=7, epoch=2, members=(5, 0, 3), initiator=3)
    for close in ((), (4, 9)):
        payload = memoryview(encode_members(run.members, close))
        assert decode_run(run_ids(run, 12), payload, workers=6) == RunMessage(run, 12, close)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0" * 4,
        b"\0" * 7,
        b"\0" * 8,
        encode_members((0, 0)),
        encode_members((0, 4)),
        encode_members(range(5)),
        struct.pack("<3I", 3, 0, 1),
        struct.pack("<3I", 1 << 31, 0, 1),
        b"\0" * (4 << 20),
    ],
)
def test_malformed_payload_raises(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="no group"):
        decode_run((0, 0, 0, 0), payload, workers=4)


def test_initiator_that_is_no_worker_raises() -> None:
    with pytest.raises(ProtocolError, match="initiator 4"):
        decode_run((0, 0, 4, 0), encode_members((0, 1)), workers=4)
