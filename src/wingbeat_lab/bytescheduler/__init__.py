"""ByteScheduler: partitions of gradients, all-reduced by priority; a baseline of the DeAR paper."""

from wingbeat_lab.bytescheduler.options import Partitioned

__all__ = ["Partitioned"]
