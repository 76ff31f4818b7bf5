"""Schedules: state machines that order communication and updates, without torch or a clock."""

from __future__ import annotations

from wingbeat.schedules.dear import Dear, ShardedDear
from wingbeat.schedules.events import Schedule
from wingbeat.schedules.local import Local
from wingbeat.schedules.served import Served, ServedAtStart, ServedUpdates, ServedUpdatesAtStart
from wingbeat.schedules.wfbp import Stale, Wfbp

__all__ = [
    "BY_NAME", "Dear", "Local", "Served", "ServedAtStart", "ServedUpdates", "ServedUpdatesAtStart",
    "ShardedDear", "Stale", "Wfbp",
]  # fmt: skip

BY_NAME: dict[str, type[Schedule]] = {
    "wfbp": Wfbp,
    "dear": Dear,
    "sharded": ShardedDear,
    "served": Served,
    "served_at_start": ServedAtStart,
    "served_updates": ServedUpdates,
    "served_updates_at_start": ServedUpdatesAtStart,
    "stale": Stale,
    "local": Local,
}
"""Factories by name; each run makes one instance."""
