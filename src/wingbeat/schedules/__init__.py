"""When what happens, relative to forward and backward: state machines without torch or a clock."""

from __future__ import annotations

from wingbeat.schedules.dear import Dear
from wingbeat.schedules.sharded import ShardedDear
from wingbeat.schedules.wfbp import Wfbp

__all__ = ["Dear", "ShardedDear", "Wfbp"]
