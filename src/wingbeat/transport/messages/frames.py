"""Frames: the wire header of a message, its checks, and how a message is composed."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.transport.messages.carrier import Buffer

NEVER = math.inf

Flow = _native.Flow
Posted = _native.Posted

MOST_UNDER_WAY = _native.MOST_UNDER_WAY
"""Messages of one flow that are handed to its connection and have not arrived."""


DTYPES = ("", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""What a payload consists of; empty where nothing is said of it."""

MOST_SPANS = 255
FIXED = 76
"""Bytes of a header without ranges."""
LARGEST = FIXED + 16 * MOST_SPANS
"""Bytes of a header with as many ranges as there may be."""


class Type(enum.IntEnum):
    """What a frame does in its flow."""

    HELLO = 1
    """Here I am, and this is what has arrived of yours; please answer."""
    WELCOME = 2
    """The answer to HELLO."""
    DATA = 3
    """A message of the users'."""
    ACKNOWLEDGE = 4
    """What has arrived and what was taken, and nothing else."""
    MISSING = 5
    """As ACKNOWLEDGE; what comes after ``arrived`` was lost and is to be sent again."""
    ASK = 6
    """Has everything up to ``sequence`` arrived?"""
    LEAVE = 7
    """The last message of the flow: the sender has ended in an orderly way."""


Malformed = _native.Malformed
"""A frame that no job of ours has sent; ``str`` of it is one of `REASONS`, or of a flow's."""

REASONS = ("size", "magic", "version", "checksum", "type", "dtype", "length")
"""Why a header is refused, in the order in which it is looked at."""

Header = _native.Header
"""The fields of the layout above; ``spans`` are (start, length) pairs. `pack` makes the bytes."""

unpack = _native.unpack
"""Read and check the header that some bytes begin with; raises `Malformed`."""


# Looked up once: an enum's members take longer to find than a number.
_DATA, _LEAVE = int(Type.DATA), int(Type.LEAVE)
_DTYPES = {name: number for number, name in enumerate(DTYPES)}

NO_IDS = (0, 0, 0, 0)


def compose(
    kind: int,
    payload: Any,
    ids: Sequence[int],
    dtype: str,
    spans: Iterable[tuple[int, int]],
    *,
    most: int,
) -> Posted:
    """Check the values that `Mailbox.post` takes, and make a message of them.

    Args:
        kind: 0 to 2**32 - 1.
        payload: anything with a contiguous buffer.
        ids: four numbers from 0 to 2**32 - 1.
        dtype: of `DTYPES`.
        spans: (start, length) pairs of numbers from 0 to 2**64 - 1, up to 255.
        most: bytes that a payload may have.

    Raises:
        UsageError: a value that cannot be sent.
    """
    view = _view(payload, most)
    number = _DTYPES.get(dtype)
    if number is None:
        raise UsageError(f"dtype={dtype!r}; allowed: {', '.join(DTYPES[1:])} or ''")
    ranges = tuple(spans)
    if len(ranges) > MOST_SPANS:
        raise UsageError(f"{len(ranges)} spans; allowed are up to {MOST_SPANS}")
    try:
        return Posted(_DATA, kind, ids, number, ranges, view)
    except (TypeError, OverflowError):
        raise UsageError(
            f"kind={kind!r}, ids={ids!r}, spans={ranges!r:.80}: allowed are a kind and four ids "
            "from 0 to 2**32 - 1, and (start, length) pairs of numbers from 0 to 2**64 - 1"
        ) from None


def farewell() -> Posted:
    """Return the last message of a flow."""
    return Posted(_LEAVE, 0, NO_IDS, 0, (), b"")


def _view(payload: Any, most: int) -> Buffer:
    if type(payload) is bytes and len(payload) <= most:
        return payload
    try:
        view = memoryview(payload)
        # A view of nothing cannot be cast, and an array of no elements has no bytes.
        view = view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, BufferError) as err:
        raise UsageError(
            f"payload of type {type(payload).__name__}: {err}; allowed is what has a contiguous "
            "buffer: bytes, a NumPy array, tensor.numpy()"
        ) from None
    if len(view) > most:
        raise UsageError(f"a payload of {len(view)} bytes; allowed are {most}: post it in pieces")
    return view
