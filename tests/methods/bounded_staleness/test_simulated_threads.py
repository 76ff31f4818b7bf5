"""Sizes of frames in virtual time, beside what a real sender makes of the same message."""

from __future__ import annotations

import dataclasses

import pytest

from helpers.one_lane import OneLane
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.communication import FrameSender
from wingbeat.methods.bounded_staleness.messages import Envelope, Message, Piece, PieceSum, Progress
from wingbeat.methods.bounded_staleness.simulated import Bundled, FrameSizes
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.simulator.cluster import Coding
from wingbeat.simulator.mailbox import LIMITS
from wingbeat.transport.membership import initial_view
from wingbeat.transport.messages.frames import HEADER_BYTES

WORKERS = 5
MODEL = Bundled(0.0, (0.0, 0.0), 0.0, (12_345_678, 1001), (4, 2))
VIEW = initial_view(WORKERS)


def real(message: Message, nbytes: int) -> tuple[int, int]:
    """Bytes and number of messages with a payload of so many bytes."""
    machine, lane = (
        Worker(0, WORKERS, StalenessBound(1, 1, 1), lambda *_: None),
        OneLane(LIMITS.message),
    )
    payload = {"payload": bytes(nbytes)} if nbytes else {}
    machine.outbox.clear()
    machine.outbox.append(Envelope((1,), dataclasses.replace(message, **payload)))  # type: ignore
    FrameSender(machine, lane).send_pending()
    return sum(len(part) + HEADER_BYTES for _, part in lane.parts), len(lane.parts)


@pytest.mark.parametrize("ratio", [1.0, 0.25])
@pytest.mark.parametrize("colayer", [0, 1])
def test_frame_is_as_long_as_the_real_one(colayer: int, ratio: float) -> None:
    sizes = FrameSizes(MODEL, WORKERS, Coding(ratio=ratio))
    payload = int(4 * ratio * -(-MODEL.numel[colayer] // WORKERS)) + MODEL.tensors[colayer]
    piece = Piece(100, colayer, 3, VIEW)
    entries = tuple((100, worker) for worker in range(WORKERS))
    some, none = (PieceSum(colayer, 3, 100, e, (100,) * WORKERS, VIEW) for e in (entries, ()))
    here = Progress(100, 100, 100, False, 100, VIEW)
    for message, nbytes in ((piece, payload), (some, payload), (none, 0), (here, 0)):
        found, wanted = sizes.of(message), real(message, nbytes)
        assert found.parts == wanted[1]
        assert found.nbytes == wanted[0]


def test_words_grow_with_the_workers() -> None:
    few, many = (FrameSizes(MODEL, workers, Coding()) for workers in (10, 1000))
    assert many.round(1, 1000).nbytes > 50 * few.round(1, 10).nbytes / 10
    assert many.progress.nbytes > 10 * few.progress.nbytes
