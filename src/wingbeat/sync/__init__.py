"""When, relative to forward and backward: hooks on a model and its optimizer."""

from wingbeat.sync.entry import distribute, release

__all__ = ["distribute", "release"]
