"""Recording of what a worker does and when: an event stream, a Perfetto trace, a figure.

``events`` records, ``trace`` saves, merges and exports, ``timeline`` draws, ``exposed`` measures
exposed communication. Nothing here imports torch; matplotlib is imported only to draw.
"""

from __future__ import annotations

from wingbeat.observe.events import Event, Stream, stream

__all__ = ["Event", "Stream", "stream"]
