"""When what happens, relative to forward and backward: state machines without torch or a clock."""

from __future__ import annotations

from wingbeat.schedules.dear import Dear
from wingbeat.schedules.events import Schedule
from wingbeat.schedules.wfbp import Wfbp

__all__ = ["BY_NAME", "Dear", "Wfbp"]

BY_NAME: dict[str, type[Schedule]] = {"wfbp": Wfbp, "dear": Dear}
"""Each is made once for a run."""
