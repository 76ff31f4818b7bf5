"""The sum of what all workers have encoded, by an all-gather of their payloads.

For payloads so small that everybody may have everybody's, such as those of top-k (OMGS-SGD,
section II-C): each worker encodes its whole buffer once and nothing is rounded twice, but the
bytes grow with the number of workers.
"""

from __future__ import annotations

import torch

from wingbeat.codecs import Coding
from wingbeat.collectives.handle import Handle
from wingbeat.errors import PeerError
from wingbeat.types import Span

_ALIGNMENT = 8
"""Bytes. Every payload begins at a multiple, so that it can be read as float32."""


class Gathered(Handle):
    """An all-gather of payloads under way; waiting decodes them into the buffer, once."""

    __slots__ = ("_buffer", "_coding", "_decoded", "_me", "_payloads")

    def __init__(
        self, handle: Handle, payloads: torch.Tensor, coding: Coding, buffer: torch.Tensor, me: int
    ) -> None:
        super().__init__(handle.jobs)
        self._decoded = False
        self._payloads = payloads
        self._coding = coding
        self._buffer = buffer
        self._me = me

    def wait(self) -> None:
        """Block until the buffer holds the sum; added in the order of ranks, so equal on each.

        Raises:
            PeerError: a peer failed, was silent for too long, or sent no payload of this codec.
        """
        if self._decoded:
            return
        super().wait()
        span = Span(0, self._buffer.numel())
        room = self._coding.room(span)
        for rank, payload in enumerate(self._payloads):
            try:
                self._coding.decode(payload[:room], self._buffer, span, add=rank > 0)
            except ValueError as err:
                raise PeerError(
                    f"rank {self._me}: rank {rank} sent a malformed payload: {err}"
                ) from None
        self._decoded = True

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()


def encoded_rows(
    size: int,
    rank: int,
    coding: Coding,
    buffer: torch.Tensor,
    residual: torch.Tensor | None,
    velocity: torch.Tensor | None,
) -> torch.Tensor:
    """Return uint8 of shape ``(size, bytes)`` with this worker's payload in its row."""
    span = Span(0, buffer.numel())
    room = coding.room(span)
    width = -(-room // _ALIGNMENT) * _ALIGNMENT
    rows = torch.empty(size, width, dtype=torch.uint8, device=buffer.device)
    coding.encode(buffer, span, rows[rank, :room], residual, velocity)
    return rows
