"""Doing it: executes Steps over the transport's links, several chunks in flight."""

from wingbeat.collectives.cast import wire_dtype
from wingbeat.collectives.engine import Collectives, Handle

__all__ = ["Collectives", "Handle", "wire_dtype"]
