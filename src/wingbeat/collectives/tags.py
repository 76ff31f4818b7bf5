"""Message tags, which encode the collective, its bucket, and the chunk.

Messages match only if their tags are equal, so that workers whose collectives differ do not sum
unrelated data. Both ends then wait, and compare their calls after a second
(`wingbeat.collectives.waits`).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from wingbeat.transport.link import BITS_BELOW, CHANNEL_BITS

if TYPE_CHECKING:
    import torch

CHUNK_BITS = 8
CHUNKS_PER_TAG = 1 << CHUNK_BITS
"""Chunks to a peer after which tags repeat. Chunks are sent and received in the same order, and an
executor posts fewer receives.
"""

_KIND_BITS = 11
_SEQUENCE_BITS = BITS_BELOW - CHUNK_BITS - _KIND_BITS

TAG_PERIOD = 1 << _SEQUENCE_BITS
"""Collectives after which tags repeat. A sender is less than half as many ahead of a receiver."""

_OPERATIONS = {"reduce_scatter": 0, "all_gather": 1, "all_reduce": 2}
_CONTROL = 3

UNUSED_TAG = (1 << BITS_BELOW) - 1
"""A tag that no message has, as there is no label of that number."""

LABELS = (
    *("norms", "infinities", "batches left", "intents", "codec trial", "size tuning"),
    *("iteration times", "optimizer state", "gradients", "tensors"),
    *("buffers after backward", "news of buffers", "buffers", "layout of buffers"),
)
"""Exchanges other than buckets; all others share one number."""


def base_tag(what: str, bucket: int, nbytes: int, label: str, turn: int, dtype: torch.dtype) -> int:
    """Return the tag of a collective's first chunk; the other chunks have the following tags.

    Exchanges of different sizes or dtypes mostly differ: a message that is larger than its receive
    buffer would abort the process.

    Args:
        what: the operation; a broadcast includes its root, as ``"broadcast:0"``.
        bucket: number of the bucket; negative for other exchanges.
        nbytes: size of the buffer.
        label: the kind of a small exchange, one of `LABELS`.
        turn: number of earlier collectives of this executor.
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
"""Groups have no channels, so their digests use those bits too, except the highest digest, whose
tags the barrier of the connection setup uses.
"""


def group_tag(call: str, turn: int) -> int:
    """Return the tag of the first chunk of a group's collective.

    ``call`` contains everything that must be equal on all members. Two different calls have the
    same tag in one of 524,287 cases.
    """
    digest = zlib.crc32(call.encode()) % _DIGESTS
    return (((turn % TAG_PERIOD) << (_KIND_BITS + CHANNEL_BITS)) | digest) << CHUNK_BITS
