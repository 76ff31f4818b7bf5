"""Pieces through a codec: nothing is lost but for a while, and all read the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.coding import regions
from wingbeat.collectives import Encoded
from wingbeat.compression import Coded, Half, LowRank, Sketch
from wingbeat.errors import PeerError
from wingbeat.exchanges.coded import CodedPieces
from wingbeat.exchanges.stale import StaleExchange
from wingbeat.schedules.events import Operation
from wingbeat.stale.messages import Round
from wingbeat.stale.view import whole

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


def made(wire: Coded) -> tuple[CodedPieces, torch.Tensor]:
    """One worker's pieces of one colayer, and its residual."""
    coding = Coding(list(regions(wire, [(n, torch.Size(s)) for n, s in SHAPES.items()], 0)))
    residual = torch.zeros(NUMEL)
    encoded = Encoded(coding, residual if wire.keeps else None)
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return CodedPieces([params], W, [encoded]), residual


def gradients(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def a_round(
    workers: list[CodedPieces], grads: list[torch.Tensor], used: list[bool]
) -> list[list[torch.Tensor | None]]:
    """What each worker reads of a round to which all have contributed, which must be the same."""
    sent = [one.cut(0, grad, used) for one, grad in zip(workers, grads, strict=True)]
    parts = []
    for piece in range(W):
        waiting = {(0, w): pieces[piece] for w, pieces in enumerate(sent)}
        payload = workers[piece].summed(0, piece, waiting)
        parts.append(Round(0, piece, 0, (), (), whole(W), payload))
    first, *others = [one.joined(parts)[0] for one in workers]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
    return [first]


def flat(grads: list[torch.Tensor | None]) -> torch.Tensor:
    shapes = zip(grads, SHAPES.values(), strict=True)
    return torch.cat([(torch.zeros(s) if g is None else g).reshape(-1) for g, s in shapes])


@every
def test_what_is_applied_and_what_is_kept_is_all_that_was_made(wire: Coded) -> None:
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


def test_pieces_are_small() -> None:
    pieces, _ = made(CODECS["sketch"])
    sent = pieces.cut(0, gradients(0), [True] * 3)
    assert sum(map(len, sent)) < 0.25 * 4 * NUMEL


def test_a_residual_waits_while_nobody_uses_its_parameter() -> None:
    wire = CODECS["sketch"]
    workers, residuals = zip(*(made(wire) for _ in range(W)), strict=True)
    a_round(list(workers), [gradients(w) for w in range(W)], [True] * 3)
    before = [residual[:1200].clone() for residual in residuals]
    unused = [gradients(w) for w in range(3, 3 + W)]
    for grad in unused:
        grad[:1200] = 0
    # As when the gradients of a parameter are zero and its residual has been put aside.
    found = a_round(list(workers), unused, [False, True, True])[0]
    assert found[0] is None
    for residual, kept in zip(residuals, before, strict=True):
        assert torch.equal(residual[:1200], kept)
        assert residual[1200:].any()


@every
def test_what_was_not_sent_after_all_changes_nothing_but_rounding(wire: Coded) -> None:
    pieces, residual = made(wire)
    pieces.cut(0, gradients(0), [True] * 3)
    before, grad = residual.clone(), gradients(1)
    grad[:1200] = 0
    payloads = pieces.cut(0, grad, [False, True, True])
    pieces.take_back(0, grad, payloads)
    torch.testing.assert_close(residual, before, rtol=1e-5, atol=1e-5)


def test_a_colayer_of_dense_groups_travels_as_it_is() -> None:
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    pieces, grad = CodedPieces([params], W, [None]), gradients(0)
    sent = pieces.cut(0, grad, [True] * 3)
    assert sum(map(len, sent)) == 4 * NUMEL + 3 * W
    sums = [pieces.summed(0, q, {(0, 0): sent[q]}) for q in range(W)]
    parts = [Round(0, q, 0, (), (), whole(W), each) for q, each in enumerate(sums)]
    assert torch.equal(flat(pieces.joined(parts)[0]), grad)
    pieces.take_back(0, grad, sent)


def test_a_colayer_of_dense_groups_is_summed_as_it_is() -> None:
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    pieces, grads = CodedPieces([params], W, [None]), [gradients(w) for w in range(W)]
    sent = [pieces.cut(0, grad, [True] * 3) for grad in grads]
    sums = [pieces.summed(0, q, {(0, w): sent[w][q] for w in range(W)}) for q in range(W)]
    parts = [Round(0, q, 0, (), (), whole(W), each) for q, each in enumerate(sums)]
    assert torch.equal(flat(pieces.joined(parts)[0]), grads[0] + grads[1] + grads[2])


def test_a_double_gradient_comes_back_as_one() -> None:
    wire = CODECS["half"]
    coding = Coding(list(regions(wire, [("w", torch.Size((10,)))], 0)))
    param = {"w": torch.zeros(10, dtype=torch.float64)}
    pieces = CodedPieces([param], W, [Encoded(coding, None)])
    sent = pieces.cut(0, torch.arange(10.0, dtype=torch.float64), [True])
    parts = [
        Round(0, q, 0, (), (), whole(W), pieces.summed(0, q, {(0, 0): sent[q]})) for q in range(W)
    ]
    (found,) = pieces.joined(parts)[0]
    assert found is not None
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, torch.arange(10.0, dtype=torch.float64), rtol=1e-3, atol=0)


def test_whoever_sends_another_size_is_named() -> None:
    pieces, _ = made(CODECS["sketch"])
    sent = pieces.cut(0, gradients(0), [True] * 3)
    with pytest.raises(PeerError, match=r"rank 2 sent \d+ bytes for piece 1 of colayer 0, which"):
        pieces.summed(0, 1, {(0, 2): sent[1][:-1]})


def test_gradients_of_an_iteration_that_is_over_leave_no_trace() -> None:
    pieces, residual = made(CODECS["sketch"])
    pieces.cut(0, gradients(0), [True] * 3)
    before, flat_ = residual.clone(), gradients(1)
    exchange = object.__new__(StaleExchange)
    exchange.synchronous = False
    exchange._dropped, exchange._pieces = False, pieces
    exchange._courier = Mock(computed=Mock(return_value=False))
    slots = [SimpleNamespace(used=True)] * 3
    bucket: Any = SimpleNamespace(index=0, flat=flat_, numel=NUMEL, slots=slots)
    for _ in range(2):
        exchange.start(Operation.CONTRIBUTE, bucket)
    torch.testing.assert_close(residual, before, rtol=1e-5, atol=1e-5)
    exchange._courier.computed.assert_called_once()
