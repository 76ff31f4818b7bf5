"""Message tags: the collective, its bucket, and the chunk.

Two workers whose collectives differ must not sum unrelated data: messages match only if their tags
are equal. Where tags differ, both ends wait for a message that never comes, and after a second
compare their calls (`wingbeat.collectives.waits`).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from wingbeat.transport.link import BITS_BELOW, CHANNEL_BITS

if TYPE_CHECKING:
    import torch

CHUNK_BITS = 8
CHUNKS_PER_TAG = 1 << CHUNK_BITS
"""Chunks to a peer after which tags repeat. Chunks are sent and awaited in one order, and no more
than an executor posts receives for are in flight.
"""

_KIND_BITS = 11
_SEQUENCE_BITS = BITS_BELOW - CHUNK_BITS - _KIND_BITS

TAG_PERIOD = 1 << _SEQUENCE_BITS
"""Collectives after which tags repeat. A worker is ahead of a receiver by fewer than half as many.
"""

_OPERATIONS = {"reduce_scatter": 0, "all_gather": 1, "all_reduce": 2}
_CONTROL = 3

UNUSED_TAG = (1 << BITS_BELOW) - 1
"""A tag below channels that no message has: no label has that number."""

LABELS = (
    *("norms", "infinities", "batches left", "intents", "codec trial", "size tuning"),
    *("iteration times", "optimizer state", "gradients", "tensors"),
    *("buffers after backward", "news of buffers", "buffers", "layout of buffers"),
)
"""What is exchanged besides buckets; anything else shares one number."""


def base_tag(what: str, bucket: int, nbytes: int, label: str, turn: int, dtype: torch.dtype) -> int:
    """Return the tag of a collective's first chunk; the other chunks have the following tags.

    Args:
        what: the operation; a broadcast's with its root, as ``"broadcast:0"``.
        bucket: number of the bucket; negative for anything else.
        nbytes: size of the buffer. A message that is larger than its receive buffer would abort
            the process, so exchanges of one kind with different sizes or dtypes mostly differ.
        label: what a small exchange is for, one of `LABELS`.
        turn: number of collectives that this executor was given before.
        dtype: dtype of the buffer.
    """
    digest = zlib.crc32(f"{what} {nbytes} {dtype}".encode())
    if bucket >= 0 and what in _OPERATIONS:
        kind = (_OPERATIONS[what] << 9) | ((bucket & 127) << 2) | (digest & 3)
    else:
        number = LABELS.index(label) + 1 if label in LABELS else 0
        kind = (_CONTROL << 9) | (number << 5) | (digest & 31)
    return (((turn % TAG_PERIOD) << _KIND_BITS) | kind) << CHUNK_BITS


_DIGESTS = (1 << (_KIND_BITS + CHANNEL_BITS)) - 1
"""Groups have no channels, so their digests use the channel bits too. The highest digest, whose
tags the barrier of the connection setup uses, is left out.
"""


def group_tag(call: str, turn: int) -> int:
    """Return the tag of the first chunk of a group's collective.

    Two different calls share a tag in one of 524,287 cases.

    Args:
        call: everything that must be equal on every member.
        turn: as for `base_tag`.
    """
    digest = zlib.crc32(call.encode()) % _DIGESTS
    return (((turn % TAG_PERIOD) << (_KIND_BITS + CHANNEL_BITS)) | digest) << CHUNK_BITS
