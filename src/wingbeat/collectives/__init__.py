"""Collectives: programs of hops, executed over the links with several chunks in flight."""

from wingbeat.collectives.encoded import Gathered
from wingbeat.collectives.engine import Collectives, Rows
from wingbeat.collectives.handle import Handle
from wingbeat.collectives.packing import (
    Encoded,
    WireFormat,
    dtype_of,
    encoded_of,
    factors_of,
    wire_dtype,
)

__all__ = [
    "Collectives", "Encoded", "Gathered", "Handle", "Rows", "WireFormat", "dtype_of", "encoded_of",
    "factors_of", "wire_dtype",
]  # fmt: skip
