"""What a message's tag says: which collective of which bucket it belongs to, and which chunk it is.

Two workers whose collectives do not match must not sum what does not belong together: messages
meet only if their tags are equal. Where they are not, both ends wait for a message that never
comes, until their deadline, and say what they were waiting for.
"""

from __future__ import annotations

import zlib

from wingbeat.transport.channel import BITS_BELOW

CHUNK_BITS = 12
CHUNKS = 1 << CHUNK_BITS
"""After so many chunks to a peer tags come again. Chunks are sent and awaited in one order, and no
more than an executor announces are under way."""

_KIND_BITS = 7
_TURN_BITS = BITS_BELOW - CHUNK_BITS - _KIND_BITS

TURNS = 1 << _TURN_BITS
"""Collectives after which a tag comes again. A worker is ahead of another, to which it sends, by
no more collectives than an executor has begun or drains: fewer than half of this."""

_OPERATIONS = {"reduce_scatter": 0, "all_gather": 1, "all_reduce": 2}
_CONTROL = 3


def base_tag(what: str, bucket: int, nbytes: int, label: str, turn: int) -> int:
    """Return the tag of a collective's first chunk; the others count on from there.

    Args:
        what: the operation; a broadcast's with its root, as ``"broadcast:0"``.
        bucket: number of the bucket; negative for anything that is no bucket.
        nbytes: size of the buffer. Small exchanges of different size are taken for each other in
            one of 32 cases only: a message that is larger than the room for it would end the
            process.
        label: what a small exchange is for.
        turn: how many collectives this executor was given before.
    """
    if bucket >= 0 and what in _OPERATIONS:
        kind = (_OPERATIONS[what] << 5) | (bucket & 31)
    else:
        kind = (_CONTROL << 5) | (zlib.crc32(f"{what} {nbytes} {label}".encode()) & 31)
    return (((turn % TURNS) << _KIND_BITS) | kind) << CHUNK_BITS
