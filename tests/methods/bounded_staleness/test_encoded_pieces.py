"""Pieces through a codec: residuals keep what is lost, and all workers read the same bits."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers import accelerator
from helpers.waiting import PATIENCE
from wingbeat.codecs import Coding
from wingbeat.codecs.coding import regions
from wingbeat.collectives import Encoded
from wingbeat.compression import Coded, Half, LowRank, Sketch
from wingbeat.errors import PeerError
from wingbeat.exchanges.on_host import BucketsOnHost
from wingbeat.methods.bounded_staleness.exchange import BoundedStalenessExchange
from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.methods.bounded_staleness.replica import Pieces
from wingbeat.schedules.events import Operation
from wingbeat.transport.membership import initial_view

W = 3
SHAPES = {"a.weight": (40, 30), "a.bias": (40,), "b.weight": (7, 40)}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
CODECS: dict[str, Coded] = {
    "sketch": Sketch(bits=4, auto_disable=False),
    "low rank": LowRank(rank=2, bits=8, auto_disable=False),
    "half": Half(auto_disable=False),
    "groups": Sketch(bits=4, groups={"*.bias": "fp32"}, auto_disable=False),
}
every = pytest.mark.parametrize("wire", CODECS.values(), ids=CODECS)


def made(wire: Coded) -> tuple[Pieces, torch.Tensor]:
    """Return one worker's pieces of one colayer, and its residual."""
    coding = Coding(list(regions(wire, [(n, torch.Size(s)) for n, s in SHAPES.items()], 0)))
    residual = torch.zeros(NUMEL)
    encoded = Encoded(coding, residual if wire.keeps else None)
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return Pieces([params], W, [encoded]), residual


def gradients(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def a_round(
    workers: list[Pieces], grads: list[torch.Tensor], used: list[bool]
) -> list[list[torch.Tensor | None]]:
    """Return the gradients of a round of all workers; they must be equal on all workers."""
    sent = [one.split(0, grad, used) for one, grad in zip(workers, grads, strict=True)]
    parts = []
    for piece in range(W):
        waiting = {(0, w): pieces[piece] for w, pieces in enumerate(sent)}
        payload = workers[piece].sum_contributions(0, piece, waiting)
        parts.append(PieceSum(0, piece, 0, (), (), initial_view(W), payload))
    first, *others = [one.join(parts) for one in workers]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
    return [first]


def flat(grads: list[torch.Tensor | None]) -> torch.Tensor:
    shapes = zip(grads, SHAPES.values(), strict=True)
    return torch.cat([(torch.zeros(s) if g is None else g).reshape(-1) for g, s in shapes])


@every
def test_sums_and_residuals_add_up_to_gradients(wire: Coded) -> None:
    workers, residuals = zip(*(made(wire) for _ in range(W)), strict=True)
    applied, all_made = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(6):
        grads = [gradients(10 * step + w) for w in range(W)]
        all_made += torch.stack(grads).sum(0)
        applied += flat(a_round(list(workers), grads, [True] * 3)[0])
    kept = torch.stack(list(residuals)).sum(0)
    if wire.keeps:
        assert kept.norm() > 0.01
        torch.testing.assert_close(applied + kept, all_made, rtol=1e-4, atol=1e-3)
    else:
        assert (applied - all_made).norm() < 2e-3 * all_made.norm()


def test_encoded_pieces_are_smaller_than_dense() -> None:
    pieces, _ = made(CODECS["sketch"])
    sent = pieces.split(0, gradients(0), [True] * 3)
    assert sum(map(len, sent)) < 0.25 * 4 * NUMEL


def test_residual_of_unused_parameter_is_kept() -> None:
    wire = CODECS["sketch"]
    workers, residuals = zip(*(made(wire) for _ in range(W)), strict=True)
    a_round(list(workers), [gradients(w) for w in range(W)], [True] * 3)
    before = [residual[:1200].clone() for residual in residuals]
    unused = [gradients(w) for w in range(3, 3 + W)]
    for grad in unused:
        grad[:1200] = 0
    # The residual of an unused parameter has been set aside, and its gradients are zero.
    found = a_round(list(workers), unused, [False, True, True])[0]
    assert found[0] is None
    for residual, kept in zip(residuals, before, strict=True):
        assert torch.equal(residual[:1200], kept)
        assert residual[1200:].any()


@every
def test_undo_split_restores_residual(wire: Coded) -> None:
    pieces, residual = made(wire)
    pieces.split(0, gradients(0), [True] * 3)
    before, grad = residual.clone(), gradients(1)
    grad[:1200] = 0
    payloads = pieces.split(0, grad, [False, True, True])
    pieces.undo_split(0, grad, payloads)
    torch.testing.assert_close(residual, before, rtol=1e-5, atol=1e-5)


def test_dense_colayer_is_sent_unchanged() -> None:
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    pieces, grad = Pieces([params], W, [None]), gradients(0)
    sent = pieces.split(0, grad, [True] * 3)
    assert sum(map(len, sent)) == 4 * NUMEL + 3 * W
    sums = [pieces.sum_contributions(0, q, {(0, 0): sent[q]}) for q in range(W)]
    parts = [PieceSum(0, q, 0, (), (), initial_view(W), each) for q, each in enumerate(sums)]
    assert torch.equal(flat(pieces.join(parts)), grad)
    pieces.undo_split(0, grad, sent)


def test_dense_colayer_is_summed_exactly() -> None:
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    pieces, grads = Pieces([params], W, [None]), [gradients(w) for w in range(W)]
    sent = [pieces.split(0, grad, [True] * 3) for grad in grads]
    sums = [
        pieces.sum_contributions(0, q, {(0, w): sent[w][q] for w in range(W)}) for q in range(W)
    ]
    parts = [PieceSum(0, q, 0, (), (), initial_view(W), each) for q, each in enumerate(sums)]
    assert torch.equal(flat(pieces.join(parts)), grads[0] + grads[1] + grads[2])


def test_float64_gradient_is_joined_as_float64() -> None:
    wire = CODECS["half"]
    coding = Coding(list(regions(wire, [("w", torch.Size((10,)))], 0)))
    param = {"w": torch.zeros(10, dtype=torch.float64)}
    pieces = Pieces([param], W, [Encoded(coding, None)])
    sent = pieces.split(0, torch.arange(10.0, dtype=torch.float64), [True])
    parts = [
        PieceSum(
            0, q, 0, (), (), initial_view(W), pieces.sum_contributions(0, q, {(0, 0): sent[q]})
        )
        for q in range(W)
    ]
    (found,) = pieces.join(parts)
    assert found is not None
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, torch.arange(10.0, dtype=torch.float64), rtol=1e-3, atol=0)


