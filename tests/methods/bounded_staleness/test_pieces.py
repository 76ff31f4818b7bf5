"""Gradients in pieces: cut, added up in the order that is given, and joined."""

from __future__ import annotations

import pytest
import torch

from helpers.pieces import cut
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.messages import Round
from wingbeat.methods.bounded_staleness.pieces import Pieces
from wingbeat.methods.bounded_staleness.view import whole

W = 3


def colayers() -> list[dict[str, torch.Tensor]]:
    """Two: of 4 by 3 and 3 elements in float32, and of one element in float64."""
    return [
        {"fc.weight": torch.zeros(4, 3), "fc.bias": torch.zeros(3)},
        {"scale": torch.zeros(1, dtype=torch.float64)},
    ]


def like(colayer: int) -> list[torch.Tensor]:
    return list(colayers()[colayer].values())


def drawn(seed: int) -> list[list[torch.Tensor | None]]:
    """Gradients of very different size, so that every order of addition has its own bits."""
    chance = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(param.shape, generator=chance, dtype=param.dtype)
            * 10 ** torch.randint(-6, 6, param.shape, generator=chance).to(param.dtype)
            for param in colayer.values()
        ]
        for colayer in colayers()
    ]


def rounds(pieces: Pieces, workers: list[list[list[torch.Tensor | None]]]) -> list[Round]:
    """What the owners make of these gradients, added up in this order."""
    parts = []
    for z in range(2):
        sent = [cut(pieces, z, grads[z], like(z)) for grads in workers]
        for q in range(W):
            total = pieces.summed(z, q, {(0, w): each[q] for w, each in enumerate(sent)})
            parts.append(Round(z, q, 0, (), (), whole(W), total))
    return parts


def test_what_is_cut_is_joined_again() -> None:
    pieces, grads = Pieces(colayers(), W), drawn(1)
    grads[0][1] = None
    joined = pieces.joined(rounds(pieces, [grads]))
    assert joined[0][1] is None
    assert joined[0][0] is not None
    assert torch.equal(joined[0][0], grads[0][0])  # type: ignore[arg-type]
    assert torch.equal(joined[1][0], grads[1][0])  # type: ignore[arg-type]


def test_sums_are_made_in_the_order_that_is_given() -> None:
    pieces, each = Pieces(colayers(), W), [drawn(seed) for seed in range(3)]
    joined = pieces.joined(rounds(pieces, each))
    other = pieces.joined(rounds(pieces, each[::-1]))
    for z in range(2):
        for i, grad in enumerate(joined[z]):
            a, b, c = (grads[z][i] for grads in each)
            assert torch.equal(grad, (a + b) + c)  # type: ignore[arg-type,operator]
    assert not torch.equal(joined[0][0], other[0][0])  # type: ignore[arg-type]


def test_one_that_has_a_gradient_is_enough() -> None:
    pieces, mine, other = Pieces(colayers(), W), drawn(1), drawn(2)
    mine[0][0] = other[0][1] = None
    joined = pieces.joined(rounds(pieces, [mine, other]))
    assert torch.equal(joined[0][0], other[0][0])  # type: ignore[arg-type]
    assert torch.equal(joined[0][1], mine[0][1])  # type: ignore[arg-type]


def test_a_piece_without_the_gradient_does_not_hide_those_before() -> None:
    pieces, grads = Pieces(colayers(), W), drawn(1)
    with_all = cut(pieces, 0, grads[0], like(0))
    without = cut(pieces, 0, [None, grads[0][1]], like(0))
    sums = [with_all[0], with_all[1], without[2]]  # as when one came too late for a round
    parts = [Round(0, q, 0, (), (), whole(W), total) for q, total in enumerate(sums)]
    assert all(grad is not None for grad in pieces.joined(parts)[0])


def test_gradients_are_scaled_and_then_added() -> None:
    pieces, grad = Pieces(colayers(), W), torch.full((1,), 3.0, dtype=torch.float64)
    (part,) = [each for each in cut(pieces, 1, [grad], like(1), 0.1) if len(each) > 1]
    total = pieces.summed(1, 2, {(0, 0): part})
    (found,) = pieces.joined([Round(1, 2, 0, (), (), whole(W), total)])[1]
    assert found is not None
    assert found.item() == 3.0 * 0.1


def test_what_is_sent_does_not_change_with_the_gradients() -> None:
    pieces, flat = Pieces(colayers(), W), torch.arange(15.0)
    before = pieces.cut(0, flat, [True, True])
    kept = list(map(bytes, before))
    flat.zero_()
    assert before == kept


def test_a_contribution_is_not_changed_by_adding_to_it() -> None:
    pieces = Pieces(colayers(), W)
    one, other = (bytearray(cut(pieces, 0, drawn(seed)[0], like(0))[0]) for seed in (1, 2))
    kept = bytes(one)
    pieces.summed(0, 0, {(0, 0): one, (0, 1): other})
    assert one == kept


def test_nothing_has_no_sum() -> None:
    pieces = Pieces(colayers(), W)
    assert pieces.summed(0, 0, {}) is None
    assert pieces.joined([Round(0, 0, 0, (), (), whole(W))]) == [[None, None], [None]]


@pytest.mark.parametrize("payload", [None, b"", b"\0" * 21, b"\0" * 23])
def test_who_sends_another_size_is_named(payload: bytes | None) -> None:
    pieces = Pieces(colayers(), W)
    with pytest.raises(PeerError, match=r"rank 2 sent .* piece 0 of colayer 0, which takes 22;"):
        pieces.summed(0, 0, {(0, 2): payload})


def test_the_owner_of_a_sum_of_another_size_is_named() -> None:
    with pytest.raises(PeerError, match="rank 1 sent 1 bytes for piece 1 of colayer 0"):
        Pieces(colayers(), W).joined([Round(0, 1, 0, (), (), whole(W), b"x")])


def test_who_sends_other_marks_is_named() -> None:
    with pytest.raises(PeerError, match=r"rank 2 sent piece 0 of colayer 0 with marks"):
        Pieces(colayers(), W).summed(0, 0, {(0, 2): b"\0" * 21 + b"\2"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=r"parameter 'w' is torch.* on cpu: .*AllReduce"):
        Pieces([{"w": torch.zeros(2, dtype=dtype)}], W)


def test_parameters_off_the_cpu_are_refused() -> None:
    with pytest.raises(UsageError, match=r"parameter 'w' is torch.float32 on meta"):
        Pieces([{"w": torch.zeros(2, device="meta")}], W)


def test_two_dtypes_in_one_colayer_are_refused() -> None:
    mixed = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(UsageError, match=r"'a' .torch.float32. and 'b' .torch.float64."):
        Pieces([mixed], W)
