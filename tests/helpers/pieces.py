"""Gradients of a colayer, one tensor each, in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from wingbeat.methods.bounded_staleness.replica import Pieces


def split(
    pieces: Pieces,
    colayer: int,
    grads: Sequence[torch.Tensor | None],
    likes: Iterable[torch.Tensor],
    scale: float = 1.0,
) -> list[bytes]:
    """The pieces of gradients times ``scale``; None counts as zeros, like its parameter."""
    flat = [
        (torch.zeros_like(like) if grad is None else grad * scale).reshape(-1)
        for grad, like in zip(grads, likes, strict=True)
    ]
    return pieces.split(colayer, torch.cat(flat), [grad is not None for grad in grads])
