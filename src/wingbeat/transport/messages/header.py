"""What stands before every message: one fixed layout, checked before a byte of it is used. Pure.

Packed and read in C++, ``native/src/header.h``.

Little-endian, without gaps, `FIXED` bytes, then ``spans`` times two numbers of 8 bytes::

     0   4  magic         b"wgbt"
     4   1  version       of this layout
     5   1  type          a `Type`
     6   1  dtype         a place in `DTYPES`
     7   1  spans         how many ranges follow, 0 to 255
     8   8  session       a random number that the sender drew when it started
    16   4  sender        its number in the job
    20   4  receiver      the number of whom it is for
    24   8  sequence      place of a message in its flow, from 1
    32   8  arrived       all up to this place of the flow back have arrived at the sender
    40   8  taken         bytes of the flow back that the sender has done with
    48   4  kind          what the message is, as its users number it
    52  16  ids           four numbers of 4 bytes that mean what the kind says
    68   4  length        bytes of the payload
    72   4  checksum      CRC-32 of everything else in the header, ranges included
    76      ranges        start and length of each, in elements of the dtype
"""

from __future__ import annotations

import enum

from wingbeat import _native

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
