"""Gradients in pieces: split, summed in the given order, and joined."""

from __future__ import annotations

import pytest
import torch

from helpers.pieces import split
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.methods.bounded_staleness.replica import Pieces
from wingbeat.transport.membership import initial_view

W = 3


def colayers() -> list[dict[str, torch.Tensor]]:
    """Return two colayers: 4 by 3 and 3 elements in float32, and one element in float64."""
    return [
        {"fc.weight": torch.zeros(4, 3), "fc.bias": torch.zeros(3)},
        {"scale": torch.zeros(1, dtype=torch.float64)},
    ]


def like(colayer: int) -> list[torch.Tensor]:
    return list(colayers()[colayer].values())


def drawn(seed: int) -> list[list[torch.Tensor | None]]:
    """Return gradients of very different size, so that each order of addition has its own bits."""
    chance = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(param.shape, generator=chance, dtype=param.dtype)
            * 10 ** torch.randint(-6, 6, param.shape, generator=chance).to(param.dtype)
            for param in colayer.values()
        ]
        for colayer in colayers()
    ]


def rounds(pieces: Pieces, workers: list[list[list[torch.Tensor | None]]]) -> list[PieceSum]:
    """Return the owners' sums of these gradients, added in this order."""
    parts = []
    for z in range(2):
        sent = [split(pieces, z, grads[z], like(z)) for grads in workers]
        for q in range(W):
            total = pieces.sum_contributions(z, q, {(0, w): each[q] for w, each in enumerate(sent)})
            parts.append(PieceSum(z, q, 0, (), (), initial_view(W), total))
    return parts


def join(pieces: Pieces, parts: list[PieceSum]) -> list[list[torch.Tensor | None]]:
    """Return the gradients of a round by colayer."""
    grads = pieces.join(parts)
    return [grads[:2], grads[2:]]


def test_split_gradients_are_joined() -> None:
    pieces, grads = Pieces(colayers(), W), drawn(1)
    grads[0][1] = None
    joined = join(pieces, rounds(pieces, [grads]))
    assert joined[0][1] is None
    assert joined[0][0] is not None
    assert torch.equal(joined[0][0], grads[0][0])  # type: ignore[arg-type]
    assert torch.equal(joined[1][0], grads[1][0])  # type: ignore[arg-type]


def test_contributions_are_summed_in_given_order() -> None:
    pieces, each = Pieces(colayers(), W), [drawn(seed) for seed in range(3)]
    joined = join(pieces, rounds(pieces, each))
    other = join(pieces, rounds(pieces, each[::-1]))
    for z in range(2):
        for i, grad in enumerate(joined[z]):
            a, b, c = (grads[z][i] for grads in each)
            assert torch.equal(grad, (a + b) + c)  # type: ignore[arg-type,operator]
    assert not torch.equal(joined[0][0], other[0][0])  # type: ignore[arg-type]


def test_sum_has_gradient_if_any_contribution_has() -> None:
    pieces, mine, other = Pieces(colayers(), W), drawn(1), drawn(2)
    mine[0][0] = other[0][1] = None
    joined = join(pieces, rounds(pieces, [mine, other]))
    assert torch.equal(joined[0][0], other[0][0])  # type: ignore[arg-type]
    assert torch.equal(joined[0][1], mine[0][1])  # type: ignore[arg-type]


def test_piece_without_gradient_keeps_earlier_ones() -> None:
    pieces, grads = Pieces(colayers(), W), drawn(1)
    with_all = split(pieces, 0, grads[0], like(0))
    without = split(pieces, 0, [None, grads[0][1]], like(0))
    sums = [
        with_all[0],
        with_all[1],
        without[2],
    ]  # the last contribution was too late for the round
    parts = [PieceSum(0, q, 0, (), (), initial_view(W), total) for q, total in enumerate(sums)]
    assert all(grad is not None for grad in join(pieces, parts)[0])


def test_gradients_are_scaled_before_sum() -> None:
    pieces, grad = Pieces(colayers(), W), torch.full((1,), 3.0, dtype=torch.float64)
    (part,) = [each for each in split(pieces, 1, [grad], like(1), 0.1) if len(each) > 1]
    total = pieces.sum_contributions(1, 2, {(0, 0): part})
    (found,) = join(pieces, [PieceSum(1, 2, 0, (), (), initial_view(W), total)])[1]
    assert found is not None
    assert found.item() == 3.0 * 0.1


def test_split_copies_gradients() -> None:
    pieces, flat = Pieces(colayers(), W), torch.arange(15.0)
    before = pieces.split(0, flat, [True, True])
    kept = list(map(bytes, before))
    flat.zero_()
    assert before == kept


def test_sum_does_not_change_contributions() -> None:
    pieces = Pieces(colayers(), W)
    one, other = (bytearray(split(pieces, 0, drawn(seed)[0], like(0))[0]) for seed in (1, 2))
    kept = bytes(one)
    pieces.sum_contributions(0, 0, {(0, 0): one, (0, 1): other})
    assert one == kept


def test_sum_of_no_contributions_is_none() -> None:
    pieces = Pieces(colayers(), W)
    assert pieces.sum_contributions(0, 0, {}) is None
    assert pieces.join([PieceSum(0, 0, 0, (), (), initial_view(W))]) == [None, None, None]


@pytest.mark.parametrize("payload", [None, b"", b"\0" * 21, b"\0" * 23])
def test_wrong_size_names_sender(payload: bytes | None) -> None:
    pieces = Pieces(colayers(), W)
    with pytest.raises(PeerError, match=r"rank 2 sent .* piece 0 of colayer 0, which has 22;"):
        pieces.sum_contributions(0, 0, {(0, 2): payload})


def test_sum_of_wrong_size_names_owner() -> None:
    with pytest.raises(PeerError, match="rank 1 sent 1 bytes for piece 1 of colayer 0"):
        Pieces(colayers(), W).join([PieceSum(0, 1, 0, (), (), initial_view(W), b"x")])


def test_invalid_flags_name_sender() -> None:
    with pytest.raises(PeerError, match=r"rank 2 sent piece 0 of colayer 0 with flags"):
        Pieces(colayers(), W).sum_contributions(0, 0, {(0, 2): b"\0" * 21 + b"\2"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_unsupported_dtype_is_rejected(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=r"parameter 'w' is torch.* .*AllReduce"):
        Pieces([{"w": torch.zeros(2, dtype=dtype)}], W)


def test_two_dtypes_in_colayer_are_rejected() -> None:
    mixed = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(UsageError, match=r"'a' .torch.float32. and 'b' .torch.float64."):
        Pieces([mixed], W)
