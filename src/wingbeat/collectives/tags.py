"""What a message's tag says: which collective of which bucket it belongs to, and which chunk it is.

Two workers whose collectives do not match must not sum what does not belong together: messages
meet only if their tags are equal. Where they are not, both ends wait for a message that never
comes, and after a second compare what they were waiting for (`wingbeat.collectives.waits`).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from wingbeat.transport.link import BITS_BELOW, CHANNEL_BITS

if TYPE_CHECKING:
    import torch

CHUNK_BITS = 8
CHUNKS = 1 << CHUNK_BITS
"""After so many chunks to a peer tags come again. Chunks are sent and awaited in one order, and no
more than an executor announces are under way."""

_KIND_BITS = 11
_TURN_BITS = BITS_BELOW - CHUNK_BITS - _KIND_BITS

TURNS = 1 << _TURN_BITS
"""Collectives after which a tag comes again. A worker is ahead of another, to which it sends, by
no more collectives than an executor has begun or drains: fewer than half of this."""

_OPERATIONS = {"reduce_scatter": 0, "all_gather": 1, "all_reduce": 2}
_CONTROL = 3

NEVER_SENT = (1 << BITS_BELOW) - 1
"""A tag below channels that no message has: no label has that number."""

LABELS = (
    *("norms", "infinities", "batches left", "intents", "codec trial", "size tuning"),
    *("iteration times", "optimizer state", "gradients", "tensors"),
    *("buffers after backward", "news of buffers", "buffers", "layout of buffers"),
)
"""What is exchanged besides buckets; anything else counts as one more."""


def base_tag(what: str, bucket: int, nbytes: int, label: str, turn: int, dtype: torch.dtype) -> int:
    """Return the tag of a collective's first chunk; the others count on from there.

    Args:
        what: the operation; a broadcast's with its root, as ``"broadcast:0"``.
        bucket: number of the bucket; negative for anything that is no bucket.
        nbytes: size of the buffer. A message that is larger than the room for it would end the
            process, so exchanges of one kind and different sizes or dtypes differ too, mostly.
        label: what a small exchange is for, of `LABELS`.
        turn: how many collectives this executor was given before.
        dtype: the buffer's.
    """
    digest = zlib.crc32(f"{what} {nbytes} {dtype}".encode())
    if bucket >= 0 and what in _OPERATIONS:
        kind = (_OPERATIONS[what] << 9) | ((bucket & 127) << 2) | (digest & 3)
    else:
        number = LABELS.index(label) + 1 if label in LABELS else 0
        kind = (_CONTROL << 9) | (number << 5) | (digest & 31)
    return (((turn % TURNS) << _KIND_BITS) | kind) << CHUNK_BITS


_DIGESTS = (1 << (_KIND_BITS + CHANNEL_BITS)) - 1
"""Tags of groups: they have no channels, so that the bits of one are free. The highest digest is
left out, with the tags by which a group's members meet."""


def group_tag(call: str, turn: int) -> int:
    """Return the tag of the first chunk of a group's collective.

    Two that differ in anything have the same tag in one of 524,287 cases.

    Args:
        call: all that must be the same on every member.
        turn: as for `base_tag`.
    """
    digest = zlib.crc32(call.encode()) % _DIGESTS
    return (((turn % TURNS) << (_KIND_BITS + CHANNEL_BITS)) | digest) << CHUNK_BITS
