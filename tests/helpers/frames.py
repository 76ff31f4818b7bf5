"""Frames of connections, written by hand."""

from __future__ import annotations

import struct
import zlib

HEADER = struct.Struct("<IBBHIIQQQQQ")
MAGIC = 0x74424E57


def frame(
    tag: int = 7,
    payload: bytes = b"",
    *,
    magic: int = MAGIC,
    kind: int = 1,
    channel: int = 0,
    length: int | None = None,
    offset: int = 0,
    total: int | None = None,
    consumed: int = 0,
    group: int = 0,
    received: int = 0,
    check: int | None = None,
) -> bytes:
    """A frame as `native/src/net/frame.h` describes it."""
    size = len(payload) if length is None else length
    whole = size if total is None else total
    head = HEADER.pack(magic, kind, 0, channel, tag, size, offset, whole, consumed, group, received)
    return head + struct.pack("<I", zlib.crc32(head) if check is None else check) + payload
