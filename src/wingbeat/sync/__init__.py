"""When, relative to forward and backward: hooks on a model and its optimizer."""

from wingbeat.sync.entry import distribute, flush, join, no_sync, release

__all__ = ["distribute", "flush", "join", "no_sync", "release"]
