"""Seeing what a worker does and when: one event stream, a Perfetto trace, a picture.

``events`` records, ``trace`` saves, merges and exports, ``timeline`` draws and measures what was
exposed. Nothing here imports torch, and matplotlib is loaded only to draw.
"""

from __future__ import annotations

from wingbeat.observe.events import Event, Stream, stream

__all__ = ["Event", "Stream", "stream"]
