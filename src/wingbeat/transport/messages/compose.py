"""From what a user posts to a message that can be sent, or a line that says why not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.transport.messages.carrier import Buffer
from wingbeat.transport.messages.flow import Posted
from wingbeat.transport.messages.header import DTYPES, MOST_SPANS, Type

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
