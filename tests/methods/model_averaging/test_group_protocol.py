"""What workers and the group generator say, and what nobody says."""

from __future__ import annotations

import struct

import pytest

from wingbeat.methods.model_averaging.generator import (
    Malformed,
    Run,
    Told,
    ids_of,
    payload_of,
    told_of,
)


def test_a_group_arrives_as_it_was_sent() -> None:
    run = Run(number=7, epoch=2, members=(5, 0, 3), initiator=3)
    for close in ((), (4, 9)):
        payload = memoryview(payload_of(run.members, close))
        assert told_of(ids_of(run, 12), payload, workers=6) == Told(run, 12, close)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0" * 4,
        b"\0" * 7,
        b"\0" * 8,
        payload_of((0, 0)),
        payload_of((0, 4)),
        payload_of(range(5)),
        struct.pack("<3I", 3, 0, 1),
        struct.pack("<3I", 1 << 31, 0, 1),
        b"\0" * (4 << 20),
    ],
)
def test_what_is_no_group_is_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed, match="no group"):
        told_of((0, 0, 0, 0), payload, workers=4)


def test_an_initiator_is_a_worker() -> None:
    with pytest.raises(Malformed, match="initiator 4"):
        told_of((0, 0, 4, 0), payload_of((0, 1)), workers=4)
