"""Doing it: executes hops over the transport's links, several chunks in flight."""

from wingbeat.collectives.cast import wire_dtype
from wingbeat.collectives.encoded import Gathered
from wingbeat.collectives.engine import Collectives
from wingbeat.collectives.handle import Handle
from wingbeat.collectives.packing import Encoded, WireFormat
from wingbeat.collectives.rows import Rows

__all__ = ["Collectives", "Encoded", "Gathered", "Handle", "Rows", "WireFormat", "wire_dtype"]