def test_contribution_of_wrong_size_names_sender() -> None:
    pieces, _ = made(CODECS["sketch"])
    sent = pieces.split(0, gradients(0), [True] * 3)
    with pytest.raises(PeerError, match=r"rank 2 sent \d+ bytes for piece 1 of colayer 0, which"):
        pieces.sum_contributions(0, 1, {(0, 2): sent[1][:-1]})


def test_dropped_iteration_leaves_residual_unchanged() -> None:
    pieces, residual = made(CODECS["sketch"])
    pieces.split(0, gradients(0), [True] * 3)
    before, flat_ = residual.clone(), gradients(1)
    exchange = object.__new__(BoundedStalenessExchange)
    exchange.synchronous = False
    exchange._dropped, exchange._pieces = False, pieces
    exchange._communication = Mock(send_colayer=Mock(return_value=False))
    slots = [SimpleNamespace(used=True)] * 3
    bucket: Any = SimpleNamespace(index=0, flat=flat_, numel=NUMEL, slots=slots)
    exchange._on_host, exchange._sending = BucketsOnHost([bucket]), []
    for _ in range(2):
        exchange.start(Operation.CONTRIBUTE, bucket)
    torch.testing.assert_close(residual, before, rtol=1e-5, atol=1e-5)
    exchange._communication.send_colayer.assert_called_once()


@pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())
def test_handle_of_a_bucket_of_a_device_is_done_when_its_residual_is_written() -> None:
    accelerator.load().late_seed(0)
    pieces, residual = made(CODECS["sketch"])
    split, gate = pieces.split, threading.Event()

    def split_at_gate(*args: Any) -> Any:
        assert gate.wait(PATIENCE)
        return split(*args)

    pieces.split = split_at_gate  # type: ignore[method-assign]
    exchange = object.__new__(BoundedStalenessExchange)
    exchange.synchronous = exchange._dropped = False
    exchange._pieces, exchange._communication = pieces, Mock()
    bucket: Any = SimpleNamespace(
        index=0, flat=gradients(0).to(torch.device(accelerator.NAME, 0)), numel=NUMEL,
        slots=[SimpleNamespace(used=True)] * 3, flags=[], counts=[], wire=None, blocks=None,
    )  # fmt: skip
    exchange._on_host, exchange._sending = BucketsOnHost([bucket]), []
    exchange.start(Operation.CONTRIBUTE, bucket)
    exchange._pieces = made(CODECS["half"])[0]  # as other buckets do
    assert not bucket.handle.done()
    gate.set()
    bucket.handle.wait()
    assert residual.any()
    exchange._communication.send_colayer.assert_called_once()
